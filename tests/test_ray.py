"""A batch job on a local Ray cluster, one of whose two workers is killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import checkpoints as files
import pytest

import jlookahead as jl

BUDGET, NUM_PROMPTS = 10, 12
CANNOT_START = 77

# A process of its own, since Ray forks what it starts. The functions of a script reach the workers
# by value: each sets the trap when it loads the model, and one falls into it.
SCRIPT = f"""
import os, signal, sys
from pathlib import Path

import ray

import jlookahead
from jlookahead import ray_batch
from jlookahead.cli import app

marks, load, init = Path(sys.argv[1]), jlookahead.load, ray.init

def init_small():
    try:
        init(num_cpus=2, include_dashboard=False)
    except Exception as error:
        print(f"Ray does not start: {{error}}", file=sys.stderr)
        sys.exit({CANNOT_START})

def load_with_trap(path, *, dtype):
    from jlookahead import ray_batch
    generate_many = ray_batch.generate_many

    def trap(*args, **kwargs):
        for number, pair in enumerate(generate_many(*args, **kwargs), start=1):
            with open(marks / str(os.getpid()), "a") as file:
                file.write(".")
            if number == 2:
                try:
                    (marks / "killed").symlink_to(str(os.getpid()))
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    ray_batch.generate_many = trap
    return load(path, dtype=dtype)

jlookahead.load, ray.init = load_with_trap, init_small
app(sys.argv[2:])
"""


def test_a_killed_worker_loses_and_doubles_nothing(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    config = files.hf_config(vocab_size=300)
    model = files.write_hf(tmp_path / "model", config, files.random_tensors(config))
    prompts = [[5 + i, 6, 7] * (1 + i % 3) for i in range(NUM_PROMPTS)]
    lines = [json.dumps({"prompt_ids": prompt}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    marks, out = tmp_path / "marks", tmp_path / "out"
    marks.mkdir()
    command = [
        *(sys.executable, "-c", SCRIPT, str(marks), "batch", "--ray", "--workers", "2", "--json"),
        *("--model", str(model), "--input", str(tmp_path / "prompts.jsonl"), "--output", str(out)),
        *("--strategy", "prompt-lookup", "--max-new-tokens", str(BUDGET), "--batch-size", "1"),
        *("--temperature", "0.8", "--seed", "4"),
    ]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if job.returncode == CANNOT_START:
        pytest.skip(job.stderr.splitlines()[-1])
    assert job.returncode == 0, job.stderr[-3000:]
    assert json.loads(job.stdout)["num_prompts"] == NUM_PROMPTS

    answered = {mark.name: len(mark.read_text()) for mark in marks.iterdir()}
    assert answered.pop("killed") == answered.pop((marks / "killed").readlink().name) == 2
    assert sum(answered.values()) == NUM_PROMPTS, "only what was lost is computed again"
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    lm = jl.load(model)
    cfg = lm.make_config(
        strategy=jl.PromptLookup(), sampling=jl.Sampling(0.8, seed=4), max_new_tokens=BUDGET
    )
    assert len(results) == NUM_PROMPTS
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        alone = jl.generate(lm.params, prompt, cfg, row_ids=[i])
        assert result == {
            "id": i + 1,
            "text": None,
            "token_ids": alone.tokens,
            "num_rounds": alone.num_rounds,
            "tokens_per_round": alone.tokens_per_round,
            "finish_reason": alone.finish_reason,
        }
