"""One measured generation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jlookahead.agreement import of_first_process
from jlookahead.checkpoints import LoadedModel
from jlookahead.config import Config
from jlookahead.decoding import generate
from jlookahead.streaming import StreamedToken, stream
from jlookahead.warming import warmup

# Seconds up to which a run is measured again: handing tokens to the host would distort it.
SHORT_RUN = 5.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A generation and its cost.

    Attributes:
        strategy: its name.
        streamed: the new tokens.
        compile_seconds: until the programs were compiled.
        seconds: the generation on compiled programs, from prompt to last token; a short one
            without streaming.
        has_logprobs: whether the tokens have log-probabilities.
    """

    strategy: str
    streamed: Sequence[StreamedToken]
    compile_seconds: float
    seconds: float
    has_logprobs: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token.token for token in self.streamed]

    @property
    def num_rounds(self) -> int:
        return self.streamed[-1].num_rounds if self.streamed else 0

    @property
    def tokens_per_round(self) -> float:
        return len(self.streamed) / self.num_rounds if self.streamed else 0.0

    @property
    def tokens_per_second(self) -> float:
        return len(self.streamed) / self.seconds

    @property
    def finish_reason(self) -> str | None:
        # Without a token the budget was 0.
        return self.streamed[-1].finish_reason if self.streamed else "length"

    def as_dict(self, has_text: bool) -> dict[str, Any]:
        """The fields of the JSON output; `text` is None if the model has no tokenizer, `logprobs`
        if they were not asked for."""
        pieces = [token.text or "" for token in self.streamed]
        return {
            "strategy": self.strategy,
            "text": "".join(pieces) if has_text else None,
            "token_ids": self.token_ids,
            "logprobs": [t.logprob for t in self.streamed] if self.has_logprobs else None,
            "num_rounds": self.num_rounds,
            "tokens_per_round": self.tokens_per_round,
            "finish_reason": self.finish_reason,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "compile_seconds": self.compile_seconds,
        }


def compile_programs(lm: LoadedModel, prompt: list[int], cfg: Config) -> float:
    """Compiles what a generation of this shape runs, and returns the seconds it took."""
    began = time.perf_counter()
    warmup(lm.params, cfg, [len(prompt)], tokenizer=lm.tokenizer)
    return time.perf_counter() - began


def measure(
    strategy: str,
    lm: LoadedModel,
    prompt: list[int],
    cfg: Config,
    compile_seconds: float,
    show: Callable[[StreamedToken], None],
) -> Run:
    """Generates on compiled programs and hands every token to `show` when it is there."""
    start = time.perf_counter()
    streamed = []
    for token in stream(lm.params, prompt, cfg, tokenizer=lm.tokenizer):
        streamed.append(token)
        show(token)
    seconds = time.perf_counter() - start
    if of_first_process(seconds, lm.params) <= SHORT_RUN:
        start = time.perf_counter()
        generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)
        seconds = time.perf_counter() - start
    return Run(strategy, streamed, compile_seconds, seconds, cfg.logprobs)
