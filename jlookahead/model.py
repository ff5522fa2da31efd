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
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from jlookahead.attention import attend
from jlookahead.layers import Embedding, Linear, RMSNorm, TiedEmbedding, precision_of
from jlookahead.model_config import ModelConfig
from jlookahead.rope import rotary_angles, rotate

Params = Any
KVRows = tuple[tuple[jax.Array, jax.Array], ...]


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


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x, cos, sin, positions, workspace_mask, keys, values, lengths):
        cfg, dtype = self.config, jnp.dtype(self.config.dtype)
        batch, num_rows, _ = x.shape

        linear = functools.partial(Linear, dtype=dtype, quantization=cfg.quantization)

        def project(name: str, heads: int) -> jax.Array:
            y = linear(heads * cfg.head_dim, use_bias=cfg.qkv_bias, name=name)(x)
            return y.reshape(batch, num_rows, heads, cfg.head_dim)

        q = project("q_proj", cfg.num_attention_heads)
        k = project("k_proj", cfg.num_key_value_heads)
        v = project("v_proj", cfg.num_key_value_heads).transpose(0, 2, 1, 3)
        if cfg.qk_norm:
            q = RMSNorm(cfg.rms_norm_eps, dtype, name="q_norm")(q)
            k = RMSNorm(cfg.rms_norm_eps, dtype, name="k_norm")(k)
        q = rotate(q.transpose(0, 2, 1, 3), cos, sin)
        k = rotate(k.transpose(0, 2, 1, 3), cos, sin)
        # A row that must not be seen has weight 0, but 0 times infinity would be seen.
        v = jnp.where(jnp.isfinite(v), v, 0)
        group = cfg.num_attention_heads // cfg.num_key_value_heads
        q = q.reshape(batch, cfg.num_key_value_heads, group, num_rows, cfg.head_dim)
        scale = cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
        out = attend(
            q * jnp.asarray(scale, dtype),
            k,
            v,
            positions,
            workspace_mask,
            keys,
            values,
            lengths,
            cfg.sliding_window,
        )
        out = out.transpose(0, 3, 1, 2, 4).reshape(batch, num_rows, -1)
        return linear(cfg.hidden_size, use_bias=cfg.o_bias, name="o_proj")(out), (k, v)


class MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        linear = functools.partial(
            Linear,
            dtype=jnp.dtype(cfg.dtype),
            use_bias=cfg.mlp_bias,
            quantization=cfg.quantization,
        )
        gate = linear(cfg.intermediate_size, name="gate_proj")(x)
        up = linear(cfg.intermediate_size, name="up_proj")(x)
        return linear(cfg.hidden_size, name="down_proj")(nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x, *attention_inputs):
        eps, dtype = self.config.rms_norm_eps, jnp.dtype(self.config.dtype)
        scale = jnp.asarray(self.config.residual_scale, dtype)
        h = RMSNorm(eps, dtype, name="input_layernorm")(x)
        h, kv_rows = Attention(self.config, name="self_attn")(h, *attention_inputs)
        x = x + scale * h
        h = RMSNorm(eps, dtype, name="post_attention_layernorm")(x)
        return x + scale * MLP(self.config, name="mlp")(h), kv_rows


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _decoder_layer(config: ModelConfig, variables: Params, *inputs: jax.Array) -> Any:
    """`DecoderLayer`, traced once for all layers.

    Inline: its operations become the caller's, and the compiled program is, to the instruction,
    that of layers traced one by one. A call in the program would change what XLA fuses, and sums.
    """
    return DecoderLayer(config, parent=None).apply(variables, *inputs)


class Llama(nn.Module):
    """Embedding, decoder layers and final norm; the head is `LlamaModel.logits`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens, positions, workspace_mask, cache, lengths):
        cfg, dtype = self.config, jnp.dtype(self.config.dtype)
        cos, sin = rotary_angles(cfg.rope, cfg.head_dim, positions)
        table = (
            TiedEmbedding(cfg.vocab_size, cfg.hidden_size, dtype, name="lm_head")
            if cfg.tie_word_embeddings
            else Embedding(cfg.vocab_size, cfg.hidden_size, dtype, name="embed_tokens")
        )
        x = table(tokens) * jnp.asarray(cfg.embedding_scale, dtype)
        new_kv = []
        for i in range(cfg.num_hidden_layers):
            layer = DecoderLayer(cfg, name=f"layers_{i}")
            inputs = cos, sin, positions, workspace_mask, cache.keys[i], cache.values[i], lengths
            if self.is_initializing():
                x, kv_rows = layer(x, *inputs)
            else:
                with jax.named_scope(layer.name):
                    x, kv_rows = _decoder_layer(cfg, layer.variables, x, *inputs)
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
        cache, mask = self.init_cache(1, 0), jnp.ones((1, 1), bool)
        params = Llama(cfg).init(body_key, one, one, mask, cache, jnp.zeros(1, jnp.int32))["params"]
        if not cfg.tie_word_embeddings:
            shape, dtype = (cfg.hidden_size, cfg.vocab_size), jnp.dtype(cfg.dtype)
            params["lm_head"] = {"kernel": 0.02 * jax.random.normal(head_key, shape, dtype)}
        return params

    def abstract_params(self) -> Params:
        """Shape and dtype of every parameter, without computing any."""
        cfg = self.config
        one_layer = LlamaModel(dataclasses.replace(cfg, num_hidden_layers=1))
        params = jax.eval_shape(lambda: one_layer.init_params(jax.random.key(0)))
        layer = params.pop("layers_0")
        return {**{f"layers_{i}": layer for i in range(cfg.num_hidden_layers)}, **params}

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
        logits = jnp.matmul(
            hidden,
            params["lm_head"]["kernel"],
            precision=precision_of(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        logits = logits / self.config.logits_divisor
        if not self.config.num_padding_ids:
            return logits
        is_token = jnp.arange(self.vocab_size) < self.vocab_size - self.config.num_padding_ids
        return jnp.where(is_token, logits, -jnp.inf)


def _leaves(params: Params) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every leaf by dotted name."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, str(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@functools.lru_cache(maxsize=16)
def _expected_leaves(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    return _leaves(LlamaModel(config).abstract_params())
