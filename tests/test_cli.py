"""`jlookahead generate`: its JSON, its streams, its exit statuses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import time

import checkpoints as files
import golden
import jax
import pytest
from models import EAGER_AUTO
from typer.testing import CliRunner, Result

import jlookahead as jl
from jlookahead import tuning
from jlookahead.cli import app, prompt_options, runs, strategies
from jlookahead.cli.generate import generate as command
from jlookahead.processors import FrequencyPenalty, PresencePenalty, RepetitionPenalty

NO_TOKENIZER = str(golden.GOLDEN / "tiny_model")
BUDGET = 24
PLAIN = ("--strategy", "autoregressive")
GREEN = "\x1b[32m"


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


def invoke_json(*arguments: str, stdin: str | None = None) -> dict:
    result = invoke("--json", "--max-new-tokens", str(BUDGET), *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jlookahead", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
    )


@pytest.fixture(scope="module")
def lm():
    return jl.load()


@pytest.fixture(scope="module")
def expected(lm):
    cfg = lm.make_config(max_new_tokens=BUDGET)
    return jl.generate(lm.params, prompt_options.DEFAULT_PROMPT, cfg, tokenizer=lm.tokenizer)


# The defaults


def test_main_job_end_to_end():
    result = run_process("generate")
    assert result.returncode == 0, result.stderr
    for words in ("plain decoding", "lookahead", "tokens per round", "identical: yes, all 128 ids"):
        assert words in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_option_defaults_are_the_library_s():
    defaults = {p.name: p.default for p in inspect.signature(command).parameters.values()}
    library = dataclasses.asdict(jl.Sampling())
    library |= {name: getattr(jl.Config(), name) for name in ("max_new_tokens", "min_new_tokens")}
    shared = defaults.keys() & library.keys()
    assert len(shared) == 8
    assert {name: defaults[name] for name in shared} == {name: library[name] for name in shared}
    for name in ("window", "ngram", "candidates", "max_ngram", "num_draft_tokens", "block", "rows"):
        assert defaults[name] is None
    assert strategies.make_strategy("lookahead", {}) == jl.Lookahead()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_and_version_do_not_wait_for_what_they_do_not_need(arguments):
    code = f"""
