"""A GGUF file of llama.cpp: metadata to configuration, blocks to weights in Hugging Face order.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jlookahead.checkpoints.defaults import merge_defaults
from jlookahead.checkpoints.gguf_tokenizer import build_tokenizer
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import Progress, StoredTensor, fill_params
from jlookahead.model import inverse_frequencies
from jlookahead.model_config import ModelConfig, RopeConfig, from_hf_config

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
# The constants of every Llama 3.x; a file stores only the factors that follow from them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf(file: Path, dtype: str, progress: Progress) -> LoadedModel:
    """Reads a GGUF file of a LLaMA, dequantising on the way.

    Raises:
        ValueError: the gguf package is missing, the file is damaged, or it holds an architecture,
            a metadata key, a tensor or a tokenizer that is not supported.
    """
    reader = _open(file)
    metadata = _Metadata(file, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _parse_config(metadata, tensors, dtype)
    except (TypeError, ValueError) as error:  # TypeError: a field of another type
        raise ValueError(f"{file}: {error}") from error
    stored = {}
    for name, tensor in tensors.items():
        if name != _ROPE_FACTORS:
            stored[_hf_name(file, name)] = _stored_tensor(file, tensor, config)
    params = fill_params(stored, config, file, progress)
    tokenizer = build_tokenizer(file, metadata, config.max_position_embeddings)
    fields = {
        "eos_token_id": [i for i in map(metadata.tokenizer, _EOS_KEYS) if i is not None],
        "pad_token_id": metadata.tokenizer("padding_token_id"),
        "bos_token_id": metadata.tokenizer("bos_token_id"),
    }
    defaults = merge_defaults([(str(file), fields)], config.vocab_size)
    return LoadedModel(params, config, tokenizer, defaults)
