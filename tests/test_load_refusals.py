"""`load` refuses checkpoints that do not fit, in one line that names the tensor or the file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import checkpoints as files
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jlookahead import checkpoints

CONFIG = files.hf_config(num_hidden_layers=1)
TENSORS = files.random_tensors(CONFIG)
FIRST_SHARD = "model-00001-of-00002.safetensors"


def refusal(source, error=ValueError, **options) -> str:
    with pytest.raises(error) as caught:
        checkpoints.load(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- tensors that were tampered with ---


def dropped(tensors, name):
    return {k: v for k, v in tensors.items() if k != name}, name


def renamed(tensors, name):
    new = name.replace("weight", "wieght")
    return {(new if k == name else k): v for k, v in tensors.items()}, new


def duplicated(tensors, name):
    return tensors | {f"copy.{name}": tensors[name].copy()}, f"copy.{name}"


def reshaped(tensors, name):
    """Transposed; a vector becomes a column; a square matrix, where that is no error, is cut."""
    tensor = tensors[name]
    if tensor.ndim == 1:
        changed = tensor[:, None]
    elif tensor.shape[0] == tensor.shape[1]:
        changed = tensor[1:]
    else:
        changed = tensor.T
    return tensors | {name: np.ascontiguousarray(changed)}, name


def of_integers(tensors, name):
    return tensors | {name: tensors[name].astype(np.int32)}, name


def of_float8(tensors, name):
    return tensors | {name: tensors[name].astype(ml_dtypes.float8_e4m3fn)}, name


def not_finite(tensors, name):
    changed = tensors[name].copy()
    changed.flat[-1] = np.nan if len(name) % 2 else -np.inf
    return tensors | {name: changed}, name


TAMPERING = [dropped, renamed, duplicated, reshaped, of_integers, of_float8, not_finite]


@settings(max_examples=60, deadline=None)
@given(
    tamper=st.sampled_from(TAMPERING),
    name=st.sampled_from(sorted(TENSORS)),
    num_shards=st.sampled_from([None, 2]),
)
def test_tampered_tensor(tamper, name, num_shards):
    tensors, culprit = tamper(TENSORS, name)
    with tempfile.TemporaryDirectory() as folder:
        files.write_hf(Path(folder), CONFIG, tensors, num_shards=num_shards)
        message = refusal(folder)
    assert repr(culprit) in message
    assert folder in message
    if tamper is not dropped:
        assert ".safetensors" in message


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), num_shards=st.sampled_from([None, 2]))
def test_truncated_file(share, num_shards):
    with tempfile.TemporaryDirectory() as folder:
        files.write_hf(Path(folder), CONFIG, TENSORS, num_shards=num_shards)
        file = Path(folder) / (FIRST_SHARD if num_shards else "model.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        assert f"{file}: not a complete safetensors file" in refusal(folder)


def test_overflow_of_float16(tmp_path):
    tensors = TENSORS | {"model.norm.weight": np.full(32, 1e6, np.float32)}
    folder = files.write_hf(tmp_path / "m", CONFIG, tensors)
    checkpoints.load(folder)
    assert "'model.norm.weight'" in refusal(folder, dtype="float16")


@pytest.mark.parametrize("num_layers", [1, 3])
def test_another_number_of_layers(tmp_path, num_layers):
    tensors = files.random_tensors(files.hf_config(num_hidden_layers=2))
    config = files.hf_config(num_hidden_layers=num_layers)
    message = refusal(files.write_hf(tmp_path / "m", config, tensors))
    assert "'model.layers.1." in message or "'model.layers.2." in message


# --- the head ---


def test_tied_head_that_differs(tmp_path):
    config = files.hf_config(tie_word_embeddings=True)
    tensors = files.random_tensors(files.hf_config())
    message = refusal(files.write_hf(tmp_path / "m", config, tensors))
    assert "'lm_head.weight'" in message and "ties" in message


def test_untied_head_that_is_missing(tmp_path):
    tensors = files.random_tensors(files.hf_config(tie_word_embeddings=True))
    message = refusal(files.write_hf(tmp_path / "m", files.hf_config(), tensors))
    assert message.endswith("tensor 'lm_head.weight' is missing")


# --- the index ---


@pytest.fixture
def sharded(tmp_path):
    return files.write_hf(tmp_path / "m", CONFIG, TENSORS, num_shards=2)


def test_missing_shard(sharded):
    (sharded / FIRST_SHARD).unlink()
    assert FIRST_SHARD in refusal(sharded, FileNotFoundError)


def test_index_places_a_tensor_elsewhere(sharded):
    weight_map = files.read_weight_map(sharded)
    name = next(name for name, file in weight_map.items() if file == FIRST_SHARD)
    other = next(file for file in weight_map.values() if file != FIRST_SHARD)
    files.write_index(sharded, weight_map | {name: other})
    message = refusal(sharded)
    assert repr(name) in message and other in message


def test_index_names_a_tensor_that_is_nowhere(sharded):
    files.write_index(sharded, files.read_weight_map(sharded) | {"model.more": FIRST_SHARD})
    message = refusal(sharded)
    assert "'model.more'" in message and FIRST_SHARD in message


def test_index_lacks_a_tensor(sharded):
    weight_map = files.read_weight_map(sharded)
    name = "model.norm.weight"
    file = weight_map.pop(name)
    files.write_index(sharded, weight_map)
    message = refusal(sharded)
    assert repr(name) in message and file in message


def test_tensor_in_two_shards(sharded):
    weight_map = files.read_weight_map(sharded)
    name = next(name for name, file in weight_map.items() if file != FIRST_SHARD)
    shard = load_file(sharded / FIRST_SHARD)
    save_file(shard | {name: TENSORS[name]}, sharded / FIRST_SHARD)
    message = refusal(sharded)
    assert repr(name) in message and FIRST_SHARD in message and weight_map[name] in message


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", 3, ""])
def test_index_leads_out_of_the_directory(sharded, file):
    name = next(iter(TENSORS))
    files.write_index(sharded, files.read_weight_map(sharded) | {name: file})
    assert f"got {file!r}, must be the name of a file" in refusal(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', "\xff"])
def test_index_that_is_no_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert "model.safetensors.index.json: " in refusal(sharded)


# --- the configuration ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type: got 'mamba', supported architectures are: llama"),
        ({"model_type": None}, "model_type: got None"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope type: got 'su'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor missing"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "32"}, "hidden_size: got '32'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: got 'small'"),
        ({"num_key_value_heads": 3}, "num_attention_heads: got 4"),
    ],
)
def test_unsupported_config(tmp_path, changes, message):
    folder = files.write_hf(tmp_path / "m", files.hf_config(**changes), TENSORS)
    actual = refusal(folder)
    assert actual.startswith(f"{folder / 'config.json'}: ") and message in actual


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "3", '{"a": nul}', "\xff"])
def test_invalid_json(tmp_path, name, text):
    folder = files.write_hf(tmp_path / "m", CONFIG, TENSORS)
    (folder / name).write_bytes(text.encode("latin-1"))
    assert refusal(folder).startswith(f"{folder / name}: ")


def test_no_config(tmp_path):
    folder = files.write_hf(tmp_path / "m", CONFIG, TENSORS)
    (folder / "config.json").unlink()
    assert refusal(folder, FileNotFoundError) == f"{folder / 'config.json'}: no such file"


def test_no_weights(tmp_path):
    folder = files.write_hf(tmp_path / "m", CONFIG, TENSORS)
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(folder, FileNotFoundError)


def test_pytorch_weights_only(tmp_path):
    folder = files.write_hf(tmp_path / "m", CONFIG, TENSORS)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save_pretrained" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "{}", json.dumps({"model": {"type": "Nonsense"}})])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_unreadable_tokenizer(tmp_path, name, text):
    folder = files.write_hf(tmp_path / "m", CONFIG, TENSORS)
    (folder / name).write_text(text)
    assert refusal(folder).startswith(f"{folder}: cannot read {name}")


def test_bundled_model_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path / package)
    message = refusal(None, FileNotFoundError)
    assert "jlookahead/bundled: this installation lacks the bundled model" in message
