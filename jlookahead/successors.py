"""The table of likely successors: for every token, what the target last held likeliest after it.

Source: Luo et al., Token Recycling (arXiv 2408.08696): the adjacency matrix.
Shapes: B batch rows, V vocabulary, K successors per token, M rows recorded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jlookahead.vocabulary import NO_TOKEN


def init_successors(batch: int, vocab_size: int, num_successors: int) -> jax.Array:
    """An empty table `[B, V, K]` int32, NO_TOKEN throughout; `4 V K` bytes per batch row."""
    return jnp.full((batch, vocab_size, num_successors), NO_TOKEN, jnp.int32)


def record(
    table: jax.Array,
    tokens: jax.Array,
    successors: jax.Array,
    priority: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """Replaces the entries of `tokens`.

    Args:
        table: `[B, V, K]`.
        tokens: `[B, M]` int32.
        successors: `[B, M, K]` int32, likeliest first.
        priority: `[M]` or `[B, M]` int32, not negative, distinct within a row: of several
            entries for one token the highest stays.
        valid: `[B, M]` bool, entries that count.
    """
    batch, vocab_size, _ = table.shape
    row = jnp.arange(batch)[:, None]
    priority = jnp.where(valid, priority, -1)
    highest = jnp.full((batch, vocab_size), -1).at[row, tokens].max(priority)
    stays = valid & (priority == highest[row, tokens])
    # Unique targets, those that write nothing beyond the table: scatter order is undefined.
    target = jnp.where(stays, tokens, vocab_size + jnp.arange(tokens.shape[1]))
    return table.at[row, target].set(successors, mode="drop", unique_indices=True)
