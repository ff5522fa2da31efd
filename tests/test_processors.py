"""Logits processors see, at every position that is chosen, what plain decoding shows them.

Hence: with any of them every strategy emits plain decoding's ids; plain decoding's own oracles are
Hugging Face's processors and `generate`, and sums in plain Python.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY, TableModel, hf_llama, plain, tiny_params

import jlookahead as jl
from jlookahead import decoding
from jlookahead.processors import (
    AllowedTokens,
    BannedTokens,
    Context,
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
    _MinNewTokens,
)

VOCAB = TINY.vocab_size
STRATEGIES = [
    jl.Lookahead(4, 2, 3),
    jl.Lookahead(5, 4, 3),
    jl.Lookahead(3, 6, 4),
    jl.PromptLookup(),
    jl.Recycling(14),
    jl.Jacobi(5),
]
# A Markov chain, so that all else that a choice depends on is what the processors see.
CHAIN = TableModel(VOCAB)
TABLE = 3 * jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))
PROMPTS = [[1, 2, 3, 1, 2], [50], [7, 8] * 5]


def ban_by_parity(logits, context):
    """Even ids at even positions, odd ones at odd positions."""
    is_other = (jnp.arange(logits.shape[-1]) + context.length[:, None]) % 2 == 1
    return jnp.where(is_other, -jnp.inf, logits)


def hash_of_text(context: Context) -> jax.Array:
    """`[B]` uint32, of every token and its position, of the lengths, and of nothing else."""
    slot = jnp.arange(context.tokens.shape[1], dtype=jnp.uint32)
    terms = (context.tokens.astype(jnp.uint32) + 1) * (slot * jnp.uint32(2654435761) + 97)
    terms = jnp.where(slot < context.length[:, None].astype(jnp.uint32), terms, 0)
    total = terms.sum(axis=1, dtype=jnp.uint32)
    lengths = 31 * context.length + 1009 * context.prompt_len
    return (total + lengths.astype(jnp.uint32)) * jnp.uint32(2246822519)


def prefer_by_hash(logits, context):
    """Three ids in the running, which one says the whole text: one wrong token shows at once."""
    preferred = hash_of_text(context) >> 20
    return logits + 1000.0 * jax.nn.one_hot(preferred % 3, logits.shape[-1])


# --- one by one, against Hugging Face and against the definitions --------------------------


def hf_processors():
    torch = pytest.importorskip("torch", reason="torch is the oracle of this test")
    hf = pytest.importorskip("transformers")
    return torch, [
        (RepetitionPenalty(1.3), lambda _: hf.RepetitionPenaltyLogitsProcessor(1.3)),
        (RepetitionPenalty(0.6), lambda _: hf.RepetitionPenaltyLogitsProcessor(0.6)),
        (BannedTokens((0, 5, 9)), lambda _: hf.SuppressTokensLogitsProcessor([0, 5, 9])),
        (
            LogitBias(((3, 2.5), (4, -7.0))),
            lambda _: hf.SequenceBiasLogitsProcessor([[[3], 2.5], [[4], -7.0]]),
        ),
        (
            _MinNewTokens(jnp.int32(3), jnp.array([2, 6, -1])),
            lambda prompt_len: hf.MinNewTokensLengthLogitsProcessor(
                prompt_len, 3, [2, 6], device="cpu"
            ),
        ),
    ]


@pytest.mark.parametrize("which", range(5))
def test_equal_hugging_faces_processors(which):
    torch, pairs = hf_processors()
    processor, make_hf = pairs[which]
    rng = np.random.default_rng(which)
    for _ in range(20):
        batch, size, vocab_size = rng.integers([1, 1, 10], [4, 9, 30])
        prompt_len = rng.integers(1, size + 1)
        tokens = rng.integers(0, vocab_size, (batch, size + 5))  # garbage behind the text
        logits = rng.normal(size=(batch, vocab_size)).astype(np.float32)
        rows = np.ones(batch, np.int32)
        context = Context(jnp.array(tokens, "int32"), size * rows, prompt_len * rows)
        expected = make_hf(int(prompt_len))(
            torch.tensor(tokens[:, :size]), torch.tensor(logits.copy())
        )
        np.testing.assert_array_equal(processor(logits, context), expected.numpy())


@given(st.lists(st.integers(0, 6), min_size=9, max_size=9), st.integers(1, 9), st.data())
@settings(deadline=None, max_examples=100)
def test_counts_stop_at_the_length_and_leave_out_the_prompt(tokens, length, data):
    prompt_len = data.draw(st.integers(1, length))
    context = Context(jnp.array([tokens]), jnp.array([length]), jnp.array([prompt_len]))
    text, output = tokens[:length], tokens[prompt_len:length]
    assert context.counts(7, with_prompt=True)[0].tolist() == [text.count(i) for i in range(7)]
    assert context.counts(7, with_prompt=False)[0].tolist() == [output.count(i) for i in range(7)]
    logits = jnp.linspace(-3.0, 3.0, 7)[None]
    for processor, change in [
        (PresencePenalty(0.5), [0.5 * (i in output) for i in range(7)]),
        (FrequencyPenalty(0.7), [0.7 * output.count(i) for i in range(7)]),
    ]:
        np.testing.assert_allclose(processor(logits, context)[0], logits[0] - jnp.array(change))


def test_allowed_ids_are_the_others_of_banned_ones():
    logits, context = jnp.arange(5.0)[None], Context(*[jnp.ones((1, 1), int)] * 3)
    allowed = AllowedTokens((1, 3))(logits, context)
    assert allowed.tolist() == BannedTokens((0, 2, 4))(logits, context).tolist()
    assert allowed.tolist() == [[-np.inf, 1, -np.inf, 3, -np.inf]]


# --- in generation --------------------------------------------------------------------------

GREEDY, SAMPLED = jl.Sampling(), jl.Sampling(temperature=0.4, top_k=9, top_p=0.9, seed=3)


def penalties(repetition: float, frequency: float, presence: float) -> tuple:
    return RepetitionPenalty(repetition), FrequencyPenalty(frequency), PresencePenalty(presence)


# Every strategy twice, greedy and sampled. The three penalties share their programs.
CASES = {
    "penalties": (penalties(1.3, 0.7, 0.5), SAMPLED, STRATEGIES[::2]),
    "strong repetition": (penalties(4.0, 0.0, 0.0), SAMPLED, STRATEGIES[::2]),
    "favoured repetition": (penalties(0.8, -0.4, 0.0), SAMPLED, STRATEGIES[::2]),
    "sets": (
        (BannedTokens((0, 3, 96)), AllowedTokens(tuple(range(1, 30))), LogitBias(((5, 3.0),))),
        SAMPLED,
        STRATEGIES[1::2],
    ),
    "parity": ((ban_by_parity,), GREEDY, STRATEGIES[::2]),
    "hash": ((prefer_by_hash, FrequencyPenalty(0.3)), GREEDY, STRATEGIES[1::2]),
}


@functools.cache
def bare_tokens(sampling: jl.Sampling) -> list[list[int]]:
    cfg = jl.Config(sampling=sampling, max_new_tokens=40)
    return plain(TABLE, PROMPTS, cfg, model=CHAIN).tokens


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_decoding(name):
    """A batch of several lengths, with EOS ids held off for a while."""
    processors, sampling, strategies = CASES[name]
    cfg = jl.Config(sampling=sampling, processors=processors, max_new_tokens=40, min_new_tokens=8)
    full = plain(TABLE, PROMPTS, cfg, model=CHAIN)
    assert full.tokens != bare_tokens(sampling), "the processors change nothing"
    eos = (full.tokens[0][3], full.tokens[1][9])
    cfg = dataclasses.replace(cfg, eos_token_ids=eos)
    expected = plain(TABLE, PROMPTS, cfg, model=CHAIN)
    tokens = rounds = 0
    for strategy in strategies:
        cfg = dataclasses.replace(cfg, strategy=strategy)
        got = jl.generate(TABLE, PROMPTS, cfg, model=CHAIN)
        assert got.tokens == expected.tokens
        assert got.finish_reason == expected.finish_reason
        tokens += sum(map(len, got.tokens))
        rounds += sum(got.num_rounds)
    # Penalties forbid the repetitions that some strategies live on, hence not for each alone.
    assert rounds < tokens, "no draft was accepted: a wrong context would not show"


@pytest.mark.parametrize("strategy", [jl.Autoregressive(), *STRATEGIES[1:4]], ids=str)
def test_a_processor_sees_the_exact_text(strategy):
    """The ids are those that Python finds by hashing the text, token after token."""
    cfg = jl.Config(strategy=strategy, processors=(prefer_by_hash,), max_new_tokens=60)
    out = jl.generate(TABLE, PROMPTS, cfg, model=CHAIN)
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        text = list(prompt)
        for _ in range(60):
            total = sum((t + 1) * (i * 2654435761 + 97) for i, t in enumerate(text))
            total += 31 * len(text) + 1009 * len(prompt)
            text.append((total * 2246822519 % 2**32 >> 20) % 3)
        assert tokens == text[len(prompt) :]
    if not isinstance(strategy, jl.Autoregressive):
        assert sum(out.num_rounds) < 0.9 * sum(map(len, out.tokens))


@pytest.mark.parametrize("verify", ["coupled", "residual"])
def test_excluded_ids_are_never_sampled(verify):
    sampling = jl.Sampling(temperature=1.5, seed=4, verify=verify)
    cfg = jl.Config(
        strategy=jl.Lookahead(5, 4, 3),
        sampling=sampling,
        processors=(AllowedTokens((3, 8, 20, 40)), BannedTokens((20,)), ban_by_parity),
        max_new_tokens=60,
    )
    out = jl.generate(TABLE, PROMPTS, cfg, model=CHAIN)
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        for position, token in enumerate(tokens, start=len(prompt)):
            assert token in ((8, 40) if position % 2 == 0 else (3,))
    assert sum(out.num_rounds) < sum(map(len, out.tokens))


@pytest.mark.parametrize("strategy", [jl.Autoregressive(), *STRATEGIES[1::2]], ids=str)
def test_no_eos_before_the_least_number_of_tokens(strategy):
    """Every id is an EOS id but one: the row ends as soon as it may."""
    for num in (0, 1, 2, 7, 12):
        cfg = jl.Config(
            strategy=strategy,
            eos_token_ids=tuple(range(1, VOCAB)),
            min_new_tokens=num,
            max_new_tokens=12,
        )
        out = jl.generate(TABLE, PROMPTS, cfg, model=CHAIN)
        assert out.tokens == plain(TABLE, PROMPTS, cfg, model=CHAIN).tokens
        for tokens, reason in zip(out.tokens, out.finish_reason, strict=True):
            assert tokens[:num] == [0] * num
            assert len(tokens) > num or reason == "length"


def test_plain_decoding_equals_hf_generate():
    torch = pytest.importorskip("torch", reason="torch is the oracle of this test")
    params = tiny_params(2)
    model = hf_llama(params, TINY)
    bans, bias = (11, 30, 61), ((5, 1.5), (7, -4.0))
    cfg = jl.Config(
        model=TINY,
        strategy=jl.Lookahead(5, 4, 3),
        max_new_tokens=40,
        processors=(LogitBias(bias), RepetitionPenalty(1.2), BannedTokens(bans)),
    )
    rng = random.Random(0)
    for length in (1, 4, 9):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        eos = jl.generate(params, prompt, cfg).tokens[6]
        row = dataclasses.replace(cfg, eos_token_ids=(eos,), min_new_tokens=20)
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length),
                do_sample=False,
                max_new_tokens=40,
                min_new_tokens=20,
                eos_token_id=eos,
                repetition_penalty=1.2,
                suppress_tokens=list(bans),
                sequence_bias=[[[token], value] for token, value in bias],
            )
        assert jl.generate(params, prompt, row).tokens == ids[0, length:].tolist()


# --- compiling ------------------------------------------------------------------------------


@flax.struct.dataclass
class Favour:
    """A user's own pytree."""

    token: int
    by: float
    scale: str = flax.struct.field(pytree_node=False, default="log")

    def __call__(self, logits, context):
        return logits.at[:, self.token].add(self.by)


