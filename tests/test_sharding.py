"""Loading onto a mesh, on simulated devices: every device reads its part, the text is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import checkpoints as files
import pytest
import transformers

from checkpoints_convert.__main__ import main

CONFIG = files.hf_config(num_key_value_heads=2, intermediate_size=64)

# Runs in a process of its own: the number of devices is fixed when JAX starts.
SCRIPT = """
import sys
import jax, numpy as np
import jlookahead as jl
from jlookahead.checkpoints import hf_directory
from jlookahead.checkpoints.params import flat

source, num_devices = sys.argv[1], int(sys.argv[2])
assert len(jax.devices()) == 8
mesh = jax.make_mesh((num_devices,), ("tensor",))
whole = jl.load(source)
parts = []
read = hf_directory._read_part

def recorded(file, name, index):
    part = read(file, name, index)
    parts.append((name, part.shape))
    return part

hf_directory._read_part = recorded
lm = jl.load(source, mesh=mesh)
hf_directory._read_part = read
for name, leaf in flat(lm.params).items():
    np.testing.assert_array_equal(leaf, flat(whole.params)[name], err_msg=name)
    shard = leaf.sharding.shard_shape(leaf.shape)
    split = 1
    if name.endswith("kernel") and not (num_devices > 2 and ("k_proj" in name or "v_proj" in name)):
        split = num_devices
    if "q_proj" in name or "o_proj" in name:
        split = num_devices if num_devices <= 4 else 1  # 4 heads
    if name.startswith("embed_tokens"):
        split = num_devices
    assert np.prod(leaf.shape) == split * np.prod(shard), (name, shard)
if parts:  # of a Hugging Face directory
    largest = max(np.prod(shape) for name, shape in parts if "up_proj" in name)
    assert largest == 64 * 32 // num_devices, "more is read than a device keeps"

cfg = lm.make_config(strategy=jl.Lookahead(4, 3, 3), max_new_tokens=24, eos_token_ids=())
prompts = [[5, 6, 7, 5, 6], [1]]
assert jl.generate(lm.params, prompts, cfg).tokens == jl.generate(whole.params, prompts, cfg).tokens
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    source = files.write_hf(folder / "hf", CONFIG, files.random_tensors(CONFIG), num_shards=2)
    assert main(["from-hf", str(source), str(folder / "orbax")]) == 0
    return {"hf": source, "orbax": folder / "orbax"}


def on_eight_devices(script: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("kind, num_devices", [("hf", 2), ("hf", 8), ("orbax", 4)])
def test_parts_and_text(sources, kind, num_devices):
    done = on_eight_devices(SCRIPT, sources[kind], num_devices)
    assert done.returncode == 0, done.stderr[-3000:]


RESTORE = """
import sys
import jax, numpy as np
import orbax.checkpoint as ocp
import jlookahead as jl
from jlookahead.checkpoints import converted
from jlookahead.checkpoints.params import flat

source, folder = sys.argv[1], sys.argv[2]
meshes = {
    "8": jax.make_mesh((8,), ("tensor",)),
    "4": jax.make_mesh((4,), ("tensor",)),
    "1": jax.make_mesh((1,), ("tensor",)),
    "2x4": jax.make_mesh((2, 4), ("lookahead", "tensor")),
    "4x2": jax.make_mesh((4, 2), ("lookahead", "tensor")),
    "2x2x2": jax.make_mesh((2, 2, 2), ("data", "lookahead", "tensor")),
    "data": jax.make_mesh((2,), ("data",)),
}
expected = flat(jl.load(source).params)
from pathlib import Path
pairs = (
    ("8", "1"), ("1", "4"), ("4", "8"),
    ("8", "2x4"), ("2x4", "4x2"), ("4x2", "2x2x2"), ("2x2x2", "data"), ("data", "8"),
)
for saved, restored in pairs:
    lm = jl.load(source, mesh=meshes[saved])
    target = Path(folder) / f"from-{saved}-to-{restored}"
    target.mkdir()
    converted.write_params(flat(lm.params).items(), target)
    converted.write_manifest(lm.config, lm.tokenizer, lm.defaults, target)
    again = jl.load(target, mesh=meshes[restored])
    for name, leaf in flat(again.params).items():
        assert len(leaf.sharding.device_set) == meshes[restored].size
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
    alone = jl.load(target)  # the default device
    assert all(len(leaf.sharding.device_set) == 1 for leaf in flat(alone.params).values())
"""


def test_saved_on_some_devices_restored_on_others(sources, tmp_path):
    done = on_eight_devices(RESTORE, sources["hf"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


LOAD = """
import sys
import jax, numpy as np
import jlookahead as jl
from jlookahead.checkpoints.params import flat

meshes = jax.make_mesh((4,), ("tensor",)), jax.make_mesh((2, 2), ("data", "tensor"))
for source in sys.argv[1:]:
    for quantize in (None, "int8"):
        expected = flat(jl.load(source, quantize=quantize).params)
        for mesh in meshes:
            leaves = flat(jl.load(source, quantize=quantize, mesh=mesh).params)
            assert leaves.keys() == expected.keys()
            for name, leaf in leaves.items():
                assert len(leaf.sharding.device_set) == 4
                np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
"""


def test_every_kind_of_parameter(sources, tmp_path):
    """Tied head, biases, norms of heads, bytes and scales; all formats; one axis and two."""
    fields = {name: CONFIG[name] for name in CONFIG if name not in ("model_type", "architectures")}
    config = transformers.Qwen3Config(
        **fields | {"attention_bias": True, "tie_word_embeddings": True}
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen3")
    file = files.write_gguf(tmp_path / "m.gguf", CONFIG, files.random_tensors(CONFIG))
    done = on_eight_devices(LOAD, tmp_path / "qwen3", file, sources["orbax"])
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_mesh_with_another_axis(sources):
    import jax

    import jlookahead as jl

    with pytest.raises(ValueError, match=r"mesh: got axes \('model',\), allowed are 'data'"):
        jl.load(sources["hf"], mesh=jax.make_mesh((1,), ("model",)))
    with pytest.raises(ValueError, match="mesh: got 'x', allowed is a jax.sharding.Mesh"):
        jl.load(sources["hf"], mesh="x")
