"""Strategies by name, each with the options that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jlookahead.auto import Auto
from jlookahead.jacobi import Jacobi
from jlookahead.lookahead import Lookahead
from jlookahead.prompt_lookup import PromptLookup
from jlookahead.recycling import Recycling
from jlookahead.strategy import Autoregressive, Strategy
from jlookahead.tuning import tune

if TYPE_CHECKING:
    from jlookahead.checkpoints import LoadedModel

PLAIN, LOOKAHEAD, AUTO = "autoregressive", "lookahead", "auto"

_KNOWN: dict[str, tuple[type, tuple[str, ...]]] = {
    LOOKAHEAD: (Lookahead, ("window", "ngram", "candidates")),
    "prompt-lookup": (PromptLookup, ("max_ngram", "num_draft_tokens", "candidates")),
    "recycling": (Recycling, ("rows",)),
    "jacobi": (Jacobi, ("block",)),
    AUTO: (Auto, ()),
    PLAIN: (Autoregressive, ()),
}
NAMES = tuple(_KNOWN)


def make_strategy(name: str, params: Mapping[str, Any]) -> Strategy:
    """The strategy of a command line.

    Args:
        name: one of `NAMES`.
        params: of the command, by name, the options of all strategies among them; None for one
            that was not given.

    Raises:
        ValueError: an unknown name, a value the strategy refuses, an option of another one.
    """
    if name not in _KNOWN:
        raise ValueError(f"strategy: got {name!r}, allowed are {', '.join(NAMES)}")
    strategy, own = _KNOWN[name]
    options = {option for _, names in _KNOWN.values() for option in names}
    given = {name: value for name, value in params.items() if name in options and value is not None}
    for option in given:
        if option not in own:
            owners = [other for other, (_, names) in _KNOWN.items() if option in names]
            raise ValueError(
                f"{option}: is an option of {' and '.join(owners)}, got strategy {name}"
            )
    return strategy(**given)


def measured(strategy: Strategy, lm: LoadedModel) -> Strategy:
    """The strategy with what it needs to know of the device and the model."""
    return tune(lm.params, lm.config) if isinstance(strategy, Auto) else strategy


def defaults_of(option: str) -> dict[str, int]:
    """The default of an option for every strategy that has it, for its help."""
    return {
        name: getattr(strategy, option)
        for name, (strategy, options) in _KNOWN.items()
        if option in options
    }
