"""What `import jlookahead` gives."""

from __future__ import annotations

import subprocess
import sys

import jlookahead as jl


def test_every_public_name_is_there():
    assert all(hasattr(jl, name) for name in jl.__all__)
    assert sorted(jl.__all__) == list(jl.__all__)


def test_submodules_do_not_shadow_functions():
    code = """
import jlookahead.decoding, jlookahead.streaming, jlookahead.checkpoints.loading
import jlookahead as jl
assert callable(jl.generate) and callable(jl.stream) and callable(jl.load)
unwanted = {"torch", "transformers", "optax", "gguf", "ray", "flax.nnx"}
assert not unwanted & set(__import__("sys").modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
