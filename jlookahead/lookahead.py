"""Lookahead Decoding: drafts are n-grams harvested from the Jacobi trajectory window.

By default prompt lookup shares the draft rows: what followed an earlier match of the current
suffix takes the first of the G chains, linked into one, and the pool's n-grams the others.

Source: Fu et al. (arXiv 2402.02057); `reference=True` follows the official implementation,
`jacobi_greedy_search_multilevel` in `lade/decoding.py`, step for step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jlookahead import ngram_pool
from jlookahead.checks import check_bool, check_int
from jlookahead.forest import chain_parents
from jlookahead.layout import Layout, build_layout
from jlookahead.sharding import largest_anywhere
from jlookahead.state import LOOKUP, POOL, Draft, PromptRead, RoundState
from jlookahead.suffix_match import (
    LONGEST_DRAFT,
    LONGEST_MATCH,
    continuations,
    draft_length,
    find_matches,
)
from jlookahead.vocabulary import NO_TOKEN, top_token
from jlookahead.window import Window, advance, spread_over_prompt, trajectory_ngrams

# Prompt n-grams inserted at once; the insertion compares all pairs of them.
_PROMPT_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Knobs of Lookahead Decoding; they can change the number of rounds, never the text.

    Attributes:
        window: columns W of the trajectory window, at least 1.
        ngram: n-gram size N, at least 2: a key and N-1 draft tokens.
        candidates: n-grams G stored per key and verified per round, at least 1.
        prompt_pool: whether the prompt and the emitted text feed the pool beside the
            trajectory.
        prompt_lookup: whether what followed the last occurrence of the current suffix is
            drafted too, first, in one candidate or up to 80% of them.
        pool_capacity: keys the pool can hold per batch row; 4 (G (N-1) + 3) bytes each.
        reference: reproduce the official implementation: the window warms up over N-2
            rounds from W+N-3 seeds, a full match earns no bonus token, and prompt lookup has
            no part in it.
    """

    window: int = 15
    ngram: int = 5
    candidates: int = 15
    prompt_pool: bool = True
    prompt_lookup: bool = True
    pool_capacity: int = 4096
    reference: bool = False

    def __post_init__(self) -> None:
        check_int("window", self.window, 1, 256)
        # The official code has no verification at N = 2.
        check_int("ngram", self.ngram, 3 if self.reference else 2, 32)
        check_int("candidates", self.candidates, 1, 256)
        check_int("pool_capacity", self.pool_capacity, 1, 1 << 20)
        for name in ("prompt_pool", "prompt_lookup", "reference"):
            check_bool(name, getattr(self, name))

    @property
    def max_linked(self) -> int:
        """Chains that prompt lookup may link into one; 0 if it is off."""
        if self.reference or not self.prompt_lookup:
            return 0
        wanted = -(-LONGEST_DRAFT // (self.ngram - 1))
        return max(1, min(wanted, self.candidates * 4 // 5))

    @property
    def layout(self) -> Layout:
        size = self.ngram - 1
        longest = max(1, self.max_linked) * size
        return build_layout(
            window=self.window,
            ngram=self.ngram,
            num_drafts=self.candidates * size,
            max_accepted=longest - 1 if self.reference else longest,
            warm_up=self.reference,
            chain_len=size,
        )

    @property
    def num_seeds(self) -> int:
        """Tokens of `initial_window` in reference mode: W+N-3."""
        return self.window + self.ngram - 3

    @property
    def num_successors(self) -> int:
        return 0

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        """Seeds the window from the prompt and fills the pool with the prompt's n-grams."""
        batch, pool, num_known = state.tokens.shape[0], state.pool, prompt.num_reused
        if pool is None:
            pool = ngram_pool.init_pool(batch, self.pool_capacity, self.candidates, self.ngram)
            num_known = jnp.int32(0)
        if self.prompt_pool:
            pool = self._insert_prompt(pool, state, num_known)
        window = self._seed(state, prompt.initial_window)
        return dataclasses.replace(state, window=window, pool=pool)

    def _seed(self, state: RoundState, initial_window: jax.Array | None) -> Window:
        batch, num_levels = state.tokens.shape[0], self.ngram - 1
        num_columns = self.window + self.ngram - 2
        levels = jnp.zeros((batch, num_levels, num_columns), jnp.int32)

        def seeds(num_starts, run):
            return spread_over_prompt(
                state.tokens, state.prompt_len, state.eos_ids, num_starts, run
            )

        if not self.reference:
            runs = seeds(self.window, num_levels)
            levels = levels.at[:, :, : self.window].set(runs.transpose(0, 2, 1))
            return Window(levels, jnp.full(batch, num_levels - 1, jnp.int32))
        if initial_window is None:
            initial_window = seeds(self.num_seeds, 1)[..., 0]
        levels = levels.at[:, 0, 1:].set(initial_window)
        return Window(levels, jnp.zeros(batch, jnp.int32))

    def _insert_prompt(
        self, pool: ngram_pool.NgramPool, state: RoundState, num_known: jax.Array
    ) -> ngram_pool.NgramPool:
        """Inserts the prompt's n-grams that end at or after token `num_known`."""
        first = jnp.maximum(num_known, self.ngram - 1)

        def insert_block(block, pool):
            last = first + block * _PROMPT_BLOCK + jnp.arange(_PROMPT_BLOCK)
            return ngram_pool.insert(pool, *self._text_ngrams(state, last, state.prompt_len))

        num_ngrams = jnp.maximum(largest_anywhere(state.prompt_len.max()) - first, 0)
        return lax.fori_loop(0, -(-num_ngrams // _PROMPT_BLOCK), insert_block, pool)

    def _text_ngrams(self, state: RoundState, last: jax.Array, end: jax.Array):
        """N-grams whose last token stands at index `last`, `[M]` or `[B, M]`, before `end [B]`."""
        first = jnp.broadcast_to(last, (state.tokens.shape[0], last.shape[-1])) - self.ngram + 1
        ngrams, exists = continuations(state.tokens, end, jnp.maximum(first, 0), self.ngram)
        return ngrams[..., 0], ngrams[..., 1:], exists[..., -1] & (first >= 0)

    def propose(self, state: RoundState) -> Draft:
        trajectory, pool = _memory(state)
        suffixes, count = ngram_pool.find(pool, state.last_token)
        batch, num_chains, size = suffixes.shape
        chain = jnp.arange(num_chains)
        parents = jnp.broadcast_to(chain_parents(num_chains, size), (batch, num_chains * size))
        if self.reference:
            # The official code does not verify before the window is full.
            is_steady = trajectory.stage == self.ngram - 2
            filled = chain < jnp.where(is_steady, count, 0)[:, None]
            return Draft(
                tokens=suffixes.reshape(batch, -1),
                valid=jnp.repeat(filled, size, axis=1),
                source=jnp.full(parents.shape, POOL, jnp.int8),
                parents=parents,
            )
        tokens, exists, num_linked = self._look_up(state)
        # The most recent n-grams take the chains that lookup leaves, less the one that it found.
        is_found = (suffixes == tokens[:, None, :size]).all(axis=2) & exists[:, size - 1 : size]
        stays = (chain < count[:, None]) & ~is_found
        newest_first = jnp.argsort(jnp.where(stays, -chain, 1), axis=1)
        recency = chain - num_linked[:, None]
        newest = jnp.take_along_axis(newest_first, jnp.maximum(recency, 0), axis=1)
        suffixes = jnp.take_along_axis(suffixes, newest[..., None], axis=1)
        filled = (recency >= 0) & (recency < stays.sum(axis=1, keepdims=True))
        is_linked = jnp.repeat(recency < 0, size, axis=1)
        return Draft(
            tokens=jnp.where(is_linked, tokens, suffixes.reshape(batch, -1)),
            valid=jnp.where(is_linked, exists, jnp.repeat(filled, size, axis=1)),
            source=jnp.where(is_linked, LOOKUP, POOL).astype(jnp.int8),
            parents=jnp.where(is_linked, jnp.arange(num_chains * size) - 1, parents),
        )

    def _look_up(self, state: RoundState) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Prompt lookup: ids and which exist, `[B, R]`, and the chains they take, `[B]`."""
        size = self.ngram - 1
        num_rows, num_linked = self.candidates * size, jnp.zeros_like(state.length)
        if not self.max_linked:
            nothing = jnp.zeros((len(num_linked), num_rows), jnp.int32)
            return nothing, nothing.astype(bool), num_linked
        starts, match_len = find_matches(state.tokens, state.length, LONGEST_MATCH, 1)
        tokens, exists = continuations(state.tokens, state.length, starts, num_rows)
        wanted = draft_length(match_len)
        # A chain's rows are there, whether a part of them is wanted or all.
        num_linked = jnp.minimum(-(-wanted[:, 0] // size), self.max_linked)
        exists = exists[:, 0] & (jnp.arange(num_rows) < size * num_linked[:, None])
        return tokens[:, 0], exists, num_linked

    def read(self, logits: jax.Array, num_columns: int) -> jax.Array | None:
        """The window's new deepest level `[B, J]`; None in a round without the window."""
        return top_token(logits[:, logits.shape[1] - num_columns :]) if num_columns else None

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: jax.Array | None
    ) -> RoundState:
        active = ~before.done
        trajectory, pool = _memory(before)
        sources, max_emitted = [], draft.tokens.shape[1] + 1
        if reading is not None:
            max_emitted = self.layout.max_emitted
            sources.append(trajectory_ngrams(trajectory, before.last_token, reading, self.window))
            trajectory = advance(trajectory, reading, active)
        if self.prompt_pool:
            emitted = before.length[:, None] + jnp.arange(max_emitted)
            sources.append(self._text_ngrams(after, emitted, _length_without_eos(after)))
        if sources:
            keys, suffixes, valid = (
                jnp.concatenate(parts, axis=1) for parts in zip(*sources, strict=True)
            )
            pool = ngram_pool.insert(pool, keys, suffixes, valid & active[:, None])
        return dataclasses.replace(after, window=trajectory, pool=pool)

    def next_tokens(self, state: RoundState) -> jax.Array:
        """What the memory holds for the next token `[B, G]`, NO_TOKEN where it knows fewer."""
        _, pool = _memory(state)
        suffixes, count = ngram_pool.find(pool, state.last_token)
        is_filled = jnp.arange(self.candidates) < count[:, None]
        return jnp.where(is_filled, suffixes[..., 0], NO_TOKEN)


def _memory(state: RoundState) -> tuple[Window, ngram_pool.NgramPool]:
    assert state.window is not None and state.pool is not None, "start() fills them"
    return state.window, state.pool


def _length_without_eos(state: RoundState) -> jax.Array:
    """`[B]` committed tokens, less a final EOS: what follows a text teaches nothing about it."""
    return state.length - jnp.isin(state.last_token, state.eos_ids)
