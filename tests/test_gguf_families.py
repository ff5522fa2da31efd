"""GGUF files of every architecture and block type: Hugging Face's logits, the library's values.

The Hugging Face model is the one that `transformers` builds from the configuration; its tensors are
written as llama.cpp's converter writes them.
"""

from __future__ import annotations

import math

import checkpoints as files
import gguf
import numpy as np
import pytest
import torch
import transformers

from jlookahead import checkpoints
from jlookahead.checkpoints.hf_config import FAMILIES, from_hf_config
from jlookahead.checkpoints.params import hf_tensors

Q = gguf.GGMLQuantizationType
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
    "beta_slow": 0.5,
}
GGUF_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 0.5,
}
SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}
# Hugging Face fields, and the metadata keys that are not a matter of course.
CASES = {
    "llama": ({"attention_bias": True, "mlp_bias": True}, {}),
    "mistral": ({"sliding_window": 8}, {"attention.sliding_window": 8}),
    "qwen2": ({"tie_word_embeddings": True, "rope_scaling": YARN}, GGUF_YARN),
    "qwen3": ({}, {}),
    "granite": (SCALES, {}),
}


def hf_config(model_type: str, **fields):
    architectures = [FAMILIES[model_type].architecture]
    return files.hf_config(model_type=model_type, architectures=architectures, **fields)


def hf_model(config):
    """The PyTorch model of a configuration, all tensors random."""
    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class(**config, attn_implementation="eager")).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def tensors_of(model) -> files.Tensors:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def prefixed(model_type: str, keys):
    prefix = "llama" if model_type == "mistral" else model_type
    return {f"{prefix}.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("model_type", CASES)
def test_logits_equal_hf_pytorch(tmp_path, model_type):
    fields, keys = CASES[model_type]
    config = hf_config(model_type, **fields)
    model = hf_model(config)
    tensors = tensors_of(model)
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    file = files.write_gguf(
        tmp_path / "m.gguf", config, tensors, metadata=prefixed(model_type, keys)
    )
    lm = checkpoints.load(file)
    assert lm.config == from_hf_config(config)
    loaded = hf_tensors(lm.params)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor, err_msg=name)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(
        files.logits(lm.params, lm.config, tokens), expected, rtol=0, atol=1e-4
    )


def rope_of(folder, keys):
    config = files.hf_config(num_hidden_layers=1)
    file = files.write_gguf(
        folder / "m.gguf",
        config,
        files.random_tensors(config),
        metadata=prefixed("llama", keys),
    )
    return checkpoints.load(file).config.rope


@pytest.mark.parametrize(
    ("keys", "kind", "factor"),
    [
        ({}, "default", 1.0),
        ({"rope.scaling.attn_factor": 1.5}, "default", 1.5),
        # As llama.cpp has it, a factor alone scales linearly.
        ({"rope.scaling.factor": 2.0}, "linear", 1.0),
        (GGUF_YARN, "yarn", 1 + 0.1 * math.log(4)),
        (GGUF_YARN | {"rope.scaling.attn_factor": 1.5}, "yarn", 1.5 * (1 + 0.1 * math.log(4))),
        (GGUF_YARN | {"rope.scaling.yarn_attn_factor": 1.25}, "yarn", 1.25),
    ],
)
def test_attention_factor_of_rope(tmp_path, keys, kind, factor):
    rope = rope_of(tmp_path, keys)
    assert (rope.type, rope.attention_factor) == (kind, pytest.approx(factor))


def test_granite_without_its_keys_has_no_scales(tmp_path):
    """llama.cpp's defaults, where transformers' attention multiplier is 1."""
    config = hf_config("granite", num_hidden_layers=1)
    file = files.write_gguf(tmp_path / "m.gguf", config, files.random_tensors(config))
    loaded = checkpoints.load(file).config
    assert loaded.attention_scale is None
    scales = (loaded.embedding_scale, loaded.residual_scale, loaded.logits_divisor)
    assert scales == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("qwen2", "self_attn.k_proj.bias' is missing"),
        ("qwen3", "self_attn.k_norm.weight' is missing"),
    ],
)
def test_a_tensor_of_the_architecture_is_missing(tmp_path, model_type, missing):
    config = hf_config(model_type, num_hidden_layers=1)
    tensors = tensors_of(hf_model(config))
    del tensors[f"model.layers.0.{missing.partition(chr(39))[0]}"]
    file = files.write_gguf(tmp_path / "m.gguf", config, tensors)
    with pytest.raises(ValueError, match=missing):
        checkpoints.load(file)


# --- block types ---

# Bytes of a block of 256 weights, and where its half-precision scales lie.
K_BLOCKS = {Q.Q4_K: (144, (0, 2)), Q.Q5_K: (176, (0, 2)), Q.Q6_K: (210, (208,))}
SIMPLE = (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1)


def random_blocks(kind, rows: int) -> np.ndarray:
    """`rows` rows of 256 random weights, as the file stores them."""
    rng = np.random.default_rng(kind)
    if kind in SIMPLE:
        weights = rng.normal(0.0, 0.3, (rows, 256)).astype(np.float32)
        return gguf.quants.quantize(weights, kind)
    size, scales = K_BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows, size), dtype=np.uint8)
    for start in scales:
        scale = rng.uniform(1e-4, 1e-2, (rows, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", [*SIMPLE, *K_BLOCKS], ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_library(tmp_path, kind):
    config = files.hf_config(num_hidden_layers=1, hidden_size=256)
    q, up = random_blocks(kind, 64), random_blocks(kind, 48)
    tensors = files.random_tensors(config)
    names = [f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "mlp.up_proj")]
    for name in names:
        del tensors[name]
    file = files.write_gguf(
        tmp_path / "m.gguf",
        config,
        tensors,
        extra_tensors={"blk.0.attn_q.weight": (q, kind), "blk.0.ffn_up.weight": (up, kind)},
    )
    loaded = hf_tensors(checkpoints.load(file).params)
    # Row j of a head of 16 is row 2 j of the file in the first half, row 2 (j - 8) + 1 behind it.
    order = [16 * head + 2 * (j % 8) + j // 8 for head in range(4) for j in range(16)]
    expected = [gguf.quants.dequantize(q, kind)[order], gguf.quants.dequantize(up, kind)]
    for name, values in zip(names, expected, strict=True):
        assert values.std() > 1e-3
        np.testing.assert_array_equal(loaded[name], values)


def test_unsupported_block_type(tmp_path):
    config = files.hf_config(num_hidden_layers=1, hidden_size=256)
    tensors = files.random_tensors(config)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    extra = {"blk.0.ffn_up.weight": (np.zeros((48, 292), np.uint8), Q.Q8_K)}
    file = files.write_gguf(tmp_path / "m.gguf", config, tensors, extra_tensors=extra)
    with pytest.raises(ValueError, match=r"^tensor 'blk.0.ffn_up.weight' in .*: dtype Q8_K is not"):
        checkpoints.load(file)
