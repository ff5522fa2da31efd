"""The n-gram pool: a bounded, set-associative table on the device, one per batch row.

It maps a key token to up to G suffixes of N-1 tokens, least recently inserted first. With
room for every key it equals a Python dict of LRU lists; when a set is full, its least
recently inserted key goes. Looking up does not refresh.

A whole round's n-grams go in at once. LRU is a stack algorithm, so a key's new list is the
last G distinct entries of (old list + its new suffixes, in order): the same as inserting
them one after another, without a sequential loop.

Source: `update_token_map` of the official implementation, `lade/decoding.py`.
Shapes: B batch rows, Z sets, Y ways, G suffixes per key, S = N-1, M n-grams to insert.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

NUM_WAYS = 8
NO_KEY = -1


@flax.struct.dataclass
class NgramPool:
    """The table. `4 (G S + 3)` bytes for each of the `Z Y` keys of each batch row."""

    keys: jax.Array  # [B, Z, Y] int32, NO_KEY where free
    stamps: jax.Array  # [B, Z, Y] int32, when the key was last inserted; -1 where free
    suffixes: jax.Array  # [B, Z, Y, G, S] int32, least recent first
    counts: jax.Array  # [B, Z, Y] int32, suffixes held, 0..G
    clock: jax.Array  # [B] int32, above every stamp

    def lookup(self, token: int, row: int = 0) -> list[list[int]]:
        """The suffixes stored under `token`, least recent first (for inspection, on the host)."""
        return self.as_dict(row).get(token, [])

    def as_dict(self, row: int = 0) -> dict[int, list[list[int]]]:
        """The whole table of one batch row (for inspection, on the host)."""
        keys, counts = np.asarray(self.keys)[row].ravel(), np.asarray(self.counts)[row].ravel()
        suffixes = np.asarray(self.suffixes)[row].reshape(len(keys), *self.suffixes.shape[3:])
        return {
            int(k): suffixes[i, : counts[i]].tolist() for i, k in enumerate(keys) if k != NO_KEY
        }


def init_pool(batch: int, capacity: int, candidates: int, ngram: int) -> NgramPool:
    """An empty pool.

    Args:
        batch: rows B.
        capacity: keys a row can hold; rounded up to a multiple of the associativity. With
            `capacity >= vocabulary` no key is ever evicted.
        candidates: suffixes per key, G.
        ngram: n-gram size N.
    """
    table = (batch, -(-capacity // NUM_WAYS), NUM_WAYS)
    return NgramPool(
        keys=jnp.full(table, NO_KEY, jnp.int32),
        stamps=jnp.full(table, -1, jnp.int32),
        suffixes=jnp.zeros((*table, candidates, ngram - 1), jnp.int32),
        counts=jnp.zeros(table, jnp.int32),
        clock=jnp.zeros(batch, jnp.int32),
    )


def find(pool: NgramPool, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Looks up one key per batch row.

    Args:
        pool: the table.
        tokens: `[B]` int32.

    Returns:
        suffixes `[B, G, S]`, least recent first, and how many of them are filled, `[B]`.
    """

    def find_row(keys, suffixes, counts, token):
        index = token % keys.shape[0]
        hit = keys[index] == token
        way = jnp.argmax(hit)
        return suffixes[index, way], jnp.where(hit.any(), counts[index, way], 0)

    return jax.vmap(find_row)(pool.keys, pool.suffixes, pool.counts, tokens)


def insert(pool: NgramPool, keys: jax.Array, suffixes: jax.Array, valid: jax.Array) -> NgramPool:
    """Inserts M n-grams per batch row, as if one after another in order of M.

    Only which keys are evicted may differ: none that this call inserts, if others can go.

    Args:
        pool: the table.
        keys: `[B, M]` int32, non-negative.
        suffixes: `[B, M, S]` int32.
        valid: `[B, M]` bool; n-grams that are not valid leave no trace.
    """
    return jax.vmap(_insert_row)(pool, keys, suffixes, valid)


