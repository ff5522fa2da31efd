"""Verification: walk the draft forest as far as the target agrees.

Shapes: B batch rows, R draft rows, M = max_accepted + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jlookahead.layout import Layout
from jlookahead.sharding import largest_anywhere
from jlookahead.state import BONUS, PLAIN, Draft

# (logits [B, V], tokens emitted so far [B, M], their number, drafts that may follow [B, R])
# -> the target's token [B].
Choose = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@flax.struct.dataclass
class OwnDrafts:
    """The run of drafts whose rows were computed here, where several devices share a round."""

    first: jax.Array  # [] int32, the first of them
    num: int = flax.struct.field(pytree_node=False)
    first_row: int = flax.struct.field(pytree_node=False)  # the packed row it stands in


@flax.struct.dataclass
class Verdict:
    """What the target accepts, before any stop condition."""

    num_accepted: jax.Array  # [B] int32, 0..M-1
    emitted: jax.Array  # [B, M] int32, the accepted drafts, the target's own token, then 0
    source: jax.Array  # [B, M] int8
    logprobs: jax.Array | None  # [B, M] float32, of the emitted tokens
    path: jax.Array  # [B, M] int32, packed rows whose K/V the emitted tokens commit
    winner: jax.Array  # [B] int32, last accepted draft row, -1 if none


def verify(
    logits: jax.Array,
    draft: Draft,
    layout: Layout,
    choose: Choose,
    want_logprobs: bool = False,
    own: OwnDrafts | None = None,
) -> Verdict:
    """Accepts the longest path of draft tokens that the target itself would have chosen.

    One loop over depth. At each, the target's token is chosen from the conditional row of a
    surviving draft (all survivors share their tokens so far, hence their conditional) and
    the survivors are the valid children that carry it. The first depth without survivors
    ends the path with the target's token: a correction, or the bonus after a full match.

    Args:
        logits: `[B, 1 + R + J, V]`, the ordinary row and the draft rows first; of the drafts
            `own` alone if those are given.
        draft: tokens on a forest.
        layout: the packed rows, and `max_accepted`.
        choose: the target's choice.
        want_logprobs: whether to report log-probabilities under the target's unprocessed law.
        own: the drafts to verify; all if None. The others are known and not followed.

    Returns:
        a `Verdict`; ties between survivors go to the lowest draft row.
    """
    batch, num_drafts = draft.tokens.shape
    if own is None:
        own = OwnDrafts(jnp.int32(0), num_drafts, layout.first_draft)
    index = jnp.arange(num_drafts, dtype=jnp.int32)
    is_own = (index >= own.first) & (index < own.first + own.num)

    def lowest(which: jax.Array) -> jax.Array:
        return jnp.where(which, index, num_drafts).min(axis=1, initial=num_drafts)

    start = _Walk(
        depth=jnp.int32(0),
        running=jnp.ones(batch, bool),
        eligible=draft.valid & (draft.parents < 0),
        winner=jnp.full(batch, -1, jnp.int32),
        num_accepted=jnp.zeros(batch, jnp.int32),
        emitted=jnp.zeros((batch, layout.max_emitted), jnp.int32),
        source=jnp.full((batch, layout.max_emitted), PLAIN, jnp.int8),
        logprobs=jnp.zeros((batch, layout.max_emitted), jnp.float32) if want_logprobs else None,
        path=jnp.zeros((batch, layout.max_emitted + 1), jnp.int32),
    )

    def is_running(walk: _Walk) -> jax.Array:
        num_running = largest_anywhere(walk.running.sum())
        return (walk.depth < layout.max_emitted) & (num_running > 0)

    def accept_one(walk: _Walk) -> _Walk:
        depth, running = walk.depth, walk.running
        row = jnp.where(walk.winner < 0, 0, walk.winner - own.first + 1)
        conditional = jnp.take_along_axis(logits, row[:, None, None], axis=1)[:, 0]
        token = choose(conditional, walk.emitted, depth, walk.eligible)
        alive = walk.eligible & (draft.tokens == token[:, None])
        alive &= (running & (depth < layout.max_accepted))[:, None]
        winner = lowest(alive & is_own)
        survives = winner < num_drafts
        source_of = lowest(alive)[:, None]
        source = jnp.take_along_axis(draft.source, source_of, axis=1, mode="clip")[:, 0]
        own_source = jnp.where(depth == 0, PLAIN, BONUS).astype(jnp.int8)
        source = jnp.where(alive.any(axis=1), source, own_source)
        logprobs = walk.logprobs
        if logprobs is not None:
            all_logprobs = jax.nn.log_softmax(conditional, axis=-1)
            logprob = jnp.take_along_axis(all_logprobs, token[:, None], axis=1)[:, 0]
            logprobs = logprobs.at[:, depth].set(jnp.where(running, logprob, 0.0))
        parent_alive = jnp.take_along_axis(alive, jnp.maximum(draft.parents, 0), axis=1)
        row = jnp.where(survives, own.first_row + winner - own.first, 0)
        return _Walk(
            depth=depth + 1,
            running=survives,
            eligible=draft.valid & (draft.parents >= 0) & parent_alive,
            winner=jnp.where(survives, winner, walk.winner),
            num_accepted=walk.num_accepted + survives,
            emitted=walk.emitted.at[:, depth].set(jnp.where(running, token, 0)),
            source=walk.source.at[:, depth].set(jnp.where(running, source, PLAIN)),
            logprobs=logprobs,
            path=walk.path.at[:, depth + 1].set(row),
        )

    end = lax.while_loop(is_running, accept_one, start)
    return Verdict(
        num_accepted=end.num_accepted,
        emitted=end.emitted,
        source=end.source,
        logprobs=end.logprobs,
        path=end.path[:, :-1],
        winner=end.winner,
    )


@flax.struct.dataclass
class _Walk:
    """Where the walk stands: what the last accepted token leaves open, and what was emitted."""

    depth: jax.Array  # [] int32
    running: jax.Array  # [B] bool
    eligible: jax.Array  # [B, R] bool, drafts that may follow the last accepted token
    winner: jax.Array
    num_accepted: jax.Array
    emitted: jax.Array
    source: jax.Array
    logprobs: jax.Array | None
    path: jax.Array  # [B, M + 1]
