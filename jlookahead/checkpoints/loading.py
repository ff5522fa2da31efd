"""`load`: from whatever names a checkpoint to a model in memory."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path

from jax.sharding import Mesh

from jlookahead.checkpoints import converted, gguf_file, hf_directory, hub
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import Progress, match_tensors, read_params, unflattened
from jlookahead.checkpoints.stored import StoredModel
from jlookahead.checkpoints.tokenizer import read_tokenizer
from jlookahead.checks import check_choice
from jlookahead.model_config import DTYPES
from jlookahead.quantization import QUANTIZATIONS
from jlookahead.sharding import complete_mesh

# Files that are read of a checkpoint directory.
_SUFFIXES = (".json", ".safetensors", ".model", ".jinja")


def load(
    path_or_id: str | Path | None = None,
    *,
    dtype: str = "float32",
    quantize: str | None = None,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Loads a checkpoint of a LLaMA-family model onto the default device, or onto a mesh.

    Args:
        path_or_id: one of

            - None: the bundled tiny model;
            - a Hugging Face directory (`config.json`, `model.safetensors` or shards with their
              index);
            - a directory written by `python -m checkpoints_convert`;
            - a `.gguf` file (needs the extra `jlookahead[gguf]`); quantised tensors are
              dequantised;
            - a Hugging Face Hub id, `"organisation/name"`, taken from the local hub cache or
              downloaded into it. A path that exists wins over an id.
        dtype: of parameters and computation: `float32`, `bfloat16` or `float16`.
        quantize: `int8` for kernels in bytes, a scale per output channel; saves memory, not exact.
            None leaves the weights as they are.
        mesh: with an axis `tensor`, over which the parameters are split; every part is read for
            itself (of a GGUF file the whole tensor for every part). It may span the devices of
            several processes, each of which loads at the same time, sees the same files, and
            reads what its own devices keep. None for the default device.

    Returns:
        the model, its configuration, tokenizer and generation defaults.

    Raises:
        FileNotFoundError: no such path or repository, or a file of the checkpoint is missing.
        ValueError: an unknown dtype, an unsupported architecture, or a checkpoint that does not
            give every parameter exactly once. All messages are one line.
    """
    return load_with_progress(path_or_id, dtype=dtype, quantize=quantize, mesh=mesh, progress=iter)


def load_with_progress(
    path_or_id: str | Path | None,
    *,
    dtype: str,
    progress: Progress,
    quantize: str | None = None,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """`load`, with `progress` wrapped around the names of what is read."""
    _check(dtype, quantize)
    mesh = None if mesh is None else complete_mesh(mesh)
    path = locate(path_or_id)
    if is_converted(path):
        return converted.read_converted(path, dtype, quantize, mesh, progress)
    stored = open_checkpoint(path, dtype=dtype, quantize=quantize)
    params = unflattened(read_params(match_tensors(stored), stored.config, progress, mesh))
    return LoadedModel(params, stored.config, stored.tokenizer, stored.defaults)


def open_checkpoint(path: Path, *, dtype: str, quantize: str | None = None) -> StoredModel:
    """Reads all of a Hugging Face directory or GGUF file but the weights; see `load`."""
    _check(dtype, quantize)
    if path.is_dir():
        stored = hf_directory.open_hf_directory(path, dtype)
    elif path.suffix == ".gguf":
        stored = gguf_file.open_gguf(path, dtype)
    else:
        raise ValueError(f"{path}: not a checkpoint, which is a directory or a .gguf file")
    config = dataclasses.replace(stored.config, quantization=quantize)
    return dataclasses.replace(stored, config=config)


def load_without_params(path_or_id: str | Path | None, *, dtype: str) -> LoadedModel:
    """What `load` gives, but nothing in `params`: no weights are read."""
    path = locate(path_or_id)
    if is_converted(path):
        _check(dtype, None)
        config, defaults = converted.parse_manifest(path / converted.MANIFEST, dtype)
        return LoadedModel({}, config, read_tokenizer(path), defaults)
    stored = open_checkpoint(path, dtype=dtype)
    return LoadedModel({}, stored.config, stored.tokenizer, stored.defaults)


def fingerprint(path: Path) -> list[list[str | int]]:
    """Name, size and time of change of a checkpoint's file, or of the files in its directory."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    found = [(str(file.absolute()), file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


def is_converted(path: Path) -> bool:
    """Whether this is a directory that `python -m checkpoints_convert` wrote."""
    return (path / converted.MANIFEST).is_file()


def _check(dtype: str, quantize: str | None) -> None:
    check_choice("dtype", dtype, DTYPES)
    check_choice("quantize", quantize, (None, *QUANTIZATIONS))


def locate(path_or_id: str | Path | None) -> Path:
    """The file or directory that `load` reads, downloaded if it must be."""
    if path_or_id is None:
        path = Path(str(importlib.resources.files("jlookahead") / "bundled"))
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: this installation lacks the bundled model")
        return path
    if not isinstance(path_or_id, str | Path) or not str(path_or_id):
        raise ValueError(f"path_or_id: got {path_or_id!r}, allowed is a path or a hub id")
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    if isinstance(path_or_id, str) and hub.is_repo_id(path_or_id):
        return hub.snapshot(path_or_id)
    raise FileNotFoundError(f"{path_or_id}: no such file or directory")
