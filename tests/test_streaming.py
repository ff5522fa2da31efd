"""Streaming yields what `generate` returns, token by token, and text that is never broken."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from models import TINY, SuccessorTable, tiny_params

import jlookahead as jl
from jlookahead.streaming import IncrementalText


class Bytes:
    """A byte-level tokenizer: id = byte, 256 a special token."""

    def decode(self, ids, skip_special_tokens=True):
        assert skip_special_tokens
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
