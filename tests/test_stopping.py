"""Stop strings end a row at the very token that completes one, in whatever way tokens spell it.

The oracle is plain search in the tokenizer's own decoding, after every token.
"""

from __future__ import annotations

import random
import string

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SuccessorTable, plain
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import jlookahead as jl
from jlookahead.stopping import compile_stop_strings
from jlookahead.text import cut_at_stop, num_held_back

STRATEGIES = [
    jl.Autoregressive(),
    jl.Lookahead(4, 4, 3),
    jl.PromptLookup(6),
    jl.Recycling(20),
    jl.Jacobi(6),
]
ALPHABET = "abé€🙂 "


def sentencepiece_tokenizer(strips_space: bool) -> PreTrainedTokenizerFast:
    """LLaMA's kind: spaces are marked, bytes have tokens, a space at the beginning is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "a", "b", "ab", "ba", "▁a", "b▁", "▁▁", "é", "€", "aé", "🙂"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips_space)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def lm():
    return jl.load()


@pytest.fixture(scope="module")
def tokenizers(lm):
    return {
        "bundled": lm.tokenizer,
        "sentencepiece": sentencepiece_tokenizer(strips_space=False),
        "stripped": sentencepiece_tokenizer(strips_space=True),
    }


def ids_of_alphabet(tokenizer) -> list[int]:
    """Tokens that spell nothing but bytes of the alphabet, and special ones."""
    return [
        token
        for token in range(len(tokenizer))
        if set(tokenizer.decode([token])) <= set(ALPHABET)
        or tokenizer.convert_ids_to_tokens(token) in byte_names()
        or token in tokenizer.all_special_ids
    ]


def byte_names() -> set[str]:
    """Single bytes of characters of several, as either kind of tokenizer names them."""
    byte_level = tiny_tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str(ALPHABET)
    letters = {letter for word, _ in byte_level for letter in word}
    return letters | {f"<0x{byte:02X}>" for byte in {*ALPHABET.encode(), 0xC3, 0xFF}}


def decode(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def first_stop(tokenizer, ids, strings) -> int | None:
    """The token that completes a stop string."""
    for i in range(len(ids)):
        text = decode(tokenizer, ids[: i + 1])
        if any(s in text for s in strings):
            return i
    return None


def first_cut(text: str, strings) -> str:
    """`text` before the stop string complete first, the longest of several."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in strings if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


STOP_STRINGS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["bundled", "sentencepiece", "stripped"])
def test_the_automaton_finds_what_plain_search_finds(tokenizers, kind):
    tokenizer = tokenizers[kind]
    pool = ids_of_alphabet(tokenizer)
    assert len(pool) > 15
    found = [0, 0]

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(STOP_STRINGS, st.lists(st.sampled_from(pool), max_size=12), st.data())
    def check(strings, ids, data):
        # Tokens of a stop string among them, or long ones would never be met; most often not all.
        middle = tokenizer.encode(data.draw(st.sampled_from(strings)), add_special_tokens=False)
        middle = middle[: data.draw(st.integers(0, len(middle)))]
        cut = data.draw(st.integers(0, len(ids)))
        ids = ids[:cut] + middle + ids[cut:]
        stop = compile_stop_strings(tuple(strings), tokenizer, len(tokenizer), 1)
        table = np.asarray(stop.table)
        state, got = 0, None
        for i, token in enumerate(ids):
            state = table[state, token]
            if state < 0:
                got = i
                break
        assert got == first_stop(tokenizer, ids, strings), (strings, ids)
        found[got is None] += 1

    check()
    assert min(found) > 5


def test_blocks_are_read_as_one_text(tokenizers):
    """`follow` and `after` cut a text anywhere, row by row, and go on from there."""
    tokenizer = tokenizers["bundled"]
    rng = random.Random(0)
    pool = ids_of_alphabet(tokenizer)
    strings = ("ab a", "é🙂", "bbb")
    rows = [[rng.choice(pool) for _ in range(70)] for _ in range(4)]
    for row, text in zip(rows, ("ab a", "é🙂", "bbb"), strict=False):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        at = rng.randrange(50)
        row[at : at + len(ids)] = ids
    expected = [first_stop(tokenizer, row, strings) for row in rows]
    stop = compile_stop_strings(strings, tokenizer, len(tokenizer), 4)
    at, got = [0] * 4, [None] * 4
    while min(at) < 55:
        block = jnp.array([row[i : i + 5] for row, i in zip(rows, at, strict=True)])
        walk = stop.follow(block)
        sizes = [rng.choice([0, 1, 3, 5]) if i < 55 else 0 for i in at]
        complete = np.asarray(walk.is_complete)
        for b, size in enumerate(sizes):
            if got[b] is None and complete[b, :size].any():
                got[b] = at[b] + int(complete[b, :size].argmax())
        stop = walk.after(jnp.array(sizes))
        at = [i + size for i, size in zip(at, sizes, strict=True)]
    for b, index in enumerate(expected):
        if index is not None and index < at[b]:
            assert got[b] == index
        else:
            assert got[b] is None
    assert any(index is not None for index in got)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(STOP_STRINGS, st.text(ALPHABET, max_size=12))
