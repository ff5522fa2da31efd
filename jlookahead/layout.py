"""The packed query rows of one round: one static record table, built once in NumPy.

A round feeds Q rows to the network: the ordinary row (the last emitted token), the window's
trajectory levels, and the draft tokens. Where a row's token comes from, whether its logits are
wanted, and where the window's rows stand and what they see, depends on the shape of the round
alone: it is derived here from the record table and is a constant of the program. The draft
rows are a forest that the proposer may shape anew every round; see `forest.py`.

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

import jax
import jax.numpy as jnp
import numpy as np

from jlookahead.forest import ancestry

ORDINARY, WINDOW, DRAFT, UNUSED = range(4)

_ROW = np.dtype(
    [("role", "i4"), ("level", "i4"), ("column", "i4"), ("draft", "i4"), ("offset", "i4")]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Static tables of a round, one entry per fill stage of the window.

    Shapes: `T` stages (1 for a window that does not warm up, or none), `Q` packed rows, `R`
    draft rows, which are the last ones, `J` Jacobi columns (the width of the deepest level; 0
    without a window), `M` the most tokens a round can emit.

    Attributes:
        rows: `[T, Q]` records (role, level, column, draft, offset).
        source: `[T, Q]` index of each row's token in `[last token, window levels, drafts]`.
        offsets: `[T, Q - R]` position relative to the ordinary row, of all but the drafts.
        mask: `[T, Q - R, Q - R]` bool, True = row i attends to row j; of all but the drafts.
        logit_rows: `[T, 1 + R + J]` the rows whose logits are wanted: the ordinary row, the
            drafts, the deepest level.
        num_drafts: R.
        num_jacobi: J.
        max_accepted: most draft tokens one round may accept, `M - 1`; at least the depth of
            any forest a proposer makes, unless it caps acceptance.
        chain_len: rows of the chains that make up the drafts, of which the first may be linked
            into longer ones; 0 where the forest has another form.
        smaller: layouts of rounds that compute the first draft rows alone and no window, by
            rising number of drafts.
    """

    rows: np.ndarray
    source: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray
    logit_rows: np.ndarray
    num_drafts: int
    num_jacobi: int
    max_accepted: int
    chain_len: int
    smaller: tuple[Layout, ...]

    @property
    def draft_sizes(self) -> tuple[int, ...]:
        """Numbers of leading draft rows that a round can compute, rising, the last one R."""
        return (*(layout.num_drafts for layout in self.smaller), self.num_drafts)

    def of_size(self, num_drafts: int) -> Layout:
        """The layout of a round with one of `draft_sizes`."""
        return next(x for x in (*self.smaller, self) if x.num_drafts == num_drafts)

    @property
    def num_rows(self) -> int:
        return self.rows.shape[1]

    @property
    def first_draft(self) -> int:
        """Packed row of draft 0."""
        return self.num_rows - self.num_drafts

    @property
    def max_emitted(self) -> int:
        """Tokens one round can emit: the accepted drafts and the target's own token."""
        return self.max_accepted + 1


def at_stage(table: np.ndarray | jax.Array, stage: jax.Array) -> jax.Array:
    """Selects a `[T, ...]` table at `stage [B]`: `[1, ...]` if T is 1, else `[B, ...]`."""
    return jnp.asarray(table) if len(table) == 1 else jnp.asarray(table)[stage]


