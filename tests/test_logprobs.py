"""Log-probabilities of the emitted tokens equal those of one teacher-forced forward."""

from __future__ import annotations

import checkpoints as files
import jax
import numpy as np
import pytest
from models import TINY, tiny_params

import jlookahead as jl

PROMPTS = [[5, 9, 5], [7], [1, 2, 3, 4] * 4]


@pytest.mark.parametrize(
    "strategy, temperature",
    [
        (jl.Autoregressive(), 0.0),
        (jl.Autoregressive(), 0.7),
        (jl.Lookahead(4, 3, 3), 0.0),
        (jl.PromptLookup(), 0.7),
        (jl.Recycling(16), 0.0),
    ],
    ids=str,
)
def test_equal_a_teacher_forced_forward(strategy, temperature):
    params = tiny_params(0)
    cfg = jl.Config(
        model=TINY,
        strategy=strategy,
        max_new_tokens=40,
        logprobs=True,
        # Neither changes what is reported: the law is the target's own.
        sampling=jl.Sampling(temperature=temperature, top_k=9),
        processors=(jl.processors.LogitBias(((7, 2.0), (11, 2.5))),),
    )
    out = jl.generate(params, PROMPTS, cfg)
    assert strategy == jl.Autoregressive() or sum(out.num_rounds) < 120
    for prompt, tokens, logprobs in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
        ids = np.array([prompt + tokens])
        law = jax.nn.log_softmax(files.logits(params, TINY, ids)[0], axis=-1)
        places = np.arange(len(prompt) - 1, ids.shape[1] - 1)
        np.testing.assert_allclose(logprobs, law[places, ids[0, places + 1]], atol=1e-4, rtol=0)


def test_are_none_unless_asked_for():
    assert (
        jl.generate(
            tiny_params(0),
            [1],
            jl.Config(model=TINY, strategy=jl.Autoregressive(), max_new_tokens=3),
        ).logprobs
        is None
    )
