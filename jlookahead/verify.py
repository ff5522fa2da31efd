"""Verification: walk the draft forest as far as the target agrees.

Shapes: B batch rows, R draft rows, M = max_accepted + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jlookahead.layout import Layout, at_variant
from jlookahead.state import FROM_MODEL, Draft

Selector = Callable[[jax.Array, jax.Array], jax.Array]


@flax.struct.dataclass
class Verdict:
    """What the target accepts, before any stop condition."""

    num_accepted: jax.Array  # [B] int32, 0..M-1
    emitted: jax.Array  # [B, M] int32, the accepted drafts, the target's own token, then 0
    source: jax.Array  # [B, M] int8
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
        logits: `[B, 1 + R + J, V]`, the ordinary row and the draft rows first.
        draft: tokens on a forest of the layout.
        layout: the forests, and `max_accepted`.
        position: `[B]` absolute position of the ordinary row.
        select: the target's choice, `(logits [B, V], positions [B]) -> tokens [B]`.

    Returns:
        a `Verdict`; ties between survivors go to the lowest draft row.
    """
    batch, max_emitted = logits.shape[0], layout.max_emitted
    num_drafts = layout.num_drafts
    parents = jnp.broadcast_to(at_variant(layout.parents, draft.variant), (batch, num_drafts))

    def is_running(carry):
        depth, running, *_ = carry
        return (depth < max_emitted) & running.any()

    def accept_one(carry):
        depth, running, alive, winner, num_accepted, emitted = carry
        conditional = jnp.take_along_axis(logits, winner[:, None, None] + 1, axis=1)[:, 0]
        token = select(conditional, position + 1 + depth)
        emitted = emitted.at[:, depth].set(jnp.where(running, token, 0))
        parent_alive = jnp.take_along_axis(alive, jnp.maximum(parents, 0), axis=1)
        alive = jnp.where(parents < 0, depth == 0, parent_alive)
        alive &= draft.valid & (draft.tokens == token[:, None])
        alive &= (running & (depth < layout.max_accepted))[:, None]
        survives = alive.any(axis=1)
        lowest = jnp.where(alive, jnp.arange(num_drafts, dtype=jnp.int32), num_drafts)
        lowest = lowest.min(axis=1, initial=num_drafts)
        winner = jnp.where(survives, lowest, winner)
        return depth + 1, survives, alive, winner, num_accepted + survives, emitted

    _, _, _, winner, num_accepted, emitted = lax.while_loop(
        is_running,
        accept_one,
        (
            jnp.int32(0),
            jnp.ones(batch, bool),
            jnp.zeros((batch, num_drafts), bool),
            jnp.full(batch, -1, jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros((batch, max_emitted), jnp.int32),
        ),
    )
    paths = at_variant(layout.paths, draft.variant)
    paths = jnp.broadcast_to(paths, (batch, *paths.shape[1:]))
    path = jnp.take_along_axis(paths, winner[:, None, None] + 1, axis=1)[:, 0]
    first_draft = layout.num_rows - num_drafts
    path_draft = path[:, 1:] - first_draft  # negative beyond the winner
    padded = jnp.pad(draft.source, ((0, 0), (0, 1)), constant_values=FROM_MODEL)
    source = jnp.take_along_axis(padded, jnp.maximum(path_draft, 0), axis=1)
    source = jnp.where(path_draft >= 0, source, FROM_MODEL)
    return Verdict(
        num_accepted=num_accepted,
        emitted=emitted,
        source=jnp.pad(source, ((0, 0), (0, 1)), constant_values=FROM_MODEL),
        path=path,
        winner=winner,
    )
