"""Measuring: accepted lengths are those of the rounds, phases are told apart, and `bench` reports
what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import jlookahead as jl
from jlookahead import measuring
from jlookahead.cli.app import app
from jlookahead.measuring import accepted_lengths, compare_speed, histogram, time_by_phase

pytestmark = pytest.mark.optimized

PROMPT = "def flatten(items):\n"


@pytest.fixture(scope="module")
def lm():
    return jl.load()


@pytest.mark.parametrize("budget", [40, 41, 42])
def test_accepted_lengths_are_those_of_the_rounds(lm, budget):
    cfg = lm.make_config(strategy=jl.PromptLookup(), max_new_tokens=budget)
    rounds = list(jl.iter_rounds(lm.params, PROMPT, cfg, tokenizer=lm.tokenizer))
    expected = [int(info.num_accepted[0]) for _, info in rounds]
    assert max(expected) > 2
    result = jl.generate(lm.params, PROMPT, cfg, tokenizer=lm.tokenizer)
    assert accepted_lengths(result.sources) == expected


def test_a_cut_round_counts_what_it_emitted_beyond_one():
    assert accepted_lengths([]) == []
    assert accepted_lengths(["plain", "lookup", "bonus", "pool", "pool"]) == [0, 1, 1]


def test_histogram_has_shares_of_rounds():
    found = histogram([0, 0, 1, 4, 7, 8, 15, 16, 99, 3])
    assert found == {
        "0": 0.2, "1": 0.1, "2": 0, "3": 0.1, "4-7": 0.2, "8-15": 0.2, "16+": 0.2
    }  # fmt: skip
    assert set(histogram([]).values()) == {0}


PROGRAM = """
%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %dot.1 = f32[4]{0} dot(%p, %p), lhs_contracting_dims={0}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %add.1 = f32[4]{0} add(%a, %a), metadata={op_name="jit(f)/while/body/propose/add"}
  %copy.1 = f32[4]{0} copy(%add.1)
  %fusion.1 = f32[4]{0} fusion(%copy.1), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/verify/x"}
  %while.1 = (s32[], f32[4]{0}) while(%copy.1), condition=%c, body=%b
  ROOT %sub.1 = f32[4]{0} subtract(%a, %fusion.1), metadata={op_name="jit(f)/publish/sub"}
}
"""  # noqa: E501


def test_every_instruction_has_a_phase():
    phases = measuring._phases(PROGRAM)
    assert phases["add.1"] == phases["copy.1"] == "propose", "what has no scope follows"
    assert phases["fusion.1"] == "forward", "products are the forward pass"
    assert phases["sub.1"] == "publish"
    assert phases["a"] == "other", "nothing runs before it"
    assert "while.1" not in phases, "its time is that of what it holds"


def test_time_by_phase_adds_up(lm):
    shares = time_by_phase(lm, PROMPT, jl.Lookahead(5, 4, 3), max_new_tokens=24)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] > 0.5
    assert all(shares[phase] > 0 for phase in measuring.PHASES)


def test_compare_speed_sees_a_difference(lm, monkeypatch):
    strategies = {"lookup": jl.PromptLookup(num_draft_tokens=3)}

    def compare():
        return compare_speed(lm, [5, 6, 7], strategies, max_new_tokens=8, repeats=1)

    compared = compare()
    assert compared.identical == {"lookup": True}
    assert compared.speedups["lookup"] == pytest.approx(
        compared.seconds["plain"] / compared.seconds["lookup"]
    )
    prefill = compare_speed(lm, [5, 6, 7], {}, max_new_tokens=0, repeats=1)
    assert 0 < prefill.seconds["plain"] < min(compared.seconds.values())
    generate = jl.generate

    def spoilt(params, prompt, cfg, **kwargs):
        result = generate(params, prompt, cfg, **kwargs)
        if isinstance(cfg.strategy, jl.PromptLookup):
            result = dataclasses.replace(result, tokens=result.tokens[:-1] + [0])
        return result

    monkeypatch.setattr(measuring, "generate", spoilt)
    assert compare().identical == {"lookup": False}
    arguments = ["bench", "--strategy", "prompt-lookup", "--max-new-tokens", "8", "--repeats", "1"]
    assert CliRunner().invoke(app, arguments).exit_code == 1


def test_bench(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "def f(x):"}\n\n{"turns": ["import os", "more"]}\n{"ids": [5, 6]}\n'
    )
    arguments = ["bench", "--prompts", str(file), "--max-new-tokens", "16", "--repeats", "1"]
    arguments += ["--strategy", "auto", "--strategy", "prompt-lookup"]
    output = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert output["num_prompts"] == 3
    assert list(output["strategies"]) == ["auto", "prompt-lookup"]
    for figures in output["strategies"].values():
        assert figures["identical"] and len(figures["speedup"]["all"]) == 3
        assert figures["tokens_per_round"] >= 1
        assert sum(figures["accepted_lengths"].values()) == pytest.approx(1, abs=1e-3)
    shown = CliRunner().invoke(app, [*arguments[:-2], "--max-new-tokens", "4"])
    assert shown.exit_code == 0, shown.output
    assert "tokens/round" in shown.stdout and "% forward" in shown.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--repeats", "0"], "repeats: got 0"),
        (["--max-new-tokens", "0"], "max_new_tokens: got 0"),
        (["--strategy", "magic"], "strategy: got 'magic'"),
        (["--prompts", "absent.jsonl"], "absent.jsonl: No such file"),
    ],
)
def test_bench_refuses(options, words):
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and words in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n", "holds no prompt"),
        ('{"prompt": "a"}\nnope', "line 2: not JSON"),
        ('{"prompt": ""}', "line 1: needs one of"),
        ('{"turns": []}', "line 1: needs one of"),
        ("[1, 2]", "line 1: needs one of"),
        ('{"ids": [5]}\n{"ids": [99999999]}', "prompt 2: "),
        ('{"prompt": "a", "ids": [5]}', "line 1: needs one of"),
        ('{"turns": "text"}', "line 1: needs one of"),
        ('{"ids": ["a"]}', "line 1: needs one of"),
    ],
)
def test_bench_refuses_prompts(tmp_path, text, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    result = CliRunner().invoke(app, ["bench", "--prompts", str(file)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and words in result.stderr
