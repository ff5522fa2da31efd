"""GGUF files: quantised weights, configuration, RoPE factors, refusals."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import checkpoints as files
import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlookahead import checkpoints
from jlookahead.checkpoints.params import hf_tensors
from jlookahead.rope import RopeConfig, inverse_frequencies

CONFIG = files.hf_config(num_hidden_layers=1, vocab_size=300)
TENSORS = files.random_tensors(CONFIG)
Q = gguf.GGMLQuantizationType


def write(folder, **options):
    return files.write_gguf(Path(folder) / "m.gguf", CONFIG, TENSORS, **options)


# --- weights and configuration ---


@pytest.mark.parametrize(
    ("kind", "steps"), [(Q.F16, 2**12), (Q.BF16, 2**9), (Q.Q8_0, 254), (Q.Q4_0, 14), (Q.Q4_1, 14)]
)
def test_quantised_weights_are_near(tmp_path, kind, steps):
    """Within about half a step of the quantisation, of which the range of a row has `steps`."""
    config = files.hf_config(num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    tensors = files.random_tensors(config)
    file = files.write_gguf(tmp_path / "m.gguf", config, tensors, quantization=kind)
    params = hf_tensors(checkpoints.load(file).params)
    for name, tensor in tensors.items():
        bound = 1.1 * 2 * np.abs(tensor).max() / steps if tensor.ndim == 2 else 0
        np.testing.assert_allclose(params[name], tensor, rtol=0, atol=bound, err_msg=name)


def test_config_from_metadata_equals_that_of_hugging_face(tmp_path):
    config = files.hf_config(
        rms_norm_eps=1e-5, rope_theta=123456.0, rope_scaling={"type": "linear", "factor": 4.0}
    )
    tensors = files.random_tensors(config)
    metadata = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.vocab_size": None,  # older files have none
    }
    file = files.write_gguf(tmp_path / "m.gguf", config, tensors, metadata=metadata)
    assert (
        checkpoints.load(file).config
        == checkpoints.load(files.write_hf(tmp_path / "hf", config, tensors)).config
    )


def llama3_factors(factor: float, theta: float, dim: int) -> np.ndarray:
    """`rope_freqs.weight` as convert_hf_to_gguf.py of llama.cpp computes it."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors(tmp_path, factor):
    config = files.hf_config(num_hidden_layers=1, head_dim=64, rope_theta=500000.0)
    factors = llama3_factors(factor, 500000.0, 64)
    file = files.write_gguf(
        tmp_path / "m.gguf",
        config,
        files.random_tensors(config),
        extra_tensors={"rope_freqs.weight": factors},
    )
    rope = checkpoints.load(file).config.rope
    assert rope == RopeConfig("llama3", 500000.0, factor, 8192, 1.0, 4.0)
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 64)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), plain / factors, rtol=1e-6)


@pytest.mark.parametrize("highest", [0.5, 8.0, np.nan])
def test_other_rope_factors_are_refused(tmp_path, highest):
    factors = np.linspace(0.1, highest, 8, dtype=np.float32)
    file = write(tmp_path, extra_tensors={"rope_freqs.weight": factors})
    assert "'rope_freqs.weight'" in files.refusal(file)


# --- refusals ---


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture: got 'mamba'"),
        ({"general.architecture": "qwen3moe"}, "general.architecture: got 'qwen3moe'"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: got 'longrope'"),
        ({"llama.rope.scaling.type": "yarn"}, "factor missing"),
        (
            {"llama.rope.scaling.yarn_ext_factor": 1.0},
            "llama.rope.scaling.yarn_ext_factor: got 1.0",
        ),
        ({"llama.rope.scaling.attn_factor": 0.0}, "llama.rope.scaling.attn_factor: got 0.0"),
        ({"llama.rope.scaling.type": "linear"}, "factor missing"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: got 8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length: got 8"),
        ({"llama.attention.sliding_window_pattern": 2}, "llama.attention.sliding_window_pattern"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale: got 0.5"),
        ({"split.count": 2}, "split.count: got 2"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: missing"),
        ({"llama.attention.head_count_kv": [2, 2]}, "num_key_value_heads"),
        ({"llama.expert_count": 8}, "llama.expert_count: got 8"),
        ({"llama.block_count": 2}, "'model.layers.1.input_layernorm.weight' is missing"),
        ({"llama.feed_forward_length": 49}, "'blk.0.ffn_"),
        ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id: got 300"),
    ],
)
def test_unsupported_metadata(tmp_path, metadata, message):
    assert message in files.refusal(write(tmp_path, metadata=metadata))


@pytest.mark.parametrize("name", ["blk.0.attn_norm.bias", "blk.0.attn_q_norm.weight", "odd"])
def test_unknown_tensor(tmp_path, name):
    extra = {name: np.ones(64, np.float32)}
    assert f"tensor {name!r}" in files.refusal(write(tmp_path, extra_tensors=extra))


def test_a_bias_without_the_others(tmp_path):
    extra = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    assert "'model.layers.0.self_attn.k_proj.bias' is missing" in files.refusal(
        write(tmp_path, extra_tensors=extra)
    )


def test_integer_tensor(tmp_path):
    tensors = {k: v for k, v in TENSORS.items() if k != "model.norm.weight"}
    extra = {"output_norm.weight": np.ones(32, np.int8)}
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, tensors, extra_tensors=extra)
    assert "tensor 'output_norm.weight'" in files.refusal(file) and "I8" in files.refusal(file)


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_file(share):
    with tempfile.TemporaryDirectory() as folder:
        file = write(folder)
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        assert "not a complete GGUF file" in files.refusal(file)


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "m.gguf").write_text("hello")
    files.refusal(tmp_path / "m.gguf")


def test_without_the_gguf_package(tmp_path, monkeypatch):
    file = write(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'jlookahead[gguf]'" in files.refusal(file)
