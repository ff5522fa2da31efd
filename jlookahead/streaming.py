"""Streaming: every committed token in order, while the device is already at the next rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jlookahead.call import Call, prepare
from jlookahead.config import Config
from jlookahead.decoding import Progress, run_rounds, start
from jlookahead.model import Params, TargetModel
from jlookahead.prompts import Prompt
from jlookahead.state import FINISH_REASONS, SOURCES
from jlookahead.stopping import BYTE_TOKEN, cut_at_stop, num_held_back

# Rounds per device call: few enough to read as live text, enough to hide the hand-over.
ROUNDS_PER_CALL = 4

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class StreamedToken:
    """One committed token.

    Attributes:
        row: its batch row; 0 for a single prompt.
        token: its id.
        text: the text that is certain since the row's last token; empty while that may still
            become another character or a stop string. A row's texts add up to its whole text.
            None without a tokenizer.
        source: where it came from; see `Result`.
        logprob: see `Result`; None unless `cfg.logprobs`.
        num_rounds: the row's forward passes so far, prefill not counted.
        finish_reason: set on the row's last token only; see `Result`.
    """

    row: int
    token: int
    text: str | None
    source: str
    logprob: float | None
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
    """Yields every new token, those of a row in order; together they are `generate`'s output.

    The device runs a few rounds per call, and the next call is under way while the tokens of
    the last one are copied and yielded. Rows of a batch take turns. Arguments and errors are
    those of `generate`, raised at the call.
    """
    call = prepare(params, prompt, cfg, tokenizer, row_ids, model)
    state = None

    def dispatch(max_rounds: jax.Array) -> Progress:
        nonlocal state
        state = start(call, params) if state is None else state
        state, progress = run_rounds(call.model, call.strategy, params, state, max_rounds)
        return progress

    return stream_rounds(dispatch, call, cfg, tokenizer)


def stream_rounds(
    dispatch: Callable[[jax.Array], Progress], call: Call, cfg: Config, tokenizer: Any
) -> Iterator[StreamedToken]:
    """Yields the tokens of a generation that goes on by `dispatch(max_rounds)`."""
    max_rounds = jax.device_put(np.int32(ROUNDS_PER_CALL))
    seen = jax.device_get(call.arrays.prompt_len).tolist()
    texts = [IncrementalText(tokenizer, cfg.stop_strings) for _ in seen]
    pending = dispatch(max_rounds)
    is_running = True
    while is_running:
        current = pending
        # Dispatched before `current` is read. After the last round it finds nothing to do.
        pending = dispatch(max_rounds)
        progress = jax.device_get(current)
        reasons = [FINISH_REASONS[code] for code in progress.finish]
        for row, (end, reason) in enumerate(zip(progress.length.tolist(), reasons, strict=True)):
            for i in range(seen[row], end):
                is_last = reason is not None and i == end - 1
                token = int(progress.tokens[row, i])
                logprobs = progress.logprobs
                yield StreamedToken(
                    row=row,
                    token=token,
                    text=None if tokenizer is None else texts[row].add(token, is_last),
                    source=SOURCES[progress.source[row, i]],
                    logprob=None if logprobs is None else float(logprobs[row, i]),
                    num_rounds=int(progress.num_rounds[row]),
                    finish_reason=reason if is_last else None,
                )
            seen[row] = end
        is_running = None in reasons


class IncrementalText:
    """Decodes a growing list of ids so that the pieces add up to the text of the whole list, cut
    before a stop string.

    A piece is held back while it ends in an unfinished character, in a run of byte tokens (which
    are no characters at all if one of them does not fit), or in the beginning of a stop string.
    Only the ids of the last piece and those since are decoded again: tokenizers that treat the
    first token of a text specially need that much context.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._ids: list[int] = []
        self._context = 0  # first id decoded
        self._done = 0  # ids whose text is certain
        self._in_run = False  # whether the last id that spells anything is a byte token
        self._held = ""  # certain text that may begin a stop string

    def add(self, token: int, is_last: bool) -> str:
        """Appends an id and returns the text that is now certain."""
        self._held += self._decode_next(token, is_last)
        if is_last:
            text = cut_at_stop(self._held, self._stop_strings)
        else:
            held_back = num_held_back(self._held, self._stop_strings)
            text = self._held[: len(self._held) - held_back]
        self._held = self._held[len(text) :]
        return text

    def _decode_next(self, token: int, is_last: bool) -> str:
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._done])
        after = self._decode(self._ids[self._context :])
        name_of = getattr(self._tokenizer, "convert_ids_to_tokens", str)
        is_byte = BYTE_TOKEN.fullmatch(name_of(token) or "") is not None
        self._in_run = is_byte or (self._in_run and not self._decode([token]))
        if not is_last and (self._in_run or after.endswith(_REPLACEMENT)):
            return ""
        # Ids that spell nothing are no context for a tokenizer that skips them.
        if piece := after[len(before) :]:
            self._context, self._done = self._done, len(self._ids)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
