"""What a session hands from turn to turn, and what its programs must not do."""

from __future__ import annotations

import dataclasses
import os
import random
import re

import checkpoints as files
import jax
import numpy as np
import pytest
from models import TINY, LeakProbe, tiny_params
from test_discipline import count_compilations, nbytes

import jlookahead as jl
from jlookahead import decoding
from jlookahead.call import prepare
from jlookahead.decoding import start
from jlookahead.processors import FrequencyPenalty, RepetitionPenalty

LONG = dataclasses.replace(TINY, max_position_embeddings=4096)


def random_ids(rng: random.Random, size: int, vocab_size: int = 97) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(size)]


def next_start(params, cfg, first, later, num_reused):
    """The state at the start of a turn, and that of the turn before."""
    before = start(prepare(params, first, cfg), params)
    kept = jax.tree.map(np.array, before)
    slots = before.tokens.shape[1]
    call = prepare(params, later, cfg, num_reused=num_reused, min_slots=slots)
    return start(call, params, previous=before), kept


@pytest.mark.parametrize(
    "strategy, num_new",
    [
        *((jl.Lookahead(3, 3, 2), num_new) for num_new in (1, 64, 65, 513, 924, 925, 1948)),
        *((jl.Recycling(12), num_new) for num_new in (1, 65, 924)),
    ],
    ids=str,
)
def test_the_next_prefill_fills_cache_and_memory_as_a_fresh_one(strategy, num_new):
    """Up to the very end of a buffer, where an update too long would be moved back."""
    params, rng = tiny_params(0, LONG), random.Random(num_new)
    cfg = jl.Config(model=LONG, strategy=strategy, max_new_tokens=0)
    first = random_ids(rng, 100)
    later = first + random_ids(rng, num_new)
    state, _ = next_start(params, cfg, first, later, 99)
    fresh = start(prepare(params, later, cfg), params)
    size = len(later) - 1
    pairs = zip(jax.tree.leaves(state.cache), jax.tree.leaves(fresh.cache), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got[:, :, :size], want[:, :, :size], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(state.tokens[0, : size + 1], later)
    if isinstance(strategy, jl.Recycling):
        np.testing.assert_array_equal(state.successors, fresh.successors)
    else:
        assert state.pool.as_dict() == fresh.pool.as_dict()


def test_the_pool_is_kept_and_only_new_ngrams_are_inserted():
    rng = random.Random(3)
    cfg = jl.Config(model=TINY, strategy=jl.Lookahead(4, 3, 2), max_new_tokens=9)
    first = random_ids(rng, 150)
    state, before = next_start(tiny_params(0), cfg, first, [*first[:140], 5, 6, 7], 140)
    pool = state.pool.as_dict()
    assert [6, 7] in pool[5] and [5, 6] in pool[first[139]]
    forgotten = [
        (key, suffix)
        for key, suffixes in before.pool.as_dict().items()
        for suffix in suffixes
        if suffix not in pool[key]
    ]
    assert len(forgotten) <= 3  # pushed out by the three that end in 5, 6 and 7
    # One block of 32 n-grams, where the whole prompt has five.
    assert int(state.pool.clock[0] - before.pool.clock[0]) == 32


def test_random_histories_leave_no_trace():
    """Every visible token and its place decides the probe's next one: lengths around chunks and
    capacities, growing and shrinking."""
    rng, model = random.Random(0), LeakProbe(vocab_size=11)
    cfg = jl.Config(strategy=jl.Lookahead(4, 4, 3), max_new_tokens=40)
    session = jl.Session(None, cfg, model=model)
    committed: list[int] = []
    history: list[int] = []
    for num_new in (1, 15, 700, 3, 64, 65, 512, 1, 30, 513, 128, 200):
        kept = history[: rng.choice([len(history), rng.randint(0, len(history))])]
        prompt = kept + random_ids(rng, num_new, 11)
        got = session.generate(prompt)
        assert got.tokens == jl.generate(None, prompt, cfg, model=model).tokens
        pairs = zip(committed, prompt[:-1], strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        longest = min(len(committed), len(prompt) - 1)
        assert session.num_reused == (longest if shared is None else shared)
        history = prompt + got.tokens
        committed = history[:-1]


def test_the_whole_law_is_that_of_a_fresh_call():
    """Penalties count from the new prompt's end, and so do the least new tokens."""
    params = tiny_params(2)
    cfg = jl.Config(
        model=TINY,
        strategy=jl.PromptLookup(),
        sampling=jl.Sampling(temperature=0.9, top_p=0.9, seed=4),
        processors=(RepetitionPenalty(1.2), FrequencyPenalty(0.3)),
        max_new_tokens=24,
        min_new_tokens=5,
        eos_token_ids=tuple(range(11, 30)),
        cache_len=70,
        logprobs=True,
    )
    session, prompt, reasons = jl.Session(params, cfg), [1, 2, 3], set()
    while len(prompt) < 70:
        got, fresh = session.generate(prompt), jl.generate(params, prompt, cfg)
        assert (got.tokens, got.finish_reason) == (fresh.tokens, fresh.finish_reason)
        np.testing.assert_allclose(got.logprobs, fresh.logprobs, atol=1e-3)
        reasons.add(got.finish_reason)
        prompt = prompt + got.tokens + [9]
    assert reasons >= {"eos", "cache_full"}


def test_stop_strings_end_a_turn_and_not_the_chat():
    config = dataclasses.replace(TINY, vocab_size=300)
    params, tokenizer = tiny_params(0, config), files.tiny_tokenizer(300)
    cfg = jl.Config(model=config, strategy=jl.Lookahead(3, 3, 2), max_new_tokens=20)
    text = jl.generate(params, "the cat", cfg, tokenizer=tokenizer).text
    stop = next(c for c in text[5:] if c.isascii())
    cfg = dataclasses.replace(cfg, stop_strings=(stop,))
    session, prompt, reasons = jl.Session(params, cfg, tokenizer=tokenizer), "the cat", []
    for _ in range(3):
        out = session.generate(prompt)
        fresh = jl.generate(params, prompt, cfg, tokenizer=tokenizer)
        assert (out.text, out.finish_reason) == (fresh.text, fresh.finish_reason)
        reasons.append(out.finish_reason)
        prompt += out.text + " mat"
    assert reasons[0] == "stop" and session.num_reused > 0


def test_turns_compile_nothing_new():
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, strategy=jl.Lookahead(3, 3, 2), max_new_tokens=20)

    def chat(lengths):
        session, prompt = jl.Session(params, cfg), [1]
        for i, length in enumerate(lengths):
            prompt = prompt + session.generate(prompt).tokens + [i] * length
        session.generate(prompt)

    # The first prefill, later ones, and capacities 256, 512 and 1024.
    chat([40] * 14)
    programs = decoding._start._cache_size(), decoding.run_rounds._cache_size()
    with count_compilations() as count:
        chat([1, 2, 15, 16, 17, 40, 63, 3, 5, 60, 60, 60, 60, 60])
    assert count[0] == 0
    assert programs == (decoding._start._cache_size(), decoding.run_rounds._cache_size())


@pytest.mark.optimized
def test_the_next_prefill_writes_in_place():
    """Cache and pool are donated, and used; no temporary is as large as an array of the cache."""
    params, strategy = tiny_params(0), jl.Lookahead(3, 3, 2)

    def compiled(max_new_tokens):
        cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=max_new_tokens)
        before = start(prepare(params, [1, 2, 3], cfg), params)
        slots = before.tokens.shape[1]
        call = prepare(params, [1, 2, 4, 5], cfg, num_reused=2, min_slots=slots)
        carried = decoding.Carried(before.cache, before.pool, None)
        static = call.mesh, call.prefill_chunk, call.want_logprobs, call.refeeds
        arguments = (call.model, strategy, *static, params, call.arrays, None, carried)
        return decoding._start.lower(*arguments).compile(), carried

    program, carried = compiled(1000)
    shape = ",".join(map(str, carried.cache.keys[0].shape))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", program.as_text())
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes(carried)
    small_program, small = compiled(200)
    grown = memory.temp_size_in_bytes - small_program.memory_analysis().temp_size_in_bytes
    assert grown < nbytes(carried.cache.keys[0]) - nbytes(small.cache.keys[0])


