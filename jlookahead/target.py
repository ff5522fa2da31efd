"""The target's choice of a token, given what it has emitted so far: processors, then the draw."""

from __future__ import annotations

import jax

from jlookahead.buffers import write_rows
from jlookahead.processors import Context, process
from jlookahead.sampling import select
from jlookahead.sharding import gather_vocabulary
from jlookahead.state import Draft, RoundState


def choose(
    state: RoundState,
    draft: Draft,
    logits: jax.Array,
    emitted: jax.Array,
    depth: jax.Array,
    eligible: jax.Array,
) -> jax.Array:
    """Chooses the token behind `depth` tokens that this round has emitted already.

    Processors see the very context that plain decoding would give them: the committed tokens
    and those emitted ones.

    Args:
        state: what the round started from.
        draft: the drafts that are being verified.
        logits: `[B, V]` float32, of the last emitted token's row.
        emitted: `[B, M]` int32, the first `depth` of them emitted.
        depth: `[]` int32.
        eligible: `[B, R]` bool, drafts that may follow; the residual scheme tests these.

    Returns:
        `[B]` int32.
    """
    if state.sampler is not None:
        logits = gather_vocabulary(logits)
    if state.processors:
        tokens = write_rows(state.tokens, emitted, state.length)
        context = Context(tokens, state.length + depth, state.prompt_len)
        logits = process(state.processors, logits, context)
    return select(state.sampler, logits, state.length + depth, draft.tokens, eligible)
