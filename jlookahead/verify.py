"""Verification: walk the draft forest as far as the target agrees.

Shapes: B batch rows, R draft rows, M = max_accepted + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlookahead.layout import Layout
from jlookahead.state import FROM_MODEL, Draft

Selector = Callable[[jax.Array, jax.Array], jax.Array]


@flax.struct.dataclass
class Verdict:
    """What the target accepts, before any stop condition."""

    num_accepted: jax.Array  # [B] int32, 0..M-1
    emitted: jax.Array  # [B, M] int32, the accepted drafts, then the target's own token
    sources: jax.Array  # [B, M] int8
    path: jax.Array  # [B, M] int32, packed rows whose K/V the emitted tokens commit
    winner: jax.Array  # [B] int32, last accepted draft row, -1 if none


def verify(
    logits: jax.Array, draft: Draft, layout: Layout, position: jax.Array, select: Selector
) -> Verdict:
    """Accepts the longest path of draft tokens that the target itself would have chosen.

    One loop over depth. At each, the target's token is selected from the conditional row of
    a surviving draft (all survivors share their tokens so far, hence their conditional) and
    the survivors are the valid children that carry it. The first depth without survivors
    ends the path with the target's token: a correction, or the bonus after a full match.

    Args:
        logits: `[B, 1 + R, V]` of the ordinary row and the draft rows.
        draft: tokens on the layout's forest.
        layout: the forest, and `max_accepted`.
        position: `[B]` absolute position of the ordinary row.
        select: the target's choice, `(logits [B, V], positions [B]) -> tokens [B]`.

    Returns:
        a `Verdict`; ties between survivors go to the lowest draft row.
    """
    batch = logits.shape[0]
    num_emitted = layout.max_emitted
    emitted = jnp.zeros((batch, num_emitted), jnp.int32)
    sources = jnp.full((batch, num_emitted), FROM_MODEL, jnp.int8)
    no_draft = jnp.full(batch, -1, jnp.int32)
    if not layout.num_drafts:
        emitted = emitted.at[:, 0].set(select(logits[:, 0], position + 1))
        return Verdict(no_draft + 1, emitted, sources, jnp.zeros_like(emitted), no_draft)

    parents = np.array(layout.parents)
    draft_rows = jnp.asarray(layout.draft_rows())

    def is_running(carry):
        depth, running = carry[:2]
        return (depth < num_emitted) & running.any()

    def accept_one(carry):
        depth, running, alive, verdict = carry
        row = verdict.winner + 1  # of `logits`
        conditional = jnp.take_along_axis(logits, row[:, None, None], axis=1)[:, 0]
        token = select(conditional, position + 1 + depth)
        alive = jnp.where(parents < 0, depth == 0, alive[:, parents])
        alive &= draft.valid & (draft.tokens == token[:, None])
        alive &= (running & (depth < layout.max_accepted))[:, None]
        survives = alive.any(axis=1)
        first = jnp.argmax(alive, axis=1).astype(jnp.int32)
        source = jnp.take_along_axis(draft.sources, first[:, None], axis=1)[:, 0]
        next_depth = jnp.minimum(depth + 1, num_emitted - 1)
        path_row = jnp.where(survives, draft_rows[first], verdict.path[:, next_depth])
        verdict = Verdict(
            num_accepted=verdict.num_accepted + survives,
            emitted=verdict.emitted.at[:, depth].set(jnp.where(running, token, 0)),
            sources=verdict.sources.at[:, depth].set(jnp.where(survives, source, FROM_MODEL)),
            path=verdict.path.at[:, next_depth].set(path_row),
            winner=jnp.where(survives, first, verdict.winner),
        )
        return depth + 1, survives, alive, verdict

    start = Verdict(no_draft + 1, emitted, sources, jnp.zeros_like(emitted), no_draft)
    carry = (jnp.int32(0), jnp.ones(batch, bool), jnp.zeros((batch, len(parents)), bool), start)
    return lax.while_loop(is_running, accept_one, carry)[-1]
