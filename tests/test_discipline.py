"""What the compiled programs must not do: recompile, copy the cache, talk to the host."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from models import TINY, plain, tiny_params

import jlookahead as jl
from jlookahead import decoding
from jlookahead import model as network
from jlookahead.attention import PREFIX_CHUNK
from jlookahead.buffers import _MAX_UNROLLED
from jlookahead.call import prepare
from jlookahead.decoding import run_rounds, start

pytestmark = pytest.mark.optimized

STRATEGIES = [jl.Autoregressive(), jl.Lookahead(5, 4, 3)]
TWO_SIZES = jl.Auto(((1, 1.0), (4, 1.5)))  # a loop within the loop for each of two sizes of rounds
BATCHES = [[[1, 2, 3]], [[1, 2, 3], [4], [5] * 9]]


@contextlib.contextmanager
def count_compilations():
    """Counts every XLA compilation, also of eager operations, while it is open."""
    count = [0]

    def listen(event: str, duration: float, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def compile_round_loop(strategy, prompts, max_new_tokens=1000):
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=max_new_tokens)
    call = prepare(params, prompts, cfg)
    state = start(call, params)
    args = (call.model, strategy, None, params, state, np.int32(1))
    return run_rounds.lower(*args).compile(), state


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_programs_compile_once_per_bucket():
    params = tiny_params(0)

    def run(length, budget, temperature=0.0, eos=()):
        cfg = jl.Config(
            model=TINY,
            strategy=jl.Lookahead(3, 3, 2, pool_capacity=64),
            max_new_tokens=budget,
            eos_token_ids=eos,
            sampling=jl.Sampling(temperature=temperature, seed=length),
        )
        jl.generate(params, [1 + i % 90 for i in range(length)], cfg)
        last_cfg[0] = cfg

    last_cfg = [jl.Config()]
    before = decoding.run_rounds._cache_size(), decoding._start._cache_size()
    with count_compilations() as count:
        for length in (16, 32, 64):  # the prefill buckets
            run(length, 100)
            run(length, 100, temperature=1.0)
        assert count[0] > 0, "the listener hears nothing"
        warm = count[0]
        programs = decoding.run_rounds._cache_size(), decoding._start._cache_size()
        assert (programs[0] - before[0], programs[1] - before[1]) == (2, 6)
        # Lengths at both ends of the prefill buckets, budgets within one cache bucket.
        for length in (1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 40):
            for budget in (1, 10, 100, 150, 200):
                run(
                    length,
                    budget,
                    temperature=0.7 if length % 2 else 0.0,
                    eos=(length,) * (budget % 3),
                )
            list(jl.stream(params, [5] * length, last_cfg[0]))
        assert count[0] == warm


def test_nothing_compiles_after_warm_up():
    params, counts = tiny_params(0), []

    def config(temperature, budget=100):
        sampling = jl.Sampling(temperature=temperature)
        return jl.Config(
            model=TINY,
            strategy=TWO_SIZES,
            max_new_tokens=budget,
            cache_len=300,
            sampling=sampling,
            eos_token_ids=(5,),
        )

    loops = run_rounds._cache_size()
    for cfg in (config(0.0), config(1.0)):
        with count_compilations() as count:
            jl.warmup(params, cfg, range(1, 41))
        counts.append(count[0])
    assert min(counts) >= 4, "three prefill buckets and the loop"
    with count_compilations() as count:
        temperatures = itertools.cycle([0.0, 0.5, 1.3])
        lengths = (1, 2, 16, 17, 32, 33, 40)  # both ends of the prefill buckets
        for length, budget in itertools.product(lengths, (0, 1, 7, 30, 250)):
            jl.generate(params, [7] * length, config(next(temperatures), budget))
        list(jl.stream(params, [7] * 40, config(0.5)))
    assert count[0] == 0
    assert run_rounds._cache_size() == loops + 2, "one program for greedy, one for sampled text"


def test_a_layer_is_traced_once_for_all(monkeypatch):
    """And leaves no call in the program, which would change what XLA fuses, and so sums."""
    traced, attend = [], network.attend

    def counted(*args):
        traced.append(args)
        return attend(*args)

    monkeypatch.setattr(network, "attend", counted)
    model = jl.LlamaModel(dataclasses.replace(TINY, num_hidden_layers=5))
    row = jax.ShapeDtypeStruct((1, 3), np.int32)
    mask, length = jax.ShapeDtypeStruct((3, 3), bool), jax.ShapeDtypeStruct((1,), np.int32)
    cache = jax.eval_shape(lambda: model.init_cache(1, 16))
    args = model.abstract_params(), row, row, mask, cache, length
    traced.clear()  # of the parameters' shapes
    program = jax.make_jaxpr(model.forward)(*args)
    assert len(traced) == 1
    # Each layer's loop over the cache stands in the program itself.
    assert sum(eqn.primitive.name == "while" for eqn in program.eqns) == 5


def test_warm_up_refuses_what_calls_would_refuse():
    params, cfg = tiny_params(0), jl.Config(model=TINY)
    for lengths, words in (
        ([1000], "max_new_tokens: got 128 after a prompt of 1000 tokens"),
        ([0], "prompt_lengths: got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            jl.warmup(params, cfg, lengths)
    with pytest.raises(ValueError, match="batch: got 0"):
        jl.warmup(params, cfg, [1], batch=0)


@pytest.mark.parametrize("prompts", BATCHES, ids=["one", "batch"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["plain", "lookahead"])
def test_the_loop_never_talks_to_the_host(strategy, prompts):
    compiled, state = compile_round_loop(strategy, prompts)
    text = compiled.as_text()
    assert "while(" in text
    for word in ("infeed", "outfeed", "callback", "send(", "recv("):
        assert word not in text
    params, rounds = tiny_params(0), jax.device_put(np.int32(1000))
    with jax.transfer_guard("disallow"):
        run_rounds(jl.LlamaModel(TINY), strategy, None, params, state, rounds)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_whole_call_makes_explicit_transfers_only(temperature):
    """The arguments go in, the tokens come out, each in one deliberate place."""
    params = tiny_params(0)
    sampling = jl.Sampling(temperature=temperature)
    cfg = jl.Config(model=TINY, strategy=STRATEGIES[1], sampling=sampling, max_new_tokens=20)
    with jax.transfer_guard("disallow"):
        out = jl.generate(params, [[1, 2, 3], [4]], cfg)
        streamed = list(jl.stream(params, [1, 2, 3], cfg))
    assert [s.token for s in streamed] == out.tokens[0]


def test_a_generation_is_two_dispatches(monkeypatch):
    calls = []
    for name in ("_start", "run_rounds"):
        program = getattr(decoding, name)

        def counted(*args, program=program, name=name):
            calls.append(name)
            return program(*args)

        monkeypatch.setattr(decoding, name, counted)
    cfg = jl.Config(model=TINY, max_new_tokens=64)
    assert jl.generate(tiny_params(0), [1, 2, 3], cfg).num_rounds > 5
    assert calls == ["_start", "run_rounds"]


@pytest.mark.parametrize("prompts", BATCHES, ids=["one", "batch"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, TWO_SIZES], ids=["plain", "lookahead", "auto"])
def test_the_cache_is_written_in_place(strategy, prompts):
    compiled, state = compile_round_loop(strategy, prompts)
    shape = ",".join(map(str, state.cache.keys[0].shape))
    copies = re.findall(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text())
    assert not copies
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes(state)
    # What the loop needs beside its state does not grow by even one array of the cache.
    smaller, small_state = compile_round_loop(strategy, prompts, max_new_tokens=200)
    grown = memory.temp_size_in_bytes - smaller.memory_analysis().temp_size_in_bytes
    assert grown < nbytes(state.cache.keys[0]) - nbytes(small_state.cache.keys[0])


@pytest.mark.parametrize(("max_new_tokens", "copies_chunks"), [(450, False), (1000, True)])
def test_a_small_cache_is_read_in_place(max_new_tokens, copies_chunks):
    """Chunks of a large one are copied out of it; a small one is a chunk itself."""
    compiled, state = compile_round_loop(STRATEGIES[0], [[1, 2, 3]], max_new_tokens)
    _, heads, num_slots, dim = state.cache.keys[0].shape
    chunk = rf"= f32\[1,{heads},{PREFIX_CHUNK},{dim}\]\S* dynamic-slice\("
    assert num_slots > PREFIX_CHUNK
    assert bool(re.findall(chunk, compiled.as_text())) == copies_chunks


# More rows than are written one by one: each buffer then takes one scatter.
MANY = [[1 + b, 2, 3][: 1 + b % 3] for b in range(_MAX_UNROLLED + 4)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["plain", "lookahead"])
def test_many_rows_decode_as_few(strategy):
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=60)
    together = jl.generate(params, MANY, cfg)
    for first in range(0, len(MANY), 4):
        few = slice(first, first + 4)
        assert together.tokens[few] == plain(params, MANY[few], cfg).tokens


def test_prefill_writes_the_cache_in_place():
    """XLA keeps a few copies of the empty cache; none may grow the temporaries with it."""

    def temporaries(max_new_tokens):
        params = tiny_params(0)
        cfg = jl.Config(model=TINY, strategy=STRATEGIES[0], max_new_tokens=max_new_tokens)
        call = prepare(params, [[1, 2, 3]], cfg)
        static = (call.mesh, call.prefill_chunk, call.want_logprobs, call.refeeds)
        args = (call.model, call.strategy, *static, params, call.arrays, None, None)
        compiled = decoding._start.lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes, call.num_slots

    (small, few), (large, many) = temporaries(200), temporaries(1000)
    one_array = TINY.num_key_value_heads * TINY.head_dim * 4 * (many - few)
    assert large - small < one_array


def test_the_state_is_donated():
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, strategy=STRATEGIES[1], max_new_tokens=20)
    call = prepare(params, [1, 2], cfg)
    state = start(call, params)
    _, progress = run_rounds(call.model, call.strategy, call.mesh, params, state, np.int32(2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.cache, state.pool)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, progress)))


def test_only_wanted_rows_reach_the_head():
    """1 + W + G (N - 1) rows of logits, not all (W + G) (N - 1)."""
    strategy = jl.Lookahead(7, 5, 3)
    layout = strategy.layout
    assert layout.num_rows == (7 + 3) * 4
    compiled, _ = compile_round_loop(strategy, [[1, 2, 3]], max_new_tokens=9)
    rows = {int(n) for n in re.findall(rf"f32\[1,(\d+),{TINY.vocab_size}\]", compiled.as_text())}
    assert max(rows) == 1 + 7 + 3 * 4


def test_configs_do_not_interfere():
    """Two generations of other configurations interleaved, and a repeated one, in one process."""
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, strategy=jl.Lookahead(4, 3, 2), max_new_tokens=24)
    first = jl.stream(params, [1, 2, 3], cfg)
    second = jl.stream(params, [9, 8], jl.Config(model=TINY, max_new_tokens=24))
    pairs = list(zip(first, second, strict=True))
    again = jl.generate(params, [1, 2, 3], cfg)
    assert [a.token for a, _ in pairs] == again.tokens
    assert jl.generate(params, [1, 2, 3], cfg) == again
