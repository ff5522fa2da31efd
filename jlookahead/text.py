"""The text of emitted ids: decoded, cut at a stop string, and piece by piece while it grows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """What the ids spell, special tokens left out, and nothing tidied up.

    The clean-up that some tokenizers ask for (`" ."` becomes `"."`) changes text already streamed.
    """
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut_at_stop(text: str, strings: Sequence[str]) -> str:
    """`text` before the stop string that is complete first; of several, the longest."""
    spans = [(text.index(s) + len(s), text.index(s)) for s in strings if s in text]
    return text[: min(spans)[1]] if spans else text


def num_held_back(text: str, strings: Sequence[str]) -> int:
    """Characters at the end of `text` that the next ones may turn into a stop string."""
    return max(
        (n for s in strings for n in range(1, len(s)) if text.endswith(s[:n])),
        default=0,
    )


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
        before = decode(self._tokenizer, self._ids[self._context : self._done])
        after = decode(self._tokenizer, self._ids[self._context :])
        name_of = getattr(self._tokenizer, "convert_ids_to_tokens", str)
        is_byte = BYTE_TOKEN.fullmatch(name_of(token) or "") is not None
        self._in_run = is_byte or (self._in_run and not decode(self._tokenizer, [token]))
        if not is_last and (self._in_run or after.endswith(REPLACEMENT)):
            return ""
        # Ids that spell nothing are no context for a tokenizer that skips them.
        if piece := after[len(before) :]:
            self._context, self._done = self._done, len(self._ids)
        return piece
