"""The entry points: prefill, and rounds in one loop on the device.

Two programs per call shape are compiled: `_start` (prefill, proposer memory) and
`run_rounds` (one `lax.while_loop` over rounds, with the state donated).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jlookahead.call import Call, CallArrays, check_initial_window, prepare
from jlookahead.config import Config
from jlookahead.model import KVCache, Params, TargetModel
from jlookahead.ngram_pool import NgramPool
from jlookahead.prompts import Prompt
from jlookahead.results import Progress, Result, collect
from jlookahead.rounds import decode_round, propose, round_of_size, size_index
from jlookahead.sharding import (
    BY_ROW,
    SHARED,
    largest_anywhere,
    num_sharing,
    per_device,
    replicate,
    row_specs,
    split_heads,
)
from jlookahead.state import RUNNING, Draft, PromptRead, RoundInfo, RoundState
from jlookahead.strategy import Strategy
from jlookahead.vocabulary import top_tokens

# Prompt rows whose logits are computed at once, for strategies that want them.
_HEAD_CHUNK = 64
NO_ROUND_LIMIT = np.int32(np.iinfo(np.int32).max)


def generate(
    params: Params,
    prompt: Prompt,
    cfg: Config,
    *,
    tokenizer: Any = None,
    row_ids: Sequence[int] | None = None,
    model: TargetModel | None = None,
) -> Result:
    """Generates with exactly the output of plain decoding.

    Args:
        params: the model's parameters.
        prompt: ids `[T]`, a list of ids, or a ragged list of those for a batch; with a
            tokenizer also a string, a list of strings, or chat messages.
        cfg: what to do.
        tokenizer: encodes text prompts and fills `Result.text`.
        row_ids: `B` ids that key each row's sampling, 0..B-1 by default: a prompt draws the
            same text in any batch slot if it keeps its id.
        model: another network in place of the LLaMA of `cfg.model`.

    Raises:
        ValueError: before anything compiles, naming the field, the value, what is allowed.
    """
    call = prepare(params, prompt, cfg, tokenizer, row_ids, model)
    state = start(call, params)
    unlimited = jax.device_put(NO_ROUND_LIMIT)
    _, progress = run_rounds(call.model, call.strategy, call.mesh, params, state, unlimited)
    return collect(progress, call, cfg, tokenizer)


def iter_rounds(
    params: Params,
    prompt: Prompt,
    cfg: Config,
    initial_window: Sequence[int] | None = None,
    *,
    tokenizer: Any = None,
    row_ids: Sequence[int] | None = None,
    model: TargetModel | None = None,
) -> Iterator[tuple[RoundState, RoundInfo]]:
    """Yields `(state, info)` after every round, for inspection; much slower than `generate`.

    What to read, `row` being the batch row:

    - `info.num_emitted[row]` and `info.emitted[row, :num_emitted]`: the round's tokens.
    - `info.num_accepted[row]`: the accepted length, that is, the tokens beyond the one that any
      forward pass gives; what a stop condition cut off does not count.
    - `info.candidates(row)`: the draft sequences it verified, in order.
    - `state.window.levels(row)`: the trajectory levels *after* the round, that is, those the
      next round feeds; level 0 first, without the ordinary token.
    - `state.pool.lookup(token, row)`, `state.pool.as_dict(row)`: the pool after the round.
    - `state.tokens[row, :state.length[row]]`: prompt and output.

    Args:
        initial_window: the W+N-3 tokens that seed level 0, for `Lookahead(reference=True)`.
        Others: see `generate`.
    """
    call = prepare(params, prompt, cfg, tokenizer, row_ids, model)
    window = check_initial_window(initial_window, call.strategy, call.model)
    return _iter_rounds(params, call, window)


def _iter_rounds(
    params: Params, call: Call, initial_window: np.ndarray | None
) -> Iterator[tuple[RoundState, RoundInfo]]:
    state = start(call, params, initial_window)
    while not bool(state.done.all()):
        state, info = _run_one_round(call.model, call.strategy, call.mesh, params, state)
        yield state, info


def start(
    call: Call,
    params: Params,
    initial_window: np.ndarray | None = None,
    previous: RoundState | None = None,
) -> RoundState:
    """The state before the first round: prompt prefilled, proposer memory filled.

    Args:
        call: the call.
        params: of its model.
        initial_window: see `iter_rounds`.
        previous: the state of an earlier generation of this strategy whose first `num_reused`
            tokens the prompt shares; its cache and memory are donated.
    """
    carried = None
    if previous is not None:
        cache = previous.cache
        if previous.tokens.shape[1] < call.num_slots:
            cache = _grow(cache, call.num_slots)
        carried = Carried(cache, previous.pool, previous.successors)
    return _start(
        call.model,
        call.strategy,
        call.mesh,
        call.prefill_chunk,
        call.want_logprobs,
        call.refeeds,
        params,
        call.arrays,
        initial_window,
        carried,
    )


@flax.struct.dataclass
class Carried:
    """What a generation hands on to the next one."""

    cache: KVCache
    pool: NgramPool | None
    successors: jax.Array | None


# A program of its own, so that `_start` is not compiled for every pair of capacities.
_grow = jax.jit(KVCache.grown, static_argnums=1)


@functools.partial(
    jax.jit,
    static_argnames=("model", "strategy", "mesh", "chunk", "want_logprobs", "refeeds"),
    donate_argnames=("carried",),
)
def _start(
    model: TargetModel,
    strategy: Strategy,
    mesh: Mesh | None,
    chunk: int,
    want_logprobs: bool,
    refeeds: bool,
    params: Params,
    arrays: CallArrays,
    initial_window: jax.Array | None,
    carried: Carried | None,
) -> RoundState:
    """Prefills the prompt without its last token and fills the proposer's memory."""
    function = functools.partial(_start_rows, model, strategy, chunk, want_logprobs, refeeds)
    specs = row_specs(arrays)
    of_call = ("eos_ids", "pad_id", "sampler", "processors", "stop")
    state_specs = RoundState(
        **{field.name: BY_ROW for field in dataclasses.fields(RoundState)}
        | {name: getattr(specs, name) for name in of_call}
    )
    started = per_device(function, mesh, (SHARED, specs, SHARED, BY_ROW), state_specs)
    return started(params, arrays, initial_window, carried)


