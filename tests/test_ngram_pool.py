"""The n-gram pool against plain Python.

Proved here:
- with room for every key, the table is the official implementation's dict of LRU lists
  (`update_token_map` in `lade/decoding.py`) after every insertion of a whole round;
- with less room, one n-gram at a time, it is a set-associative LRU cache of such lists;
- with less room and whole rounds, each key's list is a suffix of the unbounded one (what is
  the list of a key that was evicted and came back), and the keys kept are the round's own and
  the most recently inserted others;
- rows of the batch share nothing (field report D5), a look-up refreshes nothing, and the
  default pool stays small (field report J6).
"""

from __future__ import annotations

import math
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jlookahead import Lookahead
from jlookahead.ngram_pool import NO_KEY, NUM_WAYS, NgramPool, find, init_pool, insert

find_jit, insert_jit = jax.jit(find), jax.jit(insert)

Ngram = tuple[int, list[int]]  # key, suffix


def official_insert(pool: dict[int, list[list[int]]], ngram: Ngram, candidates: int) -> None:
    key, suffix = ngram
    bucket = pool.setdefault(key, [])
    if suffix in bucket:
        bucket.remove(suffix)
    elif len(bucket) == candidates:
        bucket.pop(0)
    bucket.append(suffix)


@st.composite
def streams(draw, steps: int, batch: int, num_new: int, vocab: int, size: int, alphabet: int):
    """`(keys, suffixes, valid)`, each with leading axes `[steps, batch, num_new]`."""

    def array(dtype, elements, *more_axes):
        shape = (steps, batch, num_new, *more_axes)
        # No fill: it would make most entries equal.
        return draw(hnp.arrays(dtype, shape, elements=elements, fill=st.nothing()))

    keys = array(np.int32, st.integers(0, vocab - 1))
    suffixes = array(np.int32, st.integers(0, alphabet - 1), size)
    return keys, suffixes, array(bool, st.sampled_from([True, True, True, False]))


def valid_ngrams(keys, suffixes, valid) -> list[Ngram]:
    """One batch row's n-grams of one round, in order."""
    return [(int(k), s.tolist()) for k, s, ok in zip(keys, suffixes, valid, strict=True) if ok]


def stored_keys(pool: NgramPool, row: int) -> list[set[int]]:
    """The keys of every set; fails if one is stored twice or in the wrong set."""
    table = np.asarray(pool.keys)[row]
    sets = [[int(key) for key in ways if key != NO_KEY] for ways in table]
    assert all(len(set(keys)) == len(keys) for keys in sets)
    assert all(key % len(sets) == z for z, keys in enumerate(sets) for key in keys)
    return [set(keys) for keys in sets]


def insert_one(pool: NgramPool, key: int, suffix: list[int]) -> NgramPool:
    return insert_jit(pool, jnp.array([[key]]), jnp.array([[suffix]]), jnp.array([[True]]))


def bucket_of(pool: NgramPool, tokens: list[int], row: int) -> list[list[int]]:
    suffixes, count = find_jit(pool, jnp.array(tokens))
    return suffixes[row, : count[row]].tolist()


# --- room for every key ---------------------------------------------------------------------

BATCH, NUM_NEW, NUM_STEPS = 3, 6, 5


@pytest.mark.parametrize(
    ("vocab", "candidates", "size"), [(4, 3, 2), (20, 1, 1), (9, 2, 3)], ids=str
)
def test_equals_a_dict_of_lru_lists(vocab, candidates, size):
    @given(streams(NUM_STEPS, BATCH, NUM_NEW, vocab, size, alphabet=2))
    @settings(deadline=None, max_examples=60)
    def check(stream):
        pool = init_pool(BATCH, vocab, candidates, size + 1)
        expected: list[dict] = [{} for _ in range(BATCH)]
        for keys, suffixes, valid in zip(*stream, strict=True):
            pool = insert_jit(pool, keys, suffixes, valid)
            for b in range(BATCH):
                for ngram in valid_ngrams(keys[b], suffixes[b], valid[b]):
                    official_insert(expected[b], ngram, candidates)
                assert pool.as_dict(b) == expected[b]
                looked_up = keys[:, 0].tolist()
                assert bucket_of(pool, looked_up, b) == expected[b].get(looked_up[b], [])
                assert pool.lookup(looked_up[b], b) == expected[b].get(looked_up[b], [])

    check()


