"""Lookahead parallelism: which packed rows each device computes, and what the devices then tell
each other.

Every device holds the weights, the cache, the window and the pool. Of the packed rows it computes
the ordinary row, a block of the window's columns with what of level 0 they see, and a run of
candidates. It verifies its own candidates, and one exchange of a few integers per row says whose
were accepted furthest and what the window predicts; the accepted K/V then come from the device
that computed them, or all compute them in the next round, see `packing.py`. The devices then hold
the same state again.

Source: Fu et al. (arXiv 2402.02057), section 3.4; `lade/decoding.py` with `DIST_WORKERS`.
Shapes: P devices, T fill stages, Q packed rows, q of a device, r draft rows of a device, M the most
tokens a round can emit.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlookahead.layout import WINDOW, Layout, at_stage
from jlookahead.model import KVRows
from jlookahead.packing import PackedRows
from jlookahead.sharding import LOOKAHEAD
from jlookahead.verify import OwnDrafts, Verdict

_NOTHING = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """Static tables of who computes what.

    Attributes:
        rows: `[P, T, q]` the packed row behind every row of a device, -1 for none.
        logit_rows: `[P, T, 1 + r + j]` rows of a device whose logits are wanted: the ordinary row,
            its drafts, and its columns of the deepest level, at most j.
        column_at: `[T, J]` where each column of the deepest level is among those of all devices,
            `[P, j]`.
        num_drafts: r. Device d has the drafts from `d * r` on.
        num_columns: j.
    """

    rows: np.ndarray
    logit_rows: np.ndarray
    column_at: np.ndarray
    num_drafts: int
    num_columns: int

    @property
    def first_draft(self) -> int:
        """Row of a device's first draft."""
        return self.rows.shape[2] - self.num_drafts


