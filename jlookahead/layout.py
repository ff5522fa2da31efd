"""The packed query rows of one round: one static record table, built once in NumPy.

A round feeds Q rows to the network: the ordinary row (the last emitted token), the window's
trajectory levels, and the draft tokens. Everything that depends on the shape of the round
alone - where a row's token comes from, its position, what it may attend to, whether its
logits are wanted - is derived here from the record table and is a constant of the program.

Example, window 5, n-gram 4, two candidates (21 rows, p the ordinary row's position):

    row   0      ordinary             b_0            position p
    rows  1-4    level 0              b_1 .. b_4     position p + j
    rows  5-9    level 1              u_{1,j}        position p + j + 1
    rows 10-14   level 2 (deepest)    u_{2,j}        position p + j + 2, logits wanted
    rows 15-17   candidate 0          v_{0,s}        position p + 1 + s, logits wanted
    rows 18-20   candidate 1          v_{1,s}

    Vis(b_j)     = prefix + { b_k : k <= j }
    Vis(u_{r,j}) = prefix + { b_k : k <= j } + { u_{q,j} : 1 <= q <= r }
    Vis(v_{c,s}) = prefix + { b_0 } + { v_{c,q} : q <= s }

Source: Fu et al., Lookahead Decoding (arXiv 2402.02057), section 3 and figure 4.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ORDINARY, WINDOW, DRAFT, UNUSED = range(4)

_ROW = np.dtype(
    [("role", "i4"), ("level", "i4"), ("column", "i4"), ("draft", "i4"), ("offset", "i4")]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Static tables of a round, one entry per variant: rows are always Q, their roles vary.

    Variants are the fill stages of a window that warms up, or the ways to divide the draft
    rows between sources; the draft of a round says which one it is.

    Shapes: `T` variants, `Q` packed rows, `R` draft rows, `J` Jacobi columns (the width of the
    deepest level; 0 without a window), `M` the most tokens a round can emit.

    Attributes:
        rows: `[T, Q]` records (role, level, column, draft, offset).
        source: `[T, Q]` index of each row's token in `[last token, window levels, drafts]`.
        offsets: `[T, Q]` position relative to the ordinary row.
        mask: `[T, Q, Q]` bool, True = row i attends to row j.
        logit_rows: `[T, 1 + R + J]` the rows whose logits are wanted: the ordinary row, the
            drafts, the deepest level.
        parents: `[T, R]` draft index of the token before, -1 for children of the ordinary row.
        paths: `[T, R + 1, M]` packed rows from the ordinary row to draft r at entry r + 1 (to none
            at entry 0), filled up with the ordinary row.
        max_accepted: most draft tokens one round may accept, `M - 1`.
    """

    rows: np.ndarray
    source: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray
    logit_rows: np.ndarray
    parents: np.ndarray
    paths: np.ndarray
    num_jacobi: int
    max_accepted: int

    @property
    def num_rows(self) -> int:
        return self.rows.shape[1]

    @property
    def num_drafts(self) -> int:
        return self.parents.shape[1]

    @property
    def max_emitted(self) -> int:
        """Tokens one round can emit: the accepted drafts and the target's own token."""
        return self.max_accepted + 1


def at_variant(table: np.ndarray, variant: jax.Array) -> jax.Array:
    """Selects a `[T, ...]` table at `variant [B]`: `[1, ...]` if T is 1, else `[B, ...]`."""
    return jnp.asarray(table) if len(table) == 1 else jnp.asarray(table)[variant]


@functools.lru_cache(maxsize=64)
def stack_layouts(layouts: tuple[Layout, ...]) -> Layout:
    """One layout with the variants of several that agree in everything but their forest."""

    names = ("rows", "source", "offsets", "mask", "logit_rows", "parents", "paths")
    tables: dict[str, Any] = {
        name: np.concatenate([getattr(layout, name) for layout in layouts]) for name in names
    }
    return dataclasses.replace(layouts[0], **tables)


def chain_parents(num_chains: int, length: int, num_linked: int = 1) -> tuple[int, ...]:
    """Parents of `num_chains` chains: `(-1, 0, 1, -1, 3, 4)` for two of three.

    The first `num_linked` of them form one long chain: `(-1, 0, 1, 2, 3, 4)` for both.
    """
    starts = set(range(0, num_chains * length, length)) - set(range(1, num_linked * length))
    return tuple(-1 if i in starts else i - 1 for i in range(num_chains * length))