def test_worked_example():
    pool = init_pool(1, 8, candidates=2, ngram=4)
    assert bucket_of(pool, [10], 0) == []
    a, b, c = [21, 31, 41], [22, 32, 42], [23, 33, 43]
    for suffix, expected in [(a, [a]), (b, [a, b]), (a, [b, a]), (c, [a, c]), (c, [a, c])]:
        pool = insert_one(pool, 10, suffix)
        assert pool.lookup(10) == bucket_of(pool, [10], 0) == expected
    assert bucket_of(pool, [11], 0) == pool.lookup(11) == []


def test_a_round_of_equal_keys_is_inserted_in_order():
    keys = jnp.array([[10, 10, 10, 10, 10, 10]])
    suffixes = jnp.array([[[1], [2], [3], [1], [4], [2]]])
    pool = insert_jit(init_pool(1, 8, candidates=3, ngram=2), keys, suffixes, keys == 10)
    assert pool.as_dict() == {10: [[1], [4], [2]]}


def test_a_lookup_refreshes_nothing():
    pool = init_pool(1, NUM_WAYS, candidates=2, ngram=2)
    for key in range(NUM_WAYS):
        pool = insert_one(insert_one(pool, key, [1]), key, [2])
    assert bucket_of(pool, [0], 0) == [[1], [2]]
    assert insert_one(pool, 0, [3]).lookup(0) == [[2], [3]]  # the suffix found first still goes
    assert set(insert_one(pool, NUM_WAYS, [1]).as_dict()) == set(range(1, NUM_WAYS + 1))


# --- less room than keys --------------------------------------------------------------------


@given(streams(steps=40, batch=2, num_new=1, vocab=24, size=1, alphabet=3))
@settings(deadline=None, max_examples=50)
def test_one_at_a_time_it_is_a_set_associative_lru_cache(stream):
    num_sets = 2
    pool = init_pool(2, num_sets * NUM_WAYS, candidates=2, ngram=2)
    expected = [[OrderedDict() for _ in range(num_sets)] for _ in range(2)]
    for keys, suffixes, valid in zip(*stream, strict=True):
        pool = insert_jit(pool, keys, suffixes, valid)
        for b in range(2):
            for key, suffix in valid_ngrams(keys[b], suffixes[b], valid[b]):
                lists = expected[b][key % num_sets]
                if key not in lists and len(lists) == NUM_WAYS:
                    lists.popitem(last=False)
                official_insert(lists, (key, suffix), candidates=2)
                lists.move_to_end(key)
    for b in range(2):
        assert pool.as_dict(b) == {k: v for lists in expected[b] for k, v in lists.items()}


@pytest.mark.parametrize("num_sets", [1, 2])
def test_bounded_rounds_keep_suffixes_of_the_unbounded_lists(num_sets):
    candidates, num_new = 2, 12

    @given(streams(6, 2, num_new, vocab=20, size=1, alphabet=3))
    @settings(deadline=None, max_examples=60)
    def check(stream):
        pool = init_pool(2, num_sets * NUM_WAYS, candidates, ngram=2)
        unbounded: list[dict] = [{}, {}]
        recency: list[list[int]] = [[], []]  # keys, the most recently inserted last
        for keys, suffixes, valid in zip(*stream, strict=True):
            before = [stored_keys(pool, b) for b in range(2)]
            pool = insert_jit(pool, keys, suffixes, valid)
            for b in range(2):
                ngrams = valid_ngrams(keys[b], suffixes[b], valid[b])
                for ngram in ngrams:
                    official_insert(unbounded[b], ngram, candidates)
                for key, stored in pool.as_dict(b).items():
                    assert stored and stored == unbounded[b][key][-len(stored) :]
                written = {key for key, _ in ngrams}
                after = stored_keys(pool, b)
                for z in range(num_sets):
                    of_set = {key for key in written if key % num_sets == z}
                    check_kept_keys(before[b][z], of_set, after[z], recency[b])
                for key, _ in ngrams:
                    recency[b] = [k for k in recency[b] if k != key] + [key]

    check()


def check_kept_keys(
    before: set[int], written: set[int], after: set[int], recency: list[int]
) -> None:
    """Which keys a set holds after a round that wrote `written` into it."""
    room = NUM_WAYS - len(written)
    if room < 0:  # more than fit: known ones stay, the others fill the set
        assert len(after) == NUM_WAYS and before & written <= after <= written
        return
    others = [key for key in recency if key in before - written]
    assert after == written | set(others[max(len(others) - room, 0) :])


