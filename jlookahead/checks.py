"""Checks of user input; every failure is a `ValueError` naming field, value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_int(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
    """Raises `ValueError` unless `value` is an int from `low` to `high`."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, allowed is an int, {low} to {high}")


def check_number(name: str, value: Any, allowed: str, low: float, high: float) -> None:
    """Raises `ValueError` unless `value` is a number from `low` to `high`, both finite."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    is_number &= not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # which NaN is not either
        raise ValueError(f"{name}: got {value!r}, allowed is {allowed}")


def check_bool(name: str, value: object) -> None:
    """Raises `ValueError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, allowed is True or False")


def check_choice(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    """Raises `ValueError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(str, allowed))}")
