"""Attention over new rows and the committed prefix, chunk by chunk.

Shapes: B rows of the batch, Q packed query rows, S cache slots, D head_dim, K key/value heads,
G query heads per key/value head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jlookahead.layers import precision_of
from jlookahead.sharding import largest_anywhere

# Cache slots attended to at once. The loop over chunks has a traced trip count, so that the
# cost follows the length in use and not the capacity.
PREFIX_CHUNK = 256
# XLA:CPU copies a chunk out of the cache before it multiplies. In caches up to this size, reading
# all slots in place takes less time than copying those in use.
_WHOLE_CACHE = 512


def attend(
    q: jax.Array,
    new_keys: jax.Array,
    new_values: jax.Array,
    positions: jax.Array,
    workspace_mask: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    chunks: tuple[int | jax.Array, jax.Array],
    sliding_window: int | None = None,
) -> jax.Array:
    """Attention over the workspace and the committed prefix.

    The two parts are merged by running float32 (max, sum, unnormalised output), workspace
    first: it is never empty, since every row sees itself, so no row's maximum stays at the
    sentinel. No `[Q, S]` mask is ever built.

    Args:
        q: `[B, K, G, Q, D]`, scaled.
        new_keys, new_values: `[B, K, Q, D]`, of the workspace.
        positions: `[B, Q]` int32, of the rows; a slot's position is its number.
        workspace_mask: `[Q, Q]` or `[B, Q, Q]` bool, True = row i attends to row j.
        keys, values: `[B, K, S, D]`, of the prefix; S is 0 where there is none.
        lengths: `[B]` int32, committed slots.
        chunks: of the prefix, see `prefix_chunks`.
        sliding_window: tokens back that a row attends to, itself included; None for all.

    Returns:
        `[B, K, G, Q, D]`, in q's dtype.
    """
    batch, kv_heads, group, num_rows, dim = q.shape
    precision = precision_of(q.dtype)
    blocked = jnp.finfo(jnp.float32).min
    q = q.reshape(batch, kv_heads, group * num_rows, dim)

    def scores(k: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkqd,bksd->bkqs", q, k, precision=precision, preferred_element_type=jnp.float32
        )

    def weighted(p: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkqs,bksd->bkqd",
            p.astype(v.dtype),
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def masked(s: jax.Array, mask: jax.Array) -> jax.Array:
        """`s [B, K, G * Q, S]` where `mask [B, 1 or Q, S]` lets it through."""
        if mask.shape[1] > 1:
            mask = jnp.tile(mask, (1, group, 1))
        return jnp.where(mask[:, None], s, blocked)

    mask = jnp.broadcast_to(workspace_mask, (batch, num_rows, num_rows))
    if sliding_window is not None:
        mask &= positions[:, :, None] - positions[:, None, :] < sliding_window
    s = masked(scores(new_keys), mask)
    top = s.max(axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    carry = top, p.sum(axis=-1, keepdims=True), weighted(p, new_values)

    chunk = _chunk_size(keys.shape[2])

    def add_chunk(index: jax.Array, carry: tuple) -> tuple:
        top, total, out = carry
        start = index * chunk
        k = lax.dynamic_slice_in_dim(keys, start, chunk, axis=2)
        v = lax.dynamic_slice_in_dim(values, start, chunk, axis=2)
        slots = start + jnp.arange(chunk)
        mask = (slots < lengths[:, None])[:, None, :]
        if sliding_window is not None:
            mask &= positions[:, :, None] - slots < sliding_window
        s = masked(scores(k), mask)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        p = jnp.exp(s - new_top)
        shrink = jnp.exp(top - new_top)
        return (
            new_top,
            total * shrink + p.sum(axis=-1, keepdims=True),
            out * shrink + weighted(p, v),
        )

    if keys.shape[2]:
        carry = lax.fori_loop(*chunks, add_chunk, carry)
    _, total, out = carry
    return (out / total).astype(q.dtype).reshape(batch, kv_heads, group, num_rows, dim)


def prefix_chunks(
    num_slots: int, positions: jax.Array, lengths: jax.Array, sliding_window: int | None = None
) -> tuple[int | jax.Array, jax.Array]:
    """The first chunk of the prefix that any row attends to, and the one behind the last.

    Args:
        num_slots: S.
        positions, lengths, sliding_window: see `attend`.

    Raises:
        ValueError: slots that are no whole number of chunks.
    """
    if not num_slots:
        return 0, jnp.int32(0)
    chunk = _chunk_size(num_slots)
    if num_slots % chunk:
        raise ValueError(f"cache slots: got {num_slots}, must be a multiple of {chunk}")
    end = (largest_anywhere(lengths.max()) + chunk - 1) // chunk
    if sliding_window is None:
        return 0, end
    earliest = -largest_anywhere(-positions.min())
    return jnp.maximum(earliest - sliding_window + 1, 0) // chunk, end


def _chunk_size(num_slots: int) -> int:
    return num_slots if num_slots <= _WHOLE_CACHE else PREFIX_CHUNK
