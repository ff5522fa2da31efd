"""Token Recycling with prompt lookup and a Jacobi window of one level.

Chains found by prompt lookup come first, in up to 80% of the draft rows; the rest holds the
likeliest part of a tree grown from the table of successors. The table is read off the prompt
and refreshed from every row a round computes, rejected drafts included: what a round pays for
is never thrown away. A sixth of the rows is a window that runs ahead of the text, as lookahead's
does, and serves the table alone: it learns what follows tokens that no draft has reached yet.

Source: Luo et al., Token Recycling (arXiv 2408.08696), and Saxena, Prompt Lookup Decoding
(2023). The shares, lengths and probabilities were chosen by measuring; see
`benchmarks/results`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jlookahead.checks import check_int
from jlookahead.forest import ancestry, rank_tree
from jlookahead.layout import Layout, build_layout
from jlookahead.state import LOOKUP, RECYCLED, Draft, PromptRead, RoundState
from jlookahead.successors import init_successors, record
from jlookahead.suffix_match import LONGEST_DRAFT, LONGEST_MATCH, draft_length, find_matches
from jlookahead.vocabulary import NO_TOKEN, top_tokens
from jlookahead.window import Window, advance, spread_over_prompt

# How often the successor of each rank was right, on SmolLM2.
RANK_PROBABILITIES = (0.40, 0.13, 0.07, 0.045, 0.03, 0.02, 0.015, 0.01)
_LOOKUP_SHARE = 0.8
_NUM_MATCHES = 4
_ROWS_PER_COLUMN = 6


@dataclasses.dataclass(frozen=True)
class Recycling:
    """Knobs of recycling; they can change the number of rounds, never the text.

    Attributes:
        rows: packed rows Q of a round: the last token, the window and the drafts.
    """

    rows: int = 56

    def __post_init__(self) -> None:
        check_int("rows", self.rows, 2, 512)

    @property
    def num_successors(self) -> int:
        return len(RANK_PROBABILITIES)

    @property
    def num_columns(self) -> int:
        """Columns W of the window; the first is the last token's row."""
        return max(1, self.rows // _ROWS_PER_COLUMN)

    @property
    def num_drafts(self) -> int:
        return self.rows - self.num_columns

    @property
    def layout(self) -> Layout:
        parents, _ = rank_tree(self.num_drafts, RANK_PROBABILITIES)
        deepest = max(LONGEST_DRAFT, _depth(parents))
        return build_layout(
            window=self.num_columns,
            num_drafts=self.num_drafts,
            max_accepted=min(deepest, self.num_drafts),
        )

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        """Fills the table with what the prefill held likeliest after every prompt token, and the
        window with tokens of the prompt."""
        assert prompt.successors is not None, "num_successors asks for them"
        batch, padded_len, num_successors = prompt.successors.shape
        table = state.successors
        if table is None:
            table = init_successors(batch, prompt.vocab_size, num_successors)
        index = jnp.arange(padded_len)
        tokens = state.tokens[:, :padded_len]
        was_read = (index >= prompt.num_reused) & (index < state.prompt_len[:, None] - 1)
        table = record(table, tokens, prompt.successors, index, was_read)
        columns = spread_over_prompt(
            state.tokens, state.prompt_len, state.eos_ids, self.num_columns, run=1
        )
        window = Window(columns.transpose(0, 2, 1), jnp.zeros_like(state.length))
        return dataclasses.replace(state, successors=table, window=window)

    def propose(self, state: RoundState) -> Draft:
        """Chains in the first rows, the tree in those that they leave."""
        row = jnp.arange(self.num_drafts)
        tokens, starts_chain, num_looked_up = self._look_up(state)
        grown, tree_parents = self._grow(state)
        node = row - num_looked_up[:, None]
        in_tree = node >= 0
        node = jnp.maximum(node, 0)
        grown = jnp.take_along_axis(grown, node, axis=1)
        parents = jnp.asarray(tree_parents)[node]
        parents = jnp.where(parents < 0, -1, parents + num_looked_up[:, None])
        tokens = jnp.where(in_tree, grown, tokens)
        return Draft(
            tokens=jnp.maximum(tokens, 0),
            valid=tokens >= 0,
            source=jnp.where(in_tree, RECYCLED, LOOKUP).astype(jnp.int8),
            parents=jnp.where(in_tree, parents, jnp.where(starts_chain, -1, row - 1)),
        )

    def _look_up(self, state: RoundState) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Chains one after another: tokens `[B, R]`, which of them start one, and how many
        rows they take `[B]`."""
        starts, match_len = find_matches(state.tokens, state.length, LONGEST_MATCH, _NUM_MATCHES)
        wanted = jnp.minimum(draft_length(match_len), state.length[:, None] - starts)
        ends = jnp.minimum(jnp.cumsum(wanted, axis=1), int(_LOOKUP_SHARE * self.num_drafts))
        row = jnp.arange(self.num_drafts)
        chain = (row >= ends[..., None]).sum(axis=1)  # [B, R]
        chain = jnp.minimum(chain, _NUM_MATCHES - 1)
        first = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), chain, axis=1)
        at = jnp.take_along_axis(starts, chain, axis=1) + row - first
        at = jnp.minimum(at, state.tokens.shape[1] - 1)
        return jnp.take_along_axis(state.tokens, at, axis=1), row == first, ends[:, -1]

    def _grow(self, state: RoundState) -> tuple[jax.Array, np.ndarray]:
        """The tree under the last token: tokens `[B, R]`, NO_TOKEN where the table knows none,
        and parents `[R]`."""
        parents, ranks = rank_tree(self.num_drafts, RANK_PROBABILITIES)
        table, _ = _memory(state)
        row = jnp.arange(len(table))[:, None]
        # Entry 0 is the last token, entry 1 + i node i.
        tokens = jnp.pad(state.last_token[:, None], ((0, 0), (0, self.num_drafts)))
        for _ in range(_depth(parents)):
            before = tokens[:, parents + 1]
            grown = table[row, jnp.maximum(before, 0), ranks]
            grown = jnp.where(before >= 0, grown, NO_TOKEN)
            tokens = jnp.concatenate([tokens[:, :1], grown], axis=1)
        return tokens[:, 1:], parents

    def read(self, logits: jax.Array, num_columns: int) -> jax.Array:
        """The likeliest successors `[B, Q, K]`: of the ordinary row, drafts and columns."""
        return top_tokens(logits, self.num_successors)

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: jax.Array
    ) -> RoundState:
        """Records the successors of every computed row, and moves a computed window on.

        Of several rows with one token the shallowest draft counts, the window's rows last.
        """
        table, window = _memory(before)
        active, num_drafts = ~before.done, draft.tokens.shape[1]
        num_rows = reading.shape[1]
        num_columns = num_rows - 1 - num_drafts  # 0 in a round without the window
        columns = window.tokens[:, 0].at[:, 0].set(before.last_token)[:, :num_columns]
        tokens = jnp.concatenate([before.last_token[:, None], draft.tokens, columns], axis=1)
        depth = ancestry(draft.parents).sum(axis=2, dtype=jnp.int32)
        depth = jnp.pad(depth, ((0, 0), (1, 0)))
        depth = jnp.pad(depth, ((0, 0), (0, num_columns)), constant_values=num_drafts + 1)
        priority = (num_rows - depth) * num_rows + num_rows - 1 - jnp.arange(num_rows)
        valid = jnp.pad(draft.valid, ((0, 0), (1, num_columns)), constant_values=True)
        if num_columns:
            window = advance(window, reading[:, 1 + num_drafts :, 0], active)
        return dataclasses.replace(
            after,
            successors=record(table, tokens, reading, priority, valid & active[:, None]),
            window=window,
        )

    def next_tokens(self, state: RoundState) -> jax.Array:
        """What the memory holds for the next token `[B, K]`, NO_TOKEN where it knows fewer."""
        table, _ = _memory(state)
        return table[jnp.arange(len(table)), state.last_token]


def _memory(state: RoundState) -> tuple[jax.Array, Window]:
    assert state.successors is not None and state.window is not None, "start() fills them"
    return state.successors, state.window


def _depth(parents: np.ndarray) -> int:
    """Nodes on the longest path; parents stand before children."""
    depth = np.zeros(len(parents) + 1, int)  # of entry -1, the root, too
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    return int(depth.max())
