"""The target's choice of a token: argmax, or a draw keyed by (seed, row, position).

Two schemes, both exact. *Coupled*: the token is drawn from the target's law, and a draft is
accepted iff it equals the draw. Since the key depends on nothing but the seed, the row id and
the absolute position, every strategy draws the very tokens that plain sampling draws.
*Residual*: the drafts themselves are tested, each with the mass that the rejected ones leave.
Drafts are point masses, so both accept equally often; the residual scheme has plain sampling's
law but not its text.

Filters keep what a threshold on the logits keeps. The threshold is found by bisection over
the ordered bit patterns of float32: 32 counting passes, exact, and no sort. Tokens that tie
with the last one kept are kept too.

Source of the residual scheme: Fu et al. (arXiv 2402.02057), algorithm 4, and
`jacobi_sample_multilevel` in `lade/decoding.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jlookahead.vocabulary import top_token


@flax.struct.dataclass
class Sampler:
    """Sampling parameters as arrays, so that a new value compiles nothing."""

    temperature: jax.Array  # [] float32, positive
    top_k: jax.Array  # [] int32, 0 keeps all
    top_p: jax.Array  # [] float32, in (0, 1]
    min_p: jax.Array  # [] float32, in [0, 1]
    seed: jax.Array  # [] uint32
    row_ids: jax.Array  # [B] int32
    verify: str = flax.struct.field(pytree_node=False, default="coupled")


def select(
    sampler: Sampler | None,
    logits: jax.Array,
    positions: jax.Array,
    drafts: jax.Array,
    eligible: jax.Array,
) -> jax.Array:
    """The target's token for one position per batch row.

    Args:
        sampler: None for greedy; ties go to the lowest id.
        logits: `[B, V]` float32.
        positions: `[B]` int32, absolute position of the token to choose.
        drafts: `[B, R]` int32.
        eligible: `[B, R]` bool, the drafts for this position; only the residual scheme looks.

    Returns:
        `[B]` int32.
    """
    if sampler is None:
        return top_token(logits)
    # Not the default implementation: others draw differently in another batch slot.
    seed_key = jax.random.key(sampler.seed, impl="threefry2x32")

    def draw(row_id, position, row_logits, drafts, eligible):
        key = jax.random.fold_in(jax.random.fold_in(seed_key, row_id), position)
        if sampler.verify == "coupled":
            return jax.random.categorical(key, row_logits)
        test_key, rest_key = jax.random.split(key)
        uniforms = jax.random.uniform(test_key, drafts.shape, jnp.float32)
        accepted, rest = try_drafts(row_logits, drafts, eligible, uniforms)
        return jnp.where(accepted >= 0, accepted, jax.random.categorical(rest_key, rest))

    kept = filter_logits(sampler, logits)
    return jax.vmap(draw)(sampler.row_ids, positions, kept, drafts, eligible).astype(jnp.int32)


def try_drafts(
    logits: jax.Array, drafts: jax.Array, eligible: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tests drafts in order: each is accepted with its share of the mass not yet rejected.

    A token that was rejected once has no mass left, so its repetitions are skipped.

    Args:
        logits: `[V]`, -inf where excluded.
        drafts: `[R]` int32.
        eligible: `[R]` bool.
        uniforms: `[R]` draws from [0, 1), one per draft.

    Returns:
        the accepted token `[]`, -1 if none; and the logits `[V]` of the residual.
    """
    if not len(drafts):
        return jnp.int32(-1), logits
    earlier = jnp.tri(len(drafts), k=-1, dtype=bool) & eligible
    is_repeated = (earlier & (drafts[:, None] == drafts)).any(axis=1)
    is_tested = eligible & ~is_repeated
    probabilities = jax.nn.softmax(logits)
    mass = jnp.where(is_tested, probabilities[drafts], 0.0)
    tested = jnp.where(is_tested, drafts, len(logits))
    rest = logits.at[tested].set(-jnp.inf, mode="drop")
    # Summed from the far end, so that the last draft with mass is accepted if nothing else has any.
    rest_mass = jnp.where(rest > -jnp.inf, probabilities, 0.0).sum()
    left = jnp.cumsum(mass[::-1])[::-1] + rest_mass
    accepts = is_tested & (uniforms * left < mass)
    return jnp.where(accepts.any(), drafts[jnp.argmax(accepts)], -1), rest


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
