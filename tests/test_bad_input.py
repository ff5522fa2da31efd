"""Every mistake a caller can make is a `ValueError` naming field and value, before compiling."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from models import TINY, tiny_params
from test_discipline import count_compilations
from transformers import PreTrainedTokenizerFast

import jlookahead as jl
from jlookahead.call import prepare
from jlookahead.checkpoints.hf_config import from_hf_config
from jlookahead.processors import (
    AllowedTokens,
    BannedTokens,
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
)

HF = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


MASKED = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]}


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "row 0 is empty"),
        ([[1], []], "row 1 is empty"),
        ("text", "needs a tokenizer"),
        ([{"role": "user", "content": "hi"}], "needs a tokenizer"),
        ([1, 97], "holds id 97, allowed are 0 to 96"),
        ([1, -1], "holds id -1"),
        ([[1, 2], [3, 500]], "row 1 holds id 500"),
        ([0.5, 1.0], "integer ids"),
        (np.zeros((1, 2, 3), int), "shape"),
        (jnp.zeros((2, 3, 4)), "shape"),
        (7, "shape"),
        (None, "shape"),
        ([[1, 2], "text"], "all of one kind"),
        (["text", [1, 2]], "all of one kind"),
        ([[1, 2], [[3]]], "row 1 has shape"),
        ([True, False], "integer ids"),
        (np.zeros((0, 5), int), "got a batch of no rows"),
        (({"role": "user", "content": "a"},), "needs a tokenizer"),
        ({"input_ids": [[1, 2]]}, "got a mapping with"),
        ({"attention_mask": [[1, 1]]}, "got a mapping with"),
        ({**MASKED, "position_ids": [[0, 1, 2]]}, "position_ids"),
        ({**MASKED, "token_type_ids": [[0, 1, 1]]}, "token_type_ids are not all 0"),
        ({**MASKED, "attention_mask": [[1, 0, 1]]}, "row 0 has a hole"),
        ({**MASKED, "attention_mask": [[0, 0, 0]]}, "row 0 hides all of it"),
        ({**MASKED, "attention_mask": [[1, 1]]}, r"row 0 has shape \(2,\), must be \(3,\)"),
        ({**MASKED, "attention_mask": [[1, 1, 1]] * 2}, "2 rows, must be 1"),
        ({**MASKED, "attention_mask": [[1, 2, 0]]}, "other values than 0 and 1"),
        ({**MASKED, "attention_mask": None}, "shape"),
        ({**MASKED, "input_ids": [[1, 2, 97]]}, "holds id 97"),
    ],
)
def test_prompts(prompt, message):
    params = tiny_params(0)
    with count_compilations() as count, pytest.raises(ValueError, match=message):
        jl.generate(params, prompt, jl.Config(model=TINY))
    assert count[0] == 0


def test_params_must_be_parameters():
    """Most likely of all mistakes: the loaded model in their place."""
    lm = jl.load()
    with pytest.raises(ValueError, match="params: got a LoadedModel, allowed is a nested dict"):
        jl.generate(lm, [1, 2, 3], lm.make_config())


@pytest.mark.parametrize("argument", ["model", "tokenizer"])
@pytest.mark.parametrize("value", [5, "x", jl.LlamaModel])
def test_what_is_no_model_and_no_tokenizer(argument, value):
    cfg, wrong = jl.Config(model=TINY), {argument: value}
    for call in (jl.generate, jl.stream, jl.iter_rounds):
        with pytest.raises(ValueError, match=f"{argument}: got"):
            next(iter(call(tiny_params(0), [1], cfg, **wrong)))
    with pytest.raises(ValueError, match=f"{argument}: got"):
        jl.Session(tiny_params(0), cfg, **wrong).generate([1])


def test_numbers_beyond_all_bounds():
    for field in ("temperature", "top_p", "min_p"):
        with pytest.raises(ValueError, match=f"{field}: got 1000"):
            jl.Sampling(**{field: 10**400})


def test_numbers_may_be_numpys():
    plain = jl.Config(model=TINY, sampling=jl.Sampling(0.5, seed=3), max_new_tokens=5)
    sampling = jl.Sampling(np.float32(0.5), seed=np.int64(3))
    cfg = jl.Config(model=TINY, sampling=sampling, max_new_tokens=np.int32(5))
    params = tiny_params(0)
    assert jl.generate(params, [1], cfg).tokens == jl.generate(params, [1], plain).tokens


class Unhashable:
    __hash__ = None

    def __call__(self, logits, context):
        return logits


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": -1}, "max_new_tokens: got -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: got 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens: got True"),
        ({"pad_token_id": 2**31}, "pad_token_id: got 2147483648"),
        ({"eos_token_ids": [2]}, "eos_token_ids"),
        ({"eos_token_ids": (-2,)}, "eos_token_ids: got -2"),
        ({"pad_token_id": None}, "pad_token_id: got None"),
        ({"cache_len": 0}, "cache_len: got 0"),
        ({"strategy": "lookahead"}, "strategy: got 'lookahead'"),
        ({"sampling": None}, "sampling: got None"),
        ({"sampling": {"temperature": 1}}, "sampling"),
        ({"strategy": jl.Lookahead}, "strategy"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens: got 5, .* 0 to 4"),
        ({"min_new_tokens": -1}, "min_new_tokens: got -1"),
        ({"logprobs": 1}, "logprobs: got 1, allowed is True or False"),
        ({"processors": (3,)}, r"processors: got \(3,\), must be a tuple of functions"),
        ({"processors": [lambda logits, context: logits]}, "processors: got .* must be a tuple"),
        ({"processors": (Unhashable(),)}, "processors: got .* must be hashable"),
        ({"stop_strings": "ab"}, "stop_strings: got 'ab', must be a tuple of non-empty strings"),
        ({"stop_strings": ("",)}, "stop_strings: got"),
        ({"stop_strings": (b"a",)}, "stop_strings: got"),
        ({"stop_strings": ("a\ufffd",)}, "stop_strings: got .*allowed is valid Unicode"),
        ({"stop_strings": ("\ud800",)}, "stop_strings: got .*allowed is valid Unicode"),
        ({"stop_strings": ("é" * 501,)}, "stop_strings: got 1002 bytes altogether"),
    ],
)
def test_config(options, message):
    with pytest.raises(ValueError, match=message):
        jl.Config(model=TINY, **options)


def of(*processors):
    return {"processors": processors}


def first_row_only(logits, context):
    return logits[0]


def halved(logits, context):
    return logits.astype("bfloat16")


def nothing(logits, context):
    return None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": 1022}, "max_new_tokens: got 1022 after a prompt of 3 tokens"),
        ({"max_new_tokens": 10**12}, "max_new_tokens: got 1000000000000"),
        ({"cache_len": 2}, r"cache_len: got 2, allowed are 3 \(the longest prompt\) to 1024"),
        ({"cache_len": 1025}, "cache_len: got 1025, allowed are 3"),
        ({"eos_token_ids": (97,)}, "eos_token_ids: got 97"),
        ({"stop_strings": ("a",)}, "stop_strings: got .* without tokenizer="),
        (of(BannedTokens((97,))), "processors: BannedTokens: ids: got 97, .* 0 to 96"),
        (of(AllowedTokens((-1,))), "processors: AllowedTokens: ids: got -1"),
        (of(AllowedTokens(())), "AllowedTokens: ids: got .* at least one"),
        (of(BannedTokens(3)), "BannedTokens: ids: got 3, must be a tuple"),
        (of(LogitBias(((97, 1.0),))), "LogitBias: ids: got 97"),
        (of(LogitBias((3, 1.0))), "LogitBias: bias: got .* pairs"),
        (of(LogitBias(((3, 1.0, 2),))), "LogitBias: bias: got .* pairs"),
        (of(LogitBias(((3, "a"),))), "LogitBias: bias: got 'a'"),
        (of(LogitBias(((3, float("inf")),))), "LogitBias: bias: got inf"),
        (of(LogitBias(((3, 1.0), (3, 2.0)))), "LogitBias: bias: got .* occurs twice"),
        (of(RepetitionPenalty(0.0)), "RepetitionPenalty: penalty: got 0.0"),
        (of(PresencePenalty("x")), "PresencePenalty: penalty: got 'x'"),
        (of(FrequencyPenalty(float("nan"))), "FrequencyPenalty: penalty: got nan"),
        (of(BannedTokens((1,)), AllowedTokens((1,))), "allow no token at all"),
        (
            {**of(AllowedTokens((1,))), "min_new_tokens": 2, "eos_token_ids": (1,)},
            "min_new_tokens: got 2, but no token is allowed beside EOS ids",
        ),
        (of(first_row_only), r"first_row_only: returned float32\[97\], must be float32\[1, 97\]"),
        (of(halved), r"halved: returned bfloat16\[1, 97\], must be float32"),
        (of(nothing), "nothing: returned None, must be"),
        (of(lambda logits: logits), "cannot be traced: TypeError"),
    ],
)
def test_calls(options, message):
    params = tiny_params(0)
    with count_compilations() as count, pytest.raises(ValueError, match=message):
        jl.generate(params, [1, 2, 3], jl.Config(model=TINY, **options))
    assert count[0] == 0


class Slow:
    """A tokenizer without a backend to ask."""

    def decode(self, ids, **options):
        return ""


def test_tokenizers_that_stop_strings_cannot_read():
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}))
    backend.decoder = tokenizers.decoders.WordPiece()
    word_piece = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    cfg = jl.Config(model=TINY, stop_strings=("a",))
    for tokenizer, message in ((Slow(), "got a Slow, needs a fast"), (word_piece, "stop_strings:")):
        with count_compilations() as count, pytest.raises(ValueError, match=message):
            jl.generate(tiny_params(0), [1], cfg, tokenizer=tokenizer)
        assert count[0] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"window": 2.0},
        {"window": 257},
        {"ngram": 1},
        {"ngram": 33},
        {"ngram": 2, "reference": True},
        {"candidates": 0},
        {"candidates": -1},
        {"pool_capacity": 0},
        {"prompt_pool": "no"},
        {"prompt_lookup": None},
        {"reference": 1},
    ],
)
def test_lookahead_knobs(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=re.escape(f"{name}: got {options[name]!r}")):
        jl.Lookahead(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": "1"},
        {"temperature": None},
        {"temperature": True},
        {"temperature": 1e39},
        {"top_p": "a"},
        {"min_p": None},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**32},
        {"verify": "exact"},
        {"verify": None},
    ],
)
def test_sampling(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        jl.Sampling(**options)


@pytest.mark.parametrize(
    "row_ids", [[], [1, 2], [-1], [2**31], [0.7], [True], ["0"], "7", 0, [[1]]]
)
def test_row_ids(row_ids):
    with pytest.raises(ValueError, match="row_ids"):
        jl.generate(tiny_params(0), [1], jl.Config(model=TINY), row_ids=row_ids)


@pytest.mark.parametrize(
    "strategy, window, message",
    [
        (jl.Lookahead(4, 3, 2), [1, 2, 3, 4], "reference=True"),
        (jl.Autoregressive(), [1], "reference=True"),
        (jl.Lookahead(4, 3, 2, reference=True), [1, 2, 3], r"W\+N-3 = 4"),
        (jl.Lookahead(4, 3, 2, reference=True), [1, 2, 3, 97], "0 to 96"),
        (jl.Lookahead(4, 3, 2, reference=True), [1, 2, 3, 4.5], "dtype"),
    ],
)
def test_initial_window(strategy, window, message):
    cfg = jl.Config(model=TINY, strategy=strategy)
    with pytest.raises(ValueError, match=message):
        next(jl.iter_rounds(tiny_params(0), [1, 2], cfg, initial_window=window))


def test_errors_of_iter_rounds_come_at_the_call():
    with pytest.raises(ValueError, match="row 0 is empty"):
        jl.iter_rounds(tiny_params(0), [], jl.Config(model=TINY))


def test_a_device_array_is_read_without_compiling():
    prompt = jnp.arange(900) % 97
    cfg = jl.Config(model=TINY, max_new_tokens=10)
    params = tiny_params(0)
    with count_compilations() as count:
        prepare(params, prompt, cfg)
    assert count[0] == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.pop("norm"), "norm.weight is missing"),
        (lambda p: p.update(extra=jnp.ones(2)), "extra is not a parameter"),
        (lambda p: p.update(norm={"weight": jnp.ones(31)}), r"norm.weight is float32\[31\]"),
        (lambda p: p.update(norm={"weight": jnp.ones(32, "bfloat16")}), "bfloat16"),
        (lambda p: p.pop("layers_1"), "layers_1.*is missing"),
    ],
)
def test_params_of_another_model(change, message):
    params = dict(tiny_params(0))
    change(params)
    with pytest.raises(ValueError, match=f"params: .*{message}"):
        jl.generate(params, [1], jl.Config(model=TINY))


@pytest.mark.parametrize("cfg", [None, {}, jl.Lookahead()])
def test_a_config_is_needed(cfg):
    with pytest.raises(ValueError, match="cfg: got"):
        jl.generate(tiny_params(0), [1], cfg)


def test_a_model_is_needed():
    with pytest.raises(ValueError, match="model: got 'x'"):
        jl.Config(model="x")
    with pytest.raises(ValueError, match="model"):
        jl.generate(None, [1], jl.Config())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mamba"}, "model_type: got 'mamba'"),
        ({"model_type": None}, "model_type: got None"),
        ({"attention_bias": "yes"}, "qkv_bias: got 'yes'"),
        ({"mlp_bias": 1}, "mlp_bias: got 1"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim: got 7"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type: got 'longrope'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope factor: got 0.5"),
        ({"rope_scaling": {"type": "linear"}}, "factor missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor: got 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "beta"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: got 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: got 'small'"),
        ({"rope_theta": float("nan")}, "rope theta: got nan"),
        ({"rope_theta": "abc"}, "rope theta: got 'abc'"),
        ({"rope_scaling": "x"}, "rope_parameters: got 'x'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures: got"),
        ({"vocab_size": 10**12}, "vocab_size: got 1000000000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: got 0"),
    ],
)
def test_hf_configs(changes, message):
    assert from_hf_config(HF).vocab_size == 97
    with pytest.raises(ValueError, match=message):
        from_hf_config({**HF, **changes})


def test_dtype():
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        from_hf_config(HF, dtype="int8")


def test_a_full_cache_ends_a_row():
    """Not an error: the row stops with a reason, at exactly the capacity asked for."""
    cfg = jl.Config(model=TINY, cache_len=8, max_new_tokens=50)
    out = jl.generate(tiny_params(0), [[1, 2, 3], [4] * 8], cfg)
    assert [len(row) for row in out.tokens] == [5, 0]
    assert out.finish_reason == ["cache_full", "cache_full"]
    unlimited = jl.generate(tiny_params(0), [1, 2, 3], jl.Config(model=TINY, max_new_tokens=50))
    assert out.tokens[0] == unlimited.tokens[:5]
