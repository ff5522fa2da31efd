"""The highest logits, found block by block.

XLA:CPU walks a whole row of logits one by one for an argmax, at a fiftieth of a round each for a
vocabulary of 49k; maxima of blocks are vectorised, and only the best blocks need that walk.
Shapes: V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

NO_TOKEN = -1
_BLOCK = 128


def top_token(logits: jax.Array) -> jax.Array:
    """The id of the highest logit, the lowest of equals: `[..., V]` -> `[...]` int32. With
    NaN among them it is any id."""
    blocks = _in_blocks(logits)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def top_tokens(logits: jax.Array, num: int) -> jax.Array:
    """Ids of the `num` highest logits, highest first: `[..., V]` -> `[..., num]` int32; NO_TOKEN
    for those that a smaller vocabulary, or one mostly of minus infinity, does not have."""
    vocab_size = logits.shape[-1]
    if vocab_size <= num * _BLOCK:
        best = lax.top_k(logits, min(num, vocab_size))[1].astype(jnp.int32)
        missing = [(0, 0)] * (logits.ndim - 1) + [(0, num - best.shape[-1])]
        return jnp.pad(best, missing, constant_values=NO_TOKEN)
    blocks = _in_blocks(logits)
    block = lax.top_k(blocks.max(axis=-1), num)[1]
    inside = jnp.take_along_axis(blocks, block[..., None], axis=-2)
    best = lax.top_k(inside.reshape(*logits.shape[:-1], -1), num)[1]
    of_block = jnp.take_along_axis(block, best // _BLOCK, axis=-1)
    ids = (of_block * _BLOCK + best % _BLOCK).astype(jnp.int32)
    return jnp.where(ids < vocab_size, ids, NO_TOKEN)


def _in_blocks(logits: jax.Array) -> jax.Array:
    """`[..., V]` -> `[..., blocks, block]`, the last one filled up with minus infinity."""
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, -logits.shape[-1] % _BLOCK)]
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf)
    return blocks.reshape(*logits.shape[:-1], -1, _BLOCK)
