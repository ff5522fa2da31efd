"""A generation call: checked, padded to buckets, and laid out as arrays for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jlookahead.attention import PREFIX_CHUNK
from jlookahead.checks import check_int
from jlookahead.config import Config, Sampling
from jlookahead.lookahead import Lookahead
from jlookahead.model import LlamaModel, Params, TargetModel
from jlookahead.processors import Processor, on_device
from jlookahead.prompts import Prompt, to_rows
from jlookahead.sampling import Sampler
from jlookahead.sharding import DATA, mesh_of, put
from jlookahead.state import CACHE_FULL, LENGTH
from jlookahead.stopping import StopStrings, compile_stop_strings
from jlookahead.strategy import Strategy

_MIN_PREFILL = 16
_MIN_NEXT_PREFILL = 64  # turns of a chat differ in length: fewer programs serve them
_PREFILL_STEP, _MAX_PREFILL = 64, 512
_EOS_SLOTS = 8


@flax.struct.dataclass
class CallArrays:
    """What varies per call and compiles nothing anew: B rows, T slots, E EOS slots."""

    prompt: jax.Array  # [B, T] int32, right-padded
    prompt_len: jax.Array  # [B] int32
    num_reused: jax.Array  # [] int32, leading tokens whose K/V an earlier generation committed
    limit: jax.Array  # [B] int32, length at which a row stops
    limit_reason: jax.Array  # [B] int32, finish code of reaching it
    eos_ids: jax.Array  # [E] int32, padded with -1
    pad_id: jax.Array  # [] int32
    sampler: Sampler | None
    processors: tuple[Processor, ...]
    stop: StopStrings | None


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call. All but `arrays` is static, or of the host."""

    model: TargetModel
    strategy: Strategy
    prompt_lengths: tuple[int, ...]
    prefill_chunk: int
    num_slots: int
    want_logprobs: bool
    is_batch: bool
    mesh: Mesh | None
    refeeds: bool
    arrays: CallArrays


