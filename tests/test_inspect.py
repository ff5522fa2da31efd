"""`python -m checkpoints_convert inspect`: what a checkpoint holds, and all that is wrong."""

from __future__ import annotations

import dataclasses
import json

import checkpoints as files
import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import inspection
from checkpoints_convert.__main__ import main
from jlookahead import checkpoints
from jlookahead.model import LlamaModel

# Q8_0 needs rows of 32.
CONFIG = files.hf_config(vocab_size=300, intermediate_size=64)
TENSORS = files.random_tensors(CONFIG)
TIED = CONFIG | {"tie_word_embeddings": True}
SHARD = "model-00001-of-00002.safetensors"


def inspected(capsys, source) -> tuple[int, dict]:
    status = main(["inspect", str(source), "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    fields = json.loads(captured.out)
    assert status == bool(fields["problems"])
    assert not any("\n" in problem for problem in fields["problems"])
    return status, fields


def problems(capsys, source) -> list[str]:
    """What is wrong with a checkpoint that `load` refuses, too."""
    with pytest.raises((ValueError, OSError)):
        checkpoints.load(source)
    return inspected(capsys, source)[1]["problems"]


def write_orbax(tmp_path, config=CONFIG, tensors=TENSORS):
    source = files.write_hf(tmp_path / "of-orbax", config, tensors)
    assert main(["from-hf", str(source), str(tmp_path / "orbax")]) == 0
    return tmp_path / "orbax"


def write(tmp_path, kind, config=CONFIG, tensors=TENSORS):
    if kind == "hf":
        return files.write_hf(tmp_path / "hf", config, tensors)
    if kind == "shards":
        return files.write_hf(tmp_path / "shards", config, tensors, num_shards=2)
    if kind == "gguf":
        return files.write_gguf(tmp_path / "m.gguf", config, tensors)
    return write_orbax(tmp_path, config, tensors)


# --- what is there ---


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["hf", "shards", "gguf", "orbax"])
def test_what_loads_has_no_problems(tmp_path, capsys, kind, config):
    tensors = files.random_tensors(config)
    source = write(tmp_path, kind, config, tensors)
    status, fields = inspected(capsys, source)
    assert status == 0
    lm = checkpoints.load(source)
    assert fields["config"]["rope"]["type"] == "default" and fields["family"] == "llama"
    assert inspection.inspect(str(source)).headers.config == lm.config
    assert inspection.inspect(str(source)).headers.defaults == lm.defaults
    size = sum(tensor.size for tensor in tensors.values())
    assert fields["num_parameters"] == size
    assert sum(group["count"] for group in fields["tensors"]) == len(tensors)
    assert sum(group["num_bytes"] for group in fields["tensors"]) == 4 * size
    paths = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
    assert fields["disk_bytes"] == sum(len(path.read_bytes()) for path in paths)
    groups = {group["name"]: group for group in fields["tensors"]}
    head = "lm_head.weight" if kind == "orbax" else "model.embed_tokens.weight"
    assert groups[head]["shape"] == [300, 32] and groups[head]["count"] == 1
    up = groups["model.layers.*.mlp.up_proj.weight"]
    assert (up["count"], up["shape"], up["num_bytes"]) == (2, [64, 32], 2 * 4 * 64 * 32)
    assert up["dtype"] == ("float32" if kind == "orbax" else "F32")


def test_memory(tmp_path, capsys):
    fields = inspected(capsys, write(tmp_path, "hf"))[1]
    size = sum(tensor.size for tensor in TENSORS.values())
    linear = [t for name, t in TENSORS.items() if "_proj" in name]
    in_int8 = sum(t.size for t in linear)
    assert fields["memory_bytes"] == {
        "float32": 4 * size,
        "bfloat16": 2 * size,
        "int8 and bfloat16": in_int8 + sum(4 * t.shape[0] for t in linear) + 2 * (size - in_int8),
    }
    # Keys and values of 2 layers, 2 heads of 16 numbers.
    assert fields["cache_bytes_per_token"] == {"float32": 512, "bfloat16": 256}


def test_dtypes_as_stored(tmp_path, capsys):
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in TENSORS.items()}
    fields = inspected(capsys, files.write_hf(tmp_path / "m", CONFIG, tensors))[1]
    assert {group["dtype"] for group in fields["tensors"]} == {"BF16"}
    assert fields["tensors"][0]["num_bytes"] == 2 * np.prod(fields["tensors"][0]["shape"])
    kind = gguf.GGMLQuantizationType.Q8_0
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, quantization=kind)
    status, fields = inspected(capsys, file)
    groups = {group["name"]: group for group in fields["tensors"]}
    head = groups["lm_head.weight"]
    assert (status, head["dtype"], head["shape"]) == (0, "Q8_0", [300, 32])
    assert head["num_bytes"] == 300 * 34  # 32 bytes and a float16 scale
    assert groups["model.norm.weight"]["dtype"] == "F32"


