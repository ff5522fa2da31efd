"""Prompt Lookup Decoding: drafts are what followed an earlier match of the current suffix.

Source: Saxena, Prompt Lookup Decoding (2023), `find_candidate_pred_tokens`, with the rules of
its successors: longer matches first, partial continuations used, the suffix never matching
itself.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jlookahead.checks import check_int
from jlookahead.layout import Layout, build_layout, chain_parents
from jlookahead.state import FROM_PROMPT, Draft, RoundState
from jlookahead.suffix_match import continuations, find_matches


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Knobs of prompt lookup; they can change the number of rounds, never the text.

    Attributes:
        max_ngram: longest suffix that is looked up; shorter ones down to 1 are tried after it.
        num_draft_tokens: tokens drafted per match.
        candidates: matches G verified side by side, with distinct first tokens.
    """

    max_ngram: int = 3
    num_draft_tokens: int = 10
    candidates: int = 1

    def __post_init__(self) -> None:
        check_int("max_ngram", self.max_ngram, 1, 64)
        check_int("num_draft_tokens", self.num_draft_tokens, 1, 256)
        check_int("candidates", self.candidates, 1, 64)

    @property
    def layout(self) -> Layout:
        return build_layout(parents=chain_parents(self.candidates, self.num_draft_tokens))

    def start(self, state: RoundState, initial_window: jax.Array | None) -> RoundState:
        return state

    def propose(self, state: RoundState) -> Draft:
        starts, match_len = find_matches(
            state.tokens, state.length, self.max_ngram, self.candidates
        )
        tokens, exists = continuations(state.tokens, state.length, starts, self.num_draft_tokens)
        batch = len(tokens)
        valid = exists & (match_len > 0)[..., None]
        return Draft(
            tokens=tokens.reshape(batch, -1),
            valid=valid.reshape(batch, -1),
            source=jnp.full((batch, self.layout.num_drafts), FROM_PROMPT, jnp.int8),
            variant=jnp.zeros_like(state.length),
        )

    def observe(
        self, before: RoundState, after: RoundState, jacobi_logits: jax.Array
    ) -> RoundState:
        return after