def prepare(
    params: Params,
    prompt: Prompt,
    cfg: Config,
    tokenizer: Any = None,
    row_ids: Sequence[int] | None = None,
    model: TargetModel | None = None,
    num_reused: int = 0,
    min_slots: int = 0,
) -> Call:
    """Checks everything about a call that can be checked; see `generate` for the arguments.

    Args:
        num_reused: leading tokens of the prompt, less than all, that need no prefill.
        min_slots: slots of the cache that an earlier generation leaves; 0 if none does.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """
    model = resolve_model(params, cfg, model)
    rows, is_batch = to_rows(prompt, tokenizer, model.vocab_size)
    for token in cfg.eos_token_ids:
        if token >= model.vocab_size:
            raise ValueError(f"eos_token_ids: got {token}, allowed are 0 to {model.vocab_size - 1}")
    mesh = mesh_of(params)
    if mesh is not None and len(rows) % mesh.shape[DATA]:
        raise ValueError(
            f"prompt: got {len(rows)} rows, must be a multiple of {mesh.shape[DATA]}, the devices "
            f"of the mesh along {DATA!r}"
        )
    lengths = [len(row) for row in rows]
    limits, reasons = limits_of(lengths, cfg, model.max_position_embeddings)

    num_read = max(lengths) - 1 - num_reused  # the last token belongs to the first round
    chunk = _prefill_chunk(max(num_read, 1), _MIN_NEXT_PREFILL if min_slots else _MIN_PREFILL)
    end_of_prefill = num_reused + -(-num_read // chunk) * chunk
    # A block of slack, so that the last round's update never runs past the end.
    end_of_rounds = (cfg.cache_len or max(limits)) + cfg.strategy.layout.max_emitted
    num_slots = bucket(max(end_of_prefill, end_of_rounds, min_slots), PREFIX_CHUNK)
    padded = np.full((len(rows), num_slots), cfg.pad_token_id, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    num_eos = len(cfg.eos_token_ids)
    eos_ids = np.full(max(1, -(-num_eos // _EOS_SLOTS)) * _EOS_SLOTS, -1, np.int32)
    eos_ids[:num_eos] = cfg.eos_token_ids
    arrays = CallArrays(
        prompt=_int32(padded),
        prompt_len=_int32(lengths),
        num_reused=_int32(num_reused),
        limit=_int32(limits),
        limit_reason=_int32(reasons),
        eos_ids=_int32(eos_ids),
        pad_id=_int32(cfg.pad_token_id),
        sampler=_make_sampler(cfg.sampling, row_ids, len(rows)),
        processors=on_device(
            cfg.processors, cfg.min_new_tokens, eos_ids, model.vocab_size, padded.shape
        ),
        stop=compile_stop_strings(cfg.stop_strings, tokenizer, model.vocab_size, len(rows)),
    )
    return Call(
        model=model,
        strategy=cfg.strategy,
        prompt_lengths=tuple(lengths),
        prefill_chunk=chunk,
        num_slots=num_slots,
        want_logprobs=cfg.logprobs,
        is_batch=is_batch,
        mesh=mesh,
        refeeds=cfg.publish == "refeed",
        arrays=arrays if mesh is None else put(arrays, mesh),
    )


def resolve_model(params: Params, cfg: Config, model: TargetModel | None) -> TargetModel:
    """The network of a call, checked against its parameters if it is `cfg.model`."""
    if not isinstance(cfg, Config):
        raise ValueError(f"cfg: got {cfg!r}, allowed is a Config")
    if model is not None:
        parts = ("vocab_size", "max_position_embeddings", "init_cache", "forward", "logits")
        if isinstance(model, type) or not all(hasattr(model, part) for part in parts):
            raise ValueError(f"model: got {model!r}, allowed is a TargetModel object")
        return model
    if cfg.model is None:
        raise ValueError("model: cfg.model is None, needs a ModelConfig or model=")
    llama = LlamaModel(cfg.model)
    llama.check_params(params)
    return llama


def _int32(value: ArrayLike) -> jax.Array:
    return jax.device_put(np.asarray(value, np.int32))  # a copy, where jnp.asarray compiles


def _float32(value: float) -> jax.Array:
    return jax.device_put(np.asarray(value, np.float32))


def limits_of(lengths: Sequence[int], cfg: Config, context: int) -> tuple[list[int], list[int]]:
    """The length at which each row stops, and the finish code of reaching it.

    Raises:
        ValueError: the longest prompt leaves no room for its budget.
    """
    longest = max(lengths)
    if longest + cfg.max_new_tokens > context:
        raise ValueError(
            f"max_new_tokens: got {cfg.max_new_tokens} after a prompt of {longest} tokens, "
            f"allowed are {context} together (the model's context)"
        )
    limits = [length + int(cfg.max_new_tokens) for length in lengths]
    if cfg.cache_len is None:
        return limits, [LENGTH] * len(limits)
    if not longest <= cfg.cache_len <= context:
        raise ValueError(
            f"cache_len: got {cfg.cache_len}, allowed are {longest} (the longest prompt) to "
            f"{context} (the model's context)"
        )
    reasons = [CACHE_FULL if limit > cfg.cache_len else LENGTH for limit in limits]
    return [min(limit, int(cfg.cache_len)) for limit in limits], reasons


def check_row_ids(row_ids: Sequence[int] | None, batch: int) -> Sequence[int]:
    """The ids that key the sampling of each row."""
    ids = range(batch) if row_ids is None else row_ids
    if not isinstance(ids, Sequence | np.ndarray) or len(ids) != batch:
        raise ValueError(f"row_ids: got {row_ids}, must be {batch} integers, 0 or more")
    for row_id in ids:
        check_int("row_ids", row_id, 0)
    return ids


def _make_sampler(sampling: Sampling, row_ids: Sequence[int] | None, batch: int) -> Sampler | None:
    ids = check_row_ids(row_ids, batch)
    if sampling.temperature == 0:
        return None
    return Sampler(
        temperature=_float32(sampling.temperature),
        top_k=_int32(sampling.top_k),
        top_p=_float32(sampling.top_p),
        min_p=_float32(sampling.min_p),
        seed=jax.device_put(np.asarray(sampling.seed, np.uint32)),
        row_ids=_int32(ids),
        verify=sampling.verify,
    )


def check_initial_window(
    tokens: Sequence[int] | None, strategy: Strategy, model: TargetModel
) -> np.ndarray | None:
    """The seeds of level 0 in reference mode, checked."""
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


def _prefill_chunk(num_read: int, smallest: int) -> int:
    """Rows of a prefill pass: few distinct numbers, since each compiles a program, and the fewest
    passes with few rows empty: 600 tokens are read as twice 320."""
    num_passes = -(-num_read // _MAX_PREFILL)
    rows = -(-num_read // num_passes)
    if rows <= _PREFILL_STEP:
        return bucket(rows, smallest)
    return -(-rows // _PREFILL_STEP) * _PREFILL_STEP


def bucket(length: int, smallest: int) -> int:
    """Powers of two from `smallest` up to 1024, then multiples of 1024: few programs serve all
    lengths, and no buffer is twice as long as a long text needs."""
    if length <= 1024:
        return max(smallest, 1 << (length - 1).bit_length())
    return -(-length // 1024) * 1024
