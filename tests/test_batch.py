"""`generate_many`: prompts that share a batch, each as if it were alone."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import tiny_tokenizer
from models import TINY, LeakProbe, tiny_params
from test_discipline import count_compilations, nbytes

import jlookahead as jl
from jlookahead.batching import _all_done, refill
from jlookahead.call import prepare
from jlookahead.decoding import start
from jlookahead.sharding import per_row

SMALL = jl.Lookahead(2, 3, 2, pool_capacity=64)
EAGER_AUTO = jl.Auto(((1, 1.0), (6, 1.01)))  # all drafts that are found are worth it
GREEDY, SAMPLED = jl.Sampling(), jl.Sampling(temperature=1.0, top_p=0.9, seed=3)


@functools.cache
def random_prompts(num: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(num)]


def config(strategy, sampling=GREEDY, **fields) -> jl.Config:
    return jl.Config(**{"model": TINY, "strategy": strategy, "sampling": sampling, **fields})


def answers(params, prompts, cfg, **kwargs) -> list[jl.Result]:
    """By index, every prompt's exactly once."""
    pairs = list(jl.generate_many(params, prompts, cfg, **kwargs))
    assert sorted(index for index, _ in pairs) == list(range(len(prompts)))
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "strategy",
    [jl.Autoregressive(), SMALL, jl.PromptLookup(), EAGER_AUTO],
    ids=["plain", "lookahead", "lookup", "auto"],
)
def test_each_is_answered_as_alone(strategy, sampling):
    """Twelve prompts through three rows, which end at an EOS, at the budget, at the full cache. Of
    the probe the text changes at once if a row sees what another one left."""
    probe, prompts = LeakProbe(97), random_prompts(12, longest=17)
    eos = (4,) if sampling is GREEDY else tuple(range(5, 12))
    cfg = config(strategy, sampling, max_new_tokens=12, eos_token_ids=eos, cache_len=22)
    got = answers({}, prompts, cfg, batch_size=3, model=probe)
    for i, prompt in enumerate(prompts):
        alone = jl.generate({}, prompt, cfg, row_ids=[i], model=probe)
        if strategy is EAGER_AUTO:  # drafts for the whole batch: its rounds depend on other rows
            assert (got[i].tokens, got[i].finish_reason) == (alone.tokens, alone.finish_reason)
        else:
            assert got[i] == alone
    assert {result.finish_reason for result in got} == {"eos", "length", "cache_full"}


def test_a_llama_answers_each_as_alone():
    params, prompts = tiny_params(0), random_prompts(7, longest=17)
    cfg = config(SMALL, max_new_tokens=30, eos_token_ids=(3, 7, 9, 11), logprobs=True)
    got = answers(params, prompts, cfg, batch_size=3)
    assert {result.finish_reason for result in got} == {"eos", "length"}
    for prompt, result in zip(prompts, got, strict=True):
        alone = jl.generate(params, prompt, cfg)
        np.testing.assert_allclose(result.logprobs, alone.logprobs, atol=1e-4, rtol=0)
        assert dataclasses.replace(result, logprobs=alone.logprobs) == alone


def test_what_a_slot_held_before_leaves_no_trace():
    """Stop strings, penalties and minimum lengths follow each prompt's own text, and residual
    sampling its own drafts."""
    tokenizer, probe = tiny_tokenizer(), LeakProbe(300)
    cfg = jl.Config(
        strategy=jl.PromptLookup(),
        sampling=jl.Sampling(0.4, seed=1, verify="residual"),
        max_new_tokens=24,
        min_new_tokens=5,
        eos_token_ids=(4, *range(240, 260)),
        stop_strings=("!!", '"#', "a", "e"),
        processors=(jl.processors.RepetitionPenalty(1.3), jl.processors.FrequencyPenalty(0.2)),
    )
    prompts = ["the cat", "the hat sat on the cat", "on", "mat, mat, mat", "cat on the mat", "!"]
    row_ids = [4, 2, 9, 7, 1, 30]
    shared = {"tokenizer": tokenizer, "model": probe}
    got = answers({}, prompts, cfg, batch_size=2, row_ids=row_ids, **shared)
    for prompt, row_id, result in zip(prompts, row_ids, got, strict=True):
        assert result == jl.generate({}, prompt, cfg, row_ids=[row_id], **shared)
    assert {result.finish_reason for result in got} == {"stop", "length", "eos"}


def test_prompts_without_a_budget_and_no_prompts():
    cfg, probe = config(jl.Autoregressive(), max_new_tokens=0), LeakProbe(97)
    for result in answers({}, [[1], [2, 3], [4]], cfg, batch_size=2, model=probe):
        assert (result.tokens, result.num_rounds, result.finish_reason) == ([], 0, "length")
    assert answers({}, [], cfg, model=probe) == []


def test_the_longest_prompt_decides_the_capacity_of_all():
    prompts, cfg, probe = [[1, 2], [3] * 300, [4]], config(SMALL, max_new_tokens=8), LeakProbe(97)
    for prompt, result in zip(
        prompts, answers({}, prompts, cfg, batch_size=2, model=probe), strict=True
    ):
        assert result == jl.generate({}, prompt, cfg, model=probe)


