"""`Auto` drafts where that pays by its own figures; rounds compute only the rows they need."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import EAGER_AUTO, TINY, SuccessorTable, plain, tiny_params

import jlookahead as jl
from jlookahead import acceptance, auto, tuning
from jlookahead.call import prepare
from jlookahead.decoding import start


@dataclasses.dataclass(frozen=True)
class Script:
    """Goes on with a given text, whatever came before; the parameters are its ids."""

    vocab_size: int = 50
    max_position_embeddings: int = 4096

    def init_cache(self, batch, num_slots):
        return jl.KVCache(keys=(), values=())

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        return self.tell(params, positions)[..., None], ()

    def tell(self, params, positions):
        return params[positions + 1]

    def logits(self, params, hidden):
        return jax.nn.one_hot(hidden[..., 0], self.vocab_size)


class RowCounter(Script):
    """Answers with the number of rows that were computed with it."""

    def tell(self, params, positions):
        return jnp.full_like(positions, positions.shape[1])


def run(text: list[int], prompt_len: int, strategy: jl.Strategy, model: Any = None) -> jl.Result:
    cfg = jl.Config(strategy=strategy, max_new_tokens=len(text) - prompt_len)
    return jl.generate(jnp.array(text), text[:prompt_len], cfg, model=model or Script())


def expected_sizes(text: list[int], prompt_len: int, strategy: jl.Auto) -> list[int]:
    """How many tokens every round drafts, by the module's description and in plain Python."""
    longest = len(acceptance.RIGHT_AT_FIRST) - 1
    at_first = np.array(acceptance.RIGHT_AT_FIRST) * acceptance.WEIGHT_AT_FIRST
    right, total = at_first.copy(), np.full(longest + 1, acceptance.WEIGHT_AT_FIRST)
    most = strategy.costs[-1][0] - 1
    length, sizes = prompt_len, []
    while length < len(text):
        known, match_len, found = text[:length], 0, 0
        for end in range(1, length):
            m = 0
            while m < min(end, longest) and known[end - 1 - m] == known[-1 - m]:
                m += 1
            if m and m >= match_len:
                match_len, found = m, end
        draft = known[found : found + most] if match_len else []
        chances = [(right / total)[min(match_len + d, longest)] for d in range(len(draft))]
        tokens = [1.0, *(1 + np.cumsum(np.cumprod(chances)))]
        best, best_rate = 0, auto._MARGIN
        for rows, cost in strategy.costs[1:]:
            rate = tokens[min(rows - 1, len(draft))] / cost
            if rate > best_rate:
                best, best_rate = rows - 1, rate
        sizes.append(min(best, len(draft)))
        num_right = 0
        while num_right < len(draft) and text[length : length + num_right + 1][-1:] == [
            draft[num_right]
        ]:
            num_right += 1
            if length + num_right >= len(text):
                break
        emitted = min(min(num_right, best) + 1, len(text) - length)
        tried, hit = np.zeros(longest + 1), np.zeros(longest + 1)
        for d in range(min(emitted, len(draft))):
            of_length = min(match_len + d, longest)
            tried[of_length] += 1
            if draft[d] != text[length + d]:
                break
            hit[of_length] += 1
        kept = np.where(tried > 0, acceptance.KEPT, 1.0)
        right = at_first + kept * (right - at_first) + hit
        total = acceptance.WEIGHT_AT_FIRST + kept * (total - acceptance.WEIGHT_AT_FIRST) + tried
        length += emitted
    return sizes


@pytest.mark.parametrize("seed", range(6))
def test_every_round_drafts_what_pays(seed):
    rng = random.Random(seed)
    text = [rng.randrange(6) for _ in range(30)]
    while len(text) < 110:
        at = rng.randrange(len(text) - 9)
        text += text[at : at + rng.randrange(3, 30)] + [rng.randrange(6)]
    strategy = jl.Auto(((1, 1.0), (4, 1.5), (10, 2.0)))
    cfg = jl.Config(strategy=strategy, max_new_tokens=len(text) - 40)
    rounds = jl.iter_rounds(jnp.array(text), text[:40], cfg, model=Script())
    sizes = [int(info.draft.valid.sum()) for _, info in rounds]
    assert sizes == expected_sizes(text, 40, strategy)
    assert {0, 3, 9} <= set(sizes), "the text must call for every size"


