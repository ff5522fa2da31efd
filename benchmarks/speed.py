"""Speed against plain decoding, side by side: every strategy on every prompt, alternating.

    python -m benchmarks.speed --model MODEL --suite suite.jsonl --out result.json

Figures are medians over turns of (seconds of plain decoding) / (seconds of the strategy), each a
whole generation on compiled programs, prefill included; `decoding` is the ratio of the median
seconds without prefill, which is the median of calls that emit nothing. Absolute times are not
reported: they are the machine's. One more prompt, of random ids, is continued at temperature 3:
hardly a draft is right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import jlookahead as jl
from benchmarks.report import summarise_speed, versions
from benchmarks.tokens_per_round import prompt_of, read_suites
from jlookahead.measuring import BASELINE, compare_speed

NOISE = "noise"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="what jl.load takes; the bundled model by default")
    parser.add_argument("--suite", type=Path, nargs="+", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    lm = jl.load(args.model)
    strategies = {
        "auto": jl.tune(lm.params, lm.config),
        "prompt lookup": jl.PromptLookup(),
    }
    ids = np.random.default_rng(0).permutation(lm.config.vocab_size)[:200].tolist()
    items = [*read_suites(args.suite), {"id": "random-ids", "category": NOISE, "ids": ids}]
    rows = []
    for item in items:
        compared = compare_speed(
            lm,
            prompt_of(lm, item),
            strategies,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
            temperature=3.0 if item["category"] == NOISE else 0.0,
        )
        assert all(compared.identical.values()), item["id"]
        prefill = compare_speed(lm, prompt_of(lm, item), {}, max_new_tokens=0, repeats=args.repeats)
        after_prefill = {
            name: seconds - prefill.seconds[BASELINE] for name, seconds in compared.seconds.items()
        }
        speed = {name: round(ratio, 3) for name, ratio in compared.speedups.items()}
        decoding = {
            name: round(after_prefill[BASELINE] / after_prefill[name], 3) for name in strategies
        }
        about = {"id": item["id"], "category": item["category"]}
        rows.append(about | {"speed": speed, "decoding": decoding})
        print(rows[-1], flush=True)
        report = {
            "what": "median over turns of (seconds of plain decoding) / (the strategy's)",
            "model": args.model or "bundled",
            "max_new_tokens": args.max_new_tokens,
            "versions": versions(),
            "strategies": {name: repr(strategy) for name, strategy in strategies.items()},
            "categories": summarise_speed(rows),
            "categories_decoding": summarise_speed(rows, "decoding"),
            "prompts": rows,
        }
        # A long run leaves what it has, should it be stopped.
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(report["categories"])
    print(report["categories_decoding"])


if __name__ == "__main__":
    main()
