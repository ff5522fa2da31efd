"""The LLaMA network, as Flax Linen modules over a plain nested dict of parameters.

The decoding loop sees a network only as a `TargetModel`: `forward` turns packed query rows
into hidden states and the new K/V of those rows, reading the committed cache and never
writing it; `logits` applies the head to the hidden rows one asks for.

Parameter names are HF's, with `model.` dropped, `layers.3` spelled `layers_3`, and the
`weight [out, in]` of a linear layer as Flax's `kernel [in, out]`, see `layers.py`. A tied model
has no `embed_tokens`: its embedding is the head, one column per token.

Shapes: B rows of the batch, Q packed query rows, S cache slots, D head_dim, K key/value
heads, G query heads per key/value head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlookahead.layers import Embedding, Linear, RMSNorm, TiedEmbedding, precision_of
from jlookahead.model_config import ModelConfig, RopeConfig

Params = Any
KVRows = tuple[tuple[jax.Array, jax.Array], ...]

# Cache slots attended to at once. The loop over chunks has a traced trip count, so that the
# cost follows the length in use and not the capacity.
PREFIX_CHUNK = 256


@flax.struct.dataclass
class KVCache:
    """Keys and values of the committed tokens: per layer, head-major `[B, K, S, D]`.

    Slots at or beyond a row's committed length hold garbage and are never attended to.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    def grown(self, num_slots: int) -> KVCache:
        """The cache with `num_slots` slots, at least as many as it has."""

        def grow(slots: jax.Array) -> jax.Array:
            return jnp.pad(slots, ((0, 0), (0, 0), (0, num_slots - slots.shape[2]), (0, 0)))

        return jax.tree.map(grow, self)

    def updated(
        self, new_kv: KVRows, write: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> KVCache:
        """The cache after `write(slots, rows)` of every layer's new keys and values."""
        return KVCache(
            keys=tuple(write(k, new) for k, (new, _) in zip(self.keys, new_kv, strict=True)),
            values=tuple(write(v, new) for v, (_, new) in zip(self.values, new_kv, strict=True)),
        )


class TargetModel(Protocol):
    """What the decoding loop needs of a network; must be hashable (it is a static argument)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    def init_cache(self, batch: int, num_slots: int) -> KVCache: ...

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        workspace_mask: jax.Array,
        cache: KVCache,
        lengths: jax.Array,
    ) -> tuple[jax.Array, KVRows]:
        """Runs Q rows. The cache is read-only; K/V of the rows are returned beside it.

        Args:
            params: the parameters.
            tokens: `[B, Q]` int32.
            positions: `[B, Q]` int32, absolute.
            workspace_mask: `[Q, Q]` or `[B, Q, Q]` bool, True = row i attends to row j.
            cache: committed K/V.
            lengths: `[B]` int32, committed slots; every row attends to all of them.

        Returns:
            hidden states `[B, Q, hidden]` and, per layer, `(keys, values)` `[B, K, Q, D]`.
        """
        ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """`[..., hidden]` -> float32 `[..., V]`."""
        ...


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Rotary frequencies `[D / 2]` float32, as transformers `modeling_rope_utils` computes them.

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
    return frequencies.astype(np.float32)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Half-split rotary embedding of `x [B, heads, Q, D]` by `cos`, `sin` `[B, 1, Q, D / 2]`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _attend(
    q: jax.Array,
    new_keys: jax.Array,
    new_values: jax.Array,
    workspace_mask: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """Attention of `q [B, K, G, Q, D]` over the workspace and the committed prefix.

    The two parts are merged by running float32 (max, sum, unnormalised output), workspace
    first: it is never empty, since every row sees itself, so no row's maximum stays at the
    sentinel. No `[Q, S]` mask is ever built.
    """
    batch, kv_heads, group, num_rows, dim = q.shape
    precision = precision_of(q.dtype)
    blocked = jnp.finfo(jnp.float32).min
    q = q.reshape(batch, kv_heads, group * num_rows, dim) * jnp.asarray(dim**-0.5, q.dtype)

    def scores(k: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkqd,bksd->bkqs", q, k, precision=precision, preferred_element_type=jnp.float32
        )

    def weighted(p: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkqs,bksd->bkqd",
            p.astype(v.dtype),
            v,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    mask = jnp.broadcast_to(workspace_mask, (batch, num_rows, num_rows))
    mask = jnp.tile(mask, (1, group, 1))[:, None]
    s = jnp.where(mask, scores(new_keys), blocked)
    top = s.max(axis=-1, keepdims=True)
    p = jnp.exp(s - top)
    carry = top, p.sum(axis=-1, keepdims=True), weighted(p, new_values)

    num_slots = keys.shape[2]
    chunk = min(PREFIX_CHUNK, num_slots)
    if num_slots % chunk:
        raise ValueError(f"cache slots: got {num_slots}, must be a multiple of {chunk}")

    def add_chunk(index: jax.Array, carry: tuple) -> tuple:
        top, total, out = carry
        start = index * chunk
        k = lax.dynamic_slice_in_dim(keys, start, chunk, axis=2)
        v = lax.dynamic_slice_in_dim(values, start, chunk, axis=2)
        committed = start + jnp.arange(chunk) < lengths[:, None]
        s = jnp.where(committed[:, None, None, :], scores(k), blocked)
        new_top = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        p = jnp.exp(s - new_top)
        shrink = jnp.exp(top - new_top)
        return (
            new_top,
            total * shrink + p.sum(axis=-1, keepdims=True),
            out * shrink + weighted(p, v),
        )

    num_chunks = (lengths.max() + chunk - 1) // chunk
    _, total, out = lax.fori_loop(0, num_chunks, add_chunk, carry)
    return (out / total).astype(q.dtype).reshape(batch, kv_heads, group, num_rows, dim)


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x, cos, sin, workspace_mask, keys, values, lengths):
        cfg, dtype = self.config, jnp.dtype(self.config.dtype)
        batch, num_rows, _ = x.shape

        def project(name: str, heads: int) -> jax.Array:
            y = Linear(heads * cfg.head_dim, dtype, name=name)(x)
            return y.reshape(batch, num_rows, heads, cfg.head_dim).transpose(0, 2, 1, 3)

        q = _rotate(project("q_proj", cfg.num_attention_heads), cos, sin)
        k = _rotate(project("k_proj", cfg.num_key_value_heads), cos, sin)
        v = project("v_proj", cfg.num_key_value_heads)
        # A row that must not be seen has weight 0, but 0 times infinity would be seen.
        v = jnp.where(jnp.isfinite(v), v, 0)
        group = cfg.num_attention_heads // cfg.num_key_value_heads
        q = q.reshape(batch, cfg.num_key_value_heads, group, num_rows, cfg.head_dim)
        out = _attend(q, k, v, workspace_mask, keys, values, lengths)
        out = out.transpose(0, 3, 1, 2, 4).reshape(batch, num_rows, -1)
        return Linear(cfg.hidden_size, dtype, name="o_proj")(out), (k, v)


class MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, dtype = self.config, jnp.dtype(self.config.dtype)
        gate = Linear(cfg.intermediate_size, dtype, name="gate_proj")(x)
        up = Linear(cfg.intermediate_size, dtype, name="up_proj")(x)
        return Linear(cfg.hidden_size, dtype, name="down_proj")(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x, *attention_inputs):
        eps, dtype = self.config.rms_norm_eps, jnp.dtype(self.config.dtype)
        h = RMSNorm(eps, dtype, name="input_layernorm")(x)
        h, kv_rows = Attention(self.config, name="self_attn")(h, *attention_inputs)
        x = x + h
        h = RMSNorm(eps, dtype, name="post_attention_layernorm")(x)
        return x + MLP(self.config, name="mlp")(h), kv_rows


class Llama(nn.Module):
    """Embedding, decoder layers and final norm; the head is `LlamaModel.logits`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens, positions, workspace_mask, cache, lengths):
        cfg, dtype = self.config, jnp.dtype(self.config.dtype)
        angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(
            cfg.rope, cfg.head_dim
        )
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        table = (
            TiedEmbedding(cfg.vocab_size, cfg.hidden_size, dtype, name="lm_head")
            if cfg.tie_word_embeddings
            else Embedding(cfg.vocab_size, cfg.hidden_size, dtype, name="embed_tokens")
        )
        x = table(tokens)
        new_kv = []
        for i in range(cfg.num_hidden_layers):
            layer = DecoderLayer(cfg, name=f"layers_{i}")
            x, kv_rows = layer(x, cos, sin, workspace_mask, cache.keys[i], cache.values[i], lengths)
            new_kv.append(kv_rows)
        return RMSNorm(cfg.rms_norm_eps, dtype, name="norm")(x), tuple(new_kv)


