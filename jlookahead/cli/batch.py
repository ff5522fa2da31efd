"""`jlookahead batch`: the prompts of a file, in one process or on a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

import jlookahead
from jlookahead import ray_batch
from jlookahead.batching import answer_of, generate_many, with_capacity
from jlookahead.call import limits_of, prepare
from jlookahead.checkpoints import LoadedModel, loading
from jlookahead.checks import check_int
from jlookahead.cli import options
from jlookahead.cli.journal import RESULTS, Journal, locked_folder, open_journal
from jlookahead.cli.mesh_option import make_mesh, parse_mesh
from jlookahead.cli.prompt_options import BatchPrompt, encode_prompt, read_batch
from jlookahead.cli.strategies import LOOKAHEAD, make_strategy, measured
from jlookahead.config import Config
from jlookahead.model import LlamaModel
from jlookahead.sharding import mesh_of, num_row_groups
from jlookahead.strategy import Strategy

# Options that an answer does not depend on.
_HOW_TO_RUN = ("input_file", "output", "batch_size", "mesh", "on_ray", "workers", "as_json")


def batch(
    ctx: typer.Context,
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            help='JSON lines with "prompt" (a text), "prompt_ids" or "messages", and "id" if '
            "wanted; - is standard input.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(help=f"Folder for {RESULTS}; that of a killed job is gone on with.")
    ],
    model: options.Model = None,
    dtype: options.Dtype = "float32",
    mesh: options.Mesh = None,
    raw: options.Raw = False,
    strategy: options.StrategyName = LOOKAHEAD,
    window: options.Window = None,
    ngram: options.Ngram = None,
    candidates: options.Candidates = None,
    max_ngram: options.MaxNgram = None,
    num_draft_tokens: options.NumDraftTokens = None,
    block: options.Block = None,
    rows: options.Rows = None,
    max_new_tokens: options.MaxNewTokens = 128,
    min_new_tokens: options.MinNewTokens = 0,
    stop: options.Stop = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    verify: options.Verify = "coupled",
    repetition_penalty: options.Repetition = 1.0,
    presence_penalty: options.Presence = 0.0,
    frequency_penalty: options.Frequency = 0.0,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together by a worker.")] = 8,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Run on a Ray cluster; see RAY_ADDRESS of Ray.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="With --ray: models in the cluster.",
            show_default="one for each GPU, else for each machine",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer every prompt of a file, each as generate does; go on where a killed job ended."""
    drafts = make_strategy(strategy, ctx.params)
    fields = options.config_fields(ctx.params)
    check_int("batch_size", batch_size, 1)
    if workers is not None:
        check_int("workers", workers, 1)
        if not on_ray:
            raise ValueError("workers: is an option of --ray")
    if on_ray and mesh is not None:
        raise ValueError(f"mesh: got {mesh} with --ray, allowed is one or the other")
    axes = parse_mesh(mesh)
    prompts = read_batch(input_file)
    cluster = ray_batch.connected() if on_ray else contextlib.nullcontext()
    with locked_folder(output), cluster:
        with Console(stderr=True).status("Loading") as status:
            if on_ray:
                jax.config.update("jax_platforms", "cpu")  # the devices are the workers'
                lm = loading.load_without_params(model, dtype=dtype)
            else:
                lm = options.load_showing(model, dtype, make_mesh(axes), status.update)
            ids = _encode(prompts, lm, lm.make_config(strategy=drafts, **fields), raw)
            if not on_ray:
                status.update("Measuring this device")
                drafts = measured(drafts, lm)
        began = time.perf_counter()
        with open_journal(output, _describe(ctx.params, prompts, ids)) as journal:
            num_found = len(journal)
            missing = {i: row for i, row in enumerate(ids) if i not in journal}
            if on_ray:
                answers = _answer_on_ray(missing, lm, drafts, fields, ctx.params)
            else:
                cfg = lm.make_config(strategy=drafts, **fields)
                answers = _answer_here(missing, lm, cfg, batch_size)
            _keep(answers, journal, prompts)
            journal.finish()
    figures = {
        "model": model or "bundled",
        "strategy": strategy,
        "results": str(output / RESULTS),
        "num_prompts": len(prompts),
        "num_found": num_found,
        "num_tokens": journal.num_tokens,
        "num_rounds": journal.num_rounds,
        "tokens_per_round": journal.num_tokens / max(1, journal.num_rounds),
        "seconds": time.perf_counter() - began,
    }
    print(json.dumps(figures) if as_json else _summary(figures))


