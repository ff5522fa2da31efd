"""SmolLM2-135M-Instruct from a quantised GGUF file: Hugging Face's weights, logits, token ids."""

from __future__ import annotations

import functools

import checkpoints as files
import golden
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from jlookahead import checkpoints
from jlookahead.checkpoints.params import hf_tensors
from jlookahead.model_config import ModelConfig
from jlookahead.rope import RopeConfig


@pytest.fixture(scope="session")
def reference(smollm2_gguf):
    """The same file read by transformers."""
    config = load_gguf_checkpoint(smollm2_gguf)["config"]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    read = functools.partial(load_gguf_checkpoint, return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read(smollm2_gguf)["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


RUNS = {run["prompt_name"]: run for run in map(golden.read, golden.recordings("smol"))}


def test_config_and_defaults(smollm2):
    assert smollm2.config == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=100000.0),
    )
    assert smollm2.defaults == checkpoints.Defaults((2,), pad_token_id=2, bos_token_id=1)


def test_weights_equal_those_of_transformers(smollm2, reference):
    expected = reference.state_dict()
    del expected["lm_head.weight"]  # tied
    actual = hf_tensors(smollm2.params)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(actual[name], tensor.numpy(), err_msg=name)


def test_logits_equal_hf_pytorch(smollm2, reference):
    tokens = np.array([RUNS["p03_code_fib"]["ar_ids"]])
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    error = np.abs(files.logits(smollm2.params, smollm2.config, tokens) - expected).max(axis=-1)
    # Logits reach 35, and float32 itself is off by up to 2e-4 (Hugging Face's own, against its
    # float64), so the bound of 1e-4 holds for the typical position only.
    assert np.median(error) < 1e-4
    assert error.max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", sorted(RUNS))
def test_recorded_prompt_ids(smollm2, name):
    run, tokenizer = RUNS[name], smollm2.tokenizer
    ids = run["prompt_ids"]
    if ids[0] == smollm2.defaults.bos_token_id:  # <|im_start|> opens a chat
        chat = [{"role": "user", "content": run["prompt_text"]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    else:
        text = run["prompt_text"]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(tokenizer.decode(run["ar_ids"])) == run["ar_ids"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "ünï 漢字 🙂\u200d\n\t\r\n  x",
        "3.14159e-10 = 007",
        "<|im_end|>a<|im_start|>",
        "\x00",
    ],
)
def test_any_text_survives(smollm2, text):
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text
