"""The entry points: prefill, and rounds in one loop on the device.

Two programs per call shape are compiled: `_start` (prefill, proposer memory) and
`run_rounds` (one `lax.while_loop` over rounds, with the state donated).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlookahead.call import Call, CallArrays, check_initial_window, prepare
from jlookahead.config import Config
from jlookahead.model import KVCache, Params, TargetModel
from jlookahead.prompts import Prompt
from jlookahead.rounds import decode_round
from jlookahead.state import FINISH_REASONS, RUNNING, SOURCES, RoundInfo, RoundState
from jlookahead.strategy import Strategy

PREFILL_CHUNK = 512
_NO_ROUND_LIMIT = np.int32(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate` returns. For a batch every field is a list with one entry per row.

    Attributes:
        tokens: the new ids, EOS included, prompt excluded.
        text: their decoded text without special tokens; None without a tokenizer.
        num_rounds: forward passes it took, prefill not counted.
        tokens_per_round: new tokens per round; 0 if there was no round.
        finish_reason: `eos`, `length` or `cache_full`.
        sources: where each token came from, `model`, `ngram` (the pool) or `prompt` (lookup).
    """

    tokens: Any
    text: Any
    num_rounds: Any
    tokens_per_round: Any
    finish_reason: Any
    sources: Any


def generate(
    params: Params,
    prompt: Prompt,
    cfg: Config,
    *,
    tokenizer: Any = None,
    row_ids: Sequence[int] | None = None,
    model: TargetModel | None = None,
) -> Result:
    """Generates with exactly the output of plain decoding.

    Args:
        params: the model's parameters.
        prompt: ids `[T]`, a list of ids, or a ragged list of those for a batch; with a
            tokenizer also a string, a list of strings, or chat messages.
        cfg: what to do.
        tokenizer: encodes text prompts and fills `Result.text`.
        row_ids: `B` ids that key each row's sampling, 0..B-1 by default: a prompt draws the
            same text in any batch slot if it keeps its id.
        model: another network in place of the LLaMA of `cfg.model`.

    Raises:
        ValueError: before anything compiles, naming the field, the value, what is allowed.
    """
    call = prepare(params, prompt, cfg, tokenizer, row_ids, model)
    state = start(call, params)
    unlimited = jax.device_put(_NO_ROUND_LIMIT)
    _, progress = run_rounds(call.model, cfg.strategy, params, state, unlimited)
    return _collect(progress, call, tokenizer)


def iter_rounds(
    params: Params,
    prompt: Prompt,
    cfg: Config,
    initial_window: Sequence[int] | None = None,
    *,
    tokenizer: Any = None,
    row_ids: Sequence[int] | None = None,
    model: TargetModel | None = None,
) -> Iterator[tuple[RoundState, RoundInfo]]:
    """Yields `(state, info)` after every round, for inspection; much slower than `generate`.

    What to read, `row` being the batch row:

    - `info.num_emitted[row]` and `info.emitted[row, :num_emitted]`: the round's tokens.
    - `info.num_accepted[row]`: the accepted length, that is, the tokens beyond the one that any
      forward pass gives; what a stop condition cut off does not count.
    - `info.candidates(row)`: the draft sequences it verified, in order.
    - `state.window.levels(row)`: the trajectory levels *after* the round, that is, those the
      next round feeds; level 0 first, without the ordinary token.
    - `state.pool.lookup(token, row)`, `state.pool.as_dict(row)`: the pool after the round.
    - `state.tokens[row, :state.length[row]]`: prompt and output.

    Args:
        initial_window: the W+N-3 tokens that seed level 0, for `Lookahead(reference=True)`.
        Others: see `generate`.
    """
    call = prepare(params, prompt, cfg, tokenizer, row_ids, model)
    window = check_initial_window(initial_window, call.strategy, call.model)
    return _iter_rounds(params, call, window)


def _iter_rounds(
    params: Params, call: Call, initial_window: np.ndarray | None
) -> Iterator[tuple[RoundState, RoundInfo]]:
    state = start(call, params, initial_window)
    while not bool(state.done.all()):
        state, info = _run_one_round(call.model, call.strategy, params, state)
        yield state, info


def start(call: Call, params: Params, initial_window: np.ndarray | None = None) -> RoundState:
    """The state before the first round: prompt prefilled, proposer memory filled."""
    return _start(call.model, call.strategy, call.num_slots, params, call.arrays, initial_window)


