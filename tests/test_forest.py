"""The draft forest: ancestry, chains and ranked trees, against plain-Python definitions.

Proved here:
- `ancestry` is the relation found by walking from every draft to its root, for any forest,
  parents standing before or behind their children, chains as deep as the forest is large;
- `chain_parents` links every draft but a chain's first to the one before it;
- `rank_tree` holds the likeliest nodes of the infinite tree, by falling weight, with parents
  before children and no better child left out.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlookahead.forest import ancestry, chain_parents, rank_tree

BATCH = 3
ancestry_jit = jax.jit(ancestry)


def root_path(parents: list[int], draft: int) -> list[int]:
    """The draft and its ancestors, root first."""
    path = [draft]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def ancestry_by_walking(parents: list[int]) -> list[list[bool]]:
    paths = [root_path(parents, draft) for draft in range(len(parents))]
    return [[other in path for other in range(len(parents))] for path in paths]


@st.composite
def forests(draw, num_drafts: int) -> list[int]:
    """Parents in any order: a draft hangs on one that comes earlier in a permutation."""
    order = draw(st.permutations(range(num_drafts)))
    # How far back a parent may lie: a small reach draws long chains, a large one bushes.
    reach = draw(st.integers(1, num_drafts))
    parents = [-1] * num_drafts
    for i, draft in enumerate(order):
        back = draw(st.integers(0, reach))
        parents[draft] = order[i - back] if 1 <= back <= i else -1
    return parents


# --- ancestry -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5, 8, 9, 17])
def test_ancestry_equals_walking_to_the_root(num_drafts):
    @given(st.lists(forests(num_drafts), min_size=BATCH, max_size=BATCH))
    @settings(deadline=None, max_examples=60)
    def check(batch):
        found = ancestry_jit(np.array(batch, np.int32))
        assert found.tolist() == [ancestry_by_walking(parents) for parents in batch]

    check()


@pytest.mark.parametrize("num_drafts", [1, 2, 7, 8, 9, 63, 64, 65, 300])
def test_ancestry_of_the_deepest_chains(num_drafts):
    """One chain forwards, one backwards, one in random order; the depth is the forest's size."""
    index = np.arange(num_drafts)
    shuffled = np.random.default_rng(num_drafts).permutation(num_drafts)
    batch = []
    for order in (index, index[::-1], shuffled):
        parents = np.full(num_drafts, -1, np.int32)
        parents[order[1:]] = order[:-1]
        batch.append(parents)
    found = np.asarray(ancestry_jit(np.array(batch)))
    for seen, order in zip(found, (index, index[::-1], shuffled), strict=True):
        np.testing.assert_array_equal(seen[np.ix_(order, order)], np.tri(num_drafts, dtype=bool))


def test_ancestry_without_drafts():
    assert ancestry(np.zeros((BATCH, 0), np.int32)).shape == (BATCH, 0, 0)


# --- chains ---------------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(0, 9))
def test_chains_equal_the_definition(num_chains, length):
    parents = chain_parents(num_chains, length)
    assert parents.dtype == np.int32
    expected: list[int] = []
    for _ in range(num_chains):
        first = len(expected)
        expected += [first + s - 1 if s else -1 for s in range(length)]
    assert parents.tolist() == expected


def test_chains_worked_example():
    assert chain_parents(2, 3).tolist() == [-1, 0, 1, -1, 3, 4]


# --- ranked trees ---------------------------------------------------------------------------


def all_nodes(num_nodes: int, probabilities: tuple[float, ...]) -> dict[tuple[int, ...], float]:
    """Rank paths of every node that can be among the best, with their weights.

    A node needs its ancestors and the better siblings of each, so its ranks and its depth
    together stay below the size of the tree.
    """
    found: dict[tuple[int, ...], float] = {}

    def grow(path: tuple[int, ...], weight: float, cost: int) -> None:
        for rank, probability in enumerate(probabilities):
            if cost + rank + 1 > num_nodes:
                break
            child = (*path, rank)
            found[child] = weight * probability
            grow(child, found[child], cost + rank + 1)

    grow((), 1.0, 0)
    return found


@functools.lru_cache
def rank_paths(num_nodes: int, probabilities: tuple[float, ...]) -> list[tuple[int, ...]]:
    """The tree's nodes as the ranks on their paths, in the tree's order."""
    parents, ranks = rank_tree(num_nodes, probabilities)
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(parents.tolist(), ranks.tolist(), strict=True):
        assert parent < len(paths), "a parent stands behind its child"
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


rank_probabilities = st.lists(
    st.integers(1, 99).map(lambda percent: percent / 100), min_size=1, max_size=4, unique=True
).map(lambda values: tuple(sorted(values, reverse=True)))


@given(st.integers(1, 11), rank_probabilities)
@settings(deadline=None, max_examples=150)
def test_ranked_trees_hold_the_likeliest_nodes(num_nodes, probabilities):
    paths, weights = rank_paths(num_nodes, probabilities), all_nodes(num_nodes, probabilities)
    assert len(set(paths)) == num_nodes
    assert set(paths) <= set(weights)
    for path in paths:
        assert len(path) == 1 or path[:-1] in paths
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths
    # Weights may tie: the likeliest are known by weight only.
    found = [weights[path] for path in paths]
    expected = sorted(weights.values(), reverse=True)[:num_nodes]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@given(st.integers(1, 40), rank_probabilities)
@settings(deadline=None, max_examples=60)
def test_a_leading_part_of_a_ranked_tree_is_the_smaller_tree(num_nodes, probabilities):
    whole = rank_paths(41, probabilities)
    assert rank_paths(num_nodes, probabilities) == whole[:num_nodes]


def test_ranked_tree_worked_example():
    parents, ranks = rank_tree(6, (0.6, 0.3, 0.1))
    # .6, .36, .3, .216, then .18 twice, in either order: 0 then 1, and 1 then 0.
    assert (parents[:4].tolist(), ranks[:4].tolist()) == ([-1, 0, -1, 1], [0, 0, 1, 0])
    assert sorted(zip(parents[4:].tolist(), ranks[4:].tolist(), strict=True)) == [(0, 1), (2, 0)]
