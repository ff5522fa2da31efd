"""`Session`: whatever it reuses, its results are those of a fresh `generate`."""

from __future__ import annotations

import dataclasses
import random

import checkpoints as files
import pytest
from models import TINY, LeakProbe, tiny_params
from test_discipline import count_compilations

import jlookahead as jl
from jlookahead import session as session_module

SAMPLED = jl.Sampling(temperature=0.8, top_k=30, seed=3)
STRATEGIES = [jl.Lookahead(5, 4, 3), jl.PromptLookup(), jl.Recycling(12), jl.Autoregressive()]


def some_ids(seed: int, size: int, vocab_size: int = 97) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(size)]


def probe_session(max_new_tokens: int = 12, strategy: jl.Strategy = STRATEGIES[0]):
    """A model whose text changes if one row of the cache is wrong, and how it is asked."""
    model = LeakProbe(vocab_size=11)
    cfg = jl.Config(strategy=strategy, max_new_tokens=max_new_tokens)

    def check(session: jl.Session, prompt: list[int], num_reused: int) -> list[int]:
        tokens = session.generate(prompt).tokens
        assert tokens == jl.generate(None, prompt, cfg, model=model).tokens
        assert session.num_reused == num_reused
        assert session.num_prefilled == len(prompt) - num_reused
        return tokens

    return jl.Session(None, cfg, model=model), check


@pytest.mark.parametrize(
    "strategy, sampling",
    [(STRATEGIES[0], SAMPLED), *((strategy, jl.Sampling()) for strategy in STRATEGIES[1:])],
    ids=lambda value: type(value).__name__,
)
def test_three_turns_are_three_fresh_calls(strategy, sampling):
    params = tiny_params(1)
    cfg = jl.Config(model=TINY, strategy=strategy, sampling=sampling, max_new_tokens=40)
    session = jl.Session(params, cfg)
    history: list[int] = []
    for turn in range(3):
        prompt = history + some_ids(turn, 30)
        out = session.generate(prompt)
        assert out.tokens == jl.generate(params, prompt, cfg).tokens
        # All committed tokens but the last, which never had its row.
        assert session.num_reused == max(len(history) - 1, 0)
        assert session.num_prefilled == (31 if turn else 30)
        history = prompt + out.tokens


@pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=lambda s: type(s).__name__)
def test_an_edited_history_falls_back_to_the_common_prefix(strategy):
    session, check = probe_session(strategy=strategy)
    prompt = some_ids(0, 100, 11)
    history = prompt + check(session, prompt, 0)
    edited = list(history)
    edited[70] = (edited[70] + 1) % 11
    check(session, edited, 70)
    check(session, history, 70)
    other = [(history[0] + 1) % 11, *history[1:]]
    check(session, other, 0)


def test_the_last_prompt_token_is_always_a_row():
    session, check = probe_session()
    prompt = some_ids(1, 50, 11)
    tokens = check(session, prompt, 0)
    assert check(session, prompt, 49) == tokens
    check(session, [*prompt, *tokens], 61)
    check(session, prompt[:1], 0)


def test_a_conversation_shrinks_and_grows_again():
    session, check = probe_session()
    prompt = some_ids(2, 400, 11)
    history = prompt + check(session, prompt, 0)
    short = prompt[:20] + check(session, prompt[:20], 19)
    # What lay behind the short text is no longer known.
    common = next(i for i, pair in enumerate(zip(short, history, strict=False)) if len({*pair}) > 1)
    check(session, history, common)
    check(session, history[:300], 299)


@pytest.mark.parametrize("num_new", [1, 63, 65, 513, 1100])
def test_what_follows_is_prefilled_in_chunks(num_new):
    session, check = probe_session()
    prompt = some_ids(3, 77, 11)
    history = prompt + check(session, prompt, 0)
    longer = history + some_ids(4, num_new, 11)
    history = longer + check(session, longer, len(history) - 1)
    check(session, [*history, 1], len(history) - 1)


@pytest.mark.parametrize("at", ["prepare", "start", "run_rounds"])
def test_an_exception_leaves_it_usable(at, monkeypatch):
    session, check = probe_session()
    prompt = some_ids(5, 40, 11)
    history = prompt + check(session, prompt, 0)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session_module, at, fail)
        with pytest.raises(KeyboardInterrupt):
            session.generate(history)
    # What was donated is gone; what was not is reused.
    check(session, history, len(history) - 1 if at == "prepare" else 0)
    check(session, [*history, 1], len(history))


def test_refusals_leave_it_as_it_was():
    session, check = probe_session()
    prompt = some_ids(6, 40, 11)
    history = prompt + check(session, prompt, 0)
    refused = [([], "empty"), ([[1], [2]], "a batch of 2 rows"), ([11], "0 to 10"), ("a", "token")]
    for bad, message in [*refused, ([1] * 4090, "context")]:
        with pytest.raises(ValueError, match=message):
            session.generate(bad)
    check(session, history, len(history) - 1)


def _without_template() -> jl.Session:
    tokenizer = files.tiny_tokenizer()
    tokenizer.chat_template = None
    cfg = jl.Config(max_new_tokens=2)
    return jl.Session(None, cfg, tokenizer=tokenizer, model=LeakProbe(vocab_size=300))


def test_a_stream_may_be_left_half_way():
    session, check = probe_session(max_new_tokens=60)
    prompt = some_ids(7, 40, 11)
    expected = jl.generate(None, prompt, session._cfg, model=session._model).tokens
    assert [token.token for token in session.stream(prompt)] == expected
    left = session.stream(prompt)
    assert next(left).token == expected[0]
    check(session, [*prompt, expected[0], 3], 41)
    with pytest.raises(RuntimeError, match="another prompt"):
        list(left)


def test_a_chat():
    tokenizer = files.tiny_tokenizer()
    config = dataclasses.replace(TINY, vocab_size=300)
    params = tiny_params(0, config)
    strategy = jl.Lookahead(3, 3, 2)
    cfg = jl.Config(model=config, strategy=strategy, max_new_tokens=20, eos_token_ids=(1,))
    session = jl.Session(params, cfg, tokenizer=tokenizer)
    session.messages.append({"role": "system", "content": "the mat"})
    for turn, text in enumerate(["the cat", "sat on", "the hat"]):
        asked = [*session.messages, {"role": "user", "content": text}]
        out = session.send(text)
        # The pool that was kept may save rounds.
        fresh = jl.generate(params, asked, cfg, tokenizer=tokenizer)
        assert (out.tokens, out.text) == (fresh.tokens, fresh.text)
        assert session.messages == [*asked, {"role": "assistant", "content": out.text}]
        assert (session.num_reused > 0) == (turn > 0)


def test_a_failed_message_joins_nothing():
    session = _without_template()
    with pytest.raises(ValueError, match="no chat template"):
        session.send("hello")
    assert session.messages == []


def test_turns_of_one_bucket_compile_nothing_anew():
    session, _ = probe_session()
    history = some_ids(8, 20, 11)
    for _ in range(2):
        history = [*history, *session.generate(history).tokens, 1]
    with count_compilations() as count:
        session.generate(history)
    assert count[0] == 0
