"""Auditing a text: what plain decoding would choose at every place of it, and how clearly.

The ids are teacher-forced: every choice is made behind the ids that are given, so that one
divergence does not make the rest of the text diverge. This tells a wrong token from a near tie,
which rows computed together may break in another way than a row alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jlookahead.attention import PREFIX_CHUNK
from jlookahead.call import CallArrays, bucket, prepare, resolve_model
from jlookahead.config import Config, Sampling
from jlookahead.model import Params, TargetModel
from jlookahead.processors import Context, process
from jlookahead.prompts import Prompt, to_rows
from jlookahead.sampling import select
from jlookahead.sharding import replicate
from jlookahead.strategy import Autoregressive
from jlookahead.vocabulary import top_token

# Rows computed at once, logits included; divides every capacity.
_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `audit` finds: lists with one entry per audited token.

    Attributes:
        tokens: the ids that were audited.
        choices: the ids that plain decoding would choose, each behind prompt and `tokens` before.
        margins: by how much the highest logit leads the second, after processors, before
            temperature and filters. A greedy choice with a margin near 0 is a near tie. Infinite
            where only one token is allowed.
        logprobs: of `tokens` under the model's own law, as in `Result`.
    """

    tokens: list[int]
    choices: list[int]
    margins: list[float]
    logprobs: list[float]

    @property
    def is_choice(self) -> list[bool]:
        """Which tokens are plain decoding's choice."""
        return [a == b for a, b in zip(self.tokens, self.choices, strict=True)]

    @property
    def first_divergence(self) -> int | None:
        """Index of the first token that is not; None if all are."""
        return next((i for i, same in enumerate(self.is_choice) if not same), None)


def audit(
    params: Params,
    prompt: Prompt,
    tokens: Sequence[int],
    cfg: Config,
    *,
    tokenizer: Any = None,
    row_id: int = 0,
    model: TargetModel | None = None,
) -> Audit:
    """Compares generated ids with plain decoding's choices, token by token.

    Where a text ends is not judged: `cfg`'s budget, EOS ids and stop strings play no part.

    Args:
        params: the model's parameters.
        prompt: one prompt, see `generate`.
        tokens: `[n]` ids that are said to follow it.
        cfg: what they were generated with; its strategy does not matter.
        tokenizer: encodes text prompts.
        row_id: the id that keyed their sampling, see `generate`.
        model: another network in place of the LLaMA of `cfg.model`.

    Raises:
        ValueError: as `generate` does; tokens that are no ids `[n]` of the vocabulary or too
            many for the model's context; residual sampling, where no choice is the only one.
    """
    model = resolve_model(params, cfg, model)
    check_sampling(cfg.sampling)
    rows, is_batch = to_rows(prompt, tokenizer, model.vocab_size)
    if is_batch:
        raise ValueError(f"prompt: got a batch of {len(rows)} rows, audit takes one prompt")
    given = _check_tokens(tokens, model.vocab_size)
    text = np.concatenate([rows[0], given])
    if len(text) > model.max_position_embeddings:
        raise ValueError(
            f"tokens: got {len(given)} ids after a prompt of {len(rows[0])} tokens, allowed are "
            f"{model.max_position_embeddings} together (the model's context)"
        )
    # Of the call only the target's law matters: processors, sampling and EOS ids.
    min_new_tokens = min(cfg.min_new_tokens, model.max_position_embeddings - len(rows[0]))
    law = dataclasses.replace(
        cfg,
        strategy=Autoregressive(),
        min_new_tokens=min_new_tokens,
        max_new_tokens=min_new_tokens,
        stop_strings=(),
        cache_len=None,
    )
    call = prepare(params, rows[0], law, row_ids=[row_id], model=model)
    if not len(given):
        return Audit([], [], [], [])
    padded = np.zeros((1, bucket(len(text), PREFIX_CHUNK)), np.int32)
    padded[0, : len(text)] = text
    ids, length = jax.device_put((padded, np.int32(len(text))))
    judged = jax.device_get(_judge(model, call.mesh, params, ids, length, call.arrays))
    new = slice(len(rows[0]), len(text))
    return Audit(
        tokens=given.tolist(),
        choices=judged.choices[new].tolist(),
        margins=judged.margins[new].tolist(),
        logprobs=judged.logprobs[new].tolist(),
    )


