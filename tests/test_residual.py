"""The residual scheme: drafts tested one by one, each with the mass that the rejected leave.

Proved here:
- the worked example with three distinct tokens, a repeated draft among them, in closed form;
- for any law and any drafts, the law of the emitted token is the target's. It is no estimate:
  `jax.random.uniform` draws multiples of 2^-23, so the acceptance probability of a draft is found
  exactly, by bisection over its uniform, and the law follows from those;
- drafts that cover the whole support never leave an empty residual, and excluded drafts are
  never accepted;
- after an acceptance only drafts that share it survive, and those are the next ones tested;
- the recorded sampling runs of the official implementation (`jacobi_sample_multilevel`): fed its
  uniforms, `verify` accepts and rejects what it did in the order it did, with the same
  probabilities, and hands the same residual law to the final draw.
"""

from __future__ import annotations

import functools

import checkpoints as files
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import float64_logits

import jlookahead as jl
from jlookahead.forest import chain_parents
from jlookahead.layout import build_layout
from jlookahead.sampling import Sampler, filter_logits, try_drafts
from jlookahead.state import POOL, Draft
from jlookahead.verify import verify

UNIFORM_BITS = 23  # of the draws of `jax.random.uniform` in float32
ROUNDING = 2e-6  # of sums in float32, and of 1 / 2^23 per draft

try_jit = jax.jit(try_drafts)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@jax.jit
def accept_thresholds(logits, drafts, eligible):
    """`[R]`: of the 2^23 uniforms, how many accept each draft once those before are rejected."""

    def accepts(draft, step):
        # A uniform that is not a number accepts nothing.
        others = jnp.full(drafts.shape, jnp.nan)
        uniforms = others.at[draft].set(step / jnp.float32(2**UNIFORM_BITS))
        return try_drafts(logits, drafts, eligible, uniforms)[0] == drafts[draft]

    def threshold(draft):
        def halve(_, bounds):
            low, high = bounds  # accepts below low; does not at high
            middle = (low + high) // 2
            is_accepted = accepts(draft, middle)
            return jnp.where(is_accepted, middle + 1, low), jnp.where(is_accepted, high, middle)

        low, _ = jax.lax.fori_loop(0, UNIFORM_BITS + 1, halve, (0, 2**UNIFORM_BITS))
        return low

    return jax.vmap(threshold)(jnp.arange(len(drafts)))


def accept_probabilities(logits, drafts, eligible) -> np.ndarray:
    return np.asarray(accept_thresholds(logits, drafts, eligible), np.float64) / 2**UNIFORM_BITS


def residual_logits(logits, drafts, eligible) -> np.ndarray:
    return np.asarray(try_jit(logits, drafts, eligible, np.full(len(drafts), np.nan))[1])


def emitted_law(logits: np.ndarray, drafts: np.ndarray, eligible: np.ndarray) -> np.ndarray:
    """`[V]` float64, the law of the token that is accepted, or else drawn from the residual."""
    law, reaches = np.zeros(len(logits)), 1.0
    for token, p in zip(drafts, accept_probabilities(logits, drafts, eligible), strict=True):
        law[token] += reaches * p
        reaches *= 1 - p
    if reaches > 0:
        rest = residual_logits(logits, drafts, eligible)
        assert (rest > -np.inf).any(), "all rejected, and nothing left to draw"
        law += reaches * softmax(rest)
    return law


# --- the worked example ---------------------------------------------------------------------

A, B, C, D = range(4)
TARGET = np.array([0.2, 0.3, 0.1, 0.4])
LOGITS = np.log(TARGET).astype(np.float32)


def test_worked_example():
    drafts, eligible = np.array([A, A, B], np.int32), np.ones(3, bool)
    # The second A is skipped; B has 0.3 of the 0.8 that A leaves.
    found = accept_probabilities(LOGITS, drafts, eligible)
    np.testing.assert_allclose(found, [0.2, 0.0, 0.375], atol=ROUNDING)
    rest = residual_logits(LOGITS, drafts, eligible)
    assert (rest[[A, B]] == -np.inf).all()
    np.testing.assert_allclose(softmax(rest), [0.0, 0.0, 0.2, 0.8], atol=ROUNDING)
    np.testing.assert_allclose(emitted_law(LOGITS, drafts, eligible), TARGET, atol=ROUNDING)


