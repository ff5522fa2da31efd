"""`load`: every source gives the same parameters, and Hugging Face's logits."""

from __future__ import annotations

import subprocess
import sys

import checkpoints as files
import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import errors

import jlookahead as jl
from checkpoints_convert.__main__ import main as convert
from jlookahead import checkpoints
from jlookahead.checkpoints.params import hf_tensors
from jlookahead.model_config import DTYPES


@pytest.fixture
def offline_cache(tmp_path, monkeypatch):
    """An empty hub cache, with the network switched off."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


# --- the network that comes out ---


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_hf_pytorch(tmp_path, num_kv_heads, tied):
    config = files.hf_config(num_key_value_heads=num_kv_heads, tie_word_embeddings=tied)
    folder = files.write_hf(tmp_path / "m", config, files.random_tensors(config))
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], (2, 40))
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    lm = checkpoints.load(folder)
    actual = files.logits(lm.params, lm.config, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


def single_file(tmp_path, config, tensors):
    return files.write_hf(tmp_path / "single", config, tensors)


def shards(tmp_path, config, tensors):
    return str(files.write_hf(tmp_path / "shards", config, tensors, num_shards=3))


def hub_cache(tmp_path, config, tensors):
    files.write_hub_cache(tmp_path / "hub", "org/tiny.model", config, tensors)
    return "org/tiny.model"


def orbax(tmp_path, config, tensors):
    source = files.write_hf(tmp_path / "source", config, tensors)
    assert convert(["from-hf", str(source), str(tmp_path / "orbax")]) == 0
    return tmp_path / "orbax"


def gguf(tmp_path, config, tensors):
    return files.write_gguf(tmp_path / "m.gguf", config, tensors)


@pytest.mark.parametrize("write", [single_file, shards, hub_cache, orbax, gguf])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_sources_are_bitwise_equal(tmp_path, offline_cache, write, num_kv_heads, tied):
    config = files.hf_config(num_key_value_heads=num_kv_heads, tie_word_embeddings=tied)
    tensors = files.random_tensors(config)
    model = checkpoints.load(write(tmp_path, config, tensors))
    assert_same_tensors(hf_tensors(model.params), tensors)
    single = checkpoints.load(single_file(tmp_path, config, tensors))
    assert model.config == single.config


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(tmp_path, stored, dtype):
    config = files.hf_config(num_hidden_layers=1)
    tensors = {k: v.astype(stored) for k, v in files.random_tensors(config).items()}
    model = checkpoints.load(files.write_hf(tmp_path / "m", config, tensors), dtype=dtype)
    assert model.config.dtype == dtype
    expected = {k: v.astype(np.dtype(dtype)) for k, v in tensors.items()}
    assert_same_tensors(hf_tensors(model.params), expected)


def test_known_ignorable_tensors(tmp_path):
    config = files.hf_config()
    tensors = files.random_tensors(config)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    model = checkpoints.load(files.write_hf(tmp_path / "m", config, tensors | extra))
    assert_same_tensors(hf_tensors(model.params), tensors)


@pytest.mark.parametrize("head", ["equal", "instead"])
def test_tied_head_that_is_stored(tmp_path, head):
    config = files.hf_config(tie_word_embeddings=True)
    tensors = files.random_tensors(config)
    stored = dict(tensors)
    stored["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if head == "instead":
        del stored["model.embed_tokens.weight"]
    model = checkpoints.load(files.write_hf(tmp_path / "m", config, stored))
    assert_same_tensors(hf_tensors(model.params), tensors)


def test_index_decides_and_stray_files_are_ignored(tmp_path):
    config = files.hf_config()
    tensors, stale = files.random_tensors(config), files.random_tensors(config, seed=1)
    folder = files.write_hf(tmp_path / "m", config, tensors, num_shards=2)
    files.write_hf(folder, config, stale)  # model.safetensors
    (folder / "model-old.safetensors").write_bytes(b"not read")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert_same_tensors(hf_tensors(checkpoints.load(folder).params), tensors)


def test_works_without_torch(tmp_path):
    config = files.hf_config(vocab_size=300)
    tensors = files.random_tensors(config)
    folder = files.write_hf(tmp_path / "m", config, tensors)
    files.tiny_tokenizer().save_pretrained(folder)
    file = files.write_gguf(tmp_path / "m.gguf", config, tensors)
    script = f"""
