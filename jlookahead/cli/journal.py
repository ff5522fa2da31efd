"""The output folder of a batch job: a journal while it runs, the results once it is done.

The journal's first line says what job it is of. Every other line is the answer to one prompt,
appended as soon as it is there, so that a job that was killed goes on where it ended. The results
appear whole, in the order of the input, and then the journal goes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jlookahead.files import acquire_lock, written_whole

RESULTS, JOURNAL, _LOCK = "results.jsonl", "journal.jsonl", ".lock"


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """The folder, made if it is missing, for this process alone.

    Raises:
        ValueError: it holds the results of a job, or another process writes there.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = acquire_lock(folder / _LOCK, folder)
    try:
        # With a journal beside them they may be those of this very job, killed at its last step.
        if (folder / RESULTS).exists() and not (folder / JOURNAL).exists():
            raise ValueError(f"{folder / RESULTS}: exists already")
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def open_journal(folder: Path, job: Mapping[str, Any]) -> Iterator[Journal]:
    """The journal of a `locked_folder`, a new one if it has none.

    Args:
        folder: where it lies.
        job: what decides the answers, as JSON has it.

    Raises:
        ValueError: there are answers of another job, or a file that is no journal.
        OSError: it cannot be read or written.
    """
    with (folder / JOURNAL).open("a+b") as file:
        yield Journal(folder, file, job)


class Journal:
    """The answers that a job has so far, by the index of the prompt.

    Attributes:
        num_tokens, num_rounds: of all answers together.
    """

    def __init__(self, folder: Path, file: BinaryIO, job: Mapping[str, Any]):
        """See `open_journal`."""
        self._folder, self._file = folder, file
        self._places: dict[int, int] = {}  # where the line of each answer begins
        self.num_tokens = self.num_rounds = 0
        file.seek(0)
        label = file.readline()
        if label.endswith(b"\n"):
            found, end = self._parse(label), self._find_answers(len(label))
        if self._places:
            self._check_same(found, job)
            file.truncate(end)  # a line that was cut off
        else:
            file.truncate(0)
            self._append(job)

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def __len__(self) -> int:
        return len(self._places)

    def _check_same(self, found: Mapping[str, Any], job: Mapping[str, Any]) -> None:
        wanted = json.loads(json.dumps(job))
        names = dict.fromkeys([*found, *wanted])
        differing = [name for name in names if found.get(name) != wanted.get(name)]
        if differing:
            raise ValueError(
                f"{self._folder}: holds an unfinished job with other {', '.join(differing)}; "
                "finish it with the same ones, or give another output folder"
            )

    def _find_answers(self, place: int) -> int:
        """Reads the lines from `place` on, and returns where the last whole one ends."""
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            fields = self._parse(line, "index", "answer")
            self._note(fields["index"], place, fields["answer"])
            place += len(line)
        return place

    def _parse(self, line: bytes, *names: str) -> dict[str, Any]:
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or not fields.keys() >= set(names):
            raise ValueError(f"{self._folder / JOURNAL}: not the journal of a batch job")
        return fields

    def _note(self, index: int, place: int, answer: Mapping[str, Any]) -> None:
        if index in self._places:
            raise ValueError(f"{self._folder / JOURNAL}: prompt {index} is answered twice")
        self._places[index] = place
        self.num_tokens += len(answer["token_ids"])
        self.num_rounds += answer["num_rounds"]

    def add(self, index: int, answer: Mapping[str, Any]) -> None:
        """Appends the answer to a prompt that has none yet; has `token_ids` and `num_rounds`."""
        place = self._file.seek(0, os.SEEK_END)
        self._note(index, place, answer)
        self._append({"index": index, "answer": answer})

    def _append(self, fields: Mapping[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(fields).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Writes the results, in order of their index, and ends the journal.

        Raises:
            OSError: they cannot be written; the journal stays.
        """
        with written_whole(self._folder / RESULTS) as results:
            for _, place in sorted(self._places.items()):
                self._file.seek(place)
                answer = self._parse(self._file.readline())["answer"]
                results.write(json.dumps(answer) + "\n")
        self._file.close()
        (self._folder / JOURNAL).unlink()
