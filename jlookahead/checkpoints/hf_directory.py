"""A Hugging Face directory: `config.json`, safetensors, tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np

from jlookahead.checkpoints.defaults import Defaults, merge_defaults
from jlookahead.checkpoints.errors import first_line
from jlookahead.checkpoints.hf_config import from_hf_config
from jlookahead.checkpoints.json_file import read_json
from jlookahead.checkpoints.stored import Index, StoredModel, StoredTensor
from jlookahead.checkpoints.tokenizer import Tokenizer, read_tokenizer
from jlookahead.model_config import ModelConfig

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Of one number, by the dtypes that are supported.
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def open_hf_directory(folder: Path, dtype: str) -> StoredModel:
    """Reads all of a `save_pretrained` directory but the weights.

    Raises:
        FileNotFoundError: `config.json` or weights missing.
        ValueError: an unsupported configuration, or files that contradict each other.
    """
    config = parse_config(folder / CONFIG, dtype)
    tensors, problems = scan_weights(folder)
    for problem in problems:
        raise problem
    tokenizer = read_tokenizer(folder)
    config = with_padding(config, tokenizer)
    defaults = read_defaults(folder, tokenizer, config.vocab_size)
    return StoredModel(folder, config, tokenizer, defaults, tensors)


def parse_config(path: Path, dtype: str) -> ModelConfig:
    """The network that a `config.json` describes."""
    fields = read_json(path)
    try:
        return from_hf_config(fields, dtype)
    except (TypeError, ValueError) as error:  # TypeError: a field of another JSON type
        raise ValueError(f"{path}: {error}") from error


def with_padding(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The network, told which ids at the end of its vocabulary the tokenizer does not have."""
    if tokenizer is None:
        return config
    num_ids = max(tokenizer.get_vocab().values()) + 1
    # A tokenizer may have more: many add a padding token that the network never saw.
    return dataclasses.replace(config, num_padding_ids=max(config.vocab_size - num_ids, 0))


def read_defaults(folder: Path, tokenizer: Tokenizer | None, vocab_size: int) -> Defaults:
    """What the configuration files and the tokenizer say about generation."""
    sources = [
        (str(folder / name), read_json(folder / name))
        for name in (GENERATION_CONFIG, CONFIG)
        if (folder / name).is_file()
    ]
    if tokenizer is not None:
        names = ("eos_token_id", "pad_token_id", "bos_token_id")
        fields = {name: getattr(tokenizer, name) for name in names}
        sources.append((f"tokenizer of {folder}", fields))
    return merge_defaults(sources, vocab_size)


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files: those the index names if there is one. They need not exist.

    Raises:
        ValueError: an index that cannot be used.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    return sorted(set(_read_weight_map(folder / INDEX).values()))


def scan_weights(folder: Path) -> tuple[dict[str, StoredTensor], list[Exception]]:
    """Every tensor of the weight files by name, and all that is wrong with the files.

    Reads headers only. The first problem is what `load` raises.
    """
    tensors: dict[str, StoredTensor] = {}
    problems: list[Exception] = []
    weight_map: dict[str, str] = {}
    try:
        if (folder / INDEX).is_file():
            weight_map = _read_weight_map(folder / INDEX)
        else:
            _require_single_file(folder)
        files = sorted(set(weight_map.values())) or [SINGLE]
    except (OSError, ValueError) as error:
        problems.append(error)
        files = sorted(file.name for file in folder.glob("*.safetensors"))
    unread = set()
    for file in files:
        try:
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{folder / file}: no such file, but {INDEX} names it")
            found = _read_header(folder / file)
        except (OSError, ValueError) as error:
            problems.append(error)
            unread.add(file)
            continue
        tensors |= found
        for tensor in found.values():
            place = weight_map.get(tensor.name)
            if weight_map and place != file:
                where = f"{INDEX} places it in {place}" if place else f"not in {INDEX}"
                problems.append(ValueError(f"{tensor}: {where}"))
    for name, file in weight_map.items():
        if name not in tensors and file not in unread:
            reason = f"lacks tensor {name!r}, which {INDEX} places there"
            problems.append(ValueError(f"{folder / file}: {reason}"))
    return tensors, problems


def _read_weight_map(index: Path) -> dict[str, str]:
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
    raise FileNotFoundError(
        f"{folder}: neither {SINGLE} nor {INDEX} found; PyTorch weights must be saved as "
        "safetensors with transformers first"
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    tensors = {}
    try:
        with safe_open(file, framework="numpy") as handle:
            for name in handle.keys():
                info = handle.get_slice(name)
                shape, dtype = tuple(info.get_shape()), info.get_dtype()
                read = functools.partial(_read_part, file, name)
                num_bytes = math.prod(shape) * _BYTES.get(dtype, 0)
                is_floating = dtype in _BYTES
                tensors[name] = StoredTensor(name, file, shape, dtype, is_floating, num_bytes, read)
    except SafetensorError as error:
        raise ValueError(f"{file}: not a complete safetensors file: {first_line(error)}") from error
    return tensors


def _read_part(file: Path, name: str, index: Index) -> np.ndarray:
    from safetensors import safe_open

    # Opened for every part: the library maps the file, and pages that were read stay resident
    # until it is closed.
    with safe_open(file, framework="numpy") as handle:
        return handle.get_slice(name)[index]
