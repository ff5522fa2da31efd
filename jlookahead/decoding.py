"""The entry points: prepare a call, prefill, and run rounds on the device.

Two programs per call shape are compiled: `_start` (prefill, proposer memory) and
`run_rounds` (one `lax.while_loop` over rounds, with the state donated). Shapes are
bucketed, and lengths, budgets, EOS ids and sampling parameters are arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlookahead.config import Config, Sampling
from jlookahead.lookahead import Lookahead
from jlookahead.model import PREFIX_CHUNK, KVCache, LlamaModel, Params, TargetModel
from jlookahead.prompts import Prompt, to_rows
from jlookahead.rounds import decode_round
from jlookahead.sampling import Sampler
from jlookahead.state import (
    CACHE_FULL,
    FINISH_REASONS,
    LENGTH,
    RUNNING,
    SOURCES,
    RoundInfo,
    RoundState,
)
from jlookahead.strategy import Strategy

PREFILL_CHUNK = 512
_MIN_PREFILL = 16
_EOS_SLOTS = 8
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
    call = prepare(prompt, cfg, tokenizer, row_ids, model)
    state = call.start(params, None)
    _, progress = run_rounds(call.model, cfg.strategy, params, state, _NO_ROUND_LIMIT)
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
    call = prepare(prompt, cfg, tokenizer, row_ids, model)
    state = call.start(params, _check_initial_window(initial_window, cfg.strategy, call.model))
    while not bool(state.done.all()):
        state, info = _run_one_round(call.model, cfg.strategy, params, state)
        yield state, info


@dataclasses.dataclass(frozen=True)
class Call:
    """A validated call: host arrays, ready for the device."""

    model: TargetModel
    strategy: Strategy
    num_slots: int
    is_batch: bool
    prompt: np.ndarray  # [B, P] int32, padded to a bucket
    prompt_len: np.ndarray  # [B] int32
    limit: np.ndarray  # [B] int32
    limit_reason: np.ndarray  # [B] int32
    eos_ids: np.ndarray  # [E] int32
    pad_id: np.ndarray  # [] int32
    sampler: Sampler | None

    def start(self, params: Params, initial_window: np.ndarray | None) -> RoundState:
        return _start(
            self.model,
            self.strategy,
            self.num_slots,
            params,
            self.prompt,
            self.prompt_len,
            self.limit,
            self.limit_reason,
            self.eos_ids,
            self.pad_id,
            self.sampler,
            initial_window,
        )


def prepare(
    prompt: Prompt,
    cfg: Config,
    tokenizer: Any,
    row_ids: Sequence[int] | None,
    model: TargetModel | None,
) -> Call:
    model = model or _llama(cfg)
    rows, is_batch = to_rows(prompt, tokenizer, model.vocab_size)
    for token in cfg.eos_token_ids:
        if token >= model.vocab_size:
            raise ValueError(f"eos_token_ids: got {token}, allowed are 0 to {model.vocab_size - 1}")
    prompt_len = np.array([len(row) for row in rows], np.int32)
    limit = prompt_len + cfg.max_new_tokens
    longest, context = int(prompt_len.max()), model.max_position_embeddings
    if longest + cfg.max_new_tokens > context:
        raise ValueError(
            f"max_new_tokens: got {cfg.max_new_tokens} after a prompt of {longest} tokens, "
            f"allowed are {context} together (the model's context)"
        )
    reason = np.full_like(limit, LENGTH)
    if cfg.cache_len is not None:
        if longest > cfg.cache_len:
            raise ValueError(
                f"cache_len: got {cfg.cache_len}, the prompt alone has {longest} tokens"
            )
        reason[limit > cfg.cache_len] = CACHE_FULL
        limit = np.minimum(limit, cfg.cache_len)

    padded_len = _prefill_bucket(longest)
    padded = np.full((len(rows), padded_len), cfg.pad_token_id, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    eos_ids = np.full((len(cfg.eos_token_ids) // _EOS_SLOTS + 1) * _EOS_SLOTS, -1, np.int32)
    eos_ids[: len(cfg.eos_token_ids)] = cfg.eos_token_ids
    return Call(
        model=model,
        strategy=cfg.strategy,
        # A block of slack, so that the last round's update never runs past the end.
        num_slots=_cache_bucket(
            max(padded_len, int(limit.max()) + cfg.strategy.layout.max_emitted)
        ),
        is_batch=is_batch,
        prompt=padded,
        prompt_len=prompt_len,
        limit=limit.astype(np.int32),
        limit_reason=reason,
        eos_ids=eos_ids,
        pad_id=np.array(cfg.pad_token_id, np.int32),
        sampler=_make_sampler(cfg.sampling, row_ids, len(rows)),
    )


def _llama(cfg: Config) -> TargetModel:
    if cfg.model is None:
        raise ValueError("model: cfg.model is None, needs a ModelConfig or model=")
    return LlamaModel(cfg.model)


def _make_sampler(sampling: Sampling, row_ids: Sequence[int] | None, batch: int) -> Sampler | None:
    ids = list(range(batch)) if row_ids is None else [int(i) for i in row_ids]
    if len(ids) != batch or not all(0 <= i < 2**31 for i in ids):
        raise ValueError(f"row_ids: got {row_ids}, must be {batch} non-negative integers")
    if sampling.temperature == 0:
        return None
    return Sampler(
        temperature=jnp.asarray(sampling.temperature, jnp.float32),
        top_k=jnp.asarray(min(sampling.top_k, np.iinfo(np.int32).max), jnp.int32),
        top_p=jnp.asarray(sampling.top_p, jnp.float32),
        min_p=jnp.asarray(sampling.min_p, jnp.float32),
        key=jax.random.key(sampling.seed),
        row_ids=jnp.asarray(ids, jnp.int32),
    )


def _check_initial_window(
    tokens: Sequence[int] | None, strategy: Strategy, model: TargetModel
) -> np.ndarray | None:
    if tokens is None:
        return None
    if not isinstance(strategy, Lookahead) or not strategy.reference:
        raise ValueError(
            f"initial_window: only Lookahead(reference=True) takes one, got {strategy}"
        )
    window = np.asarray(tokens)
    if window.shape != (strategy.num_seeds,) or not np.issubdtype(window.dtype, np.integer):
        raise ValueError(
            f"initial_window: got shape {window.shape} and dtype {window.dtype}, allowed are "
            f"W+N-3 = {strategy.num_seeds} ids"
        )
    if window.min() < 0 or window.max() >= model.vocab_size:
        raise ValueError(f"initial_window: ids must be 0 to {model.vocab_size - 1}")
    return window.astype(np.int32)


def _prefill_bucket(length: int) -> int:
    """Powers of two from 16, so that few prefill programs serve all prompt lengths."""
    return max(_MIN_PREFILL, 1 << (length - 1).bit_length())


def _cache_bucket(length: int) -> int:
    """Powers of two from one attention chunk up to 1024 slots, then multiples of 1024."""
    if length <= 1024:
        return max(PREFIX_CHUNK, 1 << (length - 1).bit_length())
    return -(-length // 1024) * 1024


@functools.partial(jax.jit, static_argnames=("model", "strategy", "num_slots"))
def _start(
    model: TargetModel,
    strategy: Strategy,
    num_slots: int,
    params: Params,
    prompt: jax.Array,
    prompt_len: jax.Array,
    limit: jax.Array,
    limit_reason: jax.Array,
    eos_ids: jax.Array,
    pad_id: jax.Array,
    sampler: Sampler | None,
    initial_window: jax.Array | None,
) -> RoundState:
    """Prefills the prompt without its last token and fills the proposer's memory."""
    batch, padded_len = prompt.shape
    tokens = jnp.full((batch, num_slots), pad_id).at[:, :padded_len].set(prompt)
    cache = model.init_cache(batch, num_slots)
    state = RoundState(
        tokens=tokens,
        sources=jnp.zeros((batch, num_slots), jnp.int8),
        length=prompt_len,
        finish=jnp.where(prompt_len >= limit, limit_reason, RUNNING),
        cache=_prefill(model, params, prompt, prompt_len - 1, cache),
        window=None,
        pool=None,
        prompt_len=prompt_len,
        limit=limit,
        limit_reason=limit_reason,
        eos_ids=eos_ids,
        pad_id=pad_id,
        sampler=sampler,
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
        start = index * chunk
        positions = jnp.broadcast_to(start + jnp.arange(chunk), (batch, chunk))
        tokens = lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
        # Rows that end before this chunk compute garbage beyond their frontier.
        committed = jnp.broadcast_to(start, (batch,))
        _, new_kv = model.forward(params, tokens, positions, causal, cache, committed)

        def write(slots, rows):
            return lax.dynamic_update_slice_in_dim(slots, rows, start, axis=2)

        return cache.updated(new_kv, write)

    return lax.fori_loop(0, -(-lengths.max() // chunk), prefill_chunk, cache)


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the host reads of a state; small, and not donated with it."""

    tokens: jax.Array  # [B, T]
    sources: jax.Array  # [B, T]
    length: jax.Array  # [B]
    finish: jax.Array  # [B]
    num_rounds: jax.Array  # [B]


jax.tree_util.register_dataclass(Progress)


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
    return state, Progress(
        state.tokens, state.sources, state.length, state.finish, state.num_rounds
    )


_run_one_round = jax.jit(decode_round, static_argnames=("model", "strategy"))


def _collect(progress: Progress, call: Call, tokenizer: Any) -> Result:
    progress = jax.device_get(progress)
    tokens, sources = [], []
    for b, start in enumerate(call.prompt_len):
        end = progress.length[b]
        tokens.append(progress.tokens[b, start:end].tolist())
        sources.append([SOURCES[s] for s in progress.sources[b, start:end]])
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
