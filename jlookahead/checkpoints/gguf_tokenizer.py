"""A byte-level BPE tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from jlookahead.checkpoints import tokenizer

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.token_type`
_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(metadata: Mapping[str, Any], file: Path) -> tokenizer.Tokenizer | None:
    """The transformers tokenizer that the metadata describe, or None if they describe none.

    Raises:
        ValueError: not byte-level BPE, an unknown pre-tokenizer, or inconsistent metadata.
    """
    fields = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if "model" not in fields:
        return None
    if fields["model"] != "gpt2":
        raise ValueError(
            f"{file}: tokenizer.ggml.model: got {fields['model']!r}, supported is 'gpt2' "
            "(byte-level BPE)"
        )
    try:
        backend = _byte_level_bpe(fields)
        special = {
            f"{role}_token": fields["tokens"][fields[key]]
            for role, key in (
                ("bos", "bos_token_id"),
                ("eos", "eos_token_id"),
                ("unk", "unknown_token_id"),
                ("pad", "padding_token_id"),
            )
            if key in fields
        }
    except KeyError as error:
        raise ValueError(f"{file}: tokenizer.ggml field {error} is missing") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:  # of other types
        raise ValueError(f"{file}: tokenizer metadata: {error}") from error
    return tokenizer.import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level_bpe(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, pre = fields["tokens"], fields.get("pre")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens: a token occurs twice")
    merges = []
    for merge in fields["merges"]:
        left, _, right = merge.partition(" ")
        # The tokenizers library panics on some of these instead of raising an exception.
        if not right or not {left, right, left + right} <= vocab.keys():
            raise ValueError(f"tokenizer.ggml.merges: {merge!r} is not a pair of tokens")
        merges.append((left, right))
    is_llama3 = pre == "llama-bpe"
    # Llama 3 takes a whole word that is in the vocabulary without merging up to it.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    # In the order of ids, which are those of the vocabulary.
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, fields.get("token_type", ()), strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    if fields.get("add_bos_token", is_llama3):
        bos = fields["bos_token_id"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]} $B",
            special_tokens=[(tokens[bos], bos)],
        )
    return backend


def _pre_tokenizer(name: str | None) -> pre_tokenizers.PreTokenizer:
    """The splitting of text into words that llama.cpp knows by this name."""
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, rest])
    raise ValueError(
        f"tokenizer.ggml.pre: got {name!r}, supported are 'gpt-2', 'smollm' and 'llama-bpe'"
    )
