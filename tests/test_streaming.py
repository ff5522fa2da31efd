"""Streaming yields what `generate` returns, token by token, and text that is never broken or taken
back: per row the pieces add up to exactly the text of `generate`, stop strings cut off."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from checkpoints import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY, SuccessorTable, tiny_params
from test_stopping import sentencepiece_tokenizer

import jlookahead as jl
from jlookahead.text import IncrementalText


class Bytes:
    """A byte-level tokenizer: id = byte, 256 a special token."""

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@pytest.mark.parametrize("strategy", [jl.Autoregressive(), jl.Lookahead(4, 4, 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("budget", [0, 1, 4, 37])
def test_streamed_tokens_are_the_generated_ones(strategy, temperature, budget):
    sampling = jl.Sampling(temperature=temperature, seed=5)
    cfg = jl.Config(
        model=TINY, strategy=strategy, sampling=sampling, max_new_tokens=budget, eos_token_ids=(7,)
    )
    expected = jl.generate(tiny_params(2), [1, 2, 3], cfg)
    streamed = list(jl.stream(tiny_params(2), [1, 2, 3], cfg))
    assert [s.token for s in streamed] == expected.tokens
    assert [s.source for s in streamed] == expected.sources
    assert all(s.text is None for s in streamed)
    assert [s.finish_reason for s in streamed[:-1]] == [None] * max(budget and len(streamed) - 1, 0)
    if streamed:
        assert streamed[-1].finish_reason == expected.finish_reason
        assert streamed[-1].num_rounds == expected.num_rounds


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_characters_split_over_rounds_arrive_whole(ngram):
    text = "añ🙂ж"
    ids = [*text.encode(), 256]
    successor = [0] * 257
    for now, after in zip(ids, [*ids[1:], ids[0]], strict=True):
        successor[now] = after
    assert len(set(ids)) == len(ids), "a successor table needs distinct bytes"
    cfg = jl.Config(strategy=jl.Lookahead(3, ngram, 2), max_new_tokens=5 * len(ids))
    streamed = list(
        jl.stream(jnp.array(successor), ids, cfg, tokenizer=Bytes(), model=SuccessorTable(257))
    )
    assert "".join(s.text for s in streamed) == text * 5
    assert not any("\N{REPLACEMENT CHARACTER}" in s.text for s in streamed)


def test_an_incomplete_character_at_the_end_is_shown_as_such():
    pieces = IncrementalText(Bytes())
    first, second, *_ = "é".encode()
    assert pieces.add(ord("a"), is_last=False) == "a"
    assert pieces.add(first, is_last=False) == ""
    assert pieces.add(second, is_last=False) == "é"
    assert pieces.add(first, is_last=True) == "\N{REPLACEMENT CHARACTER}"


BATCH = [[1, 2, 3], [4], [5, 6] * 6]


def check_streamed(params, prompt, cfg: jl.Config, tokenizer=None) -> jl.Result:
    """Streams, and compares all of it with `generate`."""
    expected = jl.generate(params, prompt, cfg, tokenizer=tokenizer)
    streamed = list(jl.stream(params, prompt, cfg, tokenizer=tokenizer))
    assert {s.row for s in streamed} <= set(range(len(prompt)))
    for row, tokens in enumerate(expected.tokens):
        mine = [s for s in streamed if s.row == row]
        assert [s.token for s in mine] == tokens
        assert [s.source for s in mine] == expected.sources[row]
        if cfg.logprobs:
            assert [s.logprob for s in mine] == expected.logprobs[row]
        else:
            assert all(s.logprob is None for s in mine)
        if tokenizer is not None:
            assert "".join(s.text for s in mine) == expected.text[row]
        assert all(s.finish_reason is None for s in mine[:-1])
        if mine:
            assert mine[-1].finish_reason == expected.finish_reason[row]
            assert mine[-1].num_rounds == expected.num_rounds[row]
    return expected


@pytest.mark.parametrize("strategy", [jl.Autoregressive(), jl.Lookahead(4, 4, 3)])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_batch_is_streamed_row_by_row(strategy, logprobs):
    cfg = jl.Config(
        model=TINY,
        strategy=strategy,
        sampling=jl.Sampling(temperature=0.8, seed=1),
        logprobs=logprobs,
        max_new_tokens=37,
        eos_token_ids=(7, 8, 9),
    )
    out = check_streamed(tiny_params(2), BATCH, cfg)
    assert len({len(tokens) for tokens in out.tokens}) > 1, "rows must end at different times"
    for budget in (0, 1):
        check_streamed(tiny_params(2), BATCH, dataclasses.replace(cfg, max_new_tokens=budget))


def test_a_row_without_room_yields_nothing():
    """Its neighbours go on; it has no last token to carry the reason."""
    cfg = jl.Config(model=TINY, strategy=jl.Lookahead(4, 4, 3), cache_len=12, max_new_tokens=9)
    out = check_streamed(tiny_params(2), BATCH, cfg)
    assert [len(tokens) for tokens in out.tokens] == [9, 9, 0]


def test_one_prompt_is_row_0():
    cfg = jl.Config(model=TINY, strategy=jl.Autoregressive(), max_new_tokens=3)
    assert [s.row for s in jl.stream(tiny_params(2), [1, 2], cfg)] == [0, 0, 0]


@pytest.mark.parametrize("strategy", [jl.Autoregressive(), jl.Lookahead(4, 4, 3)])
def test_texts_with_broken_characters_and_stop_strings(strategy):
    """A random model spells random bytes, most of them no characters."""
    tokenizer = tiny_tokenizer()
    config = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    params = tiny_params(3, config)
    sampling = jl.Sampling(temperature=3.0, seed=4)
    cfg = jl.Config(model=config, strategy=strategy, sampling=sampling, max_new_tokens=60)
    whole = check_streamed(params, BATCH, cfg, tokenizer)
    assert any("\N{REPLACEMENT CHARACTER}" in text for text in whole.text)
    ascii_parts = [
        text[i : i + size]
        for text in whole.text
        for i in range(len(text) - 3)
        for size in (1, 2, 3)
        if text[i : i + size].isascii()
    ]
    reasons = set()
    for stop_strings in (ascii_parts[-1:], ascii_parts[20:60:20], ("never there",)):
        stopped = dataclasses.replace(cfg, stop_strings=tuple(stop_strings))
        reasons |= set(check_streamed(params, BATCH, stopped, tokenizer).finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("prompt", ["def read_file(path):\n", "import os\n"])
def test_stop_strings_never_show(prompt):
    """Strings of several tokens, and ones whose beginnings occur in the text before."""
    lm = jl.load()
    strategy = jl.Lookahead(4, 4, 3)
    cfg = lm.make_config(strategy=strategy, max_new_tokens=40)
    text = jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer).text
    for strings in ((text[30:45],), (text[20:24] + "#", text[50:53]), (text[:9],)):
        stopped = dataclasses.replace(cfg, stop_strings=strings)
        check_streamed(lm.params, [prompt], stopped, lm.tokenizer)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "stripped"])
def test_pieces_add_up_to_the_text(kind):
    """Whatever the ids, and never a character that later ones would change."""
    tokenizer = (
        tiny_tokenizer() if kind == "byte level" else sentencepiece_tokenizer(kind == "stripped")
    )
    last = len(tokenizer) - 1  # most ids are single bytes, the last ones spell characters
    ids = st.integers(0, last) | st.integers(last - 12, last)
    spelled = st.text("aé🙂 b", max_size=6).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(ids.map(lambda token: [token]) | spelled, min_size=1, max_size=12))
    def check(parts):
        tokens = [token for part in parts for token in part]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        pieces = IncrementalText(tokenizer)
        shown = ""
        for i, token in enumerate(tokens):
            shown += pieces.add(token, is_last=i == len(tokens) - 1)
            assert whole.startswith(shown)
        assert shown == whole

    check()
