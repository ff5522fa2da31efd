"""Files that appear whole or not at all, and locks on what one process may write at a time."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import filelock


@contextlib.contextmanager
def written_whole(file: Path) -> Iterator[TextIO]:
    """A stream whose text becomes the file, which is replaced if it exists, after the block.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with unfinished.open("x", encoding="utf-8") as stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(unfinished, file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def acquire_lock(lock_file: Path, guarded: Path) -> filelock.BaseFileLock:
    """Takes the lock on what `guarded` names; it is free again when the process ends.

    Raises:
        ValueError: another process holds it.
    """
    lock = filelock.FileLock(lock_file, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"{guarded}: another process is writing it") from None
    return lock
