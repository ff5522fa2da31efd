"""`python -m checkpoints_convert from-hf SRC DST`: a checkpoint in the project's own format."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from checkpoints_convert import output
from jlookahead.checkpoints import converted, loading
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import flat, match_tensors, read_params
from jlookahead.checkpoints.stored import StoredModel
from jlookahead.model_config import DTYPES
from jlookahead.quantization import QUANTIZATIONS

T = TypeVar("T")


def convert(source: str, destination: Path, dtype: str, quantize: str | None = None) -> None:
    """Writes a checkpoint that `jlookahead.load` takes as an Orbax checkpoint.

    Memory holds one module at a time, unless the source is such a checkpoint itself. The directory
    appears complete or not at all: it is written beside `destination` and renamed. What a killed
    conversion has written is used by the next one of the same source.

    Args:
        source: a path or hub id.
        destination: a directory that does not exist yet.
        dtype: what to store the parameters in.
        quantize: see `jlookahead.load`.

    Raises:
        ValueError: the destination exists, or the checkpoint cannot be used.
        OSError: no such checkpoint, a file of it is missing, or the output cannot be written.
    """
    output.require_new(destination)
    path, progress = loading.locate(source), output.progress("Converting tensors")
    made_of = {"source": loading.fingerprint(path), "dtype": dtype, "quantize": quantize}
    model: LoadedModel | StoredModel
    if loading.is_converted(path):
        model = loading.load_with_progress(path, dtype=dtype, quantize=quantize, progress=progress)
    else:
        model = loading.open_checkpoint(path, dtype=dtype, quantize=quantize)
        matched = match_tensors(model)
    with output.created_whole(destination, made_of) as folder:
        done = converted.written_modules(folder)
        leaves: Iterable[tuple[str, jax.Array]]
        if isinstance(model, LoadedModel):
            leaves = _missing(flat(model.params), done).items()
        else:
            leaves = read_params(_missing(matched, done), model.config, progress, mesh=None)
        converted.write_params(leaves, folder)
        converted.write_manifest(model.config, model.tokenizer, model.defaults, folder)


def _missing(leaves: Mapping[str, T], done: set[str]) -> dict[str, T]:
    return {name: leaf for name, leaf in leaves.items() if converted.module_of(name) not in done}


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of argparse."""
    parser = commands.add_parser("from-hf", help="to an Orbax checkpoint for jlookahead.load")
    parser.add_argument("source", metavar="SRC", help="directory, .gguf file or hub id")
    parser.add_argument("destination", metavar="DST", type=Path, help="directory to create")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--quantize", choices=QUANTIZATIONS, help="kernels of the linear layers in bytes"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    convert(options.source, options.destination, options.dtype, options.quantize)
    return 0
