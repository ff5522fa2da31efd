"""What reports from the field describe, of this and of like software, and no other test file holds.

Stubs whose right answer is known stand in for the model where they can; see `models.py`.
"""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import TINY, LeakProbe, SuccessorTable, plain, tiny_params

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import run_rounds, start
from jlookahead.rounds import decode_round
from jlookahead.state import LENGTH, POOL, Draft
from jlookahead.window import Window

PROBE = LeakProbe(vocab_size=11)
CYCLE, NINE, LAP = jnp.roll(jnp.arange(9), -1), SuccessorTable(9), [*range(9), 0]
DRAFTING = [jl.PromptLookup(num_draft_tokens=3), jl.Recycling(12), jl.Lookahead(1, 4, 2)]


@dataclasses.dataclass(frozen=True)
class Scripted(jl.Lookahead):
    """Row b of the batch accepts `b // G` drafts of candidate `b % G`, round after round."""

    text: tuple[int, ...] = ()

    def propose(self, state: jl.RoundState) -> Draft:
        size, batch = self.ngram - 1, len(state.length)
        at = state.length[:, None] + jnp.arange(size)
        right = jnp.array(self.text)[jnp.minimum(at, len(self.text) - 1)][:, None]
        accepted, branch = jnp.divmod(jnp.arange(batch)[:, None, None], self.candidates)
        candidate = jnp.arange(self.candidates)[:, None]
        # The other candidates begin alike and are wrong one token earlier.
        num_right = jnp.where(candidate == branch, accepted, accepted - 1)
        tokens = jnp.where(jnp.arange(size) < num_right, right, (right + 1) % 11)
        draft = super().propose(state)
        return draft.replace(
            tokens=tokens.reshape(batch, -1),
            valid=jnp.ones_like(draft.valid),
            source=jnp.full_like(draft.source, POOL),
        )


def test_every_accepted_length_of_every_branch_commits_the_right_rows():
    """Text fell apart after blocks of several tokens: their K/V came from the wrong rows, or
    stood at the wrong positions. Here all lengths 0 to N-1 on all branches, one a batch row."""
    prompt, budget = [3, 1, 4, 1, 5], 15
    params, model = tiny_params(0), jl.LlamaModel(TINY)
    text = prompt + plain(params, prompt, jl.Config(max_new_tokens=19), model=model).tokens
    strategy = Scripted(3, 4, 3, prompt_lookup=False, text=tuple(text))
    cfg = jl.Config(strategy=strategy, max_new_tokens=budget)
    ids, place = jnp.array([text]), jnp.arange(len(text))
    mask, empty = place[:, None] >= place, model.init_cache(1, 256)
    forward = jax.jit(model.forward)
    _, fresh = forward(params, ids, place[None], mask, empty, jnp.zeros(1, "int32"))
    accepted, branch = np.divmod(np.arange(12), 3)
    before = np.full(12, len(prompt))
    for state, info in jl.iter_rounds(params, [prompt] * 12, cfg, model=model):
        room = len(prompt) + budget - before
        np.testing.assert_array_equal(info.num_emitted, np.minimum(accepted + 1, room))
        uncut = (room > accepted) & (accepted > 0)
        np.testing.assert_array_equal(info.winner[uncut], (3 * branch + accepted - 1)[uncut])
        before = np.asarray(state.length)
        for tokens, length in zip(np.asarray(state.tokens), before, strict=True):
            assert tokens[:length].tolist() == text[:length]
        committed = (np.asarray(place) < before[:, None] - 1)[:, None, :, None]
        for keys, values, rows in zip(state.cache.keys, state.cache.values, fresh, strict=True):
            for got, want in zip((keys, values), rows, strict=True):
                error = np.asarray(got)[:, :, : len(text)] - np.asarray(want)
                assert np.abs(np.where(committed, error, 0)).max() < 1e-5


def test_a_window_of_random_ids_changes_the_rounds_only():
    """Users ask why a window filled by argmax may stand beside sampled text."""
    strategy = jl.Lookahead(6, 4, 3, prompt_pool=False, prompt_lookup=False)
    cfg = jl.Config(strategy=strategy, max_new_tokens=120, sampling=jl.Sampling(0.4, seed=2))
    rng = np.random.default_rng(0)
    one_round = jax.jit(decode_round, static_argnums=(0, 1, 2))

    def run(is_random: bool) -> tuple[list[int], int]:
        state = start(prepare(None, [1, 2, 3], cfg, model=PROBE), None)
        while not bool(state.done.all()):
            if is_random:
                ids = rng.integers(0, 11, state.window.tokens.shape)
                state = state.replace(window=Window(jnp.array(ids, "int32"), state.window.stage))
            state, _ = one_round(PROBE, strategy, 1, None, state)
        return state.tokens[0, 3 : int(state.length[0])].tolist(), int(state.num_rounds[0])

    (tokens, rounds), (junk_tokens, junk_rounds) = run(False), run(True)
    assert junk_tokens == tokens == plain(None, [1, 2, 3], cfg, model=PROBE).tokens
    assert rounds < junk_rounds