@dataclasses.dataclass(frozen=True)
class LlamaModel:
    """A LLaMA as a `TargetModel`."""

    config: ModelConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.config.max_position_embeddings

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters: weights normal with standard deviation 0.02, norms one."""
        cfg = self.config
        body_key, head_key = jax.random.split(key)
        one = jnp.zeros((1, 1), jnp.int32)
        cache, mask = self.init_cache(1, 1), jnp.ones((1, 1), bool)
        params = Llama(cfg).init(body_key, one, one, mask, cache, jnp.zeros(1, jnp.int32))["params"]
        if not cfg.tie_word_embeddings:
            shape, dtype = (cfg.hidden_size, cfg.vocab_size), jnp.dtype(cfg.dtype)
            params["lm_head"] = {"kernel": 0.02 * jax.random.normal(head_key, shape, dtype)}
        return params

    def abstract_params(self) -> Params:
        """Shape and dtype of every parameter, without computing any."""
        return jax.eval_shape(lambda: self.init_params(jax.random.key(0)))

    def check_params(self, params: Params) -> None:
        """Raises `ValueError` naming the first parameter that is not as the config wants it."""
        if not isinstance(params, Mapping):
            raise ValueError(
                f"params: got a {type(params).__name__}, allowed is a nested dict of arrays"
            )
        expected, given = _expected_leaves(self.config), _leaves(params)
        for name, (shape, dtype) in expected.items():
            if name not in given:
                raise ValueError(f"params: {name} is missing")
            if given[name] != (shape, dtype):
                raise ValueError(
                    f"params: {name} is {given[name][1]}{list(given[name][0])}, must be "
                    f"{dtype}{list(shape)} as cfg.model says"
                )
        for name in given:
            if name not in expected:
                raise ValueError(f"params: {name} is not a parameter of cfg.model")

    def init_cache(self, batch: int, num_slots: int) -> KVCache:
        cfg = self.config
        shape = (batch, cfg.num_key_value_heads, num_slots, cfg.head_dim)
        # One buffer each: donated arrays must not share memory.
        buffers = [jnp.zeros(shape, cfg.dtype) for _ in range(2 * cfg.num_hidden_layers)]
        return KVCache(keys=tuple(buffers[::2]), values=tuple(buffers[1::2]))

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        variables = {"params": params}
        return Llama(self.config).apply(
            variables, tokens, positions, workspace_mask, cache, lengths
        )

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        return jnp.matmul(
            hidden,
            params["lm_head"]["kernel"],
            precision=precision_of(hidden.dtype),
            preferred_element_type=jnp.float32,
        )


def _leaves(params: Params) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every leaf by dotted name."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, str(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@functools.lru_cache(maxsize=16)
def _expected_leaves(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    return _leaves(LlamaModel(config).abstract_params())
