"""What `test_meshes.py` asks of eight simulated devices, in a process of its own: the number of
devices is fixed when JAX starts. Run as `python mesh_cases.py OUT`, it writes what it found."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import golden
import jax
import numpy as np
from jax.sharding import Mesh
from models import EAGER_AUTO, TINY, tiny_params

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import run_rounds, start

MODEL = dataclasses.replace(TINY, vocab_size=96)
RESULT_FIELDS = ("tokens", "num_rounds", "sources", "finish_reason")
BUDGET = 48

COUPLED = jl.Sampling(0.4, top_p=0.95, seed=3)
RESIDUAL = jl.Sampling(0.4, seed=3, verify="residual")


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy and a sampling on one mesh; `prompts` are keyed by a seed."""

    axes: tuple[tuple[str, int], ...]
    strategy: jl.Strategy
    sampling: jl.Sampling = jl.Sampling()
    publish: str = "broadcast"
    seeds: int = 3

    @property
    def cfg(self) -> jl.Config:
        return jl.Config(
            model=MODEL,
            strategy=self.strategy,
            sampling=self.sampling,
            max_new_tokens=BUDGET,
            publish=self.publish,
        )

    def prompts(self, seed: int) -> list[list[int]]:
        """Two rows of unlike lengths that repeat themselves, so that there is much to draft."""
        rng = np.random.default_rng(seed)
        motif = rng.integers(2, MODEL.vocab_size, 5).tolist()
        return [motif * 3 + motif[:2], rng.integers(2, MODEL.vocab_size, 3).tolist() * 2]


def on(**axes: int) -> tuple[tuple[str, int], ...]:
    return tuple(axes.items())


# Few strategies: each is compiled for one device, too.
MIXED, POOL = jl.Lookahead(3, 3, 5), jl.Lookahead(5, 4, 7, prompt_lookup=False)
LOOKUP = jl.PromptLookup(num_draft_tokens=4, candidates=3)
CASES = [
    # Lookahead parallelism: more and fewer columns and candidates than devices.
    Case(on(lookahead=1), MIXED, publish="refeed"),
    Case(on(lookahead=2), MIXED, COUPLED),
    Case(on(lookahead=4), MIXED, RESIDUAL),
    Case(on(lookahead=8), MIXED, COUPLED, "refeed"),
    Case(on(lookahead=2), POOL, RESIDUAL, "refeed"),
    Case(on(lookahead=4), POOL),
    Case(on(lookahead=8), POOL, publish="refeed"),
    Case(on(lookahead=8), POOL, RESIDUAL),
    Case(on(lookahead=4), LOOKUP),
    Case(on(lookahead=2), LOOKUP, publish="refeed"),
    # Nothing to divide: every device computes the round.
    Case(on(lookahead=2), jl.Recycling(24), publish="refeed"),
    Case(on(lookahead=2), jl.Autoregressive()),
    # The other axes, and all of them together.
    Case(on(data=2), LOOKUP),
    Case(on(tensor=8), MIXED, COUPLED),  # more devices than heads of either kind
    Case(on(data=2, tensor=2), jl.Recycling(24)),
    Case(on(lookahead=2, tensor=4), MIXED),
    Case(on(lookahead=4, tensor=2), POOL, publish="refeed"),
    Case(on(data=2, lookahead=4), MIXED, RESIDUAL),
    Case(on(tensor=2, lookahead=2, data=2), MIXED, COUPLED),
]


def mesh_of(axes: tuple[tuple[str, int], ...]) -> Mesh:
    names, sizes = zip(*axes, strict=True)
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


def generated(case: Case, params: Any) -> list[dict[str, Any]]:
    """The results of a case's prompts."""
    results = (jl.generate(params, case.prompts(seed), case.cfg) for seed in range(case.seeds))
    return [{name: getattr(result, name) for name in RESULT_FIELDS} for result in results]


COLLECTIVE = re.compile(
    r" = (?P<dtype>\w+)\[(?P<shape>[\d,]*)\]\S* "
    r"(?P<kind>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)


def collectives(case: Case) -> list[dict[str, Any]]:
    """The collectives of the compiled rounds of a case that lie in a loop: kind, dtype, shape."""
    params = jl.shard(tiny_params(0, MODEL), MODEL, mesh_of(case.axes))
    call = prepare(params, case.prompts(0), case.cfg)
    state = start(call, params)
    lowered = run_rounds.lower(call.model, call.strategy, call.mesh, params, state, np.int32(9))
    lines = (line for line in lowered.compile().as_text().splitlines() if "/while/" in line)
    return [match.groupdict() for line in lines if (match := COLLECTIVE.search(line))]


COUNTED = {
    "broadcast": Case(on(lookahead=4), POOL),
    "refeed": Case(on(lookahead=8), POOL, publish="refeed"),
    "sampled": Case(on(lookahead=2), MIXED, COUPLED),
    "data": Case(on(data=2), EAGER_AUTO),
    "tensor": Case(on(tensor=2), jl.Autoregressive()),
}


def replayed(path: Path) -> list[dict[str, Any]]:
    """A recorded run of several ranks, decoded on as many devices: the state before every step."""
    run, lm = golden.read(path), jl.load(golden.GOLDEN / "tiny_model")
    num_ranks = run["config"]["DIST_WORKERS"]
    params = jl.shard(lm.params, lm.config, mesh_of(on(lookahead=num_ranks)))
    first = run["steps"][0]["full_levels"][0]
    cfg = jl.Config(
        model=lm.config,
        strategy=golden.strategy_of(run),
        max_new_tokens=len(run["untruncated_ids"]) - len(run["prompt_ids"]),
        publish="refeed",
    )
    states = []
    for state, info in jl.iter_rounds(params, run["prompt_ids"], cfg, initial_window=first):
        states.append(
            {
                "emitted": info.emitted[0, : info.num_emitted[0]].tolist(),
                "levels": state.window.levels(),
                "pool_digest": golden.pool_digest(state.pool.as_dict()),
                "num_pending": int(state.num_pending[0]),
            }
        )
    return states


def many(params: Any) -> dict[str, Any]:
    """Seven prompts through a batch of four rows, by index."""
    cfg = dataclasses.replace(CASES[0].cfg, sampling=COUPLED)
    prompts = [row for seed in range(4) for row in CASES[0].prompts(seed)][:7]
    results = jl.generate_many(params, prompts, cfg, batch_size=4)
    return {str(index): [result.tokens, result.num_rounds] for index, result in results}


def refused(params: Any) -> list[str]:
    """What is said to a batch that does not divide, and to an axis of another name."""
    messages = []
    for axes, run in (
        (on(data=4), lambda p: jl.generate(p, CASES[0].prompts(0), CASES[0].cfg)),
        (on(data=2, model=2), lambda p: None),
    ):
        try:
            run(jl.shard(params, MODEL, mesh_of(axes)))
        except ValueError as error:
            messages.append(str(error))
    return messages


RECORDED = [p for p in golden.recordings("tiny_dist") if "rank0" in p.name]


def main() -> None:
    assert len(jax.devices()) == 8
    params = tiny_params(0, MODEL)
    found = {
        "generated": [
            generated(case, jl.shard(params, MODEL, mesh_of(case.axes))) for case in CASES
        ],
        "collectives": {name: collectives(case) for name, case in COUNTED.items()},
        "refused": refused(params),
        "many": many(jl.shard(params, MODEL, mesh_of(on(data=2, lookahead=2)))),
        "replayed": {path.name: replayed(path) for path in RECORDED},
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