def test_no_draft_knob_changes_the_text():
    """With short matches half of the tool calls came out broken, with long ones none. Knobs may
    save rounds: lookup and pool together need no more of them than either alone."""
    strategies = [jl.Lookahead(5, 4, 3), jl.Lookahead(5, 4, 3, prompt_lookup=False)]
    strategies += [jl.PromptLookup(), jl.PromptLookup(1, 1)]
    texts, rounds = set(), []
    for strategy in strategies:
        cfg = jl.Config(strategy=strategy, max_new_tokens=120)
        out = jl.generate(None, [1, 2, 3] * 4, cfg, model=PROBE)
        texts.add(tuple(out.tokens))
        rounds.append(out.num_rounds)
    assert texts == {tuple(plain(None, [1, 2, 3] * 4, cfg, model=PROBE).tokens)}
    assert rounds[0] <= min(rounds[1:3]) and len(set(rounds)) > 3


def test_a_request_leaves_nothing_behind():
    """The first generation was right and later ones were not. A memory kept on purpose, a
    session's, may save rounds and nothing else."""
    cfg = jl.Config(strategy=jl.Lookahead(5, 4, 3), max_new_tokens=60)
    session = jl.Session(None, cfg, model=PROBE)
    prompts = ([1, 2, 3] * 4, [3, 5, 7, 9, 2, 4], [1, 2, 3] * 4)
    first, other, again = (jl.generate(None, prompt, cfg, model=PROBE) for prompt in prompts)
    assert again == first and other.tokens != first.tokens
    kept = [session.generate(prompt) for prompt in prompts]
    assert [out.tokens for out in kept] == [first.tokens, other.tokens, first.tokens]
    assert kept[2].num_rounds <= kept[0].num_rounds == first.num_rounds


def test_plain_decoding_samples_too():
    """A baseline that was silently greedy made every comparison with it void."""
    texts = set()
    for sampling in (jl.Sampling(), jl.Sampling(1.0, seed=1), jl.Sampling(1.0, seed=2)):
        cfg = jl.Config(strategy=jl.Autoregressive(), sampling=sampling, max_new_tokens=30)
        texts.add(tuple(jl.generate(None, [1, 2, 3], cfg, model=PROBE).tokens))
    assert len(texts) == 3


def test_equal_rows_of_a_batch_stay_equal():
    """Equal prompts in one batch gave visibly other logits."""
    strategy, prompts = jl.Lookahead(3, 3, 2), [[5, 9, 5, 9], [1, 2, 3, 4, 5], [5, 9, 5, 9]]
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=60, logprobs=True)
    out = jl.generate(tiny_params(0), prompts, cfg)
    for values in (out.tokens, out.num_rounds, out.logprobs):
        assert values[0] == values[2] != values[1]


@pytest.mark.parametrize("strategy", DRAFTING, ids=str)
def test_nothing_follows_an_end_inside_a_block(strategy):
    """An EOS in the middle of an accepted block was missed, or what followed it was streamed;
    a budget of 2 gave more tokens than that. The prompt holds the EOS id too."""
    for budget in range(13):
        for eos in (3, 0):
            cfg = jl.Config(strategy=strategy, max_new_tokens=budget, eos_token_ids=(eos,))
            streamed = list(jl.stream(CYCLE, LAP, cfg, model=NINE))
            expected = [*range(1, 9), 0][: eos or 9][:budget]
            assert [s.token for s in streamed] == expected
            reasons = [s.finish_reason for s in streamed]
            assert reasons[:-1] == [None] * len(expected[1:])
            assert not streamed or reasons[-1] == ("eos" if expected[-1] == eos else "length")
    call = prepare(CYCLE, LAP, dataclasses.replace(cfg, eos_token_ids=(3,)), model=NINE)
    state, _ = run_rounds(
        NINE, strategy, None, CYCLE, start(call, CYCLE), jax.device_put(np.int32(9))
    )
    assert state.num_rounds[0] == 1 and state.length[0] == 13
    assert state.tokens[0].tolist() == LAP + [1, 2, 3] + [0] * (state.tokens.shape[1] - 13)