@pytest.mark.parametrize(
    "uniforms, accepted",
    [
        ([0.19, 0.99, 0.99], A),
        ([0.21, 0.00, 0.37], B),  # a second test of A would have accepted at once
        ([0.21, 0.00, 0.38], -1),
        ([0.00, 0.00, 0.00], A),  # the first to accept
    ],
)
def test_worked_example_in_numbers(uniforms, accepted):
    drafts, eligible = np.array([A, A, B], np.int32), np.ones(3, bool)
    found, _ = try_jit(LOGITS, drafts, eligible, np.array(uniforms, np.float32))
    assert int(found) == accepted


def test_only_drafts_that_share_the_accepted_token_survive():
    layout = build_layout(num_drafts=6, max_accepted=2)
    draft = draft_of([[A, C], [A, D], [B, D]], num_chains=3)
    eligible_at: list[list[int]] = []

    def choose(logits, emitted, depth, eligible):
        # Depth 0 accepts its first test. Depth 1 rejects C, then accepts D.
        uniforms = jnp.where(depth == 0, jnp.zeros(6), jnp.array([9, 0.99, 9, 0, 9, 0.0]))
        accepted, _ = try_drafts(logits[0], draft.tokens[0], eligible[0], uniforms)
        jax.debug.callback(
            lambda e: eligible_at.append(np.flatnonzero(e).tolist()), eligible[0], ordered=True
        )
        return accepted[None]

    logits = jnp.broadcast_to(LOGITS, (1, 7, 4))
    # After [A, D] nothing is eligible, nothing is accepted, and the token is -1.
    verdict = verify(logits, draft, layout, choose)
    jax.effects_barrier()
    assert eligible_at == [[0, 2, 4], [1, 3], []]
    assert verdict.emitted.tolist() == [[A, D, -1]]
    assert verdict.winner.tolist() == [3]


# --- any law, any drafts --------------------------------------------------------------------

VOCAB, NUM_DRAFTS = 6, 7


def arrays_of(values: tuple[list[float], list[int], list[bool]]):
    logits, drafts, eligible = values
    return np.array(logits, np.float32), np.array(drafts, np.int32), np.array(eligible)


# Probabilities down to 1e-26, ties, and excluded tokens.
logit = st.floats(-60, 0, width=32) | st.sampled_from([0.0, -1.0, -np.inf])
laws = st.lists(logit, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -np.inf)
draft_rows = st.lists(st.integers(0, VOCAB - 1), min_size=NUM_DRAFTS, max_size=NUM_DRAFTS)
eligible_rows = st.lists(st.booleans(), min_size=NUM_DRAFTS, max_size=NUM_DRAFTS)


@given(st.tuples(laws, draft_rows, eligible_rows).map(arrays_of))
@settings(deadline=None, max_examples=400)
def test_the_law_is_the_target_s(case):
    logits, drafts, eligible = case
    np.testing.assert_allclose(emitted_law(*case), softmax(logits), rtol=0, atol=ROUNDING)
    rest = residual_logits(*case)
    tried = np.isin(np.arange(VOCAB), drafts[eligible])
    np.testing.assert_array_equal(rest, np.where(tried, -np.inf, logits))


@given(
    st.tuples(laws, draft_rows, eligible_rows).map(arrays_of),
    st.lists(st.sampled_from([0.0, 0.5, 1 - 2.0**-UNIFORM_BITS]), min_size=7, max_size=7),
)
@settings(deadline=None, max_examples=300)
def test_excluded_and_ineligible_drafts_are_never_accepted(case, uniforms):
    logits, drafts, eligible = case
    accepted, _ = try_jit(*case, np.array(uniforms, np.float32))
    allowed = drafts[eligible & (logits[drafts] > -np.inf)]
    assert int(accepted) == -1 or int(accepted) in allowed


