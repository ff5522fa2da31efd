"""Writing blocks into per-row buffers of tokens and K/V, each row at its own place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

# More rows than this are written by one scatter, which is slower and quicker to compile.
_MAX_UNROLLED = 16


@functools.partial(jax.jit, inline=True)  # traced once for all layers
def write_rows(buffer: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `block` into `buffer` from `start [B]` along the slot axis, row by row.

    Slots are axis 1 of tokens `[B, T]` and axis 2 of K/V `[B, K, S, D]`. An update past the
    end would be moved back over valid slots: capacity leaves a block of slack.
    """
    slot_axis = max(buffer.ndim - 2, 1)
    block = block.astype(buffer.dtype)
    if len(buffer) > _MAX_UNROLLED:

        def write_row(row: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(row, new, at, axis=slot_axis - 1)

        return jax.vmap(write_row)(buffer, block, start)
    for b in range(len(buffer)):
        row = lax.dynamic_slice_in_dim(block, b, 1, axis=0)
        at = [jnp.zeros((), start.dtype)] * buffer.ndim
        at[0], at[slot_axis] = jnp.asarray(b, start.dtype), start[b]
        buffer = lax.dynamic_update_slice(buffer, row, at)
    return buffer
