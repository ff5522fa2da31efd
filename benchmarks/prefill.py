"""Reading a prompt, beside Hugging Face's PyTorch: time until the first token, by prompt length.

    python -m benchmarks.prefill --model model.gguf --work DIRECTORY --out result.json

Both run in this process in turn, in float32 on two threads (run it on two cores); `--work` is where
the weights are put for PyTorch. Figures are medians over turns of (seconds of this project) /
(seconds of transformers).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

import jlookahead as jl
from benchmarks.peer_worker import transformers
from benchmarks.peers import Own, write_float32
from benchmarks.report import versions

LENGTHS, REPEATS = (64, 128, 256, 512, 1024, 2048), 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lm = jl.load(args.model)
    write_float32(lm, args.model, args.work)
    own, peer = Own(lm, jl.Autoregressive()), transformers(args.work)
    rng, rows = np.random.default_rng(0), []
    for length in LENGTHS:
        ids = rng.integers(0, lm.config.vocab_size, length).tolist()
        same = own.decode(ids, 1)[0] == peer(ids, 1)
        ratios = []
        for _ in range(REPEATS):
            _, seconds = own.decode(ids, 1)
            began = time.perf_counter()
            peer(ids, 1)
            ratios.append(seconds / (time.perf_counter() - began))
        rows.append({"length": length, "ratio": round(statistics.median(ratios), 3), "same": same})
        print(rows[-1], flush=True)
    report = {
        "what": "median over turns of (seconds to the first token) / (transformers' seconds)",
        "model": args.model.name,
        "versions": versions(),
        "lengths": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