def test_new_numbers_compile_nothing():
    def run(penalty, ids, token):
        cfg = jl.Config(
            strategy=STRATEGIES[0],
            max_new_tokens=20,
            eos_token_ids=(token,),
            min_new_tokens=token,
            processors=(
                *penalties(1.0 + penalty, penalty, penalty),
                BannedTokens(ids),
                AllowedTokens(tuple(range(90 - len(ids)))),
                LogitBias(tuple((i, penalty) for i in ids)),
                Favour(token, 40 * penalty),
            ),
        )
        out = jl.generate(TABLE, [1, 2, 3], cfg, model=CHAIN)
        return out.tokens, decoding.run_rounds._cache_size(), decoding._start._cache_size()

    first, *before = run(0.5, (4, 5), 3)
    second, *after = run(0.25, (1,), 9)
    assert before == after
    assert first != second


def test_a_call_makes_explicit_transfers_only():
    table = np.linspace(0, 1, VOCAB, dtype=np.float32)

    def add_table(logits, context):
        return logits + table

    cfg = jl.Config(
        strategy=STRATEGIES[0],
        max_new_tokens=10,
        eos_token_ids=(1,),
        min_new_tokens=2,
        processors=(*penalties(1.3, 0.7, 0.5), BannedTokens((1,)), Favour(3, 0.5), add_table),
        logprobs=True,
    )
    expected = jl.generate(TABLE, [1, 2, 3], cfg, model=CHAIN)
    with jax.transfer_guard("disallow"):
        assert jl.generate(TABLE, [1, 2, 3], cfg, model=CHAIN) == expected
        streamed = list(jl.stream(TABLE, [1, 2, 3], cfg, model=CHAIN))
    assert [s.token for s in streamed] == expected.tokens


def test_where_no_token_is_left_the_choice_is_still_an_id():
    """A user's function may exclude everything; the module says what happens."""

    def exclude_all(logits, context):
        return jnp.full_like(logits, -jnp.inf)

    for sampling in (
        jl.Sampling(),
        jl.Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1),
        jl.Sampling(temperature=1.0, verify="residual"),
    ):
        cfg = jl.Config(
            strategy=STRATEGIES[0], sampling=sampling, processors=(exclude_all,), max_new_tokens=5
        )
        tokens = jl.generate(TABLE, [1, 2, 3], cfg, model=CHAIN).tokens
        assert len(tokens) == 5 and all(0 <= token < VOCAB for token in tokens)
