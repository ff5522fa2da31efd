"""The packed rows: roles, positions, visibility, logit rows and sources of every round shape.

Proved here:
- the worked example (window 5, n-gram 4, two candidates; 21 rows), row by row; which K/V rows
  its candidates commit is part of `test_verify.py`;
- equality with the masks and relative positions recorded from the official implementation,
  `j_make_causal_mask_multilevel` (masks.json, see tests/data/golden/README.md);
- for any window, n-gram and fill stage, and for any forest of drafts, another one in every
  batch row, equality with the definition of the visible sets: Fu et al. (arXiv 2402.02057),
  section 3 and figure 4, as spelled out in the docstring of `jlookahead.layout`, recomputed
  with Python sets of labels.
"""

from __future__ import annotations

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlookahead.forest import chain_parents
from jlookahead.layout import (
    DRAFT,
    ORDINARY,
    UNUSED,
    WINDOW,
    Layout,
    at_stage,
    build_layout,
    place,
)

Label = tuple  # ("b", k), ("u", r, j), ("v", d); ("unused", i) for a row without a role


def visible(mask: np.ndarray) -> list[set[int]]:
    return [set(np.flatnonzero(row).tolist()) for row in mask]


def place_one(layout: Layout, parents: np.ndarray, stage: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Offsets `[Q]` and mask `[Q, Q]` of a single batch row."""
    offsets, mask = place(layout, jnp.array([stage]), jnp.asarray(parents)[None])
    return np.asarray(offsets)[0], np.asarray(mask)[0]


# --- the worked example ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Layout:
    return build_layout(window=5, ngram=4, num_drafts=6, max_accepted=3)


@pytest.fixture(scope="module")
def example_placed(example) -> tuple[np.ndarray, np.ndarray]:
    return place_one(example, chain_parents(2, 3))


def test_example_roles_and_positions(example, example_placed):
    rows = example.rows[0]
    assert rows["role"].tolist() == [ORDINARY] + [WINDOW] * 14 + [DRAFT] * 6
    assert rows["level"].tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [-1] * 6
    assert rows["column"].tolist() == [0, 1, 2, 3, 4] * 3 + [-1] * 6
    assert rows["draft"].tolist() == [-1] * 15 + [0, 1, 2, 3, 4, 5]
    positions = [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 1, 2, 3, 1, 2, 3]
    assert example_placed[0].tolist() == positions
    assert example.offsets[0].tolist() == positions[:15]


def test_example_visibility(example, example_placed):
    expected = [
        {0},
        {0, 1},
        {0, 1, 2},
        {0, 1, 2, 3},
        {0, 1, 2, 3, 4},
        {0, 5},
        {0, 1, 6},
        {0, 1, 2, 7},
        {0, 1, 2, 3, 8},
        {0, 1, 2, 3, 4, 9},
        {0, 5, 10},
        {0, 1, 6, 11},
        {0, 1, 2, 7, 12},
        {0, 1, 2, 3, 8, 13},
        {0, 1, 2, 3, 4, 9, 14},
        {0, 15},
        {0, 15, 16},
        {0, 15, 16, 17},
        {0, 18},
        {0, 18, 19},
        {0, 18, 19, 20},
    ]
    assert visible(example_placed[1]) == expected
    assert visible(example.mask[0]) == expected[:15]


def test_example_logit_rows(example):
    assert example.num_jacobi == 5
    assert example.logit_rows[0].tolist() == [0, *range(15, 21), *range(10, 15)]


def test_example_sources(example):
    # [last token, window levels of C = W+N-2 = 7 columns each, drafts]
    level = [[1 + 7 * r + j for j in range(5)] for r in range(3)]
    drafts = list(range(22, 28))
    assert example.source[0].tolist() == [0, *level[0][1:], *level[1], *level[2], *drafts]


def test_example_counts(example):
    assert (example.num_rows, example.num_drafts) == (21, 6)
    assert (example.first_draft, example.num_jacobi) == (15, 5)
    assert (example.max_accepted, example.max_emitted) == (3, 4)
    capped = build_layout(window=5, ngram=4, num_drafts=6, max_accepted=2)
    assert (capped.max_accepted, capped.max_emitted) == (2, 3)


# --- the official implementation's masks ----------------------------------------------------

# Left out are only the cases of one rank of several ("window_start"): a rank feeds a part of
# the columns, which no layout here does. The other cases with several input rows are kept:
# the official code feeds the prompt (prefill) or re-feeds accepted tokens ("skip2") in the
# same forward, whereas here all but the last input row are committed before the round. So
# those rows are the prefix: every row sees all of them. In particular the official prefill,
# plainly causal over prompt and level 0, is what our stage 0 is after a causal prefill.
OFFICIAL_CASES = [
    case
    for case in golden.read(golden.GOLDEN / "masks.json.gz")["cases"]
    if "window_start" not in case
]


def layouts_of(case: dict) -> list[tuple[Layout, int]]:
    """The layouts that feed the rows of a recorded case, each with its stage's index."""
    ngram, stage = case["N"], len(case["level_sizes"]) - 1
    window = case["level_sizes"][0] - (ngram - 3) + stage
    num_drafts = case["n_candidates"] * (ngram - 1)
    found = [(build_layout(window, ngram, num_drafts, warm_up=True), stage)]
    if stage == ngram - 2:
        found.append((build_layout(window, ngram, num_drafts), 0))
    return found


def test_official_cases_cover_every_kind():
    kinds = {case["name"].rsplit(" ", 1)[0] for case in OFFICIAL_CASES}
    assert {"prefill", "fill1", "fill5", "steady nog", "steady g1", "steady g2"} <= kinds
    assert {"steady g3", "steady g2 skip2"} <= kinds
    assert len(OFFICIAL_CASES) == 40


@pytest.mark.parametrize("case", OFFICIAL_CASES, ids=lambda case: case["name"].replace(" ", "-"))
def test_equals_official_mask(case):
    prefix = case["input_rows"] - 1
    recorded = np.array([[c == "1" for c in row] for row in case["visible"]])
    assert recorded[prefix:, :prefix].all()  # the committed tokens, seen by all
    if case["is_prefill"]:
        assert (recorded == np.tri(len(recorded), dtype=bool)).all()
    parents = chain_parents(case["n_candidates"], case["N"] - 1)
    for layout, t in layouts_of(case):
        offsets, mask = place_one(layout, parents, t)
        # Same order as the official one: input row, levels, candidates. Rows without a role
        # stand between the last two where this stage has fewer than another.
        used = np.flatnonzero(layout.rows[t]["role"] != UNUSED)
        assert (mask[np.ix_(used, used)] == recorded[prefix:, prefix:]).all()
        assert offsets[used].tolist() == case["rel_pos"][prefix:]
        unused = np.setdiff1d(np.arange(layout.num_rows), used)
        assert not mask[np.ix_(used, unused)].any()


# --- row counts and small shapes ------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "ngram", "candidates", "rows"),
    [(7, 5, 7, 56), (15, 5, 15, 120), (5, 4, 2, 21), (5, 2, 3, 8), (1, 5, 1, 8), (1, 2, 1, 2)],
)
def test_number_of_packed_rows(window, ngram, candidates, rows):
    layout = build_layout(window, ngram, candidates * (ngram - 1))
    assert (window + candidates) * (ngram - 1) == layout.num_rows == rows
    assert not (layout.rows["role"] == UNUSED).any()
    assert layout.num_jacobi == window
    assert layout.logit_rows.shape == (1, 1 + window + candidates * (ngram - 1))


