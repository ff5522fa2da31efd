"""Models for the tests: tiny random LLaMAs, and stubs whose right answer is known."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlookahead as jl
from jlookahead.checkpoints.params import hf_tensors

TINY = jl.ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1024,
)


# Drafts are so cheap that all that are found are worth it.
EAGER_AUTO = jl.Auto(((1, 1.0), (4, 1.01), (10, 1.02)))
# And so are the rounds of windows and trees.
FLAT_COSTS = ((1, 1.0), (4, 1.02), (8, 1.05), (24, 1.15))
WIDE_AUTOS = (jl.Auto(FLAT_COSTS, jl.Recycling(24)), jl.Auto(FLAT_COSTS, jl.Lookahead(4, 4, 4)))


@functools.lru_cache(maxsize=8)
def tiny_params(seed: int, config: jl.ModelConfig = TINY):
    """Random weights, large enough that greedy text is neither constant nor near a tie."""
    params = jl.LlamaModel(config).init_params(jax.random.key(seed))
    return jax.tree.map(lambda w: (w * 10).astype(w.dtype) if w.ndim == 2 else w, params)


def float64_logits(params, config: jl.ModelConfig, text) -> np.ndarray:
    """`[T, V]` of a LLaMA in NumPy's float64, which no order of summation changes by 1e-12.

    Not PyTorch's: transformers computes norms and rotations in float32 whatever the dtype.
    """
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    size, dim = len(text), config.head_dim
    angles = np.arange(size)[:, None] * config.rope.theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles), np.sin(angles)
    visible = np.tri(size, dtype=bool)

    def norm(x, weight):
        return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps)

    def rotated(x):
        real, imaginary = np.split(x, 2, axis=-1)
        return np.concatenate([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)

    x = params["embed_tokens"]["weight"][np.asarray(text)]
    for i in range(config.num_hidden_layers):
        layer = params[f"layers_{i}"]
        attn, mlp = (
            {name: linear["kernel"] for name, linear in layer[part].items()}
            for part in ("self_attn", "mlp")
        )
        h = norm(x, layer["input_layernorm"]["weight"])
        q, k, v = (
            (h @ attn[name]).reshape(size, -1, dim).transpose(1, 0, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        k, v = (np.repeat(heads, len(q) // len(k), axis=0) for heads in (k, v))
        scores = rotated(q) @ rotated(k).transpose(0, 2, 1) / np.sqrt(dim)
        weights = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        out = weights / weights.sum(axis=-1, keepdims=True) @ v
        x = x + out.transpose(1, 0, 2).reshape(size, -1) @ attn["o_proj"]
        h = norm(x, layer["post_attention_layernorm"]["weight"])
        gate = h @ mlp["gate_proj"]
        x = x + gate / (1 + np.exp(-gate)) * (h @ mlp["up_proj"]) @ mlp["down_proj"]
    return norm(x, params["norm"]["weight"]) @ params["lm_head"]["kernel"]


def hf_llama(params, config: jl.ModelConfig):
    """The same network in Hugging Face's PyTorch, without an EOS id."""
    torch = pytest.importorskip("torch", reason="torch is the oracle of this test")
    transformers = pytest.importorskip("transformers")
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers head_dim num_attention_heads "
        "num_key_value_heads max_position_embeddings rms_norm_eps tie_word_embeddings"
    )
    fields = {name: getattr(config, name) for name in names.split()}
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **fields, rope_theta=config.rope.theta, eos_token_id=None, pad_token_id=0
        )
    )
    state = {name: torch.tensor(tensor) for name, tensor in hf_tensors(params).items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf.load_state_dict(state)
    return hf.eval()


def plain(params, prompt, cfg: jl.Config, **kwargs) -> jl.Result:
    """The oracle: the same call under plain decoding."""
    plain_cfg = dataclasses.replace(cfg, strategy=jl.Autoregressive())
    return jl.generate(params, prompt, plain_cfg, **kwargs)


@dataclasses.dataclass(frozen=True)
class SuccessorTable:
    """Greedy text follows `params [V]`: after token t comes `params[t]`, whatever was before."""

    vocab_size: int
    max_position_embeddings: int = 4096

    def init_cache(self, batch, num_slots):
        return jl.KVCache(keys=(), values=())

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        return params[tokens][..., None], ()

    def logits(self, params, hidden):
        return 20.0 * jax.nn.one_hot(hidden[..., 0], self.vocab_size)


@dataclasses.dataclass(frozen=True)
class TableModel:
    """A Markov chain: the logits after token t are `params [V, V]`'s row t, whatever was before,
    so that the law of a short text can be enumerated."""

    vocab_size: int
    max_position_embeddings: int = 4096

    def init_cache(self, batch, num_slots):
        return jl.KVCache(keys=(), values=())

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        return params[tokens], ()

    def logits(self, params, hidden):
        return hidden


@dataclasses.dataclass(frozen=True)
class LeakProbe:
    """The next token is a hash of the sum of every visible (token, position), so that one
    row seen too many, too few or at the wrong place changes the text at once. The cache holds
    what was summed, so that a wrong commit shows too."""

    vocab_size: int
    max_position_embeddings: int = 4096

    def init_cache(self, batch, num_slots):
        return jl.KVCache(
            keys=(jnp.zeros((batch, 1, num_slots, 1), jnp.float32),),
            values=(jnp.zeros((batch, 1, num_slots, 1), jnp.float32),),
        )

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        weight = ((tokens + 1) * (positions % 13 + 1)).astype(jnp.float32)
        slots = jnp.arange(cache.keys[0].shape[2])
        committed = jnp.where(slots < lengths[:, None], cache.keys[0][:, 0, :, 0], 0.0)
        mask = jnp.broadcast_to(workspace_mask, (*tokens.shape, tokens.shape[1]))
        total = committed.sum(axis=1)[:, None] + (mask * weight[:, None, :]).sum(axis=2)
        rows = weight[:, None, :, None]
        return total[..., None], ((rows, rows),)

    def logits(self, params, hidden):
        # A small range, so that n-grams recur and drafts are accepted.
        token = hidden[..., 0].astype(jnp.int32) % 7 % 5
        return jax.nn.one_hot(token, self.vocab_size, dtype=jnp.float32)
