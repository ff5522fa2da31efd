"""Every architecture and RoPE type: the logits and the greedy text of Hugging Face's PyTorch."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import checkpoints as files
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import jlookahead as jl
from jlookahead.checkpoints.hf_config import from_hf_config, to_hf_config
from jlookahead.checkpoints.hf_directory import parse_config

# Newer versions of transformers spell it `cache`; older ones do not know that name.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

SIZES = files.SIZES | dict.fromkeys(["eos_token_id", "bos_token_id", "pad_token_id"])
# Few of these are what the architecture has by default, so that each field is seen to matter.
FAMILIES = {
    "llama": {},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 8},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 0,
    },
    "qwen3": {},
    "qwen3-bias": {"model_type": "qwen3", "attention_bias": True},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.25,
        "head_dim": 8,
    },
}
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}
# The rotation must matter, and reach beyond the 32 positions of the original context.
NUM_TOKENS = 96


def hf_model(tmp_path, name: str, **fields):
    """A random model of transformers, and the same one loaded from what it saves."""
    fields = SIZES | FAMILIES[name] | fields
    kind = fields.pop("model_type", name)
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    model.save_pretrained(tmp_path)
    return model, jl.load(tmp_path)


def step_by_step(model, tokens: np.ndarray) -> np.ndarray:
    """Logits `[T, V]` of transformers, one token a pass, as it decodes."""
    cache, logits = transformers.DynamicCache(), []
    with torch.no_grad():
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -1].numpy())
    return np.stack(logits)


def assert_same_model(model, lm: jl.LoadedModel, strategy: jl.Strategy) -> None:
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], NUM_TOKENS)
    expected = step_by_step(model, tokens)
    assert expected.std() > 0.5
    actual = files.logits(lm.params, lm.config, tokens[None])[0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)

    prompt = tokens[:20]
    with torch.no_grad():
        ids = model.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=64,
        )
    cfg = lm.make_config(strategy=strategy, max_new_tokens=64)
    out = jl.generate(lm.params, prompt, cfg)
    assert out.tokens == ids[0, len(prompt) :].tolist()


# Biases, norms and factors act on every row by itself, but windows on what rows see of one another.
PACKED_FAMILIES = ("llama", "mistral", "qwen2-sliding")


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path, name):
    model, lm = hf_model(tmp_path, name)
    packed = jl.Lookahead(4, 3, 3)
    assert_same_model(model, lm, packed if name in PACKED_FAMILIES else jl.Autoregressive())


def test_a_sliding_window_behind_a_long_prompt(tmp_path):
    """Whole chunks of the prefix lie before the window."""
    model, lm = hf_model(tmp_path, "mistral", max_position_embeddings=1024)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 96, length).tolist() for length in (700, 530)]
    cfg = lm.make_config(strategy=jl.Lookahead(4, 3, 3), max_new_tokens=40)
    for prompt, tokens in zip(prompts, jl.generate(lm.params, prompts, cfg).tokens, strict=True):
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                do_sample=False,
                max_new_tokens=40,
            )
        assert tokens == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ROPES)
def test_rope_types(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 100.0} | ROPES[kind]
    context = 48 if kind == "dynamic" else 128
    model, lm = hf_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=context)
    assert lm.config.rope.type == rope["rope_type"]
    # Dynamic frequencies differ from row to row.
    assert_same_model(model, lm, jl.Lookahead(4, 3, 3) if context == 48 else jl.Autoregressive())
    unscaled = dataclasses.replace(lm.config, rope=jl.RopeConfig(theta=100.0))
    tokens = np.arange(NUM_TOKENS)[None] % 90
    scaled, plain = (files.logits(lm.params, c, tokens) for c in (lm.config, unscaled))
    assert np.abs(scaled - plain)[0, -1].max() > 0.1, "the scaling changes nothing"


@pytest.mark.parametrize("kind", ["default", *ROPES])
def test_rope_spellings(kind):
    """transformers 5, 4.4x, and before `rope_type`."""
    parameters = ROPES.get(kind, {})
    rope_type = parameters.get("rope_type", kind)
    rest = {name: value for name, value in parameters.items() if name != "rope_type"}
    base = {name: SIZES[name] for name in SIZES if "token_id" not in name}
    base |= {"model_type": "llama", "max_position_embeddings": 32}
    new, middle, old = (
        base | {"rope_parameters": {"rope_type": rope_type, "rope_theta": 5e5, **rest}},
        base | {"rope_theta": 5e5, "rope_scaling": {"rope_type": rope_type, **rest}},
        base | {"rope_theta": 5e5, "rope_scaling": {"type": rope_type, **rest}},
    )
    config = from_hf_config(new)
    assert config.rope.type == rope_type and config.rope.theta == 5e5
    assert from_hf_config(middle) == from_hf_config(old) == config


@pytest.mark.parametrize(
    "kind, context", [("linear", 64), ("dynamic", 128), ("llama3", 64), ("yarn", 128)]
)
def test_context(kind, context):
    """Dynamic and YaRN scaling stretch the original context; the others say what it has become."""
    fields = SIZES | {"model_type": "llama", "max_position_embeddings": 64}
    parameters = {"rope_type": kind} | ROPES[kind]
    config = from_hf_config(fields | {"rope_parameters": parameters})
    assert config.max_position_embeddings == context


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["default", *ROPES])
def test_configs_translate_back(name, kind):
    fields = {"model_type": name} | SIZES | FAMILIES[name]
    fields["rope_parameters"] = {"rope_type": kind, "rope_theta": 77.0} | ROPES.get(kind, {})
    config = from_hf_config(fields)
    assert from_hf_config(to_hf_config(config)) == config


def test_what_no_architecture_has():
    config = from_hf_config(SIZES | {"model_type": "qwen3"})
    with pytest.raises(ValueError, match="no architecture of llama, mistral, .* mlp_bias=True"):
        to_hf_config(dataclasses.replace(config, mlp_bias=True))


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"model_type": "mixtral"},
            "model_type: got 'mixtral', supported .* llama, mistral, qwen2",
        ),
        ({"model_type": "qwen2_moe"}, "model_type: got 'qwen2_moe'"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias: got True"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim: missing"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: got 0"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling: got 0"),
        ({"model_type": "granite", "attention_multiplier": None}, "attention_multiplier: got None"),
        ({"model_type": "llama", "embedding_multiplier": 12.0}, "embedding_multiplier: got 12.0"),
        ({"model_type": "llama", "sliding_window": 4096}, "sliding_window: got 4096"),
        ({"model_type": "llama", "attention_bias": "yes"}, "qkv_bias: got 'yes'"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "architectures: got",
        ),
    ],
)
def test_fields_of_families(fields, message):
    hf = {name: SIZES[name] for name in SIZES if "token_id" not in name} | fields
    with pytest.raises(ValueError, match=message):
        from_hf_config(hf)


WINDOW_FIELDS = {
    "sliding_window": [None, 3, 7],
    "use_sliding_window": [False, True],
    "max_window_layers": [0, 1, 2, 28],
    "layer_types": [
        None,
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["full_attention", "sliding_attention"],
    ],
    "num_key_value_heads": [1, 2, 4],
}


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["mistral", "qwen2", "qwen3"]),
    fields=st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in WINDOW_FIELDS.items()}
    ),
)
@pytest.mark.filterwarnings("ignore")  # transformers' own, about such configurations
def test_windows_and_heads_are_those_of_transformers(name, fields):
    """Whatever is there, null, or left out."""
    hf = {name: SIZES[name] for name in SIZES if "token_id" not in name} | {"model_type": name}
    del hf["num_key_value_heads"]
    hf |= fields
    theirs = transformers.AutoConfig.for_model(
        **{name: value for name, value in hf.items() if name != "layer_types" or value}
    )
    kinds = getattr(theirs, "layer_types", None) if name != "mistral" else None
    slides = [kind == "sliding_attention" for kind in kinds or ["sliding_attention"]]
    window = theirs.sliding_window if any(slides) else None
    if "num_key_value_heads" not in hf:
        with pytest.raises(ValueError, match="num_key_value_heads: missing"):
            from_hf_config(hf)
    elif window is not None and not all(slides):
        with pytest.raises(ValueError, match="sliding_window: 1 of 2 layers"):
            from_hf_config(hf)
    else:
        config = from_hf_config(hf)
        assert config.sliding_window == window
        assert config.num_key_value_heads == theirs.num_key_value_heads


def test_where_both_spellings_of_rope_differ():
    """The older one wins in transformers, and so does a top-level original context."""
    fields = SIZES | {"model_type": "llama", "rope_theta": 7.0}
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}}
    assert from_hf_config(fields | both).rope == jl.RopeConfig("linear", 7.0, 2.0)
    yarn = {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 9}}
    config = from_hf_config(fields | yarn | {"original_max_position_embeddings": 16})
    assert config.rope.original_max_position_embeddings == 16


def test_an_attention_scale_that_is_the_usual_one():
    """llama.cpp leaves it out where transformers must be told."""
    config = dataclasses.replace(
        from_hf_config(SIZES | FAMILIES["granite"] | {"model_type": "granite"}),
        attention_scale=None,
    )
    assert to_hf_config(config)["attention_multiplier"] == config.head_dim**-0.5
    assert from_hf_config(to_hf_config(config)) == config


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    2**40,
    0.5,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [1],
    {},
    {"x": 1},
]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_fuzzed_configs(data):
    """Any field may hold anything: it is translated or refused in one line."""
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    kind = data.draw(st.sampled_from(["default", *ROPES]))
    fields = {"model_type": name} | SIZES | FAMILIES[name]
    rope = {"rope_type": kind, "rope_theta": 77.0} | ROPES.get(kind, {})
    fields |= {"rope_parameters": rope, "architectures": None, "layer_types": None}
    for target in (fields, rope):
        if data.draw(st.booleans()):
            target[data.draw(st.sampled_from(sorted(target)))] = data.draw(st.sampled_from(JUNK))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(fields))
        try:
            config = parse_config(path, "float32")
        except ValueError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
        else:
            assert from_hf_config(to_hf_config(config)) == config
