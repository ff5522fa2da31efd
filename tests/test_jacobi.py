"""Jacobi iteration against plain-Python sweeps made of separate causal forward passes.

Proved here:
- the worked operator: Jacobi needs four sweeps, Gauss-Seidel one; this fixes the oracle;
- on random LLaMAs the guesses after every round are those of an oracle sweep, in which every
  coordinate is a forward pass of its own over a plain causal text; after sweep r the first r
  tokens are right, and a block of m tokens takes at most m sweeps;
- the three stop conditions end different things: an accepted prefix is published while its block
  goes on, a converged block gives way to a new one, and EOS or the budget ends the row wherever
  its block stands;
- one round of lookahead: the ordinary row, every trajectory column and every candidate predict
  what separate forward passes over the texts they stand for predict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import TINY, SuccessorTable, plain, tiny_params

import jlookahead as jl
from jlookahead.rounds import compute, pack

# --- oracles --------------------------------------------------------------------------------

# tokens of the block before a coordinate -> that coordinate
Predict = Callable[[list[list[int]]], list[int]]
MAX_TEXTS, MAX_LEN = 24, 64
SMALLEST_GAP = 5e-5  # another summation order may flip an argmax below it


@functools.cache
def causal_program(config: jl.ModelConfig):
    model, index = jl.LlamaModel(config), jnp.arange(MAX_LEN)

    def run(params, tokens):
        positions = jnp.broadcast_to(index, tokens.shape)
        none = jnp.zeros(len(tokens), jnp.int32)
        cache = model.init_cache(len(tokens), 0)
        causal = index[:, None] >= index
        return model.logits(
            params, model.forward(params, tokens, positions, causal, cache, none)[0]
        )

    return jax.jit(run)


def isolated_logits(params, texts: Sequence[list[int]]) -> np.ndarray:
    """`[len(texts), V]` behind every text, each a batch row of its own: no packing, no cache."""
    padded = np.zeros((MAX_TEXTS, MAX_LEN), np.int32)
    for row, text in zip(padded, texts, strict=False):
        row[: len(text)] = text
    logits = np.asarray(causal_program(TINY)(params, padded))
    return np.stack([logits[i, len(text) - 1] for i, text in enumerate(texts)])


def isolated_predictions(params, texts: Sequence[list[int]]) -> list[int]:
    logits = isolated_logits(params, texts)
    second, first = np.sort(logits, axis=1)[:, -2:].T
    assert (first - second).min() > SMALLEST_GAP, "a near tie: take another seed"
    return logits.argmax(axis=1).tolist()


def jacobi_sweep(predict: Predict, block: list[int]) -> list[int]:
    """Every coordinate from the old ones before it."""
    return predict([block[:i] for i in range(len(block))])


def gauss_seidel_sweep(predict: Predict, block: list[int]) -> list[int]:
    """Every coordinate from the new ones before it."""
    new: list[int] = []
    for _ in block:
        new += predict([new])
    return new


# --- the worked operator --------------------------------------------------------------------


def worked_operator(prefixes: list[list[int]]) -> list[int]:
    coordinates = (
        lambda y: 2,
        lambda y: (y[0] + 1) % 10,
        lambda y: (y[0] + y[1]) % 10,
        lambda y: (y[2] + 1) % 10,
    )
    return [coordinates[len(y)](y) for y in prefixes]


def test_worked_operator():
    block, sweeps = [9, 9, 9, 9], []
    while jacobi_sweep(worked_operator, block) != block:
        block = jacobi_sweep(worked_operator, block)
        sweeps.append(block)
    assert sweeps == [[2, 0, 8, 0], [2, 3, 2, 9], [2, 3, 5, 3], [2, 3, 5, 6]]
    assert all(sweep[: r + 1] == block[: r + 1] for r, sweep in enumerate(sweeps))
    assert gauss_seidel_sweep(worked_operator, [9, 9, 9, 9]) == [2, 3, 5, 6]


# --- sweeps of a LLaMA ----------------------------------------------------------------------


def text_of(state: jl.RoundState, row: int = 0) -> list[int]:
    return np.asarray(state.tokens)[row, : int(state.length[row])].tolist()


def last_tokens(text: list[int], size: int) -> list[int]:
    """Where the text is shorter, its first token stands in."""
    return ([text[0]] * size + text)[-size:]


@pytest.mark.parametrize("block_size", [1, 2, 5, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_guesses_are_those_of_oracle_sweeps(seed, block_size):
    params = tiny_params(seed)
    text = [3, 1, 4, 1, 5, 9][: 2 + 4 * seed]
    cfg = jl.Config(model=TINY, strategy=jl.Jacobi(block_size), max_new_tokens=32)
    greedy = text + plain(params, text, cfg).tokens

    begin, guesses = len(text), last_tokens(text, block_size)
    num_sweeps, num_blocks, longest_block = 0, 1, 0
    for state, _ in jl.iter_rounds(params, text, cfg):
        before = greedy[:begin]
        swept = jacobi_sweep(
            lambda prefixes, before=before: isolated_predictions(
                params, [before + prefix for prefix in prefixes]
            ),
            guesses,
        )
        num_sweeps += 1
        right = greedy[begin:][: min(num_sweeps, block_size)]
        assert swept[: len(right)] == right
        published = text_of(state)
        assert published == greedy[: len(published)]
        num_fixed = len(published) - begin
        assert published[begin:][:block_size] == swept[:num_fixed]
        guesses = swept
        if bool(state.done[0]):
            break
        if num_fixed >= block_size:
            # Converged, perhaps with one token more, which the next block begins behind.
            assert num_fixed <= block_size + 1 and num_sweeps <= block_size
            begin, guesses = len(published), last_tokens(published, block_size)
            longest_block = max(longest_block, num_sweeps)
            num_sweeps, num_blocks, num_fixed = 0, num_blocks + 1, 0
        assert int(state.block.remaining[0]) == block_size - num_fixed
        assert int(state.block.num_sweeps[0]) == num_sweeps
        tokens = np.asarray(state.block.tokens)[0, : block_size - num_fixed].tolist()
        assert tokens == guesses[num_fixed:]
    assert published == greedy and num_blocks > 2
    assert longest_block >= min(block_size, 2)


# --- what ends what -------------------------------------------------------------------------

# Token t is followed by t + 1: from a guess that never repeats, every sweep fixes one token.
RISING = jnp.arange(1, 201) % 200
CYCLE = jnp.roll(jnp.arange(5), -1)


def rounds_of(params, prompt, **knobs):
    cfg = jl.Config(strategy=jl.Jacobi(4), **knobs)
    return list(jl.iter_rounds(params, prompt, cfg, model=SuccessorTable(len(params))))


def block_of(state: jl.RoundState, row: int = 0) -> tuple[int, int]:
    return int(state.block.remaining[row]), int(state.block.num_sweeps[row])


def test_the_slowest_block_takes_a_sweep_a_token():
    rounds = rounds_of(RISING, [0], max_new_tokens=12)
    # A prefix is published in every round, though its block is converged only in the fourth.
    assert [text_of(state)[1:] for state, _ in rounds] == [list(range(1, 2 + r)) for r in range(12)]
    assert [block_of(state) for state, _ in rounds] == [(3, 1), (2, 2), (1, 3), (4, 0)] * 3
    assert [bool(state.done[0]) for state, _ in rounds] == [False] * 11 + [True]


def test_a_converged_block_gives_way_to_a_new_one():
    rounds = rounds_of(CYCLE, [0, 1, 2, 3, 4, 0], max_new_tokens=30)
    assert any(block_of(state) == (4, 0) for state, _ in rounds)
    for state, _ in rounds[:-1]:
        remaining, num_sweeps = block_of(state)
        if num_sweeps == 0:
            assert remaining == 4 and not bool(state.done[0])
            assert np.asarray(state.block.tokens)[0].tolist() == text_of(state)[-4:]
    # Period 4: the last four tokens come again, so every sweep converges and earns a bonus.
    cycle = jnp.roll(jnp.arange(4), -1)
    rounds = rounds_of(cycle, [0, 1, 2, 3], max_new_tokens=30)
    assert [int(info.num_emitted[0]) for _, info in rounds] == [5] * 6
    assert [block_of(state) for state, _ in rounds] == [(4, 0)] * 6
    assert [bool(state.done[0]) for state, _ in rounds] == [False] * 5 + [True]


@pytest.mark.parametrize(
    "knobs, reason",
    [({"max_new_tokens": 6}, "length"), ({"max_new_tokens": 50, "eos_token_ids": (6,)}, "eos")],
)
def test_a_row_ends_inside_its_block(knobs, reason):
    rounds = rounds_of(RISING, [0], **knobs)
    assert text_of(rounds[-1][0]) == [0, 1, 2, 3, 4, 5, 6]
    assert block_of(rounds[-1][0]) == (2, 2)  # two of the second block's four are left
    cfg = jl.Config(strategy=jl.Jacobi(4), **knobs)
    out = jl.generate(RISING, [0], cfg, model=SuccessorTable(200))
    assert (out.finish_reason, out.num_rounds) == (reason, 6)


@pytest.mark.parametrize(
    "knobs, reason", [({"max_new_tokens": 3}, "length"), ({"eos_token_ids": (2,)}, "eos")]
)
def test_a_row_ends_inside_an_accepted_prefix(knobs, reason):
    """Four guesses are accepted at once and the row's end cuts them."""
    cycle = jnp.roll(jnp.arange(4), -1)
    ((state, info),) = rounds_of(cycle, [0, 1, 2, 3], **knobs)
    assert text_of(state)[4:] == [0, 1, 2]
    assert (int(info.num_accepted[0]), bool(state.done[0])) == (2, True)
    out = jl.generate(
        cycle, [0, 1, 2, 3], jl.Config(strategy=jl.Jacobi(4), **knobs), model=SuccessorTable(4)
    )
    assert out.finish_reason == reason