def test_text_is_cut_where_the_first_stop_string_begins(strings, text):
    assert cut_at_stop(text, strings) == first_cut(text, strings)
    held = num_held_back(text, strings)
    suffixes = {n for n in range(len(text) + 1) for s in strings if len(s) > n}
    assert held == max(
        n
        for n in suffixes
        if any(len(s) > n and s.startswith(text[len(text) - n :]) for s in strings)
    )


PROMPTS = ["def read_file(path):\n", "class Node:\n    def __init__(self", "import os\n"]


@pytest.mark.parametrize(
    "strategy, sampling",
    [
        (jl.Autoregressive(), jl.Sampling()),
        (jl.Lookahead(4, 4, 3), jl.Sampling(0.7, top_k=30, seed=5)),
        (jl.Recycling(20), jl.Sampling()),
    ],
)
def test_generated_text_is_plain_text_up_to_the_stop(lm, strategy, sampling):
    rng = random.Random(0)
    options = dict(strategy=strategy, sampling=sampling, max_new_tokens=40)
    cfg = lm.make_config(**options)
    whole = plain(lm.params, PROMPTS, cfg, tokenizer=lm.tokenizer)
    reasons = set()
    for _ in range(6):
        strings = []
        for text in rng.sample(whole.text, rng.choice([1, 2, 3])):
            start = rng.randrange(len(text) - 1)
            strings.append(text[start : start + rng.choice([1, 2, 3, 5, 9])])
        cfg = lm.make_config(**options, stop_strings=tuple(strings))
        out = jl.generate(lm.params, PROMPTS, cfg, tokenizer=lm.tokenizer)
        for row, tokens in enumerate(whole.tokens):
            last = first_stop(lm.tokenizer, tokens, strings)
            is_stop = last is not None
            assert out.tokens[row] == (tokens[: last + 1] if is_stop else tokens)
            assert out.text[row] == first_cut(whole.text[row], strings)
            assert out.finish_reason[row] == ("stop" if is_stop else whole.finish_reason[row])
            reasons.add(is_stop)
    assert reasons == {True, False}


def test_residual_sampling_stops_at_the_first_stop_string(lm):
    """Its text is not plain decoding's, but that of its own run without stop strings: what was
    drawn before the stop does not depend on what would have ended the text."""
    sampling = jl.Sampling(0.7, top_k=30, seed=5, verify="residual")
    options = dict(strategy=jl.PromptLookup(6), sampling=sampling, max_new_tokens=40)
    whole = jl.generate(lm.params, PROMPTS, lm.make_config(**options), tokenizer=lm.tokenizer)
    strings = tuple(text[9:12] for text in whole.text)
    cfg = lm.make_config(**options, stop_strings=strings)
    out = jl.generate(lm.params, PROMPTS, cfg, tokenizer=lm.tokenizer)
    for row, tokens in enumerate(whole.tokens):
        assert out.tokens[row] == tokens[: first_stop(lm.tokenizer, tokens, strings) + 1]
        assert out.text[row] == first_cut(whole.text[row], strings)
    assert out.finish_reason == ["stop"] * 3


# A cyclic text, every lap drafted from the prompt: blocks of many tokens.
LETTERS = "abcdefghijklm"