def test_ngram_two_has_only_the_causal_level():
    layout = build_layout(window=4, ngram=2, num_drafts=2)
    _, mask = place_one(layout, chain_parents(2, 1))
    assert layout.rows[0]["role"].tolist() == [ORDINARY] + [WINDOW] * 3 + [DRAFT] * 2
    assert visible(mask) == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 4}, {0, 5}]
    # The ordinary row is column 0 of the deepest level.
    assert layout.logit_rows[0].tolist() == [0, 4, 5, 0, 1, 2, 3]


def test_window_of_one_column():
    layout = build_layout(window=1, ngram=4)
    assert layout.rows[0]["role"].tolist() == [ORDINARY, WINDOW, WINDOW]
    assert visible(layout.mask[0]) == [{0}, {0, 1}, {0, 1, 2}]
    assert layout.offsets[0].tolist() == [0, 1, 2]
    assert layout.logit_rows[0].tolist() == [0, 2]


def test_plain_decoding_is_one_row():
    layout = build_layout()
    assert (layout.num_rows, layout.num_drafts, layout.num_jacobi) == (1, 0, 0)
    assert (layout.max_accepted, layout.max_emitted) == (0, 1)
    assert layout.mask.tolist() == [[[True]]]
    assert layout.logit_rows.tolist() == layout.offsets.tolist() == layout.source.tolist() == [[0]]
    offsets, mask = place_one(layout, chain_parents(0, 0))
    assert (offsets.tolist(), mask.tolist()) == ([0], [[True]])


