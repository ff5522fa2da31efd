"""The strategy that weighs what a draft costs against what it may save, round by round.

One program holds rounds of several sizes. Before each round the expected number of tokens is
worked out for every size, from how often the token behind a match of that length has been right
in this very text, and the size with the most tokens per unit of time is taken: plain decoding
where drafts do not pay. What lookup would have drafted is compared with the text in plain rounds
too, so that nothing is spent on finding out.

Sources: Saxena, Prompt Lookup Decoding (2023), for the drafts; the probabilities at the start and
the margin were chosen by measuring.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jlookahead.checks import check_int, check_number
from jlookahead.layout import Layout, build_layout
from jlookahead.state import LOOKUP, Draft, MatchRecord, PromptRead, RoundState
from jlookahead.suffix_match import continuations, find_matches

# How often the token behind a match of 0, 1, 2, ... tokens was right on SmolLM2, less a fifth.
RIGHT_AT_FIRST = np.array(
    [0, 0.16, 0.36, 0.48, 0.56, 0.6, 0.64, 0.68, 0.7, 0.7, 0.9, 0.9, 0.92], np.float32
)
LONGEST_MATCH = len(RIGHT_AT_FIRST) - 1
# Observations that those probabilities are worth, and how slowly observations are forgotten.
_WEIGHT_AT_FIRST = 2.0
_KEPT = 0.97
# Drafting must promise at least this share of plain decoding's rate.
_MARGIN = 1.1


@dataclasses.dataclass(frozen=True)
class Auto:
    """Prompt lookup where it pays, plain decoding elsewhere.

    Attributes:
        costs: pairs of rows and the time of a round of that many, rising, the first one `(1, 1.0)`:
            what `tune` measures. A round computes one of these numbers of rows.
    """

    costs: tuple[tuple[int, float], ...] = ((1, 1.0), (4, 1.4), (16, 2.2))

    def __post_init__(self) -> None:
        pairs = self.costs
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(f"costs: got {pairs!r}, must be a tuple of pairs (rows, cost)")
        for rows, cost in pairs:
            check_int("costs", rows, 1, 512)
            check_number("costs", cost, "1 to 1e6", 1, 1e6)
        if len(pairs) < 2 or pairs[0] != (1, 1) or list(pairs) != sorted(dict(pairs).items()):
            raise ValueError(
                f"costs: got {pairs!r}, must be two pairs or more by rising rows, (1, 1.0) first"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Drafts of a round."""
        return tuple(rows - 1 for rows, _ in self.costs)

    @property
    def layout(self) -> Layout:
        *smaller, longest = self.sizes
        return build_layout(num_drafts=longest, max_accepted=longest, draft_sizes=tuple(smaller))

    @property
    def num_successors(self) -> int:
        return 0

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        shape = (len(state.length), len(RIGHT_AT_FIRST))
        total = jnp.full(shape, _WEIGHT_AT_FIRST, jnp.float32)
        return dataclasses.replace(state, matches=MatchRecord(total * RIGHT_AT_FIRST, total))

    def propose(self, state: RoundState) -> Draft:
        tokens, exists, match_len = self._look_up(state)
        record = _memory(state)
        chance = jnp.take_along_axis(record.right / record.total, match_len, axis=1)
        # Expected tokens of a round that drafts 1, 2, ... tokens.
        expected = 1 + jnp.cumsum(jnp.cumprod(jnp.where(exists, chance, 0), axis=1), axis=1)
        size = self.best_size(jnp.where(state.done[:, None], 0, expected))
        index = jnp.arange(self.sizes[-1])
        return Draft(
            tokens=tokens,
            valid=exists & (index < size),
            source=jnp.full(tokens.shape, LOOKUP, jnp.int8),
            parents=jnp.broadcast_to(index - 1, tokens.shape),
        )

    def _look_up(self, state: RoundState) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What followed the longest match: tokens, which exist, and the length of the match before
        each, all `[B, R]`."""
        starts, match_len = find_matches(state.tokens, state.length, LONGEST_MATCH, 1)
        tokens, exists = continuations(state.tokens, state.length, starts, self.sizes[-1])
        exists = exists[:, 0] & (match_len > 0)
        before = match_len + jnp.arange(self.sizes[-1])
        return tokens[:, 0], exists, jnp.minimum(before, LONGEST_MATCH)

    def best_size(self, expected: jax.Array) -> jax.Array:
        """The number of drafts with the most tokens per unit of time, 0 if none is worth it.

        Args:
            expected: `[B, R]` tokens of a round with 1, 2, ... drafts; 0 for rows that are done.
        """
        rows, costs = np.array(self.costs, np.float32).T
        # All batch rows are computed together, as many rows of one text would be.
        costs = jnp.interp(len(expected) * rows, rows, costs, right="extrapolate")
        drafting = np.array(self.sizes[1:])
        rates = expected.sum(axis=0)[drafting - 1] / costs[1:]
        plain_rate = (expected[:, 0] > 0).sum() / costs[0]
        best = jnp.argmax(rates)
        return jnp.where(rates[best] > _MARGIN * plain_rate, jnp.asarray(drafting)[best], 0)

    def read(self, logits: jax.Array, num_columns: int) -> None:
        return None

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: None
    ) -> RoundState:
        """Compares what lookup found with what came, drafted or not."""
        # The search of `propose` once more: it takes less than a thousandth of a round.
        tokens, exists, match_len = self._look_up(before)
        index = jnp.arange(self.sizes[-1])
        at = before.length[:, None] + index
        came = jnp.take_along_axis(after.tokens, at, axis=1, mode="clip")
        same = exists & (at < after.length[:, None]) & (tokens == came)
        num_right = jnp.cumprod(same, axis=1).sum(axis=1, keepdims=True)
        was_tried = exists & (at < after.length[:, None]) & (index <= num_right)
        of_length = match_len[..., None] == jnp.arange(LONGEST_MATCH + 1)
        tried = (of_length & was_tried[..., None]).sum(axis=1)
        right = (of_length & (was_tried & same)[..., None]).sum(axis=1)
        record = _memory(before)
        kept = jnp.where(tried > 0, _KEPT, 1.0)
        base = _WEIGHT_AT_FIRST * jnp.asarray(RIGHT_AT_FIRST)
        return dataclasses.replace(
            after,
            matches=MatchRecord(
                right=base + kept * (record.right - base) + right,
                total=_WEIGHT_AT_FIRST + kept * (record.total - _WEIGHT_AT_FIRST) + tried,
            ),
        )


def _memory(state: RoundState) -> MatchRecord:
    assert state.matches is not None, "start() fills it"
    return state.matches