def _insert_row(pool: NgramPool, keys, suffixes, valid) -> NgramPool:
    num_sets, num_ways = pool.keys.shape
    num_new = len(keys)
    order = jnp.arange(num_new)

    # The last n-gram of every distinct key writes that key's list.
    same_key = (keys[:, None] == keys[None, :]) & valid[:, None] & valid[None, :]
    writes = valid & ~(same_key & (order[None, :] > order[:, None])).any(axis=1)

    set_index = keys % num_sets
    hits = pool.keys[set_index] == keys[:, None]  # [M, Y]
    is_known = hits.any(axis=1)
    way = _choose_ways(pool.stamps[set_index], set_index, hits, is_known, writes)
    writes &= way < num_ways

    known_way = jnp.argmax(hits, axis=1)
    old = pool.suffixes[set_index, known_way]  # [M, G, S]
    old_count = jnp.where(is_known, pool.counts[set_index, known_way], 0)
    merged, count = _merge_lists(old, old_count, suffixes, same_key)

    # Unique targets, those that write nothing beyond the table: scatter order is undefined.
    slot = jnp.where(writes, set_index * num_ways + way, num_sets * num_ways + order)

    def write(table, values):
        flat = table.reshape(num_sets * num_ways, *table.shape[2:])
        flat = flat.at[slot].set(values.astype(table.dtype), mode="drop", unique_indices=True)
        return flat.reshape(table.shape)

    return NgramPool(
        keys=write(pool.keys, keys),
        stamps=write(pool.stamps, pool.clock + order),
        suffixes=write(pool.suffixes, merged),
        counts=write(pool.counts, count),
        clock=pool.clock + jnp.where(valid.any(), num_new, 0),
    )


def _choose_ways(stamps, set_index, hits, is_known, writes) -> jax.Array:
    """`[M]` way of every writer: where its key is, else the oldest way no other writer takes.

    The new keys of a set take its oldest ways, the last key first, so two never share one. A
    set with more new keys than ways in one round has none for the first of them: they would
    have been evicted by the others, and get Y.
    """
    num_ways = stamps.shape[1]
    order = jnp.arange(len(set_index))
    same_set = (set_index[:, None] == set_index[None, :]) & writes[None, :]
    taken = (same_set[:, :, None] & hits[None, :, :]).any(axis=1)  # [M, Y]
    age = jnp.where(taken, jnp.iinfo(jnp.int32).max, stamps)
    older = (age[:, None, :] < age[:, :, None]) | (
        (age[:, None, :] == age[:, :, None]) & jnp.tri(num_ways, k=-1, dtype=bool)
    )
    rank = older.sum(axis=2)  # [M, Y] 0 for the oldest way
    is_new = writes & ~is_known
    turn = (same_set & is_new[None, :] & (order[None, :] > order[:, None])).sum(axis=1)
    victim = jnp.argmax((rank == turn[:, None]) & ~taken, axis=1)
    has_victim = turn < num_ways - taken.sum(axis=1)
    return jnp.where(is_known, jnp.argmax(hits, axis=1), jnp.where(has_victim, victim, num_ways))


def _merge_lists(old, old_count, suffixes, same_key) -> tuple[jax.Array, jax.Array]:
    """The last G distinct entries of every key's (old list + new suffixes).

    Args:
        old: `[M, G, S]` the list of each n-gram's key, and `old_count [M]` its length.
        suffixes: `[M, S]` the new n-grams' suffixes.
        same_key: `[M, M]` bool, True where n-gram j belongs to the key of n-gram i.

    Returns:
        lists `[M, G, S]`, least recent first, and their lengths `[M]`.
    """
    num_new, capacity, _ = old.shape
    order = jnp.arange(num_new)
    equal = (suffixes[:, None] == suffixes[None, :]).all(axis=2)  # [M, M]
    repeated_later = (
        same_key[:, None, :] & equal[None, :, :] & (order[None, :] > order[:, None])[None]
    ).any(axis=2)
    keep_new = same_key & ~repeated_later  # [M, M]
    old_equal = (old[:, :, None] == suffixes[None, None, :]).all(axis=3)  # [M, G, M]
    inserted_again = (old_equal & same_key[:, None, :]).any(axis=2)
    keep_old = (jnp.arange(capacity) < old_count[:, None]) & ~inserted_again

    keep = jnp.concatenate([keep_old, keep_new], axis=1)  # [M, G + M]
    total = keep.sum(axis=1, keepdims=True)
    from_front = jnp.cumsum(keep, axis=1) - 1
    target = from_front - jnp.maximum(total - capacity, 0)  # negative: pushed out
    wanted = keep[:, None, :] & (target[:, None, :] == jnp.arange(capacity)[:, None])
    source = jnp.argmax(wanted, axis=2)  # [M, G] index into (old list + new suffixes)
    from_old = jnp.take_along_axis(old, jnp.minimum(source, capacity - 1)[..., None], axis=1)
    from_new = suffixes[jnp.maximum(source - capacity, 0)]
    merged = jnp.where((source < capacity)[..., None], from_old, from_new)
    return merged, jnp.minimum(total[:, 0], capacity)