def check_sampling(sampling: Sampling) -> None:
    """Raises `ValueError` for a sampling scheme that cannot be audited."""
    if sampling.temperature > 0 and sampling.verify == "residual":
        raise ValueError(
            "verify: got 'residual', whose text depends on the drafts; audits need 'coupled'"
        )


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(tokens)
    if ids.ndim == 1 and ids.size == 0:
        return ids.astype(np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"tokens: got shape {ids.shape} and dtype {ids.dtype}, allowed are integer ids [n]"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"tokens: got id {outside[0]}, allowed are 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


@flax.struct.dataclass
class _Judged:
    """Per slot of the text what is known of its token; garbage for prompt and padding."""

    choices: jax.Array  # [T] int32
    margins: jax.Array  # [T] float32
    logprobs: jax.Array  # [T] float32


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def _judge(
    model: TargetModel,
    mesh: Mesh | None,
    params: Params,
    text: jax.Array,
    length: jax.Array,
    arrays: CallArrays,
) -> _Judged:
    """One pass over `text [1, T]` in chunks, behind a cache; logits for a chunk at a time."""
    num_slots = text.shape[1]
    causal = jnp.tri(_CHUNK, dtype=bool)
    following = jnp.roll(text[0], -1)
    prompt_len = arrays.prompt_len[0]

    def read_chunk(index, carry):
        cache, judged = carry
        first = index * _CHUNK
        rows = first + jnp.arange(_CHUNK)
        tokens = lax.dynamic_slice_in_dim(text, first, _CHUNK, axis=1)
        hidden, new_kv = model.forward(params, tokens, rows[None], causal, cache, first[None])

        def judge(judged: _Judged) -> _Judged:
            logits = model.logits(params, hidden[0])
            found = _judge_rows(logits, text, rows, following[rows], arrays)
            # Row i chooses the token of slot i + 1; the last row of all has none to choose.
            return jax.tree.map(
                lambda slots, new: slots.at[rows + 1].set(new, mode="drop"), judged, found
            )

        has_new = first + _CHUNK >= prompt_len
        judged = lax.cond(has_new, judge, lambda judged: judged, judged)

        def write(slots, new):
            return lax.dynamic_update_slice_in_dim(slots, new, first, axis=2)

        return cache.updated(new_kv, write), judged

    judged = _Judged(
        choices=jnp.zeros(num_slots, jnp.int32),
        margins=jnp.zeros(num_slots, jnp.float32),
        logprobs=jnp.zeros(num_slots, jnp.float32),
    )
    carry = model.init_cache(1, num_slots), judged
    _, judged = lax.fori_loop(0, -(-(length - 1) // _CHUNK), read_chunk, carry)
    return replicate(judged, mesh)


def _judge_rows(
    logits: jax.Array, text: jax.Array, rows: jax.Array, given: jax.Array, arrays: CallArrays
) -> _Judged:
    """Judges the tokens `given [M]` behind `rows [M]` of the text, from `logits [M, V]`."""
    all_logprobs = jax.nn.log_softmax(logits, axis=-1)
    logprobs = jnp.take_along_axis(all_logprobs, given[:, None], axis=1)[:, 0]
    context = Context(
        tokens=jnp.broadcast_to(text, (len(rows), text.shape[1])),
        length=rows + 1,
        prompt_len=jnp.broadcast_to(arrays.prompt_len, rows.shape),
    )
    logits = process(arrays.processors, logits, context)
    sampler = arrays.sampler
    if sampler is not None:
        row_ids = jnp.broadcast_to(sampler.row_ids, rows.shape)
        sampler = dataclasses.replace(sampler, row_ids=row_ids)
    no_drafts = jnp.zeros((len(rows), 0), jnp.int32)
    choices = select(sampler, logits, rows + 1, no_drafts, no_drafts.astype(bool))
    best = top_token(logits)[..., None]
    others = jnp.where(jnp.arange(logits.shape[-1]) == best, -jnp.inf, logits)
    margins = logits.max(axis=-1) - others.max(axis=-1)
    return _Judged(choices, margins, logprobs)
