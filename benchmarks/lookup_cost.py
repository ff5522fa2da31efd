"""What finding drafts costs: the time of `propose` as a share of a whole round, by context.

    python -m benchmarks.lookup_cost --model MODEL --out result.json

Both are measured side by side, alternating, on a text of random ids with a repetition in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jlookahead as jl
from benchmarks.report import versions
from jlookahead.call import prepare
from jlookahead.decoding import run_rounds, start
from jlookahead.state import RoundState

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
STRATEGIES = {
    "most_recent": jl.PromptLookup(),
    "longest": jl.PromptLookup(policy="longest"),
    "four candidates": jl.PromptLookup(candidates=4),
}
ROUNDS, PROPOSALS, REPEATS = 4, 64, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="what jl.load takes; the bundled model by default")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lm = jl.load(args.model)
    rows = [
        {"strategy": name, "context": context} | measure(lm, strategy, context)
        for context in CONTEXTS
        for name, strategy in STRATEGIES.items()
    ]
    report = {
        "what": "median over alternating repeats of (seconds of propose) / (seconds of a round)",
        "model": args.model or "bundled",
        "versions": versions(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(row)


def measure(lm: jl.LoadedModel, strategy: jl.PromptLookup, context: int) -> dict:
    """The share of a round that `propose` takes behind `context` tokens."""
    model_config = dataclasses.replace(lm.config, max_position_embeddings=2 * context)
    budget = ROUNDS * REPEATS * 2 * strategy.layout.max_emitted
    cfg = jl.Config(
        model=model_config, strategy=strategy, max_new_tokens=1, cache_len=context + budget
    )
    model = jl.LlamaModel(model_config)
    state = at_length(lm, cfg, context, context + budget)
    propose = jax.jit(functools.partial(repeat_propose, strategy))
    rounds = jnp.int32(ROUNDS)
    shares = []
    for repeat in range(REPEATS + 1):
        began = time.perf_counter()
        jax.block_until_ready(propose(state))
        proposed = time.perf_counter()
        state, _ = jax.block_until_ready(
            run_rounds(model, strategy, None, lm.params, state, rounds)
        )
        ended = time.perf_counter()
        if repeat:  # the first compiles
            shares.append((proposed - began) / PROPOSALS / ((ended - proposed) / ROUNDS))
    return {"median_share": round(float(np.median(shares)), 5)}


def at_length(lm: jl.LoadedModel, cfg: jl.Config, length: int, limit: int) -> RoundState:
    """A state of that length whose K/V are zeros: a round costs the same whatever they hold."""
    call = prepare(lm.params, [0], dataclasses.replace(cfg, max_new_tokens=limit - 1))
    state = start(call, lm.params)
    rng = np.random.default_rng(0)
    text = rng.integers(0, lm.config.vocab_size, state.tokens.shape)
    text[:, length - 16 : length] = text[:, length // 2 : length // 2 + 16]
    return state.replace(tokens=jnp.asarray(text, jnp.int32), length=jnp.full(1, length))


def repeat_propose(strategy: jl.PromptLookup, state: RoundState) -> jax.Array:
    """Proposes at that many lengths, each after the one before."""

    def step(_, length):
        draft = strategy.propose(state.replace(length=length))
        return length - 1 + jnp.minimum((draft.tokens * draft.valid).sum(), 0)  # that is 0

    return jax.lax.fori_loop(0, PROPOSALS, step, state.length)


if __name__ == "__main__":
    main()
