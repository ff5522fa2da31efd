"""How long a first call takes, without and with a persistent compilation cache, and the workspace
of the decoding loop beside weights and state.

    python -m benchmarks.startup --model MODEL --out result.json

Two processes share a cache directory that is empty at first. The workspace is what the compiled
program asks for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

import jlookahead as jl
from benchmarks.report import versions
from jlookahead.call import prepare
from jlookahead.decoding import NO_ROUND_LIMIT, run_rounds, start

PROMPT, BUDGET = list(range(100, 300)), 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="what jl.load takes; the bundled model by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help="measure in this process, with this cache directory")
    args = parser.parse_args()
    if args.one:
        print(json.dumps({str(s): measure(args.model, s, args.one) for s in strategies()}))
        return
    command = [sys.executable, "-m", "benchmarks.startup", "--out", str(args.out), "--one"]
    model = ["--model", args.model] if args.model else []
    with tempfile.TemporaryDirectory() as cache:
        runs = [
            json.loads(subprocess.check_output([*command, cache, *model], text=True))
            for _ in range(2)
        ]
    report = {
        "what": "seconds of a first call beyond a warm one; bytes of the loop beside its inputs",
        "model": args.model or "bundled",
        "versions": versions(),
        "first_process": runs[0],
        "second_process": runs[1],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def strategies() -> tuple[jl.Strategy, ...]:
    return jl.Autoregressive(), jl.Auto(), jl.Lookahead(7, 5, 7)


def measure(source: str | None, strategy: jl.Strategy, cache_dir: str) -> dict[str, float]:
    """Figures of one strategy in this process."""
    jax.config.update("jax_compilation_cache_dir", cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    lm = jl.load(source)
    cfg = lm.make_config(strategy=strategy, max_new_tokens=BUDGET)

    def seconds() -> float:
        began = time.perf_counter()
        jl.generate(lm.params, PROMPT, cfg)
        return time.perf_counter() - began

    first, warm = seconds(), min(seconds() for _ in range(3))
    call = prepare(lm.params, PROMPT, cfg)
    state = start(call, lm.params)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((lm.params, state)))
    loop = run_rounds.lower(call.model, strategy, None, lm.params, state, NO_ROUND_LIMIT).compile()
    workspace = loop.memory_analysis().temp_size_in_bytes
    return {
        "compile_seconds": round(first - warm, 2),
        "weights_and_state_bytes": held,
        "workspace_bytes": workspace,
        "workspace_share": round(workspace / held, 4),
    }


if __name__ == "__main__":
    main()
