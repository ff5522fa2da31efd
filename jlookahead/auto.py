"""The strategy that weighs what a draft costs against what it may save, round by round.

One program holds rounds of several kinds: plain decoding, prompt lookup of several lengths and, on
devices where many rows cost little, everything that `Lookahead` or `Recycling` knows. Before each
round the expected number of tokens is worked out for every kind, from how often such drafts have
been right in this very text, and the kind with the most tokens per unit of time is taken: plain
decoding where drafts do not pay. What would have been drafted is compared with the text in plain
rounds too, so that nothing is spent on finding out.

Sources: Saxena, Prompt Lookup Decoding (2023), for the drafts; the probabilities at the start and
the margin were chosen by measuring.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlookahead import acceptance
from jlookahead.acceptance import LONGEST_MATCH
from jlookahead.checks import check_int, check_number
from jlookahead.layout import Layout, build_layout, with_smaller_rounds
from jlookahead.lookahead import Lookahead
from jlookahead.recycling import Recycling
from jlookahead.sharding import largest_anywhere
from jlookahead.state import LOOKUP, Draft, MatchRecord, PromptRead, RoundState
from jlookahead.suffix_match import continuations, find_matches

# Lookup must promise this share of plain decoding's rate; wide rounds, which teach the memory that
# they draft from, the rate itself.
_MARGIN, _WIDE_MARGIN = 1.1, 1.0


@dataclasses.dataclass(frozen=True)
class Auto:
    """Drafts where they pay, plain decoding elsewhere; `tune` finds the costs and what suits them.

    Attributes:
        costs: pairs of rows and the time of a round of that many, rising, the first one `(1, 1.0)`.
            A round computes one of these numbers of rows.
        wide: the strategy whose rounds are those of the most rows, `Lookahead` or `Recycling`;
            None if these, like the others, hold prompt lookup alone. In other rounds its window
            stands still, and it learns from what is computed.
    """

    costs: tuple[tuple[int, float], ...] = ((1, 1.0), (4, 1.4), (16, 2.2))
    wide: Lookahead | Recycling | None = None

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
        if self.wide is not None:
            self._check_wide()

    def _check_wide(self) -> None:
        wide = self.wide
        if not isinstance(wide, Lookahead | Recycling) or getattr(wide, "reference", False):
            raise ValueError(
                f"wide: got {wide!r}, allowed are None, a Recycling, and a Lookahead without "
                "reference=True"
            )
        rows, num_drafts = wide.layout.num_rows, wide.layout.num_drafts
        if self.costs[-1][0] != rows:
            raise ValueError(f"costs: the last must be of the {rows} rows of wide={wide}")
        longest = self.costs[-2][0] - 1
        if len(self.costs) < 3 or longest >= num_drafts:
            raise ValueError(
                f"costs: got {self.costs!r}, must be three pairs or more, the last but one of at "
                f"most {num_drafts} rows, as many as wide={wide} has drafts"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens that lookup drafts in rounds of its own."""
        pairs = self.costs if self.wide is None else self.costs[:-1]
        return tuple(rows - 1 for rows, _ in pairs)

    @property
    def layout(self) -> Layout:
        *smaller, longest = self.sizes
        if self.wide is None:
            return build_layout(
                num_drafts=longest, max_accepted=longest, draft_sizes=tuple(smaller)
            )
        layout = self.wide.layout
        return with_smaller_rounds(layout, self.sizes, max(longest, layout.max_accepted))

    @property
    def num_successors(self) -> int:
        return 0 if self.wide is None else self.wide.num_successors

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        held = None
        if self.wide is not None:
            state = self.wide.start(state, prompt)
            held = self.wide.next_tokens(state)
        return dataclasses.replace(state, matches=acceptance.new_record(len(state.length), held))

    def propose(self, state: RoundState) -> Draft:
        tokens, exists, match_len = self._look_up(state)
        record = _memory(state)
        expected = self.expected_tokens(record.right / record.total, match_len, exists)
        # Rounds of one kind on all devices, where they are of one size.
        kind = largest_anywhere(self.best_round(jnp.where(state.done[:, None], 0, expected)))
        size = jnp.asarray((*self.sizes, 0))[kind]
        missing = self.layout.num_drafts - tokens.shape[1]
        tokens, exists = (jnp.pad(x, ((0, 0), (0, missing))) for x in (tokens, exists))
        index = jnp.arange(tokens.shape[1])
        looked_up = Draft(
            tokens=tokens,
            valid=exists & (index < size),
            source=jnp.full(tokens.shape, LOOKUP, jnp.int8),
            parents=jnp.broadcast_to(index - 1, tokens.shape),
        )
        wide = self.wide
        if wide is None:
            return looked_up

        def wanting(draft: Draft, wanted: bool) -> Draft:
            every_row = jnp.full(draft.valid.shape, wanted)
            parents = draft.parents.astype(jnp.int32)
            return dataclasses.replace(draft, parents=parents, wanted=every_row)

        return lax.cond(
            kind == len(self.sizes),
            lambda: wanting(wide.propose(state), True),
            lambda: wanting(looked_up, False),
        )

    def _look_up(self, state: RoundState) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What followed the longest match: tokens, which exist, and the length of the match before
        each, all `[B, R]`."""
        starts, match_len = find_matches(state.tokens, state.length, LONGEST_MATCH, 1)
        tokens, exists = continuations(state.tokens, state.length, starts, self.sizes[-1])
        exists = exists[:, 0] & (match_len > 0)
        before = match_len + jnp.arange(self.sizes[-1])
        return tokens[:, 0], exists, jnp.minimum(before, LONGEST_MATCH)

    def expected_tokens(
        self, chances: jax.Array, match_len: jax.Array, exists: jax.Array
    ) -> jax.Array:
        """Tokens of a round of each kind, in the order of `costs`: `[B, K]`.

        Args:
            chances: `[B, C]`, see `acceptance.py`.
            match_len: `[B, R]` length of the match before each token that lookup found.
            exists: `[B, R]` bool, the tokens it found.
        """
        looked_up = acceptance.tokens_by_lookup(chances, match_len, exists)
        kinds = [jnp.ones_like(looked_up[:, :1]), looked_up[:, np.array(self.sizes[1:]) - 1]]
        if self.wide is not None:
            deepest = self.wide.layout.max_accepted
            of_wide = acceptance.tokens_by_everything(chances, match_len[:, 0], deepest)
            kinds.append(of_wide[:, None])
        return jnp.concatenate(kinds, axis=1)

    def best_round(self, expected: jax.Array) -> jax.Array:
        """The kind of round with the most tokens per unit of time: 0, plain, if no other is worth
        it.

        Args:
            expected: `[B, K]` tokens of a round of each kind; 0 for rows that are done.
        """
        rows, costs = np.array(self.costs, np.float32).T
        # All batch rows are computed together, as many rows of one text would be.
        costs = jnp.interp(len(expected) * rows, rows, costs, right="extrapolate")
        rates = expected.sum(axis=0) / costs
        margins = np.full(len(rows), _MARGIN, np.float32)
        if self.wide is not None:
            margins[-1] = _WIDE_MARGIN
        return jnp.argmax(jnp.where(rates > margins * rates[0], rates, 0).at[0].set(rates[0]))

    def read(self, logits: jax.Array, num_columns: int) -> Any:
        return None if self.wide is None else self.wide.read(logits, num_columns)

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: Any
    ) -> RoundState:
        """Compares what lookup found with what came, drafted or not, and so for `wide`."""
        # The search of `propose` once more: it takes less than a thousandth of a round.
        tokens, exists, match_len = self._look_up(before)
        record, num_emitted = _memory(before), after.length - before.length
        index = jnp.arange(self.sizes[-1])
        at = before.length[:, None] + index
        came = jnp.take_along_axis(after.tokens, at, axis=1, mode="clip")
        exists &= index < num_emitted[:, None]
        same = exists & (tokens == came)
        num_right = jnp.cumprod(same, axis=1).sum(axis=1, keepdims=True)
        was_tried = exists & (index <= num_right)
        num_classes = record.total.shape[1]
        tried = acceptance.count_lookups(match_len, was_tried, num_classes)
        right = acceptance.count_lookups(match_len, was_tried & same, num_classes)
        if self.wide is not None:
            if draft.tokens.shape[1] == self.layout.num_drafts:
                num_tried, num_held = num_emitted, num_emitted - 1
            else:  # what it holds behind the next token was not looked at
                assert record.held is not None, "start() fills it"
                is_held = (record.held == came[:, :1]).any(axis=1) | same[:, 0]
                num_tried = jnp.minimum(num_emitted, 1)
                num_held = num_tried * is_held
            tried += acceptance.count_depths(match_len[:, 0], num_tried, num_classes)
            right += acceptance.count_depths(match_len[:, 0], num_held, num_classes)
            after = self.wide.observe(before, after, draft, reading)
            record = dataclasses.replace(record, held=self.wide.next_tokens(after))
        return dataclasses.replace(after, matches=acceptance.learn(record, tried, right))


def _memory(state: RoundState) -> MatchRecord:
    assert state.matches is not None, "start() fills it"
    return state.matches
