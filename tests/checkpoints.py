"""Tiny random LLaMA checkpoints in every format that `load` reads, without PyTorch."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jlookahead.checkpoints import LoadedModel, converted, load
from jlookahead.checkpoints.params import flat
from jlookahead.model import LlamaModel, Params
from jlookahead.model_config import ModelConfig

Tensors = dict[str, np.ndarray]


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def hf_config(**overrides: Any) -> dict[str, Any]:
    """The fields of a `config.json`."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **SIZES,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Every tensor of the checkpoint, float32, by Hugging Face name."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q_rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.o_proj": (hidden, q_rows),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0.0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def write_hf(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, *, num_shards: int | None = None
) -> Path:
    """Writes a Hugging Face directory; sharded, with an index, if `num_shards` is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards is None:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        names = list(tensors)[i::num_shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(source: Path, error: type[Exception] | tuple = ValueError) -> str:
    """The one line, with the source in it, in which `load` refuses it."""
    with pytest.raises(error) as caught:
        load(source)
    message = str(caught.value)
    assert "\n" not in message and str(source) in message
    return message


def write_converted(model: LoadedModel, folder: Path) -> None:
    """Writes the project's own format into a directory."""
    converted.write_params(flat(model.params).items(), folder)
    converted.write_manifest(model.config, model.tokenizer, model.defaults, folder)


def rewrite_converted(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the parameters of a converted directory, by top-level module."""
    path = folder / converted.PARAMS
    with ocp.StandardCheckpointer() as checkpointer:
        params = {entry.name: checkpointer.restore(entry) for entry in path.iterdir()}
        change(params)
        shutil.rmtree(path)
        for module, tree in params.items():
            checkpointer.save(path / module, tree)


def read_weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def write_hub_cache(cache: Path, repo_id: str, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Writes a snapshot as huggingface_hub lays it out, links into `blobs`; returns its folder."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    blobs = write_hf(repo / "blobs", config, tensors, num_shards=2)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


_GGUF_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_GGUF_MODULES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(
    file: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, Any] | None = None,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Writes what llama.cpp's converter writes, for its own rotary pairs q and k interleaved.

    Args:
        file: where.
        config: Hugging Face fields.
        tensors: Hugging Face names and order.
        metadata: further keys; None as a value removes one written by default.
        extra_tensors: written as they are, under these names; bytes with their type as a pair.
        quantization: of the matrices; vectors stay float32.
    """
    model_type = config["model_type"]
    prefix = "llama" if model_type == "mistral" else model_type
    scales = {key: config[name] for name, key in _GGUF_SCALES.items() if name in config}
    fields: dict[str, Any] = {
        f"{prefix}.{key}": value
        for key, value in {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "rope.freq_base": config["rope_theta"],
            "rope.dimension_count": config["head_dim"],
            "vocab_size": config["vocab_size"],
            **scales,
        }.items()
    }
    fields |= metadata or {}
    architecture = fields.pop("general.architecture", prefix)
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        parts = name.removeprefix("model.").split(".")
        layer = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        if prefix in ("llama", "granite"):
            tensor = _interleave(tensor, parts[-2], config)
        kind = quantization if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            f"{layer}{_GGUF_MODULES[parts[-2]]}.{parts[-1]}",
            gguf.quants.quantize(tensor, kind),
            raw_dtype=kind,
        )
    for name, extra in (extra_tensors or {}).items():
        data, kind = extra if isinstance(extra, tuple) else (extra, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _interleave(tensor: np.ndarray, module: str, config: Mapping[str, Any]) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if module not in heads:
        return tensor
    num_heads = config[heads[module]]
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `<s>` = 0 and `</s>` = 1."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, the hat on the cat"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}",
    )


def logits(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """`[B, T]` -> `[B, T, V]`, by one forward without a cache."""
    # Later tokens change nothing before them: few programs serve all lengths.
    padded = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 64)))
    return np.asarray(_logits(LlamaModel(config), params, padded))[:, : tokens.shape[1]]


@functools.partial(jax.jit, static_argnums=0)
def _logits(network: LlamaModel, params: Params, tokens: jax.Array) -> jax.Array:
    batch, num_tokens = tokens.shape
    hidden, _ = network.forward(
        params,
        tokens,
        jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape),
        jnp.tri(num_tokens, dtype=bool),
        network.init_cache(batch, 0),
        jnp.zeros(batch, jnp.int32),
    )
    return network.logits(params, hidden)
