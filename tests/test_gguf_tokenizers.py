"""Tokenizers from the metadata of GGUF files: byte-level BPE, SentencePiece, refusals."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata
from pathlib import Path

import checkpoints as files
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import tokenization_utils_base

from jlookahead import checkpoints, prompts
from jlookahead.text import IncrementalText, decode


def write(folder, metadata, vocab_size=300):
    config = files.hf_config(num_hidden_layers=1, vocab_size=vocab_size)
    tensors = files.random_tensors(config)
    return files.write_gguf(Path(folder) / "m.gguf", config, tensors, metadata=metadata)


ROLES = ("bos", "eos", "padding")


# --- byte-level BPE ---


def tokenizer_metadata(**changes):
    """The metadata that llama.cpp writes for `tiny_tokenizer`."""
    tokenizer = files.tiny_tokenizer()
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 5,
        "padding_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | {
        "tokenizer.chat_template": tokenizer.chat_template
    }


def test_tokenizer_and_defaults(tmp_path):
    model = checkpoints.load(write(tmp_path, metadata=tokenizer_metadata()))
    expected = files.tiny_tokenizer()
    text = "the hat</s> sat, 1984 \n\n ünï"
    assert model.tokenizer.encode(text) == expected.encode(text)
    assert 1 in model.tokenizer.encode(text)
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "hat"}]
    assert model.tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hat</s>"
    assert model.tokenizer.eos_token == "</s>"
    assert model.defaults == checkpoints.Defaults((1, 5), pad_token_id=1, bos_token_id=0)


def with_numbers(metadata):
    """Adds tokens for numbers of up to four digits, which only some splittings can use."""
    metadata = dict(metadata)
    for key, values in {
        "tokens": ["12", "123", "1234"],
        "token_type": [1, 1, 1],
        "merges": ["1 2", "12 3", "123 4"],
    }.items():
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *values]
    return metadata


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["1234", "Ġ", "12"]),
        ("llama-bpe", ["123", "4", "Ġ", "12"]),
        ("smollm", ["1", "2", "3", "4", "Ġ", "1", "2"]),
        ("refact", ["1", "2", "3", "4", "Ġ", "1", "2"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "1", "2"]),
    ],
)
def test_splitting_of_numbers(tmp_path, pre, tokens):
    metadata = with_numbers(tokenizer_metadata(pre=pre, add_bos_token=False))
    tokenizer = checkpoints.load(write(tmp_path, metadata=metadata)).tokenizer
    assert tokenizer.tokenize("1234 12") == tokens


def texts(common: str):
    """Texts of characters that meet in words, signs and pieces, and texts with any others too."""
    few = st.sampled_from(common)
    return st.text(few, max_size=40) | st.text(few | st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="module", params=["llama-bpe", "smaug-bpe", "qwen2", "tekken"])
def split_tokenizers(request, tmp_path_factory):
    """Ours and that of transformers, from one file."""
    metadata = with_numbers(tokenizer_metadata(pre=request.param, add_bos_token=False))
    file = write(tmp_path_factory.mktemp("split"), metadata=metadata)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    return checkpoints.load(file).tokenizer, oracle


@settings(max_examples=150, deadline=None)
@given(text=texts("theS catsh'LLDve 01,.!/\n\r\tüß漢<>"))
def test_splitting_equals_that_of_transformers(split_tokenizers, text):
    ours, oracle = split_tokenizers
    text = unicodedata.normalize("NFC", text)  # which Qwen's own tokenizer does
    words = [t.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) for t in split_tokenizers]
    assert words[0] == words[1]
    assert ours.tokenize(text) == oracle.tokenize(text)


def test_qwen_composes_characters(tmp_path):
    model = checkpoints.load(write(tmp_path, metadata=tokenizer_metadata(pre="qwen2")))
    ids = model.tokenizer.encode("cafe\N{COMBINING ACUTE ACCENT}")
    assert model.tokenizer.decode(ids) == "caf\N{LATIN SMALL LETTER E WITH ACUTE}"


@pytest.mark.parametrize(
    ("pre", "whole"),
    [("llama-bpe", True), ("smaug-bpe", False), ("tekken", True), ("qwen2", False)],
)
def test_words_taken_whole(tmp_path, pre, whole):
    """A token that no merge makes."""
    metadata = tokenizer_metadata(pre=pre)
    for key, value in (("tokens", "zq"), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], value]
    tokenizer = checkpoints.load(write(tmp_path, metadata=metadata)).tokenizer
    assert tokenizer.tokenize("zq") == (["zq"] if whole else ["z", "q"])


@pytest.mark.parametrize(("changes", "starts"), [({}, True), ({"add_bos_token": False}, False)])
def test_llama3_starts_with_bos(tmp_path, changes, starts):
    model = checkpoints.load(
        write(tmp_path, metadata=tokenizer_metadata(pre="llama-bpe", **changes))
    )
    assert (model.tokenizer.encode("hat")[0] == 0) == starts
    assert model.tokenizer.encode("hat", add_special_tokens=False)[0] != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: got 'bert'"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre: got 'deepseek-llm'"),
        ({"pre": None}, "tokenizer.ggml.pre: got None"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges: must be a list of strings"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens: must be a list of strings"),
        ({"tokens": "ab"}, "tokenizer.ggml.tokens: must be a list of strings"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type: got 2 entries"),
        ({"add_bos_token": "no"}, "tokenizer.ggml.add_bos_token: got 'no'"),
        (
            {"token_type": [5] * 272} | dict.fromkeys(f"{role}_token_id" for role in ROLES),
            "no token is in use",
        ),
        ({"merges": None}, "'merges' is missing"),
        ({"tokens": ["a", "a"]}, "a token occurs twice"),
        ({"merges": ["t q"]}, "'t q' is not a pair of tokens"),
        ({"merges": ["ab"]}, "'ab' is not a pair of tokens"),
        ({"bos_token_id": 999}, "tokenizer.ggml.bos_token_id: got 999"),
        ({"eos_token_id": "a"}, "tokenizer.ggml.eos_token_id: got 'a'"),
        ({"padding_token_id": 1.0}, "tokenizer.ggml.padding_token_id: got 1.0"),
    ],
)
def test_unusable_tokenizer(tmp_path, changes, message):
    assert message in files.refusal(write(tmp_path, metadata=tokenizer_metadata(**changes)))


def test_more_tokens_than_rows(tmp_path):
    file = write(tmp_path, tokenizer_metadata(), vocab_size=271)
    assert "tokenizer.ggml.tokens: got 272 tokens, must be 271 or less" in files.refusal(file)


# --- SentencePiece ---

NUM_BYTES = 256
MARK = "<mark>"


@functools.cache
def pieces() -> dict[str, float]:
    """Characters, and pieces that compete for them, with scores that their order does not tell."""
    text = "the▁cat(189),üb"
    rng = np.random.default_rng(0)
    competing = {"".join(rng.choice(list("the▁ca"), size)) for size in (2, 3, 4) for _ in range(25)}
    made = ["▁the", "the", "▁th", "▁t", "he", "▁▁", "▁▁▁▁", "18", "189", "üb", *sorted(competing)]
    scores = -rng.permutation(len(made)).astype(float)
    return dict(zip(made, scores.tolist(), strict=True)) | dict.fromkeys(text, -1000.0)


def sentencepiece_metadata(**changes):
    """The metadata that llama.cpp writes for a LLaMA of the first two generations."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES))]
    scores = [0.0] * len(tokens)
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": [*tokens, *pieces(), MARK, "[PAD1]", "[PAD2]"],
        "scores": [*scores, *pieces().values(), -1000.0, -10000.0, -10000.0],
        "token_type": [2, 3, 3] + [6] * NUM_BYTES + [1] * len(pieces()) + [4, 5, 5],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | {
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{{ "
        "eos_token }}{% endfor %}"
    }


NUM_TOKENS = len(sentencepiece_metadata()["tokenizer.ggml.tokens"])


def load_sentencepiece(folder, **changes):
    file = write(folder, sentencepiece_metadata(**changes), vocab_size=NUM_TOKENS + 1)
    return checkpoints.load(file)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return load_sentencepiece(tmp_path_factory.mktemp("sp")).tokenizer


@pytest.fixture(scope="module")
def transformers_sentencepiece():
    fields = sentencepiece_metadata()
    vocab = {token: token_id for token_id, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = tokenization_utils_base.generate_merges(vocab, pieces())
    return transformers.LlamaTokenizer(vocab=vocab, merges=merges)


def merged_by_score(text: str) -> list[str]:
    """What llama.cpp does: merges the pair whose union scores highest, the leftmost of equals."""
    scores = pieces()
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        found = [(scores[pair], -i) for i, pair in enumerate(pairs) if pair in scores]
        if not found:
            break
        i = -max(found)[1]
        symbols[i : i + 2] = [pairs[i]]
    spelled = ([s] if s in scores else [f"<0x{b:02X}>" for b in s.encode()] for s in symbols)
    return list(itertools.chain.from_iterable(spelled))


# A visible space becomes a space, a special token is no text.
PLAIN = texts("the catc  189(),übq漢\n").filter(lambda text: "▁" not in text)


@settings(max_examples=300, deadline=None)
@given(text=PLAIN)
def test_sentencepiece_equals_that_of_llama_cpp_and_transformers(
    sentencepiece, transformers_sentencepiece, text
):
    assert sentencepiece.tokenize(text) == merged_by_score(text)
    ids = sentencepiece.encode(text)
    assert ids == [1, *sentencepiece.convert_tokens_to_ids(merged_by_score(text))]
    if not text.startswith(" "):  # transformers' own puts no space before one
        assert ids[1:] == transformers_sentencepiece.encode(text, add_special_tokens=False)
    assert decode(sentencepiece, ids) == text


@settings(max_examples=100, deadline=None)
@given(text=PLAIN, special=st.booleans())
def test_streamed_sentencepiece(sentencepiece, text, special):
    ids = sentencepiece.encode(text, add_special_tokens=special)
    stream = IncrementalText(sentencepiece)
    pieces = [stream.add(token, i == len(ids)) for i, token in enumerate(ids, start=1)]
    assert "".join(pieces) == decode(sentencepiece, ids) == text


def test_sentencepiece_special_tokens(sentencepiece):
    """A space is put before whatever follows a special token, as llama.cpp does."""
    tokens = ["▁the", "</s>", "▁the", MARK, "▁the"]
    assert sentencepiece.tokenize(f"the</s>the{MARK}the") == tokens
    assert decode(sentencepiece, sentencepiece.encode(f"the</s>the{MARK}the")) == (
        f"the the{MARK} the"
    )


def test_sentencepiece_without_bos_and_prefix(tmp_path):
    tokenizer = load_sentencepiece(tmp_path, add_bos_token=False, add_space_prefix=False).tokenizer
    assert tokenizer.tokenize("ü the") == ["ü", "▁the"]
    ids = tokenizer.encode(" the")
    assert ids == tokenizer.convert_tokens_to_ids(["▁the"])
    assert decode(tokenizer, ids) == " the"


def test_sentencepiece_with_eos(tmp_path):
    tokenizer = load_sentencepiece(tmp_path, add_eos_token=True).tokenizer
    assert tokenizer.encode("the") == [1, *tokenizer.convert_tokens_to_ids(["▁the"]), 2]


def test_sentencepiece_with_stated_merges(tmp_path):
    """They win over scores that tell nothing."""
    changes = {"scores": [-1000.0] * NUM_TOKENS}
    tokenizer = load_sentencepiece(tmp_path, **changes, merges=["h e", "t he"]).tokenizer
    assert tokenizer.tokenize("the") == ["▁", "the"]
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores: all are equal"):
        load_sentencepiece(tmp_path, **changes)


def test_sentencepiece_defaults_and_padding(tmp_path):
    model = load_sentencepiece(tmp_path, padding_token_id=10**6, eot_token_id=5)
    assert model.defaults == checkpoints.Defaults((2, 5), pad_token_id=None, bos_token_id=1)
    # Two entries that fill up the list of tokens, one row of the embedding beyond that.
    assert model.config.num_padding_ids == 3
    vocab_size = model.config.vocab_size
    assert decode(model.tokenizer, [vocab_size - 1, vocab_size - 2]) == ""
    assert max(model.tokenizer.encode("[PAD1]")) < vocab_size - 3


def test_one_bos_per_prompt(sentencepiece):
    chat = [{"role": "user", "content": "the cat"}]
    for prompt, text in ((chat, "[the cat]"), ("the cat", "the cat")):
        ids = prompts.encode(sentencepiece, prompt)
        assert ids[0] == 1 and ids.count(1) == 1
        assert decode(sentencepiece, ids) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "'scores' is missing"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores: got 1 entries"),
        ({"scores": [float("nan")] * NUM_TOKENS}, "tokenizer.ggml.scores: must be finite numbers"),
        ({"token_type": ["a"] * NUM_TOKENS}, "tokenizer.ggml.token_type: must be finite numbers"),
        ({"token_type": None}, "'token_type' is missing"),
        ({"unknown_token_id": 10**6}, "tokenizer.ggml.unknown_token_id: got 1000000"),
    ],
)
def test_unusable_sentencepiece(tmp_path, changes, message):
    assert message in files.refusal(
        write(tmp_path, sentencepiece_metadata(**changes), vocab_size=600)
    )
