"""A GGUF file of llama.cpp: metadata to configuration, blocks to weights in Hugging Face order."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jlookahead.checkpoints.defaults import merge_defaults
from jlookahead.checkpoints.errors import first_line
from jlookahead.checkpoints.gguf_tokenizer import Vocabulary, read_vocabulary
from jlookahead.checkpoints.hf_config import from_hf_config
from jlookahead.checkpoints.params import hf_name
from jlookahead.checkpoints.stored import Index, StoredModel, StoredTensor
from jlookahead.checks import check_number
from jlookahead.model_config import ModelConfig
from jlookahead.rope import RopeConfig, inverse_frequencies

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

_Fields = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """What tells an architecture of llama.cpp from the others.

    Attributes:
        model_type: its name in transformers.
        windowed: that of checkpoints that state a sliding window, if it is another.
        interleaved: whether the rows of q and k are in the order of interleaved rotary pairs.
        fields: further metadata keys that are fields of a Hugging Face config.
    """

    model_type: str
    windowed: str | None = None
    interleaved: bool = False
    fields: _Fields = dataclasses.field(default_factory=dict)


# Metadata keys, after the architecture's prefix, that are fields of a Hugging Face config.
_CONFIG_FIELDS: _Fields = {
    "vocab_size": "vocab_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_SCALES: _Fields = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",  # a divisor, under either name
}
# By `general.architecture`.
_ARCHITECTURES = {
    "llama": _Architecture("llama", windowed="mistral", interleaved=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "granite": _Architecture("granite", interleaved=True, fields=_SCALES),
}
# By `rope.scaling.type`: keys behind `rope.scaling.` that are parameters of the type.
_ROPE_PARAMETERS: dict[str, _Fields] = {
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",  # what llama.cpp's converter writes there
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
# Keys that are checked or translated below, or that say nothing about the network. Any other key
# under the prefix is refused: it may change the network.
_OTHER_KEYS = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    *(f"rope.scaling.{key}" for key in _ROPE_PARAMETERS["yarn"]),
)
_MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tensors whose presence is a feature of `ModelConfig`; no metadata key tells.
_BIASES = {
    "blk.0.attn_q.bias": "qkv_bias",
    "blk.0.attn_output.bias": "o_bias",
    "blk.0.ffn_gate.bias": "mlp_bias",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # not a parameter


def open_gguf(file: Path, dtype: str) -> StoredModel:
    """Reads all of a GGUF file of one of `_ARCHITECTURES` but the weights.

    Raises:
        ValueError: the gguf package is missing, the file is damaged, or it holds an architecture,
            a metadata key, a tensor or a tokenizer that is not supported.
    """
    metadata, tensors = read_header(file)
    vocabulary = read_vocabulary(metadata, file)
    config = parse_config(metadata, tensors, vocabulary, file, dtype)
    stored = {
        tensor_hf_name(name, file): stored_tensor(tensor, metadata, config, file)
        for name, tensor in tensors.items()
        if name != ROPE_FACTORS
    }
    defaults = merge_defaults([(str(file), vocabulary.special_ids)], config.vocab_size)
    return StoredModel(file, config, vocabulary.tokenizer, defaults, stored)


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Metadata and tensors by name; the tensors' data stay in the memory-mapped file."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"{file}: reading GGUF needs the gguf package: pip install 'jlookahead[gguf]'"
        ) from error
    try:
        reader = gguf.GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the parser fails in many ways on damaged bytes
        raise ValueError(f"{file}: not a complete GGUF file: {first_line(error)}") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def parse_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, ReaderTensor],
    vocabulary: Vocabulary | None,
    file: Path,
    dtype: str,
) -> ModelConfig:
    """The network that a header describes; ids without a token are padding."""
    try:
        config = _network(metadata, tensors, dtype)
    except (TypeError, ValueError) as error:  # TypeError: a field of another type
        raise ValueError(f"{file}: {error}") from error
    if vocabulary is None or vocabulary.num_tokens is None:
        return config
    if vocabulary.num_tokens > config.vocab_size:
        raise ValueError(
            f"{file}: tokenizer.ggml.tokens: got {vocabulary.num_tokens} tokens, must be "
            f"{config.vocab_size} or less, as many as tensor 'token_embd.weight' has rows"
        )
    return dataclasses.replace(config, num_padding_ids=config.vocab_size - vocabulary.num_tokens)


def _network(
    metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], dtype: str
) -> ModelConfig:
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"general.architecture: got {name!r}, supported architectures are: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    architecture, prefix = _ARCHITECTURES[name], f"{name}."
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"split.count: got {metadata['split.count']}, supported is one file: merge them with "
            "llama-gguf-split --merge"
        )
    fields = {
        key.removeprefix(prefix): _shortest(value)
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    config_fields = {**_CONFIG_FIELDS, **architecture.fields}
    for key, value in fields.items():
        if key not in config_fields and key not in _OTHER_KEYS:
            raise ValueError(f"{prefix}{key}: got {value!r}, this key is not supported")
    if "attention.layer_norm_rms_epsilon" not in fields:
        raise ValueError(f"{prefix}attention.layer_norm_rms_epsilon: missing from the metadata")

    hf: dict[str, Any] = {
        field: fields[key] for key, field in config_fields.items() if key in fields
    }
    # The defaults of transformers are not those of llama.cpp, which has no windows by layer.
    hf = {"num_key_value_heads": None, "sliding_window": None, **hf}
    hf["sliding_window"] = hf["sliding_window"] or None  # 0, too, is none
    hf |= {"use_sliding_window": True, "max_window_layers": 0}
    hf["model_type"] = architecture.model_type
    if hf["sliding_window"] and architecture.windowed:
        hf["model_type"] = architecture.windowed
    # llama.cpp stores a head only if it is not the embedding.
    hf["tie_word_embeddings"] = "output.weight" not in tensors
    if "token_embd.weight" in tensors:
        hf["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    hf["rope_scaling"] = _rope_scaling(fields, prefix)
    config = from_hf_config(hf, dtype)

    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, config.head_dim) != config.head_dim:
            raise ValueError(
                f"{prefix}{key}: got {fields[key]}, must be the width of a head, {config.head_dim}"
            )
    biases: dict[str, Any] = {field: True for name, field in _BIASES.items() if name in tensors}
    if "attention.scale" not in fields:
        config = dataclasses.replace(config, attention_scale=None)
    return dataclasses.replace(config, rope=_rope(fields, prefix, tensors, config), **biases)


def _rope_scaling(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The `rope_scaling` of a Hugging Face config."""
    # llama.cpp scales linearly where a file states a factor and no type.
    kind = fields.get("rope.scaling.type", "linear" if "rope.scaling.factor" in fields else "none")
    if kind not in _ROPE_PARAMETERS:
        raise ValueError(
            f"{prefix}rope.scaling.type: got {kind!r}, supported are {', '.join(_ROPE_PARAMETERS)}"
        )
    mix = "rope.scaling.yarn_ext_factor"
    expected = float(kind == "yarn")
    if fields.get(mix, expected) != expected:
        raise ValueError(
            f"{prefix}{mix}: got {fields[mix]!r}, supported is {expected} with type {kind!r}"
        )
    parameters = {
        name: fields.get(f"rope.scaling.{key}") for key, name in _ROPE_PARAMETERS[kind].items()
    }
    return {"rope_type": "default" if kind == "none" else kind, **parameters}