@functools.lru_cache(maxsize=64)
def build_layout(
    window: int = 0,
    ngram: int = 2,
    parents: tuple[int, ...] = (),
    warm_up: bool = False,
    max_accepted: int | None = None,
) -> Layout:
    """Builds the tables.

    Args:
        window: columns W of the trajectory window; 0 for none.
        ngram: n-gram size N; the window has N-1 levels.
        parents: the forest of draft rows; every parent stands before its children.
        warm_up: whether to build the official fill stages 0..N-2 instead of the steady one.
            At stage s, levels 0..s are filled and hold W+N-2-s columns each, the ordinary
            row standing in for column 0 of level 0.
        max_accepted: cap on accepted drafts; None is the depth of the forest.
    """
    last = ngram - 2
    stages = range(last + 1) if warm_up else [last]
    # (level, column) of the window rows of every stage; (0, 0) is the ordinary row itself.
    cells = [
        [(r, j) for r in range(s + 1) for j in range(window + last - s) if (r, j) != (0, 0)]
        if window
        else []
        for s in stages
    ]
    num_cells = max(map(len, cells))
    num_columns = window + last
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)

    rows = np.zeros((len(cells), 1 + num_cells + len(parents)), _ROW)
    rows[["level", "column", "draft", "offset"]] = (-1, -1, -1, 0)
    rows["role"] = UNUSED
    rows[:, 0] = (ORDINARY, 0, 0, -1, 0)
    for t, stage_cells in enumerate(cells):
        for i, (level, column) in enumerate(stage_cells):
            rows[t, 1 + i] = (WINDOW, level, column, -1, level + column)
        for d, offset in enumerate(depth):
            rows[t, 1 + num_cells + d] = (DRAFT, -1, -1, d, offset)

    num_levels = ngram - 1 if window else 0
    source = np.select(
        [rows["role"] == WINDOW, rows["role"] == DRAFT],
        [
            1 + rows["level"] * num_columns + rows["column"],
            1 + num_levels * num_columns + rows["draft"],
        ],
        0,
    )
    num_jacobi = num_columns - stages[0] if window else 0
    if max_accepted is None:
        max_accepted = max(depth, default=0)
    return Layout(
        rows=rows,
        source=source,
        offsets=rows["offset"],
        mask=np.stack([_visibility(stage_rows, parents) for stage_rows in rows]),
        logit_rows=np.stack(
            [_logit_rows(r, s, num_jacobi) for r, s in zip(rows, stages, strict=True)]
        ),
        parents=np.tile(np.array(parents, np.int32), (len(stages), 1)),
        paths=np.tile(_paths(parents, 1 + num_cells, max_accepted + 1), (len(stages), 1, 1)),
        num_jacobi=num_jacobi,
        max_accepted=max_accepted,
    )


def _visibility(rows: np.ndarray, parents: tuple[int, ...]) -> np.ndarray:
    """`[Q, Q]` bool, True where row i attends to row j."""
    i, j = rows[:, None], rows[None, :]
    in_window = np.isin(rows["role"], (ORDINARY, WINDOW))
    causal_level_0 = (j["level"] == 0) & (j["column"] <= i["column"])
    own_column = (j["level"] >= 1) & (j["level"] <= i["level"]) & (j["column"] == i["column"])
    mask = in_window[:, None] & in_window[None, :] & (causal_level_0 | own_column)

    is_ancestor = np.eye(len(parents), dtype=bool)
    for draft, parent in enumerate(parents):
        if parent >= 0:
            is_ancestor[draft] |= is_ancestor[parent]
    is_draft = rows["role"] == DRAFT
    mask[is_draft, 0] = True
    mask[np.ix_(is_draft, is_draft)] = is_ancestor
    # A row without a role still needs one visible row, for its softmax to be finite.
    np.fill_diagonal(mask, True)
    return mask


def _paths(parents: tuple[int, ...], first_draft: int, size: int) -> np.ndarray:
    """`[R + 1, size]` packed rows from the ordinary row to every draft row."""
    paths = [[0]]
    for draft, parent in enumerate(parents):
        paths.append([*paths[parent + 1], first_draft + draft])
    table = np.zeros((len(paths), size), np.int32)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path[:size]
    return table


def _logit_rows(rows: np.ndarray, deepest: int, num_jacobi: int) -> np.ndarray:
    """`[1 + R + J]`; columns that the deepest level does not have point at the ordinary row."""
    jacobi = np.zeros(num_jacobi, int)
    of_deepest = np.flatnonzero(rows["level"] == deepest)
    if num_jacobi:
        jacobi[rows["column"][of_deepest]] = of_deepest
    return np.concatenate([[0], np.flatnonzero(rows["role"] == DRAFT), jacobi])
