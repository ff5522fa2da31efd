"""`python -m checkpoints_convert to-hf`: what transformers loads, whole or not at all."""

from __future__ import annotations

import json
import shutil

import checkpoints as files
import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from checkpoints_convert import to_hf
from checkpoints_convert.__main__ import main
from jlookahead import checkpoints
from jlookahead.checkpoints.params import hf_tensors
from jlookahead.model import LlamaModel
from jlookahead.model_config import ModelConfig

CONFIG = files.hf_config(num_hidden_layers=1, vocab_size=300, eos_token_id=[2, 7], pad_token_id=5)
# Each architecture states its own width of a head, or none.
SIZES = {name: size for name, size in files.SIZES.items() if name != "head_dim"}
# None of these is what the architecture has by default.
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"sliding_window": 9, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    "qwen3": {"head_dim": 16},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.25,
    },
}
TOKENS = torch.arange(40)[None] * 7 % 96


@pytest.fixture
def source(tmp_path):
    folder = files.write_hf(tmp_path / "source", CONFIG, files.random_tensors(CONFIG))
    files.tiny_tokenizer().save_pretrained(folder)
    return folder


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def torch_logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits.numpy()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(tmp_path, name, tied):
    fields = SIZES | FAMILIES[name] | {"tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(name, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    model.save_pretrained(tmp_path / "source")
    assert main(["from-hf", str(tmp_path / "source"), str(tmp_path / "orbax")]) == 0
    assert main(["to-hf", str(tmp_path / "orbax"), str(tmp_path / "new")]) == 0

    stored = [load_file(tmp_path / path / "model.safetensors") for path in ("source", "new")]
    assert_same_tensors(stored[1], stored[0])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    assert again.config.model_type == name
    expected = torch_logits(model)
    assert expected.std() > 0.5
    np.testing.assert_allclose(torch_logits(again), expected, rtol=0, atol=1e-4)
    configs = [checkpoints.load(tmp_path / path).config for path in ("source", "new")]
    assert configs[0] == configs[1]


def test_keeps_tokenizer_and_defaults(source, tmp_path):
    assert main(["to-hf", str(source), str(tmp_path / "new")]) == 0
    expected, actual = checkpoints.load(source), checkpoints.load(tmp_path / "new")
    assert actual.defaults == expected.defaults
    assert expected.defaults.eos_token_ids == (2, 7, 1)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "new")
    assert generation.eos_token_id == [2, 7, 1] and generation.pad_token_id == 5
    text, chat = "the hat sat\n1984 ünï</s>", [{"role": "user", "content": "hat"}]
    for tokenizer in (
        actual.tokenizer,
        transformers.AutoTokenizer.from_pretrained(tmp_path / "new"),
    ):
        assert tokenizer.encode(text) == expected.tokenizer.encode(text)
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hat</s>"
    fields = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_no_ids_are_none_for_transformers(tmp_path):
    config = files.hf_config(num_hidden_layers=1, eos_token_id=None, bos_token_id=None)
    folder = files.write_hf(tmp_path / "source", config, files.random_tensors(config))
    assert main(["to-hf", str(folder), str(tmp_path / "new")]) == 0
    assert checkpoints.load(tmp_path / "new").defaults == checkpoints.Defaults()
    read = transformers.AutoConfig.from_pretrained(tmp_path / "new")
    assert read.eos_token_id is None and read.bos_token_id is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_and_dtypes(tmp_path, dtype):
    tensors = files.random_tensors(CONFIG)
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    assert main(["to-hf", str(file), str(tmp_path / "new"), "--dtype", dtype]) == 0
    expected = {name: tensor.astype(np.dtype(dtype)) for name, tensor in tensors.items()}
    assert_same_tensors(load_file(tmp_path / "new" / "model.safetensors"), expected)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["torch_dtype"] == dtype


def test_shards(source, tmp_path, monkeypatch):
    tensors = files.random_tensors(CONFIG)
    largest = tensors["lm_head.weight"].nbytes
    limit = largest - 1  # the embedding and the head each need a file of their own
    monkeypatch.setattr(to_hf, "MAX_FILE_BYTES", limit)
    assert main(["to-hf", str(source), str(tmp_path / "new")]) == 0
    names = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert len(names) >= 3
    assert names == [
        f"model-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)
    ]
    found = {}
    for name in names:
        shard = load_file(tmp_path / "new" / name)
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= limit
        assert found.keys().isdisjoint(shard)
        found |= shard
    assert_same_tensors(found, tensors)
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert_same_tensors(hf_tensors(checkpoints.load(tmp_path / "new").params), tensors)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    np.testing.assert_array_equal(again.lm_head.weight.detach(), tensors["lm_head.weight"])


def test_all_files_have_the_same_mode(source, tmp_path):
    assert main(["to-hf", str(source), str(tmp_path / "new")]) == 0
    modes = {path.stat().st_mode for path in (tmp_path / "new").iterdir()}
    assert len(modes) == 1


# --- what cannot be written ---


def write_converted(folder, **features):
    sizes = {name: CONFIG[name] for name in SIZES} | {"head_dim": 16, "vocab_size": 96}
    config = ModelConfig(**(sizes | features))
    params = LlamaModel(config).init_params(jax.random.key(0))
    folder.mkdir()
    model = checkpoints.LoadedModel(params, config, None, checkpoints.Defaults())
    files.write_converted(model, folder)


def test_padding_ids_become_ordinary_ids(tmp_path):
    write_converted(tmp_path / "orbax", num_padding_ids=3)
    assert main(["to-hf", str(tmp_path / "orbax"), str(tmp_path / "new")]) == 0
    assert checkpoints.load(tmp_path / "new").config.vocab_size == 96


def test_network_of_no_family(tmp_path, capsys):
    write_converted(tmp_path / "orbax", qk_norm=True, mlp_bias=True)
    before = sorted(tmp_path.iterdir())
    assert main(["to-hf", str(tmp_path / "orbax"), str(tmp_path / "new")]) == 2
    message = capsys.readouterr().err
    assert "no architecture of llama" in message and message.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_refusals(source, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    assert main(["to-hf", str(source), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == f"checkpoints_convert: {tmp_path / 'new'}: exists already\n"
    assert list((tmp_path / "new").iterdir()) == []
    assert main(["to-hf", str(tmp_path / "nowhere"), str(tmp_path / "a" / "b")]) == 2
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("last_file", ["shard", "config.json"])
def test_failure_leaves_nothing_that_loads(source, tmp_path, monkeypatch, kill, error, last_file):
    write_file, write_json = to_hf.save_file, to_hf._write_json

    def fail_at_a_shard(tensors, path, **options):
        if last_file == "shard" and "00002-of" in path.name:
            path.write_bytes(b"half")
            raise error
        write_file(tensors, path, **options)

    def fail_at_json(path, fields):
        if last_file == path.name:
            raise error
        write_json(path, fields)

    monkeypatch.setattr(to_hf, "MAX_FILE_BYTES", 30_000)
    monkeypatch.setattr(to_hf, "save_file", fail_at_a_shard)
    monkeypatch.setattr(to_hf, "_write_json", fail_at_json)
    if kill:  # then nobody cleans up
        monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    before = set(tmp_path.iterdir())
    status = 2 if isinstance(error, OSError) else 130
    assert main(["to-hf", str(source), str(tmp_path / "new")]) == status
    left = set(tmp_path.iterdir()) - before
    assert len(left) == kill and tmp_path / "new" not in left
    for folder in left:
        with pytest.raises(FileNotFoundError, match="config.json"):
            checkpoints.load(folder)