@pytest.mark.parametrize(("window", "ngram"), [(6, 8), (2, 5), (1, 5), (1, 3), (3, 12)])
def test_warm_up_with_an_ngram_larger_than_the_window(window, ngram):
    layout = build_layout(window, ngram, ngram - 1, warm_up=True)
    sizes = [(s + 1) * (window + ngram - 2 - s) for s in range(ngram - 1)]  # with the ordinary
    assert layout.rows.shape == (ngram - 1, max(sizes) + ngram - 1)
    assert layout.num_jacobi == window + ngram - 2
    in_window = np.isin(layout.rows["role"], (ORDINARY, WINDOW)).sum(axis=1)
    assert in_window.tolist() == sizes
    assert ((layout.rows["role"] == DRAFT).sum(axis=1) == ngram - 1).all()
    # The drafts stand at the end in every stage: the chain's last one sees all of them.
    for stage in range(ngram - 1):
        drafts = np.flatnonzero(layout.rows["role"][stage] == DRAFT).tolist()
        offsets, mask = place_one(layout, chain_parents(1, ngram - 1), stage)
        assert visible(mask)[-1] == {0, *drafts}
        assert offsets[drafts].tolist() == list(range(1, ngram))


def test_at_stage_has_an_entry_per_row_only_where_stages_differ():
    stage = jnp.array([2, 0])
    steady, filling = build_layout(3, 4), build_layout(3, 4, warm_up=True)
    assert at_stage(steady.offsets, stage).shape == (1, steady.num_rows)
    assert (at_stage(filling.offsets, stage) == filling.offsets[[2, 0]]).all()


# --- the definition, with sets of labels ----------------------------------------------------


def ancestors(parents: list[int], draft: int) -> list[int]:
    """The draft itself and its ancestors, leaf to root."""
    path = []
    while draft >= 0:
        path.append(draft)
        draft = parents[draft]
    return path


def columns_of(window: int, ngram: int, stage: int, level: int) -> range:
    """Columns of a filled level's own rows; level 0's first is the ordinary row."""
    return range(int(level == 0), window + ngram - 2 - stage)


def labels_of(window: int, ngram: int, stage: int, num_drafts: int) -> set[Label]:
    labels: set[Label] = {("b", 0)} | {("v", d) for d in range(num_drafts)}
    if window:
        labels |= {("b", j) for j in columns_of(window, ngram, stage, 0)}
        for level in range(1, stage + 1):
            labels |= {("u", level, j) for j in columns_of(window, ngram, stage, level)}
    return labels


def visible_labels(label: Label, parents: list[int]) -> set[Label]:
    match label:
        case ("b", k):
            return {("b", i) for i in range(k + 1)}
        case ("u", r, j):
            return {("b", i) for i in range(j + 1)} | {("u", q, j) for q in range(1, r + 1)}
        case ("v", d):
            return {("b", 0)} | {("v", a) for a in ancestors(parents, d)}
        case _:
            return {label}


def position_of(label: Label, parents: list[int]) -> int:
    match label:
        case ("b", k):
            return k
        case ("u", r, j):
            return j + r
        case ("v", d):
            return len(ancestors(parents, d))
        case _:
            return 0


def label_of(row: np.void, index: int) -> Label:
    if row["role"] == UNUSED:
        return ("unused", index)
    if row["role"] == DRAFT:
        return ("v", int(row["draft"]))
    level, column = int(row["level"]), int(row["column"])
    return ("u", level, column) if level else ("b", column)


def token_labels(window: int, ngram: int, num_drafts: int) -> list[Label]:
    """What stands where in `[last token, window levels, drafts]`."""
    labels: list[Label] = [("b", 0)]
    if window:
        for level in range(ngram - 1):
            for column in range(window + ngram - 2):
                labels.append(("u", level, column) if level else ("b", column))
    return labels + [("v", d) for d in range(num_drafts)]


def stages_of(ngram: int, warm_up: bool) -> range:
    return range(ngram - 1) if warm_up else range(ngram - 2, ngram - 1)