def test_what_a_turn_takes_over_is_donated_and_nothing_is_transferred_unasked():
    cfg = jl.Config(model=TINY, strategy=jl.Lookahead(3, 3, 2), max_new_tokens=20)
    session = jl.Session(tiny_params(0), cfg)
    with jax.transfer_guard("disallow"):
        out = session.generate([1, 2, 3])
        before = session._state
        list(session.stream([1, 2, 3, *out.tokens, 4]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.cache, before.pool)))


@pytest.mark.parametrize("num_read", [0, 7])
def test_a_stream_left_half_way_leaves_what_it_computed(num_read):
    params, prompt = tiny_params(2), [1, 2, 3]
    cfg = jl.Config(model=TINY, strategy=jl.PromptLookup(), max_new_tokens=200)
    session = jl.Session(params, cfg)
    left = session.stream(prompt)
    read = [next(left).token for _ in range(num_read)]
    longer = [*prompt, *read, 7, 7]
    for turn in range(2):
        got = session.generate(longer).tokens
        assert got == jl.generate(params, longer, cfg).tokens
        assert session.num_reused >= len(prompt) - 1 + max(num_read - 1, 0)
        state = session._state
        if turn == 0:  # what the device had computed is yielded first
            with pytest.raises(RuntimeError, match="another prompt"):
                list(left)
        assert list(left) == []
        assert session._state is state
        longer = [*longer, *got, 8]


@dataclasses.dataclass(frozen=True)
class Failing(LeakProbe):
    """A device that can be made to fail."""

    def forward(self, params, tokens, *args):
        def check(tokens):
            if os.environ.get("FAIL"):
                raise RuntimeError("out of order")
            return tokens

        shape = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)
        return super().forward(params, jax.pure_callback(check, shape, tokens), *args)


def test_a_failing_device_costs_the_reuse_only(monkeypatch):
    cfg = jl.Config(strategy=jl.PromptLookup(2), max_new_tokens=20)
    session = jl.Session(None, cfg, model=Failing(11))
    prompt = [1, 2, 3, *session.generate([1, 2, 3]).tokens, 4]
    with monkeypatch.context() as patch:
        patch.setenv("FAIL", "1")
        with pytest.raises(jax.errors.JaxRuntimeError):
            list(session.stream(prompt))
    fresh = jl.generate(None, prompt, cfg, model=LeakProbe(11))
    assert session.generate(prompt).tokens == fresh.tokens
    assert session.num_reused == 0
    session.generate([*prompt, *fresh.tokens, 5])
    assert session.num_reused == len(prompt) + 19


@pytest.mark.parametrize(
    "params, cfg, message",
    [
        (tiny_params(0), None, "cfg: got None"),
        (tiny_params(0), jl.Config(), "model: cfg.model is None"),
        ({}, jl.Config(model=TINY), "params: "),
    ],
)
def test_a_session_needs_a_model_and_its_parameters(params, cfg, message):
    with pytest.raises(ValueError, match=message):
        jl.Session(params, cfg)
