"""`load`: from whatever names a checkpoint to a model in memory."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from jlookahead.checkpoints import converted, gguf_file, hf_directory, hub
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import Progress
from jlookahead.model_config import DTYPES


def load(path_or_id: str | Path | None = None, *, dtype: str = "float32") -> LoadedModel:
    """Loads a LLaMA checkpoint onto the default device.

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

    Returns:
        the model, its configuration, tokenizer and generation defaults.

    Raises:
        FileNotFoundError: no such path or repository, or a file of the checkpoint is missing.
        ValueError: an unknown dtype, an unsupported architecture, or a checkpoint that does not
            give every parameter exactly once. All messages are one line.
    """
    return load_with_progress(path_or_id, dtype=dtype, progress=iter)


def load_with_progress(
    path_or_id: str | Path | None, *, dtype: str, progress: Progress
) -> LoadedModel:
    """`load`, with `progress` wrapped around the names of the tensors that are read."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, allowed are {', '.join(DTYPES)}")
    path = _locate(path_or_id)
    if path.is_dir():
        if (path / converted.MANIFEST).is_file():
            return converted.read_converted(path, dtype, progress)
        return hf_directory.read_hf_directory(path, dtype, progress)
    if path.suffix == ".gguf":
        return gguf_file.read_gguf(path, dtype, progress)
    raise ValueError(f"{path}: not a checkpoint, which is a directory or a .gguf file")


def _locate(path_or_id: str | Path | None) -> Path:
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
