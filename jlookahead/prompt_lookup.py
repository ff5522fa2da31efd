"""Prompt Lookup Decoding: drafts are what followed an earlier match of the current suffix.

Source: Saxena, Prompt Lookup Decoding (2023), `find_candidate_pred_tokens`, with the rules of
its successors: longer matches first, partial continuations used, the suffix never matching
itself.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jlookahead.checks import check_choice, check_int
from jlookahead.forest import chain_parents
from jlookahead.layout import Layout, build_layout
from jlookahead.state import LOOKUP, Draft, PromptRead, RoundState
from jlookahead.suffix_match import continuations, find_matches

_LONGEST_COMPARED = 32


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Knobs of prompt lookup; they can change the number of rounds, never the text.

    Attributes:
        max_ngram: longest suffix that is looked up; shorter ones down to 1 are tried after it.
        num_draft_tokens: tokens drafted per match.
        candidates: matches G verified side by side, with distinct first tokens.
        policy: which of several matches of `max_ngram` tokens comes first: the `most_recent`, or
            the one with the `longest` common suffix, up to 32 tokens.
    """

    max_ngram: int = 3
    num_draft_tokens: int = 10
    candidates: int = 1
    policy: str = "most_recent"

    def __post_init__(self) -> None:
        check_int("max_ngram", self.max_ngram, 1, 64)
        check_int("num_draft_tokens", self.num_draft_tokens, 1, 256)
        check_int("candidates", self.candidates, 1, 64)
        check_choice("policy", self.policy, ("most_recent", "longest"))

    @property
    def layout(self) -> Layout:
        size = self.num_draft_tokens
        return build_layout(
            num_drafts=self.candidates * size, max_accepted=size, draft_sizes=(0,), chain_len=size
        )

    @property
    def num_successors(self) -> int:
        return 0

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        return state

    def propose(self, state: RoundState) -> Draft:
        longest = self.max_ngram
        if self.policy == "longest":
            longest = max(longest, _LONGEST_COMPARED)
        starts, match_len = find_matches(state.tokens, state.length, longest, self.candidates)
        tokens, exists = continuations(state.tokens, state.length, starts, self.num_draft_tokens)
        batch = len(tokens)
        valid = exists & (match_len > 0)[..., None]
        parents = chain_parents(self.candidates, self.num_draft_tokens)
        return Draft(
            tokens=tokens.reshape(batch, -1),
            valid=valid.reshape(batch, -1),
            source=jnp.full((batch, len(parents)), LOOKUP, jnp.int8),
            parents=jnp.broadcast_to(parents, (batch, len(parents))),
        )

    def read(self, logits: jax.Array, num_columns: int) -> None:
        return None

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: None
    ) -> RoundState:
        return after
