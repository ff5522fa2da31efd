"""`jlookahead tune`: what a round costs on this device, and which strategies that favours."""

from __future__ import annotations

import json
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from jlookahead import acceptance, tuning
from jlookahead.acceptance import LONGEST_MATCH, RIGHT_AT_FIRST
from jlookahead.auto import Auto
from jlookahead.cli import distributed, options
from jlookahead.cli.mesh_option import make_mesh, parse_mesh
from jlookahead.lookahead import Lookahead
from jlookahead.model import LlamaModel
from jlookahead.strategy import Strategy

_ROWS = (1, 2, 4, 8, 16, 32, 56, 120)
_BAR = 40  # characters of the dearest round
# How often the longest match of the last tokens had 0, 1, 2, ... tokens, at any of the tokens that
# SmolLM2 adds to the 50 suite prompts.
_SHARE_OF_MATCH = np.array(
    [0.205, 0.245, 0.111, 0.071, 0.05, 0.034, 0.028, 0.024, 0.021, 0.018, 0.015, 0.014, 0.164]
)


def tune(
    model: options.Model = None,
    dtype: options.Dtype = "float32",
    mesh: options.Mesh = None,
    coordinator: distributed.Coordinator = None,
    num_processes: distributed.NumProcesses = None,
    process_id: distributed.ProcessId = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what a round of several rows costs here, and say what that favours.

    A round of many rows pays where it emits more tokens than it costs rounds of one row. What
    --strategy auto goes by is measured anew.
    """
    axes = parse_mesh(mesh)
    distributed.connect(coordinator, num_processes, process_id)
    with distributed.messages().status("Loading") as status:
        lm = options.load_showing(model, dtype, make_mesh(axes), status.update)
        status.update("Measuring this device")
        network = LlamaModel(lm.config)
        costs = tuning.measure_costs(network, lm.params, _ROWS)
        auto = tuning.keep_costs(network, lm.params, costs)
    cost_of = dict(costs)
    expected: dict[Strategy, float] = {
        strategy: tokens / cost_of[strategy.layout.num_rows]
        for strategy, tokens in tuning.TOKENS_PER_ROUND.items()
    }
    sizes, cautious = _policy_of(auto)
    expected[auto] = cautious if auto.wide is None else max(cautious, expected[auto.wide])
    best = max((auto, *expected), key=lambda strategy: expected[strategy])
    windows = [strategy for strategy in expected if isinstance(strategy, Lookahead)]
    window = max(windows, key=lambda strategy: expected[strategy])
    if as_json:
        print(
            json.dumps(
                {
                    "model": model or "bundled",
                    "costs": costs,
                    "auto_costs": auto.costs,
                    "auto_wide": auto.wide and str(auto.wide),
                    "auto_drafts": sizes,
                    "expected_speed": {str(s): round(v, 3) for s, v in expected.items()},
                    "recommended": str(best),
                    "recommended_lookahead": str(window),
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
        console.print(f"  {_name_of(strategy)}: {speed:.2f}")
    console.print(
        "Behind a match of so many tokens, --strategy auto drafts at the start of a text:"
    )
    matches = Table("match", "right", "drafts", box=box.SIMPLE)
    for match_len, (right, size) in enumerate(zip(RIGHT_AT_FIRST, sizes, strict=True)):
        matches.add_row(str(match_len), f"{right:.2f}", str(size))
    console.print(matches)
    remark = "windows and trees promise less."
    if auto.wide is not None:
        num_drafts = auto.layout.num_drafts
        remark = f"its {num_drafts} drafts are those of {_name_of(auto.wide)}."
    if best is not auto:
        remark = "--strategy auto is never much slower than plain decoding."
    console.print(f"Recommended: {_name_of(best)}; {remark}")
    console.print(f"Of lookahead's windows: {_name_of(window)}.")


def _name_of(strategy: Strategy) -> str:
    if isinstance(strategy, Lookahead):
        return f"lookahead, W,N,G = {strategy.window},{strategy.ngram},{strategy.candidates}"
    return "--strategy auto" if isinstance(strategy, Auto) else str(strategy).lower()


def _policy_of(auto: Auto) -> tuple[list[int], float]:
    """What `Auto` drafts behind matches of 0, 1, 2, ... tokens, and the speed that this gives
    where matches are as long as there; cautious, as its probabilities at the start are."""
    sizes, seconds_per_token = [], 0.0
    chances = jnp.asarray(acceptance.at_first(auto.wide is not None))[None]
    num_drafts = (*auto.sizes, auto.layout.num_drafts)
    for match_len, share in enumerate(_SHARE_OF_MATCH):
        before = np.minimum(match_len + np.arange(auto.sizes[-1]), LONGEST_MATCH)[None]
        exists = np.full(before.shape, match_len > 0)
        tokens = auto.expected_tokens(chances, jnp.asarray(before), jnp.asarray(exists))
        kind = int(auto.best_round(tokens))
        sizes.append(num_drafts[kind])
        seconds_per_token += share * auto.costs[kind][1] / float(tokens[0, kind])
    return sizes, 1 / seconds_per_token
