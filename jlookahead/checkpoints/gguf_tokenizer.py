"""The tokenizer that a GGUF file's metadata describe: byte-level BPE or SentencePiece's BPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jlookahead.checkpoints import tokenizer
from jlookahead.checks import check_bool, check_int

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """How byte-level BPE cuts text into words, within which it merges.

    Attributes:
        pattern: of a word; None for that of GPT-2.
        single_digits: whether every digit is cut off first.
        whole_words: whether a word that is a token is taken without merging up to it.
        adds_bos: whether a text begins with BOS if the file does not say.
        composes: whether characters are composed first (Unicode NFC), as the model's own
            tokenizer does and llama.cpp does not.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


_GPT2 = _Splitting()
_STARCODER = _Splitting(single_digits=True)
_LLAMA3 = _Splitting(
    _CONTRACTIONS + _WORD + r"\p{N}{1,3}|" + _SIGNS_AND_SPACES, whole_words=True, adds_bos=True
)
_QWEN2 = _Splitting(_CONTRACTIONS + _WORD + r"\p{N}|" + _SIGNS_AND_SPACES, composes=True)
_TEKKEN = _Splitting(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    + _SIGNS_AND_SPACES.replace(r"\r\n]*", r"\r\n/]*", 1),
    whole_words=True,
    adds_bos=True,
)
# By `tokenizer.ggml.pre`.
_SPLITTINGS = {
    "gpt-2": _GPT2,
    "granite-docling": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "minerva-7b": _STARCODER,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": dataclasses.replace(_LLAMA3, whole_words=False, adds_bos=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": dataclasses.replace(_QWEN2, composes=False),
    "tekken": _TEKKEN,
}
# `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# Fields that hold the id of a token, with its role in transformers.
_ROLES = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
_EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What llama.cpp takes for those of SentencePiece that a file lacks.
_SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a file says about its tokens.

    Attributes:
        tokenizer: of transformers; None if the file has none.
        special_ids: `eos_token_id`, `pad_token_id`, `bos_token_id`, for `merge_defaults`.
        num_tokens: ids below it are tokens, those from there on fill up the embedding; None if
            the file does not tell.
    """

    tokenizer: tokenizer.Tokenizer | None
    special_ids: Mapping[str, Any]
    num_tokens: int | None


def read_vocabulary(metadata: Mapping[str, Any], file: Path) -> Vocabulary:
    """Reads `tokenizer.ggml.*`.

    Raises:
        ValueError: a kind of tokenizer that is not supported, or inconsistent metadata.
    """
    prefix = "tokenizer.ggml."
    fields = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    kind = fields.get("model")
    if kind == "llama":
        fields = {**_SENTENCEPIECE_IDS, **fields}
    special_ids = {
        "eos_token_id": [fields[key] for key in _EOS_FIELDS if key in fields],
        "pad_token_id": fields.get("padding_token_id"),
        "bos_token_id": fields.get("bos_token_id"),
    }
    if kind is None:
        return Vocabulary(None, special_ids, None)
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    try:
        if kind not in builders:
            raise ValueError(
                f"tokenizer.ggml.model: got {kind!r}, supported are 'gpt2' (byte-level BPE) and "
                "'llama' (SentencePiece's BPE)"
            )
        tokens = _check_tokens(fields)
        vocab = _used_tokens(fields)
        backend = builders[kind](fields, vocab)
        roles = {
            role: tokens[fields[key]]
            for key, role in _ROLES.items()
            if fields.get(key) in range(len(tokens))
        }
    except KeyError as error:
        raise ValueError(f"{file}: tokenizer.ggml field {error} is missing") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:  # of other types
        raise ValueError(f"{file}: {error}") from error
    wrapped = tokenizer.import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **roles,
    )
    return Vocabulary(wrapped, special_ids, max(vocab.values()) + 1)


def _check_tokens(fields: Mapping[str, Any]) -> list[str]:
    """The tokens, after a check of all fields that have an entry per token or name one."""
    tokens = fields["tokens"]
    for key in ("tokens", "merges"):
        entries = fields.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise ValueError(f"tokenizer.ggml.{key}: must be a list of strings")
    if len(set(tokens)) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens: a token occurs twice")
    for key in ("token_type", "scores"):
        if key not in fields:
            continue
        entries = np.asarray(fields[key])
        if entries.shape != (len(tokens),):
            raise ValueError(
                f"tokenizer.ggml.{key}: got {entries.size} entries, must be {len(tokens)}, as many "
                "as tokens"
            )
        if entries.dtype.kind not in "iuf" or not np.isfinite(entries).all():
            raise ValueError(f"tokenizer.ggml.{key}: must be finite numbers")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        check_bool(f"tokenizer.ggml.{key}", fields.get(key, False))
    for key in _ROLES:
        if key in fields:
            # Many tokenizers of LLaMA pad with an id just past the vocabulary, or with -1.
            low, high = (-1, 2**32) if key == "padding_token_id" else (0, len(tokens) - 1)
            check_int(f"tokenizer.ggml.{key}", fields[key], low, high)
    return tokens


def _used_tokens(fields: Mapping[str, Any]) -> dict[str, int]:
    """Ids by token, without those that only fill up the embedding (`[PAD32000]`)."""
    kinds = fields.get("token_type", [_NORMAL] * len(fields["tokens"]))
    named = {fields.get(key) for key in _ROLES}
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(fields["tokens"], kinds, strict=True))
        if kind != _UNUSED or token_id in named
    }
    if not vocab:
        raise ValueError("tokenizer.ggml.token_type: no token is in use")
    return vocab


def _byte_level_bpe(fields: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """The tokenizer of GPT-2 with the splitting that the file names."""
    name = fields.get("pre")
    if name not in _SPLITTINGS:
        raise ValueError(
            f"tokenizer.ggml.pre: got {name!r}, supported are {', '.join(_SPLITTINGS)}"
        )
    splitting = _SPLITTINGS[name]
    backend = Tokenizer(
        models.BPE(vocab, _stated_merges(fields, vocab), ignore_merges=splitting.whole_words)
    )
    if splitting.composes:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    is_gpt2 = splitting.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, fields, vocab, splitting.adds_bos)
    return backend


def _sentencepiece_bpe(fields: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """BPE over characters, spaces visible, with bytes for characters that are no tokens."""
    tokens = fields["tokens"]
    if "merges" in fields:
        merges = _stated_merges(fields, vocab)
    else:
        merges = _merges_of_scores(tokens, fields["scores"], fields["token_type"])
    unknown = tokens[fields["unknown_token_id"]]
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # A normalizer sees what lies between special tokens, and so the space is put before each.
    has_prefix = fields.get("add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_special_tokens(backend, fields, vocab, adds_bos=True)
    return backend


def _stated_merges(fields: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in fields["merges"]:
        left, _, right = merge.partition(" ")
        # The tokenizers library panics on some of these instead of raising an exception.
        if not right or not {left, right, left + right} <= vocab.keys():
            raise ValueError(f"tokenizer.ggml.merges: {merge!r} is not a pair of tokens")
        merges.append((left, right))
    return merges


def _merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, that of the highest score first.

    SentencePiece merges the pair whose union scores highest, of equals the leftmost one; a list
    of merges has no equals.
    """
    normal = {
        token: (-score, token_id)
        for token_id, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True))
        if kind == _NORMAL
    }
    ranked = [
        (rank, token[:i], token[i:])
        for token, rank in normal.items()
        for i in range(1, len(token))
        if token[:i] in normal and token[i:] in normal
    ]
    ranks = {rank for rank, _, _ in ranked}
    if len(ranks) > 1 and len({score for score, _ in ranks}) == 1:
        raise ValueError("tokenizer.ggml.scores: all are equal, must tell which pair merges first")
    return [(left, right) for _, left, right in sorted(ranked)]


def _add_special_tokens(
    backend: Tokenizer, fields: Mapping[str, Any], vocab: Mapping[str, int], adds_bos: bool
) -> None:
    """Adds the tokens that are cut out of a text before anything else, and BOS and EOS around it.

    Args:
        backend: what to add them to.
        fields: `tokenizer.ggml.*`.
        vocab: see `_used_tokens`.
        adds_bos: whether a text begins with BOS if the file does not say.
    """
    tokens = fields["tokens"]
    kinds = dict(enumerate(fields.get("token_type", ())))
    backend.add_tokens(
        [
            AddedToken(token, special=kinds.get(token_id) != _USER_DEFINED, normalized=False)
            for token, token_id in vocab.items()
            if kinds.get(token_id) in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    before = [fields["bos_token_id"]] if fields.get("add_bos_token", adds_bos) else []
    after = [fields["eos_token_id"]] if fields.get("add_eos_token", False) else []
    if before or after:
        start, end = [tokens[i] for i in before], [tokens[i] for i in after]
        backend.post_processor = processors.TemplateProcessing(
            single=[*start, "$A", *end],
            pair=[*start, "$A", *end, *start, "$B", *end],
            special_tokens=[(tokens[i], i) for i in {*before, *after}],
        )
