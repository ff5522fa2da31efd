"""The project's own checkpoint directory: Orbax parameters, one JSON file, tokenizer files.

Each top-level module (`layers_0`, `layers_1`, ..., `norm`) is an Orbax checkpoint of its own, which
appears whole or not at all: a conversion holds one of them in memory and goes on where a killed one
ended. The JSON file is written last; without it the directory is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jlookahead.checkpoints.defaults import Defaults, merge_defaults
from jlookahead.checkpoints.errors import first_line, writing
from jlookahead.checkpoints.json_file import read_json
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import Progress, flat, quantized, require_finite, unflattened
from jlookahead.checkpoints.tokenizer import Tokenizer, read_tokenizer
from jlookahead.model import LlamaModel, Params
from jlookahead.model_config import ModelConfig
from jlookahead.rope import RopeConfig
from jlookahead.sharding import param_sharding

MANIFEST = "jlookahead.json"
PARAMS = "params"
_FORMAT = 3  # 1: weights [out, in]; 2: one Orbax checkpoint of all modules


def module_of(name: str) -> str:
    """`layers_0.mlp.up_proj.kernel` -> `layers_0`."""
    return name.split(".")[0]


def written_modules(folder: Path) -> set[str]:
    """The modules whose parameters an interrupted conversion has written."""
    path = folder / PARAMS
    return {entry.name for entry in path.iterdir() if _is_whole(entry)} if path.is_dir() else set()


def write_params(leaves: Iterable[tuple[str, jax.Array]], folder: Path) -> None:
    """Writes parameters given module after module, never holding more than one.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        for module, group in itertools.groupby(leaves, lambda leaf: module_of(leaf[0])):
            path = (folder / PARAMS / module).absolute()
            tree = unflattened(group)[module]
            with writing(path):
                checkpointer.save(path, tree)
                del tree  # before the next one is read
                checkpointer.wait_until_finished()


def write_manifest(
    config: ModelConfig, tokenizer: Tokenizer | None, defaults: Defaults, folder: Path
) -> None:
    """Writes all but the parameters, which makes the directory a checkpoint."""
    if tokenizer is not None:
        with writing(folder):
            tokenizer.save_pretrained(folder)
    manifest = {
        "format": _FORMAT,
        "model": dataclasses.asdict(config),
        "defaults": dataclasses.asdict(defaults),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_converted(
    folder: Path, dtype: str, quantize: str | None, mesh: Mesh | None, progress: Progress
) -> LoadedModel:
    """Reads such a directory; the arguments are those of `load`.

    Raises:
        ValueError: another format version, a damaged file, parameters that are not exactly those
            of the model.
    """
    stored, defaults = parse_manifest(folder / MANIFEST, dtype)
    tokenizer = read_tokenizer(folder)
    config = stored
    if quantize is not None:
        config = dataclasses.replace(stored, quantization=quantize)
    params = _read_params(folder / PARAMS, stored, config, mesh, progress)
    return LoadedModel(params, config, tokenizer, defaults)


def parse_manifest(path: Path, dtype: str) -> tuple[ModelConfig, Defaults]:
    """The network, computed in `dtype`, and its generation defaults."""
    manifest = read_json(path)
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{path}: format: got {manifest.get('format')!r}, supported is {_FORMAT}")
    try:
        model: dict[str, Any] = dict(manifest["model"])
        rope = RopeConfig(**model.pop("rope"))
        config = ModelConfig(**(model | {"rope": rope, "dtype": dtype}))
        ids = dataclasses.asdict(Defaults(**manifest["defaults"]))
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from error
    except (TypeError, ValueError) as error:  # TypeError: unknown field, another JSON type
        raise ValueError(f"{path}: {error}") from error
    ids["eos_token_id"] = ids.pop("eos_token_ids")
    return config, merge_defaults([(str(path), ids)], config.vocab_size)


def _read_params(
    path: Path, stored: ModelConfig, config: ModelConfig, mesh: Mesh | None, progress: Progress
) -> Params:
    """Reads the parameters of `stored`, and quantises them if `config` says so and it does not."""
    import orbax.checkpoint as ocp

    abstract = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=param_sharding(name, leaf.shape, config, mesh)
        )
        for name, leaf in flat(LlamaModel(stored).abstract_params()).items()
    }
    for problem in leaf_problems(path, abstract, read_metadata(path)):
        raise ValueError(problem)
    leaves: list[tuple[str, jax.Array]] = []
    modules = {
        module: dict(group)
        for module, group in itertools.groupby(abstract.items(), lambda leaf: module_of(leaf[0]))
    }
    with ocp.StandardCheckpointer() as checkpointer:
        for module in progress(list(modules)):
            try:
                tree = checkpointer.restore(
                    (path / module).absolute(), unflattened(modules[module].items())[module]
                )
            except Exception as error:  # whatever Orbax and TensorStore raise on damaged files
                raise _unreadable(path / module, error) from error
            for name, array in flat({module: tree}).items():
                if jnp.issubdtype(array.dtype, jnp.floating):
                    require_finite(array, f"tensor {name!r} in {path}")
                if stored.quantization is None:
                    leaves.extend(quantized(name, array, config, mesh))
                else:
                    leaves.append((name, array))
    return unflattened(leaves)


def read_metadata(path: Path) -> dict[str, Any]:
    """Shape and dtype of every stored array by dotted name.

    Raises:
        ValueError: a checkpoint that Orbax cannot read.
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        try:
            entries = sorted(entry for entry in path.absolute().iterdir() if _is_whole(entry))
            return flat(
                {entry.name: checkpointer.metadata(entry).item_metadata.tree for entry in entries}
            )
        except Exception as error:  # whatever Orbax and TensorStore raise on damaged files
            raise _unreadable(path, error) from error


def leaf_problems(path: Path, expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """What differs in names, shapes and kinds, one line each, where Orbax would be lenient."""
    for name, leaf in found.items():
        tensor = f"tensor {name!r} in {path}"
        if name not in expected:
            yield f"{tensor}: not a parameter of the model"
            continue
        shape, kind = expected[name].shape, jnp.floating
        if expected[name].dtype == jnp.int8:
            kind = jnp.int8
        if tuple(leaf.shape) != shape:
            yield f"{tensor}: shape is {list(leaf.shape)}, must be {list(shape)}"
        elif not jnp.issubdtype(leaf.dtype, kind):
            yield f"{tensor}: dtype is {leaf.dtype}, must be {kind.__name__}"
    for name in expected:
        if name not in found:
            yield f"{path}: tensor {name!r} is missing"


def _is_whole(path: Path) -> bool:
    """Whether Orbax has finished this checkpoint; it writes under another name before."""
    import orbax.checkpoint as ocp

    return path.is_dir() and not path.name.startswith(".") and not ocp.utils.is_tmp_checkpoint(path)


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a readable Orbax checkpoint: {first_line(error)}")
