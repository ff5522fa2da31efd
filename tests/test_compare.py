"""`python -m checkpoints_convert compare`: logits of two checkpoints, or of one and PyTorch."""

from __future__ import annotations

import json
import statistics
import sys

import checkpoints as files
import gguf
import numpy as np
import pytest
import transformers

from checkpoints_convert import compare
from checkpoints_convert.__main__ import main
from jlookahead import checkpoints

# Q8_0 needs rows of 32.
CONFIG = files.hf_config(num_hidden_layers=1, vocab_size=300, intermediate_size=64)
TENSORS = files.random_tensors(CONFIG)


@pytest.fixture
def source(tmp_path):
    return files.write_hf(tmp_path / "source", CONFIG, TENSORS)


def run(capsys, *arguments) -> tuple[int, str]:
    status = main(["compare", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out


def compared(capsys, *arguments) -> tuple[int, dict]:
    status, out = run(capsys, *arguments, "--json")
    fields = json.loads(out)
    assert fields["within_tolerance"] == (status == 0)
    return status, fields


def refusal(capsys, *arguments) -> str:
    assert main(["compare", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def changed(tmp_path, name="changed", **tensors):
    """The same checkpoint with other tensors, given by their last module."""
    new = {k: tensors.get(k.split(".")[-2], lambda t: t)(v) for k, v in TENSORS.items()}
    return files.write_hf(tmp_path / name, CONFIG, new)


def test_the_same_weights_in_another_format(source, tmp_path, capsys):
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    status, fields = compared(capsys, source, file)
    assert status == 0 and fields["max_difference"] == 0
    assert fields["num_tokens"] == len(fields["positions"]) == 64
    assert fields["other_tops"] == [] and fields["largest_logit"] > 1


def test_every_figure(source, tmp_path, capsys):
    other = changed(tmp_path, lm_head=lambda t: t + (np.arange(300) == 7)[:, None])
    status, fields = compared(capsys, source, other, "--tokens", 20)
    assert status == 1
    tokens = [position["token_id"] for position in fields["positions"]]
    assert len(set(tokens)) > 10
    a, b = (
        files.logits(lm.params, lm.config, np.array([tokens]))[0]
        for lm in map(checkpoints.load, (source, other))
    )
    differences = np.abs(a - b).max(-1)
    assert differences.min() > 1e-3
    found = [position["difference"] for position in fields["positions"]]
    np.testing.assert_allclose(found, differences, atol=1e-5)
    assert fields["max_difference"] == max(found)
    assert fields["median_difference"] == statistics.median(found)
    assert fields["largest_logit"] == pytest.approx(np.abs(a).max(), abs=1e-5)
    for key, logits in (("top_a", a), ("top_b", b)):
        assert [p[key] for p in fields["positions"]] == logits.argmax(-1).tolist()
    others = np.flatnonzero(a.argmax(-1) != b.argmax(-1)).tolist()
    assert 0 < len(others) < 20 and fields["other_tops"] == others

    status, out = run(capsys, source, other, "--tokens", 20, "--tolerance", 100)
    assert status == 0
    *table, verdict = out.splitlines()
    assert verdict.startswith("within 100: largest difference ")
    assert f"the same top token at {20 - len(others)} of 20 positions" in verdict
    assert sum(line.endswith("same  ") for line in table) == 20 - len(others)


def test_tolerance_decides(source, tmp_path, capsys):
    kind = gguf.GGMLQuantizationType.Q8_0
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, quantization=kind)
    status, fields = compared(capsys, source, file)
    difference = fields["max_difference"]
    assert status == 1 and 1e-3 < difference < 1
    assert compared(capsys, source, file, "--tolerance", difference)[0] == 0
    status, out = run(capsys, source, file, "--tolerance", 0.99 * difference)
    assert status == 1 and out.splitlines()[-1].startswith("NOT within ")


def test_how_a_head_is_stored_makes_no_difference(tmp_path, capsys):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = files.random_tensors(config)
    tied = files.write_hf(tmp_path / "tied", config, tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    untied = files.write_hf(tmp_path / "untied", CONFIG, tensors)
    assert compared(capsys, tied, untied)[0] == 0


def test_logits_that_are_no_numbers(source, tmp_path, capsys):
    other = changed(tmp_path, lm_head=lambda t: t + 3e38 * (np.arange(300) == 7)[:, None])
    status, fields = compared(capsys, source, other)
    assert status == 1 and fields["max_difference"] is None
    nan = compare.Comparison([compare.Position(0, 0.0, 1, 1)] * 2, 1.0, 1.0)
    assert nan.is_within_tolerance
    positions = [compare.Position(0, 0.0, 1, 1), compare.Position(0, float("nan"), 1, 1)]
    assert not compare.Comparison(positions, 1.0, 1.0).is_within_tolerance


# --- the tokens ---


def test_tokens_fit_both_contexts(source, tmp_path, capsys):
    short = CONFIG | {"max_position_embeddings": 30}
    other = files.write_hf(tmp_path / "short", short, TENSORS)
    for pair, count in (((source, source), 128), ((source, other), 30), ((other, source), 30)):
        status, fields = compared(capsys, *pair, "--tokens", 1000)
        assert (status, fields["num_tokens"]) == (0, count)


def test_text(source, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("the cat sat on the hat\n" * 9)
    assert f"{source} has no tokenizer" in refusal(capsys, source, source, "--text", text)
    files.tiny_tokenizer().save_pretrained(source)
    ids = files.tiny_tokenizer().encode(text.read_text())
    plain = changed(tmp_path)
    for options, count in (((), 64), (("--tokens", 5), 5), (("--tokens", 1000), len(ids))):
        status, fields = compared(capsys, source, plain, "--text", text, *options)
        assert status == 0
        assert [p["token_id"] for p in fields["positions"]] == ids[:count]
    assert f"{plain} has no tokenizer" in refusal(capsys, plain, source, "--text", text)
    text.write_text("")
    assert "text: holds no token" in refusal(capsys, source, plain, "--text", text)
    text.write_bytes(b"\xff")
    assert f"{text}: not UTF-8" in refusal(capsys, source, plain, "--text", text)
    assert "nofile" in refusal(capsys, source, plain, "--text", tmp_path / "nofile")


def test_text_of_unknown_tokens(tmp_path, capsys):
    config = files.hf_config(num_hidden_layers=1)
    folder = files.write_hf(tmp_path / "m", config, files.random_tensors(config))
    files.tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "text").write_text("the cat")
    message = refusal(capsys, folder, folder, "--text", tmp_path / "text")
    assert "text: holds token " in message and "has only 96" in message


# --- PyTorch ---


def test_pytorch(source, capsys):
    status, fields = compared(capsys, source, "--pytorch")
    assert status == 0 and fields["b"] == "PyTorch"
    assert 0 < fields["max_difference"] < 1e-4 and fields["largest_logit"] > 1


def test_pytorch_reads_the_weights_itself(source, tmp_path, capsys, monkeypatch):
    kind = transformers.AutoModelForCausalLM
    other = changed(tmp_path, lm_head=lambda t: 2 * t)
    load = kind.from_pretrained
    monkeypatch.setattr(kind, "from_pretrained", lambda path, **options: load(other, **options))
    status, fields = compared(capsys, source, "--pytorch")
    assert status == 1
    assert fields["max_difference"] == pytest.approx(fields["largest_logit"], rel=1e-3)


def test_pytorch_is_missing(source, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "--pytorch: needs PyTorch" in refusal(capsys, source, "--pytorch")


def test_pytorch_reads_hugging_face_directories_only(tmp_path, capsys):
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    assert "must be a Hugging Face directory" in refusal(capsys, file, "--pytorch")


def test_pytorch_fails(source, capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert f"{source}: PyTorch failed: two" in refusal(capsys, source, "--pytorch")


# --- what cannot be compared ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 301}, "vocab_size: {a} has 300, {b} has 301"),
        ({"hidden_size": 16}, "hidden_size: {a} has 32, {b} has 16"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps: {a} has 1e-05, {b} has 1e-06"),
        ({"rope_theta": 20000.0}, "rope: {a} has RopeConfig("),
    ],
)
def test_other_networks(source, tmp_path, capsys, changes, message):
    config = CONFIG | changes
    other = files.write_hf(tmp_path / "other", config, files.random_tensors(config))
    assert message.format(a=source, b=other) in refusal(capsys, source, other)


def test_bad_arguments(source, tmp_path, capsys):
    assert "tokens: got 0" in refusal(capsys, source, source, "--tokens", 0)
    for value in ("-1", "nan", "inf"):
        assert "tolerance: got" in refusal(capsys, source, source, f"--tolerance={value}")
    assert "nowhere" in refusal(capsys, source, tmp_path / "nowhere")
    for arguments in ([source], [source, source, "--pytorch"], [source, source, "--tokens", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(["compare", *map(str, arguments)])
        assert caught.value.code == 2
