"""Checks of user input; every failure is a `ValueError` naming field, value and what is allowed."""

from __future__ import annotations


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raises `ValueError` unless `value` is an integer from `low` to `high`."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: got {value!r}, allowed is an integer, {allowed}")
