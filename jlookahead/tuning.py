"""What a round costs on this device, by the number of its rows.

Measured once per model, device and version, and kept in the user's cache directory: the figures
change with the machine, and a wrong one costs speed, never a token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import statistics
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jlookahead.agreement import of_first_process
from jlookahead.auto import Auto
from jlookahead.files import written_whole
from jlookahead.lookahead import Lookahead
from jlookahead.model import LlamaModel, Params, TargetModel
from jlookahead.model_config import ModelConfig
from jlookahead.recycling import Recycling
from jlookahead.sharding import mesh_of
from jlookahead.vocabulary import top_token

Costs = tuple[tuple[int, float], ...]  # pairs of rows and the time of a round

# Rows of the rounds of prompt lookup: each number is one more program, and long drafts pay where
# many rows cost little.
_STEEP, _FLAT = (1, 4, 16), (1, 8, 32)
_FLAT_COST = 2.0  # of 32 rows, at most
# Up to this cost of 32 rows it pays to draft without a match, from everything.
_WIDE_COST = 1.5
# Tokens per round on SmolLM2, pooled over 62 prompts, for which see benchmarks/results; those of
# Lookahead(4, 5, 4) and of 120 rows over 18 of them, two of each category.
TOKENS_PER_ROUND: dict[Lookahead | Recycling, float] = {
    Lookahead(4, 5, 4): 2.16,
    Lookahead(7, 5, 7): 2.26,
    Lookahead(15, 5, 15): 2.46,
    Recycling(16): 2.25,
    Recycling(32): 2.58,
    Recycling(56): 2.83,
    Recycling(120): 3.08,
}
_ROWS = tuple(sorted({*_STEEP, *_FLAT}))
_MANY_ROWS = (56, 120)
_CONTEXT = 256
# A sample is a run of passes in one program, long against the clock and the hand-over.
_PASSES, _SAMPLES = 4, 7


def tune(params: Params, config: ModelConfig, *, refresh: bool = False) -> Auto:
    """The strategy `Auto` with the costs of this model on this device.

    Takes some seconds the first time, and reads a file of the user's cache directory
    (`$XDG_CACHE_HOME/jlookahead`, `~/.cache/jlookahead` by default) later. Warns where that
    directory cannot be written. Of several processes that compute together, process 0's figures
    count.

    Args:
        params: of the model.
        config: of the model.
        refresh: measure again, for instance where the machine was busy the first time.

    Raises:
        ValueError: the parameters are not those of `config`.
    """
    if not isinstance(config, ModelConfig):
        name = type(config).__name__
        raise ValueError(f"config: got a {name}, allowed is a ModelConfig such as lm.config")
    model = LlamaModel(config)
    model.check_params(params)
    kept = () if refresh else _read(_file_of(model, params))
    costs = _agreed(kept, params)
    if costs:
        return suit(costs)
    costs = measure_costs(model, params)
    if dict(costs)[_ROWS[-1]] <= _WIDE_COST:
        costs += measure_costs(model, params, _MANY_ROWS)
    return keep_costs(model, params, costs)


def _agreed(costs: Costs, params: Params) -> Costs:
    return tuple((rows, cost) for rows, cost in of_first_process(costs, params))


def keep_costs(model: LlamaModel, params: Params, costs: Costs) -> Auto:
    """The `Auto` that suits the costs; later calls of `tune` read them."""
    file = _file_of(model, params)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as stream:
            stream.write(json.dumps(costs))
    except OSError as error:
        warnings.warn(f"tune: costs are measured anew each time, {error}", stacklevel=3)
    return suit(costs)


def suit(costs: Costs) -> Auto:
    """The `Auto` with the rounds that pay by their costs, of 1, 4, 8, 16, 32 rows at least."""
    cost_of = dict(costs)

    def auto(rows: tuple[int, ...], wide: Lookahead | Recycling | None = None) -> Auto:
        return Auto(tuple((num, cost_of[num]) for num in rows), wide)

    if cost_of[_FLAT[-1]] > _FLAT_COST:
        return auto(_STEEP)
    if cost_of[_FLAT[-1]] > _WIDE_COST:
        return auto(_FLAT)
    rates = {
        strategy: tokens / cost_of[strategy.layout.num_rows]
        for strategy, tokens in TOKENS_PER_ROUND.items()
        if strategy.layout.num_rows in cost_of
    }
    wide = max(rates, key=lambda strategy: rates[strategy])
    lookups = [rows for rows in _FLAT if rows <= wide.layout.num_drafts]
    return auto((*lookups, wide.layout.num_rows), wide)


def _file_of(model: LlamaModel, params: Params) -> Path:
    return _cache_dir() / f"costs-{_fingerprint(model, mesh_of(params))}.json"


def _read(file: Path) -> Costs:
    """What an earlier call kept; empty if nothing is there, or nothing that makes sense."""
    try:
        costs = tuple(tuple(pair) for pair in json.loads(file.read_text()))
        suit(Auto(costs).costs)  # which checks them
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ()
    return costs


def measure_costs(model: TargetModel, params: Params, rows: tuple[int, ...] = _ROWS) -> Costs:
    """Pairs of rows and the time of their forward pass, that of one row being 1.

    Sizes take turns, so that what else the machine does hits all of them; the median over
    the turns of the ratio to one row counts.
    """
    programs = {num: functools.partial(_passes, model, num, params) for num in (1, *rows)}
    for program in programs.values():
        jax.block_until_ready(program())
    samples = [
        {num: _seconds(program) for num, program in programs.items()} for _ in range(_SAMPLES)
    ]
    ratios = ((num, statistics.median(s[num] / s[1] for s in samples)) for num in rows)
    # More rows are never less work: what looks like it is noise.
    costs, dearest = [], 1.0
    for num, ratio in ratios:
        dearest = max(dearest, ratio)
        costs.append((num, round(dearest, 3)))
    return _agreed(tuple(costs), params)


def _seconds(program: functools.partial) -> float:
    began = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - began


@functools.partial(jax.jit, static_argnums=(0, 1))
def _passes(model: TargetModel, num_rows: int, params: Params) -> jax.Array:
    """A chain of forward passes of `num_rows` rows, behind a prefix of `_CONTEXT` tokens."""
    cache = model.init_cache(1, 2 * _CONTEXT)
    mask = jnp.tri(num_rows, dtype=bool)
    positions = _CONTEXT + jnp.arange(num_rows)[None]

    def step(_, tokens):
        hidden, _ = model.forward(params, tokens, positions, mask, cache, jnp.array([_CONTEXT]))
        return top_token(model.logits(params, hidden))

    return jax.lax.fori_loop(0, _PASSES, step, jnp.zeros((1, num_rows), jnp.int32))


def _fingerprint(model: LlamaModel, mesh: Mesh | None) -> str:
    from jlookahead import __version__

    device = jax.devices()[0]
    about = (
        dataclasses.asdict(model.config),
        (device.platform, device.device_kind, os.cpu_count()),
        None if mesh is None else dict(mesh.shape),
        (jax.__version__, __version__),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "jlookahead"