import sys
sys.modules["torch"] = None  # makes importing it fail
from checkpoints_convert.__main__ import main
from jlookahead import checkpoints
model = checkpoints.load({str(folder)!r})
assert model.tokenizer.decode(model.tokenizer.encode("a cat")) == "a cat"
checkpoints.load({str(file)!r})
assert main(["from-hf", {str(folder)!r}, {str(tmp_path / "new")!r}]) == 0
assert checkpoints.load({str(tmp_path / "new")!r}).tokenizer is not None
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr


# --- tokenizer and defaults ---


def test_tokenizer_and_defaults(tmp_path):
    config = files.hf_config(vocab_size=300, eos_token_id=[2, 7], pad_token_id=-1)
    folder = files.write_hf(tmp_path / "m", config, files.random_tensors(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 2], "pad_token_id": 4}')
    tokenizer = files.tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    model = checkpoints.load(folder)
    assert model.tokenizer.encode("the cat sat") == tokenizer.encode("the cat sat")
    chat = [{"role": "user", "content": "hat"}]
    assert model.tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hat</s>"
    assert model.defaults == checkpoints.Defaults(
        eos_token_ids=(9, 2, 7, 1), pad_token_id=4, bos_token_id=1
    )


def test_make_config_starts_from_the_defaults(tmp_path):
    config = files.hf_config(pad_token_id=3)
    model = checkpoints.load(files.write_hf(tmp_path / "m", config, files.random_tensors(config)))
    assert model.tokenizer is None
    made = model.make_config(max_new_tokens=5)
    assert (made.model, made.eos_token_ids, made.pad_token_id) == (model.config, (2,), 3)
    assert made.max_new_tokens == 5
    assert model.make_config(eos_token_ids=()).eos_token_ids == ()


@pytest.mark.parametrize("value", [True, "2", 96, -1])
def test_bad_eos_is_refused(tmp_path, value):
    config = files.hf_config(eos_token_id=value)
    folder = files.write_hf(tmp_path / "m", config, files.random_tensors(config))
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id"):
        checkpoints.load(folder)


# --- where to look ---


def test_none_is_the_bundled_model():
    model = checkpoints.load()
    text = "def double(x):\n    return 2 * x\n"
    ids = model.tokenizer.encode(text)
    assert model.tokenizer.decode(ids) == text
    assert model.defaults.eos_token_ids
    # It has learned something: it finds the text likelier than the same tokens out of order.
    logits = files.logits(model.params, model.config, np.array([ids, sorted(ids)]))
    losses = -np.take_along_axis(
        logits[:, :-1] - np.log(np.exp(logits[:, :-1]).sum(-1, keepdims=True)),
        np.array([ids, sorted(ids)])[:, 1:, None],
        axis=-1,
    ).mean((1, 2))
    assert losses[0] < 0.7 * losses[1]


def test_unknown_dtype():
    with pytest.raises(ValueError, match=r"dtype: got 'float64', allowed are float32"):
        checkpoints.load("anything", dtype="float64")


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "models/none.gguf", "/a/b"])
def test_no_such_path(name):
    with pytest.raises(FileNotFoundError, match="no such file or directory$"):
        checkpoints.load(name)


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"model\.safetensors: not a checkpoint"):
        checkpoints.load(tmp_path / "model.safetensors")