def _rope(
    fields: Mapping[str, Any],
    prefix: str,
    tensors: Mapping[str, ReaderTensor],
    config: ModelConfig,
) -> RopeConfig:
    """The rotary embedding, with what a Hugging Face config cannot say."""
    rope = config.rope
    if ROPE_FACTORS in tensors:
        rope = _llama3_rope(np.asarray(tensors[ROPE_FACTORS].data), config)
    # Multiplies what the type of scaling implies.
    key = "rope.scaling.attn_factor"
    attention_factor = fields.get(key, 1.0)
    check_number(f"{prefix}{key}", attention_factor, "a positive number", 1e-9, 1e12)
    return dataclasses.replace(rope, attention_factor=rope.attention_factor * attention_factor)


def _shortest(value: Any) -> Any:
    """The shortest decimal of a float32: 1e-05, where the file's bits widen to 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _llama3_rope(factors: np.ndarray, config: ModelConfig) -> RopeConfig:
    """The RoPE scaling that the frequency divisors `factors [D / 2]` of a Llama 3.x stand for."""
    rope = RopeConfig(
        type="llama3",
        theta=config.rope.theta,
        factor=max(1.0, float(factors.max())),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    unscaled = dataclasses.replace(config.rope, type="default")
    implied = inverse_frequencies(unscaled, config.head_dim) / inverse_frequencies(
        rope, config.head_dim
    )
    same = factors.shape == implied.shape and np.allclose(factors, implied, rtol=1e-5)
    if config.rope.type != "default" or not same:
        raise ValueError(f"tensor {ROPE_FACTORS!r}: not the RoPE factors of a Llama 3.x")
    return rope


def tensor_hf_name(name: str, file: Path) -> str:
    """The Hugging Face name of llama.cpp's `blk.3.ffn_up.weight`."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None or match["module"] not in _MODULES:
        raise ValueError(f"tensor {name!r} in {file}: not a parameter of a supported network")
    layer = f"layers_{match['layer']}." if match["layer"] else ""
    return hf_name(f"{layer}{_MODULES[match['module']]}.{match['kind']}")


def stored_tensor(
    tensor: ReaderTensor, metadata: Mapping[str, Any], config: ModelConfig | None, file: Path
) -> StoredTensor:
    """The tensor under its own name; without a configuration it can be described and not read."""
    architecture = _ARCHITECTURES.get(metadata.get("general.architecture", ""))
    num_heads = None
    if config is not None and architecture is not None and architecture.interleaved:
        if ".attn_q." in tensor.name:
            num_heads = config.num_attention_heads
        elif ".attn_k." in tensor.name:
            num_heads = config.num_key_value_heads
    shape = tuple(int(size) for size in reversed(tensor.shape))  # GGML counts from the innermost
    read = functools.partial(_dequantize, tensor, shape, num_heads, file)
    kind, num_bytes = tensor.tensor_type.name, int(tensor.n_bytes)
    return StoredTensor(tensor.name, file, shape, kind, _is_supported(tensor), num_bytes, read)


def _is_supported(tensor: ReaderTensor) -> bool:
    """Whether the gguf package dequantises the type, which only a try tells."""
    from gguf import quants

    try:
        quants.dequantize(np.atleast_2d(tensor.data)[:1], tensor.tensor_type)
    except NotImplementedError:
        return False
    return True


def _dequantize(
    tensor: ReaderTensor, shape: tuple[int, ...], num_heads: int | None, file: Path, index: Index
) -> np.ndarray:
    """A part of the tensor in float32, whose whole is dequantised for it; that of `num_heads`
    interleaved rotary heads in half-split order."""
    from gguf import quants

    weight = quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    if num_heads is None:
        return weight[index]
    # llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head, Hugging Face the rows
    # i and i + D / 2.
    pairs = weight.reshape(num_heads, -1, 2, *shape[1:])
    return pairs.swapaxes(1, 2).reshape(shape)[index]