def run_cycle(prompt: str, cycle: str = LETTERS, **options) -> jl.Result:
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in cycle]
    successor = jnp.zeros(len(tokenizer), int).at[jnp.array(ids)].set(jnp.array(ids[1:] + ids[:1]))
    eos = tuple(tokenizer.convert_tokens_to_ids(e) for e in options.pop("eos", ""))
    cfg = jl.Config(eos_token_ids=eos, **options)
    prompt = [ids[cycle.index(letter)] for letter in prompt]
    model = SuccessorTable(len(tokenizer))
    return jl.generate(successor, prompt, cfg, tokenizer=tokenizer, model=model)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    "options, text, reason",
    [
        ({"stop_strings": ("fg",), "eos": "e"}, "bcde", "eos"),
        ({"stop_strings": ("cd",), "eos": "e"}, "b", "stop"),
        # An EOS id that is a letter completes the stop string.
        ({"stop_strings": ("de",), "eos": "e"}, "bc", "stop"),
        ({"stop_strings": ("cd", "e"), "eos": "f"}, "b", "stop"),
        # The budget ends on the stop string's last token, and one token before.
        ({"stop_strings": ("fg",), "max_new_tokens": 6}, "bcde", "stop"),
        ({"stop_strings": ("fg",), "max_new_tokens": 5}, "bcdef", "length"),
        # The cache is full with the last token: the stop string is what ends the row.
        ({"stop_strings": ("d",), "cache_len": 30}, "bc", "stop"),
        # The prompt, which ends in "ma", and what spans its end do not count.
        ({"stop_strings": ("ma", "ab", "abc"), "max_new_tokens": 15}, "bcdefghijkl", "stop"),
        ({"stop_strings": ("bx", "x"), "max_new_tokens": 3}, "bcd", "length"),
    ],
)
def test_what_ends_a_row(strategy, options, text, reason):
    prompt = LETTERS * 2 + "a"
    out = run_cycle(prompt, **{"max_new_tokens": 40, "strategy": strategy, **options})
    assert (out.text, out.finish_reason) == (text, reason)


@pytest.mark.parametrize("strategy", STRATEGIES[1:4], ids=str)
def test_a_stop_string_at_every_offset_of_two_blocks(strategy):
    """Also across their boundary; the longest block here has 17 tokens."""
    cycle = string.ascii_letters
    text = cycle[1:]
    num_rounds = set()
    for start in range(2 * 17):
        out = run_cycle(
            cycle * 3 + cycle[0],
            cycle,
            strategy=strategy,
            stop_strings=(text[start : start + 3],),
            max_new_tokens=51,
        )
        assert (out.text, out.finish_reason) == (text[:start], "stop")
        assert len(out.tokens) == start + 3
        num_rounds.add(out.num_rounds)
    assert len(num_rounds) > 2 and max(num_rounds) < 25, "several blocks of several tokens"


def test_new_stop_strings_compile_nothing():
    """The automaton is an argument; small ones have one size."""
    from jlookahead import decoding

    run_cycle("ab", stop_strings=("fg",), max_new_tokens=9)
    programs = decoding.run_rounds._cache_size(), decoding._start._cache_size()
    assert run_cycle("ab", stop_strings=("gh", "ijk"), max_new_tokens=9).text == "cdef"
    assert (decoding.run_rounds._cache_size(), decoding._start._cache_size()) == programs


def test_what_changes_about_a_tokenizer_is_seen():
    """A special token spells nothing, an added one does: nothing stale is used."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["ab!"])
    added = len(tokenizer) - 1
    for special in (False, True):
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": ["ab!"]})
        stop = compile_stop_strings(("b!",), tokenizer, len(tokenizer), 1)
        assert (int(stop.table[0, added]) == -1) == (not special)
        assert ("b!" in decode(tokenizer, [added])) == (not special)


class Shouting(PreTrainedTokenizerFast):
    """Changes what its backend has decoded."""

    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()


def test_tokenizers_that_tidy_up():
    """LLaMA 3's asks for a clean-up: `out.text` and stop strings see the text without it."""
    backend = tiny_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    ids = tokenizer.encode("a .b", add_special_tokens=False)
    assert compile_stop_strings((" .",), tokenizer, len(tokenizer), 1) is not None
    successor = jnp.zeros(len(tokenizer), int)
    for now, after in zip(ids, ids[1:], strict=False):
        successor = successor.at[now].set(after)
    cfg = jl.Config(max_new_tokens=len(ids) - 1, stop_strings=("b",))
    model = SuccessorTable(len(tokenizer))
    out = jl.generate(successor, ids[:1], cfg, tokenizer=tokenizer, model=model)
    pieces = [s.text for s in jl.stream(successor, ids[:1], cfg, tokenizer=tokenizer, model=model)]
    assert (out.text, out.finish_reason) == (" .", "stop")
    assert "".join(pieces) == " ."
    with pytest.raises(ValueError, match="Shouting decodes otherwise than its backend_tokenizer"):
        compile_stop_strings(("a",), Shouting(tokenizer_object=backend), 300, 1)