@functools.partial(jax.jit, static_argnames=("model", "strategy", "num_slots"))
def _start(
    model: TargetModel,
    strategy: Strategy,
    num_slots: int,
    params: Params,
    arrays: CallArrays,
    initial_window: jax.Array | None,
) -> RoundState:
    """Prefills the prompt without its last token and fills the proposer's memory."""
    batch, padded_len = arrays.prompt.shape
    tokens = jnp.full((batch, num_slots), arrays.pad_id).at[:, :padded_len].set(arrays.prompt)
    cache = model.init_cache(batch, num_slots)
    is_done = arrays.prompt_len >= arrays.limit
    state = RoundState(
        tokens=tokens,
        source=jnp.zeros((batch, num_slots), jnp.int8),
        length=arrays.prompt_len,
        finish=jnp.where(is_done, arrays.limit_reason, RUNNING),
        cache=_prefill(model, params, arrays.prompt, arrays.prompt_len - 1, cache),
        window=None,
        pool=None,
        prompt_len=arrays.prompt_len,
        limit=arrays.limit,
        limit_reason=arrays.limit_reason,
        eos_ids=arrays.eos_ids,
        pad_id=arrays.pad_id,
        sampler=arrays.sampler,
        num_rounds=jnp.zeros(batch, jnp.int32),
    )
    return strategy.start(state, initial_window)


def _prefill(
    model: TargetModel, params: Params, prompt: jax.Array, lengths: jax.Array, cache: KVCache
) -> KVCache:
    """Commits K/V of the first `lengths [B]` prompt tokens, chunk by chunk."""
    batch, padded_len = prompt.shape
    chunk = min(padded_len, PREFILL_CHUNK)
    causal = jnp.tri(chunk, dtype=bool)

    def prefill_chunk(index: jax.Array, cache: KVCache) -> KVCache:
        first = index * chunk
        positions = jnp.broadcast_to(first + jnp.arange(chunk), (batch, chunk))
        tokens = lax.dynamic_slice_in_dim(prompt, first, chunk, axis=1)
        # Rows that end before this chunk compute garbage beyond their frontier.
        committed = jnp.broadcast_to(first, (batch,))
        _, new_kv = model.forward(params, tokens, positions, causal, cache, committed)
        if new_kv:
            # Adds 0, or 1 to a place that no longer matters: known only after the last read of
            # the cache, for XLA:CPU to write in place; see `publish`.
            first += jnp.isnan(new_kv[-1][0][0, 0, 0, 0])

        def write(slots, rows):
            return lax.dynamic_update_slice_in_dim(slots, rows, first, axis=2)

        return cache.updated(new_kv, write)

    return lax.fori_loop(0, -(-lengths.max() // chunk), prefill_chunk, cache)


@flax.struct.dataclass
class Progress:
    """What the host reads of a state; small, and not donated with it."""

    tokens: jax.Array  # [B, T]
    source: jax.Array  # [B, T]
    length: jax.Array  # [B]
    finish: jax.Array  # [B]
    num_rounds: jax.Array  # [B]


@functools.partial(jax.jit, static_argnames=("model", "strategy"), donate_argnames=("state",))
def run_rounds(
    model: TargetModel,
    strategy: Strategy,
    params: Params,
    state: RoundState,
    max_rounds: jax.Array,
) -> tuple[RoundState, Progress]:
    """Runs rounds until every row is done, at most `max_rounds`; never talks to the host."""

    def is_running(carry):
        index, state = carry
        return (index < max_rounds) & ~state.done.all()

    def run_round(carry):
        index, state = carry
        return index + 1, decode_round(model, strategy, params, state)[0]

    _, state = lax.while_loop(is_running, run_round, (jnp.int32(0), state))
    return state, Progress(state.tokens, state.source, state.length, state.finish, state.num_rounds)


_run_one_round = jax.jit(decode_round, static_argnames=("model", "strategy"))


def _collect(progress: Progress, call: Call, tokenizer: Any) -> Result:
    progress, prompt_len = jax.device_get((progress, call.arrays.prompt_len))
    tokens, sources = [], []
    for b in range(len(prompt_len)):
        new = slice(prompt_len[b], progress.length[b])
        tokens.append(progress.tokens[b, new].tolist())
        sources.append([SOURCES[code] for code in progress.source[b, new]])
    text = None
    if tokenizer is not None:
        text = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    num_rounds = progress.num_rounds.tolist()
    fields: dict[str, Any] = dict(
        tokens=tokens,
        text=text,
        num_rounds=num_rounds,
        tokens_per_round=[
            len(t) / n if n else 0.0 for t, n in zip(tokens, num_rounds, strict=True)
        ],
        finish_reason=[FINISH_REASONS[code] for code in progress.finish],
        sources=sources,
    )
    if not call.is_batch:
        fields = {name: rows and rows[0] for name, rows in fields.items()}
    return Result(**fields)
