"""One decoding round: propose, pack, forward, verify, publish, observe.

`decode_round` is pure. It returns the whole next state or nothing, so that text, K/V,
window and pool can never disagree about what was emitted.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jlookahead.buffers import write_rows
from jlookahead.division import broadcast, divide, exchange, own_drafts, take
from jlookahead.layout import Layout
from jlookahead.model import KVCache, KVRows, Params, TargetModel
from jlookahead.packing import PackedRows, append_refed, pack, refed_path
from jlookahead.sharding import largest_anywhere
from jlookahead.state import EOS, PLAIN, RUNNING, STOP, Draft, RoundInfo, RoundState
from jlookahead.strategy import Strategy
from jlookahead.target import choose
from jlookahead.verify import Verdict, verify


def decode_round(
    model: TargetModel, strategy: Strategy, num_devices: int, params: Params, state: RoundState
) -> tuple[RoundState, RoundInfo]:
    """Runs one round: one forward pass, at least one token for every row not yet done.

    Args:
        model, strategy, num_devices: static; the devices that share a round, 1 without a mesh.
        params: of the model.
        state: read-only; rows that are done pass through unchanged.
    """
    layout, draft = strategy.layout, propose(strategy, state)
    rounds = [
        functools.partial(round_of_size, model, strategy, num_devices, size, params)
        for size in layout.draft_sizes
    ]
    return lax.switch(size_index(layout, state, draft), rounds, state, draft)


def propose(strategy: Strategy, state: RoundState) -> Draft:
    """The drafts of the next round."""
    with jax.named_scope("propose"):
        draft = strategy.propose(state)
        shape = (len(state.length), strategy.layout.num_drafts)
        chex.assert_shape(jax.tree.leaves(draft), shape)
    return draft


def size_index(layout: Layout, state: RoundState, draft: Draft) -> jax.Array:
    """Which of `layout.draft_sizes` is the least that holds every row that is to be computed."""
    used = draft.valid if draft.wanted is None else draft.valid | draft.wanted
    last_used = jnp.max(jnp.arange(1, layout.num_drafts + 1) * used, axis=1, initial=0)
    num_needed = largest_anywhere(jnp.where(state.done, 0, last_used).max())
    return jnp.searchsorted(jnp.array(layout.draft_sizes), num_needed)


def round_of_size(
    model: TargetModel,
    strategy: Strategy,
    num_devices: int,
    num_drafts: int,
    params: Params,
    state: RoundState,
    draft: Draft,
) -> tuple[RoundState, RoundInfo]:
    """The rest of a round, of which the first `num_drafts` draft rows are computed."""
    layout = strategy.layout.of_size(num_drafts)
    division = divide(layout, num_devices)
    num_columns = layout.num_jacobi if division is None else division.num_columns
    kept = jax.tree.map(lambda of_drafts: of_drafts[:, :num_drafts], draft)
    with jax.named_scope("pack"):
        rows = pack(layout, state, kept)
        if division is not None:
            rows = take(division, rows, state.stage)
        if state.num_pending is not None:
            rows = append_refed(rows, state, layout.max_accepted)
    with jax.named_scope("forward"):
        logits, new_kv = compute(model, params, state, rows)
    with jax.named_scope("verify"):
        verdict = verify(
            logits,
            kept,
            layout,
            functools.partial(choose, state, kept),
            want_logprobs=state.logprobs is not None,
            own=None if division is None else own_drafts(division),
        )
        reading = strategy.read(logits, num_columns)
    with jax.named_scope("publish"):
        if division is not None:
            verdict, reading, is_winner = exchange(division, verdict, reading, state.stage)
        if state.num_pending is not None:
            path = refed_path(rows, state, layout.max_accepted)
            verdict = dataclasses.replace(verdict, path=path)
        elif division is not None:
            verdict, new_kv = broadcast(verdict, new_kv, is_winner)
        after, num_emitted = publish(state, verdict, new_kv)
    with jax.named_scope("observe"):
        after = strategy.observe(state, after, kept, reading)
    return after, _report(state, draft, verdict, num_emitted)


def compute(
    model: TargetModel, params: Params, state: RoundState, rows: PackedRows
) -> tuple[jax.Array, KVRows]:
    """Forward pass: logits `[B, L, V]` of the wanted rows, and new K/V of all rows."""
    hidden, new_kv = model.forward(
        params, rows.tokens, rows.positions, rows.mask, state.cache, state.num_committed
    )
    wanted = jnp.take_along_axis(hidden, rows.logit_rows[..., None], axis=1)
    logits = model.logits(params, wanted)
    chex.assert_shape(logits, (*rows.logit_rows.shape, model.vocab_size))
    chex.assert_type(logits, jnp.float32)
    return logits, new_kv


def publish(state: RoundState, verdict: Verdict, new_kv: KVRows) -> tuple[RoundState, jax.Array]:
    """Commits what survives the stop conditions: tokens, K/V, length, finish reason.

    The one place where a block is cut: at the first EOS in it, at the token that completes a
    stop string, and at the row's limit. Rows that are done get nothing. Returns the state and
    the number of tokens emitted `[B]`.
    """
    max_emitted = verdict.emitted.shape[1]
    index = jnp.arange(max_emitted)
    num_emitted = jnp.minimum(verdict.num_accepted + 1, state.limit - state.length)
    is_eos = jnp.isin(verdict.emitted, state.eos_ids)
    stop = None if state.stop is None else state.stop.follow(verdict.emitted)
    ends = is_eos if stop is None else is_eos | stop.is_complete
    ends &= index < num_emitted[:, None]
    first_end = jnp.argmax(ends, axis=1)
    num_emitted = jnp.where(ends.any(axis=1), first_end + 1, num_emitted)
    num_emitted = jnp.where(state.done, 0, num_emitted).astype(jnp.int32)

    length = state.length + num_emitted
    at_limit = jnp.where(length == state.limit, state.limit_reason, RUNNING)
    at_end = jnp.int32(EOS)
    if stop is not None:  # an EOS id may spell text, too
        is_stop = jnp.take_along_axis(stop.is_complete, first_end[:, None], axis=1)[:, 0]
        at_end = jnp.where(is_stop, STOP, EOS)
    reason = jnp.where(ends.any(axis=1), at_end, at_limit)
    kept = index < num_emitted[:, None]
    # A row that emits nothing writes into the slack at the end. That the slot is known only
    # after the logits also lets XLA:CPU order the write after every read of the cache, and
    # so do it in place; it copies the whole cache otherwise.
    slack = state.tokens.shape[1] - max_emitted
    frontier = jnp.where(num_emitted > 0, state.num_committed, slack)
    num_pending = state.num_pending
    if num_pending is not None:  # what was pending is committed, the new drafts are not
        num_pending = jnp.where(num_emitted > 0, num_emitted - 1, num_pending)

    def written(buffer: jax.Array, block: jax.Array, padding: jax.Array | int) -> jax.Array:
        return write_rows(buffer, jnp.where(kept, block, padding), state.length)

    after = dataclasses.replace(
        state,
        tokens=written(state.tokens, verdict.emitted, state.pad_id),
        source=written(state.source, verdict.source, PLAIN),
        logprobs=None
        if state.logprobs is None or verdict.logprobs is None
        else written(state.logprobs, verdict.logprobs, 0),
        length=length,
        finish=jnp.where(state.done, state.finish, reason).astype(jnp.int32),
        cache=commit(state.cache, new_kv, verdict.path, frontier),
        num_pending=num_pending,
        stop=None if stop is None else stop.after(num_emitted),
        num_rounds=state.num_rounds + ~state.done,
    )
    return after, num_emitted


def commit(cache: KVCache, new_kv: KVRows, path: jax.Array, lengths: jax.Array) -> KVCache:
    """Writes the K/V of the packed rows `path [B, M]` at the frontier `lengths [B]`.

    The number of rows written is static, no more than were computed. What lies beyond the
    accepted ones is garbage beyond the frontier, which the next round overwrites.
    """

    def write(slots, rows):
        taken = path[:, None, : rows.shape[2], None]
        return write_rows(slots, jnp.take_along_axis(rows, taken, axis=2), lengths)

    return cache.updated(new_kv, write)


def _report(state: RoundState, draft: Draft, verdict: Verdict, num_emitted: jax.Array) -> RoundInfo:
    active = ~state.done
    kept = jnp.arange(verdict.emitted.shape[1]) < num_emitted[:, None]
    roots = draft.valid & (draft.parents < 0)
    return RoundInfo(
        num_emitted=num_emitted,
        emitted=jnp.where(kept, verdict.emitted, state.pad_id),
        source=jnp.where(kept, verdict.source, 0),
        num_accepted=jnp.clip(verdict.num_accepted, 0, jnp.maximum(num_emitted - 1, 0)),
        num_candidates=jnp.where(active, roots.sum(axis=1), 0),
        draft=draft,
        winner=jnp.where(active, verdict.winner, -1),
    )
