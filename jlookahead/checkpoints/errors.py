"""One-line reasons out of other libraries' exceptions."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of the message, or the name of the class if there is no message."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]
