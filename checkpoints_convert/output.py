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
from jlookahead.files import acquire_lock

# In an unfinished directory: what it is made of, and the lock of the process that writes it.
_LABEL, _LOCK = "conversion.json", "conversion.lock"


def require_new(destination: Path) -> None:
    """Raises `ValueError` if there is such a file or directory."""
    if os.path.lexists(destination):
        raise ValueError(f"{destination}: exists already")


@contextlib.contextmanager
def created_whole(destination: Path, made_of: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """A new directory beside `destination` that takes its name once the block is done.

    Args:
        destination: does not exist yet.
        made_of: what an interrupted block of the same command must have been made of for its files
            to be kept and found here; None keeps nothing.

    Raises:
        ValueError: another process writes there.
        OSError: of the block, with the name of the directory if it is kept.
    """
    partial = destination.with_name(f".{destination.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = acquire_lock(partial / _LOCK, destination)
    try:
        _clear_unless(partial, made_of)
        yield partial
        lock.release()
        for name in (_LABEL, _LOCK):
            (partial / name).unlink(missing_ok=True)
        partial.rename(destination)
    except BaseException as error:
        lock.release()
        if made_of is None or not isinstance(error, OSError | KeyboardInterrupt):
            shutil.rmtree(partial, ignore_errors=True)
            raise
        hint = f"the same command goes on from {partial}"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(hint) from None
        raise OSError(f"{error}; {hint}") from error


def _clear_unless(partial: Path, made_of: Mapping[str, Any] | None) -> None:
    """Empties the directory unless its label says that it is made of this."""
    label = partial / _LABEL
    with contextlib.suppress(OSError, ValueError):  # missing, or cut off by a full disk
        if read_json(label) == made_of:
            return
    for entry in partial.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()
    label.write_text(json.dumps(made_of), encoding="utf-8")


def progress(description: str) -> Progress:
    """A bar on stderr that vanishes at its end; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_interactive:  # there rich leaves an empty line
        return iter
    return functools.partial(track, description=description, console=console, transient=True)
