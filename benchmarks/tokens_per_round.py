"""Tokens per round of every source of drafts, by prompt category, and whether every text equals
the plain one.

    python -m benchmarks.tokens_per_round --model MODEL --suite suite.jsonl --out result.json

A suite is JSON lines with `id`, `category` and `turns` (user messages; the first is used) or
`ids` (a prompt as token ids), such as Spec-Bench's `question.jsonl`. Tokens per round do not
depend on the machine; no time is measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.progress import track

import jlookahead as jl
from benchmarks.report import by_category, versions
from jlookahead.cli.prompt_options import encode_prompt

STRATEGIES = (
    jl.PromptLookup(),
    jl.Lookahead(7, 5, 7, prompt_lookup=False),
    jl.Lookahead(7, 5, 7),
    jl.Recycling(56),
    jl.Recycling(32),
    jl.Recycling(16),
    jl.Jacobi(),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n    ")[0])
    parser.add_argument("--model", help="what jl.load takes; the bundled model by default")
    parser.add_argument("--suite", type=Path, nargs="+", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    lm = jl.load(args.model)
    suite = read_suites(args.suite)
    prompts = [prompt_of(lm, item) for item in suite]
    plain = [
        decode(lm, prompt, jl.Autoregressive(), args.max_new_tokens)
        for prompt in track(prompts, "plain decoding")
    ]
    report = {
        "what": "tokens per round, prefill not counted, greedy, float32",
        "model": args.model or "bundled",
        "max_new_tokens": args.max_new_tokens,
        "versions": versions(),
        "num_prompts": len(suite),
        "variants": [],
    }
    for strategy in STRATEGIES:
        rows = [
            compare(lm, item, prompt, decode(lm, prompt, strategy, args.max_new_tokens), expected)
            for item, prompt, expected in zip(
                suite, track(prompts, type(strategy).__name__), plain, strict=True
            )
        ]
        variant = {
            "strategy": type(strategy).__name__,
            "knobs": dataclasses.asdict(strategy),
            "num_rows": strategy.layout.num_rows,
            "num_identical": sum(row["identical"] for row in rows),
            "categories": summarise(rows),
            "prompts": rows,
        }
        report["variants"].append(variant)
        print(strategy, variant["categories"]["all"], flush=True)
        # A long run leaves what it has, should it be stopped.
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def read_suites(paths: list[Path]) -> list[dict]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def prompt_of(lm: jl.LoadedModel, item: dict) -> list[int]:
    prompt = item["ids"] if "ids" in item else item["turns"][0]
    return encode_prompt(prompt, lm, raw=False)


def decode(lm: jl.LoadedModel, prompt: list[int], strategy: jl.Strategy, budget: int) -> jl.Result:
    cfg = lm.make_config(strategy=strategy, max_new_tokens=budget)
    return jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)


def compare(
    lm: jl.LoadedModel, item: dict, prompt: list[int], got: jl.Result, plain: jl.Result
) -> dict[str, Any]:
    """A prompt's figures, and where and how narrowly its text differs from the plain one."""
    row = {
        "id": item["id"],
        "category": item["category"],
        "num_tokens": len(got.tokens),
        "num_rounds": got.num_rounds,
        "tokens_per_round": round(got.tokens_per_round, 4),
        "finish_reason": got.finish_reason,
        "identical": got.tokens == plain.tokens,
    }
    if not row["identical"]:
        pairs = enumerate(zip(got.tokens, plain.tokens, strict=False))
        row["first_difference"] = first = next(i for i, (a, b) in pairs if a != b)
        row["top2_gap"] = top2_gap(lm, prompt + plain.tokens[:first])
    return row


def top2_gap(lm: jl.LoadedModel, ids: list[int]) -> float:
    """Difference of the two highest logits after `ids`."""
    model, size = jl.LlamaModel(lm.config), len(ids)
    hidden, _ = model.forward(
        lm.params,
        jnp.array([ids]),
        jnp.arange(size)[None],
        jnp.tri(size, dtype=bool),
        model.init_cache(1, 0),
        jnp.zeros(1, jnp.int32),
    )
    second, first = np.sort(np.asarray(model.logits(lm.params, hidden[0, -1])))[-2:]
    return float(first - second)


def summarise(rows: list[dict]) -> dict:
    return {
        name: {
            "num_prompts": len(group),
            "mean": round(float(np.mean([r["tokens_per_round"] for r in group])), 3),
            "pooled": round(
                sum(r["num_tokens"] for r in group) / sum(r["num_rounds"] for r in group), 3
            ),
        }
        for name, group in by_category(rows).items()
    }


if __name__ == "__main__":
    main()
