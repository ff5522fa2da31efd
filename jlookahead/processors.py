"""Logits processors: what changes the target's law before a token is chosen from it.

A processor is a pure function `(logits [B, V], context) -> logits [B, V]`, float32. It is applied
at every position that is chosen, with the tokens before it as plain decoding would have them;
drafts that were not accepted never show. Any hashable callable will do. A function is part of the
compiled program, so define it once. A callable that is a pytree, as the penalties here are, has
its leaves as arguments: a new number compiles nothing.

If no token is left, every logit being -inf, the choice falls on some id of the vocabulary, not
necessarily an allowed one. Where the processors of this module alone would do that, a call is a
`ValueError`. NaN and +inf make no law: what is chosen then is not said.

Repetition penalty, bans and biases follow Hugging Face's `RepetitionPenaltyLogitsProcessor`,
`SuppressTokensLogitsProcessor` and `SequenceBiasLogitsProcessor`; presence and frequency
penalties follow OpenAI's API.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlookahead.checks import check_int, check_number


@flax.struct.dataclass
class Context:
    """The text before the token to choose. What lies at or beyond `length` is not part of it."""

    tokens: jax.Array  # [B, T] int32, prompt and output
    length: jax.Array  # [B] int32
    prompt_len: jax.Array  # [B] int32

    def counts(self, vocab_size: int, with_prompt: bool) -> jax.Array:
        """How often every token occurs, `[B, V]` int32, in the output or in prompt and output."""
        batch, num_slots = self.tokens.shape
        slot = jnp.arange(num_slots)
        counted = slot < self.length[:, None]
        if not with_prompt:
            counted &= slot >= self.prompt_len[:, None]
        row = jnp.arange(batch)[:, None]
        zeros = jnp.zeros((batch, vocab_size), jnp.int32)
        return zeros.at[row, self.tokens].add(counted.astype(jnp.int32))


class Processor(Protocol):
    def __call__(self, logits: jax.Array, context: Context, /) -> jax.Array: ...


def process(processors: tuple[Processor, ...], logits: jax.Array, context: Context) -> jax.Array:
    """`logits [B, V]` after all processors, in order."""
    for processor in processors:
        logits = processor(logits, context)
    return logits


class _Penalty:
    """A processor with one number, which reaches the device as an argument."""

    penalty: Any

    def check(self) -> None:
        check_number("penalty", self.penalty, "-1e3 to 1e3", -1e3, 1e3)


@flax.struct.dataclass
class RepetitionPenalty(_Penalty):
    """Divides positive and multiplies negative logits of tokens in prompt or output."""

    penalty: float

    def check(self) -> None:
        check_number("penalty", self.penalty, "1e-3 to 1e3", 1e-3, 1e3)

    def __call__(self, logits: jax.Array, context: Context) -> jax.Array:
        seen = context.counts(logits.shape[-1], with_prompt=True) > 0
        penalised = jnp.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return jnp.where(seen, penalised, logits)


@flax.struct.dataclass
class PresencePenalty(_Penalty):
    """Subtracts `penalty` from the logits of every token that the output contains."""

    penalty: float

    def __call__(self, logits: jax.Array, context: Context) -> jax.Array:
        seen = context.counts(logits.shape[-1], with_prompt=False) > 0
        return jnp.where(seen, logits - self.penalty, logits)


@flax.struct.dataclass
class FrequencyPenalty(_Penalty):
    """Subtracts `penalty` from the logits of a token for every time it occurs in the output."""

    penalty: float

    def __call__(self, logits: jax.Array, context: Context) -> jax.Array:
        return logits - self.penalty * context.counts(logits.shape[-1], with_prompt=False)


class _PerToken:
    """A processor that adds to the logits of each token; on the device it is a `_Bias`."""

    def values(self, vocab_size: int) -> np.ndarray:
        """`[V]` float32, -inf for what is excluded; a `ValueError` if that makes no sense."""
        raise NotImplementedError

    def __call__(self, logits: jax.Array, context: Context) -> jax.Array:
        return _Bias(jnp.asarray(self.values(logits.shape[-1])))(logits, context)


@dataclasses.dataclass(frozen=True)
class BannedTokens(_PerToken):
    """Excludes ids."""

    ids: tuple[int, ...]

    def values(self, vocab_size: int) -> np.ndarray:
        values = np.zeros(vocab_size, np.float32)
        values[_checked_ids(self.ids, vocab_size)] = -np.inf
        return values


@dataclasses.dataclass(frozen=True)
class AllowedTokens(_PerToken):
    """Excludes all ids but these."""

    ids: tuple[int, ...]

    def values(self, vocab_size: int) -> np.ndarray:
        values = np.full(vocab_size, -np.inf, np.float32)
        values[_checked_ids(self.ids, vocab_size)] = 0
        return values


@dataclasses.dataclass(frozen=True)
class LogitBias(_PerToken):
    """Adds to the logits of single ids: pairs of id and bias, an id at most once."""

    bias: tuple[tuple[int, float], ...]

    def values(self, vocab_size: int) -> np.ndarray:
        pairs = self.bias
        if not isinstance(pairs, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(f"bias: got {pairs!r}, must be a tuple of pairs (id, bias)")
        ids = _checked_ids(tuple(token for token, _ in pairs), vocab_size)
        values = np.zeros(vocab_size, np.float32)
        for token, bias in pairs:
            check_number("bias", bias, "-1e4 to 1e4", -1e4, 1e4)
            values[token] = bias
        if len(set(ids)) < len(ids):
            raise ValueError(f"bias: got {pairs!r}, an id occurs twice")
        return values


@flax.struct.dataclass
class _Bias:
    values: jax.Array  # [V] float32, -inf for what is excluded

    def __call__(self, logits: jax.Array, context: Context) -> jax.Array:
        return jnp.where(self.values > -jnp.inf, logits + self.values, -jnp.inf)


@flax.struct.dataclass
class _MinNewTokens:
    """Excludes the EOS ids until the output has `num` tokens."""

    num: jax.Array  # [] int32
    eos_ids: jax.Array  # [E] int32, padded with -1

    def __call__(self, logits: jax.Array, context: Context) -> jax.Array:
        is_early = context.length - context.prompt_len < self.num
        is_eos = jnp.isin(jnp.arange(logits.shape[-1]), self.eos_ids)
        return jnp.where(is_early[:, None] & is_eos, -jnp.inf, logits)


def on_device(
    processors: tuple[Processor, ...],
    min_new_tokens: int,
    eos_ids: np.ndarray,
    vocab_size: int,
    buffer_shape: tuple[int, int],
) -> tuple[Processor, ...]:
    """The processors of a call, checked, their numbers as arrays, `min_new_tokens` the last.

    Args:
        processors: as the user gave them.
        min_new_tokens: output tokens before which no EOS id is allowed.
        eos_ids: `[E]` int32, padded with -1.
        vocab_size: V.
        buffer_shape: B, T of the tokens they will see.

    Raises:
        ValueError: naming the processor, the field and the value.
    """
    prepared: list[Processor] = []
    allowed = np.ones(vocab_size, bool)
    for processor in processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            if isinstance(processor, _PerToken):
                values = processor.values(vocab_size)
                prepared.append(_Bias(jax.device_put(values)))
                allowed &= values > -np.inf
            elif isinstance(processor, _Penalty):
                processor.check()
                prepared.append(_leaves_on_device(processor))
            else:
                prepared.append(_leaves_on_device(processor))
                _check_output(prepared[-1], vocab_size, buffer_shape)
        except ValueError as error:
            raise ValueError(f"processors: {name}: {error}") from error
    if not allowed.any():
        raise ValueError(f"processors: got {processors!r}, which allow no token at all")
    if min_new_tokens:
        allowed[eos_ids[eos_ids >= 0]] = False
        if not allowed.any():
            raise ValueError(
                f"min_new_tokens: got {min_new_tokens}, but no token is allowed beside EOS ids"
            )
        num = np.asarray(min_new_tokens, np.int32)
        prepared.append(_MinNewTokens(*jax.device_put((num, eos_ids))))
    return tuple(prepared)


def _leaves_on_device(processor: Any) -> Any:
    """A pytree keeps its structure; anything else becomes a pytree without leaves."""
    if jax.tree_util.all_leaves([processor]):
        return jax.tree_util.Partial(processor)

    def put(leaf: Any) -> jax.Array:
        if isinstance(leaf, float):  # of 32 bits in 64-bit mode too
            leaf = np.float32(leaf)
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            leaf = np.int32(leaf)
        return jax.device_put(leaf)

    try:
        hash(jax.tree.structure(processor))
        return jax.tree.map(put, processor)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"got {processor!r}, whose fields JAX cannot take: {error}") from error


def _check_output(processor: Processor, vocab_size: int, buffer_shape: tuple[int, int]) -> None:
    batch, _ = buffer_shape
    logits = jax.ShapeDtypeStruct((batch, vocab_size), jnp.float32)
    tokens = jax.ShapeDtypeStruct(buffer_shape, jnp.int32)
    per_row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    try:
        context = jax.eval_shape(Context, tokens, per_row, per_row)
        output = jax.eval_shape(processor, logits, context)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"cannot be traced: {type(error).__name__}: {error}") from error
    shape, dtype = getattr(output, "shape", None), getattr(output, "dtype", None)
    if (shape, dtype) != (logits.shape, logits.dtype):
        got = output if shape is None else f"{dtype}{list(shape)}"
        raise ValueError(f"returned {got}, must be float32{list(logits.shape)} as the logits are")


def _checked_ids(ids: Any, vocab_size: int) -> list[int]:
    if not isinstance(ids, tuple) or not ids:
        raise ValueError(f"ids: got {ids!r}, must be a tuple of ids, at least one")
    for token in ids:
        check_int("ids", token, 0, vocab_size - 1)
    return list(ids)
