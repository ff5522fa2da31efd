"""How long a first call takes, without and with a persistent compilation cache, and what memory a
generation takes.

    python -m benchmarks.startup --model MODEL --out result.json

Two processes share a cache directory that is empty at first. Linux only: memory is read from
`/proc`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

import jlookahead as jl
from benchmarks.report import versions
from jlookahead.call import prepare
from jlookahead.decoding import start

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
        "what": "seconds beyond a warm call, of a first call; bytes beyond those before a call",
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
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest mark
    seconds()
    call = prepare(lm.params, PROMPT, cfg)
    state = jax.eval_shape(lambda: start(call, lm.params))
    cache = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    extra = memory("VmHWM") - before
    return {
        "compile_seconds": round(first - warm, 2),
        "weights_bytes": weights,
        "cache_bytes": cache,
        "extra_bytes": extra,
        "extra_share": round(max(0, extra - cache) / (weights + cache), 4),
    }


def memory(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