def test_eos_in_the_window_ends_nothing():
    """Generation stopped after a few tokens where the window had filled up with EOS."""
    successor, eos, num_eos = jnp.array([1, 2, 3, 4, 5, 0, 9, 9, 9, 9]), 9, 0
    cfg = jl.Config(strategy=jl.Lookahead(5, 4, 3), max_new_tokens=40, eos_token_ids=(eos,))
    for state, _ in jl.iter_rounds(successor, [6, 7, 8, 6, 7, 8, 0], cfg, model=SuccessorTable(10)):
        num_eos += sum(level.count(eos) for level in state.window.levels())
    assert num_eos > 10
    assert state.length.tolist() == [47] and state.finish.tolist() == [LENGTH]
    assert state.tokens[0, 7:47].tolist() == [(1 + i) % 6 for i in range(40)]


def test_a_window_wider_than_prompt_and_vocabulary():
    """Windows seeded with fixed ids left small vocabularies; random ones took other rounds."""
    cfg, rounds = jl.Config(strategy=jl.Lookahead(40, 3, 2), max_new_tokens=60), set()
    for _ in range(2):
        for state, _ in jl.iter_rounds(None, [7], cfg, model=PROBE):
            assert all(0 <= t < 11 for level in state.window.levels() for t in level)
        rounds.add(int(state.num_rounds[0]))
    assert state.tokens[0, 1:61].tolist() == plain(None, [7], cfg, model=PROBE).tokens
    assert len(rounds) == 1


def test_recycling_takes_a_vocabulary_smaller_than_its_lists():
    """Eight successors are kept per token; here there are six tokens."""
    cfg = jl.Config(strategy=jl.Recycling(12), max_new_tokens=20)
    out = jl.generate(jnp.roll(jnp.arange(6), -1), [0], cfg, model=SuccessorTable(6))
    assert out.tokens == [(1 + i) % 6 for i in range(20)]


def test_the_pool_holds_the_row_s_own_text():
    """Pools of a batch ran into each other."""
    cfg = jl.Config(strategy=jl.Lookahead(3, 4, 2), max_new_tokens=50)
    successor, model = jnp.concatenate([CYCLE, CYCLE + 9]), SuccessorTable(18)
    *_, (state, _) = jl.iter_rounds(successor, [[0, 1, 2], [*range(9, 18), 9]], cfg, model=model)
    for row, first in enumerate((0, 9)):
        table, own = state.pool.as_dict(row), set(range(first, first + 9))
        assert set(table) == own
        assert {t for suffixes in table.values() for suffix in suffixes for t in suffix} == own
        for t in range(9):
            assert [first + (t + i) % 9 for i in (1, 2, 3)] in table[first + t]


@pytest.mark.parametrize("strategy", DRAFTING, ids=str)
def test_every_token_says_where_it_came_from(strategy):
    """Asked for: which tokens were drafted. All of a round but the last, which is the model's."""
    cfg = jl.Config(strategy=strategy, max_new_tokens=96)
    out = jl.generate(CYCLE, LAP, cfg, model=NINE)
    assert len(out.sources) == len(out.tokens) == 96
    own = sum(source in ("plain", "bonus") for source in out.sources)
    assert own in (out.num_rounds, out.num_rounds - 1)  # the budget may cut the last one's
    assert own < 96 / 3 and out.tokens_per_round == 96 / out.num_rounds


@dataclasses.dataclass(frozen=True)
class Recital(SuccessorTable):
    """Recites the text `params [T]`, whatever it reads."""

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        return params[jnp.minimum(positions + 1, len(params) - 1)][..., None], ()


def test_two_candidates_serve_two_continuations():
    """Asked for: several drafts at once, where either of two tokens has followed."""
    rng, rounds = random.Random(3), []
    text = [2 * (i % 4) + rng.randrange(2) for i in range(32 + 160)]
    for candidates in (1, 2):
        strategy = jl.PromptLookup(max_ngram=1, num_draft_tokens=1, candidates=candidates)
        cfg = jl.Config(strategy=strategy, max_new_tokens=160)
        out = jl.generate(jnp.array(text), text[:32], cfg, model=Recital(8))
        assert out.tokens == text[32:]
        rounds.append(out.num_rounds)
    assert rounds[1] == 80 < 0.9 * rounds[0]
