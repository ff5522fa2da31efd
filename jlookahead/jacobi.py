"""Jacobi decoding: fixed-point iteration over a block of tokens, the baseline of the family.

A sweep computes every position of the block from the last sweep's tokens before it. Three
conditions end different things and are kept apart. The *accepted prefix*, the tokens that the
sweep confirmed and the one it corrected, is emitted at once, and the sweeps go on over the
rest. The block is *converged* when no position of it is left; a new block then begins. The
*budget*, like an EOS, ends the row, wherever the block stands. Every sweep fixes at least one
position, so a block of m tokens takes at most m sweeps.

Source: Santilli et al., Accelerating Transformer Inference for Translation via Parallel
Decoding (arXiv 2305.10427), algorithms 1 and 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jlookahead.checks import check_int
from jlookahead.forest import chain_parents
from jlookahead.layout import Layout, build_layout
from jlookahead.state import SWEEP, Block, Draft, PromptRead, RoundState
from jlookahead.vocabulary import top_token


@dataclasses.dataclass(frozen=True)
class Jacobi:
    """Knobs of Jacobi decoding; they can change the number of rounds, never the text.

    Attributes:
        block: tokens m that are iterated over together.
    """

    block: int = 16

    def __post_init__(self) -> None:
        check_int("block", self.block, 1, 256)

    @property
    def layout(self) -> Layout:
        return build_layout(num_drafts=self.block, max_accepted=self.block)

    @property
    def num_successors(self) -> int:
        return 0

    def start(self, state: RoundState, prompt: PromptRead) -> RoundState:
        return dataclasses.replace(state, block=self._new_block(state))

    def _new_block(self, state: RoundState) -> Block:
        """Starts from the last m tokens of the text, which is right where it repeats itself."""
        index = state.length[:, None] - self.block + jnp.arange(self.block)
        return Block(
            tokens=jnp.take_along_axis(state.tokens, jnp.maximum(index, 0), axis=1),
            remaining=jnp.full_like(state.length, self.block),
            num_sweeps=jnp.zeros_like(state.length),
        )

    def propose(self, state: RoundState) -> Draft:
        block = _block_of(state)
        shape = block.tokens.shape
        return Draft(
            tokens=block.tokens,
            valid=jnp.arange(self.block) < block.remaining[:, None],
            source=jnp.full(shape, SWEEP, jnp.int8),
            parents=jnp.broadcast_to(chain_parents(1, self.block), shape),
        )

    def read(self, logits: jax.Array, num_columns: int) -> jax.Array:
        """The next sweep `[B, 1 + m]`: what the target holds likeliest after every row."""
        return top_token(logits)

    def observe(
        self, before: RoundState, after: RoundState, draft: Draft, reading: jax.Array
    ) -> RoundState:
        block = _block_of(before)
        num_emitted = after.length - before.length
        index = num_emitted[:, None] + jnp.arange(self.block)
        swept = Block(
            tokens=jnp.take_along_axis(reading, jnp.minimum(index, self.block), axis=1),
            remaining=block.remaining - num_emitted,
            num_sweeps=block.num_sweeps + 1,
        )
        converged, active = swept.remaining <= 0, ~before.done

        def update(fresh, swept, old):
            shape = (-1,) + (1,) * (old.ndim - 1)
            new = jnp.where(converged.reshape(shape), fresh, swept)
            return jnp.where(active.reshape(shape), new, old)

        updated = jax.tree.map(update, self._new_block(after), swept, block)
        return dataclasses.replace(after, block=updated)


def _block_of(state: RoundState) -> Block:
    assert state.block is not None, "start() fills it"
    return state.block
