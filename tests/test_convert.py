"""`python -m checkpoints_convert from-hf`: an Orbax checkpoint, whole or not at all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import checkpoints as files
import numpy as np
import orbax.checkpoint as ocp
import pytest

from checkpoints_convert import output
from checkpoints_convert.__main__ import main
from jlookahead import checkpoints
from jlookahead.checkpoints import converted
from jlookahead.checkpoints.params import hf_tensors
from jlookahead.model_config import DTYPES

CONFIG = files.hf_config(
    num_hidden_layers=1,
    vocab_size=300,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


@pytest.fixture
def source(tmp_path):
    folder = files.write_hf(tmp_path / "source", CONFIG, files.random_tensors(CONFIG))
    files.tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def converted_folder(source, tmp_path):
    assert main(["from-hf", str(source), str(tmp_path / "new")]) == 0
    return tmp_path / "new"


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_keeps_everything(source, tmp_path, stored, dtype):
    assert main(["from-hf", str(source), str(tmp_path / "new"), "--dtype", stored]) == 0
    actual = checkpoints.load(tmp_path / "new", dtype=dtype)
    expected = checkpoints.load(source, dtype=stored)
    params = hf_tensors(actual.params)
    assert params.keys() == hf_tensors(expected.params).keys()
    for name, array in hf_tensors(expected.params).items():
        assert params[name].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(params[name], array.astype(dtype), err_msg=name)
    assert actual.config == checkpoints.load(source, dtype=dtype).config
    assert actual.defaults == expected.defaults
    text = "the hat sat\n1984 ünï</s>"
    assert actual.tokenizer.encode(text) == expected.tokenizer.encode(text)
    assert actual.tokenizer.chat_template == expected.tokenizer.chat_template


def test_what_was_converted_converts_again(converted_folder, tmp_path):
    assert main(["from-hf", str(converted_folder), str(tmp_path / "again")]) == 0
    again = hf_tensors(checkpoints.load(tmp_path / "again").params)
    for name, array in hf_tensors(checkpoints.load(converted_folder).params).items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_command_line(source, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "checkpoints_convert", "from-hf", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    done = run(source, tmp_path / "new")
    assert (done.returncode, done.stdout) == (0, "")
    assert checkpoints.load(tmp_path / "new").tokenizer is not None
    for failed in (
        run(source, tmp_path / "new"),
        run(tmp_path / "nowhere", tmp_path / "other"),
    ):
        assert failed.returncode == 2
        assert len(failed.stderr.splitlines()) == 1 and str(tmp_path) in failed.stderr
    assert not (tmp_path / "other").exists()
    assert run(source, tmp_path / "other", "--dtype", "int8").returncode == 2


def test_existing_destination_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    assert main(["from-hf", str(source), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == f"checkpoints_convert: {tmp_path / 'new'}: exists already\n"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_source_that_cannot_be_used_leaves_nothing_behind(source, tmp_path, capsys):
    tensors = files.random_tensors(CONFIG)
    tensors["model.norm.weight"][0] = np.nan  # read last
    files.write_hf(source, CONFIG, tensors)
    before = sorted(tmp_path.iterdir())
    assert main(["from-hf", str(source), str(tmp_path / "new")]) == 2
    assert "'model.norm.weight'" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


PARTIAL = ".new.partial"
MODULES = ["embed_tokens", "layers_0", "lm_head", "norm"]


def saves(monkeypatch) -> list[str]:
    """Names of the modules that are written from now on."""
    save, saved = ocp.StandardCheckpointer.save, []

    def recorded(self, path, *args, **kwargs):
        saved.append(path.name)
        return save(self, path, *args, **kwargs)

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", recorded)
    return saved


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_conversion_goes_on(source, tmp_path, monkeypatch, capsys, error):
    arguments = ["from-hf", str(source), str(tmp_path / "new")]
    with monkeypatch.context() as patched:
        wait = ocp.StandardCheckpointer.wait_until_finished

        def fail(self):
            wait(self)
            if len(saved) == 2:
                raise error

        saved = saves(patched)
        patched.setattr(ocp.StandardCheckpointer, "wait_until_finished", fail)
        assert main(arguments) == (2 if isinstance(error, OSError) else 130)
    if isinstance(error, OSError):
        message = capsys.readouterr().err
        assert "No space left" in message and PARTIAL in message and message.count("\n") == 1
    assert not (tmp_path / "new").exists()
    written = converted.written_modules(tmp_path / PARTIAL)
    files.refusal(tmp_path / PARTIAL, (ValueError, FileNotFoundError))

    again = saves(monkeypatch)
    assert main(arguments) == 0
    assert sorted([*written, *again]) == MODULES and written
    assert not (tmp_path / PARTIAL).exists()
    expected = hf_tensors(checkpoints.load(source).params)
    for name, array in hf_tensors(checkpoints.load(tmp_path / "new").params).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("change", ["source", "dtype"])
def test_what_another_conversion_left_is_not_used(source, tmp_path, monkeypatch, change):
    def fail(*_):
        raise OSError("no")

    partial = tmp_path / PARTIAL
    with monkeypatch.context() as patched:
        patched.setattr(converted, "write_manifest", fail)
        assert main(["from-hf", str(source), str(tmp_path / "new")]) == 2
    assert sorted(converted.written_modules(partial)) == MODULES
    arguments = ["from-hf", str(source), str(tmp_path / "new")]
    if change == "source":
        files.write_hf(source, CONFIG, files.random_tensors(CONFIG, seed=1))
    else:
        arguments += ["--dtype", "bfloat16"]
    saved = saves(monkeypatch)
    assert main(arguments) == 0
    assert sorted(saved) == MODULES


@pytest.mark.parametrize("num_written", [1, 4])
def test_a_killed_conversion_goes_on(tmp_path, monkeypatch, num_written):
    """Killed between two modules, wherever that is; what is whole is not written again."""
    config = files.hf_config(num_hidden_layers=12)
    source = files.write_hf(tmp_path / "source", config, files.random_tensors(config))
    destination, partial = tmp_path / "new", tmp_path / PARTIAL
    command = [sys.executable, "-m", "checkpoints_convert", "from-hf", source, destination]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while len(converted.written_modules(partial)) < num_written:
        assert process.poll() is None, "done before it could be killed"
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not destination.exists()
    files.refusal(partial, (ValueError, FileNotFoundError))
    written, again = converted.written_modules(partial), saves(monkeypatch)
    assert main(["from-hf", str(source), str(destination)]) == 0
    assert len(written) >= num_written and written.isdisjoint(again)
    expected = hf_tensors(checkpoints.load(source).params)
    for name, array in hf_tensors(checkpoints.load(destination).params).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("label", ["", "{", "null"])
def test_a_label_that_a_full_disk_cut_off(source, tmp_path, label):
    (tmp_path / PARTIAL / "params" / "norm").mkdir(parents=True)
    (tmp_path / PARTIAL / "conversion.json").write_text(label)
    assert main(["from-hf", str(source), str(tmp_path / "new")]) == 0
    assert sorted(p.name for p in (tmp_path / "new").iterdir() if p.suffix == ".lock") == []
    checkpoints.load(tmp_path / "new")


@pytest.mark.parametrize("command", ["from-hf", "to-hf"])
def test_two_processes_do_not_mix(source, tmp_path, capsys, command):
    with output.created_whole(tmp_path / "new"):
        assert main([command, str(source), str(tmp_path / "new")]) == 2
        assert "new: another process is writing it" in capsys.readouterr().err
    assert (tmp_path / "new").is_dir()


LIMITED = """
import resource, sys
from checkpoints_convert.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""
# Orbax closes its event loop when one array cannot be written. Those of TensorStore's threads that
# still write others print tracebacks of that, piece by piece, before, behind and into one another
# and the message.
ABANDONED_WRITER = re.compile(
    r"Traceback \(most recent call last\):|File \"|[^\"\n]*asyncio.base_events\.py|"
    r"\", line |\d+|, in |call_soon_threadsafe|self\._check_closed\(\)|_check_closed|"
    r"raise RuntimeError\('Event loop is closed'\)|RuntimeError|: |Event loop is closed|[~^]+|\s+"
)


