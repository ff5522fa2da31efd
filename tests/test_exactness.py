"""The contract: any strategy, any knob, any batch emits exactly what plain decoding emits.

The oracle is the plain decoder in float32, token for token; the plain decoder's own oracle
is HF PyTorch `generate`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    EAGER_AUTO,
    TINY,
    WIDE_AUTOS,
    LeakProbe,
    SuccessorTable,
    hf_llama,
    plain,
    tiny_params,
)

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import start

# Strategy, batch, how texts are chosen. One compiled program per entry and way to choose; lengths,
# budgets, EOS ids, weights, seeds and filters vary within. What drafts a token knows nothing of
# how it is judged: kinds of drafts see both ways, other knobs one of them.
SHAPES = [
    (jl.Lookahead(7, 5, 7), 1, "both"),
    (jl.Lookahead(1, 6, 2), 1, "greedy"),
    (jl.Lookahead(12, 3, 1), 1, "sampled"),
    (jl.Lookahead(2, 8, 5), 1, "greedy"),
    (jl.Lookahead(5, 3, 5, pool_capacity=8), 1, "sampled"),
    (jl.Lookahead(5, 4, 3, prompt_lookup=False), 3, "greedy"),
    (jl.Lookahead(5, 4, 3), 3, "sampled"),
    (jl.Lookahead(4, 3, 2, pool_capacity=16), 5, "greedy"),
    (jl.Lookahead(6, 5, 4, prompt_pool=False), 2, "sampled"),
    (jl.Lookahead(4, 4, 2, reference=True), 1, "sampled"),
    (jl.Lookahead(3, 8, 3, prompt_pool=False, reference=True), 2, "greedy"),
    (jl.PromptLookup(), 1, "greedy"),
    (jl.PromptLookup(4, 3, 3), 3, "sampled"),
    (jl.PromptLookup(2, 16, 2, policy="longest"), 2, "greedy"),
    (jl.Jacobi(4), 2, "both"),
    (jl.Recycling(2), 1, "greedy"),
    (jl.Recycling(8), 3, "sampled"),
    (jl.Recycling(40), 2, "greedy"),
    (EAGER_AUTO, 1, "sampled"),
    (WIDE_AUTOS[0], 3, "greedy"),
    (WIDE_AUTOS[1], 2, "sampled"),
]


def random_case(rng: random.Random, batch: int, vocab_size: int):
    longest = rng.choice([1, 2, 3, 12, 16])
    lengths = [rng.randint(1, longest) for _ in range(batch)]
    alphabet = rng.choice([2, 5, vocab_size])
    prompts = [[rng.randrange(alphabet) for _ in range(n)] for n in lengths]
    return prompts, rng.choice([0, 1, 2, 3, 5, 9, 33, 60])


def random_sampling(rng: random.Random) -> jl.Sampling:
    return jl.Sampling(
        temperature=rng.choice([0.05, 0.3, 1.0]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(1000),
    )


@pytest.mark.optimized
@pytest.mark.parametrize("strategy, batch, chosen", SHAPES, ids=str)
def test_equals_plain_decoding(strategy, batch, chosen, cases_per_shape):
    """The same ids, the same reason to stop, row by row."""
    rng = random.Random(f"{strategy} {batch}")
    rounds = tokens = 0
    for _ in range(cases_per_shape):
        params = tiny_params(rng.randrange(4))
        prompts, budget = random_case(rng, batch, TINY.vocab_size)
        is_sampled = chosen == "sampled" or (chosen == "both" and rng.random() < 0.5)
        sampling = random_sampling(rng) if is_sampled else jl.Sampling()
        cfg = jl.Config(model=TINY, strategy=strategy, sampling=sampling, max_new_tokens=budget)
        row_ids = rng.sample(range(9), batch)
        expected = plain(params, prompts, cfg, row_ids=row_ids)
        # EOS anywhere: ids that the text really contains, so that it falls inside blocks.
        emitted = sorted({t for row in expected.tokens for t in row})
        if emitted and rng.random() < 0.6:
            eos = tuple(rng.sample(emitted, min(len(emitted), rng.choice([1, 2]))))
            cfg = dataclasses.replace(cfg, eos_token_ids=eos)
            expected = plain(params, prompts, cfg, row_ids=row_ids)
        got = jl.generate(params, prompts, cfg, row_ids=row_ids)
        assert got.tokens == expected.tokens
        assert got.finish_reason == expected.finish_reason
        rounds += sum(got.num_rounds)
        tokens += sum(map(len, got.tokens))
    assert rounds < tokens, "no draft was accepted: a wrong one would not show"


def test_a_row_draws_the_same_text_in_any_batch_slot():
    prompts = [[1], [2, 3, 4, 5], [6, 7] * 4]
    for seed in range(3):
        sampling = jl.Sampling(temperature=1.0, top_p=0.9, seed=seed)
        cfg = jl.Config(
            model=TINY, strategy=jl.Lookahead(5, 4, 3), sampling=sampling, max_new_tokens=40
        )
        got = jl.generate(tiny_params(0), prompts, cfg)
        alone = jl.generate(tiny_params(0), prompts[2], cfg, row_ids=[2])
        assert alone.tokens == got.tokens[2]
        assert alone.num_rounds == got.num_rounds[2]
    other = dataclasses.replace(cfg, sampling=jl.Sampling(temperature=1.0, top_p=0.9, seed=99))
    assert jl.generate(tiny_params(0), prompts, other).tokens != got.tokens


@pytest.mark.optimized
@pytest.mark.parametrize("kv_heads, tied", [(1, True), (2, False), (4, True)])
def test_plain_decoding_equals_hf_generate(kv_heads, tied):
    torch = pytest.importorskip("torch", reason="torch is the oracle of this test")
    config = dataclasses.replace(TINY, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    params = tiny_params(kv_heads, config)
    hf = hf_llama(params, config)
    rng = random.Random(kv_heads)
    for length in (1, 2, 7, 16):
        prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
        with torch.no_grad():
            ids = hf.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length),
                do_sample=False,
                max_new_tokens=48,
            )
        cfg = jl.Config(model=config, max_new_tokens=48)
        assert plain(params, prompt, cfg).tokens == ids[0, length:].tolist()


@functools.partial(jax.jit, static_argnums=0)
def fresh_kv(config: jl.ModelConfig, params, tokens):
    """K/V of every token, by one forward pass without a cache."""
    model, size = jl.LlamaModel(config), tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    lengths = jnp.zeros(len(tokens), jnp.int32)
    empty = model.init_cache(len(tokens), 0)
    causal = jnp.tri(size, dtype=bool)
    return model.forward(params, tokens, positions, causal, empty, lengths)[1]


def assert_committed(cache: jl.KVCache, fresh, lengths) -> None:
    """Row by row, as many slots as are committed."""
    for layer, (keys, values) in enumerate(fresh):
        for got, want in ((cache.keys[layer], keys), (cache.values[layer], values)):
            got, want = np.asarray(got), np.asarray(want)
            for b, length in enumerate(lengths):
                np.testing.assert_allclose(
                    got[b, :, :length], want[b, :, :length], atol=1e-5, rtol=0
                )


@pytest.mark.parametrize(
    "strategy",
    [
        jl.Autoregressive(),
        jl.Lookahead(4, 4, 3),
        jl.Lookahead(3, 2, 2),
        jl.Lookahead(3, 5, 2, reference=True),
        jl.PromptLookup(candidates=3, num_draft_tokens=4),
        jl.Jacobi(6),
        jl.Recycling(20),
        EAGER_AUTO,
        WIDE_AUTOS[1],
    ],
)
def test_committed_cache_equals_a_fresh_prefill_after_every_round(strategy):
    params = tiny_params(0)
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=40)
    for state, _ in jl.iter_rounds(params, [[5, 9, 5], [7], [1, 2, 3, 4] * 4], cfg):
        fresh = fresh_kv(TINY, params, state.tokens[:, :64])
        assert_committed(state.cache, fresh, np.asarray(state.length) - 1)


def test_prefill_in_chunks_equals_one_forward():
    """Ragged prompts over several prefill chunks: every committed K/V row, and the next text."""
    config = dataclasses.replace(TINY, max_position_embeddings=2048)
    params, rng = tiny_params(0, config), random.Random(0)
    lengths = (1300, 5, 897)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in lengths]
    cfg = jl.Config(model=config, strategy=jl.Lookahead(3, 3, 2), max_new_tokens=20)
    call = prepare(params, prompts, cfg)
    assert call.prefill_chunk == 448, "three passes, and a row that ends with the second"
    fresh = fresh_kv(config, params, call.arrays.prompt[:, :1300])
    assert_committed(start(call, params).cache, fresh, np.array(lengths) - 1)
    assert jl.generate(params, prompts, cfg).tokens == plain(params, prompts, cfg).tokens


@pytest.mark.parametrize("strategy", [jl.Lookahead(5, 4, 3), jl.Recycling(12)], ids=str)
def test_long_texts_cross_attention_chunks(strategy):
    params = tiny_params(2)
    prompts = [[7, 8, 9] * 70, [3], list(range(60))]
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=400)
    got, expected = jl.generate(params, prompts, cfg), plain(params, prompts, cfg)
    assert got.tokens == expected.tokens
    assert sum(got.num_rounds) < 0.9 * sum(expected.num_rounds)


def test_64_bit_mode():
    """The same text where JAX's default integers and floats have 64 bits."""
    code = """
import jax
import jlookahead as jl
from models import TINY, WIDE_AUTOS, LeakProbe, plain, tiny_params
assert jax.numpy.arange(1).dtype == "int64"
prompts = [[1, 2, 3], [4]]
strategies = (
    jl.Lookahead(3, 3, 2, reference=True),
    jl.PromptLookup(),
    jl.Jacobi(3),
    jl.Recycling(9),
    *WIDE_AUTOS,
)
for strategy in strategies:
    cfg, model = jl.Config(strategy=strategy, max_new_tokens=12), LeakProbe(11)
    out = jl.generate(None, prompts, cfg, model=model)
    assert out.tokens == plain(None, prompts, cfg, model=model).tokens
sampled = jl.Sampling(temperature=0.7, top_k=9, top_p=0.9)
cfg = jl.Config(model=TINY, strategy=jl.Lookahead(3, 3, 2), sampling=sampled, max_new_tokens=12)
params = tiny_params(0)
assert jl.generate(params, prompts, cfg).tokens == plain(params, prompts, cfg).tokens
"""
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONPATH": str(Path(__file__).parent)}
    arguments = [sys.executable, "-W", "error::FutureWarning", "-c", code]
    subprocess.run(arguments, check=True, timeout=600, env=environment)


