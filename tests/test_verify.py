"""Verification of a draft forest against brute force over all of its paths.

Proved here:
- on random forests (chains and true trees) with many duplicate tokens, the accepted path is
  the longest that the selector agrees with, ties going to the lowest row, found in pure
  Python by testing every root path; the target's conditional is a function of the token path,
  so drafts that share a prefix expose the same one, as mask and positions guarantee;
- the worked example of the design ('Publication'), in default and in reference mode: there
  the last token of a candidate is never accepted, as in the official implementation;
- at most accepted + 1 selections are made, and rows of the batch are independent.
"""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jlookahead.forest import chain_parents
from jlookahead.layout import Layout, build_layout
from jlookahead.sampling import select
from jlookahead.state import BONUS, PLAIN, POOL, SWEEP, Draft
from jlookahead.verify import Verdict, verify

BATCH, NUM_DRAFTS, VOCAB = 4, 9, 3

# Added to the conditional, so that a selection at a wrong position shows.
_OF_POSITION = np.random.default_rng(0).normal(size=(64, VOCAB)).astype(np.float32)


def select_by_position(logits: jax.Array, positions: jax.Array) -> jax.Array:
    shifted = logits + jnp.asarray(_OF_POSITION)[positions % len(_OF_POSITION)]
    return jnp.argmax(shifted, axis=-1).astype(jnp.int32)


def choice(logits: np.ndarray, position: int) -> int:
    return int(np.argmax(logits + _OF_POSITION[position % len(_OF_POSITION)]))


# --- forests --------------------------------------------------------------------------------


def random_forest(seed: int) -> tuple[int, ...]:
    """Parents; every draft hangs on a recent one, so that forests are neither flat nor thin."""
    rng = random.Random(seed)
    return tuple(rng.randrange(max(-1, d - 4), d) for d in range(NUM_DRAFTS))


# Parents, and the cap on accepted drafts.
FORESTS = [
    (chain_parents(3, 3), 3),
    (chain_parents(3, 3), 2),
    (chain_parents(9, 1), 1),
    (chain_parents(1, 9), 5),
    ((-1, -1, 0, 0, 1, 1, 2, 2, 4), 4),
    ((1, 2, -1, 4, 2, -1, 5, 5, 3), 4),  # parents behind their children
    *((random_forest(seed), NUM_DRAFTS) for seed in range(3)),
    (random_forest(3), 1),
]


@functools.lru_cache
def program(max_accepted: int):
    """One compiled program for all forests of a cap: the forest is an argument."""
    layout = build_layout(num_drafts=NUM_DRAFTS, max_accepted=max_accepted)

    def run(logits, draft, position):
        def choose(logits, emitted, depth, eligible):
            return select_by_position(logits, position + 1 + depth)

        return verify(logits, draft, layout, choose)

    return layout, jax.jit(run)


def root_path(parents: tuple[int, ...], draft: int) -> list[int]:
    """The draft and its ancestors, root first."""
    path = []
    while draft >= 0:
        path.append(draft)
        draft = parents[draft]
    return path[::-1]


def conditional(seed: int, tokens: tuple[int, ...]) -> np.ndarray:
    """The target's logits after the prefix and `tokens`."""
    return np.random.default_rng([seed, *tokens]).normal(size=VOCAB).astype(np.float32)


# --- brute force ----------------------------------------------------------------------------


def brute_force(layout: Layout, parents, row_logits, tokens, valid, source, position) -> dict:
    """The verdict on one batch row, from all root paths of the forest."""

    def is_agreed(path: list[int]) -> bool:
        rows = [0, *(1 + d for d in path)]  # of `row_logits`
        return len(path) <= layout.max_accepted and all(
            valid[d] and tokens[d] == choice(row_logits[rows[i]], position + 1 + i)
            for i, d in enumerate(path)
        )

    paths = [root_path(parents, d) for d in range(layout.num_drafts)]
    agreed = [path for path in paths if is_agreed(path)]
    num_accepted = max(map(len, agreed), default=0)
    # At every depth the lowest survivor; all of them carry the same tokens.
    path = [min(p[-1] for p in agreed if len(p) == n) for n in range(1, num_accepted + 1)]
    winner = path[-1] if path else -1
    own = choice(row_logits[winner + 1], position + 1 + num_accepted)
    first_row = layout.num_rows - layout.num_drafts

    def padded(values: list[int]) -> list[int]:
        return values + [0] * (layout.max_emitted - len(values))

    return {
        "num_accepted": num_accepted,
        "emitted": padded([int(tokens[d]) for d in path] + [own]),
        "source": padded([int(source[d]) for d in path] + [BONUS if path else PLAIN]),
        "path": padded([0, *(first_row + d for d in path)]),
        "winner": winner,
    }


