"""Where drafts come from: the contract of a strategy, and the one that drafts nothing.

A strategy is a frozen, hashable description of a proposer. Its choices can change how many
rounds a text takes and never the text: the round verifies every draft token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jlookahead.layout import Layout, build_layout
from jlookahead.state import Draft, PromptRead, RoundState


class Strategy(Protocol):
    """What a round needs of a proposer; its functions run inside the compiled program."""

    @property
    def layout(self) -> Layout:
        """The packed rows of its rounds."""
        ...

    @property
    def num_successors(self) -> int:
        """Likeliest successors K of every prompt token that `start` wants; 0 saves the head."""
        ...

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        """Fills its memory from the prompt, before the first round.

        The state may hold the memory of an earlier generation over the reused tokens.
        """
        ...

    def propose(self, state: RoundState) -> Draft:
        """Fills the layout's forest with draft tokens."""
        ...

    def read(self, logits: jax.Array, num_columns: int) -> Any:
        """What `observe` needs of a round's logits, anything or None.

        Args:
            logits: `[B, 1 + r + num_columns, V]`: of the ordinary row, of the r draft rows that
                were computed, and of the window's deepest level.
            num_columns: columns of the window that were computed: all of them, 0 in a round that
                left the window out, or this device's part where the layout has chains
                (`chain_len`). Of such a part a token per column must be read, `[B, num_columns]`
                int32, or nothing.
        """
        ...

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: Any
    ) -> RoundState:
        """Learns from a round.

        Args:
            before: the state the round started from.
            after: the same with the round's tokens published.
            draft: what was verified, `[B, r]`.
            reading: what `read` made of the round's logits.

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

    @property
    def num_successors(self) -> int:
        return 0

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        return state

    def propose(self, state: RoundState) -> Draft:
        none = jnp.zeros((len(state.length), 0), jnp.int32)
        return Draft(
            tokens=none,
            valid=none.astype(bool),
            source=none.astype(jnp.int8),
            parents=none,
        )

    def read(self, logits: jax.Array, num_columns: int) -> None:
        return None

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: None
    ) -> RoundState:
        return after
