"""Weight-only int8: what is stored, what it computes, how far it is from float32."""

from __future__ import annotations

import dataclasses
import json

import checkpoints as files
import hypothesis.extra.numpy as hnp
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY, plain

import jlookahead as jl
from checkpoints_convert.__main__ import main
from jlookahead import checkpoints
from jlookahead.checkpoints.params import flat, hf_tensors
from jlookahead.model_config import DTYPES
from jlookahead.quantization import quantize

CONFIG = files.hf_config(tie_word_embeddings=True, attention_bias=True)


def write_source(tmp_path):
    tensors = files.random_tensors(CONFIG)
    rng = np.random.default_rng(5)
    for i in range(CONFIG["num_hidden_layers"]):
        for name in "qkvo":
            weight = tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"]
            bias = rng.normal(0, 0.3, weight.shape[0]).astype(np.float32)
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = bias
    return files.write_hf(tmp_path / "source", CONFIG, tensors), tensors


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        (5, 4),
        elements=st.floats(-(2.0**90), 2.0**90, width=32).filter(lambda x: not 0 < abs(x) < 1e-30),
    )
)
def test_every_number_is_within_half_a_step(kernel):
    values, scale = map(np.asarray, quantize(kernel))
    assert (values.dtype, values.shape, scale.shape) == (np.int8, kernel.shape, (4,))
    error = np.abs(values * scale.astype(np.float64) - kernel)
    assert (error <= 0.5001 * scale).all()
    largest = np.abs(kernel).max(axis=0)
    np.testing.assert_array_equal(np.abs(values).max(axis=0), np.where(largest > 0, 127, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_loading(tmp_path, dtype):
    source, tensors = write_source(tmp_path)
    lm = jl.load(source, dtype=dtype, quantize="int8")
    assert (lm.config.quantization, lm.config.dtype) == ("int8", dtype)
    for name, leaf in flat(lm.params).items():
        is_linear = "_proj." in name
        if name.endswith("kernel") and is_linear:
            assert leaf.dtype == np.int8
        elif name.endswith("scale"):
            assert leaf.dtype == np.float32
        else:
            assert str(leaf.dtype) == dtype, name
    written = hf_tensors(lm.params)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        step = np.abs(tensor).max(axis=-1, keepdims=True) / 127 if "_proj.weight" in name else 0
        rounding = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
        bound = 0.51 * step + 2 * rounding * np.abs(tensor).max() + 1e-7
        assert (np.abs(written[name].astype(np.float32) - tensor) <= bound).all(), name


def test_the_scale_applied_after_the_product_is_the_multiplied_kernel(tmp_path):
    source, _ = write_source(tmp_path)
    lm = jl.load(source, quantize="int8")
    files.write_hf(tmp_path / "multiplied", CONFIG, hf_tensors(lm.params))
    multiplied = jl.load(tmp_path / "multiplied")
    tokens = np.random.default_rng(0).integers(0, 96, (2, 30))
    actual = files.logits(lm.params, lm.config, tokens)
    expected = files.logits(multiplied.params, multiplied.config, tokens)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    exact = jl.load(source)
    difference = np.abs(files.logits(exact.params, exact.config, tokens) - actual).max()
    assert 1e-3 < difference < 0.1 * np.abs(actual).max()


def test_drafts_change_no_token(tmp_path):
    lm = jl.load(write_source(tmp_path)[0], quantize="int8")
    cfg = lm.make_config(strategy=jl.Lookahead(4, 3, 3), max_new_tokens=40, eos_token_ids=())
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    got = jl.generate(lm.params, prompts, cfg)
    assert got.tokens == plain(lm.params, prompts, cfg).tokens


def test_conversion(tmp_path, capsys):
    source, _ = write_source(tmp_path)
    new = str(tmp_path / "new")
    assert main(["from-hf", str(source), new, "--quantize", "int8"]) == 0
    lm, direct = jl.load(new), jl.load(source, quantize="int8")
    assert lm.config == direct.config
    jax.tree.map(np.testing.assert_array_equal, lm.params, direct.params)
    # What was converted in float32 is quantised when it is loaded.
    assert main(["from-hf", str(source), str(tmp_path / "exact")]) == 0
    later = jl.load(tmp_path / "exact", quantize="int8")
    jax.tree.map(np.testing.assert_array_equal, later.params, direct.params)

    capsys.readouterr()
    assert main(["compare", str(source), new, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert 1e-3 < report["max_difference"] < 0.2 * report["largest_logit"]
    assert main(["inspect", new, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["quantization"] == "int8"
    assert report["memory_bytes"]["int8 and bfloat16"] < report["memory_bytes"]["bfloat16"]
    assert main(["to-hf", new, str(tmp_path / "back")]) == 0
    back = hf_tensors(jl.load(tmp_path / "back").params)
    for name, tensor in hf_tensors(lm.params).items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def test_int8_kernels_that_should_be_floats(tmp_path):
    source, _ = write_source(tmp_path)
    assert main(["from-hf", str(source), str(tmp_path / "new")]) == 0

    def change(params):
        kernel = params["layers_0"]["mlp"]["up_proj"]["kernel"]
        params["layers_0"]["mlp"]["up_proj"]["kernel"] = np.asarray(kernel).astype(np.int8)

    files.rewrite_converted(tmp_path / "new", change)
    with pytest.raises(ValueError, match="'layers_0.mlp.up_proj.kernel' .* dtype is int8"):
        jl.load(tmp_path / "new")


def test_unknown_kinds():
    with pytest.raises(ValueError, match="quantize: got 'int4', allowed are None, int8"):
        checkpoints.load(quantize="int4")
    with pytest.raises(ValueError, match="quantization: got 'int4', allowed are None, int8"):
        dataclasses.replace(TINY, quantization="int4")