def row_of(verdict: Verdict, row: int) -> dict:
    fields = {name: value for name, value in vars(verdict).items() if value is not None}
    return {name: np.asarray(value)[row].tolist() for name, value in fields.items()}


@st.composite
def cases(draw):
    def array(dtype, elements, *more_axes):
        # No fill: it would make most entries equal.
        shape = (BATCH, *more_axes)
        return draw(hnp.arrays(dtype, shape, elements=elements, fill=st.nothing()))

    mostly = st.sampled_from([True, True, True, False])
    return {
        "forest": draw(st.integers(0, len(FORESTS) - 1)),
        "seeds": array(np.int64, st.integers(0, 2**16)),
        "position": array(np.int32, st.integers(0, 200)),
        "tokens": array(np.int32, st.integers(0, VOCAB - 1), NUM_DRAFTS),
        "is_right": array(bool, st.booleans(), NUM_DRAFTS),  # the target's choice at that depth
        "valid": array(bool, mostly, NUM_DRAFTS),
        "source": array(np.int8, st.integers(POOL, SWEEP), NUM_DRAFTS),
    }


def make_inputs(case: dict, parents: tuple[int, ...]) -> tuple[np.ndarray, Draft]:
    """Logits by token path, and drafts of which many are what the target would choose."""
    tokens = case["tokens"].copy()
    logits = np.zeros((BATCH, 1 + NUM_DRAFTS, VOCAB), np.float32)
    for b, seed in enumerate(case["seeds"]):
        logits[b, 0] = conditional(seed, ())
        # Shallow drafts first: the right token depends on those before it.
        for path in sorted((root_path(parents, d) for d in range(NUM_DRAFTS)), key=len):
            d = path[-1]
            if case["is_right"][b, d]:
                position = int(case["position"][b]) + len(path)
                tokens[b, d] = choice(logits[b, 1 + parents[d]], position)
            logits[b, 1 + d] = conditional(seed, tuple(tokens[b, path].tolist()))
    parents = np.tile(np.array(parents, np.int32), (BATCH, 1))
    return logits, Draft(tokens, case["valid"], case["source"], parents)


@given(cases())
@settings(deadline=None, max_examples=200)
def test_equals_brute_force(case):
    parents, max_accepted = FORESTS[case["forest"]]
    layout, run = program(max_accepted)
    logits, draft = make_inputs(case, parents)
    verdict = run(logits, draft, case["position"])
    for b in range(BATCH):
        found = row_of(verdict, b)
        position = int(case["position"][b])
        row = (draft.tokens[b], draft.valid[b], draft.source[b])
        expected = brute_force(layout, parents, logits[b], *row, position)
        assert found == expected
        # The K/V rows that get committed were computed for the very tokens that are emitted.
        accepted = found["num_accepted"]
        first_row = layout.num_rows - layout.num_drafts
        committed = [row - first_row for row in found["path"][1 : accepted + 1]]
        for n, row in enumerate(committed, start=1):
            path = root_path(parents, row)
            assert [int(draft.tokens[b, d]) for d in path] == found["emitted"][:n]


# --- directed -------------------------------------------------------------------------------


def greedy(logits, emitted, depth, eligible):
    return select(None, logits, depth, emitted, eligible)


H0, H1, H2, H3, OTHER = 1, 2, 3, 4, 5


def one_hot_logits(answers: list[int]) -> jax.Array:
    """`[1, 1 + R, 8]`: the argmax after the ordinary row and after every draft."""
    return jax.nn.one_hot(jnp.array([answers]), 8)


def draft_of(*candidates: list[int]) -> Draft:
    tokens = jnp.array([sum(candidates, [])])
    source = jnp.full(tokens.shape, POOL, jnp.int8)
    parents = jnp.array([chain_parents(len(candidates), len(candidates[0]))])
    return Draft(tokens, jnp.ones_like(tokens, bool), source, parents)


@pytest.mark.parametrize("third", [H2, OTHER])
def test_worked_example_in_reference_mode(third):
    layout = build_layout(window=5, ngram=4, num_drafts=6, max_accepted=2)
    draft = draft_of([OTHER, H1, H2], [H0, H1, third])
    logits = one_hot_logits([H0, OTHER, OTHER, OTHER, H1, H2, H3])
    verdict = row_of(verify(logits, draft, layout, greedy), 0)
    # Packed rows 15-17 hold candidate 0 and 18-20 candidate 1. The third draft is dropped even
    # where it is right; its token comes from the target and is the next ordinary row's.
    assert verdict == {
        "num_accepted": 2,
        "emitted": [H0, H1, H2],
        "source": [POOL, POOL, BONUS],
        "path": [0, 18, 19],
        "winner": 4,
    }


