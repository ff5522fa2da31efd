"""A JSON object from a file, with one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value