def test_programs_do_not_grow_with_the_prompts():
    params = tiny_params(0)
    cfg = config(jl.Autoregressive(), cache_len=300)  # a size that no other test has
    with count_compilations() as count:
        answers(params, [[1] * 10, [2] * 20, [3] * 40, [4]], cfg, batch_size=2)
    assert count[0] == 3 + 3, "prefills of 16, 32 and 64 rows; the loop, the first batch, refilling"
    with count_compilations() as count:
        answers(params, random_prompts(20, longest=60, seed=1), cfg, batch_size=2)
    assert count[0] == 0


def test_a_job_makes_explicit_transfers_only():
    prompts, cfg = random_prompts(4, longest=10), config(jl.PromptLookup(), SAMPLED)
    with jax.transfer_guard("disallow"):
        answers({}, prompts, cfg, batch_size=2, model=LeakProbe(97))


@pytest.mark.parametrize("slot", [2, 0, -1])
def test_a_new_row_goes_into_its_slot(slot):
    """Nowhere if the slot is negative."""
    params, cfg = tiny_params(0), config(jl.Recycling(4), SAMPLED, cache_len=30)
    state = start(prepare(params, random_prompts(3, 9), cfg), params)
    fresh = start(prepare(params, random_prompts(1, 9, seed=5), cfg, row_ids=[7]), params)

    def written(old, new, is_per_row):
        old = np.array(old)
        if slot >= 0 and is_per_row:
            old[slot] = new[0]
        return old

    expected = jax.tree.map(written, state, fresh, per_row(state))
    got = refill(None, state, fresh, np.array([slot], np.int32))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# Runs in a process of its own: the number of devices is fixed when JAX starts.
ON_A_MESH = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax
import jlookahead as jl
from models import TINY, tiny_params
from test_batch import ON_MESH, answers, random_prompts

mesh = jax.make_mesh((2, 2), ("data", "tensor"))
params = jl.shard(tiny_params(0), TINY, mesh)
try:
    jl.generate_many(params, [[1]], ON_MESH, batch_size=3)
except ValueError as error:
    refused = str(error)
results = answers(params, random_prompts(7, longest=17), ON_MESH, batch_size=4)
print(json.dumps([refused, [[r.tokens, r.num_rounds, r.finish_reason] for r in results]]))
"""
ON_MESH = config(jl.PromptLookup(), SAMPLED, max_new_tokens=30, eos_token_ids=(3, 7, 9, 11))


def test_a_mesh_answers_each_as_one_device():
    """Two devices take in prompts, seven of them, so that one gets none in the end."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", ON_A_MESH, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    refused, results = json.loads(done.stdout)
    assert refused.startswith("batch_size: got 3, must be a multiple of 2, the devices")
    assert len({len(tokens) for tokens, *_ in results}) > 2
    for i, (prompt, result) in enumerate(zip(random_prompts(7, 17), results, strict=True)):
        alone = jl.generate(tiny_params(0), prompt, ON_MESH, row_ids=[i])
        assert result == [alone.tokens, alone.num_rounds, alone.finish_reason]


def test_refilling_writes_the_cache_in_place():
    params = tiny_params(0)
    call = prepare(params, [[1, 2, 3]], config(jl.Lookahead(3, 3, 2), max_new_tokens=900))
    fresh = start(call, params)
    state = _all_done(None, fresh, group_size=5)
    compiled = refill.lower(None, state, fresh, np.array([1], np.int32)).compile()
    shape = ",".join(map(str, state.cache.keys[0].shape))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes(state)
    assert memory.temp_size_in_bytes < nbytes(fresh.cache.keys[0])


@pytest.mark.parametrize(
    "prompts, arguments, words",
    [
        ([[1], []], {}, r"prompts\[1\]: prompt: row 0 is empty"),
        ([[1], [2, 97]], {}, r"prompts\[1\]: prompt: row 0 holds id 97"),
        ([[1], "text"], {}, r"prompts\[1\]: prompt: got text, needs a tokenizer"),
        ([[[1], [2]]], {}, r"prompts\[0\]: got a batch of 2 rows"),
        ([[1], [2] * 1000], {}, r"prompts\[1\]: max_new_tokens: got 30 after a prompt of 1000"),
        ([[1], [2] * 9], {"cache_len": 8}, r"prompts\[1\]: cache_len: got 8"),
        ([[1]], {"eos_token_ids": (99,)}, "eos_token_ids: got 99"),
        ([[1]], {"batch_size": 0}, "batch_size: got 0"),
        ([[1], [2]], {"row_ids": [1]}, "row_ids: got .* must be 2 integers"),
        ([[1]], {"row_ids": [-1]}, "row_ids: got -1"),
    ],
)
def test_mistakes_are_refused_at_the_call(prompts, arguments, words):
    of_call = {name: arguments.pop(name) for name in ("batch_size", "row_ids") if name in arguments}
    cfg = config(jl.Autoregressive(), **{"max_new_tokens": 30, **arguments})
    params = tiny_params(0)
    with count_compilations() as count, pytest.raises(ValueError, match=words):
        jl.generate_many(params, prompts, cfg, **of_call)
    assert count[0] == 0