@given(laws, st.permutations(range(VOCAB)), st.integers(0, VOCAB - 1), st.integers(0, VOCAB))
@settings(deadline=None, max_examples=300)
def test_drafts_with_all_the_mass_leave_no_residual(row, order, repeated, at):
    """However the sums round: with the largest uniform there is, the last one is accepted."""
    drafts = np.array(order[:at] + [repeated] + order[at:], np.int32)
    logits, eligible = np.array(row, np.float32), np.ones(NUM_DRAFTS, bool)
    largest = np.full(NUM_DRAFTS, 1 - 2.0**-UNIFORM_BITS, np.float32)
    accepted, _ = try_jit(logits, drafts, eligible, largest)
    assert logits[int(accepted)] > -np.inf and int(accepted) >= 0


def test_without_drafts_the_law_is_untouched():
    none = np.zeros(0, np.int32)
    accepted, rest = try_drafts(jnp.asarray(LOGITS), none, none.astype(bool), none)
    assert int(accepted) == -1
    np.testing.assert_array_equal(rest, LOGITS)


# --- the official runs ----------------------------------------------------------------------

# Of a logit in float32, against float64. Measured: at most 2.7e-6 here, 2.9e-6 in PyTorch, whose
# logits were recorded; 0.4e-6 is the root mean square of both.
FLOAT32_ERROR = 4e-6
FIVE_DECIMALS = 5e-6  # the rounding of recorded logits
LOGIT_NOISE = 2e-6  # between two float32 networks; three times the root mean square
RUNS = golden.recordings("tiny_sample")
VOCAB_TINY = 128


def draft_of(candidates: list[list[int]], num_chains: int) -> Draft:
    """Chains for the candidates, the rest of `num_chains` not valid."""
    size = len(candidates[0])
    tokens = np.zeros((num_chains, size), np.int32)
    tokens[: len(candidates)] = candidates
    valid = np.repeat(np.arange(num_chains) < len(candidates), size)
    return Draft(
        tokens=jnp.asarray(tokens).reshape(1, -1),
        valid=jnp.asarray(valid)[None],
        source=jnp.full((1, tokens.size), POOL, jnp.int8),
        parents=jnp.asarray(chain_parents(num_chains, size))[None],
    )


class Recording:
    """A run, with the conditionals of its text from one forward pass of our network."""

    def __init__(self, path):
        self.run = golden.read(path)
        config, warpers = self.run["config"], self.run["warpers"]
        self.size, self.num_chains = config["LEVEL"] - 1, config["GUESS_SET_SIZE"]
        # Logits off by e move a probability p by at most 2 e p (1 - p).
        self.tolerance = LOGIT_NOISE / warpers["temperature"] / 2
        lm = jl.load(golden.GOLDEN / "tiny_model")
        text = np.array(self.run["final_ids"], np.int32)
        self.logits = files.logits(lm.params, lm.config, text[None])[0]
        self.exact_logits = float64_logits(lm.params, lm.config, text)
        sampler = Sampler(
            temperature=jnp.float32(warpers["temperature"]),
            top_k=jnp.int32(warpers["top_k"]),
            top_p=jnp.float32(warpers["top_p"]),
            min_p=jnp.float32(0),
            seed=jnp.uint32(0),
            row_ids=jnp.zeros(1, jnp.int32),
            verify="residual",
        )
        self.filtered = np.asarray(filter_logits(sampler, jnp.asarray(self.logits)))


@pytest.fixture(scope="module", params=RUNS, ids=lambda path: path.name[:-8])
def recording(request) -> Recording:
    return Recording(request.param)


def events_at(step: dict, depth: int) -> list[dict]:
    return [e for e in step["events"] if e["e"] == "u" and e["depth"] == depth]


def final_draw(step: dict) -> dict | None:
    last = step["events"][-1]
    return last if last["e"] == "multinomial" else None


def test_runs_are_recorded():
    steps = [step for path in RUNS for step in golden.read(path)["steps"]]
    tests = [event for step in steps for event in step["events"] if event["e"] == "u"]
    assert (len(RUNS), len(steps), len(tests)) == (2, 160, 580)
    assert sum(event["accepted"] for event in tests) == 222
    assert sum(event["p"] == 0 for event in tests) > 50  # repeats, and what the filters exclude


