"""The state a round maps to the next state, and the report of what the round did."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlookahead.model import KVCache
from jlookahead.ngram_pool import NgramPool
from jlookahead.processors import Processor
from jlookahead.sampling import Sampler
from jlookahead.stopping import StopStrings
from jlookahead.window import Window

# Why a row stopped, by code; code 0 is a row that still runs.
RUNNING, EOS, STOP, LENGTH, CACHE_FULL = range(5)
FINISH_REASONS = (None, "eos", "stop", "length", "cache_full")

# Where an emitted token came from, by code: the target's own token where no draft was accepted
# (`plain`) and behind accepted drafts (`bonus`); drafts from the n-gram pool, from prompt
# lookup, from the table of recycled successors, from the last Jacobi sweep.
PLAIN, BONUS, POOL, LOOKUP, RECYCLED, SWEEP = range(6)
SOURCES = ("plain", "bonus", "pool", "lookup", "recycled", "sweep")
OWN_SOURCES = ("plain", "bonus")  # the model's own tokens, not drafts


@flax.struct.dataclass
class Block:
    """The tokens that Jacobi iteration has yet to fix, as the last sweep predicts them."""

    tokens: jax.Array  # [B, m] int32, for the positions behind the last emitted token
    remaining: jax.Array  # [B] int32, how many of them belong to the block, 1..m
    num_sweeps: jax.Array  # [B] int32, sweeps this block has had


@flax.struct.dataclass
class MatchRecord:
    """How often drafts of each class were right, see `acceptance.py`; the youngest count most."""

    right: jax.Array  # [B, C] float32
    total: jax.Array  # [B, C] float32
    held: jax.Array | None  # [B, K] int32, what wide rounds know as next tokens, NO_TOKEN for none


@flax.struct.dataclass
class RoundState:
    """Everything a generation carries from round to round, per batch row where it can differ.

    After every round `length - 1` tokens have committed K/V: the last one is the ordinary
    row of the next round. Where devices refeed what they accepted, the tokens accepted last have
    none yet. Shapes: B batch rows, T token and cache slots.
    """

    # evolving
    tokens: jax.Array  # [B, T] int32, prompt, output, then pad ids
    source: jax.Array  # [B, T] int8, source code of every emitted token
    length: jax.Array  # [B] int32, tokens committed, prompt included
    finish: jax.Array  # [B] int32, finish code
    cache: KVCache
    num_pending: jax.Array | None  # [B] int32, accepted tokens to be refed; None if K/V are kept
    logprobs: jax.Array | None  # [B, T] float32, of every emitted token; None if not wanted
    # memory of the proposer; None where the strategy has none
    window: Window | None
    pool: NgramPool | None
    successors: jax.Array | None  # [B, V, K] int32, see `recycling.py`
    block: Block | None
    matches: MatchRecord | None
    # constant through a call
    prompt_len: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, length at which the row stops
    limit_reason: jax.Array  # [B] int32, finish code of reaching it
    eos_ids: jax.Array  # [E] int32, padded with -1
    pad_id: jax.Array  # [] int32
    sampler: Sampler | None  # None is greedy
    processors: tuple[Processor, ...]
    stop: StopStrings | None
    # counters
    num_rounds: jax.Array  # [B] int32

    @property
    def done(self) -> jax.Array:
        """`[B]` bool."""
        return self.finish != RUNNING

    @property
    def num_committed(self) -> jax.Array:
        """`[B]` int32, tokens with committed K/V."""
        return self.length - 1 - (0 if self.num_pending is None else self.num_pending)

    @property
    def last_token(self) -> jax.Array:
        """`[B]` int32, the ordinary row's token."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]

    @property
    def stage(self) -> jax.Array:
        """`[B]` int32, fill stage of the window; 0 without one."""
        return jnp.zeros_like(self.length) if self.window is None else self.window.stage


@flax.struct.dataclass
class PromptRead:
    """What a strategy learns its memory from before the first round, beside the state."""

    num_reused: jax.Array  # [] int32, leading prompt tokens an earlier generation had committed
    successors: jax.Array | None  # [B, T, K] int32, likeliest successors of every prompt token
    vocab_size: int = flax.struct.field(pytree_node=False)
    initial_window: jax.Array | None  # [W + N - 3] int32, seeds of level 0 in reference mode


@flax.struct.dataclass
class Draft:
    """Draft tokens on a forest, see `forest.py`. Shapes: R draft rows."""

    tokens: jax.Array  # [B, R] int32
    valid: jax.Array  # [B, R] bool
    source: jax.Array  # [B, R] int8, source code
    parents: jax.Array  # [B, R] int32, the draft before, -1 for children of the ordinary row
    # [B, R] bool, rows that the round computes, valid or not; None where those are the valid ones
    wanted: jax.Array | None = None


@flax.struct.dataclass
class RoundInfo:
    """What one round did. Rows that were already done report zero tokens and rounds.

    M is the most a round can emit: the accepted drafts and the target's own token.
    """

    num_emitted: jax.Array  # [B] int32, 0..M
    emitted: jax.Array  # [B, M] int32, pad ids beyond `num_emitted`
    source: jax.Array  # [B, M] int8, source code of every emitted token
    num_accepted: jax.Array  # [B] int32, accepted length: emitted tokens beyond the first
    num_candidates: jax.Array  # [B] int32, draft sequences that were verified
    draft: Draft
    winner: jax.Array  # [B] int32, draft row accepted last, -1 if none

    def candidates(self, row: int = 0) -> list[list[int]]:
        """The draft sequences one batch row verified, root to leaf, in order (on the host)."""
        tokens, valid = np.asarray(self.draft.tokens)[row], np.asarray(self.draft.valid)[row]
        parents = np.asarray(self.draft.parents)[row].tolist()
        extended = {p for p, ok in zip(parents, valid, strict=True) if ok}
        sequences = []
        for leaf in range(len(tokens)):
            if not valid[leaf] or leaf in extended:
                continue
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            sequences.append(tokens[path[::-1]].tolist())
        return sequences