def test_worked_example_in_default_mode():
    layout = build_layout(window=5, ngram=4, num_drafts=6, max_accepted=3)
    logits = one_hot_logits([H0, OTHER, OTHER, OTHER, H1, H2, H3])
    full = draft_of([OTHER, H1, H2], [H0, H1, H2])
    verdict = row_of(verify(logits, full, layout, greedy), 0)
    assert verdict == {
        "num_accepted": 3,
        "emitted": [H0, H1, H2, H3],  # a full match of 3 and the bonus token
        "source": [POOL, POOL, POOL, BONUS],
        "path": [0, 18, 19, 20],
        "winner": 5,
    }
    partial = draft_of([OTHER, H1, H2], [H0, H1, OTHER])
    verdict = row_of(verify(logits, partial, layout, greedy), 0)
    assert (verdict["num_accepted"], verdict["emitted"]) == (2, [H0, H1, H2, 0])
    assert (verdict["path"], verdict["winner"]) == ([0, 18, 19, 0], 4)


def test_an_invalid_draft_hides_what_hangs_on_it():
    layout = build_layout(num_drafts=3, max_accepted=3)
    draft = draft_of([H0, H1, H2]).replace(valid=jnp.array([[True, False, True]]))
    verdict = row_of(verify(one_hot_logits([H0, H1, H2, H3]), draft, layout, greedy), 0)
    assert (verdict["num_accepted"], verdict["emitted"]) == (1, [H0, H1, 0, 0])


def test_without_drafts_it_is_the_plain_decoder():
    layout = build_layout()
    none = jnp.zeros((BATCH, 0), jnp.int32)
    logits = np.stack([conditional(seed, ()) for seed in range(BATCH)])
    draft = Draft(none, none.astype(bool), none.astype(jnp.int8), none)

    def choose(logits, emitted, depth, eligible):
        return select_by_position(logits, jnp.arange(BATCH) * 3 + 1 + depth)

    verdict = verify(jnp.asarray(logits)[:, None], draft, layout, choose)
    expected = [choice(logits[b], 3 * b + 1) for b in range(BATCH)]
    assert verdict.emitted.tolist() == [[token] for token in expected]
    assert verdict.num_accepted.tolist() == [0] * BATCH
    assert verdict.winner.tolist() == [-1] * BATCH
    assert verdict.path.tolist() == [[0]] * BATCH


@pytest.mark.parametrize(("rights", "draws"), [([0, 0], 1), ([2, 0], 3), ([1, 3], 4), ([3, 3], 4)])
def test_number_of_selections(rights, draws):
    """One per depth that the longest row of the batch reaches: accepted + 1, at most D + 1."""
    layout = build_layout(num_drafts=3, max_accepted=3)
    target = jnp.array([H0, H1, H2])
    tokens = jnp.stack([jnp.where(jnp.arange(3) < right, target, OTHER) for right in rights])
    parents = jnp.tile(chain_parents(1, 3), (len(rights), 1))
    source = jnp.full(tokens.shape, POOL, jnp.int8)
    draft = Draft(tokens, jnp.ones_like(tokens, bool), source, parents)
    logits = jnp.tile(one_hot_logits([H0, H1, H2, H3]), (len(rights), 1, 1))
    depths_seen: list[int] = []

    def counting_choice(logits, emitted, depth, eligible):
        jax.debug.callback(lambda d: depths_seen.append(int(d)), depth, ordered=True)
        return greedy(logits, emitted, depth, eligible)

    verdict = verify(logits, draft, layout, counting_choice)
    jax.effects_barrier()
    assert verdict.num_accepted.tolist() == rights
    assert depths_seen == list(range(draws))


@given(cases(), st.permutations(range(BATCH)))
@settings(deadline=None, max_examples=30)
def test_rows_of_the_batch_are_independent(case, order):
    parents, max_accepted = FORESTS[case["forest"]]
    layout, run = program(max_accepted)
    logits, draft = make_inputs(case, parents)
    verdict = run(logits, draft, case["position"])
    order = np.array(order)
    others_changed = jax.tree.map(lambda x: x[order], (logits, draft, case["position"]))
    permuted = run(*others_changed)
    for slot, b in enumerate(order):
        assert row_of(permuted, slot) == row_of(verdict, b)
