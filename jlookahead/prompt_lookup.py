"""Prompt Lookup Decoding: drafts are what followed an earlier match of the current suffix.

Source: Saxena, Prompt Lookup Decoding (2023), `find_candidate_pred_tokens`, with the rules of
its successors: longer matches first, partial continuations used, the suffix never matching
itself. The whole buffer is compared at once on the device, which costs `max_ngram` passes
over its token ids.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jlookahead.checks import check_int
from jlookahead.layout import Layout, build_layout, chain_parents
from jlookahead.state import FROM_PROMPT, Draft, RoundState


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
        ends = self._matches(state.tokens, state.length)
        index = ends[..., None] + 1 + jnp.arange(self.num_draft_tokens)
        valid = (ends >= 0)[..., None] & (index < state.length[:, None, None])
        batch, num_slots = state.tokens.shape
        flat = jnp.clip(index, 0, num_slots - 1).reshape(batch, -1)
        return Draft(
            tokens=jnp.take_along_axis(state.tokens, flat, axis=1),
            valid=valid.reshape(batch, -1),
            sources=jnp.full(flat.shape, FROM_PROMPT, jnp.int8),
        )

    def _matches(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """`[B, G]` index of the last token of each match, -1 for none, best first."""
        num_slots = tokens.shape[1]
        slot = jnp.arange(num_slots)
        match_len = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.max_ngram):
            suffix = jnp.take_along_axis(tokens, length[:, None] - 1 - back, axis=1)
            same = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :num_slots] == suffix
            # `back` tokens matched so far, and neither side runs off the front.
            same &= (match_len == back) & (slot >= back) & (length[:, None] > back)
            match_len += same
        match_len = jnp.where(slot < length[:, None] - 1, match_len, 0)
        # Longest first, then most recent.
        score = jnp.where(match_len > 0, match_len * num_slots + slot, -1)
        following = jnp.roll(tokens, -1, axis=1)
        ends = []
        for _ in range(self.candidates):
            best = jnp.argmax(score, axis=1)
            found = jnp.take_along_axis(score, best[:, None], axis=1)[:, 0] >= 0
            ends.append(jnp.where(found, best, -1))
            drafted = jnp.take_along_axis(following, best[:, None], axis=1)
            score = jnp.where(following == drafted, -1, score)
        return jnp.stack(ends, axis=1)

    def observe(
        self, before: RoundState, after: RoundState, jacobi_logits: jax.Array
    ) -> RoundState:
        return after
