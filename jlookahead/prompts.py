"""Prompts as users have them, to ids per row; everything checked before anything compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# A text, ids, chat messages, several of one kind, or what a tokenizer returns.
Prompt = Any


def encode(tokenizer: Any, text_or_chat: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a text, or of chat messages under the tokenizer's own template.

    The template already writes the beginning-of-sequence token where the model wants one,
    so its output is encoded without special tokens: never two of them.
    """
    if isinstance(text_or_chat, str):
        return _tokenize(tokenizer, text_or_chat, add_special_tokens=True)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("prompt: got chat messages, but the tokenizer has no chat template")
    for message in text_or_chat:
        fields = [message.get(name) for name in ("role", "content")]
        if not all(isinstance(field, str) for field in fields):
            raise ValueError(f"prompt: got {message!r}, a message needs a role and content text")
    text = tokenizer.apply_chat_template(
        list(text_or_chat), tokenize=False, add_generation_prompt=True
    )
    return _tokenize(tokenizer, text, add_special_tokens=False)


def _tokenize(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt: not valid Unicode text: {error}") from None
    # Not verbose: a text longer than the context is refused later, and in our words.
    return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]


def to_rows(prompt: Prompt, tokenizer: Any, vocab_size: int) -> tuple[list[np.ndarray], bool]:
    """Splits a prompt into rows of ids.

    Args:
        prompt: ids `[T]` or `[B, T]`, a list of ids, a ragged list of those; what a Hugging
            Face tokenizer returns, `input_ids` padded on either side and `attention_mask`; with
            a tokenizer also a string, a list of strings, or chat messages.
        tokenizer: used for text only; may be None.
        vocab_size: ids must be below it.

    Returns:
        one int32 array per row, and whether the prompt was a batch.

    Raises:
        ValueError: nothing to read, an id outside the vocabulary, something not an id, text
            without a tokenizer, a mask that is not one of padding.
    """
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise ValueError(f"tokenizer: got {tokenizer!r}, allowed is a tokenizer of transformers")
    if isinstance(prompt, Mapping):
        rows, is_batch = _split_masked(prompt)
    elif _is_text_or_chat(prompt):
        rows, is_batch = [prompt], False
    elif isinstance(prompt, list | tuple) and any(map(_is_text_or_chat, prompt)):
        rows, is_batch = list(prompt), True
        if not all(map(_is_text_or_chat, rows)):
            raise ValueError("prompt: got a batch of texts and ids, must be all of one kind")
    else:
        rows, is_batch = _split_ids(prompt)
    if any(map(_is_text_or_chat, rows)):
        if tokenizer is None:
            raise ValueError("prompt: got text, needs a tokenizer (tokenizer=lm.tokenizer) or ids")
        rows = [encode(tokenizer, row) for row in rows]
    if not rows:
        raise ValueError("prompt: got a batch of no rows, needs at least one")
    return [_check_ids(row, i, vocab_size) for i, row in enumerate(rows)], is_batch


def _is_text_or_chat(value: object) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list | tuple):
        return False
    return bool(value) and all(isinstance(message, Mapping) for message in value)


def _split_ids(prompt: Prompt) -> tuple[list[Any], bool]:
    if not isinstance(prompt, list | tuple):
        prompt = np.asarray(prompt)  # at once: going through a device array compiles programs
        if prompt.ndim not in (1, 2):
            shape = prompt.shape
            raise ValueError(f"prompt: got shape {shape}, allowed are ids [T] or a batch of those")
        return ([prompt], False) if prompt.ndim == 1 else (list(prompt), True)
    is_batch = any(isinstance(entry, list | tuple) or np.ndim(entry) for entry in prompt)
    return (list(prompt), True) if is_batch else ([prompt], False)


def _split_masked(prompt: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Rows without their padding."""
    if {"input_ids", "attention_mask"} != prompt.keys() - {"token_type_ids"}:
        raise ValueError(
            f"prompt: got a mapping with {list(prompt)}, allowed are input_ids and attention_mask"
        )
    rows, is_batch = _split_ids(prompt["input_ids"])
    masks, _ = _split_ids(prompt["attention_mask"])
    types, _ = _split_ids(prompt.get("token_type_ids", [0]))
    if any(np.any(row) for row in types):
        raise ValueError("prompt: token_type_ids are not all 0, which these models know nothing of")
    if len(masks) != len(rows):
        raise ValueError(
            f"prompt: attention_mask has {len(masks)} rows, must be {len(rows)} as input_ids"
        )
    pairs = zip(rows, masks, strict=True)
    return [_strip_padding(ids, mask, i) for i, (ids, mask) in enumerate(pairs)], is_batch


def _strip_padding(row: Any, mask: Any, index: int) -> np.ndarray:
    ids, mask = np.asarray(row), np.asarray(mask)
    if ids.shape != mask.shape or ids.ndim != 1:
        raise ValueError(
            f"prompt: attention_mask of row {index} has shape {mask.shape}, must be {ids.shape}"
        )
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"prompt: attention_mask of row {index} holds other values than 0 and 1")
    (kept,) = np.nonzero(mask)
    if not kept.size:
        raise ValueError(f"prompt: attention_mask of row {index} hides all of it")
    if kept[-1] - kept[0] + 1 > kept.size:
        raise ValueError(f"prompt: attention_mask of row {index} has a hole, allowed is padding")
    return ids[kept]


def _check_ids(row: Any, index: int, vocab_size: int) -> np.ndarray:
    ids = np.asarray(row)
    if ids.size == 0:
        raise ValueError(f"prompt: row {index} is empty, needs at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"prompt: row {index} has shape {ids.shape} and dtype {ids.dtype}, allowed are "
            "integer ids [T]"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"prompt: row {index} holds id {outside[0]}, allowed are 0 to {vocab_size - 1}"
        )
    return ids.astype(np.int32)
