"""Lookahead Decoding: drafts are n-grams harvested from the Jacobi trajectory window.

Source: Fu et al. (arXiv 2402.02057); `reference=True` follows the official implementation,
`jacobi_greedy_search_multilevel` in `lade/decoding.py`, step for step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jlookahead import ngram_pool
from jlookahead.checks import check_int
from jlookahead.layout import Layout, build_layout, chain_parents
from jlookahead.state import FROM_NGRAM, Draft, RoundState
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
        pool_capacity: keys the pool can hold per batch row; 4 (G (N-1) + 3) bytes each.
        reference: reproduce the official implementation: the window warms up over N-2
            rounds from W+N-3 seeds and a full match earns no bonus token.
    """

    window: int = 15
    ngram: int = 5
    candidates: int = 15
    prompt_pool: bool = True
    pool_capacity: int = 4096
    reference: bool = False

    def __post_init__(self) -> None:
        check_int("window", self.window, 1, 256)
        # The official code has no verification at N = 2.
        check_int("ngram", self.ngram, 3 if self.reference else 2, 32)
        check_int("candidates", self.candidates, 1, 256)
        check_int("pool_capacity", self.pool_capacity, 1, 1 << 20)

    @property
    def layout(self) -> Layout:
        size = self.ngram - 1
        return build_layout(
            window=self.window,
            ngram=self.ngram,
            parents=chain_parents(self.candidates, size),
            warm_up=self.reference,
            max_accepted=size - 1 if self.reference else size,
        )

    @property
    def num_seeds(self) -> int:
        """Tokens of `initial_window` in reference mode: W+N-3."""
        return self.window + self.ngram - 3

    def start(self, state: RoundState, initial_window: jax.Array | None) -> RoundState:
        """Seeds the window from the prompt and fills the pool with the prompt's n-grams."""
        batch = state.tokens.shape[0]
        pool = ngram_pool.init_pool(batch, self.pool_capacity, self.candidates, self.ngram)
        if self.prompt_pool:
            pool = self._insert_prompt(pool, state)
        return dataclasses.replace(state, window=self._seed(state, initial_window), pool=pool)

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

    def _insert_prompt(self, pool: ngram_pool.NgramPool, state: RoundState) -> ngram_pool.NgramPool:
        def insert_block(block, pool):
            last = self.ngram - 1 + block * _PROMPT_BLOCK + jnp.arange(_PROMPT_BLOCK)
            return ngram_pool.insert(pool, *self._text_ngrams(state, last, state.prompt_len))

        num_ngrams = jnp.maximum(state.prompt_len.max() - self.ngram + 1, 0)
        return lax.fori_loop(0, -(-num_ngrams // _PROMPT_BLOCK), insert_block, pool)

    def _text_ngrams(self, state: RoundState, last: jax.Array, end: jax.Array):
        """N-grams whose last token stands at index `last`, `[M]` or `[B, M]`, before `end [B]`."""
        first = jnp.broadcast_to(last, (state.tokens.shape[0], last.shape[-1])) - self.ngram + 1
        valid = (first >= 0) & (first + self.ngram <= end[:, None])
        index = jnp.maximum(first, 0)[..., None] + jnp.arange(self.ngram)
        index = jnp.minimum(index, state.tokens.shape[1] - 1)
        flat = index.reshape(index.shape[0], -1)
        ngrams = jnp.take_along_axis(state.tokens, flat, axis=1).reshape(index.shape)
        return ngrams[..., 0], ngrams[..., 1:], valid

    def propose(self, state: RoundState) -> Draft:
        trajectory, pool = _memory(state)
        suffixes, count = ngram_pool.find(pool, state.last_token)
        if self.reference:
            # The official code does not verify before the window is full.
            is_steady = trajectory.stage == self.ngram - 2
            count = jnp.where(is_steady, count, 0)
        filled = jnp.arange(self.candidates) < count[:, None]
        valid = jnp.repeat(filled, self.ngram - 1, axis=1)
        return Draft(
            tokens=suffixes.reshape(valid.shape),
            valid=valid,
            sources=jnp.full(valid.shape, FROM_NGRAM, jnp.int8),
        )

    def observe(
        self, before: RoundState, after: RoundState, jacobi_logits: jax.Array
    ) -> RoundState:
        active = ~before.done
        trajectory, pool = _memory(before)
        predicted = jnp.argmax(jacobi_logits, axis=-1).astype(jnp.int32)
        keys, suffixes, valid = trajectory_ngrams(
            trajectory, before.last_token, predicted, self.window
        )
        if self.prompt_pool:
            emitted = before.length[:, None] + jnp.arange(self.layout.max_emitted)
            text = self._text_ngrams(after, emitted, _length_without_eos(after))
            parts = zip((keys, suffixes, valid), text, strict=True)
            keys, suffixes, valid = (jnp.concatenate(pair, axis=1) for pair in parts)
        return dataclasses.replace(
            after,
            window=advance(trajectory, predicted, active),
            pool=ngram_pool.insert(pool, keys, suffixes, valid & active[:, None]),
        )


def _memory(state: RoundState) -> tuple[Window, ngram_pool.NgramPool]:
    assert state.window is not None and state.pool is not None, "start() fills them"
    return state.window, state.pool


def _length_without_eos(state: RoundState) -> jax.Array:
    """`[B]` committed tokens, less a final EOS: what follows a text teaches nothing about it."""
    return state.length - jnp.isin(state.last_token, state.eos_ids)
