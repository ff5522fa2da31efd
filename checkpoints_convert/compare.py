"""`python -m checkpoints_convert compare A B`: the logits of two checkpoints on the same tokens."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from checkpoints_convert import output
from jlookahead.checkpoints import hf_directory, loading
from jlookahead.checkpoints.errors import first_line
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.tokenizer import import_transformers
from jlookahead.checks import check_int, check_number
from jlookahead.model import LlamaModel, Params
from jlookahead.model_config import ModelConfig

# How a network is stored, computed or bounded: its logits in exact arithmetic are the same.
_NOT_COMPARED = {
    "dtype",
    "quantization",
    "tie_word_embeddings",
    "max_position_embeddings",
    "num_padding_ids",
}


@dataclasses.dataclass(frozen=True)
class Position:
    """The logits of two checkpoints behind one token.

    Attributes:
        token_id: the token that was read.
        difference: the largest absolute difference of two logits.
        top_a, top_b: the token with the largest logit.
    """

    token_id: int
    difference: float
    top_a: int
    top_b: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two checkpoints on the same tokens.

    Attributes:
        positions: one per token.
        largest_logit: the largest absolute value in the logits of the first checkpoint.
        tolerance: up to which differences are accepted.
    """

    positions: list[Position]
    largest_logit: float
    tolerance: float

    @property
    def max_difference(self) -> float:
        differences = [position.difference for position in self.positions]
        return math.nan if any(map(math.isnan, differences)) else max(differences)

    @property
    def median_difference(self) -> float:
        return statistics.median(position.difference for position in self.positions)

    @property
    def other_tops(self) -> list[int]:
        """Where the top tokens differ."""
        return [i for i, p in enumerate(self.positions) if p.top_a != p.top_b]

    @property
    def is_within_tolerance(self) -> bool:
        return self.max_difference <= self.tolerance  # which NaN is not


def compare(
    a: str, b: str | None, *, num_tokens: int, text: str | None, tolerance: float
) -> Comparison:
    """Runs both checkpoints in float32 on the same tokens, one after the other.

    Args:
        a: a path or hub id.
        b: another one, or None for `a` run by PyTorch.
        num_tokens: at most so many, and no more than the contexts hold.
        text: what to read, in the tokens of `a`; None for random tokens, always the same.
        tolerance: see `Comparison`.

    Raises:
        ValueError: a checkpoint or the text cannot be used, or the networks differ in a field.
        FileNotFoundError: no such checkpoint, or a file of it is missing.
    """
    check_int("tokens", num_tokens, 1)
    check_number("tolerance", tolerance, "0 to 1e6", 0, 1e6)
    folder = None if b is not None else _require_pytorch_can_read(a)
    model = _load(a)
    config = model.config
    tokens = _tokens(model, text, min(num_tokens, config.max_position_embeddings), a)
    logits_a = _logits(LlamaModel(config), model.params, tokens)
    del model  # two models in float32 need not fit into memory
    num_ids = config.vocab_size - config.num_padding_ids
    if folder is not None:
        logits_b = _pytorch_logits(folder, tokens)
    else:
        assert b is not None
        other = _load(b)
        _require_same_network(config, other.config, a, b)
        tokens = tokens[: other.config.max_position_embeddings]
        logits_b = _logits(LlamaModel(other.config), other.params, tokens)
        num_ids = min(num_ids, other.config.vocab_size - other.config.num_padding_ids)
    return _compared(tokens, logits_a[: len(tokens), :num_ids], logits_b[:, :num_ids], tolerance)


def _load(source: str) -> LoadedModel:
    progress = output.progress(f"Reading {source}")
    return loading.load_with_progress(source, dtype="float32", progress=progress)


def _tokens(model: LoadedModel, text: str | None, limit: int, source: str) -> np.ndarray:
    num_ids = model.config.vocab_size - model.config.num_padding_ids
    if text is None:
        return np.random.default_rng(0).integers(0, num_ids, limit, dtype=np.int32)
    if model.tokenizer is None:
        raise ValueError(f"text: {source} has no tokenizer")
    ids = model.tokenizer.encode(text)[:limit]
    if not ids:
        raise ValueError("text: holds no token")
    if max(ids) >= num_ids:
        raise ValueError(f"text: holds token {max(ids)}, {source} has only {num_ids}")
    return np.asarray(ids, np.int32)


def _require_same_network(first: ModelConfig, second: ModelConfig, a: str, b: str) -> None:
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(first, field.name), getattr(second, field.name)
        if field.name not in _NOT_COMPARED and ours != theirs:
            raise ValueError(f"{field.name}: {a} has {ours!r}, {b} has {theirs!r}")


