"""Searching logits by blocks finds what NumPy finds, ties and infinities included."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlookahead.vocabulary import top_token, top_tokens

top_jit, tops_jit = jax.jit(top_token), jax.jit(top_tokens, static_argnums=1)


@pytest.mark.parametrize("vocab_size", [1, 97, 128, 129, 1500])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 10**6]), st.booleans())
@settings(deadline=None, max_examples=40)
def test_top_token_is_the_first_of_the_highest(vocab_size, seed, num_values, is_odd):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-num_values, num_values, (2, 3, vocab_size)).astype(np.float32)
    if is_odd:
        places = rng.random(logits.shape) < 0.2
        logits[places] = rng.choice([-np.inf, np.inf], places.sum())
    np.testing.assert_array_equal(top_jit(logits), np.argmax(logits, axis=-1))


def test_nothing_beyond_the_vocabulary_is_found():
    logits = np.full((1, 257), -np.inf, np.float32)
    assert top_jit(logits).tolist() == [0]
    logits[0, 256] = 1
    found = tops_jit(logits, 2)[0].tolist()
    assert found[0] == 256 and found[1] < 257


@pytest.mark.parametrize("vocab_size, num", [(8, 8), (97, 8), (256, 2), (257, 2), (1500, 8)])
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 10**6]))
@settings(deadline=None, max_examples=40)
def test_top_tokens_equal_sorting(vocab_size, num, seed, num_values):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-num_values, num_values, (2, 3, vocab_size)).astype(np.float32)
    found = np.asarray(tops_jit(logits, num))
    # Few values tie: then the ids are any that have the highest values.
    values = np.take_along_axis(logits, found, axis=-1)
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=-1)[..., :num])
    assert all(len(set(ids)) == num for ids in found.reshape(-1, num).tolist())
