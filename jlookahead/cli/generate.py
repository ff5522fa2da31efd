"""`jlookahead generate`."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jlookahead.auditing import Audit, audit, check_sampling
from jlookahead.cli import display, distributed, options, runs
from jlookahead.cli.mesh_option import make_mesh, parse_mesh
from jlookahead.cli.prompt_options import encode_prompt, read_prompt
from jlookahead.cli.runs import Run
from jlookahead.cli.strategies import LOOKAHEAD, PLAIN, make_strategy, measured


def generate(
    ctx: typer.Context,
    model: options.Model = None,
    dtype: options.Dtype = "float32",
    mesh: options.Mesh = None,
    coordinator: distributed.Coordinator = None,
    num_processes: distributed.NumProcesses = None,
    process_id: distributed.ProcessId = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text.", show_default="a few lines of Python")
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="A UTF-8 file, taken as it is; - is standard input.")
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids separated by commas: 1,2,3.")
    ] = None,
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
    publish: options.Publish = "broadcast",
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Decode plainly too and check that the ids are identical; exit status 1 if not.",
            show_default="compare, but not with --json, --strategy autoregressive or residual",
        ),
    ] = None,
    with_audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Check every token by teacher forcing; exit status 1 if one differs."
        ),
    ] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: log-probabilities of the tokens.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate text; without options, show plain decoding and lookahead side by side."""
    known = {
        PLAIN: make_strategy(PLAIN, {}),
        strategy: make_strategy(strategy, ctx.params),
    }
    fields = options.config_fields(ctx.params)
    if with_audit:
        check_sampling(fields["sampling"])
    is_residual = temperature > 0 and verify == "residual"
    if compare is None:
        compare = strategy != PLAIN and not as_json and not is_residual
    elif compare and strategy == PLAIN:
        raise ValueError("compare: got strategy autoregressive, which is plain decoding itself")
    elif compare and is_residual:
        raise ValueError("compare: got verify residual, whose text is not plain decoding's")
    if logprobs and not as_json:
        raise ValueError("logprobs: is an option of --json")
    if raw and prompt_ids is not None:
        raise ValueError("raw: is an option of texts, got prompt_ids, which are taken as they are")
    text_or_ids = read_prompt(prompt, prompt_file, prompt_ids)
    axes = parse_mesh(mesh)
    distributed.connect(coordinator, num_processes, process_id)

    # A status on a stream that is no terminal shows nothing.
    with distributed.messages().status("Loading") as status:
        lm = options.load_showing(model, dtype, make_mesh(axes), status.update)
        ids = encode_prompt(text_or_ids, lm, raw)
        status.update("Measuring this device")
        known[strategy] = measured(known[strategy], lm)
        configs = {
            name: lm.make_config(strategy=known[name], logprobs=logprobs, publish=publish, **fields)
            for name in ([PLAIN, strategy] if compare else [strategy])
        }
        distributed.require_same((ids, configs), lm.params)
        compile_seconds = {}
        for name, cfg in configs.items():
            status.update(f"Compiling {display.TITLES[name]}")
            compile_seconds[name] = runs.compile_programs(lm, ids, cfg)

    def run(name: str, show: display.Show) -> Run:
        return runs.measure(name, lm, ids, configs[name], compile_seconds[name], show)

    def check(result: Run) -> Audit | None:
        if not with_audit:
            return None
        return audit(lm.params, ids, result.token_ids, configs[strategy])

    if as_json:
        results = [run(name, lambda token: None) for name in configs]
        audited = check(results[-1])
        about = {"model": model or "bundled", "prompt_tokens": len(ids)}
        output = about | _to_json(results, has_text=lm.tokenizer is not None)
        if audited is not None:
            output["audit"] = _audit_fields(audited)
        print(json.dumps(output))
    else:
        if compare:
            results = _show_side_by_side(run, list(configs), text_or_ids)
        else:
            results = [_show_text(run, strategy)]
        audited = check(results[-1])
        if audited is not None:
            console = Console(highlight=False) if compare else distributed.messages()
            console.print(_describe_audit(audited), soft_wrap=True)
    is_clean = audited is None or audited.first_divergence is None
    if results[0].token_ids != results[-1].token_ids or not is_clean:
        raise typer.Exit(1)


def _audit_fields(audited: Audit) -> dict[str, Any]:
    # JSON has no infinity, the margin where only one token is allowed.
    margins = [margin for margin in audited.margins if math.isfinite(margin)]
    return {
        "num_tokens": len(audited.tokens),
        "num_divergent": audited.is_choice.count(False),
        "smallest_margin": min(margins, default=None),
        "first_divergence": audited.first_divergence,
    }


def _describe_audit(audited: Audit) -> str:
    found = _audit_fields(audited)
    if found["first_divergence"] is None:
        margin = found["smallest_margin"]
        smallest = "" if margin is None else f", smallest margin {margin:.3g}"
        return f"audit: clean, all {found['num_tokens']} ids are plain decoding's{smallest}"
    first = found["first_divergence"]
    return (
        f"audit: {found['num_divergent']} of {found['num_tokens']} ids DIVERGE, the first at new "
        f"token {first}, with a margin of {audited.margins[first]:.3g}"
    )


def _to_json(results: Sequence[Run], has_text: bool) -> dict[str, Any]:
    fields = results[-1].as_dict(has_text)
    if len(results) == 1:
        return fields
    plain, chosen = results
    identical = plain.token_ids == chosen.token_ids
    return fields | {"plain": plain.as_dict(has_text), "identical": identical}


def _show_side_by_side(
    run: Callable[[str, display.Show], Run], names: Sequence[str], prompt: str | list[int]
) -> list[Run]:
    console = Console(highlight=False)
    console.print(Text(str(prompt), "dim"))
    columns = display.Columns(console, names)
    with columns.live() if console.is_terminal else contextlib.nullcontext():
        results = [run(name, functools.partial(columns.show, name)) for name in names]
    columns.print()
    if display.is_coloured(console):
        legend = "Tokens in this colour came in bundles (accepted drafts)."
        console.print(Text(legend, display.ACCEPTED))
    console.print(display.figures(results))
    console.print(display.identity(*results))
    plain, drafted = results
    if drafted.num_rounds < plain.num_rounds and drafted.seconds > plain.seconds:
        remark = "Fewer rounds took longer: each computes more rows, and this device feels it."
        console.print(Text(remark, "dim"))
    return results


def _show_text(run: Callable[[str, display.Show], Run], name: str) -> Run:
    """The text alone on stdout, fit for a pipe; its figures on stderr."""
    result = run(name, display.writer())
    print()
    distributed.messages().print(display.summary(result), soft_wrap=True)
    return result
