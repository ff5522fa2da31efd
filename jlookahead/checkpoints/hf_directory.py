"""A Hugging Face directory: `config.json`, safetensors, tokenizer."""

from __future__ import annotations

import functools
from pathlib import Path

from jlookahead.checkpoints.defaults import merge_defaults
from jlookahead.checkpoints.errors import first_line
from jlookahead.checkpoints.json_file import read_json
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.params import Progress, StoredTensor, fill_params
from jlookahead.checkpoints.tokenizer import read_tokenizer
from jlookahead.model_config import ModelConfig, from_hf_config

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_FLOATING = ("F64", "F32", "F16", "BF16")


def read_hf_directory(folder: Path, dtype: str, progress: Progress) -> LoadedModel:
    """Reads a `save_pretrained` directory of a LLaMA.

    Raises:
        FileNotFoundError: `config.json` or weights missing.
        ValueError: an unsupported configuration, or files that contradict each other.
    """
    config = _parse_config(folder / CONFIG, dtype)
    tensors = _read_tensors(folder)
    tokenizer = read_tokenizer(folder)
    sources = [
        (str(folder / name), read_json(folder / name))
        for name in (GENERATION_CONFIG, CONFIG)
        if (folder / name).is_file()
    ]
    if tokenizer is not None:
        names = ("eos_token_id", "pad_token_id", "bos_token_id")
        fields = {name: getattr(tokenizer, name) for name in names}
        sources.append((f"tokenizer of {folder}", fields))
    defaults = merge_defaults(sources, config.vocab_size)
    params = fill_params(tensors, config, folder, progress)
    return LoadedModel(params, config, tokenizer, defaults)


def _parse_config(path: Path, dtype: str) -> ModelConfig:
    fields = read_json(path)
    try:
        return from_hf_config(fields, dtype)
    except (TypeError, ValueError) as error:  # TypeError: a field of another JSON type
        raise ValueError(f"{path}: {error}") from error


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files: those the index names if there is one. They need not exist.

    Raises:
        ValueError: an index that cannot be used.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    return sorted(set(_weight_map(folder / INDEX).values()))


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the weight files by name; reads headers only.

    Raises:
        FileNotFoundError: a file that is missing.
        ValueError: a file that cannot be read, or one that disagrees with the index.
    """
    if not (folder / INDEX).is_file():
        _require_single_file(folder)
        return _read_header(folder / SINGLE)
    weight_map = _weight_map(folder / INDEX)
    files = sorted(set(weight_map.values()))
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file}: no such file, but {INDEX} names it")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(folder / file).items():
            if name not in weight_map:
                raise ValueError(f"{tensor}: not in {INDEX}")
            if weight_map[name] != file:
                raise ValueError(f"{tensor}: {INDEX} places it in {weight_map[name]}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{folder / file}: lacks tensor {name!r}, which {INDEX} places there")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must be a non-empty object")
    for file in weight_map.values():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"{index}: got {file!r}, must be the name of a file beside the index")
    return weight_map


def _require_single_file(folder: Path) -> None:
    if (folder / SINGLE).is_file():
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ValueError(
            f"{folder}: PyTorch weights only; load them with transformers and write safetensors "
            "with model.save_pretrained(DIRECTORY)"
        )
    raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX} (safetensors weights) found")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file: {first_line(error)}") from error
    tensors = {}
    for name in handle.keys():
        info = handle.get_slice(name)
        read = functools.partial(handle.get_tensor, name)
        tensors[name] = StoredTensor(name, file, tuple(info.get_shape()), read)
        if info.get_dtype() not in _FLOATING:
            raise ValueError(
                f"{tensors[name]}: dtype is {info.get_dtype()}, must be one of "
                f"{', '.join(_FLOATING)}"
            )
    return tensors
