"""Replay 2: the recorded runs of the official implementation, decoded with the model.

Tokens, acceptance per step and number of forwards are equal up to the first step whose
recorded logit gap is so small that another summation order may flip an argmax.
"""

from __future__ import annotations

import itertools

import golden
import pytest

import jlookahead as jl

SMALLEST_SAFE_GAP = 2e-5


@pytest.fixture(scope="module")
def tiny():
    lm = jl.load(golden.GOLDEN / "tiny_model")
    return lm.config, lm.params


def smallest_gap(step: dict) -> float:
    gaps = (step.get(name) for name in ("out_gap", "inp_min_gap", "guess_min_gap"))
    return min(gap for gap in gaps if gap is not None)


def replay(params, model: jl.ModelConfig, run: dict) -> int:
    """Checks a run step by step; returns how many steps were compared."""
    rounds = jl.iter_rounds(
        params,
        run["prompt_ids"],
        golden.config_of(run, model),
        initial_window=run["initial_window"],
    )
    steps = itertools.takewhile(lambda s: smallest_gap(s) >= SMALLEST_SAFE_GAP, run["steps"])
    compared = 0
    for step in steps:
        _, info = next(rounds)
        emitted = info.emitted[0, : info.num_emitted[0]].tolist()
        # Only the length limit, at the end, cuts what the official code overshoots.
        expected = step["emitted"][: len(run["final_ids"]) - step["seq_len_before"]]
        assert emitted == expected
        assert int(info.num_accepted[0]) == min(step["accepted"], len(expected) - 1)
        assert info.candidates() == (step["cands"] or [])
        compared += 1
    assert compared < run["n_forward"] or next(rounds, None) is None
    return compared


RUNS = golden.recordings("tiny", "tiny_fixedhist", "tiny_eos", "tiny_maxlen")


@pytest.mark.parametrize("path", RUNS, ids=lambda p: f"{p.parent.name}-{p.name[:-8]}")
def test_tiny_runs(tiny, path):
    config, params = tiny
    assert replay(params, config, golden.read(path)) > 0


def test_plain_runs(tiny):
    config, params = tiny
    for run in golden.read(golden.GOLDEN / "ar_tiny.json.gz").values():
        length = len(run["prompt_ids"])
        cfg = jl.Config(
            model=config,
            strategy=jl.Autoregressive(),
            max_new_tokens=min(len(run["ids"]) - length, 900),
        )
        out = jl.generate(params, run["prompt_ids"], cfg)
        assert out.tokens == run["ids"][length:][: cfg.max_new_tokens]
