"""The law of sampled text: three tokens of a Markov chain, counted against their enumeration.

Proved here, for both schemes, with drafts from lookahead and from prompt lookup, some of them
accepted:
- the joint law of three tokens is the filtered target's, token by token, over a grid of
  temperature, top-k, top-p, candidates G and n-gram N: a chi-square test against all 512 texts
  in float64, on one independent draw per batch row;
- what the filters exclude is never emitted;
- a tiny temperature is greedy decoding.
The seeds are fixed: a failure is a change of the code, not bad luck.
"""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from models import TableModel, plain

import jlookahead as jl

pytestmark = pytest.mark.optimized  # they run longer than they compile

VOCAB, BATCH, NUM_NEW = 8, 4096, 3
MODEL = TableModel(VOCAB)
TABLE = (1.5 * np.random.default_rng(11).normal(size=(VOCAB, VOCAB))).astype(np.float32)
# The last token has occurred before, with several successors: there are drafts from the start.
PROMPT = [1, 5, 0, 3, 1, 5, 1, 5, 2, 1, 5]
SMALLEST_PVALUE = 1e-4
KNOBS = list(itertools.product((0.7, 1.0, 1.3), (0, 3), (1.0, 0.8)))
SHAPES = list(itertools.product((1, 4), (2, 4)))  # G, N
SCHEMES = ("coupled", "residual")


def filtered_law(logits: np.ndarray, sampling: jl.Sampling) -> np.ndarray:
    """`[V]` float64, by sorting; no two tokens tie."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled)[: sampling.top_k or VOCAB]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    # A token stays if those before it do not suffice.
    kept = np.cumsum(weights) - weights < sampling.top_p
    law = np.zeros(VOCAB)
    law[order[kept]] = weights[kept] / weights[kept].sum()
    return law


@functools.lru_cache
def text_law(sampling: jl.Sampling) -> np.ndarray:
    """`[V ** 3]`, of the texts in lexicographic order."""
    step = np.stack([filtered_law(row, sampling) for row in TABLE])
    return np.einsum("a,ab,bc->abc", step[PROMPT[-1]], step, step).ravel()


def sample(strategy, sampling: jl.Sampling) -> tuple[np.ndarray, int]:
    """How often each text came, `[V ** 3]`, and the rounds of all rows together."""
    cfg = jl.Config(strategy=strategy, sampling=sampling, max_new_tokens=NUM_NEW)
    out = jl.generate(jnp.asarray(TABLE), [PROMPT] * BATCH, cfg, model=MODEL)
    index = np.array(out.tokens) @ VOCAB ** np.arange(NUM_NEW)[::-1]
    return np.bincount(index, minlength=VOCAB**NUM_NEW), sum(out.num_rounds)


def pvalue(counts: np.ndarray, law: np.ndarray) -> float:
    assert counts[law == 0].sum() == 0
    expected = counts.sum() * law
    # Rare texts are counted together, as the approximation wants at least 5 of each.
    is_rare = expected < 5
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    found = np.append(counts[~is_rare], counts[is_rare].sum())
    if expected[-1] < 5:
        expected[-2:], found[-2:] = (expected[-2:].sum(), 0), (found[-2:].sum(), 0)
    counted = expected > 0
    return scipy.stats.chisquare(found[counted], expected[counted], sum_check=False).pvalue


def check(strategy, scheme: str, knobs: list[tuple[float, int, float]], first_seed: int) -> None:
    """Every cell on its own, then all of them together, which a small bias would show in."""
    total, pvalues = 0, []
    for cell, (temperature, top_k, top_p) in enumerate(knobs):
        sampling = jl.Sampling(temperature, top_k, top_p, seed=first_seed + cell, verify=scheme)
        counts, num_rounds = sample(strategy, sampling)
        pvalues.append(pvalue(counts, text_law(sampling)))
        assert BATCH <= num_rounds < NUM_NEW * BATCH  # drafts were accepted
        total += counts.sum()
    assert total == BATCH * len(knobs)
    assert min(pvalues) > SMALLEST_PVALUE
    assert scipy.stats.combine_pvalues(pvalues).pvalue > SMALLEST_PVALUE


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"G{s[0]}-N{s[1]}")
def test_lookahead_has_the_target_s_law(scheme, shape):
    candidates, ngram = shape
    strategy = jl.Lookahead(2, ngram, candidates, pool_capacity=VOCAB)
    # 12 cells of 4 shapes: 196,608 draws a scheme.
    check(strategy, scheme, KNOBS, first_seed=1000 * candidates + 100 * ngram)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompt_lookup_has_the_target_s_law(scheme):
    strategy = jl.PromptLookup(num_draft_tokens=3, candidates=3)
    # 24,576 draws more.
    check(strategy, scheme, KNOBS[::2], first_seed=50)


def test_draws_are_enough():
    per_scheme = BATCH * (len(KNOBS) * len(SHAPES) + len(KNOBS[::2]))
    assert per_scheme >= 200_000


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("strategy", [jl.Lookahead(2, 3, 3), jl.PromptLookup()], ids=type)
def test_a_tiny_temperature_is_greedy(scheme, strategy):
    cfg = jl.Config(strategy=strategy, max_new_tokens=40)
    prompts = [PROMPT, [3], [7, 2]]
    expected = plain(jnp.asarray(TABLE), prompts, cfg, model=MODEL).tokens
    sampling = jl.Sampling(temperature=1e-5, seed=3, verify=scheme)
    cold = jl.Config(strategy=strategy, sampling=sampling, max_new_tokens=40)
    assert jl.generate(jnp.asarray(TABLE), prompts, cold, model=MODEL).tokens == expected
