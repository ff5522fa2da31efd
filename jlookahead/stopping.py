"""Stop strings: found on the device, at the very token that completes one.

Text does not exist on the device, so the strings are compiled into an automaton over token ids:
an Aho-Corasick automaton over bytes, followed along the bytes that each token adds to a text. It
reads the emitted tokens, never the prompt. What tokens spell is checked against the tokenizer's
own decoding, so that a row ends with `stop` if and only if its text contains a stop string.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jlookahead.text import BYTE_TOKEN, REPLACEMENT, decode

# Tokenizers that change what they decode do so between tokens, at spaces and punctuation.
_SAMPLE = "a . ? ! , ' n't 'm 's 've 're a"

# The automaton has ended in a stop string.
_COMPLETE = -1
_MIN_STATES = 16
# Altogether; the table of a large vocabulary then takes less than half a gigabyte.
_MAX_BYTES = 1000


@flax.struct.dataclass
class StopStrings:
    """The automaton and where each batch row stands in it. Shapes: S states, V vocabulary."""

    table: jax.Array  # [S, V] int16, the state after a token, _COMPLETE if it ends a stop string
    state: jax.Array  # [B] int16

    def follow(self, tokens: jax.Array) -> StopWalk:
        """Reads `tokens [B, M]`."""

        def step(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = self.table[state, token]
            return jnp.maximum(state, 0), state

        _, states = lax.scan(step, self.state, tokens.T)
        return StopWalk(self, states.T)


@dataclasses.dataclass(frozen=True)
class StopWalk:
    """The automaton's way over a block of tokens."""

    start: StopStrings
    states: jax.Array  # [B, M] int16, after each token

    @property
    def is_complete(self) -> jax.Array:
        """`[B, M]` bool, the tokens that complete a stop string."""
        return self.states == _COMPLETE

    def after(self, num_tokens: jax.Array) -> StopStrings:
        """The automaton after the first `num_tokens [B]`."""
        last = jnp.maximum(num_tokens - 1, 0)[:, None]
        state = jnp.take_along_axis(self.states, last, axis=1)[:, 0]
        state = jnp.where(num_tokens > 0, jnp.maximum(state, 0), self.start.state)
        return dataclasses.replace(self.start, state=state)


def check_stop_strings(strings: Any) -> None:
    """Raises `ValueError` unless `strings` is a tuple of non-empty valid texts."""
    if not isinstance(strings, tuple) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop_strings: got {strings!r}, must be a tuple of non-empty strings")
    for s in strings:
        if REPLACEMENT in s or any("\ud800" <= c <= "\udfff" for c in s):
            raise ValueError(
                f"stop_strings: got {s!r}, allowed is valid Unicode text without U+FFFD, which "
                "stands for broken characters"
            )
    num_bytes = sum(len(s.encode()) for s in strings)
    if num_bytes > _MAX_BYTES:
        raise ValueError(
            f"stop_strings: got {num_bytes} bytes altogether, allowed are {_MAX_BYTES}"
        )


def compile_stop_strings(
    strings: tuple[str, ...], tokenizer: Any, vocab_size: int, batch: int
) -> StopStrings | None:
    """The automaton of a call, None without strings.

    Raises:
        ValueError: there is no tokenizer to say what tokens spell, its decoding is not understood,
            or the strings are too long.
    """
    if not strings:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings: got {strings!r} without tokenizer=, which spells the ids")
    if not hasattr(tokenizer, "backend_tokenizer"):
        name = type(tokenizer).__name__
        raise ValueError(f"stop_strings: got a {name}, needs a fast tokenizer of transformers")
    backend = tokenizer.backend_tokenizer
    sample = backend.encode(_SAMPLE, add_special_tokens=False).ids
    if decode(tokenizer, sample) != backend.decode(sample):
        raise ValueError(
            f"stop_strings: {type(tokenizer).__name__} decodes otherwise than its "
            "backend_tokenizer, allowed are tokenizers that do not change what that decodes"
        )
    added = tuple(
        (i, token.content, token.special) for i, token in backend.get_added_tokens_decoder().items()
    )
    return StopStrings(
        table=jax.device_put(_token_table(strings, tokenizer, vocab_size, added)),
        state=jax.device_put(np.zeros(batch, np.int16)),
    )


@functools.lru_cache(maxsize=2)  # they may be large
def _token_table(
    strings: tuple[str, ...], tokenizer: Any, vocab_size: int, added: Hashable
) -> np.ndarray:
    """`[S, V]` int16: the state after every token, from every state; 0 is the first.

    Args:
        added: what can be changed about a tokenizer; a part of the key only.
    """
    spelling = _spelling(tokenizer.backend_tokenizer, vocab_size)
    by_symbol = _automaton([s.encode() for s in strings], spelling)
    num_states = max(_MIN_STATES, 1 << (len(by_symbol) - 1).bit_length())
    table = np.zeros((num_states, vocab_size), np.int16)
    table[: len(by_symbol)] = np.arange(len(by_symbol))[:, None]
    lengths = np.array([len(b) for b in spelling.added])
    first = np.cumsum(lengths) - lengths
    symbols = np.frombuffer(b"".join(spelling.added), np.uint8) + np.int16(0)
    symbols[first[spelling.is_byte]] += 256
    for i in range(lengths.max()):
        longer = np.flatnonzero(lengths > i)
        here = table[:, longer]
        moved = by_symbol[here, symbols[first[longer] + i]]
        table[:, longer] = np.where(here == _COMPLETE, _COMPLETE, moved)
    return table


