"""GGUF files: quantised weights, configuration and tokenizer from the metadata, refusals."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import checkpoints as files
import gguf
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jlookahead import checkpoints
from jlookahead.checkpoints.params import hf_tensors
from jlookahead.model import inverse_frequencies
from jlookahead.model_config import RopeConfig

CONFIG = files.hf_config(num_hidden_layers=1, vocab_size=300)
TENSORS = files.random_tensors(CONFIG)
Q = gguf.GGMLQuantizationType


def write(folder, **options):
    return files.write_gguf(Path(folder) / "m.gguf", CONFIG, TENSORS, **options)


def refusal(file) -> str:
    with pytest.raises(ValueError) as caught:
        checkpoints.load(file)
    message = str(caught.value)
    assert "\n" not in message and str(file) in message
    return message


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
    assert rope == RopeConfig("llama3", 500000.0, factor, 1.0, 4.0, 8192)
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 64)
    np.testing.assert_allclose(inverse_frequencies(rope, 64), plain / factors, rtol=1e-6)


@pytest.mark.parametrize("highest", [0.5, 8.0, np.nan])
def test_other_rope_factors_are_refused(tmp_path, highest):
    factors = np.linspace(0.1, highest, 8, dtype=np.float32)
    file = write(tmp_path, extra_tensors={"rope_freqs.weight": factors})
    assert "'rope_freqs.weight'" in refusal(file)


# --- refusals ---


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture: got 'mamba'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope type: got 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "factor missing"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: got 8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length: got 8"),
        ({"llama.attention.sliding_window": 64}, "sliding_window: got 64"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: missing"),
        ({"llama.attention.head_count_kv": [2, 2]}, "num_key_value_heads"),
        ({"llama.expert_count": 8}, "llama.expert_count: got 8"),
        ({"llama.block_count": 2}, "'model.layers.1.input_layernorm.weight' is missing"),
        ({"llama.feed_forward_length": 49}, "'blk.0.ffn_"),
        ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id: got 300"),
    ],
)
def test_unsupported_metadata(tmp_path, metadata, message):
    assert message in refusal(write(tmp_path, metadata=metadata))


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "odd"])
def test_unknown_tensor(tmp_path, name):
    extra = {name: np.ones(64, np.float32)}
    assert f"tensor {name!r}" in refusal(write(tmp_path, extra_tensors=extra))


def test_integer_tensor(tmp_path):
    tensors = {k: v for k, v in TENSORS.items() if k != "model.norm.weight"}
    extra = {"output_norm.weight": np.ones(32, np.int8)}
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, tensors, extra_tensors=extra)
    assert "tensor 'output_norm.weight'" in refusal(file) and "I8" in refusal(file)


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_file(share):
    with tempfile.TemporaryDirectory() as folder:
        file = write(folder)
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        assert "not a complete GGUF file" in refusal(file)


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "m.gguf").write_text("hello")
    refusal(tmp_path / "m.gguf")


def test_without_the_gguf_package(tmp_path, monkeypatch):
    file = write(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'jlookahead[gguf]'" in refusal(file)


# --- tokenizer ---


def tokenizer_metadata(**changes):
    """The metadata that llama.cpp writes for `tiny_tokenizer`."""
    tokenizer = files.tiny_tokenizer()
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 5,
        "padding_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | {
        "tokenizer.chat_template": tokenizer.chat_template
    }


def test_tokenizer_and_defaults(tmp_path):
    model = checkpoints.load(write(tmp_path, metadata=tokenizer_metadata()))
    expected = files.tiny_tokenizer()
    text = "the hat</s> sat, 1984 \n\n ünï"
    assert model.tokenizer.encode(text) == expected.encode(text)
    assert 1 in model.tokenizer.encode(text)
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "hat"}]
    assert model.tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hat</s>"
    assert model.tokenizer.eos_token == "</s>"
    assert model.defaults == checkpoints.Defaults((1, 5), pad_token_id=1, bos_token_id=0)


def with_numbers(metadata):
    """Adds tokens for numbers of up to four digits, which only some splittings can use."""
    metadata = dict(metadata)
    for key, values in {
        "tokens": ["12", "123", "1234"],
        "token_type": [1, 1, 1],
        "merges": ["1 2", "12 3", "123 4"],
    }.items():
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *values]
    return metadata


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["1234", "Ġ", "12"]),
        ("llama-bpe", ["123", "4", "Ġ", "12"]),
        ("smollm", ["1", "2", "3", "4", "Ġ", "1", "2"]),
    ],
)
def test_splitting_of_numbers(tmp_path, pre, tokens):
    metadata = with_numbers(tokenizer_metadata(pre=pre, add_bos_token=False))
    tokenizer = checkpoints.load(write(tmp_path, metadata=metadata)).tokenizer
    assert tokenizer.tokenize("1234 12") == tokens


@pytest.fixture(scope="module")
def llama3_tokenizers(tmp_path_factory):
    """Ours and that of transformers, from one file."""
    metadata = with_numbers(tokenizer_metadata(pre="llama-bpe", add_bos_token=False))
    file = write(tmp_path_factory.mktemp("llama3"), metadata=metadata)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    return checkpoints.load(file).tokenizer, oracle


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        st.sampled_from("the catsh'LLDve 0123,.!\n\r\tüß漢<>/") | st.characters(codec="utf-8")
    )
)
def test_llama3_splitting_equals_that_of_transformers(llama3_tokenizers, text):
    ours, oracle = llama3_tokenizers
    assert ours.tokenize(text) == oracle.tokenize(text)


@pytest.mark.parametrize(("changes", "starts"), [({}, True), ({"add_bos_token": False}, False)])
def test_llama3_starts_with_bos(tmp_path, changes, starts):
    model = checkpoints.load(
        write(tmp_path, metadata=tokenizer_metadata(pre="llama-bpe", **changes))
    )
    assert (model.tokenizer.encode("hat")[0] == 0) == starts
    assert model.tokenizer.encode("hat", add_special_tokens=False)[0] != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model: got 'llama'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre: got 'tekken'"),
        ({"pre": None}, "tokenizer.ggml.pre: got None"),
        ({"merges": [1, 2]}, "tokenizer metadata: "),
        ({"merges": None}, "'merges' is missing"),
        ({"tokens": ["a", "a"]}, "a token occurs twice"),
        ({"tokens": ["a", "b"], "merges": ["a b"]}, "'a b' is not a pair of tokens"),
        ({"merges": ["ab"]}, "'ab' is not a pair of tokens"),
        ({"bos_token_id": 999}, "tokenizer metadata: "),
    ],
)
def test_unusable_tokenizer(tmp_path, changes, message):
    assert message in refusal(write(tmp_path, metadata=tokenizer_metadata(**changes)))