def test_text_output(tmp_path, capsys):
    source = write(tmp_path, "hf")
    files.tiny_tokenizer().save_pretrained(source)
    assert main(["inspect", str(source)]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"Hugging Face directory {source}"
    assert "tokenizer yes" in lines and "EOS ids 2, 1" in lines and "context 128" in lines
    assert "RoPE default" in lines
    assert "cache per token 512 bytes in float32, 256 bytes in bfloat16" in lines
    assert "2 x model.layers.*.mlp.up_proj.weight 64x32 F32 16.4 kB" in lines
    assert lines[-1] == "no problems; the values of the tensors were not read"
    (source / "model.safetensors").unlink()
    assert main(["inspect", str(source)]) == 1
    *rest, last = capsys.readouterr().out.splitlines()
    shown = [line for line in rest if line.startswith("problem: ")]
    assert "neither model.safetensors" in shown[0]
    assert len(shown) == 20 and last == f"and {1 + len(TENSORS) - 20} more, see --json"


def test_network_of_no_family(tmp_path, capsys):
    lm = checkpoints.load(write(tmp_path, "hf"))
    config = dataclasses.replace(lm.config, qk_norm=True, mlp_bias=True)
    params = LlamaModel(config).init_params(jax.random.key(0))
    files.write_converted(dataclasses.replace(lm, config=config, params=params), tmp_path)
    checkpoints.load(tmp_path)
    status, fields = inspected(capsys, tmp_path)
    assert (status, fields["family"]) == (0, None)


def test_values_are_not_read(tmp_path, capsys):
    tensors = TENSORS | {"model.norm.weight": np.full(32, np.nan, np.float32)}
    source = files.write_hf(tmp_path / "m", CONFIG, tensors)
    with pytest.raises(ValueError, match="NaN"):
        checkpoints.load(source)
    assert inspected(capsys, source)[0] == 0


@pytest.mark.parametrize("stored", [{"embed", "head"}, {"head"}])
def test_tied_head_that_is_stored(tmp_path, capsys, stored):
    tensors = files.random_tensors(TIED)
    embedding = tensors.pop("model.embed_tokens.weight")
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    tensors |= {names[name]: embedding for name in stored}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    source = files.write_hf(tmp_path / "m", TIED, tensors)
    checkpoints.load(source)
    assert inspected(capsys, source)[0] == 0


# --- what is wrong ---


def test_every_problem_of_the_tensors_is_listed(tmp_path, capsys):
    tensors = dict(TENSORS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.wieght"] = tensors["model.norm.weight"]
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"].T)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].astype(np.int32)
    float8 = "model.layers.0.mlp.up_proj.weight"
    tensors[float8] = tensors[float8].astype(ml_dtypes.float8_e4m3fn)
    source = files.write_hf(tmp_path / "m", CONFIG, tensors)
    file = source / "model.safetensors"
    assert sorted(problems(capsys, source)) == sorted(
        [
            f"{source}: tensor 'model.layers.1.mlp.up_proj.weight' is missing",
            f"tensor 'model.norm.wieght' in {file}: not a parameter of the model that the config "
            "describes",
            f"tensor 'lm_head.weight' in {file}: shape is [32, 300], must be [300, 32]",
            f"tensor {name!r} in {file}: dtype I32 is not supported",
            f"tensor {float8!r} in {file}: dtype F8_E4M3 is not supported",
        ]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(model_type="gpt2"), "model_type: got 'gpt2'"),
        (lambda m: m.pop("hidden_size"), "hidden_size: missing"),
        (lambda m: m.update(rope_scaling={"type": "su", "factor": 2}), "rope type: got 'su'"),
        (lambda m: m.update(eos_token_id=300), "eos_token_id: got 300"),
        (lambda m: m.update(num_hidden_layers=3), "'model.layers.2.mlp.up_proj.weight' is missing"),
        (lambda m: m.update(num_hidden_layers=1), "not a parameter of the model"),
        (lambda m: m.update(hidden_size="x"), "hidden_size: got 'x'"),
    ],
)
def test_configuration(tmp_path, capsys, change, message):
    config = dict(CONFIG)
    change(config)
    source = files.write_hf(tmp_path / "m", config, TENSORS)
    found = problems(capsys, source)
    assert any(message in problem for problem in found)
    fields = inspected(capsys, source)[1]
    assert sum(group["count"] for group in fields["tensors"]) == len(TENSORS)


def test_files_that_cannot_be_read(tmp_path, capsys):
    source = write(tmp_path, "hf")
    (source / "config.json").write_text("{")
    (source / "tokenizer.json").write_text("{")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    config, tokenizer, weights = problems(capsys, source)
    assert "config.json: invalid JSON" in config
    assert "cannot read tokenizer.json" in tokenizer
    assert f"{file}: not a complete safetensors file" in weights
    (source / "config.json").unlink()
    assert "config.json: no such file" in problems(capsys, source)[0]


