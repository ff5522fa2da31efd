"""What a generation returns, and how it is read from the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax

from jlookahead.call import Call
from jlookahead.config import Config
from jlookahead.state import FINISH_REASONS, SOURCES
from jlookahead.text import cut_at_stop, decode


@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate` returns. For a batch every field is a list with one entry per row.

    Attributes:
        tokens: the new ids, EOS included, prompt excluded.
        text: their decoded text without special tokens; None without a tokenizer.
        num_rounds: forward passes it took, prefill not counted.
        tokens_per_round: new tokens per round; 0 if there was no round.
        finish_reason: `eos`, `stop` (a stop string), `length` or `cache_full`.
        sources: where each token came from: `plain` or `bonus` (the model itself, without or
            behind accepted drafts), or the draft's source: `pool`, `lookup`, `recycled`, `sweep`.
        logprobs: of every token under the model's own law; None unless `cfg.logprobs`.
    """

    tokens: Any
    text: Any
    num_rounds: Any
    tokens_per_round: Any
    finish_reason: Any
    sources: Any
    logprobs: Any


@flax.struct.dataclass
class Progress:
    """What the host reads of a state; small, and not donated with it."""

    tokens: jax.Array  # [B, T]
    source: jax.Array  # [B, T]
    logprobs: jax.Array | None  # [B, T]
    length: jax.Array  # [B]
    finish: jax.Array  # [B]
    num_rounds: jax.Array  # [B]


def collect(progress: Progress, call: Call, cfg: Config, tokenizer: Any) -> Result:
    """Copies a finished generation to the host."""
    progress = jax.device_get(progress)
    rows = [
        row_result(progress, b, size, cfg, tokenizer) for b, size in enumerate(call.prompt_lengths)
    ]
    if not call.is_batch:
        return rows[0]
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Result):
        values = [getattr(row, field.name) for row in rows]
        fields[field.name] = None if values[0] is None else values
    return Result(**fields)


def row_result(
    progress: Progress, row: int, prompt_len: int, cfg: Config, tokenizer: Any
) -> Result:
    """The result of a batch row that is done; `progress` lies on the host."""
    new = slice(prompt_len, progress.length[row])
    tokens, num_rounds = progress.tokens[row, new].tolist(), int(progress.num_rounds[row])
    text = None
    if tokenizer is not None:
        text = cut_at_stop(decode(tokenizer, tokens), cfg.stop_strings)
    return Result(
        tokens=tokens,
        text=text,
        num_rounds=num_rounds,
        tokens_per_round=len(tokens) / num_rounds if num_rounds else 0.0,
        finish_reason=FINISH_REASONS[progress.finish[row]],
        sources=[SOURCES[code] for code in progress.source[row, new]],
        logprobs=None if progress.logprobs is None else progress.logprobs[row, new].tolist(),
    )