@pytest.mark.parametrize(
    "strategy",
    [
        *(
            jl.Lookahead(*knobs, reference=reference)
            for knobs in [(3, 4, 3), (5, 3, 4), (1, 5, 6)]
            for reference in (False, True)
        ),
        jl.PromptLookup(num_draft_tokens=5, candidates=4),
        jl.Jacobi(7),
        jl.Recycling(5),
        jl.Recycling(40),
        *WIDE_AUTOS,
    ],
    ids=str,
)
def test_nothing_leaks_between_rows_that_must_not_see_each_other(strategy):
    model = LeakProbe(vocab_size=11)
    cfg = jl.Config(strategy=strategy, max_new_tokens=150)
    prompts = [[3], [1, 2, 3] * 5, [4, 4]]
    got = jl.generate(None, prompts, cfg, model=model)
    # Decoded alone, a row has no others to see.
    assert got.tokens == [plain(None, prompt, cfg, model=model).tokens for prompt in prompts]
    assert sum(got.num_rounds) < 3 * 150


@pytest.mark.parametrize("ngram", [2, 3, 5])
@pytest.mark.parametrize("eos", [(), (3,)])
@pytest.mark.parametrize("budget", range(16))
def test_budget_and_eos_are_exact_when_everything_is_accepted(ngram, eos, budget):
    successor = jnp.array([1, 2, 3, 4, 5, 0])
    cfg = jl.Config(strategy=jl.Lookahead(3, ngram, 2), max_new_tokens=budget, eos_token_ids=eos)
    # One lap in the prompt, the EOS id in it included: only a generated EOS ends the text.
    out = jl.generate(successor, [0, 1, 2, 3, 4, 5, 0], cfg, model=SuccessorTable(6))
    lap = [1, 2, 3, 4, 5, 0] * 4
    expected = lap[:budget]
    ends = bool(eos) and 3 in expected
    if ends:
        expected = expected[: expected.index(3) + 1]
    assert out.tokens == expected
    assert out.finish_reason == ("eos" if ends else "length")


