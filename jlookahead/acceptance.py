"""How often drafts have been right in this very text, and the tokens that this promises a round.

Prompt lookup is recorded by the length of the match before a token, which grows along the draft.
Rounds that draft from everything a strategy knows are recorded by the match that they start from
and by depth: how often they hold the next token, given those before it.

Shapes: B batch rows, C classes, R tokens that lookup found.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jlookahead.state import MatchRecord

# How often the token behind a match of 0, 1, 2, ... tokens was right on SmolLM2, less a fifth.
RIGHT_AT_FIRST = np.array(
    [0, 0.16, 0.36, 0.48, 0.56, 0.6, 0.64, 0.68, 0.7, 0.7, 0.9, 0.9, 0.92], np.float32
)
LONGEST_MATCH = len(RIGHT_AT_FIRST) - 1
# How often `Recycling(56)` held the next token there, less a fifth: a row for matches of 0, 1, 2,
# and 3 or more tokens, a column for every depth, the last one for all beyond it.
HELD_AT_FIRST = np.array(
    [
        [0.25, 0.42, 0.33, 0.2, 0.1],
        [0.54, 0.51, 0.44, 0.15, 0.1],
        [0.62, 0.55, 0.6, 0.4, 0.4],
        [0.76, 0.75, 0.7, 0.6, 0.7],
    ],
    np.float32,
)
_LONGEST_START, _DEEPEST = np.array(HELD_AT_FIRST.shape) - 1
# Observations that those probabilities are worth, and how slowly observations are forgotten.
WEIGHT_AT_FIRST, HELD_WEIGHT_AT_FIRST = 2.0, 1.0
KEPT = 0.97


def at_first(of_everything: bool) -> np.ndarray:
    """The probabilities at the start of a text `[C]`: of lookup, then of everything if wanted."""
    return np.append(RIGHT_AT_FIRST, HELD_AT_FIRST) if of_everything else RIGHT_AT_FIRST


def _counts_at_first(of_everything: bool) -> tuple[jax.Array, jax.Array]:
    """`right` and `total` of a record at the start of a text `[C]`."""
    total = np.full(RIGHT_AT_FIRST.size, WEIGHT_AT_FIRST, np.float32)
    if of_everything:
        of_held = np.full(HELD_AT_FIRST.size, HELD_WEIGHT_AT_FIRST, np.float32)
        total = np.append(total, of_held)
    return jnp.asarray(total * at_first(of_everything)), jnp.asarray(total)


def new_record(batch: int, held: jax.Array | None) -> MatchRecord:
    """The record at the start of a text; see `MatchRecord` for `held`, None without wide rounds."""
    right, total = _counts_at_first(held is not None)
    shape = (batch, len(total))
    return MatchRecord(jnp.broadcast_to(right, shape), jnp.broadcast_to(total, shape), held)


def tokens_by_lookup(chances: jax.Array, match_len: jax.Array, exists: jax.Array) -> jax.Array:
    """Expected tokens `[B, R]` of a round that drafts the first 1, 2, ... tokens that lookup found.

    Args:
        chances: `[B, C]` probabilities.
        match_len: `[B, R]` length of the match before each token, at most LONGEST_MATCH.
        exists: `[B, R]` bool.
    """
    right = jnp.where(exists, jnp.take_along_axis(chances, match_len, axis=1), 0)
    return 1 + jnp.cumsum(jnp.cumprod(right, axis=1), axis=1)


def tokens_by_everything(chances: jax.Array, match_len: jax.Array, max_accepted: int) -> jax.Array:
    """Expected tokens `[B]` of a round that drafts from everything.

    Args:
        chances: `[B, C]` probabilities.
        match_len: `[B]` length of the match that the round starts from.
        max_accepted: most drafts it may accept.
    """
    depth = np.minimum(np.arange(max_accepted), _DEEPEST)
    classes = _first_class(match_len)[:, None] + depth
    held = jnp.take_along_axis(chances, classes, axis=1)
    return 1 + jnp.cumprod(held, axis=1).sum(axis=1)


def _first_class(match_len: jax.Array) -> jax.Array:
    start = jnp.minimum(match_len, _LONGEST_START)
    return len(RIGHT_AT_FIRST) + start * (_DEEPEST + 1)


def count_lookups(match_len: jax.Array, which: jax.Array, num_classes: int) -> jax.Array:
    """Tokens of each class `[B, C]`, for `which [B, R]` and the matches before them."""
    of_class = match_len[..., None] == jnp.arange(num_classes)
    return (of_class & which[..., None]).sum(axis=1)


def count_depths(match_len: jax.Array, depth: jax.Array, num_classes: int) -> jax.Array:
    """Tokens of each class `[B, C]`, those down to `depth [B]` behind the match `[B]`."""
    column = jnp.arange(num_classes) - _first_class(match_len)[:, None]
    beyond = jnp.maximum(depth[:, None] - column, 0)
    here = jnp.where(column < _DEEPEST, jnp.minimum(beyond, 1), beyond)
    return jnp.where((column >= 0) & (column <= _DEEPEST), here, 0)


def learn(record: MatchRecord, tried: jax.Array, right: jax.Array) -> MatchRecord:
    """The record with the observations of a round, `[B, C]` of each class; older ones of the same
    class count a little less."""
    right_at_first, total_at_first = _counts_at_first(record.held is not None)
    kept = jnp.where(tried > 0, KEPT, 1.0)
    return dataclasses.replace(
        record,
        right=right_at_first + kept * (record.right - right_at_first) + right,
        total=total_at_first + kept * (record.total - total_at_first) + tried,
    )
