"""Generation on meshes of eight simulated devices: what one device gives, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys

import golden
import mesh_cases
import numpy as np
import pytest
from mesh_cases import CASES, COUNTED, MODEL, RECORDED
from models import tiny_params

import jlookahead as jl
from benchmarks import scaling


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("meshes") / "found.json"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, mesh_cases.__file__, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


def name_of(case: mesh_cases.Case) -> str:
    axes = "-".join(f"{axis}{size}" for axis, size in case.axes)
    sampling = case.sampling.verify if case.sampling.temperature else "greedy"
    return f"{axes}-{type(case.strategy).__name__}-{sampling}-{case.publish}"


@pytest.mark.parametrize("index", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_tokens_rounds_and_sources_of_one_device(found, index):
    case = dataclasses.replace(CASES[index], publish="broadcast")
    expected = mesh_cases.generated(case, tiny_params(0, MODEL))
    assert found["generated"][index] == expected
    num_rounds = sum(n for result in expected for n in result["num_rounds"])
    num_tokens = sum(len(row) for result in expected for row in result["tokens"])
    drafts = not isinstance(case.strategy, jl.Autoregressive)
    assert (num_rounds < 0.95 * num_tokens) == drafts, "a case that accepts next to nothing"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split("_rank")[0])
def test_recorded_runs_of_several_ranks(found, path):
    run, states = golden.read(path), found["replayed"][path.name]
    emitted = [token for state in states for token in state["emitted"]]
    assert run["prompt_ids"] + emitted == run["untruncated_ids"]
    assert len(states) == run["n_forward"]
    for state, after in zip(states, run["steps"][1:], strict=False):
        assert state["levels"] == after["full_levels"]
        assert state["pool_digest"] == after["pool_digest"]
        assert state["num_pending"] == after["guess_skip_dist"]


def count(collectives: list[dict], kind: str) -> list[tuple[str, list[int]]]:
    return [
        (c["dtype"], [int(n) for n in c["shape"].split(",") if n])
        for c in collectives
        if c["kind"] == kind
    ]


@pytest.mark.parametrize("name", ["broadcast", "refeed", "sampled"])
def test_a_round_takes_one_gathering_and_one_broadcast(found, name):
    """Not one of each per layer."""
    case, collectives = COUNTED[name], found["collectives"][name]
    layout = case.strategy.layout
    batch, num_devices = 2, case.axes[0][1]
    told = scaling.told_bytes(layout, num_devices) // 4
    assert count(collectives, "all-gather") == [("s32", [num_devices, batch, told])]
    sums = count(collectives, "all-reduce")
    if name == "refeed":
        assert sums == []
    else:
        ((dtype, shape),) = sums
        assert 4 * math.prod(shape) == batch * scaling.kv_bytes(MODEL, layout, itemsize=4)
        assert dtype == "f32"
    assert len(collectives) == 1 + len(sums)


def test_rows_of_a_batch_need_nothing_of_each_other(found):
    assert found["collectives"]["data"] == []


def test_the_tensor_axis_takes_two_sums_a_layer(found):
    """And one for the embedding; what finds the likeliest token is a number per row."""
    sums = count(found["collectives"]["tensor"], "all-reduce")
    assert sums == [("f32", [2, 1, MODEL.hidden_size])] * scaling.num_sums(MODEL)
    gathered = count(found["collectives"]["tensor"], "all-gather")
    assert all(np.prod(shape) <= 4 for _, shape in gathered), gathered


def test_many_prompts_through_the_batch_of_a_mesh(found):
    assert found["many"] == mesh_cases.many(tiny_params(0, MODEL))
    assert sorted(found["many"]) == [str(i) for i in range(7)]


def test_refusals(found):
    assert found["refused"] == [
        "prompt: got 2 rows, must be a multiple of 4, the devices of the mesh along 'data'",
        "mesh: got axes ('data', 'model'), allowed are 'data', 'lookahead', 'tensor'",
    ]


def test_what_is_no_mesh():
    with pytest.raises(ValueError, match="mesh: got 4, allowed is a jax.sharding.Mesh"):
        jl.shard({}, MODEL, 4)
    with pytest.raises(ValueError, match="publish: got 'send', allowed are broadcast, refeed"):
        jl.Config(publish="send")