import sys
from jlookahead.cli import main
sys.argv = ["jlookahead", *{arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code
assert not {{"transformers", "orbax", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=600)


# JSON


def test_json_is_what_the_library_returns(lm, expected):
    output = invoke_json()
    assert output["text"] == expected.text
    assert output["token_ids"] == expected.tokens
    assert output["num_rounds"] == expected.num_rounds
    assert output["tokens_per_round"] == expected.tokens_per_round
    assert output["finish_reason"] == expected.finish_reason == "length"
    assert output["strategy"] == "lookahead"
    assert output["model"] == "bundled"
    assert output["prompt_tokens"] == len(lm.tokenizer(prompt_options.DEFAULT_PROMPT)["input_ids"])
    assert output["tokens_per_second"] == pytest.approx(BUDGET / output["seconds"])
    assert output["compile_seconds"] > 0
    assert not {"plain", "identical"} & output.keys()


def test_json_with_the_plain_run(expected):
    output = invoke_json("--compare")
    assert output["identical"] is True
    assert output["plain"]["strategy"] == "autoregressive"
    assert output["plain"]["token_ids"] == output["token_ids"] == expected.tokens
    assert output["plain"]["num_rounds"] == BUDGET > output["num_rounds"]


def test_json_from_a_process_is_all_of_stdout():
    result = run_process("generate", "--json", "--max-new-tokens", "8", *PLAIN)
    assert result.returncode == 0
    assert len(json.loads(result.stdout)["token_ids"]) == 8
    assert result.stderr == ""


def test_knobs_and_sampling_reach_the_library(lm):
    output = invoke_json(
        *("--window", "4", "--ngram", "3", "--candidates", "2", "--temperature", "0.9"),
        *("--top-k", "40", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7", "--compare"),
    )
    cfg = lm.make_config(
        strategy=jl.Lookahead(4, 3, 2),
        sampling=jl.Sampling(0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7),
        max_new_tokens=BUDGET,
    )
    prompt = prompt_options.DEFAULT_PROMPT
    expected = jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)
    assert output["token_ids"] == expected.tokens
    assert output["num_rounds"] == expected.num_rounds
    assert output["identical"] is True


def test_autoregressive_takes_a_round_per_token(expected):
    output = invoke_json(*PLAIN)
    assert output["strategy"] == "autoregressive"
    assert output["token_ids"] == expected.tokens
    assert output["num_rounds"] == BUDGET


@pytest.mark.parametrize(
    "options, strategy",
    [
        (["--strategy", "jacobi", "--block", "5"], jl.Jacobi(5)),
        (["--strategy", "recycling", "--rows", "9"], jl.Recycling(9)),
        (["--strategy", "auto"], EAGER_AUTO),
        (
            ["--strategy", "prompt-lookup", "--max-ngram", "2"]
            + ["--num-draft-tokens", "4", "--candidates", "2"],
            jl.PromptLookup(2, 4, 2),
        ),
    ],
)
def test_strategies_by_name(lm, expected, options, strategy, monkeypatch):
    monkeypatch.setattr(strategies, "tune", lambda params, config: EAGER_AUTO)
    output = invoke_json(*options)
    cfg = lm.make_config(strategy=strategy, max_new_tokens=BUDGET)
    out = jl.generate(lm.params, prompt_options.DEFAULT_PROMPT, cfg, tokenizer=lm.tokenizer)
    assert output["strategy"] == options[1]
    assert output["token_ids"] == expected.tokens
    assert output["num_rounds"] == out.num_rounds <= BUDGET


def test_penalties_and_ends_reach_the_library(lm):
    output = invoke_json(
        *("--repetition-penalty", "1.3", "--presence-penalty", "0.2"),
        *("--frequency-penalty", "0.1", "--min-new-tokens", "9", "--stop", "zebra"),
        *("--stop", "(", "--audit", "--compare", "--verify", "coupled"),
    )
    cfg = lm.make_config(
        max_new_tokens=BUDGET,
        min_new_tokens=9,
        stop_strings=("zebra", "("),
        processors=(RepetitionPenalty(1.3), PresencePenalty(0.2), FrequencyPenalty(0.1)),
    )
    prompt = prompt_options.DEFAULT_PROMPT
    out = jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)
    assert (output["token_ids"], output["text"]) == (out.tokens, out.text)
    assert output["finish_reason"] == out.finish_reason == "stop"
    assert output["identical"] is True
    audited = jl.audit(lm.params, prompt, out.tokens, cfg, tokenizer=lm.tokenizer)
    assert output["audit"] == {
        "num_tokens": len(out.tokens),
        "num_divergent": 0,
        "smallest_margin": min(audited.margins),
        "first_divergence": None,
    }


def test_residual_sampling(lm):
    options = ("--temperature", "1", "--seed", "2", "--verify", "residual")
    cfg = lm.make_config(
        sampling=jl.Sampling(1.0, seed=2, verify="residual"), max_new_tokens=BUDGET
    )
    out = jl.generate(lm.params, prompt_options.DEFAULT_PROMPT, cfg, tokenizer=lm.tokenizer)
    assert invoke_json(*options)["token_ids"] == out.tokens


def test_logprobs_are_the_librarys(lm):
    cfg = lm.make_config(max_new_tokens=BUDGET, logprobs=True)
    out = jl.generate(lm.params, prompt_options.DEFAULT_PROMPT, cfg, tokenizer=lm.tokenizer)
    assert invoke_json("--logprobs")["logprobs"] == out.logprobs
    assert invoke_json()["logprobs"] is None


def test_a_budget_of_zero():
    assert invoke_json("--max-new-tokens", "0")["logprobs"] is None
    assert invoke_json("--max-new-tokens", "0", "--logprobs")["logprobs"] == []
    output = invoke_json("--max-new-tokens", "0")
    assert (output["token_ids"], output["num_rounds"], output["finish_reason"]) == ([], 0, "length")


# The prompt


def test_every_way_to_give_a_prompt(lm, tmp_path):
    text = "import os\r\nimport naïve\n"
    file = tmp_path / "prompt.py"
    file.write_bytes(text.encode())
    ids = lm.tokenizer(text)["input_ids"]
    outputs = [
        invoke_json("--prompt", text),
        invoke_json("--prompt-file", str(file)),
        invoke_json("--prompt-file", "-", stdin=text),
        invoke_json("--prompt-ids", ", ".join(map(str, ids))),
    ]
    assert len({tuple(output["token_ids"]) for output in outputs}) == 1
    assert {output["prompt_tokens"] for output in outputs} == {len(ids)}


def test_a_model_without_a_tokenizer():
    arguments = ("--model", NO_TOKENIZER, "--prompt-ids", "5,6,7", "--max-new-tokens", "6")
    output = invoke_json(*arguments)
    assert output["text"] is None
    result = invoke(*arguments, "--no-compare")
    assert result.stdout == ", ".join(map(str, output["token_ids"])) + "\n"


def test_a_chat_model_gets_its_template_unless_raw(chat_model):
    arguments = ("--model", chat_model, "--prompt", "the cat")
    wrapped, raw = invoke_json(*arguments), invoke_json(*arguments, "--raw")
    assert wrapped["prompt_tokens"] == raw["prompt_tokens"] + 2  # <s> and </s>


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat")
    config = files.hf_config(vocab_size=300, bos_token_id=0, eos_token_id=1)
    files.write_hf(path, config, files.random_tensors(config))
    files.tiny_tokenizer(300).save_pretrained(path)
    return str(path)


# Chat


def chat(*arguments: str, stdin: str) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin)


def test_chat_answers_every_line(chat_model):
    lm = jl.load(chat_model)
    strategy = jl.Lookahead(window=4)
    sampling = jl.Sampling(0.5, seed=3)
    cfg = lm.make_config(strategy=strategy, sampling=sampling, max_new_tokens=9)
    session = jl.Session(lm.params, cfg, tokenizer=lm.tokenizer)
    session.messages.append({"role": "system", "content": "sat"})
    answers = [session.send(text).text for text in ("the cat", "the hat")]
    result = chat(
        *("--model", chat_model, "--max-new-tokens", "9", "--window", "4", "--system", "sat"),
        *("--temperature", "0.5", "--seed", "3"),
        stdin="the cat\n\nthe hat",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    figures = result.stderr.splitlines()
    assert len(figures) == 2
    assert "prompt of 0 reused" in figures[0]
    assert f"prompt of {session.num_reused} reused" in figures[1]


def test_chat_with_a_budget_of_zero(chat_model):
    result = chat("--model", chat_model, "--max-new-tokens", "0", stdin="the cat\n")
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr.startswith("0 new tokens in 0 rounds")


def test_a_bad_line_does_not_end_a_chat(chat_model):
    too_long = "the cat " * 3000
    result = chat("--model", chat_model, "--max-new-tokens", "3", stdin=f"{too_long}\nthe cat\n")
    assert result.exit_code == 0
    refused, figures = result.stderr.splitlines()
    assert refused.startswith("error: max_new_tokens: got 3 after a prompt of")
    assert figures.startswith("3 new tokens")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", NO_TOKENIZER], "has no chat template"),
        (["--model", "missing"], "missing: no such file"),
        (["--model", "missing", "--rows", "9"], "rows: is an option of recycling"),
    ],
)
def test_chat_errors_are_one_line_and_status_2(arguments, words):
    result = chat(*arguments, stdin="hello")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


