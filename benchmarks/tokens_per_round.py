"""Tokens per round of lookahead per prompt category, and whether every text equals the plain one.

    python -m benchmarks.tokens_per_round --model MODEL --suite suite.jsonl --out result.json

A suite is JSON lines with `id`, `category` and `turns` (user messages; the first is used) or
`ids` (a prompt as token ids), such as Spec-Bench's `question.jsonl`. Tokens per round do not
depend on the machine; no time is measured here.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import platform
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.progress import track

import jlookahead as jl
from benchmarks.report import versions
from jlookahead.prompts import to_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="what jl.load takes; the bundled model by default")
    parser.add_argument("--suite", type=Path, nargs="+", required=True)
    parser.add_argument("--window", type=int, default=7)
    parser.add_argument("--ngram", type=int, default=5)
    parser.add_argument("--candidates", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    lm = jl.load(args.model)
    strategy = jl.Lookahead(args.window, args.ngram, args.candidates)
    cfg = lm.make_config(strategy=strategy, max_new_tokens=args.max_new_tokens)
    suite = read_suites(args.suite)
    rows = [measure(lm, item, cfg) for item in track(suite, "decoding")]
    report = {
        "what": "tokens per round, prefill not counted, greedy, float32",
        "model": args.model or "bundled",
        "strategy": dataclasses.asdict(strategy),
        "max_new_tokens": args.max_new_tokens,
        "versions": versions(),
        "machine": platform.machine(),
        "num_prompts": len(rows),
        "num_identical": sum(row["identical"] for row in rows),
        "categories": summarise(rows),
        "prompts": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"categories": report["categories"], "identical": report["num_identical"]}))


def read_suites(paths: list[Path]) -> list[dict]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def measure(lm: jl.LoadedModel, item: dict, cfg: jl.Config) -> dict:
    """Decodes one prompt both ways."""
    has_template = bool(getattr(lm.tokenizer, "chat_template", None))
    text = item["turns"][0] if "turns" in item else None
    chat = [{"role": "user", "content": text}] if has_template else text
    prompt = item.get("ids") or chat
    plain_cfg = dataclasses.replace(cfg, strategy=jl.Autoregressive())
    plain = jl.generate(lm.params, prompt, plain_cfg, tokenizer=lm.tokenizer)
    got = jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)
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
        ids = to_rows(prompt, lm.tokenizer, lm.config.vocab_size)[0][0].tolist()
        row["top2_gap"] = top2_gap(lm, ids + plain.tokens[:first])
    return row


def top2_gap(lm: jl.LoadedModel, ids: list[int]) -> float:
    """Difference of the two highest logits after `ids`."""
    model, size = jl.LlamaModel(lm.config), len(ids)
    hidden, _ = model.forward(
        lm.params,
        jnp.array([ids]),
        jnp.arange(size)[None],
        jnp.tri(size, dtype=bool),
        model.init_cache(1, 1),
        jnp.zeros(1, jnp.int32),
    )
    second, first = np.sort(np.asarray(model.logits(lm.params, hidden[0, -1])))[-2:]
    return float(first - second)


def summarise(rows: list[dict]) -> dict:
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["category"]].append(row)
        groups["all"].append(row)
    return {
        name: {
            "num_prompts": len(group),
            "mean": round(float(np.mean([r["tokens_per_round"] for r in group])), 3),
            "pooled": round(
                sum(r["num_tokens"] for r in group) / sum(r["num_rounds"] for r in group), 3
            ),
        }
        for name, group in groups.items()
    }


if __name__ == "__main__":
    main()
