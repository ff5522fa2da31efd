"""`jlookahead bench`: what the strategies are worth with this model, these prompts, this device."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jlookahead.call import prepare
from jlookahead.cli import distributed, options
from jlookahead.cli.display import TITLES
from jlookahead.cli.mesh_option import make_mesh, parse_mesh
from jlookahead.cli.prompt_options import DEFAULT_PROMPT, encode_prompt, read_prompts
from jlookahead.cli.strategies import AUTO, PLAIN, make_strategy, measured
from jlookahead.measuring import (
    BASELINE,
    PHASES,
    Comparison,
    accepted_lengths,
    compare_speed,
    histogram,
    time_by_phase,
)
from jlookahead.strategy import Autoregressive


def bench(
    model: options.Model = None,
    dtype: options.Dtype = "float32",
    mesh: options.Mesh = None,
    coordinator: distributed.Coordinator = None,
    num_processes: distributed.NumProcesses = None,
    process_id: distributed.ProcessId = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines with "prompt" (a text), "turns" (texts; the first counts) or "ids"; '
            "- is standard input.",
            show_default="a few lines of Python",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="One to measure; may be repeated.",
            show_default="auto, prompt-lookup, lookahead and recycling",
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    publish: options.Publish = "broadcast",
    repeats: Annotated[int, typer.Option(help="Turns of every strategy; medians count.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure strategies against plain decoding, side by side; exit status 1 if an id differs.

    Greedy. Other programs that run meanwhile spoil the figures.
    """
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, allowed are 1 and more")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, allowed are 1 and more")
    names = strategy or [AUTO, "prompt-lookup", "lookahead", "recycling"]
    chosen = {name: make_strategy(name, {}) for name in names if name != PLAIN}
    texts = read_prompts(prompts) if prompts is not None else [DEFAULT_PROMPT]
    axes = parse_mesh(mesh)
    distributed.connect(coordinator, num_processes, process_id)
    with distributed.messages().status("Loading") as status:
        lm = options.load_showing(model, dtype, make_mesh(axes), status.update)
        cfg = lm.make_config(
            max_new_tokens=max_new_tokens, strategy=Autoregressive(), publish=publish
        )
        rows = []
        for i, text in enumerate(texts):
            try:
                rows.append(encode_prompt(text, lm, raw=False))
                prepare(lm.params, rows[-1], cfg)
            except ValueError as error:
                raise ValueError(f"prompt {i + 1}: {error}") from None
        status.update("Measuring this device")
        chosen = {name: measured(each, lm) for name, each in chosen.items()}
        distributed.require_same((rows, chosen, cfg, repeats), lm.params)
        compared = []
        for i, row in enumerate(rows):
            status.update(f"Prompt {i + 1} of {len(rows)}")
            compared.append(
                compare_speed(
                    lm,
                    row,
                    chosen,
                    max_new_tokens=max_new_tokens,
                    repeats=repeats,
                    publish=publish,
                )
            )
        status.update("Profiling")
        phases = {
            name: time_by_phase(lm, rows[0], each, max_new_tokens=max_new_tokens, publish=publish)
            for name, each in {PLAIN: Autoregressive(), **chosen}.items()
        }
    figures = {name: _figures(name, compared, phases[name]) for name in chosen}
    plain = {"tokens_per_second": _tokens_per_second(BASELINE, compared), "phases": phases[PLAIN]}
    if as_json:
        about = {"model": model or "bundled", "num_prompts": len(rows), "repeats": repeats}
        print(json.dumps(about | {"plain": plain, "strategies": figures}))
    else:
        _show(Console(highlight=False), plain, figures)
    if not all(each["identical"] for each in figures.values()):
        raise typer.Exit(1)


def _figures(
    name: str, compared: list[Comparison], phases: dict[str, float] | None
) -> dict[str, Any]:
    speedups = [each.speedups[name] for each in compared]
    results = [each.results[name] for each in compared]
    lengths = [n for result in results for n in accepted_lengths(result.sources)]
    return {
        "speedup": {"mean": statistics.mean(speedups), "least": min(speedups), "all": speedups},
        "tokens_per_second": _tokens_per_second(name, compared),
        "tokens_per_round": sum(len(r.tokens) for r in results)
        / max(1, sum(r.num_rounds for r in results)),
        "identical": all(each.identical[name] for each in compared),
        "accepted_lengths": histogram(lengths),
        "phases": phases,
    }


def _tokens_per_second(name: str, compared: list[Comparison]) -> float:
    tokens = sum(len(each.results[name].tokens) for each in compared)
    return tokens / sum(each.seconds[name] for each in compared)


def _show(console: Console, plain: dict[str, Any], figures: dict[str, Any]) -> None:
    titles = [TITLES[name] for name in figures]
    table = Table(box=box.SIMPLE)
    table.add_column(no_wrap=True)
    for title in (TITLES[PLAIN], *titles):
        table.add_column(title, justify="right")
    every = list(figures.values())

    def add(label: str, of_plain: str, values: list[str]) -> None:
        table.add_row(label, of_plain, *values)

    add("speed, mean", "1", [f"{f['speedup']['mean']:.2f}" for f in every])
    add("speed, least", "1", [f"{f['speedup']['least']:.2f}" for f in every])
    add(
        "tokens/second",
        f"{plain['tokens_per_second']:.1f}",
        [f"{f['tokens_per_second']:.1f}" for f in every],
    )
    add("tokens/round", "1", [f"{f['tokens_per_round']:.2f}" for f in every])
    add("identical", "", ["yes" if f["identical"] else "NO" for f in every])
    table.add_section()
    for phase in (*PHASES, "other") if plain["phases"] else ():
        shares = [each["phases"][phase] for each in (plain, *every)]
        add(f"% {phase}", f"{100 * shares[0]:.1f}", [f"{100 * s:.1f}" for s in shares[1:]])
    table.add_section()
    for label in every[0]["accepted_lengths"] if every else ():
        shares = [each["accepted_lengths"][label] for each in every]
        add(f"% accept {label}", "", [f"{100 * share:.0f}" for share in shares])
    console.print(table)
    console.print("Time by phase of a round, and rounds by the number of drafts they accept.")
