"""`jlookahead tune`: what a round costs on this device, and which strategies that favours."""

from __future__ import annotations

import json
from typing import Annotated

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jlookahead import tuning
from jlookahead.cli import options
from jlookahead.lookahead import Lookahead
from jlookahead.model import LlamaModel
from jlookahead.recycling import Recycling
from jlookahead.strategy import Strategy

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_BAR = 40  # characters of the dearest round
# Tokens per round on SmolLM2, pooled over 62 prompts; benchmarks/results has them by category.
_TOKENS_PER_ROUND: dict[Strategy, float] = {
    Lookahead(7, 5, 7): 2.26,
    Recycling(16): 2.25,
    Recycling(32): 2.58,
    Recycling(56): 2.83,
}


def tune(
    model: Annotated[
        str | None,
        typer.Option(help="See jlookahead generate.", show_default="the bundled model"),
    ] = None,
    dtype: options.Dtype = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what a round of several rows costs here, and say what that favours.

    A round of many rows pays where it emits more tokens than it costs rounds of one row. What
    --strategy auto goes by is measured anew.
    """
    with Console(stderr=True).status("Loading") as status:
        lm = options.load_showing(model, dtype, status.update)
        status.update("Measuring this device")
        network = LlamaModel(lm.config)
        costs = tuning.measure_costs(network, lm.params, _ROWS)
        auto = tuning.keep_costs(network, costs)
    rows, relative = np.array(costs).T
    expected = {
        strategy: tokens / float(np.interp(strategy.layout.num_rows, rows, relative))
        for strategy, tokens in _TOKENS_PER_ROUND.items()
    }
    best = max(expected, key=lambda strategy: expected[strategy])
    if as_json:
        print(
            json.dumps(
                {
                    "model": model or "bundled",
                    "costs": costs,
                    "auto_costs": auto.costs,
                    "expected_speed": {str(s): round(v, 3) for s, v in expected.items()},
                    "recommended": str(best) if expected[best] > 1 else str(auto),
                }
            )
        )
        return
    console = Console(highlight=False)
    table = Table("rows", "cost", "", box=box.SIMPLE)
    for num, cost in costs:
        table.add_row(str(num), f"{cost:.2f}", "█" * round(_BAR * cost / costs[-1][1]))
    console.print(table)
    console.print(
        "Expected speed, with the tokens per round that SmolLM2 has; plain decoding is 1:"
    )
    for strategy, speed in expected.items():
        console.print(f"  {strategy}: {speed:.2f}")
    if expected[best] > 1:
        console.print(f"Recommended: {best}, or --strategy auto, which is never much slower.")
    else:
        console.print("Recommended: --strategy auto; windows and trees cost more than they save.")
