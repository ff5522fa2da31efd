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
from jlookahead.checkpoints.gguf_tokenizer import build_tokenizer
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import Progress, StoredTensor, fill_params, hf_name
from jlookahead.model import inverse_frequencies
from jlookahead.model_config import ModelConfig, RopeConfig, from_hf_config

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

# Metadata keys, after the architecture's prefix, that are fields of a Hugging Face config.
_CONFIG_FIELDS = {
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
# Keys that are checked or translated below, or that say nothing about the network. Any other key
# under the prefix is refused: it may change the network.
_OTHER_KEYS = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ID_FIELDS = {"padding_token_id": "pad_token_id", "bos_token_id": "bos_token_id"}


def read_gguf(file: Path, dtype: str, progress: Progress) -> LoadedModel:
    """Reads a GGUF file of a LLaMA, dequantising on the way.

    Raises:
        ValueError: the gguf package is missing, the file is damaged, or it holds an architecture,
            a metadata key, a tensor or a tokenizer that is not supported.
    """
    metadata, tensors = _open(file)
    try:
        config = _parse_config(metadata, tensors, dtype)
    except (TypeError, ValueError) as error:  # TypeError: a field of another type
        raise ValueError(f"{file}: {error}") from error
    stored = {
        _hf_name(name, file): _stored_tensor(tensor, config, file)
        for name, tensor in tensors.items()
        if name != _ROPE_FACTORS
    }
    tokenizer = build_tokenizer(metadata, file)
    ids = {key: metadata.get(f"tokenizer.ggml.{key}") for key in (*_EOS_KEYS, *_ID_FIELDS)}
    fields = {field: ids[key] for key, field in _ID_FIELDS.items()}
    fields["eos_token_id"] = [ids[key] for key in _EOS_KEYS if ids[key] is not None]
    defaults = merge_defaults([(str(file), fields)], config.vocab_size)
    params = fill_params(stored, config, file, progress)
    return LoadedModel(params, config, tokenizer, defaults)


def _open(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
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


def _parse_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], dtype: str
) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"general.architecture: got {architecture!r}, supported architectures are: llama"
        )
    prefix = f"{architecture}."
    fields = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    for key, value in fields.items():
        if key not in _CONFIG_FIELDS and key not in _OTHER_KEYS:
            raise ValueError(f"{prefix}{key}: got {value!r}, this key is not supported")
    if "attention.layer_norm_rms_epsilon" not in fields:
        raise ValueError(f"{prefix}attention.layer_norm_rms_epsilon: missing from the metadata")

    hf: dict[str, Any] = {"model_type": "llama"}
    # llama.cpp stores a head only if it is not the embedding.
    hf["tie_word_embeddings"] = "output.weight" not in tensors
    if "token_embd.weight" in tensors:
        hf["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    for key, field in _CONFIG_FIELDS.items():
        if key in fields:
            hf[field] = _shortest(fields[key])
    scaling = fields.get("rope.scaling.type", "none")
    if scaling != "none":
        hf["rope_scaling"] = {"rope_type": scaling, "factor": fields.get("rope.scaling.factor")}
    config = from_hf_config(hf, dtype)

    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, config.head_dim) != config.head_dim:
            raise ValueError(
                f"{prefix}{key}: got {fields[key]}, must be the width of a head, {config.head_dim}"
            )
    if _ROPE_FACTORS in tensors:
        factors = np.asarray(tensors[_ROPE_FACTORS].data)
        config = dataclasses.replace(config, rope=_llama3_rope(factors, config))
    return config


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
        raise ValueError(f"tensor {_ROPE_FACTORS!r}: not the RoPE factors of a Llama 3.x")
    return rope


def _hf_name(name: str, file: Path) -> str:
    match = _TENSOR_NAME.fullmatch(name)
    if match is None or match["module"] not in _MODULES:
        raise ValueError(f"tensor {name!r} in {file}: not a parameter of a LLaMA")
    layer = (f"layers_{match['layer']}",) if match["layer"] else ()
    return hf_name((*layer, *_MODULES[match["module"]].split("."), match["kind"]))


def _stored_tensor(tensor: ReaderTensor, config: ModelConfig, file: Path) -> StoredTensor:
    num_heads = None
    if ".attn_q." in tensor.name:
        num_heads = config.num_attention_heads
    elif ".attn_k." in tensor.name:
        num_heads = config.num_key_value_heads
    shape = tuple(int(size) for size in reversed(tensor.shape))  # GGML counts from the innermost
    read = functools.partial(_dequantize, tensor, shape, num_heads, file)
    return StoredTensor(tensor.name, file, shape, read)


def _dequantize(
    tensor: ReaderTensor, shape: tuple[int, ...], num_heads: int | None, file: Path
) -> np.ndarray:
    """The weight in float32; of a projection with `num_heads` rotary heads, in half-split order."""
    from gguf import quants

    try:
        weight = quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"tensor {tensor.name!r} in {file}: type {kind} unsupported") from error
    if num_heads is None:
        return weight
    # llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head, Hugging Face the rows
    # i and i + D / 2.
    pairs = weight.reshape(num_heads, -1, 2, *shape[1:])
    return pairs.swapaxes(1, 2).reshape(shape)