@pytest.mark.parametrize("command", ["from-hf", "to-hf"])
def test_a_file_that_cannot_grow(source, tmp_path, command):
    """What the kernel says where a disk or a quota is full becomes one line."""
    arguments = [sys.executable, "-c", LIMITED, command, source, tmp_path / "new"]
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    ending = r"\(os error 27\)|; the same command goes on from \S*?\.new\.partial"
    message = rf"checkpoints_convert: .*?: cannot be written: .*?({ending})"
    rest, count = re.subn(message, "", done.stderr)
    assert count == 1 and not ABANDONED_WRITER.sub("", rest), done.stderr
    assert not (tmp_path / "new").exists()


def test_output_that_may_not_be_written(source, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["from-hf", str(source), str(tmp_path / "file" / "new")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(tmp_path / "file") in message


# --- directories that were tampered with ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=1), "format: got 1, supported is 3"),
        (lambda m: m.pop("model"), "field 'model' is missing"),
        (lambda m: m["model"].pop("rope"), "field 'rope' is missing"),
        (lambda m: m["model"].pop("hidden_size"), "'hidden_size'"),
        (lambda m: m["model"].update(extra=1), "'extra'"),
        (lambda m: m["model"].update(head_dim=15), "head_dim: got 15"),
        (lambda m: m["model"]["rope"].update(type="su"), "rope type: got 'su'"),
        (lambda m: m["defaults"].update(eos=1), "'eos'"),
        (lambda m: m["defaults"].update(eos_token_ids=["x"]), "eos_token_id: got ['x']"),
        (lambda m: m["defaults"].update(eos_token_ids=[999]), "eos_token_id: got 999"),
        (lambda m: m["defaults"].update(pad_token_id="x"), "pad_token_id: got 'x'"),
        (lambda m: m["model"].update(hidden_size=64), "'embed_tokens.weight'"),
        (lambda m: m["model"].update(num_hidden_layers=2), "is missing"),
        (lambda m: m["model"].update(tie_word_embeddings=True), "'embed_tokens.weight'"),
    ],
)
def test_tampered_manifest(converted_folder, change, message):
    file = converted_folder / "jlookahead.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    assert message in files.refusal(converted_folder)


