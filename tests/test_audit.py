"""`audit`: clean texts audit clean, a wrong token is found where it is, near ties are near."""

from __future__ import annotations

import dataclasses
import functools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import TINY, LeakProbe, SuccessorTable, plain, tiny_params
from test_discipline import count_compilations

import jlookahead as jl
from jlookahead import auditing
from jlookahead.call import prepare
from jlookahead.processors import AllowedTokens, PresencePenalty, RepetitionPenalty

PROMPT = [3, 1, 4, 1, 5]
SAMPLED = jl.Sampling(temperature=0.8, top_k=30, top_p=0.9, seed=3)
LAWS = {
    "greedy": {},
    "sampled": {"sampling": SAMPLED},
    "penalised": {
        "processors": (RepetitionPenalty(1.3), PresencePenalty(0.4)),
        "sampling": SAMPLED,
        "min_new_tokens": 30,
        "eos_token_ids": tuple(range(0, 97, 2)),
    },
}


@pytest.mark.parametrize(
    "strategy, law",
    [
        (jl.Lookahead(5, 4, 3), "greedy"),
        (jl.PromptLookup(), "sampled"),
        (jl.Lookahead(5, 4, 3), "penalised"),
    ],
    ids=str,
)
def test_generated_texts_are_clean(strategy, law):
    params = tiny_params(1)
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=150, logprobs=True, **LAWS[law])
    out = jl.generate(params, PROMPT, cfg)
    assert len(out.tokens) >= 30
    audited = jl.audit(params, PROMPT, out.tokens, cfg)
    assert audited.tokens == audited.choices == out.tokens
    assert audited.first_divergence is None and all(audited.is_choice)
    assert min(audited.margins) >= 0
    np.testing.assert_allclose(audited.logprobs, out.logprobs, atol=1e-3)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("where", [0, 17, -1])
def test_a_changed_token_is_found_where_it_is(law, where):
    """And what comes behind it is judged behind it, by the choice of a generation from there."""
    params = tiny_params(1)
    cfg = jl.Config(model=TINY, max_new_tokens=30, **LAWS[law])
    tokens = plain(params, PROMPT, cfg).tokens
    where %= len(tokens)
    clean = jl.audit(params, PROMPT, tokens, cfg)
    changed = list(tokens)
    changed[where] = (tokens[where] + 1) % TINY.vocab_size
    audited = jl.audit(params, PROMPT, changed, cfg)
    assert audited.first_divergence == where
    assert audited.choices[: where + 1] == tokens[: where + 1]
    assert audited.margins[: where + 1] == clean.margins[: where + 1]
    assert audited.logprobs[where] != clean.logprobs[where]
    if law != "penalised" and where + 1 < len(tokens):
        forced = PROMPT + changed[: where + 1]
        one = dataclasses.replace(cfg, max_new_tokens=1)
        assert audited.choices[where + 1] == plain(params, forced, one).tokens[0]


@pytest.mark.parametrize("prompt_len", [1, 2, 63, 64, 65, 128, 129, 200])
def test_every_place_is_judged_behind_all_that_comes_before(prompt_len):
    """One row seen too many, too few or at the wrong place changes the probe's choices."""
    model = LeakProbe(vocab_size=11)
    prompt = [i * i % 11 for i in range(prompt_len)]
    cfg = jl.Config(max_new_tokens=150)
    tokens = plain(None, prompt, cfg, model=model).tokens
    audited = jl.audit(None, prompt, tokens, cfg, model=model)
    assert audited.choices == tokens
    assert set(audited.margins) == {1.0}


def test_margins_are_those_of_the_processed_logits():
    successor, model = jnp.roll(jnp.arange(9), -1), SuccessorTable(9)
    cfg = jl.Config(processors=(PresencePenalty(7.0),))
    audited = jl.audit(successor, [0], [1, 2, 4, 5, 5], cfg, model=model)
    assert audited.choices == [1, 2, 3, 5, 6]
    assert audited.is_choice == [True, True, False, True, False]
    assert audited.first_divergence == 2
    assert audited.margins == [20.0] * 5
    assert jl.audit(successor, [4], [1, 5], cfg, model=model).margins == [20.0, 20.0]
    # 5 was emitted already: 20 - 7 over 0.
    assert jl.audit(successor, [4], [5, 4, 5], cfg, model=model).margins == [20.0, 20.0, 13.0]
    only = jl.Config(processors=(AllowedTokens((5,)),))
    audited = jl.audit(successor, [0], [5], only, model=model)
    assert (audited.choices, audited.margins) == ([5], [np.inf])
    assert audited.logprobs == pytest.approx([-20.0], abs=1e-3)


def test_rows_of_a_batch_are_audited_by_their_ids():
    params, prompts, row_ids = tiny_params(0), [[1], [2, 3], [4]], [5, 0, 2]
    cfg = jl.Config(model=TINY, sampling=jl.Sampling(temperature=1.0), max_new_tokens=20)
    out = plain(params, prompts, cfg, row_ids=row_ids)
    for prompt, tokens, row_id in zip(prompts, out.tokens, row_ids, strict=True):
        assert jl.audit(params, prompt, tokens, cfg, row_id=row_id).first_divergence is None
        other = jl.audit(params, prompt, tokens, cfg, row_id=row_id + 1)
        assert other.first_divergence is not None


