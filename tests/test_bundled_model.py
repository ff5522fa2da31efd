"""The bundled model is a LLaMA checkpoint like any other, small, and worth drafting for."""

from __future__ import annotations

from pathlib import Path

import checkpoints as files
import numpy as np
import pytest
import torch
import transformers

import jlookahead as jl

pytestmark = pytest.mark.optimized

FOLDER = Path(jl.__file__).parent / "bundled"
PROMPTS = [
    "def read_file(path):\n",
    "class Node:\n    def __init__(self",
    "import os\n",
    'def flatten(items):\n    """Return a flat list of the items of nested lists."""\n',
]


@pytest.fixture(scope="module")
def lm():
    return jl.load()


def test_it_fits_into_8_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


def test_transformers_gives_the_same_ids_logits_and_text(lm):
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert ids[0].tolist() == lm.tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            new = model.generate(ids, do_sample=False, max_new_tokens=64, pad_token_id=1)
            logits = model(new).logits.numpy()
        cfg = lm.make_config(max_new_tokens=64)
        out = jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)
        assert out.tokens == new[0, ids.shape[1] :].tolist()
        assert out.text == tokenizer.decode(out.tokens, skip_special_tokens=True)
        np.testing.assert_allclose(
            files.logits(lm.params, lm.config, new.numpy()), logits, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_lookahead_gives_at_least_1_8_tokens_per_round(lm, prompt):
    for strategy in (jl.Lookahead(), jl.Lookahead(7, 5, 7, prompt_lookup=False)):
        cfg = lm.make_config(strategy=strategy, max_new_tokens=128)
        out = jl.generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)
        assert out.tokens_per_round >= 1.8


def test_it_writes_python(lm):
    text = jl.generate(
        lm.params, PROMPTS[0], lm.make_config(max_new_tokens=40), tokenizer=lm.tokenizer
    ).text
    assert "return" in text and "    " in text
