"""`Auto` with the rounds of another strategy, where many rows cost little.

What rounds cost is given: speed is tokens per unit of cost, plain decoding being 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FLAT_COSTS, TINY, WIDE_AUTOS, SuccessorTable, plain, tiny_params

import jlookahead as jl
from jlookahead import acceptance
from jlookahead.call import prepare
from jlookahead.decoding import start
from jlookahead.state import LOOKUP

RECYCLING, LOOKAHEAD = WIDE_AUTOS
NAMES = ["recycling", "lookahead"]
WIDE = len(FLAT_COSTS) - 1  # the kind of round
LAP, NOISE_VOCAB = 20, 512


@dataclasses.dataclass(frozen=True)
class Turning:
    """Noise, but for laps over few tokens between two positions, the parameters."""

    vocab_size: int = NOISE_VOCAB
    max_position_embeddings: int = 4096

    def init_cache(self, batch, num_slots):
        return jl.KVCache(keys=(), values=())

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        is_lap = (positions >= params[0]) & (positions < params[1])
        return jnp.where(is_lap, (tokens + 1) % LAP, -1)[..., None], ()

    def logits(self, params, hidden):
        return 30.0 * jax.nn.one_hot(hidden[..., 0], self.vocab_size)


@dataclasses.dataclass(frozen=True)
class Round:
    kind: int
    num_emitted: int
    cost: float


def rounds_of(strategy: jl.Auto, rounds: Iterable) -> list[Round]:
    """What kind of round each was: the least that holds all rows it wanted."""
    taken = []
    for _, info in rounds:
        used = np.asarray(info.draft.valid | info.draft.wanted)[0]
        num_used = int((used * np.arange(1, len(used) + 1)).max())
        kind = int(np.searchsorted(strategy.layout.draft_sizes, num_used))
        taken.append(Round(kind, int(info.num_emitted[0]), strategy.costs[kind][1]))
    return taken


def turning_rounds(strategy: jl.Auto, first: int, end: int, num_new: int) -> list[Round]:
    prompt = np.random.default_rng(0).integers(0, NOISE_VOCAB, 50).tolist()
    sampling = jl.Sampling(1.0, seed=3)
    cfg = jl.Config(strategy=strategy, sampling=sampling, max_new_tokens=num_new)
    rounds = jl.iter_rounds(jnp.array([first, end]), prompt, cfg, model=Turning())
    return rounds_of(strategy, rounds)


def speed(rounds: list[Round]) -> float:
    return sum(r.num_emitted for r in rounds) / sum(r.cost for r in rounds)


def split(rounds: list[Round], num_tokens: int) -> tuple[list[Round], list[Round]]:
    """The rounds that emit the first tokens, and the others."""
    emitted = np.cumsum([r.num_emitted for r in rounds])
    first = int(np.searchsorted(emitted, num_tokens))
    return rounds[:first], rounds[first:]


# The text


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [(RECYCLING, jl.Sampling(0.2, seed=2)), (LOOKAHEAD, jl.Sampling())],
    ids=NAMES,
)
def test_equals_plain_decoding(strategy, sampling):
    prompts = [[1, 2, 3] * 5, [4], [5, 6] * 9]
    cfg = jl.Config(model=TINY, strategy=strategy, sampling=sampling, max_new_tokens=80)
    out = jl.generate(tiny_params(4), prompts, cfg)
    assert out.tokens == plain(tiny_params(4), prompts, cfg).tokens
    assert sum(out.num_rounds) < 160
    sources = {source for row in out.sources for source in row}
    assert sources == {"plain", "bonus", "lookup", "recycled" if strategy is RECYCLING else "pool"}


def test_a_session_hands_the_memory_on():
    params, prompt = tiny_params(0), [1, 2, 3, 4, 1, 2]
    cfg = jl.Config(model=TINY, strategy=RECYCLING, max_new_tokens=20)
    session = jl.Session(params, cfg)
    first = session.generate(prompt)
    longer = [*prompt, *first.tokens, 7, 8]
    assert session.generate(longer).tokens == plain(params, longer, cfg).tokens
    assert session.num_reused > len(prompt)


# Speed


@pytest.mark.parametrize("strategy", WIDE_AUTOS, ids=NAMES)
def test_what_is_never_right_costs_next_to_nothing(strategy):
    rounds = turning_rounds(strategy, 0, 0, 150)
    assert {r.kind for r in rounds} >= {0, WIDE}, "it must be tried"
    assert 0.97 < speed(rounds) < 1


@pytest.mark.parametrize("strategy", WIDE_AUTOS, ids=NAMES)
def test_what_is_always_right_pays_at_once(strategy):
    text = [*range(30)] * 8
    cfg = jl.Config(strategy=strategy, max_new_tokens=180)
    table = jnp.roll(jnp.arange(30), -1)
    rounds = jl.iter_rounds(table, text[:60], cfg, model=SuccessorTable(30))
    longest_rate = max(rows / cost for rows, cost in FLAT_COSTS[:WIDE])
    assert speed(rounds_of(strategy, rounds)) > 0.9 * longest_rate


@pytest.mark.parametrize("strategy", WIDE_AUTOS, ids=NAMES)
def test_a_text_that_turns_is_followed(strategy):
    """From noise to laps and back: soon every round is as it would have been from the start."""
    rounds = turning_rounds(strategy, 150, 900, 1050)
    noise, others = split(rounds, 150 - 50)
    laps, noise_again = split(others, 900 - 150)
    assert speed(noise) > 0.97
    assert speed(laps[30:]) > 7, "at most 8 tokens a round of lookup"
    assert speed(noise_again[50:]) > 0.97


def test_it_is_about_as_fast_as_the_best_of_what_it_holds():
    lm = jl.load()
    costs = ((1, 1.0), (8, 1.02), (32, 1.08), (64, 1.15))
    prompts = ("def read_file(path):\n", "class Node:\n    def __init__(self", "import os\n")

    def config(strategy):
        return lm.make_config(strategy=strategy, max_new_tokens=80)

    def speed_of(strategy, cost):
        outs = [
            jl.generate(lm.params, p, config(strategy), tokenizer=lm.tokenizer) for p in prompts
        ]
        return sum(len(out.tokens) for out in outs) / sum(cost * out.num_rounds for out in outs)

    auto = jl.Auto(costs, jl.Recycling(64))
    rounds = [
        taken
        for prompt in prompts
        for taken in rounds_of(
            auto, jl.iter_rounds(lm.params, prompt, config(auto), tokenizer=lm.tokenizer)
        )
    ]
    assert speed(rounds) > 0.95 * speed_of(auto.wide, 1.15)
    assert speed(rounds) > 0.95 * speed_of(jl.PromptLookup(num_draft_tokens=7), 1.02)


# Rounds


@pytest.mark.parametrize("strategy", WIDE_AUTOS, ids=NAMES)
def test_rounds_compute_the_rows_that_costs_name(strategy):
    layout = strategy.layout
    num_rows = [layout.of_size(size).num_rows for size in layout.draft_sizes]
    assert num_rows == [rows for rows, _ in FLAT_COSTS]


@pytest.mark.parametrize("strategy", WIDE_AUTOS, ids=NAMES)
def test_the_window_stands_still_in_other_rounds_and_the_memory_learns(strategy):
    prompt = np.random.default_rng(0).integers(0, NOISE_VOCAB, 50).tolist()
    cfg = jl.Config(strategy=strategy, sampling=jl.Sampling(1.0, seed=3), max_new_tokens=40)
    params, model = jnp.array([0, 0]), Turning()
    before = start(prepare(params, prompt, cfg, model=model), params)
    seen = set()
    for after, info in jl.iter_rounds(params, prompt, cfg, model=model):
        (taken,) = rounds_of(strategy, [(after, info)])
        moves = bool((before.window.tokens != after.window.tokens).any())
        seen.add((taken.kind, moves))
        *_, key, first, second, third = after.tokens[0, : after.length[0]].tolist()
        if strategy is LOOKAHEAD:
            assert [first, second, third] in after.pool.lookup(key)
        else:  # logits without a favourite: the lowest ids come first
            assert after.successors[0, before.last_token[0]].tolist() == [*range(8)]
        before = after
    # The model predicts one token for all columns, which the window soon is full of.
    assert seen == {(0, False), (WIDE, False), (WIDE, True)}


@pytest.mark.parametrize("strategy", WIDE_AUTOS, ids=NAMES)
def test_what_the_memory_holds_next_is_what_would_be_drafted_first(strategy):
    params, wide = tiny_params(0), strategy.wide
    prompts = [[1, 2, 3, 4, 1, 5, 6, 7, 1], [5, 6, 7, 8, 5], [7]]
    cfg = jl.Config(model=TINY, strategy=wide)
    state = start(prepare(params, prompts, cfg), params)
    draft, held = wide.propose(state), np.asarray(wide.next_tokens(state))
    from_memory = np.asarray(draft.valid & (draft.parents < 0) & (draft.source != LOOKUP))
    for row in range(3):
        assert set(draft.tokens[row][from_memory[row]].tolist()) <= {*held[row].tolist()}
    assert from_memory.any(axis=1).tolist() == [True, strategy is RECYCLING, False]
    if strategy is RECYCLING:
        assert (held >= 0).sum(axis=1).tolist() == [8, 8, 0]
    else:
        assert [{*row.tolist()} - {-1} for row in held] == [{2, 5}, {6}, set()]


# The record


def test_depths_are_counted_by_the_match_that_a_round_starts_from():
    num_lookups = len(acceptance.RIGHT_AT_FIRST)
    num_classes = len(acceptance.at_first(True))
    counts = acceptance.count_depths(jnp.array([0, 2, 9]), jnp.array([2, 0, 7]), num_classes)
    counts = np.asarray(counts)
    assert not counts[:, :num_lookups].any()
    by_match = counts[:, num_lookups:].reshape(3, *acceptance.HELD_AT_FIRST.shape)
    assert by_match[0].tolist() == [[1, 1, 0, 0, 0], *[[0] * 5] * 3]
    assert not by_match[1].any()
    assert by_match[2].tolist() == [*[[0] * 5] * 3, [1, 1, 1, 1, 3]]


def test_expected_tokens_are_those_of_a_simulation():
    rng = np.random.default_rng(0)
    chances = acceptance.at_first(True)[None]
    for match_len, row in ((0, 0), (1, 1), (8, 3)):
        held = acceptance.HELD_AT_FIRST[row][np.minimum(np.arange(12), 4)]
        accepted = np.cumprod(rng.random((20_000, 12)) < held, axis=1).sum(axis=1)
        expected = acceptance.tokens_by_everything(jnp.asarray(chances), jnp.array([match_len]), 12)
        assert float(expected[0]) == pytest.approx(1 + accepted.mean(), rel=0.02)


# Bad input


@pytest.mark.parametrize(
    ("costs", "wide", "message"),
    [
        (FLAT_COSTS, jl.PromptLookup(), r"wide: got PromptLookup\("),
        (FLAT_COSTS, jl.Lookahead(4, 4, 4, reference=True), "wide: got Lookahead"),
        (FLAT_COSTS, jl.Recycling(32), "costs: the last must be of the 32 rows"),
        (((1, 1.0), (24, 1.15)), jl.Recycling(24), "costs: got .* must be three pairs or more"),
        (
            ((1, 1.0), (22, 1.1), (24, 1.15)),
            jl.Recycling(24),
            "the last but one of at most 20 rows, as many as wide=",
        ),
    ],
)
def test_costs_must_be_those_of_the_wide_rounds(costs, wide, message):
    with pytest.raises(ValueError, match=message):
        jl.Auto(costs, wide)
