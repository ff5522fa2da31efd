"""What the files of a checkpoint say about it, without reading any weights.

Unlike `jlookahead.load`, which refuses at the first thing that is wrong, this goes on and lists
all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jlookahead.checkpoints import converted, gguf_file, hf_directory, loading
from jlookahead.checkpoints.defaults import Defaults, merge_defaults
from jlookahead.checkpoints.errors import first_line
from jlookahead.checkpoints.gguf_tokenizer import read_vocabulary
from jlookahead.checkpoints.hf_config import to_hf_config
from jlookahead.checkpoints.json_file import read_json
from jlookahead.checkpoints.params import flat, hf_name, tensor_problems
from jlookahead.checkpoints.stored import StoredTensor
from jlookahead.checkpoints.tokenizer import read_tokenizer
from jlookahead.model import LlamaModel
from jlookahead.model_config import ModelConfig

HF_DIRECTORY, GGUF_FILE, CONVERTED = "Hugging Face directory", "GGUF file", "converted directory"
# Of the configuration; no figure depends on it.
_DTYPE = "float32"


@dataclasses.dataclass(frozen=True)
class Header:
    """One tensor, as its file describes it.

    Attributes:
        name: its Hugging Face name; of an unknown tensor the one in the file.
        shape: in the order of Hugging Face.
        dtype: as the file spells it.
        num_bytes: of the values; Orbax compresses them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclasses.dataclass
class Headers:
    """What is known of a checkpoint.

    Attributes:
        kind: `HF_DIRECTORY`, `GGUF_FILE` or `CONVERTED`.
        path: where it is.
        family: the architecture, as the checkpoint spells it; None if it has no name.
        config: None if it cannot be used.
        defaults: generation defaults; None if they cannot be used.
        tensors: those of all readable files.
        has_tokenizer: whether there is one that can be used.
        problems: what is wrong, one line each.
    """

    kind: str
    path: Path
    family: str | None = None
    config: ModelConfig | None = None
    defaults: Defaults | None = None
    tensors: list[Header] = dataclasses.field(default_factory=list)
    has_tokenizer: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def listing_problems(self) -> Iterator[None]:
        """Ends the block at the first error, which becomes a problem."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.problems.append(first_line(error))


def read_headers(source: str) -> Headers:
    """Reads what `jlookahead.load` reads before the weights.

    Raises:
        FileNotFoundError: no such path or hub repository.
        ValueError: the path holds no checkpoint.
    """
    path = loading.locate(source)
    if path.is_file():
        with path.open("rb") as stream:
            if path.suffix == ".gguf" and stream.read(4) == b"GGUF":
                return _read_gguf(path)
    elif loading.is_converted(path):
        return _read_converted(path)
    elif (path / hf_directory.CONFIG).is_file() or any(path.glob("*.safetensors")):
        return _read_hf_directory(path)
    raise ValueError(f"{path}: no checkpoint, which is a directory or a .gguf file")


def _add_tensors(found: Headers, tensors: Mapping[str, StoredTensor]) -> None:
    found.tensors = [
        Header(name, tensor.shape, tensor.dtype, tensor.num_bytes)
        for name, tensor in tensors.items()
    ]
    if found.config is not None:
        found.problems += tensor_problems(tensors, found.config, found.path)


# --- Hugging Face directories ---


def _read_hf_directory(folder: Path) -> Headers:
    found = Headers(HF_DIRECTORY, folder)
    with found.listing_problems():
        found.family = read_json(folder / hf_directory.CONFIG).get("model_type")
        found.config = hf_directory.parse_config(folder / hf_directory.CONFIG, _DTYPE)
    with found.listing_problems():
        tokenizer = read_tokenizer(folder)
        found.has_tokenizer = tokenizer is not None
        if found.config is not None:
            found.config = hf_directory.with_padding(found.config, tokenizer)
            size = found.config.vocab_size
            found.defaults = hf_directory.read_defaults(folder, tokenizer, size)
    tensors, problems = hf_directory.scan_weights(folder)
    found.problems += map(first_line, problems)
    _add_tensors(found, tensors)
    return found


# --- GGUF files ---


def _read_gguf(file: Path) -> Headers:
    found = Headers(GGUF_FILE, file)
    try:
        metadata, tensors = gguf_file.read_header(file)
    except ValueError as error:
        if isinstance(error.__cause__, ImportError):
            raise  # says nothing about the file
        found.problems.append(str(error))
        return found
    found.family = metadata.get("general.architecture")
    vocabulary = None
    with found.listing_problems():
        vocabulary = read_vocabulary(metadata, file)
        found.has_tokenizer = vocabulary.tokenizer is not None
    with found.listing_problems():
        found.config = gguf_file.parse_config(metadata, tensors, vocabulary, file, _DTYPE)
        if vocabulary is not None:
            sources = [(str(file), vocabulary.special_ids)]
            found.defaults = merge_defaults(sources, found.config.vocab_size)
    stored = {}
    for name, tensor in tensors.items():
        if name != gguf_file.ROPE_FACTORS:
            with contextlib.suppress(ValueError):  # its own name is not one of the model either
                name = gguf_file.tensor_hf_name(name, file)
            stored[name] = gguf_file.stored_tensor(tensor, metadata, found.config, file)
    _add_tensors(found, stored)
    return found


# --- converted directories ---


def _read_converted(folder: Path) -> Headers:
    found = Headers(CONVERTED, folder)
    with found.listing_problems():
        path = folder / converted.MANIFEST
        found.config, found.defaults = converted.parse_manifest(path, _DTYPE)
        with contextlib.suppress(ValueError):  # a network of no family loads as well
            found.family = to_hf_config(found.config)["model_type"]
    with found.listing_problems():
        found.has_tokenizer = read_tokenizer(folder) is not None
    path = folder / converted.PARAMS
    with found.listing_problems():
        leaves = converted.read_metadata(path)
        found.tensors = [_orbax_header(name, leaf) for name, leaf in leaves.items()]
        if found.config is not None:
            expected = flat(LlamaModel(found.config).abstract_params())
            found.problems += converted.leaf_problems(path, expected, leaves)
    return found


def _orbax_header(name: str, leaf: Any) -> Header:
    shape = tuple(leaf.shape[::-1] if name.endswith("kernel") else leaf.shape)
    return Header(hf_name(name), shape, str(leaf.dtype), math.prod(shape) * leaf.dtype.itemsize)
