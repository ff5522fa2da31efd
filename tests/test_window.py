"""The trajectory window: its levels, the n-grams read from it, and its seeds.

Proved here:
- the worked example (window 5, n-gram 4) and the level sizes of the warm-up, from the
  design's worked examples;
- over random steps, equality with the official implementation's lists (`past_tokens` of
  `jacobi_greedy_search_multilevel`), rewritten here with plain Python lists, filling and
  steady; rows of the batch that are not active stay as they are;
- the seeds are runs of the prompt's own tokens, evenly spread, without EOS where possible.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jlookahead.window import Window, advance, spread_over_prompt, trajectory_ngrams

advance_jit = jax.jit(advance)
ngrams_jit = jax.jit(trajectory_ngrams, static_argnums=3)


# --- plain lists ----------------------------------------------------------------------------


@dataclasses.dataclass
class Lists:
    """The official window of one batch row: level 0 without the ordinary token's column."""

    levels: list[list[int]]
    num_levels: int

    @property
    def is_steady(self) -> bool:
        return len(self.levels) == self.num_levels

    def ngrams(self, last_token: int, new: list[int]) -> list[tuple[int, list[int]]]:
        keys = [last_token, *self.levels[0]]
        columns = zip(*self.levels[1:], new, strict=True)
        return [(key, list(column)) for key, column in zip(keys, columns, strict=True)]

    def move(self, predicted: list[int]) -> None:
        """`predicted`: one token per column of the deepest level, the ordinary row's first."""
        if self.is_steady:
            shifted = [*self.levels[1:], predicted]
            self.levels = [shifted[0][1:], *shifted[1:]]
        else:
            self.levels = [level[1:] for level in self.levels] + [predicted[1:]]

    def num_predicted(self) -> int:
        return len(self.levels[0]) + 1

    def padded(self) -> list[list[int] | None]:
        return self.levels + [None] * (self.num_levels - len(self.levels))


def to_window(rows: list[Lists], num_columns: int) -> Window:
    tokens = np.full((len(rows), rows[0].num_levels, num_columns), -7, np.int32)
    for b, row in enumerate(rows):
        for r, level in enumerate(row.levels):
            first = int(r == 0)
            tokens[b, r, first : first + len(level)] = level
    stage = [len(row.levels) - 1 for row in rows]
    return Window(jnp.asarray(tokens), jnp.array(stage, jnp.int32))


# --- worked examples ------------------------------------------------------------------------


def example_window() -> Window:
    levels = [[11, 12, 13, 14], [21, 22, 23, 24, 25], [31, 32, 33, 34, 35]]
    return to_window([Lists(levels, 3)], num_columns=5 + 4 - 2)


def test_example_ngrams():
    predicted = jnp.array([[41, 42, 43, 44, 45]])
    keys, suffixes, valid = ngrams_jit(example_window(), jnp.array([10]), predicted, 5)
    assert keys.tolist() == [[10, 11, 12, 13, 14]]
    assert suffixes.tolist() == [
        [[21, 31, 41], [22, 32, 42], [23, 33, 43], [24, 34, 44], [25, 35, 45]]
    ]
    assert valid.tolist() == [[True] * 5]


def test_example_advance():
    moved = advance_jit(example_window(), jnp.array([[41, 42, 43, 44, 45]]), jnp.array([True]))
    assert moved.levels() == [[22, 23, 24, 25], [31, 32, 33, 34, 35], [41, 42, 43, 44, 45]]
    assert moved.stage.tolist() == [2]


@pytest.mark.parametrize(
    ("window", "ngram", "sizes"),
    [
        (5, 4, [[6], [5, 6], [4, 5, 5], [4, 5, 5]]),
        (5, 3, [[5], [4, 5], [4, 5]]),
        (1, 4, [[2], [1, 2], [0, 1, 1]]),
    ],
)
def test_level_sizes_while_warming_up(window, ngram, sizes):
    num_columns = window + ngram - 2
    state = to_window([Lists([list(range(num_columns - 1))], ngram - 1)], num_columns)
    predicted = jnp.arange(num_columns)[None] + 100
    for expected in sizes:
        filled = [len(level) for level in state.levels() if level is not None]
        assert filled == expected
        assert state.levels()[len(expected) :] == [None] * (ngram - 1 - len(expected))
        state = advance_jit(state, predicted, jnp.array([True]))


# --- random steps against the lists ---------------------------------------------------------

NUM_STEPS, BATCH = 7, 3
SHAPES = [(5, 4), (5, 3), (1, 5), (4, 2), (2, 6)]