def _start_rows(
    model: TargetModel,
    strategy: Strategy,
    chunk: int,
    want_logprobs: bool,
    refeeds: bool,
    params: Params,
    arrays: CallArrays,
    initial_window: jax.Array | None,
    carried: Carried | None,
) -> RoundState:
    """`_start` for the batch rows of one device."""
    batch, num_slots = arrays.prompt.shape
    cache = model.init_cache(batch, num_slots) if carried is None else carried.cache
    cache = split_heads(cache)
    cache, successors = _prefill(model, params, arrays, chunk, cache, strategy.num_successors)
    is_done = arrays.prompt_len >= arrays.limit
    state = RoundState(
        tokens=arrays.prompt,
        source=jnp.zeros((batch, num_slots), jnp.int8),
        length=arrays.prompt_len,
        finish=jnp.where(is_done, arrays.limit_reason, RUNNING),
        cache=cache,
        num_pending=jnp.zeros(batch, jnp.int32) if refeeds else None,
        logprobs=jnp.zeros((batch, num_slots), jnp.float32) if want_logprobs else None,
        window=None,
        pool=None if carried is None else carried.pool,
        successors=None if carried is None else carried.successors,
        block=None,
        matches=None,
        prompt_len=arrays.prompt_len,
        limit=arrays.limit,
        limit_reason=arrays.limit_reason,
        eos_ids=arrays.eos_ids,
        pad_id=arrays.pad_id,
        sampler=arrays.sampler,
        processors=arrays.processors,
        stop=arrays.stop,
        num_rounds=jnp.zeros(batch, jnp.int32),
    )
    prompt = PromptRead(arrays.num_reused, successors, model.vocab_size, initial_window)
    return strategy.start(state, prompt)