# Tuning


def test_tune(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    steep = {1: 1.0, 2: 1.5, 4: 1.6, 8: 2.0, 16: 4.0, 32: 8.0, 56: 14.0, 120: 30.0}
    flat = {**dict.fromkeys(steep, 1.1), 1: 1.0}
    for curve, words in (
        (
            steep,
            "windows and trees promise less. Of lookahead's windows: lookahead, W,N,G = 4,5,4.",
        ),
        (
            flat,
            "--strategy auto; its 100 drafts are those of recycling(rows=120). Of lookahead's "
            "windows: lookahead, W,N,G = 15,5,15.",
        ),
    ):
        monkeypatch.setattr(
            tuning,
            "measure_costs",
            lambda model, params, rows=(), curve=curve: tuple((n, curve[n]) for n in rows),
        )
        shown = CliRunner().invoke(app, ["tune"])
        assert shown.exit_code == 0, shown.output
        assert f"{curve[56]:.2f}" in shown.stdout and words in " ".join(shown.stdout.split())
        output = json.loads(CliRunner().invoke(app, ["tune", "--json"]).stdout)
        assert output["costs"][-1] == [120, curve[120]]
        assert output["expected_speed"]["Recycling(rows=32)"] == pytest.approx(
            2.58 / curve[32], abs=1e-3
        )
        assert output["recommended"].startswith("Auto(")
        assert output["auto_wide"] == ("Recycling(rows=120)" if curve is flat else None)
        assert output["auto_costs"][-1] == ([120, 1.1] if curve is flat else [16, 4.0])
        assert output["auto_drafts"][:2] == ([100, 100] if curve is flat else [0, 0])
        (file,) = tmp_path.glob("*/*")
        assert json.loads(file.read_text()) == output["costs"]


# Text


def test_streamed_text_is_the_text_alone(expected):
    result = invoke("--no-compare", "--max-new-tokens", str(BUDGET))
    assert result.stdout == expected.text + "\n"
    assert result.stderr.count("\n") == 1
    assert f"{BUDGET} new tokens in {expected.num_rounds} rounds" in result.stderr


@pytest.mark.parametrize("option", ["--compare", "--no-compare"])
def test_a_terminal_gets_colours(option, monkeypatch, expected):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = invoke(option, "--max-new-tokens", str(BUDGET))
    assert result.exit_code == 0
    assert GREEN in result.stdout
    if option == "--no-compare":
        drafts = [source for source in expected.sources if source not in ("plain", "bonus")]
        assert result.stdout.count(GREEN) == len(drafts) > 0


# Errors


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", ""], "prompt: got an empty text"),
        (["--prompt", "a", "--prompt-ids", "1"], "allowed is one of --prompt"),
        (["--prompt-ids", "1,x"], "prompt_ids: got '1,x'"),
        (["--prompt-ids", ""], "prompt_ids: got ''"),
        (["--prompt-ids", "-1"], "allowed are 0 to"),
        (["--prompt-file", "missing.txt"], "missing.txt: No such file"),
        (["--prompt-file", sys.executable], "not UTF-8 text"),
        (["--strategy", "beam"], "strategy: got 'beam'"),
        ([*PLAIN, "--compare"], "compare: got strategy autoregressive"),
        ([*PLAIN, "--window", "3"], "window: is an option of lookahead"),
        (["--block", "3"], "block: is an option of jacobi, got strategy lookahead"),
        (["--strategy", "jacobi", "--rows", "9"], "rows: is an option of recycling"),
        (["--strategy", "jacobi", "--block", "0"], "block: got 0"),
        (["--strategy", "recycling", "--candidates", "2"], "of lookahead and prompt-lookup, got"),
        (["--strategy", "prompt-lookup", "--max-ngram", "0"], "max_ngram: got 0"),
        (["--logprobs"], "logprobs: is an option of --json"),
        (["--raw", "--prompt-ids", "1"], "raw: is an option of texts"),
        (["--strategy", "recycling", "--rows", "1"], "rows: got 1"),
        (["--verify", "maybe"], "verify: got 'maybe'"),
        (["--temperature", "1", "--verify", "residual", "--audit"], "verify: got 'residual'"),
        (["--temperature", "1", "--verify", "residual", "--compare"], "compare: got verify"),
        (["--min-new-tokens", "129"], "min_new_tokens: got 129"),
        (["--stop", ""], "stop_strings: got ('',)"),
        (["--repetition-penalty", "0"], "penalty: got 0"),
        (["--presence-penalty", "nan"], "penalty: got nan"),
        (["--frequency-penalty", "1e9"], "penalty: got 1000000000.0"),
        (["--window", "0"], "window: got 0"),
        (["--ngram", "1"], "ngram: got 1"),
        (["--candidates", "0"], "candidates: got 0"),
        (["--max-new-tokens", "-1"], "max_new_tokens: got -1"),
        (["--max-new-tokens", "1000000"], "the model's context"),
        (["--temperature", "-1"], "temperature: got -1"),
        (["--top-k", "-1"], "top_k: got -1"),
        (["--top-p", "2"], "top_p: got 2"),
        (["--min-p", "2"], "min_p: got 2"),
        (["--seed", "-1"], "seed: got -1"),
        (["--dtype", "int4"], "dtype: got 'int4'"),
        (["--model", "missing"], "missing: no such file"),
        (["--model", NO_TOKENIZER, "--prompt", "a"], "needs a tokenizer"),
    ],
)
def test_user_errors_are_one_line_and_status_2(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


def test_an_empty_prompt_file_is_an_error():
    result = invoke("--prompt-file", "-", stdin="")
    assert result.exit_code == 2
    assert "empty" in result.stderr


def test_errors_of_a_process():
    result = run_process("generate", "--model", "missing")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: missing: no such file or directory\n"
    assert run_process("generate", "--window", "wide").returncode == 2
    assert run_process("transmogrify").returncode == 2


def test_a_closed_pipe_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "jlookahead", "generate", *PLAIN, "--max-new-tokens", "4"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    os.close(write)
    assert process.returncode == 1
    assert process.stderr == ""


def test_a_failing_device_is_status_3(monkeypatch):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore lines")

    monkeypatch.setattr(runs, "stream", fail)
    result = invoke()
    assert result.exit_code == 3
    assert result.stderr == "error: the device failed: RESOURCE_EXHAUSTED: out of memory\n"


def test_ctrl_c_is_status_130(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "stream", interrupted)
    result = invoke()
    assert result.exit_code == 130
    assert "Traceback" not in result.output


@pytest.mark.parametrize("option", ["--json", "--max-new-tokens=4"])
def test_different_ids_are_status_1(option, monkeypatch):
    measure = runs.measure

    def one_token_less(strategy, *args):
        run = measure(strategy, *args)
        short = dataclasses.replace(run, streamed=run.streamed[:-1])
        return run if strategy == "lookahead" else short

    monkeypatch.setattr(runs, "measure", one_token_less)
    result = invoke("--compare", option)
    assert result.exit_code == 1
    if option == "--json":
        assert json.loads(result.stdout)["identical"] is False
    else:
        assert "identical: NO, the first difference is at new token 3" in result.stdout


@pytest.mark.parametrize("option", ["--json", "--compare", "--no-compare"])
def test_a_divergent_audit_is_status_1(option, monkeypatch):
    def changed(params, prompt, tokens, cfg):
        return jl.audit(params, prompt, [*tokens[:2], (tokens[2] + 1) % 50, *tokens[3:]], cfg)

    module = sys.modules["jlookahead.cli.generate"]
    assert invoke("--audit", "--max-new-tokens", "4", option).exit_code == 0
    monkeypatch.setattr(module, "audit", changed)
    result = invoke("--audit", "--max-new-tokens", "4", option)
    assert result.exit_code == 1
    if option == "--json":
        found = json.loads(result.stdout)["audit"]
        assert (found["first_divergence"], found["num_tokens"]) == (2, 4)
    else:
        output = result.stdout if option == "--compare" else result.stderr
        assert "DIVERGE, the first at new token 2" in output


def test_ctrl_c_ends_a_process_with_status_130():
    """Wherever it strikes: while compiling, or in a callback of XLA that drops exceptions."""
    command = [sys.executable, "-m", "jlookahead", "generate", "--max-new-tokens", "900"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--max-new-tokens", "99999999999"], "max_new_tokens: got 99999999999"),
        (["--prompt", "\udcff\udcfe"], "prompt: not valid Unicode text"),
        (["--temperature", "1e39"], "temperature: got 1e+39"),
        (["--model", ""], "path_or_id: got ''"),
        (["--prompt", "a " * 2000], "after a prompt of"),
    ],
)
def test_more_user_errors_are_one_line_and_status_2(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr
