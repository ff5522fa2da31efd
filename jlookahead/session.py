"""A conversation: every call keeps the K/V that the last one computed for the same beginning.

K/V depend on the tokens up to a position and on nothing else, so the longest common prefix of
what is committed and of the new prompt needs no prefill, whatever became of the rest. The
proposer's memory is kept too; it can change the number of rounds only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jlookahead.call import Call, prepare, resolve_model
from jlookahead.config import Config
from jlookahead.decoding import NO_ROUND_LIMIT, run_rounds, start
from jlookahead.model import Params, TargetModel
from jlookahead.prompts import Prompt, to_rows
from jlookahead.results import Progress, Result, collect
from jlookahead.state import RoundState
from jlookahead.streaming import StreamedToken, stream_rounds


class Session:
    """Calls of `generate` and `stream` on prompts that share a beginning, most often a chat.

    Every prompt is the whole conversation, and every result is that of a fresh `generate` (with
    `verify="residual"`, where the text depends on the drafts, one of the same law). One
    conversation at a time: a prompt that shares nothing with the last one starts from its
    first token.

    Attributes:
        messages: the chat that `send` continues; may be edited, a system message for one.
        num_reused: tokens of the last prompt that needed no forward pass.
        num_prefilled: the other ones.
    """

    def __init__(
        self,
        params: Params,
        cfg: Config,
        *,
        tokenizer: Any = None,
        model: TargetModel | None = None,
    ):
        """See `generate` for the arguments.

        Raises:
            ValueError: a configuration without a model, or parameters of another one.
        """
        self._model = resolve_model(params, cfg, model)
        self._params, self._cfg, self._tokenizer = params, cfg, tokenizer
        self._state: RoundState | None = None
        self._turn = 0
        self.messages: list[Mapping[str, str]] = []
        self.num_reused = self.num_prefilled = 0

    def generate(self, prompt: Prompt) -> Result:
        """`jlookahead.generate` on one prompt: ids, a text, or chat messages.

        Raises:
            ValueError: as `generate` does, and for a batch. The session stays as it was.
        """
        call = self._start(prompt)
        progress = self._run(call, jax.device_put(NO_ROUND_LIMIT))
        return collect(progress, call, self._cfg, self._tokenizer)

    def stream(self, prompt: Prompt) -> Iterator[StreamedToken]:
        """`jlookahead.stream` on one prompt. It may be left half-way.

        Raises:
            ValueError: as `generate` does, at the call.
            RuntimeError: on reading on after the session was given another prompt.
        """
        call = self._start(prompt)
        turn = self._turn

        def dispatch(max_rounds: jax.Array) -> Progress:
            if turn != self._turn:
                raise RuntimeError("stream: the session has been given another prompt since")
            return self._run(call, max_rounds)

        return stream_rounds(dispatch, call, self._cfg, self._tokenizer)

    def send(self, text: str) -> Result:
        """Answers a user's message; both join `messages` when the answer is there.

        Raises:
            ValueError: as `generate` does, and for a tokenizer without a chat template.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        result = self.generate(messages)
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        return result

    def _start(self, prompt: Prompt) -> Call:
        rows, is_batch = to_rows(prompt, self._tokenizer, self._model.vocab_size)
        if is_batch:
            raise ValueError(f"prompt: got a batch of {len(rows)} rows, a session takes one prompt")
        ids = rows[0]
        num_reused = self._count_reusable(ids)
        previous = self._state
        call = prepare(
            self._params,
            ids,
            self._cfg,
            self._tokenizer,
            model=self._model,
            num_reused=num_reused,
            min_slots=0 if previous is None else previous.tokens.shape[1],
        )
        self._turn += 1
        # What is donated must not be found again, should an interrupt come now.
        self._state = None
        self._state = start(call, self._params, previous=previous)
        self.num_reused, self.num_prefilled = num_reused, len(ids) - num_reused
        return call

    def _count_reusable(self, ids: np.ndarray) -> int:
        """Leading tokens of a prompt whose K/V are there; the last one always needs its row."""
        if self._state is None:
            return 0
        try:
            needed = ("tokens", "length", "num_pending")
            on_host = jax.device_get({name: getattr(self._state, name) for name in needed})
        except jax.errors.JaxRuntimeError:  # the device failed in the last call
            self._state = None
            return 0
        # Counted on the device, a constant would move there.
        state = dataclasses.replace(self._state, **on_host)
        size = min(int(state.num_committed[0]), len(ids) - 1)
        differs = state.tokens[0, :size] != ids[:size]
        return int(np.argmax(differs)) if differs.any() else size

    def _run(self, call: Call, max_rounds: jax.Array) -> Progress:
        state, self._state = self._state, None
        assert state is not None, "a call that fails is not run on"
        self._state, progress = run_rounds(
            call.model, call.strategy, call.mesh, self._params, state, max_rounds
        )
        return progress
