"""From stored tensors under Hugging Face names to the parameter tree, strictly.

Every tensor is used exactly once and every parameter is filled exactly once, with the shape the
configuration asks for and finite values. Anything else is an error that names the tensor and
its file: a checkpoint that loads only in part is a model that silently degrades.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jlookahead.model import LlamaModel, Params
from jlookahead.model_config import ModelConfig

# Wraps the names of the tensors to be read, as `rich.progress.track` does.
Progress = Callable[[Sequence[str]], Iterable[str]]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
# A kernel is the transpose of what is stored as weight.
_HF_LEAVES = {"kernel": "weight"}
# Tensors that old checkpoints carry and that are functions of the configuration.
_IGNORABLE = (re.compile(r"\.rotary_emb\.inv_freq$"),)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One floating-point tensor of a checkpoint, not read yet.

    Attributes:
        name: as the file spells it, for messages.
        file: where it is stored.
        shape: of what `read` returns.
        read: reads it into host memory.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def __str__(self) -> str:
        return f"tensor {self.name!r} in {self.file}"


def hf_name(path: tuple[str, ...]) -> str:
    """`("layers_3", "mlp", "up_proj", "kernel")` -> `"model.layers.3.mlp.up_proj.weight"`."""
    *modules, leaf = path
    dotted = ".".join([*modules, _HF_LEAVES.get(leaf, leaf)]).replace("layers_", "layers.", 1)
    return dotted if path[0] == "lm_head" else f"model.{dotted}"


def hf_tensors(params: Params) -> dict[str, np.ndarray]:
    """The tensors that Hugging Face's `save_pretrained` would write for these parameters."""
    leaves = {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params).items()}
    tensors = {
        hf_name(path): np.ascontiguousarray(leaf.T) if path[-1] == "kernel" else leaf
        for path, leaf in leaves.items()
    }
    if _EMBEDDING not in tensors:
        tensors[_EMBEDDING] = tensors.pop(_HEAD)
    return tensors


def fill_params(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, origin: Path, progress: Progress
) -> Params:
    """Reads the tensors one by one and puts them on the default device in `config.dtype`.

    Args:
        tensors: every tensor of the checkpoint, by Hugging Face name.
        config: what fixes names, shapes and dtype.
        origin: the checkpoint, for messages.
        progress: see `Progress`.

    Raises:
        ValueError: a missing, unknown or misshapen tensor, NaN or infinity, or a head that
            differs from the embedding it is said to be tied to.
    """
    abstract = traverse_util.flatten_dict(LlamaModel(config).abstract_params())
    expected = {hf_name(path): (path, leaf) for path, leaf in abstract.items()}
    if config.tie_word_embeddings:
        expected[_EMBEDDING] = expected.pop(_HEAD)
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not any(pattern.search(name) for pattern in _IGNORABLE)
    }
    if config.tie_word_embeddings:
        tensors = _without_tied_head(tensors)
    for name, tensor in tensors.items():
        if name not in expected:
            raise ValueError(f"{tensor}: not a parameter of the model that the config describes")
        path, leaf = expected[name]
        shape = leaf.shape[::-1] if path[-1] == "kernel" else leaf.shape
        if tensor.shape != shape:
            raise ValueError(f"{tensor}: shape is {list(tensor.shape)}, must be {list(shape)}")
    for name in expected:
        if name not in tensors:
            raise ValueError(f"{origin}: tensor {name!r} is missing")

    filled = {}
    for name in progress(list(expected)):
        path, leaf = expected[name]
        # A value beyond the range of float16 becomes infinity, which is refused below.
        with np.errstate(over="ignore", invalid="ignore"):
            stored = np.asarray(tensors[name].read(), dtype=leaf.dtype)
        array = jnp.asarray(stored.T if path[-1] == "kernel" else stored)
        require_finite(array, str(tensors[name]))
        filled[path] = array
    return traverse_util.unflatten_dict(filled)


def require_finite(array: jax.Array, what: str) -> None:
    """Raises `ValueError` naming `what` if the array holds NaN or infinity."""
    if not jnp.isfinite(array).all():
        raise ValueError(f"{what}: holds NaN or infinity as {array.dtype}")


def _without_tied_head(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Drops a head that repeats the embedding, or takes it as the embedding if that is absent."""
    tensors = dict(tensors)
    head = tensors.pop(_HEAD, None)
    if head is None:
        return tensors
    embedding = tensors.setdefault(_EMBEDDING, head)
    if embedding is not head and not np.array_equal(embedding.read(), head.read()):
        raise ValueError(f"{head}: differs from {_EMBEDDING!r}, though the config ties them")
    return tensors
