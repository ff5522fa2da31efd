"""What a checkpoint says about generation, beside its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Generation defaults of a checkpoint.

    Attributes:
        eos_token_ids: every id that ends a text, without duplicates; empty if none is known.
        pad_token_id: None if the checkpoint has none.
        bos_token_id: None if the checkpoint has none.
    """

    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None


def merge_defaults(sources: Iterable[tuple[str, Mapping[str, Any]]], vocab_size: int) -> Defaults:
    """Merges `eos_token_id` (an id or a list), `pad_token_id` and `bos_token_id` of several files.

    Args:
        sources: (name for messages, fields), the most trusted first. EOS ids of all of them are
            collected; of the other fields the first one found counts.
        vocab_size: ids are below it. A padding or BOS id outside is dropped, not refused: -1 is
            a common spelling of "none", and many LLaMA tokenizers pad with an id just past the
            vocabulary.

    Raises:
        ValueError: an id that is no integer, or an EOS id outside the vocabulary.
    """
    eos: dict[int, None] = {}  # an ordered set
    single: dict[str, int] = {}
    for origin, fields in sources:
        for token_id in _ids(origin, "eos_token_id", fields):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{origin}: eos_token_id: got {token_id}, must be in [0, {vocab_size})"
                )
            eos[token_id] = None
        for name in ("pad_token_id", "bos_token_id"):
            for token_id in _ids(origin, name, fields):
                if 0 <= token_id < vocab_size:
                    single.setdefault(name, token_id)
    return Defaults(eos_token_ids=tuple(eos), **single)


def _ids(origin: str, name: str, fields: Mapping[str, Any]) -> list[int]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"{origin}: {name}: got {value!r}, must be a token id")
    return ids