@given(
    window=st.integers(0, 7),
    ngram=st.integers(2, 7),
    num_drafts=st.integers(0, 9),
    warm_up=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_tables_equal_the_definition(window, ngram, num_drafts, warm_up):
    layout = build_layout(window, ngram, num_drafts, warm_up=warm_up)
    stages = stages_of(ngram, warm_up)
    assert len(layout.rows) == len(stages)
    for t, stage in enumerate(stages):
        labels = [label_of(row, i) for i, row in enumerate(layout.rows[t])]
        used = [label for label in labels if label[0] != "unused"]
        assert len(set(labels)) == len(labels)
        assert set(used) == labels_of(window, ngram, stage, num_drafts)
        assert labels[layout.first_draft :] == [("v", d) for d in range(num_drafts)]
        not_drafts = labels[: layout.first_draft]
        seen = [{labels[j] for j in row} for row in visible(layout.mask[t])]
        assert seen == [visible_labels(label, []) for label in not_drafts]
        assert layout.offsets[t].tolist() == [position_of(label, []) for label in not_drafts]

        tokens = token_labels(window, ngram, num_drafts)
        fed = [tokens[i] for i in layout.source[t]]
        assert all(a == b for a, b in zip(fed, labels, strict=True) if b[0] != "unused")

        wanted = [labels[i] for i in layout.logit_rows[t]]
        assert wanted == expected_logit_labels(layout, window, ngram, stage, num_drafts)


def expected_logit_labels(layout, window, ngram, stage, num_drafts) -> list[Label]:
    """The ordinary row; drafts; the deepest level by column, filled up with the ordinary."""
    width = window + ngram - 2 - stage if window else 0
    deepest = [("u", stage, j) if stage else ("b", j) for j in range(width)]
    filler = [("b", 0)] * (layout.num_jacobi - width)
    return [("b", 0), *(("v", d) for d in range(num_drafts)), *deepest, *filler]


# window, n-gram, drafts, warm up: one compiled program each.
PLACED = [(0, 2, 9, False), (5, 4, 9, False), (4, 5, 9, True), (1, 3, 4, True), (3, 2, 1, False)]


@functools.lru_cache
def placing(shape: tuple[int, int, int, bool]):
    window, ngram, num_drafts, warm_up = shape
    layout = build_layout(window, ngram, num_drafts, warm_up=warm_up)
    return layout, jax.jit(functools.partial(place, layout))


@st.composite
def placements(draw):
    """A shape, and a forest for every fill stage, the batch; parents stand anywhere."""
    shape = draw(st.sampled_from(PLACED))
    _, ngram, num_drafts, warm_up = shape
    forests = []
    for _ in stages_of(ngram, warm_up):
        order = draw(st.permutations(range(num_drafts)))
        parents = [-1] * num_drafts
        for i, d in enumerate(order):
            before = draw(st.integers(-1, i - 1))
            parents[d] = -1 if before < 0 else order[before]
        forests.append(parents)
    return shape, forests


@given(placements())
@settings(deadline=None, max_examples=200)
def test_placement_equals_the_definition(placement):
    shape, forests = placement
    layout, run = placing(shape)
    offsets, mask = run(np.arange(len(forests)), np.array(forests, np.int32))
    for t, parents in enumerate(forests):
        labels = [label_of(row, i) for i, row in enumerate(layout.rows[t])]
        seen = [{labels[j] for j in row} for row in visible(np.asarray(mask)[t])]
        assert seen == [visible_labels(label, parents) for label in labels]
        assert offsets[t].tolist() == [position_of(label, parents) for label in labels]


def test_linked_chains():
    """Prompt lookup takes chains 0 and 1 as one; the long chain stands behind its first part."""
    layout = build_layout(4, 3, num_drafts=6, max_accepted=6)
    linked = np.array([-1, 0, 1, 2, -1, 4])
    offsets, mask = place_one(layout, linked)
    assert layout.first_draft == 8
    assert offsets[8:].tolist() == [1, 2, 3, 4, 1, 2]
    assert visible(mask)[11] == {0, 8, 9, 10, 11}
    assert visible(mask)[13] == {0, 12, 13}


@pytest.mark.parametrize("stage", [0, 1])
def test_batch_rows_have_forests_of_their_own(stage):
    layout = build_layout(2, 3, num_drafts=4, warm_up=True)
    forests = np.array([chain_parents(2, 2), chain_parents(1, 4)])
    together = place(layout, jnp.array([stage, 1 - stage]), jnp.asarray(forests))
    alone = [place_one(layout, forests[0], stage), place_one(layout, forests[1], 1 - stage)]
    for b in range(2):
        for found, expected in zip(together, alone[b], strict=True):
            np.testing.assert_array_equal(found[b], expected)
