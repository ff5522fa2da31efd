"""Accepted tokens whose K/V are computed with the next round, `Config(publish="refeed")`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models import LeakProbe

import jlookahead as jl

PROBE = LeakProbe(vocab_size=11)
PROMPTS = [[1, 2, 3] * 4, [4, 1], [7, 7, 2]]
STRATEGIES = [
    jl.Lookahead(4, 4, 5),
    jl.PromptLookup(num_draft_tokens=4, candidates=2),
    jl.Recycling(16),
    jl.Autoregressive(),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_tokens_and_rounds_stay_the_same(strategy):
    """The probe's text changes if a row is seen twice, not at all or at another place."""
    cfg = jl.Config(strategy=strategy, max_new_tokens=60)
    refeeding = dataclasses.replace(cfg, publish="refeed")
    kept, refed = (jl.generate(None, PROMPTS, c, model=PROBE) for c in (cfg, refeeding))
    for name in ("tokens", "num_rounds", "sources", "finish_reason"):
        assert getattr(kept, name) == getattr(refed, name)
    assert (sum(kept.num_rounds) < 150) == (not isinstance(strategy, jl.Autoregressive))


def test_what_is_pending_after_every_round():
    cfg = jl.Config(strategy=STRATEGIES[0], max_new_tokens=40, publish="refeed")
    most = 0
    for state, info in jl.iter_rounds(None, PROMPTS, cfg, model=PROBE):
        emitted = np.asarray(info.num_emitted)
        pending = np.asarray(state.num_pending)[emitted > 0]
        assert (pending == emitted[emitted > 0] - 1).all()
        assert (np.asarray(state.num_committed + state.num_pending) == state.length - 1).all()
        most = max(most, pending.max())
    assert most > 1


def test_a_session_reuses_what_is_committed():
    cfg = jl.Config(strategy=STRATEGIES[0], max_new_tokens=23, publish="refeed")
    session = jl.Session(None, cfg, model=PROBE)
    history, missing = PROMPTS[0], []
    for turn in range(4):
        out = session.generate(history)
        assert out.tokens == jl.generate(None, history, cfg, model=PROBE).tokens
        if turn:
            missing.append(len(history) - 1 - (turn + 1) - session.num_reused)
        history = [*history, *out.tokens, *range(turn + 2)]
    assert min(missing) >= 0
    assert max(missing) > 0, "no turn ended with tokens that had no K/V"
