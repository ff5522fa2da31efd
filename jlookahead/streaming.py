"""Streaming: every committed token in order, while the device is already at the next rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jlookahead.call import Call, prepare
from jlookahead.config import Config
from jlookahead.decoding import run_rounds, start
from jlookahead.model import Params, TargetModel
from jlookahead.prompts import Prompt
from jlookahead.state import FINISH_REASONS, SOURCES

# Rounds per device call: few enough to read as live text, enough to hide the hand-over.
ROUNDS_PER_CALL = 4

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class StreamedToken:
    """One committed token.

    Attributes:
        token: its id.
        text: the text it completes; empty while a multi-byte character or a special token is
            held back, so the concatenation is the whole text. None without a tokenizer.
        source: where it came from; see `Result`.
        num_rounds: forward passes so far, prefill not counted.
        finish_reason: set on the last token only; see `Result`.
    """

    token: int
    text: str | None
    source: str
    num_rounds: int
    finish_reason: str | None


def stream(
    params: Params,
    prompt: Prompt,
    cfg: Config,
    *,
    tokenizer: Any = None,
    row_ids: Sequence[int] | None = None,
    model: TargetModel | None = None,
) -> Iterator[StreamedToken]:
    """Yields every new token of one prompt, in order; together they are `generate`'s output.

    The device runs a few rounds per call, and the next call is under way while the tokens of
    the last one are copied and yielded. Arguments and errors are those of `generate`, raised
    at the call; a batch is a `ValueError`.
    """
    call = prepare(params, prompt, cfg, tokenizer, row_ids, model)
    if call.is_batch:
        num_rows = len(call.arrays.prompt)
        raise ValueError(f"prompt: got a batch of {num_rows} rows, stream takes one prompt")
    return _stream(params, call, tokenizer)


def _stream(params: Params, call: Call, tokenizer: Any) -> Iterator[StreamedToken]:
    max_rounds = jax.device_put(np.int32(ROUNDS_PER_CALL))

    def dispatch(state):
        return run_rounds(call.model, call.strategy, params, state, max_rounds)

    text = IncrementalText(tokenizer) if tokenizer is not None else None
    seen = int(jax.device_get(call.arrays.prompt_len)[0])
    state, pending = dispatch(start(call, params))
    while True:
        current = pending
        # Dispatched before `current` is read. After the last round it finds nothing to do.
        state, pending = dispatch(state)
        progress = jax.device_get(current)
        end, finish = int(progress.length[0]), FINISH_REASONS[progress.finish[0]]
        for i in range(seen, end):
            is_last = finish is not None and i == end - 1
            token = int(progress.tokens[0, i])
            yield StreamedToken(
                token=token,
                text=None if text is None else text.add(token, is_last),
                source=SOURCES[progress.source[0, i]],
                num_rounds=int(progress.num_rounds[0]),
                finish_reason=finish if is_last else None,
            )
        seen = end
        if finish is not None:
            return


class IncrementalText:
    """Decodes a growing list of ids so that the pieces add up to the text of the whole list.

    A piece is held back while it ends in an incomplete character. Only the ids since the
    last piece and those of the piece before it are decoded again: tokenizers that treat the
    first token of a text specially need that much context.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # first id decoded
        self._done = 0  # ids whose text was returned

    def add(self, token: int, is_last: bool) -> str:
        """Appends an id and returns the text that is now certain."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._done])
        after = self._decode(self._ids[self._context :])
        if after.endswith(_REPLACEMENT) and not is_last:
            return ""
        self._context, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