@pytest.mark.parametrize("ngram", [2, 3, 4, 6])
def test_a_cyclic_text_reaches_the_most_tokens_a_round_can_give(ngram):
    """Two laps in the prompt: every round must emit the N-1 drafts and the bonus token. A key
    one token behind, or a bonus thrown away, would still give the right text."""
    successor = jnp.roll(jnp.arange(23), -1)
    prompt = [*range(23), *range(23), 0]
    strategy = jl.Lookahead(4, ngram, 2, prompt_lookup=False)
    cfg = jl.Config(strategy=strategy, max_new_tokens=20 * ngram)
    out = jl.generate(successor, prompt, cfg, model=SuccessorTable(23))
    assert out.tokens == [(1 + i) % 23 for i in range(20 * ngram)]
    assert out.num_rounds == 20


def test_lookup_and_pool_share_the_draft_rows():
    """A lap in the prompt: lookup fills its chains, twelve tokens, and the bonus comes on top.
    Without lookup no round of the same program could emit more than five."""
    successor = jnp.roll(jnp.arange(23), -1)
    cfg = jl.Config(strategy=jl.Lookahead(4, 5, 4), max_new_tokens=20 * 13)
    out = jl.generate(successor, [*range(23), *range(23), 0], cfg, model=SuccessorTable(23))
    assert out.tokens == [(1 + i) % 23 for i in range(20 * 13)]
    assert out.num_rounds == 20
    assert out.sources == ([*["lookup"] * 12, "bonus"]) * 20