def test_the_least_recently_inserted_key_of_the_set_goes():
    pool = init_pool(1, 2 * NUM_WAYS, candidates=2, ngram=2)
    evens = list(range(0, 2 * NUM_WAYS, 2))  # fill set 0
    for key in [*evens, 1, evens[0]]:  # and refresh its first key
        pool = insert_one(pool, key, [key])
    assert set(pool.as_dict()) == {*evens, 1}
    pool = insert_one(pool, 100, [7])
    assert set(pool.as_dict()) == {*evens, 1, 100} - {evens[1]}
    # A key that comes back starts anew.
    assert insert_one(pool, evens[1], [9]).lookup(evens[1]) == [[9]]


def test_keys_of_one_round_age_in_their_order():
    pool = init_pool(1, NUM_WAYS, candidates=2, ngram=2)
    keys = jnp.arange(NUM_WAYS)[None]
    for ordered in (keys, keys[:, ::-1]):
        pool = insert_jit(pool, ordered, ordered[..., None], ordered >= 0)
    assert set(insert_one(pool, 100, [7]).as_dict()) == {*range(NUM_WAYS - 1), 100}


@pytest.mark.parametrize("crowded", [0, 1, 2])
def test_more_new_keys_than_ways_corrupt_nothing(crowded):
    num_sets = 3
    pool = init_pool(1, num_sets * NUM_WAYS, candidates=2, ngram=2)
    known, stale = 300 + crowded, 303 + crowded
    elsewhere = [key for key in range(300, 330) if key % num_sets != crowded][: 2 * NUM_WAYS]
    for key in [stale, known, *elsewhere]:
        pool = insert_one(pool, key, [1])
    new = range(crowded, 2 * NUM_WAYS * num_sets, num_sets)
    keys = jnp.array([[*new[:NUM_WAYS], known, *new[NUM_WAYS:]]])
    pool = insert_jit(pool, keys, keys[..., None] + 1, jnp.ones_like(keys, bool))
    table, kept = pool.as_dict(), stored_keys(pool, 0)[crowded]
    assert len(kept) == NUM_WAYS and known in kept and stale not in kept
    expected = {key: [[1]] for key in elsewhere} | {known: [[1], [known + 1]]}
    assert table == expected | {key: [[key + 1]] for key in kept - {known}}


@pytest.mark.parametrize("capacity", [1, 7, 8, 9, 4096])
def test_capacity_is_rounded_up_to_whole_sets(capacity):
    pool = init_pool(2, capacity, candidates=2, ngram=3)
    assert pool.keys.shape == (2, math.ceil(capacity / NUM_WAYS), NUM_WAYS)


# --- rows of the batch, and memory ----------------------------------------------------------


def test_rows_share_nothing():
    rng = np.random.default_rng(5)
    half = 16
    pool = swapped = init_pool(2, NUM_WAYS, candidates=3, ngram=3)
    for _ in range(30):
        offset = np.array([0, half])
        keys = rng.integers(half, size=(2, NUM_NEW)) + offset[:, None]
        suffixes = rng.integers(half, size=(2, NUM_NEW, 2)) + offset[:, None, None]
        valid = rng.random((2, NUM_NEW)) < 0.7
        pool = insert_jit(pool, keys, suffixes, valid)
        swapped = insert_jit(swapped, keys[::-1], suffixes[::-1], valid[::-1])
        for b in range(2):
            assert pool.as_dict(b) == swapped.as_dict(1 - b)
    for b, ids in enumerate([range(half), range(half, 2 * half)]):
        table = pool.as_dict(b)
        assert len(table) == NUM_WAYS
        assert set(table) <= set(ids)
        assert {t for stored in table.values() for suffix in stored for t in suffix} <= set(ids)


def test_the_default_pool_of_a_batch_of_32_is_below_64_megabytes():
    # The size does not depend on the vocabulary: a table by token would take 31 MB a row.
    knobs = Lookahead()
    shapes = jax.eval_shape(
        lambda: init_pool(32, knobs.pool_capacity, knobs.candidates, knobs.ngram)
    )
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    of_key = 4 * (knobs.candidates * (knobs.ngram - 1) + 3)  # as documented
    assert num_bytes == 32 * (knobs.pool_capacity * of_key + 4)
    assert num_bytes < 64e6
