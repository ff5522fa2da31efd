"""The layers that every part of the network is made of: products, norm, embeddings.

What HF calls `weight [out, in]` of a linear layer is Flax's `kernel [in, out]` here: XLA:CPU packs
the other orientation anew in every product of two rows or more, which makes 8 rows cost a third
more.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

_PARTS_OF_SUM = 4


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """The precision that products of this dtype ask for."""
    # Accelerators multiply float32 in lower precision unless told otherwise.
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(x, kernel, precision=precision_of(x.dtype))


def _row_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """One row times a kernel, the sum split in parts: XLA:CPU runs one small product on one thread
    and those of a batch on several, and a single thread does not reach the memory's bandwidth."""
    num_in, num_out = kernel.shape
    parts = math.gcd(num_in, _PARTS_OF_SUM)
    products = jnp.matmul(
        x.reshape(parts, 1, num_in // parts),
        kernel.reshape(parts, num_in // parts, num_out),
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return products.sum(axis=0).astype(x.dtype).reshape(*x.shape[:-1], num_out)


class Linear(nn.Module):
    """`x [..., in] -> [..., out]` with a kernel `[in, out]`, in int8 one with scales `[out]`."""

    features: int
    dtype: jnp.dtype
    use_bias: bool = False
    quantization: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1], self.features)
        if self.quantization == "int8":
            kernel = self.param("kernel", nn.initializers.zeros, shape, jnp.int8)
            kernel = kernel.astype(self.dtype)
        else:
            kernel = self.param("kernel", nn.initializers.normal(0.02), shape, self.dtype)
        if x.size > x.shape[-1]:
            y = _product(x, kernel)
        else:
            y = lax.platform_dependent(x, kernel, cpu=_row_product, default=_product)
        if self.quantization == "int8":
            scale = self.param("scale", nn.initializers.ones, (self.features,), jnp.float32)
            y = (y.astype(jnp.float32) * scale).astype(self.dtype)
        if self.use_bias:
            y += self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
        return y


class RMSNorm(nn.Module):
    eps: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), self.dtype)
        x32 = x.astype(jnp.float32)
        x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return weight * x32.astype(x.dtype)


class Embedding(nn.Module):
    vocab_size: int
    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        shape = (self.vocab_size, self.features)
        weight = self.param("weight", nn.initializers.normal(0.02), shape, self.dtype)
        return weight[tokens]


class TiedEmbedding(nn.Module):
    """The head's kernel `[hidden, V]` read as a table: the embedding of a token is its column."""

    vocab_size: int
    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        shape = (self.features, self.vocab_size)
        kernel = self.param("kernel", nn.initializers.normal(0.02), shape, self.dtype)
        return jnp.moveaxis(kernel[:, tokens], 0, -1)