def test_ends_are_not_judged():
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, max_new_tokens=40)
    tokens = plain(params, PROMPT, cfg).tokens
    short = jl.Config(model=TINY, max_new_tokens=2, eos_token_ids=(tokens[3],), cache_len=6)
    assert jl.audit(params, PROMPT, np.array(tokens), short).first_divergence is None
    nothing = jl.audit(params, PROMPT, [], cfg)
    assert nothing == jl.Audit([], [], [], [])
    assert nothing.first_divergence is None


@pytest.mark.parametrize(
    "prompt, tokens, options, message",
    [
        (PROMPT, [97], {}, "tokens: got id 97, allowed are 0 to 96"),
        (PROMPT, [-1], {}, "tokens: got id -1"),
        (PROMPT, [0.5], {}, "tokens: got shape"),
        (PROMPT, [[1], [2]], {}, "tokens: got shape"),
        (PROMPT, [1] * 1020, {}, "tokens: got 1020 ids after a prompt of 5 tokens"),
        (PROMPT, [1], {"row_id": -1}, "row_ids"),
        ([[1], [2]], [1], {}, "batch of 2 rows"),
        ([], [1], {}, "row 0 is empty"),
        ("text", [1], {}, "needs a tokenizer"),
    ],
)
def test_refusals(prompt, tokens, options, message):
    params = tiny_params(0)
    with count_compilations() as count, pytest.raises(ValueError, match=message):
        jl.audit(params, prompt, tokens, jl.Config(model=TINY), **options)
    assert count[0] == 0


def test_a_minimum_that_the_context_does_not_hold():
    """The rest of the law still counts: no EOS id is ever plain decoding's choice."""
    prompt, cfg = [1] * (TINY.max_position_embeddings - 2), jl.Config(model=TINY)
    params = tiny_params(0)
    first = jl.audit(params, prompt, [5], cfg).choices[0]
    cfg = dataclasses.replace(cfg, eos_token_ids=(first,), min_new_tokens=8)
    assert jl.audit(params, prompt, [first, 5], cfg).is_choice[0] is False


def test_residual_sampling_has_no_single_choice():
    residual = jl.Sampling(temperature=1.0, verify="residual")
    with pytest.raises(ValueError, match="verify: got 'residual'"):
        jl.audit(tiny_params(0), [1], [2], jl.Config(model=TINY, sampling=residual))


def test_one_program_per_bucket_and_few_logits():
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, sampling=jl.Sampling(temperature=1.0))
    jl.audit(params, [1], [2], cfg)
    with count_compilations() as count:
        for length in (2, 64, 65, 130, 250):
            jl.audit(params, [1] * 5, [2] * length, dataclasses.replace(cfg, max_new_tokens=7))
    assert count[0] == 0
    arrays = prepare(params, [1], cfg).arrays
    ids = jnp.zeros((1, 1024), jnp.int32)
    args = jl.LlamaModel(TINY), None, params, ids, jnp.int32(900), arrays
    text = auditing._judge.lower(*args).compile().as_text()
    assert max(map(int, re.findall(r"f32\[(\d+),97\]", text))) == 64


def test_bfloat16_diverges_at_near_ties_only():
    """The bound: 8 units in the last place of bfloat16, at the leading logit; half of the
    divergences are within 1, and half of all choices are far clearer than 8."""
    config = dataclasses.replace(TINY, dtype="bfloat16")
    cfg = jl.Config(model=config, strategy=jl.Lookahead(5, 4, 3), max_new_tokens=200)
    rng = random.Random(1)
    leads, typical = [], []
    for seed in range(4):
        params = tiny_params(seed, config)
        prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 16))] for _ in range(8)]
        texts = (decode(params, prompts, cfg).tokens for decode in (jl.generate, plain))
        for prompt, tokens, expected in zip(prompts, *texts, strict=True):
            if tokens == expected:
                continue
            where = next(i for i in range(200) if tokens[i] != expected[i])
            ulp = ulp_of_the_leading_logit(params, config, prompt + tokens[:where])
            margins = jl.audit(params, prompt, tokens, cfg).margins
            leads.append(margins[where] / ulp)
            typical.append(np.median(margins) / ulp)
    assert len(leads) > 10, "too few divergences to say anything"
    assert max(leads) < 8
    assert np.median(leads) < 1 and np.median(typical) > 8


def ulp_of_the_leading_logit(params, config, text) -> float:
    padded = np.zeros((1, 256), np.int32)
    padded[0, : len(text)] = text
    lead = float(leading_logit(config, params, padded, len(text) - 1))
    return 2.0 ** (np.floor(np.log2(abs(lead))) - 7)


@functools.partial(jax.jit, static_argnums=0)
def leading_logit(config, params, padded, row):
    model, size = jl.LlamaModel(config), padded.shape[1]
    hidden, _ = model.forward(
        params,
        padded,
        jnp.arange(size)[None],
        jnp.tri(size, dtype=bool),
        model.init_cache(1, size),
        jnp.zeros(1, jnp.int32),
    )
    return model.logits(params, hidden[0, row]).max()