def _encode(
    prompts: Sequence[BatchPrompt], lm: LoadedModel, cfg: Config, raw: bool
) -> list[list[int]]:
    """The ids of every prompt; what is wrong with one names its line."""
    rows = []
    for each in prompts:
        try:
            rows.append(encode_prompt(each.prompt, lm, raw))
            limits_of([len(rows[-1])], cfg, lm.config.max_position_embeddings)
        except ValueError as error:
            raise ValueError(f"{each.where}: {error}") from None
    if rows:  # what is wrong with all of them
        shown = rows[:1] * num_row_groups(mesh_of(lm.params))
        prepare(lm.params, shown, cfg, lm.tokenizer, model=LlamaModel(lm.config))
    return rows


def _describe(
    params: Mapping[str, Any], prompts: Sequence[BatchPrompt], ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What decides the answers."""
    named = [[each.id, row] for each, row in zip(prompts, ids, strict=True)]
    return {
        "jlookahead": jlookahead.__version__,
        "input": hashlib.sha256(json.dumps(named).encode()).hexdigest(),
        "checkpoint": loading.fingerprint(loading.locate(params["model"])),
        **{name: value for name, value in params.items() if name not in _HOW_TO_RUN},
    }


def _answer_here(
    missing: Mapping[int, list[int]], lm: LoadedModel, cfg: Config, batch_size: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    indices, rows = list(missing), list(missing.values())
    step = num_row_groups(mesh_of(lm.params))
    enough = max(step, -(-len(rows) // step) * step)
    results = generate_many(
        lm.params,
        rows,
        cfg,
        batch_size=min(batch_size, enough),
        tokenizer=lm.tokenizer,
        row_ids=indices,
    )
    return ((indices[i], answer_of(result)) for i, result in results)


def _answer_on_ray(
    missing: Mapping[int, list[int]],
    lm: LoadedModel,
    drafts: Strategy,
    fields: Mapping[str, Any],
    params: Mapping[str, Any],
) -> Iterator[tuple[int, dict[str, Any]]]:
    if not missing:
        return iter(())
    cfg = lm.make_config(strategy=drafts, **fields)
    lengths = [len(row) for row in missing.values()]
    capacity = with_capacity(cfg, lengths, lm.config.max_position_embeddings).cache_len
    model = params["model"]
    if model is not None and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())  # workers run in other directories
    return ray_batch.generate_on_ray(
        list(missing.values()),
        list(missing),
        functools.partial(jlookahead.load, model, dtype=params["dtype"]),
        functools.partial(_make_config, drafts, {**fields, "cache_len": capacity}),
        batch_size=params["batch_size"],
        num_workers=params["workers"],
    )


def _make_config(drafts: Strategy, fields: Mapping[str, Any], lm: LoadedModel) -> Config:
    """Runs on a worker, whose device is the one to measure."""
    return lm.make_config(strategy=measured(drafts, lm), **fields)


def _keep(
    answers: Iterator[tuple[int, dict[str, Any]]], journal: Journal, prompts: Sequence[BatchPrompt]
) -> None:
    """Takes the answers into the journal as they come, and shows how many there are."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        "Answering", *columns, console=console, transient=True, disable=not console.is_interactive
    ) as progress:
        task = progress.add_task("", total=len(prompts), completed=len(journal))
        for index, answer in answers:
            journal.add(index, {"id": prompts[index].id, **answer})
            progress.advance(task)


def _summary(figures: Mapping[str, Any]) -> str:
    """The figures of a job in one line."""
    found = f", {figures['num_found']} of them found there" if figures["num_found"] else ""
    return (
        f"{figures['num_prompts']} answers in {figures['results']}{found}: "
        f"{figures['num_tokens']} new tokens in {figures['num_rounds']} rounds, "
        f"{figures['tokens_per_round']:.2f} tokens per round, {figures['seconds']:.1f} s"
    )