def test_manifest_that_is_no_json(converted_folder):
    (converted_folder / "jlookahead.json").write_text("{")
    assert "jlookahead.json: invalid JSON" in files.refusal(converted_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("lm_head"), "tensor 'lm_head.kernel' is missing"),
        (lambda p: p.update(more={"weight": np.ones(3)}), "tensor 'more.weight'"),
        (lambda p: p["norm"].update(weight=np.ones(3, np.float32)), "tensor 'norm.weight'"),
        (lambda p: p["norm"].update(weight=np.ones(32, np.int32)), "dtype is int32"),
        (lambda p: p["norm"].update(weight=np.full(32, np.nan, np.float32)), "'norm.weight'"),
    ],
)
def test_tampered_params(converted_folder, change, message):
    files.rewrite_converted(converted_folder, change)
    assert message in files.refusal(converted_folder)


# Orbax drops the reads of the other tensors, which then find their event loop closed.
@pytest.mark.filterwarnings(
    "ignore:(?s).*Event loop is closed:pytest.PytestUnraisableExceptionWarning"
)
def test_damaged_params(converted_folder):
    largest = max((converted_folder / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    assert "not a readable Orbax checkpoint" in files.refusal(converted_folder)


def test_stray_directories_are_ignored(converted_folder):
    (converted_folder / "params" / ".ipynb_checkpoints").mkdir()
    checkpoints.load(converted_folder)


def test_missing_params(converted_folder):
    (converted_folder / "params").rename(converted_folder / "elsewhere")
    assert "not a readable Orbax checkpoint" in files.refusal(converted_folder)
