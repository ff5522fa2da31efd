"""What a round feeds the network: query rows, where they stand, and what they see.

Shapes: B batch rows, Q packed rows, L of them whose logits are wanted.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jlookahead.layout import Layout, at_stage, place
from jlookahead.state import Draft, RoundState


@flax.struct.dataclass
class PackedRows:
    """Q query rows, of which the logits of L are wanted."""

    tokens: jax.Array  # [B, Q] int32
    positions: jax.Array  # [B, Q] int32
    mask: jax.Array  # [B, Q, Q] bool, True = attends
    logit_rows: jax.Array  # [B, L] int32


def pack(layout: Layout, state: RoundState, draft: Draft) -> PackedRows:
    """Lays last token, window and the layout's drafts out as query rows."""
    batch = state.tokens.shape[0]
    parts = [state.last_token[:, None], draft.tokens]
    if layout.num_jacobi:
        assert state.window is not None, "start() fills it"
        parts.insert(1, state.window.tokens.reshape(batch, -1))
    source = at_stage(layout.source, state.stage)
    logit_rows = at_stage(layout.logit_rows, state.stage)
    offsets, mask = place(layout, state.stage, draft.parents)
    return PackedRows(
        tokens=jnp.take_along_axis(jnp.concatenate(parts, axis=1), source, axis=1),
        positions=state.length[:, None] - 1 + offsets,
        mask=mask,
        logit_rows=jnp.broadcast_to(logit_rows, (batch, logit_rows.shape[1])),
    )


def append_refed(rows: PackedRows, state: RoundState, num_refed: int) -> PackedRows:
    """Adds rows for the accepted tokens whose K/V were not kept, at most `num_refed`.

    They are part of the text: every row sees them, and they see each other causally.
    """
    batch, num_rows = rows.tokens.shape
    index = jnp.arange(num_refed)
    positions = state.num_committed[:, None] + index
    is_refed = positions < state.length[:, None] - 1
    is_seen = jnp.broadcast_to(is_refed[:, None], (batch, num_rows, num_refed))
    causal = jnp.tri(num_refed, dtype=bool) & is_refed[:, None] | jnp.eye(num_refed, dtype=bool)
    nothing = jnp.zeros((batch, num_refed, num_rows), bool)
    return PackedRows(
        tokens=jnp.concatenate(
            [rows.tokens, jnp.take_along_axis(state.tokens, positions, axis=1, mode="clip")], axis=1
        ),
        positions=jnp.concatenate([rows.positions, positions], axis=1),
        mask=jnp.block([[rows.mask, is_seen], [nothing, causal]]),
        logit_rows=rows.logit_rows,
    )


def refed_path(rows: PackedRows, state: RoundState, num_refed: int) -> jax.Array:
    """`[B, 1 + num_refed]` the packed rows whose K/V are committed: those of `append_refed`, then
    the ordinary one."""
    first = rows.tokens.shape[1] - num_refed
    index = jnp.arange(1 + num_refed)
    num_pending = state.length - 1 - state.num_committed
    return jnp.where(index < num_pending[:, None], first + index, 0)
