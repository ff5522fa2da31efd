"""Where drafts come from: the contract of a strategy, and the one that drafts nothing.

A strategy is a frozen, hashable description of a proposer. Its choices can change how many
rounds a text takes and never the text: the round verifies every draft token.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jlookahead.layout import Layout, build_layout
from jlookahead.state import Draft, RoundState


class Strategy(Protocol):
    """What a round needs of a proposer; all three run inside the compiled program."""

    @property
    def layout(self) -> Layout:
        """The packed rows of its rounds."""
        ...

    def start(self, state: RoundState, initial_window: jax.Array | None) -> RoundState:
        """Fills its memory from the prompt, before the first round."""
        ...

    def propose(self, state: RoundState) -> Draft:
        """Fills the layout's forest with draft tokens."""
        ...

    def observe(
        self, before: RoundState, after: RoundState, jacobi_logits: jax.Array
    ) -> RoundState:
        """Learns from a round.

        Args:
            before: the state the round started from.
            after: the same with the round's tokens published.
            jacobi_logits: `[B, J, V]` of the window's deepest level.

        Returns:
            `after` with new proposer memory. Rows done before the round keep theirs.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Plain decoding, one token a round: the baseline and the oracle."""

    @property
    def layout(self) -> Layout:
        return build_layout()

    def start(self, state: RoundState, initial_window: jax.Array | None) -> RoundState:
        return state

    def propose(self, state: RoundState) -> Draft:
        none = jnp.zeros((state.tokens.shape[0], 0), jnp.int32)
        return Draft(
            tokens=none,
            valid=none.astype(bool),
            source=none.astype(jnp.int8),
            variant=jnp.zeros_like(state.length),
        )

    def observe(
        self, before: RoundState, after: RoundState, jacobi_logits: jax.Array
    ) -> RoundState:
        return after
