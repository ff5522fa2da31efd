"""Peak memory of loading and of converting a synthetic checkpoint of 2.2 GB.

    python -m benchmarks.load_memory --out result.json

The bound: 1.3 times the larger of one weight file and one device's share, and 500 MB. Every figure
is the highest resident size of a process of its own, the mapped pages of files included. Simulated
devices share the host's memory, so their shares are all in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import jlookahead as jl
from benchmarks.report import versions
from checkpoints_convert.__main__ import main as convert
from jlookahead.checkpoints import hf_directory
from jlookahead.checkpoints.hf_config import to_hf_config
from jlookahead.checkpoints.params import flat, hf_name
from jlookahead.model import LlamaModel

# TinyLlama's sizes.
CONFIG = jl.ModelConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=64,
    dtype="bfloat16",
)
NUM_FILES, DEVICES = 5, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "FOLDER"), help="in this process")
    args = parser.parse_args()
    if args.one:
        what, folder = args.one
        MEASURED[what](Path(folder))
        print(peak_bytes())
        return
    command = [sys.executable, "-m", "benchmarks.load_memory", "--out", str(args.out), "--one"]
    devices = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        sizes = write_checkpoint(Path(folder) / "source")
        peaks = {}
        for what in MEASURED:
            out = subprocess.check_output([*command, what, folder], env=environment, text=True)
            peaks[what] = int(out.splitlines()[-1])
            print(f"{what}: {peaks[what] / 1e6:,.0f} MB", flush=True)
    report = {
        "what": "highest resident bytes of a process",
        "versions": versions(),
        "bytes_of_files": sizes,
        "bound": {
            "loading": int(1.3 * sum(sizes)) + 500_000_000,
            "converting": int(1.3 * max(sizes)) + 500_000_000,
        },
        "peak": peaks,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def write_checkpoint(folder: Path) -> list[int]:
    """Random weights in Hugging Face's layout, file by file; returns the files' sizes."""
    folder.mkdir()
    (folder / hf_directory.CONFIG).write_text(json.dumps(to_hf_config(CONFIG)))
    leaves = flat(LlamaModel(CONFIG).abstract_params())
    rng, weight_map = np.random.default_rng(0), {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        tensors = {}
        for name, leaf in list(leaves.items())[number::NUM_FILES]:
            shape = leaf.shape[::-1] if name.endswith("kernel") else leaf.shape
            values = rng.standard_normal(shape, np.float32) * 0.02
            tensors[hf_name(name)] = values.astype(ml_dtypes.bfloat16)
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / hf_directory.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return [(folder / file).stat().st_size for file in sorted(set(weight_map.values()))]


def peak_bytes() -> int:
    """Of this process; `ru_maxrss` would count the parent's, too."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def load(folder: Path) -> None:
    jl.load(folder / "source", dtype="bfloat16")


def load_onto_mesh(folder: Path) -> None:
    mesh = jax.make_mesh((DEVICES,), ("tensor",))
    jl.load(folder / "source", dtype="bfloat16", mesh=mesh)


def load_as_int8(folder: Path) -> None:
    jl.load(folder / "source", dtype="bfloat16", quantize="int8")


def from_hf(folder: Path) -> None:
    arguments = ["from-hf", str(folder / "source"), str(folder / "new"), "--dtype", "bfloat16"]
    assert convert(arguments) == 0


def load_converted(folder: Path) -> None:
    jl.load(folder / "new", dtype="bfloat16")


MEASURED: dict[str, Callable[[Path], None]] = {
    "only imports": lambda folder: None,
    "load": load,
    "load onto a mesh": load_onto_mesh,
    "load as int8": load_as_int8,
    "from-hf": from_hf,
    "load what from-hf wrote": load_converted,
}


if __name__ == "__main__":
    main()