@functools.partial(jax.jit, static_argnums=0)
def _run(network: LlamaModel, params: Params, tokens: jax.Array) -> jax.Array:
    hidden, _ = network.forward(
        params,
        tokens,
        jnp.arange(tokens.shape[1])[None],
        jnp.tri(tokens.shape[1], dtype=bool),
        network.init_cache(1, 0),
        jnp.zeros(1, jnp.int32),
    )
    return network.logits(params, hidden)


def _logits(network: LlamaModel, params: Params, tokens: np.ndarray) -> np.ndarray:
    """`[T] -> [T, V]`, by one pass without a cache."""
    return np.asarray(_run(network, params, tokens[None]))[0]


def _require_pytorch_can_read(source: str) -> Path:
    """The directory to give to transformers."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ValueError("--pytorch: needs PyTorch: pip install torch") from error
    path = loading.locate(source)
    if not (path / hf_directory.CONFIG).is_file():
        raise ValueError(f"--pytorch: got {source}, must be a Hugging Face directory")
    return path


def _pytorch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """`[T] -> [T, V]` of transformers."""
    import torch

    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        with torch.no_grad():
            return model.eval()(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    except Exception as error:  # whatever two libraries raise
        raise ValueError(f"{folder}: PyTorch failed: {first_line(error)}") from error


def _compared(
    tokens: np.ndarray, logits_a: np.ndarray, logits_b: np.ndarray, tolerance: float
) -> Comparison:
    differences = np.abs(logits_a - logits_b).max(axis=-1)
    columns = tokens, differences, logits_a.argmax(axis=-1), logits_b.argmax(axis=-1)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    largest = float(np.abs(logits_a).max())
    return Comparison([Position(*row) for row in rows], largest, tolerance)


def _as_json(comparison: Comparison, a: str, b: str) -> str:
    fields = {
        "a": a,
        "b": b,
        "num_tokens": len(comparison.positions),
        "tolerance": comparison.tolerance,
        "within_tolerance": comparison.is_within_tolerance,
        "max_difference": _finite(comparison.max_difference),
        "median_difference": _finite(comparison.median_difference),
        "largest_logit": _finite(comparison.largest_logit),
        "other_tops": comparison.other_tops,
        "positions": [
            dataclasses.asdict(position) | {"difference": _finite(position.difference)}
            for position in comparison.positions
        ],
    }
    return json.dumps(fields)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def _print(comparison: Comparison) -> None:
    table = Table(box=box.SIMPLE)
    for title in ("position", "token", "difference", "top of A", "top of B"):
        table.add_column(title, justify="right")
    for i, position in enumerate(comparison.positions):
        tops = position.top_a, position.top_b
        same = tops[0] == tops[1]
        table.add_row(
            str(i),
            str(position.token_id),
            f"{position.difference:.2e}",
            str(tops[0]),
            "same" if same else str(tops[1]),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(_verdict(comparison), soft_wrap=True)


def _verdict(comparison: Comparison) -> str:
    verdict = "within" if comparison.is_within_tolerance else "NOT within"
    count = len(comparison.positions)
    return (
        f"{verdict} {comparison.tolerance:g}: largest difference {comparison.max_difference:.2e}, "
        f"median over positions {comparison.median_difference:.2e}; the same top token at "
        f"{count - len(comparison.other_tops)} of {count} positions; "
        f"largest logit {comparison.largest_logit:.1f}"
    )


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of argparse."""
    parser = commands.add_parser(
        "compare",
        help="the logits of two checkpoints on the same tokens",
        description="Exit status 0 if all logits agree within the tolerance, 1 if not, 2 for "
        "errors.",
    )
    parser.add_argument("a", metavar="A", help="directory, .gguf file or hub id")
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("b", metavar="B", nargs="?", help="another one of the same sizes")
    other.add_argument("--pytorch", action="store_true", help="A itself, run by PyTorch")
    parser.add_argument("--tokens", type=int, default=64, help="at most; default 64")
    parser.add_argument("--text", metavar="FILE", type=Path, help="UTF-8; else random tokens")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="absolute, of logits; default 1e-4"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run_command)


def _run_command(options: argparse.Namespace) -> int:
    text = None if options.text is None else _read_text(options.text)
    comparison = compare(
        options.a,
        options.b,
        num_tokens=options.tokens,
        text=text,
        tolerance=options.tolerance,
    )
    if options.json:
        print(_as_json(comparison, options.a, options.b or "PyTorch"))
    else:
        _print(comparison)
    return 0 if comparison.is_within_tolerance else 1


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error.reason}") from error
