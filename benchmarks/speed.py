"""Speed against plain decoding, side by side: every strategy on every prompt, alternating.

    python -m benchmarks.speed --model MODEL --suite suite.jsonl --out result.json

The figure is the median over repeats of (seconds of plain decoding) / (seconds of the strategy),
each a whole generation on compiled programs, prefill included. Absolute times are not reported:
they are the machine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jlookahead as jl
from benchmarks.report import versions
from benchmarks.tokens_per_round import decode, prompt_of, read_suites


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
    rows = []
    for item in read_suites(args.suite):
        prompt = prompt_of(lm, item)
        plain = jl.Autoregressive()
        expected = decode(lm, prompt, plain, args.max_new_tokens).tokens
        for strategy in strategies.values():
            assert decode(lm, prompt, strategy, args.max_new_tokens).tokens == expected
        ratios: dict[str, list[float]] = {name: [] for name in strategies}
        for _ in range(args.repeats):
            baseline = seconds(lm, prompt, plain, args.max_new_tokens)
            for name, strategy in strategies.items():
                taken = seconds(lm, prompt, strategy, args.max_new_tokens)
                ratios[name].append(baseline / taken)
        row = {"id": item["id"], "category": item["category"]}
        rows.append(row | {name: round(statistics.median(r), 3) for name, r in ratios.items()})
        print(rows[-1], flush=True)
    report = {
        "what": "median over repeats of plain decoding's seconds / the strategy's, greedy, float32",
        "model": args.model or "bundled",
        "max_new_tokens": args.max_new_tokens,
        "versions": versions(),
        "strategies": {name: repr(strategy) for name, strategy in strategies.items()},
        "summary": {name: summarise([row[name] for row in rows]) for name in strategies},
        "prompts": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(report["summary"])


def seconds(lm: jl.LoadedModel, prompt: object, strategy: jl.Strategy, budget: int) -> float:
    began = time.perf_counter()
    decode(lm, prompt, strategy, budget)
    return time.perf_counter() - began


def summarise(ratios: list[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.mean(ratios), 3),
        "median": round(statistics.median(ratios), 3),
        "least": min(ratios),
    }


if __name__ == "__main__":
    main()