def test_hub_cache_comes_before_the_network(tmp_path, offline_cache, monkeypatch):
    download = huggingface_hub.snapshot_download

    def local_only(repo_id, *, local_files_only, **options):
        assert local_files_only
        return download(repo_id, local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", local_only)
    config = files.hf_config(vocab_size=300)
    hub_cache(tmp_path, config, files.random_tensors(config))
    files.tiny_tokenizer().save_pretrained(next((tmp_path / "hub").rglob("config.json")).parent)
    checkpoints.load("org/tiny.model")


def test_a_cached_model_whose_tokenizer_is_missing(tmp_path, offline_cache, monkeypatch):
    """Another tool may have fetched weights alone; offline that must do."""
    config = files.hf_config(vocab_size=300)
    tensors = files.random_tensors(config)
    name = hub_cache(tmp_path, config, tensors)
    assert checkpoints.load(name).tokenizer is None
    complete = files.write_hf(tmp_path / "complete", config, tensors)
    files.tiny_tokenizer().save_pretrained(complete)
    download = huggingface_hub.snapshot_download

    def online(repo_id, *, local_files_only, **options):
        if local_files_only:
            return download(repo_id, local_files_only=True, **options)
        return str(complete)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", online)
    assert checkpoints.load(name).tokenizer is not None


def test_ids_without_a_token_are_padding(tmp_path):
    config = files.hf_config(vocab_size=320, tie_word_embeddings=True)
    tensors = files.random_tensors(config)
    tensors["model.embed_tokens.weight"][300:] *= 50  # would win
    folder = files.write_hf(tmp_path / "m", config, tensors)
    greedy = jl.generate(checkpoints.load(folder).params, [5], padding_config(folder, 0)).tokens
    assert max(greedy) >= 300
    files.tiny_tokenizer().save_pretrained(folder)
    lm = checkpoints.load(folder)
    num_tokens = len(lm.tokenizer)
    assert lm.config.num_padding_ids == 320 - num_tokens > 0
    for temperature in (0.0, 5.0):
        cfg = padding_config(folder, temperature)
        assert max(jl.generate(lm.params, [5], cfg).tokens) < num_tokens


def padding_config(folder, temperature):
    sampling = jl.Sampling(temperature=temperature)
    strategy = jl.Lookahead(3, 3, 2)
    return checkpoints.load(folder).make_config(
        strategy=strategy, sampling=sampling, max_new_tokens=40, eos_token_ids=()
    )


def test_hub_id_offline(offline_cache):
    with pytest.raises(FileNotFoundError, match=r"^org/name: no such file .* hub cache.*$"):
        checkpoints.load("org/name")


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_hub_cache_that_is_incomplete(tmp_path, offline_cache, name):
    config = files.hf_config()
    snapshot = files.write_hub_cache(
        offline_cache, "org/name", config, files.random_tensors(config)
    )
    (snapshot / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        checkpoints.load("org/name")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (errors.GatedRepoError, ValueError, "org/name: a gated repository"),
        (errors.RepositoryNotFoundError, FileNotFoundError, "org/name: .*no such hub repository"),
        (errors.HfHubHTTPError, ValueError, "org/name: not fetched from the hub: two$"),
    ],
)
def test_hub_refusals_are_one_line(monkeypatch, error, expected, message):
    def refuse(repo_id, *, local_files_only, **_):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        raise error("two\nlines", response=FakeResponse())

    class FakeResponse:
        headers: dict = {}
        request = None

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(expected, match=message) as caught:
        checkpoints.load("org/name")
    assert "\n" not in str(caught.value)


def test_hub_download_fetches_only_what_the_index_names(tmp_path, monkeypatch):
    config = files.hf_config()
    tensors = files.random_tensors(config)
    folder = files.write_hf(tmp_path / "m", config, tensors, num_shards=2)
    asked = []

    def download(repo_id, *, allow_patterns, local_files_only):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not cached")
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same_tensors(hf_tensors(checkpoints.load("org/name").params), tensors)
    small, weights = asked
    assert weights == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert "config.json" in small and not any("*" in name for name in small)
