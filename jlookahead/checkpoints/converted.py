"""The project's own checkpoint directory: Orbax parameters, one JSON file, tokenizer files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jlookahead.checkpoints.defaults import Defaults
from jlookahead.checkpoints.errors import first_line
from jlookahead.checkpoints.json_file import read_json
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import Progress, require_finite
from jlookahead.checkpoints.tokenizer import read_tokenizer
from jlookahead.model import LlamaModel, Params
from jlookahead.model_config import ModelConfig, RopeConfig

MANIFEST = "jlookahead.json"
_PARAMS = "params"
_FORMAT = 2  # 1: weights [out, in]


def write_converted(model: LoadedModel, folder: Path) -> None:
    """Writes a model into an existing empty directory."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / _PARAMS).absolute(), model.params)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)
    manifest = {
        "format": _FORMAT,
        "model": dataclasses.asdict(model.config),
        "defaults": dataclasses.asdict(model.defaults),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_converted(folder: Path, dtype: str, progress: Progress) -> LoadedModel:
    """Reads a directory that `write_converted` wrote.

    Raises:
        ValueError: another format version, a damaged file, parameters that are not exactly those
            of the model.
    """
    config, defaults = _parse_manifest(folder / MANIFEST, dtype)
    tokenizer = read_tokenizer(folder)
    params = _read_params(folder / _PARAMS, config, progress)
    return LoadedModel(params, config, tokenizer, defaults)


def _parse_manifest(path: Path, dtype: str) -> tuple[ModelConfig, Defaults]:
    manifest = read_json(path)
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{path}: format: got {manifest.get('format')!r}, supported is {_FORMAT}")
    try:
        model: dict[str, Any] = dict(manifest["model"])
        rope = RopeConfig(**model.pop("rope"))
        config = ModelConfig(**(model | {"rope": rope, "dtype": dtype}))
        defaults = Defaults(**manifest["defaults"])
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from error
    except (TypeError, ValueError) as error:  # TypeError: unknown field, another JSON type
        raise ValueError(f"{path}: {error}") from error
    eos = tuple(defaults.eos_token_ids)  # JSON has no tuples
    return config, dataclasses.replace(defaults, eos_token_ids=eos)


def _read_params(path: Path, config: ModelConfig, progress: Progress) -> Params:
    import orbax.checkpoint as ocp

    # Without a sharding Orbax would restore onto the devices the arrays were saved from.
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        LlamaModel(config).abstract_params(),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(path.absolute()).item_metadata.tree
        except Exception as error:  # whatever Orbax and TensorStore raise on damaged files
            raise _unreadable(path, error) from error
        _require_same_tree(path, abstract, stored)
        try:
            params = checkpointer.restore(path.absolute(), abstract)
        except Exception as error:
            raise _unreadable(path, error) from error
    flat = traverse_util.flatten_dict(params, sep=".")
    for name in progress(list(flat)):
        require_finite(flat[name], f"tensor {name!r} in {path}")
    return params


def _require_same_tree(path: Path, abstract: Params, stored: Any) -> None:
    """Compares names, shapes and kinds from the metadata, where Orbax would be lenient."""
    expected = traverse_util.flatten_dict(abstract, sep=".")
    found = traverse_util.flatten_dict(stored, sep=".")
    for name, leaf in found.items():
        if name not in expected:
            raise ValueError(f"tensor {name!r} in {path}: not a parameter of the model")
        if tuple(leaf.shape) != expected[name].shape:
            raise ValueError(
                f"tensor {name!r} in {path}: shape is {list(leaf.shape)}, must be "
                f"{list(expected[name].shape)}"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"tensor {name!r} in {path}: dtype is {leaf.dtype}, must be floating")
    for name in expected:
        if name not in found:
            raise ValueError(f"{path}: tensor {name!r} is missing")


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a readable Orbax checkpoint: {first_line(error)}")
