"""Many prompts through one batch: a row that is done gives its slot to the next prompt.

Three programs serve a job however many prompts it has, beside one of prefill for each range of
lengths: all rows share one cache capacity, new prompts are prefilled as a small state of their own,
and `refill` writes that into the batch.

The batch may be split into groups of consecutive rows, one for each device that holds some. A fresh
state then has one row for every group, so that each device takes in its own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlookahead.call import Call, check_row_ids, limits_of, prepare, resolve_model
from jlookahead.checks import check_int
from jlookahead.config import Config
from jlookahead.decoding import run_rounds, start
from jlookahead.model import Params, TargetModel
from jlookahead.prompts import Prompt, to_rows
from jlookahead.results import Result, row_result
from jlookahead.sharding import (
    BY_ROW,
    DATA,
    mesh_of,
    num_row_groups,
    per_device,
    per_row,
    put,
    row_specs,
)
from jlookahead.state import LENGTH, RUNNING, RoundState

# Rounds per device call: a row that is done waits for the end of it.
_ROUNDS_PER_CALL = 4


def generate_many(
    params: Params,
    prompts: Sequence[Prompt],
    cfg: Config,
    *,
    batch_size: int = 8,
    tokenizer: Any = None,
    row_ids: Sequence[int] | None = None,
    model: TargetModel | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yields `(index, result)` of every prompt as soon as it is done, each exactly once.

    A result is that of `generate(params, prompts[index], cfg, row_ids=[row_ids[index]])`, whatever
    else is in the batch.

    Args:
        params: the model's parameters.
        prompts: each as `generate` takes a single one.
        cfg: what to do with each of them.
        batch_size: rows that are decoded together, a multiple of the devices along `data`.
        tokenizer: see `generate`.
        row_ids: an id for each prompt that keys its sampling, its index by default.
        model: see `generate`.

    Raises:
        ValueError: at the call and before anything compiles, naming the prompt where it is one's.
    """
    if isinstance(prompts, str | Mapping):
        raise ValueError(f"prompts: got a {type(prompts).__name__}, must be a list of prompts")
    check_int("batch_size", batch_size, 1)
    mesh = mesh_of(params)
    num_devices = num_row_groups(mesh)
    if batch_size % num_devices:
        raise ValueError(
            f"batch_size: got {batch_size}, must be a multiple of {num_devices}, the devices of "
            f"the mesh along {DATA!r}"
        )
    model = resolve_model(params, cfg, model)
    rows = [_row_of(prompt, i, cfg, tokenizer, model) for i, prompt in enumerate(prompts)]
    ids = check_row_ids(row_ids, len(rows))
    if not rows:
        return iter(())
    cfg = with_capacity(cfg, [len(row) for row in rows], model.max_position_embeddings)
    job = _Job(params, model, mesh, cfg, tokenizer, rows, ids)
    _prepare(job, [0] * num_devices)  # what is wrong for all is refused
    return _run(job, num_devices, batch_size // num_devices)


def with_capacity(cfg: Config, lengths: Sequence[int], context: int) -> Config:
    """The configuration with a `cache_len` in which prompts of these lengths use up their budget.

    Raises:
        ValueError: the longest one does not fit.
    """
    limits, _ = limits_of(lengths, cfg, context)
    return dataclasses.replace(cfg, cache_len=cfg.cache_len or max(limits))


def _row_of(
    prompt: Prompt, index: int, cfg: Config, tokenizer: Any, model: TargetModel
) -> np.ndarray:
    try:
        rows, is_batch = to_rows(prompt, tokenizer, model.vocab_size)
        if is_batch:
            raise ValueError(f"got a batch of {len(rows)} rows, must be one prompt")
        limits_of([len(rows[0])], cfg, model.max_position_embeddings)
    except ValueError as error:
        raise ValueError(f"prompts[{index}]: {error}") from None
    return rows[0]


def answer_of(result: Result) -> dict[str, Any]:
    """What a job keeps of the result of a prompt, as JSON has it."""
    return {
        "text": result.text,
        "token_ids": result.tokens,
        "num_rounds": result.num_rounds,
        "tokens_per_round": result.tokens_per_round,
        "finish_reason": result.finish_reason,
    }


@dataclasses.dataclass(frozen=True)
class _Job:
    params: Params
    model: TargetModel
    mesh: Mesh | None
    cfg: Config
    tokenizer: Any
    rows: Sequence[np.ndarray]
    row_ids: Sequence[int]


def _run(job: _Job, num_groups: int, group_size: int) -> Iterator[tuple[int, Result]]:
    waiting = collections.deque(range(len(job.rows)))
    # The prompt in every slot of every group, None where it is free.
    groups: list[list[int | None]] = [[None] * group_size for _ in range(num_groups)]
    max_rounds = jax.device_put(np.int32(_ROUNDS_PER_CALL))
    state: RoundState | None = None
    finished: list[tuple[int, Result]] = []
    while True:
        while waiting and any(None in group for group in groups):
            slots, chosen = _assign(waiting, groups)
            fresh = start(_prepare(job, chosen), job.params)
            state = _all_done(job.mesh, fresh, group_size) if state is None else state
            state = refill(job.mesh, state, fresh, put(np.array(slots, np.int32), job.mesh))
        if state is None or all(index is None for group in groups for index in group):
            break
        state, progress = run_rounds(
            job.model, job.cfg.strategy, job.mesh, job.params, state, max_rounds
        )
        yield from finished  # while the device is at work
        finish = jax.device_get(progress.finish).reshape(num_groups, group_size)
        done = [
            (d, slot)
            for d, group in enumerate(groups)
            for slot, index in enumerate(group)
            if index is not None and finish[d, slot] != RUNNING
        ]
        if done:
            progress = jax.device_get(progress)
        finished = []
        for d, slot in done:
            index = groups[d][slot]
            assert index is not None
            groups[d][slot] = None
            size, row = len(job.rows[index]), d * group_size + slot
            finished.append((index, row_result(progress, row, size, job.cfg, job.tokenizer)))
    yield from finished


def _assign(
    waiting: collections.deque[int], groups: list[list[int | None]]
) -> tuple[list[int], list[int | None]]:
    """Gives the next prompts a free slot each, one at most in every group.

    Returns:
        for every group the slot, -1 if it gets none, and the prompt.
    """
    slots, chosen = [], []
    for group in groups:
        slot = group.index(None) if waiting and None in group else -1
        index = waiting.popleft() if slot >= 0 else None
        if index is not None:
            group[slot] = index
        slots.append(slot)
        chosen.append(index)
    return slots, chosen


def _prepare(job: _Job, chosen: Sequence[int | None]) -> Call:
    """A call of these prompts, one row each; any token stands in where there is none."""
    rows = [job.rows[0][:1] if index is None else job.rows[index] for index in chosen]
    ids = [0 if index is None else job.row_ids[index] for index in chosen]
    return prepare(job.params, rows, job.cfg, job.tokenizer, ids, job.model)


@functools.partial(jax.jit, static_argnames=("mesh", "group_size"))
def _all_done(mesh: Mesh | None, fresh: RoundState, group_size: int) -> RoundState:
    """A batch of `group_size` rows like each of these, none of which is to be run."""

    def repeat(leaf: jax.Array, is_per_row: bool) -> jax.Array:
        # A copy, since this state is donated and the fresh one is still to be read.
        return jnp.repeat(leaf, group_size, axis=0) if is_per_row else jnp.copy(leaf)

    def all_done(fresh: RoundState) -> RoundState:
        state = jax.tree.map(repeat, fresh, per_row(fresh))
        return dataclasses.replace(state, finish=jnp.full_like(state.finish, LENGTH))

    specs = row_specs(fresh)
    return per_device(all_done, mesh, (specs,), specs)(fresh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def refill(mesh: Mesh | None, state: RoundState, fresh: RoundState, slots: jax.Array) -> RoundState:
    """Writes new rows into a batch, each into the group of rows that its device holds.

    Args:
        mesh: with D devices along `data`; D is 1 without one.
        state: of D groups of S consecutive rows; donated.
        fresh: of D rows, one for each group, with the same capacity.
        slots: `[D]` int32, where in its group a row goes, 0..S-1; nowhere if negative.
    """

    def write(state: RoundState, fresh: RoundState, slots: jax.Array) -> RoundState:
        # Out of bounds is dropped.
        slot = jnp.where(slots[0] < 0, len(state.length), slots[0])

        def update(old: jax.Array, new: jax.Array, is_per_row: bool) -> jax.Array:
            return old.at[slot].set(new[0], mode="drop") if is_per_row else old

        return jax.tree.map(update, state, fresh, per_row(state))

    specs = row_specs(state)
    return per_device(write, mesh, (specs, specs, BY_ROW), specs)(state, fresh, slots)
