"""Who computes what when devices share a round: the tables, and rounds on devices that `vmap`
stands in for."""

from __future__ import annotations

import functools

import golden
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import LeakProbe

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import _run_rounds, start
from jlookahead.division import divide
from jlookahead.layout import DRAFT, WINDOW
from jlookahead.sharding import LOOKAHEAD

lookaheads = st.builds(
    jl.Lookahead,
    window=st.integers(1, 9),
    ngram=st.integers(3, 6),
    candidates=st.integers(1, 9),
    prompt_lookup=st.booleans(),
    reference=st.booleans(),
)
lookups = st.builds(
    jl.PromptLookup, num_draft_tokens=st.integers(1, 5), candidates=st.integers(2, 9)
)


@settings(deadline=None, max_examples=60)
@given(lookaheads | lookups, st.integers(2, 9))
def test_every_row_is_computed_with_all_that_it_sees(strategy, num_devices):
    layout = strategy.layout
    division = divide(layout, num_devices)
    if division is None:  # chains that must stay together leave nothing to divide
        assert layout.num_jacobi == 0
        return
    num_stages = len(layout.rows)
    for t in range(num_stages):
        shares = [set(rows.tolist()) - {-1} for rows in division.rows[:, t]]
        used = np.flatnonzero(np.isin(layout.rows["role"][t], (WINDOW, DRAFT)))
        assert set.union(*shares) == {0, *used.tolist()}
        for rows, share in zip(division.rows[:, t], shares, strict=True):
            assert len(share) == (rows >= 0).sum(), "a row twice"
            for row in share & set(range(layout.first_draft)):
                assert set(np.flatnonzero(layout.mask[t, row]).tolist()) <= share
        # Of level 0 a device may compute what others do, of the rest nothing.
        all_rows = division.rows[:, t]
        counts = np.bincount(all_rows[all_rows >= 0], minlength=layout.num_rows)
        assert (counts[layout.rows["level"][t] > 0] <= 1).all()
        assert (counts[layout.first_draft :] == 1).all()


@settings(deadline=None, max_examples=60)
@given(lookaheads, st.integers(2, 9))
def test_columns_come_back_in_order(strategy, num_devices):
    layout = strategy.layout
    division = divide(layout, num_devices)
    for t in range(len(layout.rows)):
        wanted = layout.logit_rows[t, 1 + layout.num_drafts :][: layout.num_jacobi - t]
        of_device = division.logit_rows[:, t, 1 + division.num_drafts :]
        computed = np.take_along_axis(division.rows[:, t], of_device, axis=1).reshape(-1)
        assert computed[division.column_at[t]][: len(wanted)].tolist() == wanted.tolist()


@settings(deadline=None, max_examples=60)
@given(lookaheads, st.integers(1, 9))
def test_chains_that_may_be_linked_stay_together(strategy, num_devices):
    division = divide(strategy.layout, num_devices)
    assert (division is None) == (num_devices == 1)
    if division is not None:
        assert division.num_drafts % (strategy.ngram - 1) == 0
        assert division.num_drafts >= strategy.layout.max_accepted


def test_what_is_not_divided():
    for strategy in (
        jl.Autoregressive(),
        jl.Jacobi(),
        jl.Auto(),
        jl.Recycling(),
        jl.PromptLookup(candidates=1),
        *jl.PromptLookup(candidates=4).layout.smaller,
    ):
        layout = getattr(strategy, "layout", strategy)
        assert divide(layout, 4) is None


@pytest.mark.parametrize(
    "path", golden.recordings("tiny_dist"), ids=lambda path: path.name.removesuffix(".json.gz")
)
def test_the_shards_of_the_official_implementation(path):
    """Which columns of the window each rank was fed, at every recorded step."""
    run = golden.read(path)
    layout = golden.strategy_of(run).layout
    division = divide(layout, run["config"]["DIST_WORKERS"])
    for step in run["steps"]:
        stage = min(step["step"], len(layout.rows) - 1)
        index = division.rows[run["rank"], stage]
        rows = layout.rows[stage][index[index >= 0]]
        rows = rows[rows["role"] == WINDOW]
        for level, (fed, full) in enumerate(
            zip(step["levels_in"], step["full_levels"], strict=True)
        ):
            columns = rows["column"][rows["level"] == level]
            first = 1 if level == 0 else 0  # column 0 of level 0 is the ordinary row
            assert [full[c - first] for c in columns] == (fed or [])


@pytest.mark.parametrize(
    "strategy, sampling",
    [
        (jl.Lookahead(4, 3, 5), jl.Sampling()),
        (jl.Lookahead(4, 4, 3, prompt_lookup=False), jl.Sampling(0.4, seed=5, verify="residual")),
    ],
    ids=["greedy", "residual"],
)
def test_odd_numbers_of_devices(strategy, sampling):
    """Three and five devices give the tokens and rounds of one, and agree in all they hold."""
    cfg = jl.Config(strategy=strategy, sampling=sampling, max_new_tokens=24)
    call = prepare(None, [[5, 6, 7, 5, 6], [9, 3, 9, 3]], cfg, model=LeakProbe(vocab_size=11))

    @functools.partial(jax.jit, static_argnums=0)
    def decoded(num_devices, state):
        run = functools.partial(_run_rounds, call.model, strategy, num_devices, None)
        if num_devices == 1:
            return run(state, 99)
        return jax.vmap(lambda _: run(state, 99), axis_name=LOOKAHEAD, axis_size=num_devices)(
            np.arange(num_devices)
        )

    expected = decoded(1, start(call, None))
    assert (expected.num_rounds < 24).any()
    for num_devices in (3, 5):
        states = decoded(num_devices, start(call, None))
        for name in ("tokens", "num_rounds", "source", "length", "window", "pool"):
            of_one = jax.tree.leaves(getattr(expected, name))
            for leaf, one in zip(jax.tree.leaves(getattr(states, name)), of_one, strict=True):
                assert (np.asarray(leaf) == np.asarray(one)).all(), name
