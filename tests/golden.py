"""Recorded runs of the official implementation (see tests/data/golden/README.md)."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import jlookahead as jl

GOLDEN = Path(__file__).parent / "data" / "golden"


def read(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def recordings(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((GOLDEN / folder).glob("*.json.gz"))]


def strategy_of(run: dict) -> jl.Lookahead:
    config = run["config"]
    return jl.Lookahead(
        window=config["WINDOW_SIZE"],
        ngram=config["LEVEL"],
        candidates=config["GUESS_SET_SIZE"],
        prompt_pool=bool(config["POOL_FROM_PROMPT"]),
        reference=True,
    )


def config_of(run: dict, model: jl.ModelConfig | None) -> jl.Config:
    eos = run["eos_token_id"]
    return jl.Config(
        model=model,
        strategy=strategy_of(run),
        max_new_tokens=run["new_tokens"],
        eos_token_ids=() if eos is None else (eos,),
    )


def pool_digest(pool: dict[int, list[list[int]]]) -> str:
    text = json.dumps(
        sorted([key, suffixes] for key, suffixes in pool.items()), separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
