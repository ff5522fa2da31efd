"""A checkpoint on disk: its headers are read, its weights are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jlookahead.checkpoints.defaults import Defaults
from jlookahead.checkpoints.tokenizer import Tokenizer
from jlookahead.model_config import ModelConfig

# A part of a tensor, one slice per axis.
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet.

    Attributes:
        name: as the file spells it, for messages.
        file: where it is stored.
        shape: of the whole.
        dtype: as the file spells it, `BF16` or `Q4_1`.
        is_supported: whether `read` can turn that into floating-point numbers.
        num_bytes: on disk.
        read: reads a part of it into host memory.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    is_supported: bool
    num_bytes: int
    read: Callable[[Index], np.ndarray]

    def __str__(self) -> str:
        return f"tensor {self.name!r} in {self.file}"

    def read_all(self) -> np.ndarray:
        return self.read((slice(None),) * len(self.shape))


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """A checkpoint in Hugging Face's terms.

    Attributes:
        origin: the directory or file, for messages.
        tensors: by Hugging Face name, none checked against the configuration yet.
    """

    origin: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    defaults: Defaults
    tensors: Mapping[str, StoredTensor]
