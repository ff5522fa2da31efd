"""Replay 1: window, pool, verification and publication, driven by recorded argmaxes.

No network: a stub answers every packed row with what the official run recorded for it, so
every state of the official implementation must be reproduced at every step.
"""

from __future__ import annotations

import dataclasses

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlookahead as jl
from jlookahead.layout import DRAFT


@dataclasses.dataclass(frozen=True)
class RecordedArgmaxes:
    """Answers row q at committed length n with token `params[n, q]`."""

    vocab_size: int
    max_position_embeddings: int = 4096

    def init_cache(self, batch, num_slots):
        return jl.KVCache(keys=(), values=())

    def forward(self, params, tokens, positions, workspace_mask, cache, lengths):
        rows = jnp.resize(params[lengths], tokens.shape)  # prefill has rows of its own
        return rows[..., None], ()

    def logits(self, params, hidden):
        return jax.nn.one_hot(hidden[..., 0], self.vocab_size)


def answers(run: dict) -> np.ndarray:
    """`[length, Q]`: what the run recorded, on the rows of our layout."""
    layout = golden.strategy_of(run).layout
    table = np.zeros((1024, layout.num_rows), np.int32)  # one size: one program per W, N, G
    for step in run["steps"]:
        rows = layout.rows[step["fill_level"]]
        answer = table[step["seq_len_before"] - 1]
        deepest = (rows["level"] == step["fill_level"]) & (rows["role"] != DRAFT)
        recorded = step["inp_argmax"]
        # At stage 0 the deepest level's column 0 is the ordinary row, recorded apart.
        answer[np.flatnonzero(deepest)[-len(recorded) :]] = recorded
        answer[0] = step["out_argmax"]
        for c, guesses in enumerate(step.get("guess_argmax") or []):
            drafts = np.flatnonzero(rows["role"] == DRAFT)
            answer[drafts[c * len(guesses) : (c + 1) * len(guesses)]] = guesses
    return table


REPLAYED = golden.recordings(
    "tiny", "smol", "tiny_fixedhist", "smol_fixedhist", "tiny_eos", "tiny_maxlen"
)


@pytest.mark.parametrize("path", REPLAYED, ids=lambda p: f"{p.parent.name}-{p.name[:-8]}")
def test_every_recorded_state_is_reproduced(path):
    run = golden.read(path)
    steps = run["steps"]
    model = RecordedArgmaxes(vocab_size=128 if run["model"] == "tiny" else 49152)
    rounds = jl.iter_rounds(
        jnp.asarray(answers(run)),
        run["prompt_ids"],
        golden.config_of(run, None),
        initial_window=run["initial_window"],
        model=model,
    )
    k = -1
    for k, (state, info) in enumerate(rounds):
        step = steps[k]
        is_last = k + 1 == len(steps)
        emitted = info.emitted[0, : info.num_emitted[0]].tolist()
        # Only the length limit, at the end, cuts what the official code overshoots.
        expected = step["emitted"][: len(run["final_ids"]) - step["seq_len_before"]]
        assert emitted == expected
        assert int(info.num_accepted[0]) == min(step["accepted"], len(expected) - 1)
        assert info.candidates() == (step["cands"] or [])
        if not is_last:
            assert state.window.levels() == steps[k + 1]["levels"]
            assert golden.pool_digest(state.pool.as_dict()) == steps[k + 1]["pool_digest"]
            assert state.pool.lookup(int(state.last_token[0])) == steps[k + 1]["bucket"]
    assert k + 1 == len(steps)
    if run["untruncated_ids"] == run["final_ids"]:
        # Otherwise the official pool has seen tokens that were cut off afterwards.
        assert golden.pool_digest(state.pool.as_dict()) == run["final_pool_digest"]
    assert state.tokens[0, : state.length[0]].tolist() == run["final_ids"]
