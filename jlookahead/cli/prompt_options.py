"""The prompt of a command, out of the options that may give one."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jlookahead.checkpoints import LoadedModel
from jlookahead.prompts import to_rows

STDIN = "-"
# What holds the prompt, in the lines of a benchmark and of a batch job.
_BENCH_KEYS = ("prompt", "turns", "ids")
_BATCH_KEYS = ("prompt", "prompt_ids", "messages")

# A text, ids, or chat messages.
OnePrompt = str | list[int] | list[dict[str, str]]

DEFAULT_PROMPT = '''\
def flatten(items):
    """Return a flat list of the items of nested lists."""
    result = []
    for item in items:
        if isinstance(item, list):
'''


def read_prompt(text: str | None, file: str | None, ids: str | None) -> str | list[int]:
    """The prompt's text or ids, from whichever option was given, else `DEFAULT_PROMPT`.

    Raises:
        ValueError: more than one option, an empty prompt, a file that is not UTF-8, ids that
            are no integers.
        OSError: the file cannot be read.
    """
    if sum(option is not None for option in (text, file, ids)) > 1:
        raise ValueError("prompt: allowed is one of --prompt, --prompt-file and --prompt-ids")
    if ids is not None:
        return _parse_ids(ids)
    if file is not None:
        text = _read_text(file)
    if text is None:
        return DEFAULT_PROMPT
    if not text:
        raise ValueError("prompt: got an empty text, needs at least one character")
    return text


def read_prompts(file: Path) -> list[str | list[int]]:
    """The prompts of a file of JSON lines, in order.

    Raises:
        ValueError: no prompt, or a line that holds none; names the line.
        OSError: the file cannot be read.
    """
    prompts = [_bench_prompt(line) for line in _json_lines(file)]
    if not prompts:
        raise ValueError(f"{file}: holds no prompt")
    return prompts


@dataclasses.dataclass(frozen=True)
class JsonLine:
    """A line of a file.

    Attributes:
        number: from 1.
        where: file and line, for messages.
        value: what it holds.
    """

    number: int
    where: str
    value: Any

    def only_one_of(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The one of these keys that it has, and the value; "" and None if that is not one."""
        given = [key for key in keys if key in self.value] if isinstance(self.value, dict) else []
        return (given[0], self.value[given[0]]) if len(given) == 1 else ("", None)


def _json_lines(file: Path) -> Iterator[JsonLine]:
    """The lines that are not empty."""
    for number, line in enumerate(_read_text(str(file)).split("\n"), 1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        yield JsonLine(number, where, value)


def _bench_prompt(line: JsonLine) -> str | list[int]:
    key, value = line.only_one_of(_BENCH_KEYS)
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if value and (_are_ids(value) if key == "ids" else isinstance(value, str)):
        return value
    raise ValueError(
        f'{line.where}: needs one of "prompt" (a text), "turns" (texts) and "ids" (integers)'
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


@dataclasses.dataclass(frozen=True)
class BatchPrompt:
    """A prompt of a batch job.

    Attributes:
        id: names it in the results; the number of its line by default.
        where: file and line, for messages.
        prompt: not checked any further.
    """

    id: str | int
    where: str
    prompt: OnePrompt


def read_batch(file: Path) -> list[BatchPrompt]:
    """The prompts of a batch job, in order: JSON lines, which may be none.

    Raises:
        ValueError: a line that is not as it should be, or two with one id; names the line.
        OSError: the file cannot be read.
    """
    prompts: dict[str | int, BatchPrompt] = {}
    for line in _json_lines(file):
        prompt = _batch_prompt(line)
        if prompt.id in prompts:
            first = prompts[prompt.id].where
            raise ValueError(f"{line.where}: id: got {prompt.id!r}, as {first} has")
        prompts[prompt.id] = prompt
    return list(prompts.values())


def _batch_prompt(line: JsonLine) -> BatchPrompt:
    key, value = line.only_one_of(_BATCH_KEYS)
    is_good = {
        "prompt": isinstance(value, str),
        "prompt_ids": _are_ids(value),
        "messages": isinstance(value, list) and all(isinstance(each, dict) for each in value),
    }
    if not value or not is_good[key]:
        raise ValueError(
            f'{line.where}: needs one of "prompt" (a text), "prompt_ids" (integers) and '
            '"messages" (objects with role and content)'
        )
    unknown = line.value.keys() - {key, "id"}
    if unknown:
        raise ValueError(f"{line.where}: got unknown field {min(unknown)!r}, allowed is id")
    name = line.value.get("id", line.number)
    if type(name) not in (str, int):
        raise ValueError(f"{line.where}: id: got {name!r}, allowed are texts and integers")
    return BatchPrompt(name, line.where, value)


def _parse_ids(ids: str) -> list[int]:
    try:
        return [int(part) for part in ids.split(",")]
    except ValueError:
        message = f"prompt_ids: got {ids!r}, allowed are integers separated by commas"
        raise ValueError(message) from None


def _read_text(file: str) -> str:
    if file == STDIN and sys.stdin is None:
        raise ValueError("prompt_file: standard input is closed")
    data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error}") from None


def encode_prompt(prompt: OnePrompt, lm: LoadedModel, raw: bool) -> list[int]:
    """Checked ids of a prompt; a text becomes a user message of a chat model unless `raw`."""
    wrapped: Any = prompt
    if isinstance(prompt, str) and not raw and getattr(lm.tokenizer, "chat_template", None):
        wrapped = [{"role": "user", "content": prompt}]
    rows, _ = to_rows(wrapped, lm.tokenizer, lm.config.vocab_size)
    return rows[0].tolist()
