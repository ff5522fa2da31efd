"""One-line reasons out of other libraries' exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def first_line(error: Exception) -> str:
    """The first line of the message, or the name of the class if there is no message."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what other libraries raise where a disk is full into an `OSError` with the path."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{path}: cannot be written: {first_line(error)}") from error