def test_conditionals_are_the_recorded_ones(recording):
    """Those in float64 are near ours, and near the recorded ones as far as these have decimals.

    Each float32 network has an error of its own, so that they are not compared with one another.
    """
    exact = recording.exact_logits
    np.testing.assert_allclose(recording.logits, exact, rtol=0, atol=FLOAT32_ERROR)
    bound = FLOAT32_ERROR + FIVE_DECIMALS
    for step in recording.run["steps"]:
        expected = exact[step["seq_len_before"] - 1]
        np.testing.assert_allclose(step["out_logits"], expected, rtol=0, atol=bound)


def test_every_law_is_the_recorded_one(recording):
    """Depth by depth: who is tested, with which probability, and what is left in the end."""
    for step in recording.run["steps"]:
        candidates = np.array(step["cands"] or np.zeros((0, recording.size)), np.int32)
        padded = np.zeros((recording.num_chains, recording.size), np.int32)
        padded[: len(candidates)] = candidates
        emitted, draw = step["emitted"], final_draw(step)
        for depth in range(min(len(emitted), recording.size)):
            alive = np.zeros(recording.num_chains, bool)
            alive[: len(candidates)] = (candidates[:, :depth] == emitted[:depth]).all(axis=1)
            logits = recording.filtered[step["seq_len_before"] - 1 + depth]
            case = (logits, padded[:, depth], alive)
            events = events_at(step, depth)
            tested = [event["cand"] for event in events]
            assert tested == np.flatnonzero(alive)[: len(tested)].tolist()
            assert [event["token"] for event in events] == padded[tested, depth].tolist()
            found = accept_probabilities(*case)[tested]
            recorded = [event["p"] for event in events]
            np.testing.assert_allclose(found, recorded, rtol=0, atol=recording.tolerance)
            if depth + 1 == len(emitted) and draw is not None:
                assert len(tested) == alive.sum()  # all were rejected
                law = np.zeros(VOCAB_TINY)
                for token, probability in draw["probs"].items():
                    law[int(token)] = probability
                ours = softmax(residual_logits(*case))
                np.testing.assert_allclose(ours, law, rtol=0, atol=recording.tolerance)
                assert ours[draw["token"]] > 0


@functools.lru_cache
def replaying(size: int, num_chains: int):
    """One round's verification in reference mode, with the uniforms and the final draw given."""
    layout = build_layout(num_drafts=size * num_chains, max_accepted=size - 1)

    def run(logits, draft, uniforms, drawn):
        def choose(logits, emitted, depth, eligible):
            accepted, rest = try_drafts(logits[0], draft.tokens[0], eligible[0], uniforms[depth])
            return jnp.where(accepted >= 0, accepted, drawn)[None]

        return verify(logits, draft, layout, choose)

    return jax.jit(run)


def test_every_round_accepts_what_was_accepted(recording):
    size, num_chains = recording.size, recording.num_chains
    num_accepted = 0
    for step in recording.run["steps"]:
        if not step["cands"]:
            continue
        draft, emitted = draft_of(step["cands"], num_chains), step["emitted"]
        # What the official code did not draw, and conditionals it did not read, are no numbers.
        uniforms = np.full((size, num_chains * size), np.nan, np.float32)
        for event in step["events"]:
            if event["e"] == "u":
                uniforms[event["depth"], event["cand"] * size + event["depth"]] = event["u"]
        logits = np.full((1, 1 + num_chains * size, VOCAB_TINY), np.nan, np.float32)
        first = step["seq_len_before"] - 1
        logits[0, 0] = recording.filtered[first]
        for c, candidate in enumerate(step["cands"]):
            for depth in range(1, len(emitted)):
                if candidate[:depth] == emitted[:depth]:
                    logits[0, c * size + depth] = recording.filtered[first + depth]
        draw = final_draw(step)
        drawn = -1 if draw is None else draw["token"]
        verdict = replaying(size, num_chains)(logits, draft, uniforms, drawn)
        assert verdict.emitted[0, : len(emitted)].tolist() == emitted
        assert int(verdict.num_accepted[0]) == len(emitted) - 1
        num_accepted += len(emitted) - 1
    assert num_accepted > 0
