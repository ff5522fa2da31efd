"""What a call is asked to do: one frozen, validated, hashable object.

`generate` splits it: model and strategy fix the compiled program; everything else reaches
the device as arrays, so that a new value never compiles anything.
"""

from __future__ import annotations

import dataclasses

from jlookahead.checks import check_bool, check_choice, check_int, check_number
from jlookahead.lookahead import Lookahead
from jlookahead.model_config import ModelConfig
from jlookahead.processors import Processor
from jlookahead.stopping import check_stop_strings
from jlookahead.strategy import Strategy

_TINY = 5e-324  # the least positive float


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the target chooses a token; the filters apply in HF's order.

    Attributes:
        temperature: 0 is greedy, and the filters then have no effect.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
        seed: same seed, same text, whatever the strategy.
        verify: how drafts are accepted, see `sampling.py`. `coupled`: the text is plain
            sampling's with the same seed. `residual`: it has the same law, and depends on the
            strategy too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    verify: str = "coupled"

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "0 to 1e30", 0, 1e30)
        check_int("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, "above 0 and up to 1", _TINY, 1)
        check_number("min_p", self.min_p, "0 to 1", 0, 1)
        check_int("seed", self.seed, 0, 2**32 - 1)
        check_choice("verify", self.verify, ("coupled", "residual"))


@dataclasses.dataclass(frozen=True)
class Config:
    """A generation call.

    Attributes:
        model: the network; may be None only when `generate` is given another `model`.
        strategy: where drafts come from; changes the number of rounds, never the text.
        sampling: how the target chooses.
        max_new_tokens: budget of new tokens per row, 0 or more; never exceeded.
        min_new_tokens: new tokens before which no EOS id is chosen; stop strings still count.
        eos_token_ids: ids that end a row, emitted as its last token; empty = run to the budget.
        stop_strings: texts that end a row, wherever they lie in the new text. The token that
            completes one is the row's last; the text is cut before the string. Needs a fast
            tokenizer.
        processors: functions `(logits, context) -> logits` that change the target's law, in
            this order, before `min_new_tokens` and `sampling`; see `processors.py`.
        logprobs: whether results hold the log-probability of every new token under the
            target's own law, that is, before processors, temperature and filters.
        pad_token_id: fills token arrays beyond a row's length; never enters the results.
        cache_len: tokens that a row may have, prompt included; None = what the call needs.
            A row that reaches it stops with finish reason `cache_full`. It is reserved
            whole: calls with one `cache_len` share one decoding program.
        publish: where devices share a round, how they come by the K/V of what was accepted:
            `broadcast` sends them, `refeed` computes them with the next round.
    """

    model: ModelConfig | None = None
    strategy: Strategy = Lookahead()
    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    processors: tuple[Processor, ...] = ()
    logprobs: bool = False
    pad_token_id: int = 0
    cache_len: int | None = None
    publish: str = "broadcast"

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 0)
        check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        check_bool("logprobs", self.logprobs)
        check_int("pad_token_id", self.pad_token_id, 0)
        if not isinstance(self.model, ModelConfig | None):
            raise ValueError(f"model: got {self.model!r}, allowed is a ModelConfig or None")
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling: got {self.sampling!r}, allowed is a Sampling")
        if not isinstance(self.eos_token_ids, tuple):
            raise ValueError(f"eos_token_ids: got {self.eos_token_ids!r}, must be a tuple of ids")
        for token in self.eos_token_ids:
            check_int("eos_token_ids", token, 0)
        check_stop_strings(self.stop_strings)
        if not isinstance(self.processors, tuple) or not all(map(callable, self.processors)):
            raise ValueError(
                f"processors: got {self.processors!r}, must be a tuple of functions "
                "(logits, context) -> logits"
            )
        try:
            hash(self.processors)
        except TypeError as error:
            message = f"processors: got {self.processors!r}, must be hashable: {error}"
            raise ValueError(message) from None
        check_choice("publish", self.publish, ("broadcast", "refeed"))
        if self.cache_len is not None:
            check_int("cache_len", self.cache_len, 1)
        parts = ("layout", "num_successors", "start", "propose", "read", "observe")
        if isinstance(self.strategy, type) or not all(hasattr(self.strategy, p) for p in parts):
            raise ValueError(
                f"strategy: got {self.strategy!r}, allowed is a strategy object such as "
                "Lookahead() or Autoregressive()"
            )