def test_shards(tmp_path, capsys):
    source = write(tmp_path, "shards")
    content = (source / SHARD).read_bytes()
    in_first = sum(file == SHARD for file in files.read_weight_map(source).values())
    (source / SHARD).write_bytes(content[:100])
    broken, *missing = problems(capsys, source)
    assert f"{source / SHARD}: not a complete safetensors file" in broken
    assert len(missing) == in_first
    (source / SHARD).unlink()
    assert f"{source / SHARD}: no such file" in problems(capsys, source)[0]
    (source / SHARD).write_bytes(content)

    weight_map = files.read_weight_map(source)
    other = "model-00002-of-00002.safetensors"
    moved, unknown = "model.embed_tokens.weight", "model.norm.weight"
    assert weight_map[moved] == SHARD
    changed = weight_map | {moved: other, "nothing": SHARD}
    del changed[unknown]
    files.write_index(source, changed)
    found = problems(capsys, source)
    assert len(found) == 3
    index = "model.safetensors.index.json"
    assert any(f"{moved!r} in {source / SHARD}: {index} places it in {other}" in p for p in found)
    assert any(f"{unknown!r}" in p and f"not in {index}" in p for p in found)
    assert any(f"{source / SHARD}: lacks tensor 'nothing'" in p for p in found)

    (source / "model.safetensors.index.json").write_text("{}")
    (problem,) = problems(capsys, source)
    assert "weight_map must be a non-empty object" in problem
    assert len(inspected(capsys, source)[1]["tensors"]) > 5


def test_pytorch_weights(tmp_path, capsys):
    source = write(tmp_path, "hf")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "PyTorch weights only" in problems(capsys, source)[0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture: got 'gpt2'"),
        ({"llama.expert_count": 8}, "llama.expert_count: got 8"),
        ({"llama.block_count": 3}, "'model.layers.2.mlp.up_proj.weight' is missing"),
        ({"llama.feed_forward_length": 65}, "must be [65, 32]"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: got 'bert'"),
    ],
)
def test_gguf(tmp_path, capsys, metadata, message):
    extra = {"odd.weight": np.ones(3, np.float32), "blk.0.ffn_up.scale": np.ones(3, np.int32)}
    file = files.write_gguf(
        tmp_path / "m.gguf", CONFIG, TENSORS, metadata=metadata, extra_tensors=extra
    )
    found = problems(capsys, file)
    assert any(message in problem for problem in found)
    if "general.architecture" not in metadata and "llama.expert_count" not in metadata:
        assert any("'odd.weight'" in p and "not a parameter" in p for p in found)
        assert any("'blk.0.ffn_up.scale'" in p and "I32 is not supported" in p for p in found)
    fields = inspected(capsys, file)[1]
    assert sum(group["count"] for group in fields["tensors"]) == len(TENSORS) + 2


def test_damaged_gguf(tmp_path, capsys):
    file = write(tmp_path, "gguf")
    file.write_bytes(file.read_bytes()[:1000])
    assert "not a complete GGUF file" in problems(capsys, file)[0]


def test_converted(tmp_path, capsys):
    source = write_orbax(tmp_path)

    def change(params):
        del params["lm_head"]
        params["norm"]["weight"] = np.ones(3, np.float32)
        params["layers_0"]["input_layernorm"]["weight"] = np.ones(32, np.int32)
        params["more"] = {"weight": np.ones(3)}

    files.rewrite_converted(source, change)
    params = source / "params"
    assert sorted(problems(capsys, source)) == sorted(
        [
            f"{params}: tensor 'lm_head.kernel' is missing",
            f"tensor 'norm.weight' in {params}: shape is [3], must be [32]",
            f"tensor 'layers_0.input_layernorm.weight' in {params}: dtype is int32, must be "
            "floating",
            f"tensor 'more.weight' in {params}: not a parameter of the model",
        ]
    )
    (source / "jlookahead.json").write_text('{"format": 9}')
    assert "format: got 9" in problems(capsys, source)[0]
    params.rename(source / "elsewhere")
    assert "not a readable Orbax checkpoint" in problems(capsys, source)[1]


def test_an_untied_directory_that_says_tied(tmp_path, capsys):
    source = write_orbax(tmp_path)
    file = source / "jlookahead.json"
    manifest = json.loads(file.read_text())
    manifest["model"]["tie_word_embeddings"] = True
    file.write_text(json.dumps(manifest))
    (problem,) = problems(capsys, source)
    assert "tensor 'embed_tokens.weight'" in problem


def test_no_checkpoint(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("not a model")
    (tmp_path / "model.safetensors").write_text("")
    for name in ("nowhere", "empty", "text.gguf", "model.safetensors"):
        assert main(["inspect", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert str(tmp_path / name) in captured.err
