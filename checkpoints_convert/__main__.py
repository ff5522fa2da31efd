"""`python -m checkpoints_convert from-hf SRC DST`: a checkpoint in the project's own format.

Exit status 2, with one line on stderr, for anything wrong with the arguments or the checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from jlookahead.checkpoints import converted, loading
from jlookahead.model_config import DTYPES


def convert(source: str, destination: Path, dtype: str) -> None:
    """Loads `source` as `jlookahead.load` does and writes it as an Orbax checkpoint.

    The directory appears complete or not at all: it is written beside `destination` and renamed.

    Args:
        source: a path or hub id.
        destination: a directory that does not exist yet.
        dtype: what to store the parameters in.

    Raises:
        ValueError: the destination exists, or the checkpoint cannot be used.
        FileNotFoundError: no such checkpoint, or a file of it is missing.
    """
    if destination.exists():
        raise ValueError(f"{destination}: exists already")
    progress = functools.partial(
        track, description="Reading tensors", console=Console(stderr=True), transient=True
    )
    model = loading.load_with_progress(source, dtype=dtype, progress=progress)
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        converted.write_converted(model, partial)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="checkpoints_convert", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    from_hf = commands.add_parser("from-hf", help="to an Orbax checkpoint for jlookahead.load")
    from_hf.add_argument("source", metavar="SRC", help="directory, .gguf file or hub id")
    from_hf.add_argument("destination", metavar="DST", type=Path, help="directory to create")
    from_hf.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.destination, options.dtype)
    except (OSError, ValueError) as error:
        print(f"checkpoints_convert: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("checkpoints_convert: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
