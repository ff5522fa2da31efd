"""Tokens per round of every source of drafts, by rows and prompt category.

    python -m benchmarks.draft_sources --model MODEL --suite suite.jsonl --out result.json

Suites are those of `benchmarks.tokens_per_round`. Every text is compared with the plain one. No
time is measured: tokens per round do not depend on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import jlookahead as jl
from benchmarks.report import versions
from benchmarks.tokens_per_round import measure, read_suites, summarise

STRATEGIES = (
    jl.Jacobi(),
    jl.PromptLookup(),
    jl.Lookahead(7, 5, 7, prompt_lookup=False),
    jl.Lookahead(7, 5, 7),
    jl.Recycling(16),
    jl.Recycling(32),
    jl.Recycling(56),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="what jl.load takes; the bundled model by default")
    parser.add_argument("--suite", type=Path, nargs="+", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    lm = jl.load(args.model)
    suite = read_suites(args.suite)
    variants = []
    for strategy in STRATEGIES:
        cfg = lm.make_config(strategy=strategy, max_new_tokens=args.max_new_tokens)
        rows = [measure(lm, item, cfg) for item in suite]
        variants.append(
            {
                "strategy": type(strategy).__name__,
                "knobs": dataclasses.asdict(strategy),
                "num_rows": strategy.layout.num_rows,
                "num_identical": sum(row["identical"] for row in rows),
                "categories": summarise(rows),
                "prompts": {row["id"]: row["tokens_per_round"] for row in rows},
            }
        )
        print(strategy, variants[-1]["categories"]["all"], flush=True)
    report = {
        "what": "tokens per round, prefill not counted, greedy, float32",
        "model": args.model or "bundled",
        "max_new_tokens": args.max_new_tokens,
        "versions": versions(),
        "num_prompts": len(suite),
        "variants": variants,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
