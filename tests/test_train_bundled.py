"""The training script writes a checkpoint that transformers reads as the same network."""

import checkpoints as files
import jax
import numpy as np
import pytest

import jlookahead as jl
from checkpoints_convert import train_bundled

TINY = "--steps 3 --max-files 6 --batch-tokens 256 --vocab-size 400 --hidden-size 32 "
TINY += "--intermediate-size 48 --layers 1"
TEXT = "def f(x):\n    return x , 12  # naïve\n\n\tx.y ' s\r\n  <|endoftext|>日本\n\n\n"


def train(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_bundled, "STAGES", ((0.7, 32), (1.0, 64)))
        train_bundled.main(["--out", str(out), *TINY.split()])
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return train(tmp_path_factory.mktemp("bundled"))


def test_logits_are_those_of_transformers(checkpoint):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    lm = jl.load(checkpoint)
    expected_tree = jax.tree.structure(jl.LlamaModel(lm.config).abstract_params())
    assert jax.tree.structure(lm.params) == expected_tree
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (2, 24), dtype=np.int32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(files.logits(lm.params, lm.config, tokens), expected, atol=1e-4)


def test_tokenizer_is_lossless_and_adds_nothing(checkpoint):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.bos_token == tokenizer.eos_token == train_bundled.END_OF_TEXT
    assert len(tokenizer.encode("\n" + 4 * " ")) == 2


def test_run_is_a_function_of_the_seed(checkpoint, tmp_path):
    train(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (checkpoint / name).read_bytes()


def test_windows_cover_the_stream():
    stream = np.arange(1001, dtype=np.int32)
    batches = train_bundled.windows(stream, length=10, rows=4, seed=0)
    seen = np.concatenate([next(batches)[:, :-1].ravel() for _ in range(25)])
    assert len(np.unique(seen)) > 970
