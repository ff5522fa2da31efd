"""What fixes a LLaMA network: sizes, normalisation, rotary embedding, dtype. Static, hashable."""

from __future__ import annotations

import dataclasses

from jlookahead.checks import check_bool, check_choice, check_int, check_number
from jlookahead.quantization import QUANTIZATIONS
from jlookahead.rope import RopeConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A network of the LLaMA family; names are those of HF `LlamaConfig` where it has them.

    Attributes:
        head_dim: width of one attention head; need not be `hidden_size / num_attention_heads`.
        max_position_embeddings: context length in tokens, prompt and output together.
        qkv_bias, o_bias: whether those projections of attention have a bias.
        mlp_bias: whether the three projections of the MLP have one.
        qk_norm: whether queries and keys are normalised head by head before they are rotated.
        sliding_window: how many tokens back a token attends, itself included; None for all.
        attention_scale: of the dot products of queries and keys; None for `head_dim ** -0.5`.
        embedding_scale, residual_scale: multiply the embeddings, and what a block adds.
        logits_divisor: divides the logits.
        num_padding_ids: ids at the end of the vocabulary that no token has. They are never emitted.
        dtype: of activations, cache and parameters. Norms, softmax and logits are float32.
        quantization: None, or `int8`: kernels of the linear layers in bytes, see `quantization.py`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    num_padding_ids: int = 0
    dtype: str = "float32"
    quantization: str | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            check_size(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: got {self.num_attention_heads}, must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, must be even (rotary halves)")
        if self.rope.type == "dynamic" and self.head_dim < 4:
            raise ValueError(f"head_dim: got {self.head_dim}, must be 4 or more for dynamic RoPE")
        check_number("rms_norm_eps", self.rms_norm_eps, "above 0 and up to 1", 1e-30, 1)
        for name in ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
            check_bool(name, getattr(self, name))
        check_int("num_padding_ids", self.num_padding_ids, 0, self.vocab_size - 1)
        if self.sliding_window is not None:
            check_int("sliding_window", self.sliding_window, 1)
        scales = ["embedding_scale", "residual_scale", "logits_divisor"]
        if self.attention_scale is not None:
            scales.append("attention_scale")
        for name in scales:
            check_number(name, getattr(self, name), "1e-6 to 1e6", 1e-6, 1e6)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("quantization", self.quantization, (None, *QUANTIZATIONS))


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Bounds where a larger value could only be a damaged file, and would take forever to refuse.
_LARGEST = {"num_hidden_layers": 1000}


def check_size(name: str, value: object) -> None:
    """Raises `ValueError` unless `value` can be the field `name` of `SIZES`."""
    check_int(name, value, 1, _LARGEST.get(name, 2**31 - 1))