@functools.lru_cache(maxsize=64)
def divide(layout: Layout, num_devices: int) -> Division | None:
    """The division of a round among `num_devices`; None if there is nothing to divide.

    Columns and chains of drafts go in runs of equal length, the last ones shorter or empty. Chains
    stay whole, and as many as may be linked into one stay together on the first device. A forest
    that does not consist of chains is computed by every device.
    """
    num_chains = layout.num_drafts // layout.chain_len if layout.chain_len else 0
    if num_devices == 1 or not num_chains:
        return None
    num_linked = -(-layout.max_accepted // layout.chain_len)
    num_drafts = max(num_linked, -(-num_chains // num_devices)) * layout.chain_len
    if not layout.num_jacobi and num_drafts >= layout.num_drafts:
        return None
    num_stages = len(layout.rows)
    # Columns of a device, by stage; the window has one column less at every one.
    runs = [-(-(layout.num_jacobi - t) // num_devices) for t in range(num_stages)]
    num_columns = max(runs)
    of_window = [
        [_window_rows(rows, d * run, run) for rows, run in zip(layout.rows, runs, strict=True)]
        for d in range(num_devices)
    ]
    first_draft = 1 + max(len(rows) for stages in of_window for rows in stages)
    rows = np.full((num_devices, num_stages, first_draft + num_drafts), _NOTHING)
    rows[..., 0] = 0
    logit_rows = np.zeros((num_devices, num_stages, 1 + num_drafts + num_columns), int)
    logit_rows[..., 1 : 1 + num_drafts] = first_draft + np.arange(num_drafts)
    for d, stages in enumerate(of_window):
        drafts = np.arange(layout.num_drafts)[d * num_drafts :][:num_drafts]
        for t, window_rows in enumerate(stages):
            rows[d, t, 1 : 1 + len(window_rows)] = window_rows
            rows[d, t, first_draft : first_draft + len(drafts)] = layout.first_draft + drafts
            deepest = layout.logit_rows[t, 1 + layout.num_drafts :][d * runs[t] :][: runs[t]]
            row_of = {row: i for i, row in enumerate(rows[d, t].tolist())}
            logit_rows[d, t, 1 + num_drafts :][: len(deepest)] = [row_of[r] for r in deepest]
    column_at = np.zeros((num_stages, layout.num_jacobi), int)
    for t, run in enumerate(runs if num_columns else ()):
        device, place = np.divmod(np.arange(layout.num_jacobi), run)
        column_at[t] = np.minimum(device, num_devices - 1) * num_columns + place
    return Division(rows, logit_rows, column_at, num_drafts, num_columns)


def _window_rows(rows: np.ndarray, first: int, num_columns: int) -> np.ndarray:
    """The packed rows of `num_columns` columns from `first` on, with what of level 0 they see."""
    end = first + num_columns
    is_own = (rows["level"] >= 1) & (rows["column"] >= first) & (rows["column"] < end)
    is_seen = (rows["level"] == 0) & (rows["column"] < end)
    return np.flatnonzero((rows["role"] == WINDOW) & (is_own | is_seen))


def take(division: Division, rows: PackedRows, stage: jax.Array) -> PackedRows:
    """The packed rows that this device computes; rows of nothing see themselves alone."""
    device = lax.axis_index(LOOKAHEAD)
    index = at_stage(jnp.asarray(division.rows)[device], stage)
    logit_rows = at_stage(jnp.asarray(division.logit_rows)[device], stage)
    index = jnp.broadcast_to(index, (len(rows.tokens), index.shape[1]))
    is_row = index >= 0
    index = jnp.maximum(index, 0)
    mask = jnp.take_along_axis(rows.mask, index[:, :, None], axis=1)
    mask = jnp.take_along_axis(mask, index[:, None, :], axis=2)
    mask &= is_row[:, :, None] & is_row[:, None, :]
    return PackedRows(
        tokens=jnp.take_along_axis(rows.tokens, index, axis=1),
        positions=jnp.take_along_axis(rows.positions, index, axis=1),
        mask=mask | jnp.eye(index.shape[1], dtype=bool),
        logit_rows=jnp.broadcast_to(logit_rows, (len(index), logit_rows.shape[1])),
    )


def own_drafts(division: Division) -> OwnDrafts:
    """The drafts that this device computes, for `verify`."""
    first = lax.axis_index(LOOKAHEAD) * division.num_drafts
    return OwnDrafts(first, division.num_drafts, division.first_draft)


def exchange(
    division: Division, verdict: Verdict, reading: jax.Array | None, stage: jax.Array
) -> tuple[Verdict, jax.Array | None, jax.Array]:
    """Tells every device what all of them found; one gathering of integers.

    Args:
        division: who computes what.
        verdict: of this device's drafts.
        reading: `[B, j]` int32, what the strategy read of this device's columns, if anything.
        stage: `[B]` fill stage of the window.

    Returns:
        the verdict that accepts most; the reading of all columns `[B, J]`; and whether the verdict
        is this device's `[B]`, over whose rows alone `path` runs.
    """
    verdicts, readings = _gather((verdict, reading))
    # The first of several that accept as much, which has the lowest draft rows.
    best = jnp.argmax(verdicts.num_accepted, axis=0)

    def of_best(leaf: jax.Array) -> jax.Array:
        index = best.reshape((1, -1) + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=0)[0]

    if readings is not None:
        by_device = readings.transpose(1, 0, 2).reshape(len(stage), -1)
        column_at = at_stage(division.column_at, stage)
        reading = jnp.take_along_axis(by_device, column_at, axis=1)
    is_winner = best == lax.axis_index(LOOKAHEAD)
    return jax.tree.map(of_best, verdicts), reading, is_winner


def _gather(tree):
    """Every leaf of all devices, `[P, ...]`, in one collective: 32 bits per element."""
    leaves, structure = jax.tree.flatten(tree)
    batch = len(leaves[0])

    def to_bits(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.float32:
            leaf = lax.bitcast_convert_type(leaf, jnp.int32)
        return leaf.astype(jnp.int32).reshape(batch, -1)

    widths = [leaf.size // batch for leaf in leaves]
    all_bits = lax.all_gather(jnp.concatenate([to_bits(leaf) for leaf in leaves], 1), LOOKAHEAD)

    def from_bits(bits: jax.Array, leaf: jax.Array) -> jax.Array:
        bits = bits.reshape(len(bits), *leaf.shape)
        if leaf.dtype == jnp.float32:
            return lax.bitcast_convert_type(bits, jnp.float32)
        return bits.astype(leaf.dtype)

    parts = jnp.split(all_bits, np.cumsum(widths)[:-1], axis=2)
    return structure.unflatten(map(from_bits, parts, leaves))


def broadcast(verdict: Verdict, new_kv: KVRows, is_winner: jax.Array) -> tuple[Verdict, KVRows]:
    """Tells every device the K/V of the accepted tokens; one sum over the devices.

    Args:
        verdict: with the winner's `path [B, M]`.
        new_kv: of this device's packed rows.
        is_winner: `[B]`, whose K/V are taken.

    Returns:
        K/V `[B, K, M, D]`, and the verdict with the path over them.
    """

    def accepted(rows: jax.Array) -> jax.Array:
        taken = jnp.take_along_axis(rows, verdict.path[:, None, :, None], axis=2)
        return jnp.where(is_winner[:, None, None, None], taken, 0)

    if new_kv:
        stacked = jnp.stack([accepted(rows) for layer in new_kv for rows in layer])
        stacked = lax.psum(stacked, LOOKAHEAD)
        new_kv = tuple((stacked[i], stacked[i + 1]) for i in range(0, len(stacked), 2))
    path = jnp.broadcast_to(jnp.arange(verdict.path.shape[1]), verdict.path.shape)
    return dataclasses.replace(verdict, path=path), new_kv