def place(layout: Layout, stage: jax.Array, parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the packed rows of a round stand and what they see.

    Args:
        layout: the tables.
        stage: `[B]` fill stage of the window.
        parents: `[B, R]`, see `ancestry`.

    Returns:
        position relative to the ordinary row `[B, Q]`, and the mask `[B, Q, Q]`.
    """
    batch, first = len(parents), layout.first_draft
    seen_by_drafts = ancestry(parents)
    offsets = jnp.broadcast_to(at_stage(layout.offsets, stage), (batch, first))
    offsets = jnp.concatenate([offsets, seen_by_drafts.sum(axis=2, dtype=jnp.int32)], axis=1)
    mask = jnp.zeros((batch, layout.num_rows, layout.num_rows), bool)
    mask = mask.at[:, :first, :first].set(at_stage(layout.mask, stage))
    mask = mask.at[:, first:, first:].set(seen_by_drafts)
    return offsets, mask.at[:, first:, 0].set(True)


@functools.lru_cache(maxsize=64)
def build_layout(
    window: int = 0,
    ngram: int = 2,
    num_drafts: int = 0,
    max_accepted: int = 0,
    warm_up: bool = False,
    draft_sizes: tuple[int, ...] = (),
    chain_len: int = 0,
) -> Layout:
    """Builds the tables.

    Args:
        window: columns W of the trajectory window; 0 for none.
        ngram: n-gram size N; the window has N-1 levels.
        num_drafts: draft rows R.
        max_accepted: most drafts one round may accept.
        warm_up: whether to build the official fill stages 0..N-2 instead of the steady one.
            At stage s, levels 0..s are filled and hold W+N-2-s columns each, the ordinary
            row standing in for column 0 of level 0.
        draft_sizes: smaller numbers of draft rows that a round may compute, without the window,
            rising.
        chain_len: rows of a chain, if the drafts are chains.
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

    rows = np.zeros((len(cells), 1 + num_cells + num_drafts), _ROW)
    rows[["level", "column", "draft", "offset"]] = (-1, -1, -1, 0)
    rows["role"] = UNUSED
    rows[:, 0] = (ORDINARY, 0, 0, -1, 0)
    for t, stage_cells in enumerate(cells):
        for i, (level, column) in enumerate(stage_cells):
            rows[t, 1 + i] = (WINDOW, level, column, -1, level + column)
    rows["role"][:, 1 + num_cells :] = DRAFT
    rows["draft"][:, 1 + num_cells :] = np.arange(num_drafts)

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
    not_drafts = rows[:, : 1 + num_cells]
    return Layout(
        rows=rows,
        source=source,
        offsets=not_drafts["offset"],
        mask=np.stack([_visibility(stage_rows) for stage_rows in not_drafts]),
        logit_rows=np.stack(
            [_logit_rows(r, s, num_jacobi) for r, s in zip(rows, stages, strict=True)]
        ),
        num_drafts=num_drafts,
        num_jacobi=num_jacobi,
        max_accepted=max_accepted,
        chain_len=chain_len,
        smaller=tuple(
            build_layout(num_drafts=size, max_accepted=max_accepted) for size in draft_sizes
        ),
    )


@functools.lru_cache(maxsize=64)
def with_smaller_rounds(layout: Layout, draft_sizes: tuple[int, ...], max_accepted: int) -> Layout:
    """The layout with smaller rounds beside it that have another source of drafts.

    Args:
        layout: of the largest rounds.
        draft_sizes: as `build_layout` takes them.
        max_accepted: most drafts that a round of any size may accept.
    """
    smaller = tuple(build_layout(num_drafts=n, max_accepted=max_accepted) for n in draft_sizes)
    return dataclasses.replace(layout, max_accepted=max_accepted, smaller=smaller)


def _visibility(rows: np.ndarray) -> np.ndarray:
    """Which of the ordinary row and the window's rows see which, square bool."""
    i, j = rows[:, None], rows[None, :]
    in_window = np.isin(rows["role"], (ORDINARY, WINDOW))
    causal_level_0 = (j["level"] == 0) & (j["column"] <= i["column"])
    own_column = (j["level"] >= 1) & (j["level"] <= i["level"]) & (j["column"] == i["column"])
    mask = in_window[:, None] & in_window[None, :] & (causal_level_0 | own_column)
    # A row without a role still needs one visible row, for its softmax to be finite.
    np.fill_diagonal(mask, True)
    return mask


def _logit_rows(rows: np.ndarray, deepest: int, num_jacobi: int) -> np.ndarray:
    """`[1 + R + J]`; columns that the deepest level does not have point at the ordinary row."""
    jacobi = np.zeros(num_jacobi, int)
    of_deepest = np.flatnonzero(rows["level"] == deepest)
    if num_jacobi:
        jacobi[rows["column"][of_deepest]] = of_deepest
    return np.concatenate([[0], np.flatnonzero(rows["role"] == DRAFT), jacobi])
