"""Shapes and dtypes of what a round carries and reports, for one row and for batches."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import pytest
from models import TINY, WIDE_AUTOS, tiny_params

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.decoding import start
from jlookahead.rounds import decode_round
from jlookahead.sharding import per_row

STRATEGIES = [
    jl.Autoregressive(),
    jl.Lookahead(5, 4, 3),
    jl.Lookahead(3, 2, 1, prompt_pool=False),
    jl.Lookahead(2, 6, 3, reference=True),
    jl.PromptLookup(2, 3, 2),
    jl.Jacobi(4),
    jl.Recycling(6),
    jl.Auto(),
    *WIDE_AUTOS,
]
SAMPLINGS = [
    jl.Sampling(),
    jl.Sampling(temperature=1.0),
    jl.Sampling(temperature=1.0, verify="residual"),
]


@pytest.mark.parametrize("prompts", [[[1, 2]], [[1], [2, 3, 4], [5]]], ids=["one", "batch"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "coupled", "residual"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_round_maps_a_state_to_one_of_the_same_shape(strategy, sampling, prompts):
    cfg = jl.Config(
        model=TINY, strategy=strategy, sampling=sampling, max_new_tokens=9, logprobs=True
    )
    params = tiny_params(0)
    call = prepare(params, prompts, cfg)
    state = jax.eval_shape(lambda p: start(call, p), params)
    after, info = jax.eval_shape(
        lambda p, s: decode_round(call.model, strategy, 1, p, s), params, state
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    batch, layout = len(prompts), strategy.layout
    slots = call.num_slots
    chex.assert_shape(after.tokens, (batch, slots))
    for keys in (*after.cache.keys, *after.cache.values):
        chex.assert_shape(keys, (batch, TINY.num_key_value_heads, slots, TINY.head_dim))
    chex.assert_shape([info.num_emitted, info.num_accepted, info.winner], (batch,))
    chex.assert_shape([info.emitted, info.source], (batch, layout.max_emitted))
    chex.assert_shape(jax.tree.leaves(info.draft), (batch, layout.num_drafts))
    chex.assert_type([info.emitted, info.draft.tokens, info.draft.parents], jnp.int32)
    chex.assert_type([info.source, info.draft.source], jnp.int8)
    chex.assert_shape(after.logprobs, (batch, slots))
    chex.assert_type(after.logprobs, jnp.float32)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "coupled", "residual"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_grows_with_the_batch_is_per_row(strategy, sampling):
    lm = jl.load()
    cfg = lm.make_config(
        strategy=strategy,
        sampling=sampling,
        max_new_tokens=9,
        min_new_tokens=2,
        logprobs=True,
        stop_strings=("ab",),
        processors=(jl.processors.RepetitionPenalty(1.1), jl.processors.BannedTokens((3,))),
    )

    def shapes(batch):
        call = prepare(lm.params, [[1, 2]] * batch, cfg, lm.tokenizer)
        return jax.eval_shape(lambda p: start(call, p), lm.params)

    state, larger = shapes(3), shapes(5)
    answers = per_row(state)
    chex.assert_trees_all_equal_structs(answers, state)
    leaves = (jax.tree.leaves(tree) for tree in (answers, state, larger))
    for is_per_row, leaf, other in zip(*leaves, strict=True):
        assert other.shape == ((5, *leaf.shape[1:]) if is_per_row else leaf.shape)


def test_a_round_is_traced_once_for_all_prompts_of_a_bucket():
    chex.clear_trace_counter()
    strategy = jl.Lookahead(3, 3, 2)
    traced = chex.assert_max_traces(n=1)(
        lambda params, state: decode_round(jl.LlamaModel(TINY), strategy, 1, params, state)
    )
    one_round, params = jax.jit(traced), tiny_params(0)
    for prompt in ([1], [2, 3], [4] * 16):
        cfg = jl.Config(model=TINY, strategy=strategy, max_new_tokens=20)
        state = start(prepare(params, prompt, cfg), params)
        one_round(params, one_round(params, state)[0])


def test_a_model_of_the_wrong_shape_is_refused_while_tracing():
    class Narrow(jl.LlamaModel):
        def logits(self, params, hidden):
            return super().logits(params, hidden)[..., :-1]

    cfg = jl.Config(model=TINY, max_new_tokens=3)
    with pytest.raises(AssertionError, match="shape"):
        jl.generate(tiny_params(0), [1, 2], cfg, model=Narrow(TINY))