def _prefill(
    model: TargetModel,
    params: Params,
    arrays: CallArrays,
    chunk: int,
    cache: KVCache,
    num_successors: int,
) -> tuple[KVCache, jax.Array | None]:
    """Commits K/V of all prompt tokens but the last, chunk by chunk, behind the reused ones.

    Returns the cache, and for every token read its likeliest successors `[B, T, K]`, if any
    are wanted; -1 for tokens that were not read.
    """
    batch, num_slots = arrays.prompt.shape
    causal = jnp.tri(chunk, dtype=bool)
    end = largest_anywhere(arrays.prompt_len.max()) - 1
    head_chunk = min(chunk, _HEAD_CHUNK)

    def prefill_chunk(index: jax.Array, carry: tuple) -> tuple:
        cache, successors = carry
        first = arrays.num_reused + index * chunk
        positions = jnp.broadcast_to(first + jnp.arange(chunk), (batch, chunk))
        tokens = lax.dynamic_slice_in_dim(arrays.prompt, first, chunk, axis=1)
        # Rows that end before this chunk compute garbage beyond their frontier.
        committed = jnp.broadcast_to(first, (batch,))
        hidden, new_kv = model.forward(params, tokens, positions, causal, cache, committed)

        def read_successors(part: jax.Array, successors: jax.Array) -> jax.Array:
            at = part * head_chunk
            rows = lax.dynamic_slice_in_dim(hidden, at, head_chunk, axis=1)
            best = top_tokens(model.logits(params, rows), num_successors)
            return lax.dynamic_update_slice_in_dim(successors, best, first + at, axis=1)

        if num_successors:
            num_parts = -(-jnp.minimum(end - first, chunk) // head_chunk)
            successors = lax.fori_loop(0, num_parts, read_successors, successors)
        if new_kv:
            # Adds 0, which XLA:CPU knows only after the last read of the cache, so that it
            # writes in place; see `publish`.
            first += jnp.isnan(new_kv[-1][0][0, 0, 0, 0]) & (index < 0)

        def write(slots, rows):
            return lax.dynamic_update_slice_in_dim(slots, rows, first, axis=2)

        return cache.updated(new_kv, write), successors

    successors = None
    if num_successors:
        successors = jnp.full((batch, num_slots, num_successors), -1, jnp.int32)
    num_chunks = -(-jnp.maximum(end - arrays.num_reused, 0) // chunk)
    return lax.fori_loop(0, num_chunks, prefill_chunk, (cache, successors))


@flax.struct.dataclass
class _Loop:
    """What the loop over rounds carries."""

    num_rounds: jax.Array  # [] int32
    state: RoundState
    draft: Draft  # of the next round


@functools.partial(
    jax.jit, static_argnames=("model", "strategy", "mesh"), donate_argnames=("state",)
)
def run_rounds(
    model: TargetModel,
    strategy: Strategy,
    mesh: Mesh | None,
    params: Params,
    state: RoundState,
    max_rounds: jax.Array,
) -> tuple[RoundState, Progress]:
    """Runs rounds until every row is done, at most `max_rounds`; never talks to the host."""
    function = functools.partial(_run_rounds, model, strategy, num_sharing(mesh))
    specs = row_specs(state)
    state = per_device(function, mesh, (SHARED, specs, SHARED), specs)(params, state, max_rounds)
    fields = (field.name for field in dataclasses.fields(Progress))
    progress = Progress(**{name: getattr(state, name) for name in fields})
    return state, replicate(progress, mesh)


def _run_rounds(
    model: TargetModel,
    strategy: Strategy,
    num_devices: int,
    params: Params,
    state: RoundState,
    max_rounds: jax.Array,
) -> RoundState:
    """`run_rounds` for the batch rows of one device.

    Rounds of each size have a loop of their own inside the loop over all of them. In the branches
    of a conditional they would have to agree on the shape of what they write into the cache.
    """

    def is_running(carry: _Loop) -> jax.Array:
        num_running = largest_anywhere((~carry.state.done).sum())
        return (carry.num_rounds < max_rounds) & (num_running > 0)

    def run_size(carry: _Loop, index: int, num_drafts: int) -> _Loop:
        def is_of_size(carry: _Loop) -> jax.Array:
            needed = size_index(strategy.layout, carry.state, carry.draft)
            return is_running(carry) & (needed == index)

        def run_round(carry: _Loop) -> _Loop:
            state, _ = round_of_size(
                model, strategy, num_devices, num_drafts, params, carry.state, carry.draft
            )
            return _Loop(carry.num_rounds + 1, state, propose(strategy, state))

        return lax.while_loop(is_of_size, run_round, carry)

    def run_sizes(carry: _Loop) -> _Loop:
        for index, num_drafts in enumerate(strategy.layout.draft_sizes):
            carry = run_size(carry, index, num_drafts)
        return carry

    start = _Loop(jnp.int32(0), state, propose(strategy, state))
    return lax.while_loop(is_running, run_sizes, start).state


@functools.partial(jax.jit, static_argnames=("model", "strategy", "mesh"))
def _run_one_round(
    model: TargetModel, strategy: Strategy, mesh: Mesh | None, params: Params, state: RoundState
) -> tuple[RoundState, RoundInfo]:
    function = functools.partial(decode_round, model, strategy, num_sharing(mesh))
    specs = row_specs(state)
    return per_device(function, mesh, (SHARED, specs), (specs, BY_ROW))(params, state)
