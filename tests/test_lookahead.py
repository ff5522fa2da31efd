"""What lookahead drafts: lookup's continuation first, then the pool, on shared rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SuccessorTable

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import start
from jlookahead.state import SOURCES, PromptRead

MAX_PROMPT = 64


@functools.lru_cache
def program(strategy: jl.Lookahead):
    """ids `[1, MAX_PROMPT]` and their number -> the first round's draft."""
    cfg = jl.Config(strategy=strategy, max_new_tokens=1)
    call = prepare(None, [0] * MAX_PROMPT, cfg, model=SuccessorTable(9))
    blank = start(call, jnp.zeros(9, jnp.int32))

    def run(ids, length):
        tokens = blank.tokens.at[:, :MAX_PROMPT].set(ids)
        state = blank.replace(tokens=tokens, length=length, prompt_len=length)
        state = state.replace(window=None, pool=None)
        return strategy.propose(strategy.start(state, PromptRead(jnp.int32(0), None, 9, None)))

    return jax.jit(run)


def expected_drafts(ids: list[int], strategy: jl.Lookahead) -> list[tuple[str, list[int]]]:
    """By the rules: a match of m tokens (at most 7) drafts 2 + 2m, or 3 where m is 1, rounded up
    to whole chains, at most 80% of them; the key's other n-grams follow, most recent first."""
    size, num_chains = strategy.ngram - 1, strategy.candidates
    drafts, taken, found = [], 0, []
    if strategy.prompt_lookup:
        for m in range(7, 0, -1):
            ends = [e for e in range(m, len(ids)) if ids[e - m : e] == ids[-m:]]
            if ends:
                wanted = -(-(3 if m == 1 else 2 + 2 * m) // size)
                taken = min(wanted, max(1, min(-(-16 // size), num_chains * 4 // 5)))
                found = ids[ends[-1] :][: taken * size]
                drafts.append(("lookup", found))
                break
    bucket: list[list[int]] = []
    for first in range(len(ids) - size):
        key, suffix = ids[first], ids[first + 1 : first + 1 + size]
        if key == ids[-1]:
            bucket = [other for other in bucket if other != suffix] + [suffix]
    newest = [suffix for suffix in bucket[::-1][:num_chains] if suffix != found[:size]]
    return drafts + [("pool", suffix) for suffix in newest[: num_chains - taken]]


@pytest.mark.parametrize(
    "strategy",
    [
        jl.Lookahead(3, 5, 7),
        jl.Lookahead(3, 3, 2),
        jl.Lookahead(2, 2, 6),
        jl.Lookahead(1, 4, 1),
        jl.Lookahead(3, 4, 3, prompt_lookup=False),
    ],
    ids=lambda s: f"N{s.ngram}-G{s.candidates}-lookup{s.prompt_lookup}",
)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_PROMPT))
@settings(deadline=None, max_examples=60)
def test_drafts_equal_the_rules(strategy, ids):
    padded = np.resize(np.array(ids, np.int32), (1, MAX_PROMPT))
    draft = program(strategy)(padded, jnp.array([len(ids)]))
    tokens, valid = np.asarray(draft.tokens)[0], np.asarray(draft.valid)[0]
    source = np.asarray(draft.source)[0]
    parents = np.asarray(draft.parents)[0]
    chains: list[tuple[str, list[int]]] = []
    for row in np.flatnonzero(valid):
        if parents[row] < 0:
            chains.append((SOURCES[source[row]], []))
        assert chains[-1][0] == SOURCES[source[row]]
        chains[-1][1].append(int(tokens[row]))
    assert chains == expected_drafts(ids, strategy)


def test_reference_mode_has_no_lookup():
    strategy = jl.Lookahead(3, 4, 3, reference=True)
    assert strategy.max_linked == 0
    assert strategy.layout.max_accepted == strategy.ngram - 2  # no bonus on a full match