@dataclasses.dataclass(frozen=True)
class _Spelling:
    """What tokens add to a text."""

    added: list[bytes]  # by id; nothing for special tokens, which are not decoded
    # Tokens that stand for one byte. A run of them that is not UTF-8 is decoded as U+FFFD for
    # every byte, also for those that are characters.
    is_byte: np.ndarray  # [V] bool
    strips_space: bool  # a space at the very beginning is dropped

    def text(self, token: int, times: int) -> str:
        """A text of one token, repeated."""
        text = times * self.added[token]
        return text[self.strips_space and text.startswith(b" ") :].decode(errors="replace")


def _spelling(backend: Any, vocab_size: int) -> _Spelling:
    """The known kind of spelling by which this tokenizer decodes every token, alone and twice.

    Raises:
        ValueError: there is none.
    """
    names = [backend.id_to_token(i) for i in range(vocab_size)]
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    names = ["" if name in special else name or "" for name in names]
    is_byte = np.array([BYTE_TOKEN.fullmatch(name) is not None for name in names])
    sentencepiece = [_spell_sentencepiece(name) for name in names]
    decoded = [
        backend.decode_batch([[i] * times for i in range(vocab_size)], skip_special_tokens=True)
        for times in (1, 2)
    ]
    for spelling in (
        _Spelling([_spell_byte_level(name) for name in names], np.zeros_like(is_byte), False),
        _Spelling(sentencepiece, is_byte, False),
        _Spelling(sentencepiece, is_byte, True),
    ):
        if all(
            text == spelling.text(token, times)
            for times, texts in enumerate(decoded, start=1)
            for token, text in enumerate(texts)
        ):
            return spelling
    raise ValueError(
        f"stop_strings: got a tokenizer with decoder {backend.decoder}, allowed are byte-level "
        "and LLaMA's SentencePiece-style ones"
    )


def _spell_byte_level(name: str) -> bytes:
    try:
        return bytes(_byte_of_character()[c] for c in name)
    except KeyError:  # an added token
        return name.encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes since GPT-2: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(256, 256 + len(others))]
    return dict(zip(map(chr, characters), printable + others, strict=True))


def _spell_sentencepiece(name: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()


# Where the automaton stands: the longest proper prefix of a stop string in which the text ends;
# the unfinished character in which a run of byte tokens ends, None once the run is not UTF-8; and
# whether a space to come would be the very beginning of the text.
_Reading = tuple[bytes, bytes | None, bool]


def _automaton(strings: list[bytes], spelling: _Spelling) -> np.ndarray:
    """`[S, 256 or 512]` next states, by byte, and by byte of a byte token."""
    prefixes = {s[:n] for s in strings for n in range(len(s))}
    failure = {
        p: next(p[n:] for n in range(1, len(p) + 1) if p[n:] in prefixes) for p in prefixes - {b""}
    }
    complete = tuple(strings)

    def read(reading: _Reading, symbol: int) -> _Reading | None:
        prefix, run, at_beginning = reading
        byte = bytes([symbol % 256])
        run = _extend_run(run, byte) if symbol >= 256 else b""
        if run is None:
            return b"", None, False
        if at_beginning and byte == b" ":
            return b"", run, False
        if (prefix + byte).endswith(complete):
            return None
        while prefix and prefix + byte not in prefixes:
            prefix = failure[prefix]
        return (prefix + byte if prefix + byte in prefixes else b""), run, False

    readings: list[_Reading] = [(b"", b"", spelling.strips_space)]
    state = {readings[0]: 0}
    table = []
    for reading in readings:  # grows
        row = []
        for symbol in range(512 if spelling.is_byte.any() else 256):
            after = read(reading, symbol)
            if after is not None and after not in state:
                state[after] = len(readings)
                readings.append(after)
            row.append(_COMPLETE if after is None else state[after])
        table.append(row)
    return np.array(table, np.int16)


def _extend_run(unfinished: bytes | None, byte: bytes) -> bytes | None:
    """The unfinished character after one more byte of a run, None if the run is not UTF-8.

    Characters that may be finished in the same ways are one.
    """
    if unfinished is None:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(unfinished + byte)
    except UnicodeDecodeError:
        return None
    unfinished = decoder.getstate()[0]
    if unfinished in (b"", b"\xe0", b"\xed", b"\xf0", b"\xf4"):
        return unfinished
    length = 2 + (unfinished[0] >= 0xE0) + (unfinished[0] >= 0xF0)
    return {1: b"\xc2", 2: b"\xe1", 3: b"\xf1"}[length - len(unfinished)]