def test_a_text_that_turns_repetitive_is_followed():
    """From noise, in which nothing holds, to laps: soon every round is as long as it can be."""
    rng = random.Random(0)
    noise = [rng.randrange(12) for _ in range(600)]
    laps = [*range(12, 40)] * 20
    out = run(noise + laps, 100, jl.Auto())
    noisy_rounds = run(noise, 100, jl.Auto()).num_rounds
    assert noisy_rounds > 0.97 * 500
    # One lap to read, a few rounds to learn what it is worth, then 16 tokens a round.
    assert out.num_rounds - noisy_rounds < 28 + 10 + 20 * 28 / 16
    assert out.tokens == (noise + laps)[100:]


def test_nothing_is_drafted_where_rows_are_dear():
    text = [*range(9)] * 20
    assert run(text, 40, jl.Auto(((1, 1.0), (8, 9.0)))).num_rounds == 140
    assert run(text, 40, jl.Auto(((1, 1.0), (8, 1.0)))).num_rounds < 25


def test_a_batch_pays_for_all_its_rows():
    """What is worth drafting for one text is not for eight at once, on a rising curve."""
    strategy = jl.Auto(((1, 1.0), (8, 2.5), (64, 30.0)))
    text = [*range(9)] * 20
    cfg = jl.Config(strategy=strategy, max_new_tokens=100)
    alone = jl.generate(jnp.array(text), text[:40], cfg, model=Script())
    together = jl.generate(jnp.array(text), [text[:40]] * 8, cfg, model=Script())
    assert alone.num_rounds < 30
    assert together.num_rounds == [100] * 8
    assert together.tokens == [alone.tokens] * 8


def test_rounds_compute_the_rows_they_need():
    """The text is the number of rows of every round."""
    strategy = jl.PromptLookup(num_draft_tokens=3)
    out = run([0] * 60, 2, strategy, RowCounter())
    # [0, 0] matches itself; 4 rows write 4s, of which the first two match nothing.
    assert out.tokens[:2] == [4, 1]
    assert set(out.tokens) == {1, 4}
    full = run([0] * 60, 2, jl.Lookahead(2, 2, 2), RowCounter())
    assert set(full.tokens) == {jl.Lookahead(2, 2, 2).layout.num_rows}


@pytest.mark.parametrize("sampling", [jl.Sampling(), jl.Sampling(0.2, seed=2)])
def test_equals_plain_decoding(sampling):
    prompts = [[1, 2, 3] * 5, [4], [5, 6] * 9]
    cfg = jl.Config(model=TINY, strategy=EAGER_AUTO, sampling=sampling, max_new_tokens=80)
    out = jl.generate(tiny_params(4), prompts, cfg)
    assert out.tokens == plain(tiny_params(4), prompts, cfg).tokens
    assert sum(out.num_rounds) < 200


def test_rows_that_are_done_do_not_count():
    """Neither for what is worth drafting nor for how many rows are computed."""
    table = jnp.roll(jnp.arange(9), -1)
    cfg = jl.Config(strategy=jl.PromptLookup(), max_new_tokens=1, eos_token_ids=(5,))
    call = prepare(table, [[*range(9)] * 2, [4]], cfg, model=SuccessorTable(9))
    state = start(call, table)
    done = state.replace(finish=jnp.array([1, 0]))
    strategy = jl.Auto()
    assert not strategy.propose(strategy.start(done, None)).valid.any()
    assert strategy.propose(strategy.start(state, None)).valid[0].any()


@pytest.mark.parametrize(
    "costs",
    [
        [(1, 1.0), (8, 2.0)],
        ((1, 1.0),),
        ((2, 1.0), (8, 2.0)),
        ((1, 2.0), (8, 2.0)),
        ((1, 1.0), (8, 2.0), (4, 3.0)),
        ((1, 1.0), (8, 0.5)),
        ((1, 1.0), (8, float("nan"))),
        ((1, 1.0), 8),
    ],
)
def test_costs_are_checked(costs):
    with pytest.raises(ValueError, match="costs: got"):
        jl.Auto(costs)


