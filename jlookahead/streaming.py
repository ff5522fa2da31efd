"""Streaming: every committed token in order, while the device is already at the next rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jlookahead.call import Call, prepare
from jlookahead.config import Config
from jlookahead.decoding import run_rounds, start
from jlookahead.model import Params, TargetModel
from jlookahead.prompts import Prompt
from jlookahead.results import Progress
from jlookahead.state import FINISH_REASONS, SOURCES
from jlookahead.text import IncrementalText

# Rounds per device call: few enough to read as live text, enough to hide the hand-over.
ROUNDS_PER_CALL = 4


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
        state, progress = run_rounds(
            call.model, call.strategy, call.mesh, params, state, max_rounds
        )
        return progress

    return stream_rounds(dispatch, call, cfg, tokenizer)


def stream_rounds(
    dispatch: Callable[[jax.Array], Progress], call: Call, cfg: Config, tokenizer: Any
) -> Iterator[StreamedToken]:
    """Yields the tokens of a generation that goes on by `dispatch(max_rounds)`."""
    max_rounds = jax.device_put(np.int32(ROUNDS_PER_CALL))
    seen = list(call.prompt_lengths)
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
