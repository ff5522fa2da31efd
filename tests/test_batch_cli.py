"""`jlookahead batch`: its input, its results, and jobs that are killed and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import checkpoints as files
import filelock
import pytest
from typer.testing import CliRunner, Result

import jlookahead as jl
from jlookahead.cli import app
from jlookahead.cli.journal import open_journal

BUDGET = 12
LINES = [
    {"prompt": "the cat"},
    {"prompt": "the hat", "id": "hat"},
    {"prompt_ids": [5, 6, 7, 5, 6], "id": 70},
    {"messages": [{"role": "user", "content": "the cat sat"}]},
    *({"prompt_ids": [9 + i] * (1 + i % 5)} for i in range(6)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("chat")
    config = files.hf_config(vocab_size=300, bos_token_id=0, eos_token_id=1)
    files.write_hf(path, config, files.random_tensors(config))
    files.tiny_tokenizer(300).save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_lines(tmp_path / "prompts.jsonl", LINES)


def write_lines(file: Path, lines) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def arguments(model: str, prompts: Path, output: Path, *more: str) -> list[str]:
    return [
        *("batch", "--model", model, "--input", str(prompts), "--output", str(output)),
        *("--strategy", "prompt-lookup", "--max-new-tokens", str(BUDGET), "--batch-size", "3"),
        *("--temperature", "0.9", "--seed", "5"),
        *more,
    ]


def batch(*args, **kwargs) -> Result:
    return CliRunner().invoke(app, arguments(*args), **kwargs)


def done(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def results(folder: Path) -> list[dict]:
    assert {entry.name for entry in folder.iterdir()} == {"results.jsonl", ".lock"}
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory) -> str:
    """The results of a job that nothing interrupted."""
    folder = tmp_path_factory.mktemp("expected")
    done(batch(model, write_lines(folder / "prompts.jsonl", LINES), folder / "out"))
    return (folder / "out" / "results.jsonl").read_text()


def refused(result: Result, words: str) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


# Results


@pytest.mark.parametrize("options", [[], ["--temperature", "0", "--raw"]])
def test_every_line_is_answered_as_by_generate(model, tmp_path, options):
    lines = [json.dumps(line) for line in LINES]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(lines[:2]) + "\r\n" + "\n".join(lines[2:]))  # an empty line
    result = done(batch(model, file, tmp_path / "out", *options, "--json"))
    lm = jl.load(model)
    sampling = jl.Sampling() if options else jl.Sampling(0.9, seed=5)
    cfg = lm.make_config(strategy=jl.PromptLookup(), max_new_tokens=BUDGET, sampling=sampling)
    found = results(tmp_path / "out")
    assert len(found) == len(LINES)
    for i, (line, answer) in enumerate(zip(LINES, found, strict=True)):
        prompt = line.get("prompt_ids") or line.get("messages") or line["prompt"]
        if "prompt" in line and not options:
            prompt = [{"role": "user", "content": line["prompt"]}]
        alone = jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer, row_ids=[i])
        assert answer == {
            "id": line.get("id", i + 1 + (i > 0)),
            "text": alone.text,
            "token_ids": alone.tokens,
            "num_rounds": alone.num_rounds,
            "tokens_per_round": alone.tokens_per_round,
            "finish_reason": alone.finish_reason,
        }
    figures = json.loads(result.stdout)
    assert figures.pop("seconds") > 0
    num_tokens = sum(len(answer["token_ids"]) for answer in found)
    num_rounds = sum(answer["num_rounds"] for answer in found)
    assert figures == {
        "model": model,
        "strategy": "prompt-lookup",
        "results": str(tmp_path / "out" / "results.jsonl"),
        "num_prompts": len(LINES),
        "num_found": 0,
        "num_tokens": num_tokens,
        "num_rounds": num_rounds,
        "tokens_per_round": num_tokens / num_rounds,
    }
    assert result.stderr == ""


def test_figures_in_one_line_and_input_from_a_pipe(model, tmp_path, expected):
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    result = done(batch(model, Path("-"), tmp_path / "out", input=text))
    assert (tmp_path / "out" / "results.jsonl").read_text() == expected
    assert result.stdout.startswith(f"{len(LINES)} answers in {tmp_path}/out/results.jsonl: ")
    assert result.stdout.count("\n") == 1 and result.stderr == ""


def test_rows_divided_over_devices(model, prompts, tmp_path, expected):
    command = [sys.executable, "-m", "jlookahead", *arguments(model, prompts, tmp_path / "out")]
    devices = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    options = ["--mesh", "data=4", "--batch-size", "16"]
    subprocess.run([*command, *options], check=True, env=devices, capture_output=True, timeout=600)
    assert (tmp_path / "out" / "results.jsonl").read_text() == expected


def test_no_prompts_give_no_results(model, tmp_path):
    file = write_lines(tmp_path / "prompts.jsonl", [])
    figures = json.loads(done(batch(model, file, tmp_path / "out", "--json")).stdout)
    assert (figures["num_prompts"], figures["num_tokens"]) == (0, 0)
    assert results(tmp_path / "out") == []


# Going on

# Kills itself once this many answers are in the journal.
KILLED = """
import os, signal, sys
from jlookahead.cli import app, journal

