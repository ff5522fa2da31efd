"""The target's choice of a token: argmax, or a draw keyed by (seed, row, position).

A draft token is accepted iff it equals that choice. Drafts are point masses, so this is
exact rejection sampling; and since the key depends on nothing but the seed, the row id and
the absolute position, every strategy draws the very tokens that plain sampling draws.

Filters keep what a threshold on the logits keeps. The threshold is found by bisection over
the ordered bit patterns of float32: 32 counting passes, exact, and no sort. Tokens that tie
with the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax


@flax.struct.dataclass
class Sampler:
    """Sampling parameters as arrays, so that a new value compiles nothing."""

    temperature: jax.Array  # [] float32, positive
    top_k: jax.Array  # [] int32, 0 keeps all
    top_p: jax.Array  # [] float32, in (0, 1]
    min_p: jax.Array  # [] float32, in [0, 1]
    seed: jax.Array  # [] uint32
    row_ids: jax.Array  # [B] int32


def select(sampler: Sampler | None, logits: jax.Array, positions: jax.Array) -> jax.Array:
    """The target's token for one position per batch row.

    Args:
        sampler: None for greedy; ties go to the lowest id.
        logits: `[B, V]` float32.
        positions: `[B]` int32, absolute position of the token to choose.

    Returns:
        `[B]` int32.
    """
    if sampler is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    # Not the default implementation: others draw differently in another batch slot.
    seed_key = jax.random.key(sampler.seed, impl="threefry2x32")

    def draw(row_id, position, row_logits):
        key = jax.random.fold_in(jax.random.fold_in(seed_key, row_id), position)
        return jax.random.categorical(key, row_logits)

    kept = filter_logits(sampler, logits)
    return jax.vmap(draw)(sampler.row_ids, positions, kept).astype(jnp.int32)


def filter_logits(sampler: Sampler, logits: jax.Array) -> jax.Array:
    """Temperature, then top-k, top-p and min-p in HF's order; `[B, V]`, -inf where excluded."""
    # Below the floors, which mean the argmax already, float32 overflows or is zero.
    logits = logits / jnp.maximum(sampler.temperature, 1e-30)
    vocab_size = logits.shape[-1]
    top_k = jnp.where(sampler.top_k > 0, sampler.top_k, vocab_size)
    logits = _keep_least(logits, lambda kept: kept.sum(axis=-1) >= top_k)
    probabilities = jax.nn.softmax(logits, axis=-1)
    # At top_p = 1 rounding must not cut the tail.
    top_p = jnp.maximum(sampler.top_p, jnp.finfo(jnp.float32).tiny)
    top_p = jnp.where(top_p < 1, top_p, jnp.inf)
    logits = _keep_least(
        logits, lambda kept: jnp.where(kept, probabilities, 0.0).sum(axis=-1) >= top_p
    )
    probabilities = jax.nn.softmax(logits, axis=-1)
    floor = sampler.min_p * probabilities.max(axis=-1, keepdims=True)
    return jnp.where(probabilities >= floor, logits, -jnp.inf)


def _keep_least(logits: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Keeps the smallest set `{logits >= t}` that is enough, or everything if none is.

    Args:
        logits: `[B, V]` float32.
        is_enough: monotone in the set: `[B, V]` bool -> `[B]` bool.
    """
    ordered = _ordered_bits(logits)
    shape = (logits.shape[0], 1)
    lowest = jnp.full(shape, jnp.iinfo(jnp.int32).min)
    highest = jnp.full(shape, jnp.iinfo(jnp.int32).max)

    def halve(_, bounds):
        low, high = bounds  # {>= low} is enough or low is the minimum; {>= high} is not
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = is_enough(ordered >= middle)[:, None]
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    threshold, _ = lax.fori_loop(0, 32, halve, (lowest, highest))
    return jnp.where(ordered >= threshold, logits, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """int32 that sort as the float32 do, -0 as 0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
