"""Tokens per second beside other projects' decoders, on the same prompts and weights.

    python -m benchmarks.peers --model model.gguf --work DIRECTORY --suite suite.jsonl \
        --peer "llama.cpp=/env/bin/python" --peer "transformers=/env/bin/python" --out result.json

Every peer is a process of its own, started by the Python of its own virtual environment with
`peer_worker.py`, which says what it runs. All systems take turns on every prompt. Figures are
medians over turns of (seconds of this project's plain decoding) / (seconds of the system), prompt
included; absolute times are the machine's and are not reported. Peers take two threads: run
all of it on two cores, since JAX takes those there are.

Peers and what their environments need: `transformers`, `transformers prompt lookup` (transformers,
torch), `lade` (lade, transformers==4.34.0, torch), `tunix` (google-tunix, jax), `llama.cpp`,
`llama.cpp prompt lookup` (llama-cpp-python).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

import jlookahead as jl
from benchmarks.report import summarise_speed, versions
from benchmarks.tokens_per_round import prompt_of, read_suites
from jlookahead.checkpoints.params import hf_tensors

WORKER = Path(__file__).with_name("peer_worker.py")
PLAIN, AUTO = "jlookahead plain", "jlookahead auto"


class Peer:
    """Another project's decoder in a process of its own."""

    def __init__(self, system: str, python: str, folder: Path):
        self._process = subprocess.Popen(
            [python, str(WORKER), system, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{system}.log").open("w"),
            text=True,
        )

    def decode(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = json.dumps({"ids": ids, "max_new_tokens": max_new_tokens})
        print(request, file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["tokens"], answer["seconds"]


class Own:
    """This project's decoder with a strategy."""

    def __init__(self, lm: jl.LoadedModel, strategy: jl.Strategy):
        self._lm, self._strategy = lm, strategy

    def decode(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        cfg = jl.Config(
            model=self._lm.config, strategy=self._strategy, max_new_tokens=max_new_tokens
        )
        began = time.perf_counter()
        tokens = jl.generate(self._lm.params, ids, cfg).tokens
        return tokens, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--work", type=Path, required=True, help="for float32 files of the model")
    parser.add_argument("--suite", type=Path, nargs="+", required=True)
    parser.add_argument("--per-category", type=int, default=2, help="prompts; the first ones")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peer", action="append", default=[], help="NAME=PYTHON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    lm = jl.load(args.model)
    write_float32(lm, args.model, args.work)
    systems: dict[str, Own | Peer] = {
        PLAIN: Own(lm, jl.Autoregressive()),
        AUTO: Own(lm, jl.tune(lm.params, lm.config)),
    }
    for peer in args.peer:
        name, python = peer.split("=", 1)
        systems[name] = Peer(name, python, args.work)
    rows = []
    for item in first_of_each_category(read_suites(args.suite), args.per_category):
        ids = prompt_of(lm, item)
        row = {"id": item["id"], "category": item["category"], "prompt_tokens": len(ids)}
        rows.append(row | compare(systems, ids, args.max_new_tokens, args.repeats))
        print(rows[-1], flush=True)
        report = {
            "what": "median over turns of (seconds of jlookahead plain) / (seconds of the system)",
            "model": args.model.name,
            "max_new_tokens": args.max_new_tokens,
            "versions": versions(),
            "categories": summarise_speed(rows),
            "prompts": rows,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def write_float32(lm: jl.LoadedModel, gguf: Path, folder: Path) -> None:
    """The model as a Hugging Face directory, with a link to the GGUF file for llama.cpp."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_tensors(lm.params), folder / "model.safetensors", metadata={"format": "pt"})
    fields = dataclasses.asdict(lm.config)
    rope = fields.pop("rope")
    assert rope["type"] == "default", "the other types have fields of their own"
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(kind | fields | {"rope_theta": rope["theta"]}))
    link = folder / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(gguf.resolve())


def first_of_each_category(items: list[dict], count: int) -> list[dict]:
    taken: collections.Counter[str] = collections.Counter()
    chosen = []
    for item in items:
        taken[item["category"]] += 1
        if taken[item["category"]] <= count:
            chosen.append(item)
    return chosen


def compare(
    systems: dict[str, Own | Peer], ids: list[int], budget: int, repeats: int
) -> dict[str, Any]:
    """Speed of every system on one prompt, and where its text leaves plain decoding's."""
    expected, _ = systems[PLAIN].decode(ids, budget)
    first_difference = {}
    for name, system in systems.items():  # warms up
        tokens, _ = system.decode(ids, budget)
        pairs = enumerate(itertools.zip_longest(tokens, expected))
        first_difference[name] = next((i for i, (a, b) in pairs if a != b), None)
    turns = [
        {name: system.decode(ids, budget)[1] for name, system in systems.items()}
        for _ in range(repeats)
    ]
    speed = {
        name: round(statistics.median(turn[PLAIN] / turn[name] for turn in turns), 3)
        for name in systems
    }
    return {"speed": speed, "first_difference": first_difference}


if __name__ == "__main__":
    main()
