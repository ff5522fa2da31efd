"""The trajectory window: the last N-1 Jacobi sweeps over W columns of predicted text.

Level r, column j stands for position p + j + r, p being the ordinary row's; column 0 of
level 0 is the ordinary token itself and is not stored. A round predicts the level after the
deepest one from the deepest level's rows; reading a column downwards gives an n-gram.

Source: Fu et al., Lookahead Decoding (arXiv 2402.02057), section 3.2; fill stages as in
`jacobi_greedy_search_multilevel` of the official implementation.
Shapes: B batch rows, L = N-1 levels, C = W+N-2 columns, J predicted columns (W, or C while
warming up).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class Window:
    """The levels and how many of them are filled.

    At stage s levels 0..s are filled, each `C - s` columns wide; stage N-2 is the steady one.
    """

    tokens: jax.Array  # [B, L, C] int32
    stage: jax.Array  # [B] int32, index of the deepest filled level

    def levels(self, row: int = 0) -> list[list[int] | None]:
        """The filled levels of one batch row, None for those not filled yet (on the host).

        Level 0 comes without column 0 (the ordinary token), so in the steady stage the
        lists hold W-1, W, ..., W tokens, as the official implementation's `past_tokens`.
        """
        tokens, stage = np.asarray(self.tokens)[row], int(self.stage[row])
        width = tokens.shape[1] - stage
        return [
            tokens[r, int(r == 0) : width].tolist() if r <= stage else None
            for r in range(len(tokens))
        ]


def spread_over_prompt(
    prompt: jax.Array, prompt_len: jax.Array, avoid: jax.Array, num_starts: int, run: int
) -> jax.Array:
    """Seeds: `num_starts` runs of consecutive prompt tokens, spread evenly over the prompt.

    Args:
        prompt: `[B, P]` int32, right-padded.
        prompt_len: `[B]`, at least 1.
        avoid: `[E]` ids that make poor seeds (end of sequence); skipped where possible.
        num_starts: runs per batch row.
        run: tokens of a run. A prompt shorter than that repeats its last token.

    Returns:
        `[B, num_starts, run]` int32.
    """
    batch, size = prompt.shape
    inside = jnp.arange(size) < prompt_len[:, None]
    wanted = inside & ~jnp.isin(prompt, avoid)
    wanted = jnp.where(wanted.any(axis=1, keepdims=True), wanted, inside)
    count = wanted.sum(axis=1)
    compact = jnp.take_along_axis(prompt, jnp.argsort(~wanted, axis=1, stable=True), axis=1)
    last_start = jnp.maximum(count - run, 0)
    starts = jnp.arange(num_starts) * last_start[:, None] // max(num_starts - 1, 1)
    index = jnp.minimum(starts[..., None] + jnp.arange(run), count[:, None, None] - 1)
    return jnp.take_along_axis(compact, index.reshape(batch, -1), axis=1).reshape(index.shape)


def trajectory_ngrams(
    window: Window, last_token: jax.Array, predicted: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads the n-grams of a steady window: key, then its column downwards.

    Args:
        window: the window that was fed.
        last_token: `[B]` the ordinary token, key of column 0.
        predicted: `[B, J]` the new deepest level.
        width: columns W.

    Returns:
        keys `[B, W]`, suffixes `[B, W, N-1]`, valid `[B, W]` (False while warming up).
    """
    keys = window.tokens[:, 0, :width].at[:, 0].set(last_token)
    column_wise = window.tokens[:, 1:, :width].transpose(0, 2, 1)
    suffixes = jnp.concatenate([column_wise, predicted[:, :width, None]], axis=2)
    is_steady = window.stage == window.tokens.shape[1] - 1
    return keys, suffixes, jnp.broadcast_to(is_steady[:, None], keys.shape)


def advance(window: Window, predicted: jax.Array, active: jax.Array) -> Window:
    """Moves the window on by one position, whatever was accepted.

    Steady: the oldest level drops out, the predicted one comes in. Filling: every level
    drops its first column and the predicted one becomes the next level.

    Args:
        window: the window that was fed.
        predicted: `[B, J]` argmax of the deepest filled level's rows, by column.
        active: `[B]` bool; other rows stay as they are.
    """
    num_levels, num_columns = window.tokens.shape[1:]
    last = num_levels - 1
    missing = num_columns - predicted.shape[1]
    new = jnp.pad(predicted, ((0, 0), (0, missing)))[:, None]
    steady = jnp.concatenate([window.tokens[:, 1:], new], axis=1)
    is_next = jnp.arange(num_levels)[:, None] == window.stage[:, None, None] + 1
    filling = jnp.roll(jnp.where(is_next, new, window.tokens), -1, axis=2)
    moved = jnp.where((window.stage == last)[:, None, None], steady, filling)
    return Window(
        tokens=jnp.where(active[:, None, None], moved, window.tokens),
        stage=jnp.where(active, jnp.minimum(window.stage + 1, last), window.stage),
    )
