"""Rotary position embedding: its parameters, frequencies and the rotation itself.

The scaling types are those of transformers' `modeling_rope_utils`. Frequencies are functions of
the position alone, so that a token's K/V do not depend on how a text was cut into passes.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jlookahead.checks import check_bool, check_choice, check_number

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, in the terms of HF `rope_parameters`.

    `factor` is used by all types but `default`, `original_max_position_embeddings` by `dynamic`,
    `llama3` and `yarn`, the `freq_factor` fields by `llama3`, those behind them by `yarn`.

    Attributes:
        attention_factor: by which cosine and sine are multiplied.
        truncate: whether the dimensions between which YaRN blends are rounded to integers.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_choice("rope type", self.type, ROPE_TYPES)
        check_number("rope theta", self.theta, "1 to 1e30", 1, 1e30)
        check_number("rope factor", self.factor, "1 to 1e6", 1, 1e6)
        for name in (
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        ):
            check_number(f"rope {name}", getattr(self, name), "a positive number", 1e-9, 1e12)
        check_bool("rope truncate", self.truncate)
        if self.type == "yarn" and self.theta == 1:
            raise ValueError("rope theta: got 1, must exceed 1 for type 'yarn'")
        for greater, less in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
            if getattr(self, greater) <= getattr(self, less):
                raise ValueError(
                    f"rope {greater}: got {getattr(self, greater)}, must exceed "
                    f"{less} {getattr(self, less)}"
                )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Rotary frequencies `[D / 2]` float32; those of `dynamic` within the original context.

    An error of one unit in the last place moves the logits at position 1000 by 1e-4, and
    NumPy's float32 power has such errors where PyTorch's has not: it is taken in float64.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = rope.theta ** exponents.astype(np.float64)
    frequencies = np.float32(1) / powers.astype(np.float32)
    if rope.type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.type == "llama3":
        wavelength = 2 * math.pi / frequencies
        original = rope.original_max_position_embeddings
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        frequencies = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    if rope.type == "yarn":
        kept = _yarn_kept(rope, head_dim)
        frequencies = (1 - kept) * frequencies / np.float32(rope.factor) + kept * frequencies
    return frequencies.astype(np.float32)


def _yarn_kept(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """How much of each frequency YaRN keeps: 1 for fast ones, 0 for slow ones (Peng et al. 2023,
    section 3.2)."""

    def dimension(rotations: float) -> float:
        """The dimension that turns this often within the original context."""
        original = rope.original_max_position_embeddings
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    return 1 - np.clip(ramp, 0, 1).astype(np.float32)


def rotary_angles(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[B, 1, Q, D / 2]` float32 of `positions [B, Q]`, for `rotate`.

    `dynamic` takes the frequencies of a text that ends with the token itself: those of
    transformers wherever it decodes token by token. (For a prompt longer than the original
    context transformers takes those of the whole prompt, and the result depends on how the text
    is cut into passes.)
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    if rope.type == "dynamic":
        # theta grows by stretch ** (D / (D - 2)); the exponent of dimension 2 i is -2 i / D.
        length = jnp.maximum(positions + 1, rope.original_max_position_embeddings)
        beyond = length.astype(jnp.float32) / rope.original_max_position_embeddings - 1
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim - 2)
        frequencies *= jnp.exp(-exponents * jnp.log1p(rope.factor * beyond)[..., None])
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return (
        rope.attention_factor * jnp.cos(angles)[:, None],
        rope.attention_factor * jnp.sin(angles)[:, None],
    )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Half-split rotary embedding of `x [B, heads, Q, D]`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
