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

from jlookahead.auto import Auto
from jlookahead.files import written_whole
from jlookahead.model import LlamaModel, Params, TargetModel
from jlookahead.model_config import ModelConfig
from jlookahead.vocabulary import top_token

# Rows of the rounds of `Auto`: each number is one more program, and long drafts pay where many
# rows cost little.
_STEEP, _FLAT = (1, 4, 16), (1, 8, 32)
_FLAT_COST = 2.0  # of 32 rows, at most
_ROWS = tuple(sorted({*_STEEP, *_FLAT}))
_CONTEXT = 256
# A sample is a run of passes in one program, long against the clock and the hand-over.
_PASSES, _SAMPLES = 4, 7


def tune(params: Params, config: ModelConfig, *, refresh: bool = False) -> Auto:
    """The strategy `Auto` with the costs of this model on this device.

    Takes some seconds the first time, and reads a file of the user's cache directory
    (`$XDG_CACHE_HOME/jlookahead`, `~/.cache/jlookahead` by default) later. Warns where that
    directory cannot be written.

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
    kept = None if refresh else _read(_file_of(model))
    if kept is not None:
        return kept
    return keep_costs(model, measure_costs(model, params))


def keep_costs(model: LlamaModel, costs: tuple[tuple[int, float], ...]) -> Auto:
    """`Auto` with those of the costs that it goes by; later calls of `tune` read them."""
    chosen = _FLAT if dict(costs)[_FLAT[-1]] <= _FLAT_COST else _STEEP
    strategy = Auto(tuple((rows, cost) for rows, cost in costs if rows in chosen))
    file = _file_of(model)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as stream:
            stream.write(json.dumps(strategy.costs))
    except OSError as error:
        warnings.warn(f"tune: costs are measured anew each time, {error}", stacklevel=3)
    return strategy


def _file_of(model: LlamaModel) -> Path:
    return _cache_dir() / f"costs-{_fingerprint(model)}.json"


def _read(file: Path) -> Auto | None:
    """What an earlier call kept; None if nothing is there, or nothing that makes sense."""
    try:
        return Auto(tuple(tuple(pair) for pair in json.loads(file.read_text())))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def measure_costs(
    model: TargetModel, params: Params, rows: tuple[int, ...] = _ROWS
) -> tuple[tuple[int, float], ...]:
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
    return tuple(costs)


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


def _fingerprint(model: LlamaModel) -> str:
    from jlookahead import __version__

    device = jax.devices()[0]
    about = (
        dataclasses.asdict(model.config),
        (device.platform, device.device_kind, os.cpu_count()),
        (jax.__version__, __version__),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "jlookahead"