@st.composite
def walks(draw, window: int, ngram: int, warm_up: bool):
    num_columns = window + ngram - 2
    width = num_columns if warm_up else window
    token = st.integers(0, 99)
    sizes = [num_columns - 1] if warm_up else [window - 1] + [window] * (ngram - 2)
    rows = [
        Lists([draw(st.lists(token, min_size=n, max_size=n)) for n in sizes], ngram - 1)
        for _ in range(BATCH)
    ]

    def array(dtype, elements, *more_axes):
        # No fill: it would make most entries equal.
        shape = (NUM_STEPS, BATCH, *more_axes)
        return draw(hnp.arrays(dtype, shape, elements=elements, fill=st.nothing()))

    return rows, array(np.int32, token, width), array(bool, st.booleans())


def check_walk(window, ngram, rows, predicted, active):
    state = to_window(rows, window + ngram - 2)
    for step, is_active in zip(predicted, active, strict=True):
        last_token = step[:, 0] + 100
        keys, suffixes, valid = map(np.asarray, ngrams_jit(state, last_token, step, window))
        before = np.asarray(state.tokens)
        state = advance_jit(state, step, is_active)
        for b, row in enumerate(rows):
            assert valid[b].tolist() == [row.is_steady] * window
            new = step[b, : row.num_predicted()].tolist()
            if row.is_steady:
                read = list(zip(keys[b].tolist(), suffixes[b].tolist(), strict=True))
                assert read == row.ngrams(int(last_token[b]), new)
            if is_active[b]:
                row.move(new)
            else:
                assert (np.asarray(state.tokens)[b] == before[b]).all()
            assert state.levels(b) == row.padded()


@pytest.mark.parametrize("shape", SHAPES, ids="W{0[0]}-N{0[1]}".format)
@pytest.mark.parametrize("warm_up", [False, True], ids=["steady", "filling"])
def test_equals_the_official_lists(shape, warm_up):
    @given(walks(*shape, warm_up))
    @settings(deadline=None, max_examples=25)
    def check(walk):
        check_walk(*shape, *walk)

    check()


# --- seeds ----------------------------------------------------------------------------------

PROMPT_SIZE, EOS = 12, [1, 3]
AVOID = jnp.array([*EOS, -1, -1], jnp.int32)  # padded as in the state


@functools.partial(jax.jit, static_argnums=(2, 3))
def seeds(prompt, prompt_len, num_starts, run):
    return spread_over_prompt(prompt, prompt_len, AVOID, num_starts, run)


def pad(prompts: list[list[int]], filler: int) -> tuple[np.ndarray, np.ndarray]:
    padded = np.full((len(prompts), PROMPT_SIZE), filler, np.int32)
    for b, prompt in enumerate(prompts):
        padded[b, : len(prompt)] = prompt
    return padded, np.array([len(p) for p in prompts], np.int32)


def usable(prompt: list[int]) -> list[int]:
    """The prompt without EOS; all of it where nothing else is left."""
    return [token for token in prompt if token not in EOS] or prompt


prompts = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=PROMPT_SIZE), min_size=BATCH, max_size=BATCH
)


@given(prompts, st.sampled_from([(1, 1), (5, 3), (6, 1), (4, 7)]))
@settings(deadline=None, max_examples=100)
def test_seeds_are_evenly_spread_runs_of_the_prompt(batch, shape):
    num_starts, run = shape
    found = np.asarray(seeds(*pad(batch, filler=9), num_starts, run)).tolist()
    for prompt, runs in zip(batch, found, strict=True):
        tokens = usable(prompt)
        # Long enough for one run; then a run at index i is contiguous by construction.
        extended = tokens + tokens[-1:] * (run - len(tokens))
        last_start = len(extended) - run
        starts = [i * last_start // max(num_starts - 1, 1) for i in range(num_starts)]
        assert runs == [extended[start : start + run] for start in starts]
        assert starts[0] == 0 and (num_starts == 1 or starts[-1] == last_start)


@given(prompts, st.integers(0, 6), st.integers(0, 6))
@settings(deadline=None, max_examples=50)
def test_seeds_never_read_the_padding(batch, filler, other_filler):
    first, second = (np.asarray(seeds(*pad(batch, f), 5, 3)) for f in (filler, other_filler))
    assert (first == second).all()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5], {5}),  # a single token
        ([1], {1}),  # a single token, and it is EOS
        ([1, 3, 1], {1, 3}),  # nothing but EOS
        ([1, 4, 3], {4}),  # EOS avoided
        ([2, 1, 5, 3, 6], {2, 5, 6}),
    ],
)
def test_seeds_avoid_eos_where_possible(prompt, expected):
    values = np.asarray(seeds(*pad([prompt] * BATCH, filler=9), 5, 3))
    assert set(values.ravel().tolist()) == expected
