"""Compiling ahead of the first call, so that it answers as fast as the ones after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jlookahead.call import prepare
from jlookahead.checks import check_int
from jlookahead.config import Config
from jlookahead.decoding import NO_ROUND_LIMIT, run_rounds, start
from jlookahead.model import Params, TargetModel
from jlookahead.sharding import put


def warmup(
    params: Params,
    cfg: Config,
    prompt_lengths: Iterable[int],
    *,
    batch: int = 1,
    tokenizer: Any = None,
    model: TargetModel | None = None,
) -> None:
    """Compiles what `generate` and `stream` need for prompts of these lengths; decodes nothing.

    Later calls compile nothing as long as they agree with `cfg` in model, strategy, `cache_len`,
    `logprobs`, processors, stop strings, in whether `min_new_tokens` is 0, in whether they sample
    and how drafts are then verified, have as many prompts, and no more than 8 EOS ids. Without a
    `cache_len` the budget counts too. Most lengths find their program compiled for another one.

    Args:
        params: of the model.
        cfg: of the calls to come.
        prompt_lengths: in tokens, such as `range(1, 513)`; of a batch, the longest.
        batch: prompts of a call.
        tokenizer: wanted by stop strings.
        model: see `generate`.

    Raises:
        ValueError: as `generate` does for a prompt of such a length.
    """
    check_int("batch", batch, 1)
    if not isinstance(prompt_lengths, Iterable):
        raise ValueError(f"prompt_lengths: got {prompt_lengths!r}, must be several integers")
    compiled = set()
    for length in prompt_lengths:
        check_int("prompt_lengths", length, 1)
        call = prepare(params, [[0] * length] * batch, cfg, tokenizer, None, model)
        shapes = call.prefill_chunk, call.num_slots
        if shapes in compiled:
            continue
        compiled.add(shapes)
        # Prompts that leave nothing to read and no token to emit.
        host = np.ones(batch, np.int32)
        ones = jax.device_put(host) if call.mesh is None else put(host, call.mesh)
        call = dataclasses.replace(
            call, arrays=dataclasses.replace(call.arrays, prompt_len=ones, limit=ones)
        )
        unlimited = jax.device_put(NO_ROUND_LIMIT)
        state = start(call, params)
        _, progress = run_rounds(call.model, call.strategy, call.mesh, params, state, unlimited)
        jax.block_until_ready(progress)
