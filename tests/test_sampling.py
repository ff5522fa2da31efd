"""The target's choice: filters, draws, and what a draw depends on.

Proved here:
- the filters keep what a definition by sorting keeps (NumPy, float64), and what HF's
  `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper` keep, in HF's order; ties with
  the last token kept are kept (HF's top-p breaks them by sort order);
- extreme parameters end in the argmax or in no filter, never in a token without mass;
- draws follow the filtered softmax, in the residual scheme whatever the drafts;
- a coupled draw depends on (seed, row id, position) alone, a residual one on its drafts too, and
  neither on the slot or the company in the batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import jlookahead as jl
from jlookahead.sampling import Sampler, filter_logits, select

BATCH, VOCAB = 2, 10
SLACK = 1e-5  # the filters sum in float32


SCHEMES = ["coupled", "residual"]


def select_with(sampler, logits, positions, drafts=None):
    """The choice with `drafts [B, R]` that may follow; none by default."""
    if drafts is None:
        drafts = jnp.zeros((len(logits), 0), jnp.int32)
    return select(sampler, logits, positions, drafts, jnp.ones(drafts.shape, bool))


filter_jit, select_jit = jax.jit(filter_logits), jax.jit(select_with)


def make_sampler(sampling: jl.Sampling, row_ids: list[int] | np.ndarray) -> Sampler:
    return Sampler(
        temperature=np.float32(sampling.temperature),
        top_k=np.int32(sampling.top_k),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
        seed=jnp.uint32(sampling.seed),
        row_ids=np.asarray(row_ids, np.int32),
        verify=sampling.verify,
    )


def filtered(sampling: jl.Sampling, logits: np.ndarray) -> np.ndarray:
    """`[BATCH, V]` through the jitted filters."""
    return np.asarray(filter_jit(make_sampler(sampling, range(len(logits))), logits))


# --- the definition by sorting --------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def kept_by_sorting(sampling: jl.Sampling, logits: np.ndarray, slack: float) -> np.ndarray:
    """`[V]` bool. Positive slack widens what top-p and min-p keep, negative slack narrows it."""
    scaled = logits / np.float32(sampling.temperature)
    descending = np.sort(scaled)[::-1]
    kept = scaled >= descending[min(sampling.top_k or len(logits), len(logits)) - 1]

    probabilities = softmax(np.where(kept, scaled, -np.inf))
    if sampling.top_p < 1:
        more_likely = np.array([probabilities[scaled > value].sum() for value in scaled])
        kept &= more_likely < max(sampling.top_p + slack, 1e-300)
    share = probabilities / probabilities.max()
    return kept & (share >= sampling.min_p * (1 - slack))


samplings = st.builds(
    jl.Sampling,
    temperature=st.floats(1e-3, 1e3),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.just(1.0) | st.floats(1e-6, 1.0),
    min_p=st.just(0.0) | st.floats(1e-6, 1.0),
)
# A grid and few values, so that ties are common and near-ties, which rounding may merge, do not
# occur; large values, so that probabilities under- and overflow.
logit = st.sampled_from([-1e4, -2.0, -0.5, -0.0, 0.0, 0.25, 1.0, 3.0, 50.0, 1e4]) | st.integers(
    -1280, 1280
).map(lambda i: i / 64)
logit_rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB)


@given(samplings, st.lists(logit_rows, min_size=BATCH, max_size=BATCH))
@settings(deadline=None, max_examples=200)
def test_filters_equal_the_definition_by_sorting(sampling, rows):
    logits = np.array(rows, np.float32)
    result = filtered(sampling, logits)
    for row, found in zip(logits, result, strict=True):
        kept = found > -np.inf
        narrow, wide = (kept_by_sorting(sampling, row, s) for s in (-SLACK, SLACK))
        assert (narrow <= kept).all() and (kept <= wide).all()
        np.testing.assert_allclose(found[kept] * sampling.temperature, row[kept], rtol=1e-6)
        if sampling.top_p == 1 and sampling.min_p == 0:
            assert (kept == narrow).all() and (kept == wide).all()


# --- HF -------------------------------------------------------------------------------------


def kept_by_hf(sampling: jl.Sampling, logits: np.ndarray) -> np.ndarray:
    scores = TemperatureLogitsWarper(sampling.temperature)(None, torch.tensor(logits)[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores[0].numpy() > -np.inf


@given(
    samplings.filter(lambda s: 0.1 <= s.temperature <= 10),
    st.lists(st.permutations(range(VOCAB)), min_size=BATCH, max_size=BATCH),
    st.floats(0.01, 3.0),
)
@settings(deadline=None, max_examples=150)
def test_filters_equal_hf(sampling, orders, spread):
    logits = np.array(orders, np.float32) * np.float32(spread)  # no ties
    for row, found in zip(logits, filtered(sampling, logits), strict=True):
        narrow, wide = (kept_by_sorting(sampling, row, s) for s in (-SLACK, SLACK))
        assume((narrow == wide).all())  # no token stands on a threshold
        assert ((found > -np.inf) == kept_by_hf(sampling, row)).all()


# --- directed -------------------------------------------------------------------------------


def kept_ids(logits: list[float], **knobs) -> list[int]:
    sampling = jl.Sampling(**{"temperature": 1.0, **knobs})
    return np.flatnonzero(filtered(sampling, np.array([logits], np.float32))[0] > -np.inf).tolist()


LOG = np.log([0.4, 0.3, 0.2, 0.1]).tolist()


@pytest.mark.parametrize(
    ("logits", "knobs", "expected"),
    [
        (LOG, {}, [0, 1, 2, 3]),
        (LOG, {"top_k": 2}, [0, 1]),
        (LOG, {"top_k": 99}, [0, 1, 2, 3]),
        (LOG, {"top_p": 0.6}, [0, 1]),
        (LOG, {"top_p": 0.39}, [0]),
        (LOG, {"top_p": 1e-50}, [0]),  # zero in float32
        (LOG, {"top_p": 0.95}, [0, 1, 2, 3]),
        (LOG, {"min_p": 0.6}, [0, 1]),
        (LOG, {"min_p": 1.0}, [0]),
        (LOG, {"top_k": 2, "top_p": 0.5}, [0]),  # top-p of what top-k left: 4/7 already
        (LOG, {"top_p": 0.6, "min_p": 0.8}, [0]),
        ([0.0, 2.0, 2.0, 1.0], {"top_k": 1}, [1, 2]),  # ties
        ([0.0, 2.0, 2.0, 1.0], {"top_p": 0.1}, [1, 2]),
        ([0.0, 2.0, 2.0, 1.0], {"min_p": 1.0}, [1, 2]),
        ([-0.0, 0.0, -1.0, -2.0], {"top_k": 1}, [0, 1]),
        ([1.0, np.nextafter(np.float32(1), 2), -5.0, 0.0], {"top_k": 1}, [1]),  # one bit apart
        ([-1.0, np.nextafter(np.float32(-1), 0), -5.0, -9.0], {"top_k": 1}, [1]),
        ([-np.inf, 1.0, -np.inf, 0.0], {}, [1, 3]),
        ([-np.inf, 1.0, -np.inf, 0.0], {"top_p": 0.99}, [1, 3]),
        ([-100.0, -100.0, -100.0, 100.0], {"top_p": 1.0}, [0, 1, 2, 3]),  # not cut by rounding
        ([1e30, -1e30, 0.0, 1e29], {"top_p": 0.5}, [0]),
        (LOG, {"temperature": 1e6, "top_p": 0.7}, [0, 1, 2]),
    ],
)
def test_what_is_kept(logits, knobs, expected):
    assert kept_ids(logits, **knobs) == expected


DISTINCT = np.array([[3, 1, 4, 0, 5, 9, 2, 6, 8, 7], [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]], np.float32)


@pytest.mark.parametrize("verify", SCHEMES)
@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 1e-5},
        {"temperature": 1e-30},
        {"temperature": 1e-45},  # the smallest float32 there is
        {"temperature": 1e-300},  # zero in float32
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-6},
        {"temperature": 2.0, "top_p": 1e-300},
        {"temperature": 2.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_limits_are_greedy(knobs, verify):
    sampler = make_sampler(jl.Sampling(**knobs, verify=verify), range(BATCH))
    drafts = np.array([[5, 3, 5], [2, 2, 8]], np.int32)
    for scale in (0.01, 1.0, 1e4):
        logits = DISTINCT * np.float32(scale)
        greedy = select_jit(None, logits, np.zeros(BATCH, np.int32))
        assert greedy.tolist() == [5, 1]
        for position in range(5):
            positions = np.full(BATCH, position, np.int32)
            assert select_jit(sampler, logits, positions).tolist() == greedy.tolist()
            assert select_jit(sampler, logits, positions, drafts).tolist() == greedy.tolist()


def test_greedy_ties_go_to_the_lowest_id():
    logits = jnp.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert select_with(None, logits, jnp.zeros(2, jnp.int32)).tolist() == [1, 0]


# --- draws ----------------------------------------------------------------------------------

NUM_DRAWS = 20_480


def draws(sampling: jl.Sampling, logits: np.ndarray, row_ids, positions, drafts=()) -> np.ndarray:
    """`[NUM_DRAWS]`, all from the same logits `[V]`, with the same drafts to follow."""
    row_ids, positions = (np.broadcast_to(x, NUM_DRAWS) for x in (row_ids, positions))
    tiled = np.broadcast_to(logits, (NUM_DRAWS, len(logits)))
    drafts = np.broadcast_to(np.array(drafts, np.int32), (NUM_DRAWS, len(drafts)))
    sampler = make_sampler(sampling, row_ids)
    return np.asarray(select_jit(sampler, tiled, positions.astype(np.int32), drafts))


@pytest.mark.parametrize(
    "sampling",
    [
        jl.Sampling(temperature=1.0, seed=1),
        jl.Sampling(temperature=0.7, top_k=5, seed=2),
        jl.Sampling(temperature=1.3, top_p=0.8, seed=3),
        jl.Sampling(temperature=1.0, top_k=8, top_p=0.95, min_p=0.1, seed=4),
    ],
    ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}",
)
@pytest.mark.parametrize("along", ["positions", "row_ids"])
@pytest.mark.parametrize(
    "verify, drafts", [("coupled", []), ("residual", []), ("residual", [6, 2, 6, 0, 2, 9])], ids=str
)
def test_draws_follow_the_filtered_softmax(sampling, along, verify, drafts):
    sampling = dataclasses.replace(sampling, verify=verify)
    logits = np.random.default_rng(7).normal(size=VOCAB).astype(np.float32)
    ids = {"row_ids": 3, "positions": 17, along: np.arange(NUM_DRAWS)}
    counts = np.bincount(draws(sampling, logits, drafts=drafts, **ids), minlength=VOCAB)
    kept = kept_by_sorting(sampling, logits, 0.0)
    expected = softmax(np.where(kept, logits / np.float32(sampling.temperature), -np.inf))
    assert counts[~kept].sum() == 0
    test = scipy.stats.chisquare(counts[kept], NUM_DRAWS * expected[kept])
    assert test.pvalue > 1e-4


def test_coupled_draws_never_look_at_drafts():
    sampling, logits = jl.Sampling(temperature=1.0), np.zeros(VOCAB, np.float32)
    alone, beside = (draws(sampling, logits, 0, np.arange(NUM_DRAWS), d) for d in ([], [3, 1, 3]))
    assert (alone == beside).all()


@pytest.mark.parametrize("verify", SCHEMES)
def test_draws_at_neighbouring_positions_are_independent(verify):
    sampling = jl.Sampling(temperature=1.0, seed=5, verify=verify)
    found = draws(sampling, np.zeros(4, np.float32), 0, np.arange(NUM_DRAWS), [2, 0])
    pairs = np.bincount(4 * found[:-1:2] + found[1::2], minlength=16)
    assert scipy.stats.chisquare(pairs).pvalue > 1e-4


@given(
    st.permutations(range(6)),
    st.lists(st.integers(0, 2**31 - 1), min_size=6, max_size=6),
    st.lists(st.integers(0, 2**20), min_size=6, max_size=6),
    st.integers(0, 2**32 - 1),
    st.sampled_from(SCHEMES),
)
@settings(deadline=None, max_examples=50)
def test_a_draw_is_the_same_in_any_slot_and_company(order, row_ids, positions, seed, verify):
    sampling = jl.Sampling(temperature=1.0, top_k=6, seed=seed, verify=verify)
    order = np.array(order)
    row_ids, positions = np.array(row_ids), np.array(positions, np.int32)
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(6, VOCAB)).astype(np.float32)
    drafts = rng.integers(0, VOCAB, (6, 3)).astype(np.int32)
    found = np.asarray(select_jit(make_sampler(sampling, row_ids), logits, positions, drafts))
    args = (logits[order], positions[order], drafts[order])
    moved = select_jit(make_sampler(sampling, row_ids[order]), *args)
    assert (np.asarray(moved) == found[order]).all()
    # Other company: every slot but the first changes.
    others = np.where(np.arange(6) == 0, row_ids, row_ids // 2)
    args = (logits[[0, 2, 3, 4, 5, 1]], positions, drafts[[0, 5, 4, 3, 2, 1]])
    company = select_jit(make_sampler(sampling, others), *args)
    assert int(company[0]) == found[0]


@pytest.mark.parametrize("verify", SCHEMES)
@pytest.mark.parametrize("change", [{"seed": 1}, {"row_ids": 1}, {"start": 1}], ids=str)
def test_a_draw_depends_on_seed_row_and_position(change, verify):
    def run(seed=0, row_ids=0, start=0):
        sampling = jl.Sampling(temperature=1.0, seed=seed, verify=verify)
        positions = np.arange(NUM_DRAWS) + start
        return draws(sampling, np.zeros(VOCAB, np.float32), row_ids, positions, [4, 4, 1])

    first = run()
    assert (first == run()).all()
    share_equal = (first == run(**change)).mean()
    assert abs(share_equal - 1 / VOCAB) < 0.02  # as independent draws would
