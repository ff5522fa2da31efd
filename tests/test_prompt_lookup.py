"""Prompt Lookup Decoding against a plain-Python definition of its drafts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY, LeakProbe, SuccessorTable, plain, tiny_params

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import start

SLOTS = 256


def reference_drafts(ids: list[int], strategy: jl.PromptLookup) -> list[list[int]]:
    """Longest suffix first, then most recent; one draft per first token; never itself."""
    drafts: list[list[int]] = []
    longest = strategy.max_ngram if strategy.policy == "most_recent" else 32
    for n in range(longest, 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            draft = ids[end : end + strategy.num_draft_tokens]
            is_match = ids[end - n : end] == ids[-n:]
            if is_match and all(draft[0] != other[0] for other in drafts):
                drafts.append(draft)
    return drafts[: strategy.candidates]


@functools.lru_cache
def programs(strategy: jl.PromptLookup):
    cfg = jl.Config(strategy=strategy, max_new_tokens=1)
    call = prepare(None, [0], cfg, model=SuccessorTable(9))
    return start(call, jnp.zeros(9, jnp.int32)), jax.jit(strategy.propose)


def drafts_of(ids: list[int], strategy: jl.PromptLookup) -> list[list[int]]:
    state, propose = programs(strategy)
    # What lies beyond the text would extend every match if it were read.
    tokens = np.resize(np.array(ids, np.int32), (1, state.tokens.shape[1]))
    draft = propose(state.replace(tokens=jnp.array(tokens), length=jnp.array([len(ids)])))
    shape = (strategy.candidates, strategy.num_draft_tokens)
    rows, valid = draft.tokens.reshape(shape), draft.valid.reshape(shape)
    found = [row[ok].tolist() for row, ok in zip(np.array(rows), np.array(valid), strict=True)]
    return [row for row in found if row]


@pytest.mark.parametrize(
    "strategy",
    [
        jl.PromptLookup(),
        jl.PromptLookup(1, 2, 1),
        jl.PromptLookup(4, 3, 3),
        jl.PromptLookup(2, 5, 8),
        jl.PromptLookup(2, 5, 3, policy="longest"),
    ],
    ids=str,
)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
@settings(deadline=None, max_examples=80)
def test_drafts_equal_the_definition(strategy, ids):
    assert drafts_of(ids, strategy) == reference_drafts(ids, strategy)


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([1, 2, 3, 9, 1, 2], [[3, 9, 1, 2]]),  # a partial continuation, though 10 are asked for
        ([4, 4, 4, 4], [[4]]),  # no match with itself
        ([1, 2, 3], []),
        ([7], []),
        ([1, 5, 2, 5, 3, 5], [[3, 5]]),  # the most recent of equal matches
        ([1, 5, 9, 2, 5, 3, 1, 5], [[9, 2, 5, 3, 1, 5]]),  # a longer match before a recent one
    ],
)
def test_worked_examples(ids, expected):
    assert drafts_of(ids, jl.PromptLookup()) == expected


def test_several_candidates_are_distinct_continuations():
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    # After 3, 1, 2 came 4; after 1, 2 also 3.
    assert drafts_of(ids, jl.PromptLookup(3, 2, 2)) == [[4, 1], [3, 1]]


def test_policies_differ_where_the_longer_match_is_older():
    ids = [1, 2, 3, 8, 9, 2, 3, 7, 1, 2, 3]
    assert drafts_of(ids, jl.PromptLookup(2, 1)) == [[7]]
    assert drafts_of(ids, jl.PromptLookup(2, 1, policy="longest")) == [[8]]


@pytest.mark.parametrize("strategy", [jl.PromptLookup(), jl.PromptLookup(2, 3, 4)], ids=str)
def test_output_is_the_plain_decoder_s(strategy):
    prompts = [[3, 1, 4, 1, 5], [2], [7, 7, 7, 8] * 4]
    for budget, eos in ((0, ()), (1, ()), (41, ()), (60, (13, 20))):
        cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=budget, eos_token_ids=eos)
        got, expected = (run(tiny_params(3), prompts, cfg) for run in (jl.generate, plain))
        assert (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)
    probe = LeakProbe(vocab_size=11)
    cfg = jl.Config(strategy=strategy, max_new_tokens=120)
    got, expected = (run(None, prompts, cfg, model=probe) for run in (jl.generate, plain))
    assert got.tokens == expected.tokens
    assert sum(got.num_rounds) < sum(expected.num_rounds)
    assert {"plain", "bonus", "lookup"} == {source for row in got.sources for source in row}


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 10])
def test_a_cyclic_text_reaches_the_most_tokens_a_round_can_give(num_draft_tokens):
    successor = jnp.roll(jnp.arange(23), -1)
    cfg = jl.Config(
        strategy=jl.PromptLookup(num_draft_tokens=num_draft_tokens),
        max_new_tokens=20 * (num_draft_tokens + 1),
    )
    out = jl.generate(successor, [*range(23), 0], cfg, model=SuccessorTable(23))
    assert out.num_rounds == 20


def test_no_match_degrades_to_one_plain_token():
    successor = jnp.arange(1, 201) % 200
    cfg = jl.Config(strategy=jl.PromptLookup(), max_new_tokens=150)
    out = jl.generate(successor, [0], cfg, model=SuccessorTable(200))
    assert out.num_rounds == 150
    assert set(out.sources) == {"plain"}


@pytest.mark.parametrize(
    "options",
    [
        {"max_ngram": 0},
        {"num_draft_tokens": 0},
        {"candidates": 0},
        {"max_ngram": 65},
        {"policy": "x"},
    ],
)
def test_knobs(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: got"):
        jl.PromptLookup(**options)