def test_a_done_row_keeps_its_block():
    """Its neighbour in the batch goes on."""
    rounds = rounds_of(RISING, [[4], [50]], max_new_tokens=9, eos_token_ids=(6,))
    blocks = [(block_of(state, 0), block_of(state, 1)) for state, _ in rounds]
    assert [first for first, _ in blocks] == [(3, 1)] + [(2, 2)] * 8
    assert [second for _, second in blocks] == ([(3, 1), (2, 2), (1, 3), (4, 0)] * 3)[:9]


# --- one round of lookahead -----------------------------------------------------------------


@functools.cache
def packed_program(strategy: jl.Lookahead):
    """The logits of a round's packed rows, in one forward pass, and the draft."""
    model = jl.LlamaModel(TINY)

    def run(params, state):
        draft = strategy.propose(state)
        rows = pack(strategy.layout, state, draft, strategy.layout.num_drafts)
        logits, _ = compute(model, params, state, rows)
        return logits[0], draft

    return jax.jit(run)


@pytest.mark.parametrize(
    "strategy",
    [jl.Lookahead(4, 4, 3), jl.Lookahead(3, 3, 4), jl.Lookahead(2, 2, 3)],
    ids=lambda s: f"W{s.window}-N{s.ngram}-G{s.candidates}",
)
def test_packed_rows_predict_what_separate_forwards_predict(strategy):
    params, num_candidates, num_accepted = tiny_params(2), 0, 0
    prompt = [7, 8, 9, 7, 8, 5, 7, 8]
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=40)
    rounds = jl.iter_rounds(params, prompt, cfg)
    state, _ = next(rounds)
    for after, info in rounds:
        text, levels = text_of(state), state.window.levels()
        logits, draft = packed_program(strategy)(params, state)
        num_drafts = strategy.layout.num_drafts
        predicted = np.asarray(logits).argmax(axis=1)
        of_drafts = predicted[1 : 1 + num_drafts]
        columns = predicted[1 + num_drafts :].tolist()

        parents = np.asarray(draft.parents)[0].tolist()
        tokens = np.asarray(draft.tokens)[0].tolist()
        valid = np.flatnonzero(np.asarray(draft.valid)[0]).tolist()
        paths: dict[int, list[int]] = {-1: []}
        for i in valid:  # parents stand before children here
            paths[i] = [*paths[parents[i]], tokens[i]]
        (ordinary,) = isolated_predictions(params, [text])
        assert predicted[0] == ordinary
        if valid:
            expected = isolated_predictions(params, [text + paths[i] for i in valid])
            assert of_drafts[valid].tolist() == expected
        # Column j: level 0 up to it, without the ordinary token, then its own deeper levels.
        trajectories = [
            text + levels[0][:j] + [level[j] for level in levels[1:]]
            for j in range(strategy.window)
        ]
        assert columns == isolated_predictions(params, trajectories)
        # And the round itself made use of these predictions.
        # Level 0 is kept without its first column.
        assert after.window.levels()[-1] == columns[int(strategy.ngram == 2) :]
        num_emitted = int(info.num_emitted[0])
        assert np.asarray(info.emitted)[0, :num_emitted].tolist() == text_of(after)[len(text) :]
        num_candidates += int(info.num_candidates[0])
        num_accepted += int(info.num_accepted[0])
        state = after
    assert num_candidates > 10 and num_accepted > 0