def test_the_window_alone_finds_ngrams():
    """Acceptance from the trajectory, no text fed: a window that learnt nothing fails here."""
    successor = jnp.roll(jnp.arange(9), -1)
    strategy = jl.Lookahead(9, 4, 3, prompt_pool=False, prompt_lookup=False)
    cfg = jl.Config(strategy=strategy, max_new_tokens=200)
    out = jl.generate(successor, [0], cfg, model=SuccessorTable(9))
    assert out.tokens == [(1 + i) % 9 for i in range(200)]
    assert out.tokens_per_round > 3


def memory(state: jl.RoundState) -> list[jax.Array]:
    return jax.tree.leaves((state.window, state.pool, state.successors, state.block))


@pytest.mark.parametrize(
    "strategy", [jl.Lookahead(4, 3, 2), jl.PromptLookup(), jl.Jacobi(4), jl.Recycling(12)], ids=str
)
def test_finished_rows_are_left_alone(strategy):
    params = tiny_params(1)
    cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=50)
    eos = plain(params, [1, 2, 3], cfg).tokens[2]
    cfg = dataclasses.replace(cfg, eos_token_ids=(eos,), pad_token_id=96)
    previous = None
    for state, info in jl.iter_rounds(params, [[1, 2, 3], [50, 60]], cfg):
        if previous is not None and previous.done[0]:
            for name in ("tokens", "length", "finish", "num_rounds"):
                np.testing.assert_array_equal(getattr(state, name)[0], getattr(previous, name)[0])
            for now, before in zip(memory(state), memory(previous), strict=True):
                np.testing.assert_array_equal(now[0], before[0])
            assert info.num_emitted[0] == info.num_accepted[0] == 0
            assert (info.emitted[0] == 96).all()
        previous = state
    assert previous.done.all()


def test_a_round_does_not_change_its_input():
    cfg = jl.Config(model=TINY, strategy=jl.Lookahead(3, 3, 2), max_new_tokens=5)
    rounds = jl.iter_rounds(tiny_params(0), [4, 5], cfg)
    state, _ = next(rounds)
    before = jax.tree.map(np.array, state)
    next(rounds)
    jax.tree.map(np.testing.assert_array_equal, before, state)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_rows_that_must_not_be_seen_may_hold_any_number(number):
    """0 times infinity is no 0, and float16 reaches infinity."""
    config, bad = dataclasses.replace(TINY, tie_word_embeddings=False), 63
    params = tiny_params(0, config)
    params["embed_tokens"]["weight"] = params["embed_tokens"]["weight"].at[bad].set(number)
    prompts = [[5, 6, 7, 8, 9], [1, 2, 3]]
    cfg = jl.Config(model=config, max_new_tokens=30)
    expected = plain(params, prompts, cfg).tokens
    assert len(set(expected[0])) > 3 and bad not in expected[0] + expected[1]
    # The padding behind a prompt, and another row of the batch.
    padded = dataclasses.replace(cfg, pad_token_id=bad)
    assert plain(params, prompts, padded).tokens == expected
    assert plain(params, [[bad] * 9, *prompts], cfg).tokens[1:] == expected
    # The window.
    strategy = jl.Lookahead(4, 3, 2, reference=True)
    seeded = dataclasses.replace(cfg, strategy=strategy)
    for prompt, tokens in zip(prompts, expected, strict=True):
        *_, (state, _) = jl.iter_rounds(params, prompt, seeded, [bad] * strategy.num_seeds)
        assert state.tokens[0, len(prompt) : state.length[0]].tolist() == tokens