add = journal.Journal.add

def add_and_die(self, index, answer):
    add(self, index, answer)
    if len(self) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

journal.Journal.add = add_and_die
app(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def killed(model, tmp_path_factory) -> Path:
    """What a job leaves that was killed after four answers."""
    folder = tmp_path_factory.mktemp("killed")
    prompts = write_lines(folder / "prompts.jsonl", LINES)
    command = [sys.executable, "-c", KILLED, *arguments(model, prompts, folder / "out")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (folder / "out" / "results.jsonl").exists()
    label, *lines = (folder / "out" / "journal.jsonl").read_text().splitlines()
    assert json.loads(label)["max_new_tokens"] == BUDGET
    assert len({json.loads(line)["index"] for line in lines}) == 4 < len(LINES)
    return folder


@pytest.fixture
def unfinished(killed, tmp_path) -> Path:
    shutil.copytree(killed, tmp_path / "job")
    return tmp_path / "job"


@pytest.mark.parametrize("cut_off", ["", '{"index": 9, "answer": {"id": 10, "tok'])
def test_a_killed_job_goes_on(model, unfinished, expected, cut_off):
    with (unfinished / "out" / "journal.jsonl").open("a") as journal:
        journal.write(cut_off)
    again = batch(
        model, unfinished / "prompts.jsonl", unfinished / "out", "--json", "--batch-size", "2"
    )
    assert json.loads(done(again).stdout)["num_found"] == 4
    assert (unfinished / "out" / "results.jsonl").read_text() == expected
    assert results(unfinished / "out")


def test_a_line_that_was_cut_off_does_not_spoil_the_next_one(unfinished):
    with (unfinished / "out" / "journal.jsonl").open("r+") as file:
        label = json.loads(file.readline())
        file.seek(0, os.SEEK_END)
        file.write('{"index": 9, "ans')
    missing = 9
    with open_journal(unfinished / "out", label) as journal:
        assert len(journal) == 4 and missing not in journal
        journal.add(missing, {"token_ids": [1], "num_rounds": 1})
    with open_journal(unfinished / "out", label) as journal:
        assert len(journal) == 5 and missing in journal


def test_answers_that_are_there_are_not_computed_again(model, unfinished, expected):
    file = unfinished / "out" / "journal.jsonl"
    label, *lines = file.read_text().splitlines()
    first = json.loads(lines[0])
    first["answer"]["text"] = "kept"
    file.write_text("\n".join([label, json.dumps(first), *lines[1:], ""]))
    done(batch(model, unfinished / "prompts.jsonl", unfinished / "out"))
    wanted = [json.loads(line) for line in expected.splitlines()]
    wanted[first["index"]]["text"] = "kept"
    assert results(unfinished / "out") == wanted


@pytest.mark.parametrize("label", ['{"jlookahead": "0.1', '{"max_new_tokens": 7}\n{"index"'])
def test_a_job_killed_before_its_first_answer_may_be_another(
    model, prompts, tmp_path, expected, label
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "journal.jsonl").write_text(label)
    done(batch(model, prompts, out))
    assert (out / "results.jsonl").read_text() == expected
    results(out)


def test_killed_between_results_and_journal(model, unfinished, expected):
    (unfinished / "out" / "results.jsonl").write_text("whatever is there\n")
    done(batch(model, unfinished / "prompts.jsonl", unfinished / "out"))
    assert (unfinished / "out" / "results.jsonl").read_text() == expected
    results(unfinished / "out")


@pytest.mark.parametrize(
    "options, names",
    [
        (["--max-new-tokens", "13"], "max_new_tokens"),
        (["--temperature", "1", "--seed", "2"], "temperature, seed"),
        (["--strategy", "autoregressive"], "strategy"),
        (["--stop", "a"], "stop"),
        (["--raw"], "input, raw"),
    ],
)
def test_a_job_goes_on_with_the_same_options_only(model, unfinished, options, names):
    out = unfinished / "out"
    before = (out / "journal.jsonl").read_bytes()
    refused(
        batch(model, unfinished / "prompts.jsonl", out, *options),
        f"{out}: holds an unfinished job with other {names}; finish it",
    )
    assert (out / "journal.jsonl").read_bytes() == before


def test_a_job_goes_on_with_the_same_prompts_and_model_only(model, unfinished, tmp_path):
    prompts = write_lines(unfinished / "prompts.jsonl", [*LINES, {"prompt": "more"}])
    refused(batch(model, prompts, unfinished / "out"), "job with other input; finish it")
    write_lines(prompts, LINES)
    other = shutil.copytree(model, tmp_path / "other")
    refused(batch(str(other), prompts, unfinished / "out"), "with other checkpoint, model; finish")


# Refusals


def test_results_are_not_overwritten(model, prompts, tmp_path):
    done(batch(model, prompts, tmp_path / "out"))
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    refused(batch(model, prompts, tmp_path / "out"), "out/results.jsonl: exists already")
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_one_job_at_a_time_in_a_folder(model, prompts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with filelock.FileLock(out / ".lock"):
        refused(batch(model, prompts, out), f"{out}: another process is writing it")
    done(batch(model, prompts, out))


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 3: not JSON"),
        ("[1, 2]", "line 3: needs one of"),
        ("{}", "line 3: needs one of"),
        ('{"prompt": ""}', "line 3: needs one of"),
        ('{"prompt": 7}', "line 3: needs one of"),
        ('{"prompt_ids": "12"}', "line 3: needs one of"),
        ('{"prompt_ids": [1, true]}', "line 3: needs one of"),
        ('{"messages": ["hi"]}', "line 3: needs one of"),
        ('{"prompt": "a", "prompt_ids": [1]}', "line 3: needs one of"),
        ('{"prompt": "a", "temperature": 1}', "line 3: got unknown field 'temperature'"),
        ('{"prompt": "a", "id": 1.5}', "line 3: id: got 1.5"),
        ('{"prompt": "a", "id": 1}', "line 3: id: got 1, as {file}, line 1 has"),
        ('{"prompt_ids": [1, 300]}', "line 3: prompt: row 0 holds id 300"),
        ('{"messages": [{"role": "user"}]}', "line 3: prompt: got {'role': 'user'}, a message"),
        ('{"prompt": "\\ud800"}', "line 3: prompt: not valid Unicode"),
        (json.dumps({"prompt_ids": [1] * 5000}), "line 3: max_new_tokens: got 12 after a prompt"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(model, tmp_path, line, words):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    file.write_text(f'{{"prompt": "the cat"}}\n\n{line}\n{{"prompt": "the hat"}}\n')
    refused(batch(model, file, out), words.replace("{file}", str(file)))
    assert not list(out.glob("*.jsonl"))


@pytest.mark.parametrize(
    "options, words",
    [
        (["--input", "missing.jsonl"], "missing.jsonl: No such file"),
        (["--output", sys.executable], "File exists"),
        (["--output", f"{sys.executable}/out"], "Not a directory"),
        (["--model", "missing"], "missing: no such file or directory"),
        (["--batch-size", "0"], "batch_size: got 0"),
        (["--workers", "2"], "workers: is an option of --ray"),
        (["--ray", "--workers", "0"], "workers: got 0"),
        (["--ray", "--mesh", "data=2"], "mesh: got data=2 with --ray"),
        (["--mesh", "data=2"], "mesh: got data=2, which are 2 devices, there are 1"),
        (["--window", "3"], "window: is an option of lookahead"),
        (["--top-p", "2"], "top_p: got 2"),
        (["--repetition-penalty", "0"], "penalty: got 0"),
    ],
)
def test_mistakes_are_one_line_and_status_2(model, prompts, tmp_path, options, words):
    refused(batch(model, prompts, tmp_path / "out", *options), words)
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_journal_that_is_none(model, prompts, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "journal.jsonl").write_text("a diary\n")
    refused(
        batch(model, prompts, tmp_path / "out"), "journal.jsonl: not the journal of a batch job"
    )


def test_without_ray(model, prompts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(batch(model, prompts, tmp_path / "out", "--ray"), "pip install 'jlookahead[ray]'")
