"""The prompt of a command, out of the options that may give one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jlookahead.checkpoints import LoadedModel
from jlookahead.prompts import to_rows

STDIN = "-"
_PROMPT_KEYS = ("prompt", "turns", "ids")

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
    prompts = [
        _prompt_of(line, f"{file}, line {number}")
        for number, line in enumerate(_read_text(str(file)).split("\n"), 1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{file}: holds no prompt")
    return prompts


def _prompt_of(line: str, where: str) -> str | list[int]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    given = [key for key in _PROMPT_KEYS if key in fields] if isinstance(fields, dict) else []
    if len(given) == 1:
        value = fields[given[0]]
        if given == ["turns"]:
            value = value[0] if isinstance(value, list) and value else None
        is_ids = isinstance(value, list) and all(type(token) is int for token in value)
        if value and (is_ids if given == ["ids"] else isinstance(value, str)):
            return value
    raise ValueError(
        f'{where}: needs one of "prompt" (a text), "turns" (texts) and "ids" (integers)'
    )


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


def encode_prompt(prompt: str | list[int], lm: LoadedModel, raw: bool) -> list[int]:
    """Checked ids of a prompt; a text becomes a user message of a chat model unless `raw`."""
    wrapped: Any = prompt
    if isinstance(prompt, str) and not raw and getattr(lm.tokenizer, "chat_template", None):
        wrapped = [{"role": "user", "content": prompt}]
    rows, _ = to_rows(wrapped, lm.tokenizer, lm.config.vocab_size)
    return rows[0].tolist()
