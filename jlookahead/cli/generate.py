"""`jlookahead generate`."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jlookahead.checkpoints.loading import load_with_progress
from jlookahead.cli import display, runs
from jlookahead.cli.prompt_options import encode_prompt, read_prompt
from jlookahead.cli.runs import Run
from jlookahead.config import Sampling
from jlookahead.lookahead import Lookahead
from jlookahead.prompt_lookup import PromptLookup
from jlookahead.strategy import Autoregressive, Strategy

PLAIN, LOOKAHEAD, LOOKUP = "autoregressive", "lookahead", "prompt-lookup"


def generate(
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face directory or hub id, .gguf file, or converted checkpoint.",
            show_default="the bundled model",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    prompt: Annotated[
        str | None, typer.Option(help="Text.", show_default="a few lines of Python")
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="A UTF-8 file, taken as it is; - is standard input.")
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids separated by commas: 1,2,3.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not wrap the text in the model's chat template.")
    ] = False,
    strategy: Annotated[
        str, typer.Option(help="lookahead, prompt-lookup or autoregressive.")
    ] = LOOKAHEAD,
    window: Annotated[int, typer.Option(help="Lookahead: columns of the window.")] = 15,
    ngram: Annotated[int, typer.Option(help="Lookahead: n-gram size.")] = 5,
    candidates: Annotated[int, typer.Option(help="Lookahead: n-grams verified per round.")] = 15,
    max_new_tokens: Annotated[int, typer.Option(help="Budget of new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest one.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Decode plainly too and check that the ids are identical; exit status 1 if not.",
            show_default="compare, but not with --json or --strategy autoregressive",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate text; without options, show plain decoding and lookahead side by side."""
    if compare is None:
        compare = strategy != PLAIN and not as_json
    elif compare and strategy == PLAIN:
        raise ValueError("compare: got strategy autoregressive, which is plain decoding itself")
    text_or_ids = read_prompt(prompt, prompt_file, prompt_ids)

    known: dict[str, Strategy] = {
        LOOKAHEAD: Lookahead(window=window, ngram=ngram, candidates=candidates),
        LOOKUP: PromptLookup(),
        PLAIN: Autoregressive(),
    }
    if strategy not in known:
        raise ValueError(f"strategy: got {strategy!r}, allowed are {', '.join(known)}")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)

    # A status on a stream that is no terminal shows nothing.
    with Console(stderr=True).status("Loading") as status:

        def progress(names: Sequence[str]) -> Iterator[str]:
            for i, name in enumerate(names):
                status.update(f"Loading tensor {i + 1} of {len(names)}")
                yield name

        lm = load_with_progress(model, dtype=dtype, progress=progress)
        ids = encode_prompt(text_or_ids, lm, raw)
        configs = {
            name: lm.make_config(
                strategy=known[name], sampling=sampling, max_new_tokens=max_new_tokens
            )
            for name in ([PLAIN, strategy] if compare else [strategy])
        }
        compile_seconds = {}
        for name, cfg in configs.items():
            status.update(f"Compiling {display.TITLES[name]}")
            compile_seconds[name] = runs.compile_programs(lm, ids, cfg)

    def run(name: str, show: display.Show) -> Run:
        return runs.measure(name, lm, ids, configs[name], compile_seconds[name], show)

    if as_json:
        results = [run(name, lambda token: None) for name in configs]
        about = {"model": model or "bundled", "prompt_tokens": len(ids)}
        print(json.dumps(about | _to_json(results, has_text=lm.tokenizer is not None)))
    elif compare:
        results = _show_side_by_side(run, list(configs), text_or_ids)
    else:
        results = [_show_text(run, strategy)]
    if results[0].token_ids != results[-1].token_ids:
        raise typer.Exit(1)


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
    Console(stderr=True, highlight=False).print(display.summary(result), soft_wrap=True)
    return result
