"""Weight-only int8: kernels of the linear layers as bytes, one scale per output channel.

The scale is applied after the product, for which bytes are cast to the dtype of the computation.
Embedding, head, norms and biases keep their dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

QUANTIZATIONS = ("int8",)
_LARGEST = 127


def is_quantized(name: str) -> bool:
    """Whether the parameter `layers_0.mlp.up_proj.kernel` is among those that int8 replaces."""
    return name.endswith("_proj.kernel")


@jax.jit
def quantize(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[in, out]` -> int8 `[in, out]` and float32 scales `[out]`, symmetric, rounded to nearest."""
    kernel = kernel.astype(jnp.float32)
    scale = jnp.abs(kernel).max(axis=0) / _LARGEST
    # A channel of zeros has no scale of its own.
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(kernel / scale).astype(jnp.int8), scale
