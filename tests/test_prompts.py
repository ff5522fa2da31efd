"""Prompts as Hugging Face tokenizers return them: padding on either side is no part of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from checkpoints import tiny_tokenizer
from models import TINY, tiny_params

import jlookahead as jl
from jlookahead.prompts import to_rows

ROWS = [[5, 6, 7, 5, 6], [1], [2, 1, 1]]


def padded(rows, side: str, pad: int = 1, extra: int = 0) -> dict[str, np.ndarray]:
    """`extra` columns hold nothing but padding."""
    width = max(map(len, rows)) + extra
    ids, mask = np.full((len(rows), width), pad), np.zeros((len(rows), width), int)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, at], mask[i, at] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_stripped(side, extra):
    """The pad id occurs in the rows too: it is the mask that counts."""
    batch = padded(ROWS, side, pad=1, extra=extra)
    for kind in (np.asarray, np.ndarray.tolist, lambda a: a.astype(bool)):
        mask = kind(batch["attention_mask"])
        rows, is_batch = to_rows({**batch, "attention_mask": mask}, None, 97)
        assert is_batch and [row.tolist() for row in rows] == ROWS
    single = {name: values[1] for name, values in batch.items()}
    rows, is_batch = to_rows(single, None, 97)
    assert not is_batch and [row.tolist() for row in rows] == ROWS[1:2]


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_a_tokenizer_returns(side):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, side
    texts = ["the cat", "a", "sat on the mat"]
    expected = [tokenizer.encode(text) for text in texts]
    assert len(set(map(len, expected))) > 1
    rows, is_batch = to_rows(tokenizer(texts, padding=True, return_tensors="np"), None, 300)
    assert is_batch and [row.tolist() for row in rows] == expected
    ragged, _ = to_rows(tokenizer(texts), None, 300)
    assert [row.tolist() for row in ragged] == expected
    rows, is_batch = to_rows(tokenizer(texts[0]), None, 300)
    assert not is_batch and rows[0].tolist() == expected[0]


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    batch = {name: torch.tensor(values) for name, values in padded(ROWS, "left").items()}
    assert [row.tolist() for row in to_rows(batch, None, 97)[0]] == ROWS


@pytest.mark.parametrize(
    "strategy, temperature",
    [
        (jl.Lookahead(4, 4, 3), 0.8),
        (jl.Recycling(12), 0.0),
    ],
)
def test_rows_of_a_batch_are_single_runs(strategy, temperature):
    """Tokens and rounds, although the pad id is the EOS id and an id of the prompts."""
    rng = random.Random(0)
    rows = [[rng.randrange(9) for _ in range(n)] for n in (12, 1, 5)]
    cfg = jl.Config(
        model=TINY,
        strategy=strategy,
        sampling=jl.Sampling(temperature=temperature, seed=2),
        max_new_tokens=40,
        eos_token_ids=(1,),
        pad_token_id=1,
    )
    single = [jl.generate(tiny_params(0), row, cfg, row_ids=[i]) for i, row in enumerate(rows)]
    for side in ("left", "right"):
        got = jl.generate(tiny_params(0), padded(rows, side, pad=1, extra=2), cfg)
        assert got.tokens == [one.tokens for one in single]
        assert got.num_rounds == [one.num_rounds for one in single]
        assert got.finish_reason == [one.finish_reason for one in single]
