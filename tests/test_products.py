"""Products with kernels: one row alone, on a path of its own, equals that row among others, and no
program moves a kernel before it reads it."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import TINY, tiny_params

import jlookahead as jl
from jlookahead.layers import _row_product

pytestmark = pytest.mark.optimized

# Sizes that no activation has; sums of 36, 30 and 35 numbers split into 4, 2 and 1 parts.
SIZES = [
    dataclasses.replace(TINY, hidden_size=36, intermediate_size=52),
    dataclasses.replace(TINY, hidden_size=30, intermediate_size=52, tie_word_embeddings=False),
    dataclasses.replace(TINY, hidden_size=35, intermediate_size=53),
]


def program(config: jl.ModelConfig, num_rows: int):
    """Compiled logits `[Q, V]` of the first tokens of a text."""
    model, params = jl.LlamaModel(config), tiny_params(0, config)

    def run(params, tokens):
        positions = jnp.arange(num_rows)[None]
        mask, lengths = jnp.tri(num_rows, dtype=bool), jnp.zeros(1, jnp.int32)
        cache = model.init_cache(1, 16)
        hidden, _ = model.forward(params, tokens, positions, mask, cache, lengths)
        return model.logits(params, hidden)[0]

    tokens = jnp.arange(5, 5 + num_rows)[None]
    return jax.jit(run).lower(params, tokens).compile(), params, tokens


@pytest.mark.parametrize("config", SIZES, ids=["4 parts", "2 parts", "1 part"])
def test_a_row_alone_is_that_row_among_others(config):
    alone, *arguments = program(config, 1)
    among, *more = program(config, 3)
    np.testing.assert_allclose(alone(*arguments)[0], among(*more)[0], atol=2e-6)


def test_parts_of_a_sum_are_added_in_float32():
    """In float16 each of them is infinite, and the sum is not."""
    x = jnp.ones((1, 8), jnp.float16)
    kernel = jnp.array([[4e4], [4e4], [-4e4], [-4e4], [4e4], [4e4], [-4e4], [-4e4]], jnp.float16)
    assert _row_product(x, kernel).tolist() == [[0]]


@pytest.mark.parametrize("num_rows", [1, 3, 11])
@pytest.mark.parametrize("config", SIZES[:2], ids=["tied", "untied"])
def test_no_program_moves_a_kernel(config, num_rows):
    compiled, params, _ = program(config, num_rows)
    text = compiled.as_text()
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    shapes = {f"f32[{a},{b}]" for leaf in kernels for a, b in (leaf.shape, leaf.shape[::-1])}
    assert any(shape in text for shape in shapes)
    for line in text.splitlines():
        moved = re.search(r"= (f32\[\d+,\d+\])\S* (copy|transpose|concatenate|fusion)\(", line)
        assert moved is None or moved[1] not in shapes, line
