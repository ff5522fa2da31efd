"""Earlier occurrences of the current suffix: the search behind prompt lookup.

The whole token buffer is compared at once on the device, in `max_ngram` passes over its ids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def find_matches(
    tokens: jax.Array, length: jax.Array, max_ngram: int, num_matches: int
) -> tuple[jax.Array, jax.Array]:
    """Finds where the last tokens of each row occurred before.

    Longer matches come first, then more recent ones; every match is followed by another token
    than those before it. The suffix does not match itself.

    Args:
        tokens: `[B, T]` int32; what lies beyond the length is not read.
        length: `[B]` int32.
        max_ngram: longest suffix compared; shorter ones down to 1 count too.
        num_matches: matches G wanted.

    Returns:
        start of each continuation `[B, G]` (the index after the match), and the length of each
        match in tokens `[B, G]`, 0 for none.
    """
    num_slots = tokens.shape[1]
    slot = jnp.arange(num_slots)
    match_len = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(max_ngram):
        suffix = jnp.take_along_axis(tokens, jnp.maximum(length[:, None] - 1 - back, 0), axis=1)
        same = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :num_slots] == suffix
        # `back` tokens matched so far, and neither side runs off the front.
        same &= (match_len == back) & (slot >= back) & (length[:, None] > back)
        match_len += same
    match_len = jnp.where(slot < length[:, None] - 1, match_len, 0)
    score = jnp.where(match_len > 0, match_len * num_slots + slot, -1)
    following = jnp.roll(tokens, -1, axis=1)
    starts, lengths = [], []
    for _ in range(num_matches):
        best = jnp.argmax(score, axis=1, keepdims=True)
        found = jnp.take_along_axis(score, best, axis=1) >= 0
        starts.append(best + 1)
        lengths.append(jnp.where(found, jnp.take_along_axis(match_len, best, axis=1), 0))
        drafted = jnp.take_along_axis(following, best, axis=1)
        score = jnp.where(following == drafted, -1, score)
    return jnp.concatenate(starts, axis=1), jnp.concatenate(lengths, axis=1)


# A match drafts up to this many tokens; longer matches than reach it are not told apart.
LONGEST_DRAFT = 16
LONGEST_MATCH = (LONGEST_DRAFT - 2) // 2


def draft_length(match_len: jax.Array) -> jax.Array:
    """Tokens worth drafting behind a match of `match_len`: 2 + 2m, but 3 behind a single token."""
    return jnp.select([match_len == 0, match_len == 1], [0, 3], 2 + 2 * match_len)


def continuations(
    tokens: jax.Array, length: jax.Array, starts: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """The `size` tokens from each of `starts [B, G]`: ids, and which exist, `[B, G, size]`."""
    index = starts[..., None] + jnp.arange(size)
    flat = jnp.minimum(index, tokens.shape[1] - 1).reshape(len(tokens), -1)
    ids = jnp.take_along_axis(tokens, flat, axis=1).reshape(index.shape)
    return ids, index < length[:, None, None]
