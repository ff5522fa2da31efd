"""What fixes a LLaMA network: sizes, normalisation, rotary embedding, dtype.

`ModelConfig` is static and hashable. `from_hf_config` translates a Hugging Face
`config.json` and refuses, by name, the known features that the network does not implement: a
field that is silently ignored is a model that silently degrades.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jlookahead.checks import check_int, check_number

ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, in the terms of HF `rope_parameters`.

    `factor` is used by `linear` and `llama3`; the last three fields by `llama3` only.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ValueError(f"rope type: got {self.type!r}, allowed are {', '.join(ROPE_TYPES)}")
        check_number("rope theta", self.theta, "1 to 1e30", 1, 1e30)
        check_number("rope factor", self.factor, "1 to 1e6", 1, 1e6)
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            check_number(f"rope {name}", getattr(self, name), "a positive number", 1e-9, 1e12)
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope high_freq_factor: got {self.high_freq_factor}, must exceed "
                f"low_freq_factor {self.low_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A LLaMA network; names are those of HF `LlamaConfig`.

    Attributes:
        head_dim: width of one attention head; need not be `hidden_size / num_attention_heads`.
        max_position_embeddings: context length in tokens, prompt and output together.
        dtype: of activations, cache and parameters. Norms, softmax and logits are float32.
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
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_int(name, getattr(self, name), 1, _LARGEST.get(name, 2**31 - 1))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: got {self.num_attention_heads}, must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, must be even (rotary halves)")
        check_number("rms_norm_eps", self.rms_norm_eps, "above 0 and up to 1", 1e-30, 1)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, allowed are {', '.join(DTYPES)}")


_ARCHITECTURE = "LlamaForCausalLM"
_SIZES = (
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
# HF fields that change the network in a way it does not implement, with the harmless values.
_UNSUPPORTED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, 1, None),
    "logit_scale": (1.0, 1, None),
}


def from_hf_config(hf: Mapping[str, Any], dtype: str = "float32") -> ModelConfig:
    """Translates the contents of a HF `config.json`.

    Args:
        hf: the parsed JSON of a `LlamaForCausalLM` checkpoint, of any transformers version
            (`rope_scaling` and `rope_theta`, or `rope_parameters`).
        dtype: what to compute in; the checkpoint's own `torch_dtype` only says how it is stored.

    Raises:
        ValueError: another architecture, an unsupported feature or RoPE type, a missing size.
    """
    model_type = hf.get("model_type")
    if model_type != "llama":
        raise ValueError(f"model_type: got {model_type!r}, supported architectures are: llama")
    architectures = hf.get("architectures") or [_ARCHITECTURE]
    if architectures != [_ARCHITECTURE]:
        raise ValueError(f"architectures: got {architectures!r}, supported is {_ARCHITECTURE!r}")
    for name, harmless in _UNSUPPORTED.items():
        if name in hf and hf[name] not in harmless:
            raise ValueError(f"{name}: got {hf[name]!r}, supported is {harmless[0]!r}")
    required = [n for n in _SIZES if n not in ("num_key_value_heads", "head_dim")]
    for name in required:
        if hf.get(name) is None:
            raise ValueError(f"{name}: missing from the model configuration")
        check_int(name, hf[name], 1, _LARGEST.get(name, 2**31 - 1))
    heads = hf["num_attention_heads"]
    return ModelConfig(
        **{name: hf[name] for name in required},
        num_key_value_heads=_given(hf, "num_key_value_heads", heads),
        head_dim=_given(hf, "head_dim", hf["hidden_size"] // heads),
        rms_norm_eps=_given(hf, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        rope=_rope_from_hf(hf),
        dtype=dtype,
    )


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value


def _rope_from_hf(hf: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes `rope_parameters`; before that `rope_scaling` beside `rope_theta`,
    # whose type was spelled `type` before it was spelled `rope_type`.
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters: got {parameters!r}, must be an object")
    parameters = dict(parameters)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = _given(parameters, "rope_theta", _given(hf, "rope_theta", 10000.0))
    parameters.pop("rope_theta", None)
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type: got {kind!r}, allowed are {', '.join(ROPE_TYPES)}")
    known = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }[kind]
    missing = [name for name in known if parameters.get(name) is None]
    if missing:
        raise ValueError(f"rope type {kind!r}: {', '.join(missing)} missing")
    unknown = sorted(name for name in parameters if name not in known)
    # A default RoPE may carry fields of other types without meaning (transformers 5 does).
    if unknown and kind != "default":
        raise ValueError(f"rope type {kind!r}: unknown parameters {', '.join(unknown)}")
    return RopeConfig(type=kind, theta=theta, **{name: parameters[name] for name in known})