# Measuring


def test_costs_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    params = tiny_params(0)
    strategy = jl.tune(params, TINY)
    (file,) = (tmp_path / "jlookahead").iterdir()
    costs = tuple(map(tuple, json.loads(file.read_text())))
    assert [rows for rows, _ in costs] in ([1, 4, 8, 16, 32], [1, 4, 8, 16, 32, 56, 120])
    assert strategy == tuning.suit(costs)
    kept = ((1, 1.0), (4, 1.25), (8, 1.5), (16, 2.5), (32, 3.5))
    file.write_text(json.dumps(kept))
    assert jl.tune(params, TINY).costs == ((1, 1.0), (4, 1.25), (16, 2.5))
    nonsense = ("[[1, 1.0], [Infinity, 2.0]]", "[" * 100_000, '[[1.9, 1.0], ["8", "2"]]')
    for damaged in ("", "[[1, 1.0]]", "[[1, 1.0], [4, 2.0]]", "{}", "[1, 2]", "null", *nonsense):
        file.write_text(damaged)
        jl.tune(params, TINY)
        assert len(json.loads(file.read_text())) >= 5
    other = dataclasses.replace(TINY, rms_norm_eps=1e-3)
    jl.tune(params, other)
    assert len(list(file.parent.iterdir())) == 2, "another model, another file"


def test_costs_that_cannot_be_kept_are_still_there(tmp_path, monkeypatch):
    params = tiny_params(0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="tune: costs are measured anew each time"):
        assert len(jl.tune(params, TINY).costs) >= 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jl.tune(params, TINY)
    (file,) = (tmp_path / "jlookahead").iterdir()
    file.unlink()
    file.mkdir()
    with pytest.warns(UserWarning, match="measured anew"):
        jl.tune(params, TINY)
    assert list(file.parent.iterdir()) == [file], "nothing half-written is left"


def test_tune_wants_the_model_s_configuration():
    lm = jl.load()
    with pytest.raises(ValueError, match="config: got a LoadedModel, allowed is a ModelConfig"):
        jl.tune(lm.params, lm)
    with pytest.raises(ValueError, match="params: "):
        jl.tune(lm.params, TINY)


@pytest.mark.parametrize(
    ("of_32", "of_120", "rows", "wide"),
    [
        (2.5, None, [1, 4, 16], None),
        (1.8, None, [1, 8, 32], None),
        (1.3, 3.0, [1, 8, 32], jl.Recycling(32)),
        (1.2, 2.0, [1, 8, 32, 56], jl.Recycling(56)),
        (1.1, 1.2, [1, 8, 32, 120], jl.Recycling(120)),
    ],
)
def test_rounds_are_as_large_as_the_curve_is_flat(monkeypatch, tmp_path, of_32, of_120, rows, wide):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs = {1: 1.0, 4: 1.1, 8: 1.1, 16: 1.2, 32: of_32}
    if of_120 is not None:
        costs |= {56: (of_32 + of_120) / 2 - 0.3 * (wide == jl.Recycling(56)), 120: of_120}
    measured = []

    def measure(model, params, rows=tuning._ROWS):
        measured.extend(rows)
        return tuple((num, costs[num]) for num in rows)

    monkeypatch.setattr(tuning, "measure_costs", measure)
    strategy = jl.tune(tiny_params(0), TINY)
    assert [num for num, _ in strategy.costs] == rows
    assert strategy.wide == wide
    assert measured == [*costs], "many rows are measured where they may pay alone"
    assert jl.tune(tiny_params(0), TINY) == strategy
    assert measured == [*costs], "once"


def test_noise_never_makes_more_rows_cheaper(monkeypatch):
    seconds = iter([1.0, 2.0, 1.5, 3.0, 2.5] * tuning._SAMPLES)
    monkeypatch.setattr(tuning, "_seconds", lambda program: next(seconds))
    costs = tuning.measure_costs(jl.LlamaModel(TINY), tiny_params(0))
    assert costs == ((1, 1.0), (4, 2.0), (8, 2.0), (16, 3.0), (32, 3.0))
