"""What the commands share: directories that appear whole or not at all, and progress."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from jlookahead.checkpoints.json_file import read_json
from jlookahead.checkpoints.params import Progress

# Names what the unfinished directory is made of.
_LABEL = "conversion.json"


def require_new(destination: Path) -> None:
    """Raises `ValueError` if there is such a file or directory."""
    if destination.exists():
        raise ValueError(f"{destination}: exists already")


@contextlib.contextmanager
def created_whole(destination: Path) -> Iterator[Path]:
    """A new directory beside `destination` that takes its name once the block is done."""
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def resumable(destination: Path, made_of: Mapping[str, Any]) -> Iterator[Path]:
    """As `created_whole`, but what an interrupted block of the same `made_of` wrote is kept.

    A `ValueError` says that the source cannot be used: nothing is kept then.

    Raises:
        OSError: of the block, with the name of the directory that is kept.
    """
    partial = destination.with_name(f".{destination.name}.partial")
    label = partial / _LABEL
    if partial.exists() and not (label.is_file() and read_json(label) == made_of):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    label.write_text(json.dumps(made_of), encoding="utf-8")
    try:
        yield partial
        label.unlink()
        partial.rename(destination)
    except ValueError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise OSError(f"{error} (the same command goes on from {partial})") from error


def fingerprint(path: Path) -> list[list[str | int]]:
    """Name, size and time of change of the file, or of every file in the directory."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]  # as JSON has them


def progress(description: str) -> Progress:
    """A bar on stderr that vanishes at its end; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_interactive:  # there rich leaves an empty line
        return iter
    return functools.partial(track, description=description, console=console, transient=True)
