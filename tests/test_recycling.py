"""Recycling: its table of successors and its drafts against plain-Python definitions.

Proved here:
- `record` does what writing entry by entry does;
- the drafts are, by the rules, chains of prompt lookup in up to 80% of the rows, then the ranked
  tree grown from the table, ending where the table knows nothing;
- on a random LLaMA the table after the prefill and after every round holds what separate causal
  forward passes find likeliest; of several rows with one token the shallowest draft counts,
  and the window's rows last;
- on a cyclic text the rounds are as few as the longest chain allows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY, SuccessorTable, tiny_params
from test_jacobi import isolated_logits, text_of

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import start
from jlookahead.forest import rank_tree
from jlookahead.recycling import RANK_PROBABILITIES
from jlookahead.state import LOOKUP, RECYCLED
from jlookahead.successors import record

# --- the table ------------------------------------------------------------------------------

BATCH, VOCAB, NUM_ROWS, K = 2, 6, 9, 3
record_jit = jax.jit(record)


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(deadline=None, max_examples=100)
def test_record_equals_writing_one_by_one(seed, is_shared):
    rng = np.random.default_rng(seed)
    table = rng.integers(-1, VOCAB, (BATCH, VOCAB, K)).astype(np.int32)
    tokens = rng.integers(0, VOCAB, (BATCH, NUM_ROWS)).astype(np.int32)
    successors = rng.integers(0, 99, (BATCH, NUM_ROWS, K)).astype(np.int32)
    valid = rng.random((BATCH, NUM_ROWS)) < rng.random()
    priority = np.stack([rng.permutation(40)[:NUM_ROWS] for _ in range(BATCH)]).astype(np.int32)
    if is_shared:
        priority[:] = priority[0]
    expected = table.copy()
    for b in range(BATCH):
        for i in np.argsort(priority[b]):
            if valid[b, i]:
                expected[b, tokens[b, i]] = successors[b, i]
    given_priority = priority[0] if is_shared else priority
    found = record_jit(table, tokens, successors, given_priority, valid)
    np.testing.assert_array_equal(found, expected)


# --- drafts ---------------------------------------------------------------------------------

MAX_LEN, V = 64, 9


def matches_of(ids: list[int]) -> list[tuple[int, int]]:
    """(start, match length): longest first, then most recent; up to four, and distinct."""
    found: list[tuple[int, int]] = []
    for n in range(7, 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            is_match = ids[end - n : end] == ids[-n:]
            if is_match and all(ids[end] != ids[start] for start, _ in found):
                found.append((end, n))
    return found[:4]


def expected_drafts(ids: list[int], table: np.ndarray, num_drafts: int) -> list[tuple]:
    """(token, source, parent) of every row; token -1 where the table knows none."""
    most = num_drafts * 4 // 5
    drafts: list[tuple] = []
    for first, n in matches_of(ids):
        chain = ids[first:][: 3 if n == 1 else 2 + 2 * n][: most - len(drafts)]
        for i, token in enumerate(chain):
            drafts.append((token, LOOKUP, len(drafts) - 1 if i else -1))
    num_looked_up = len(drafts)
    parents, ranks = rank_tree(num_drafts - num_looked_up, RANK_PROBABILITIES)
    for parent, rank in zip(parents.tolist(), ranks.tolist(), strict=True):
        above = parent + num_looked_up if parent >= 0 else -1
        before = ids[-1] if parent < 0 else drafts[above][0]
        token = -1 if before < 0 else int(table[before, rank])
        drafts.append((token, RECYCLED, above))
    return drafts


@functools.cache
def proposing(strategy: jl.Recycling):
    cfg = jl.Config(strategy=strategy, max_new_tokens=1)
    call = prepare(None, [0] * MAX_LEN, cfg, model=SuccessorTable(V))
    return start(call, jnp.zeros(V, jnp.int32)), jax.jit(strategy.propose)


@pytest.mark.parametrize("rows", [2, 3, 12, 56])
@given(
    st.lists(st.integers(0, 3) | st.integers(0, V - 1), min_size=1, max_size=MAX_LEN),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=60)
def test_drafts_equal_the_rules(rows, ids, seed):
    state, propose = proposing(jl.Recycling(rows))
    table = np.random.default_rng(seed).integers(-1, V, state.successors.shape).astype(np.int32)
    table[:, seed % V] = -1  # never seen
    # What lies beyond the text would extend every match if it were read.
    tokens = np.resize(np.array(ids, np.int32), (1, state.tokens.shape[1]))
    draft = propose(
        state.replace(
            tokens=jnp.array(tokens), length=jnp.array([len(ids)]), successors=jnp.array(table)
        )
    )
    fields = (draft.tokens, draft.valid, draft.source, draft.parents)
    found = [
        (token if ok else -1, source, parent)
        for token, ok, source, parent in zip(
            *(np.asarray(field)[0].tolist() for field in fields), strict=True
        )
    ]
    assert found == expected_drafts(ids, table[0], jl.Recycling(rows).num_drafts)


# --- what a LLaMA teaches -------------------------------------------------------------------

TOLERANCE = 1e-3  # of logits, where near ties may be ordered either way


def check_entries(table: np.ndarray, before: np.ndarray, learnt: dict[int, np.ndarray]) -> None:
    """`learnt`: logits behind each token that counts; every other entry is as before."""
    for token in range(len(table)):
        if token not in learnt:
            assert table[token].tolist() == before[token].tolist()
            continue
        logits = learnt[token]
        assert len(set(table[token].tolist())) == table.shape[1]
        best = -np.sort(-logits)[: table.shape[1]]
        np.testing.assert_allclose(logits[table[token]], best, atol=TOLERANCE)


def test_the_table_holds_what_separate_forwards_find_likeliest():
    params, prompt = tiny_params(4), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    strategy = jl.Recycling(18)
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=24)
    state = start(prepare(params, prompt, cfg), params)
    empty = np.full(state.successors.shape[1:], -1)
    prefixes = [prompt[: i + 1] for i in range(len(prompt) - 1)]
    logits = isolated_logits(params, prefixes)
    # The last occurrence in the prompt counts; its last token is not read yet.
    learnt = {prefix[-1]: row for prefix, row in zip(prefixes, logits, strict=True)}
    check_entries(np.asarray(state.successors)[0], empty, learnt)

    num_repeated = 0
    propose = jax.jit(strategy.propose)
    for after, info in jl.iter_rounds(params, prompt, cfg):
        text = text_of(state)
        draft = propose(state)
        for name in ("tokens", "valid", "parents"):
            np.testing.assert_array_equal(getattr(draft, name), getattr(info.draft, name))
        tokens, parents = (np.asarray(x)[0].tolist() for x in (draft.tokens, draft.parents))
        paths: dict[int, list[int]] = {-1: []}
        for i in np.flatnonzero(np.asarray(draft.valid)[0]).tolist():
            paths[i] = [*paths[parents[i]], tokens[i]]
        # The window's columns count least; the first of them is the last token's row.
        (level,) = state.window.levels()
        behind = [paths[i] for i in sorted(paths, key=lambda i: (len(paths[i]), i))]
        behind += [level[:j] for j in range(1, len(level) + 1)]
        logits = isolated_logits(params, [text + path for path in behind])
        learnt = {}
        for path, row in zip(behind, logits, strict=True):
            token = (text + path)[-1]
            num_repeated += token in learnt
            learnt.setdefault(token, row)
        check_entries(np.asarray(after.successors)[0], np.asarray(state.successors)[0], learnt)
        state = after
    assert num_repeated > 10


# --- acceptance -----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [5, 24, 60])
def test_a_cyclic_text_takes_few_rounds(prompt_len):
    successor = jnp.roll(jnp.arange(23), -1)
    prompt = [i % 23 for i in range(prompt_len)]
    cfg = jl.Config(strategy=jl.Recycling(), max_new_tokens=340)
    out = jl.generate(successor, prompt, cfg, model=SuccessorTable(23))
    assert out.tokens == [(prompt_len + i) % 23 for i in range(340)]
    # A chain of 16 and the bonus are 17 tokens a round. Until the cycle has come round once
    # there is nothing to look up, and until 7 tokens match chains are shorter.
    num_unseen = max(0, 24 - prompt_len)
    assert out.num_rounds <= 340 // 17 + num_unseen + 3
    assert "lookup" in out.sources
