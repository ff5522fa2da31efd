"""Lookahead on a real model: the official code's recorded runs, text and acceptance.

Text is compared with recorded greedy runs of HF PyTorch, 96 new tokens a prompt.
"""

from __future__ import annotations

import golden
import numpy as np
import pytest
from test_golden_model import replay

import jlookahead as jl

pytestmark = pytest.mark.optimized

# The rest of the recordings is replayed without the model, in test_golden_replay.py.
RUNS = [
    path
    for path in golden.recordings("smol", "smol_fixedhist")
    if path.name.startswith(("p02_chat_tea", "p05_summarise_W7N5G7_P1", "p10_repeat_W7N5G7"))
    and ("W7N5G7" in path.name or "W5N3G5" in path.name)
]
OFFICIAL = ("p00", "p02", "p03", "p05", "p07", "p08", "p10")


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.name[:-8])
def test_recorded_runs(smollm2, path):
    assert replay(smollm2.params, smollm2.config, golden.read(path)) > 0


def test_text_and_acceptance(smollm2):
    """Ids equal to plain decoding; at (7,5,7) more tokens per round than the official code's
    2.1 with its prompt pool, on the same prompts."""
    cfg = smollm2.make_config(strategy=jl.Lookahead(7, 5, 7), max_new_tokens=96)
    recorded = golden.read(golden.GOLDEN / "ar_smol.json.gz")
    tokens_per_round = {}
    for name, run in recorded.items():
        if not name.startswith(OFFICIAL):
            continue
        out = jl.generate(smollm2.params, run["prompt_ids"], cfg)
        assert out.tokens == run["ids"][len(run["prompt_ids"]) :][:96], name
        tokens_per_round[name] = out.tokens_per_round
    assert len(tokens_per_round) == len(OFFICIAL)
    assert np.mean(list(tokens_per_round.values())) > 2.2
