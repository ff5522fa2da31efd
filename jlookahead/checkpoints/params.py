"""From stored tensors under Hugging Face names to the parameter tree, strictly, and back.

Every tensor is used exactly once and every parameter is filled exactly once, with the shape the
configuration asks for and finite values. Anything else is an error that names the tensor and
its file: a checkpoint that loads only in part is a model that silently degrades.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from jlookahead.checkpoints.stored import Index, StoredModel, StoredTensor
from jlookahead.model import LlamaModel, Params
from jlookahead.model_config import ModelConfig
from jlookahead.quantization import is_quantized, quantize
from jlookahead.sharding import param_sharding

# Wraps the names of the tensors to be read, as `rich.progress.track` does.
Progress = Callable[[Sequence[str]], Iterable[str]]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
# A kernel is the transpose of what is stored as weight.
_HF_LEAVES = {"kernel": "weight"}
# Tensors that old checkpoints carry and that are functions of the configuration.
_IGNORABLE = (re.compile(r"\.rotary_emb\.inv_freq$"),)


def hf_name(name: str) -> str:
    """`layers_3.mlp.up_proj.kernel` -> `model.layers.3.mlp.up_proj.weight`."""
    *modules, leaf = name.split(".")
    dotted = ".".join([*modules, _HF_LEAVES.get(leaf, leaf)]).replace("layers_", "layers.", 1)
    return dotted if modules[0] == "lm_head" else f"model.{dotted}"


def hf_tensors(params: Params) -> dict[str, np.ndarray]:
    """The tensors that Hugging Face's `save_pretrained` would write for these parameters."""
    leaves = flat(params)
    return {hf: hf_tensor(leaves, name) for hf, name in hf_names(leaves).items()}


def hf_names(leaves: Iterable[str]) -> dict[str, str]:
    """Dotted name of every parameter by Hugging Face name; scales belong to their kernels."""
    names = {hf_name(name): name for name in leaves if not name.endswith(".scale")}
    if _EMBEDDING not in names:  # tied
        names[_EMBEDDING] = names.pop(_HEAD)
    return names


def hf_tensor(leaves: Mapping[str, jax.Array], name: str) -> np.ndarray:
    """What Hugging Face stores for the parameter `name`; a quantised kernel is multiplied out."""
    tensor = np.asarray(leaves[name])
    if tensor.dtype == np.int8:
        scale = np.asarray(leaves[name.removesuffix("kernel") + "scale"])
        tensor = (tensor * scale).astype(leaves["norm.weight"].dtype)
    return np.ascontiguousarray(tensor.T) if name.endswith("kernel") else tensor


def flat(params: Params) -> dict[str, Any]:
    """Every leaf by its dotted name, module after module."""
    return traverse_util.flatten_dict(params, sep=".")


def match_tensors(stored: StoredModel) -> dict[str, StoredTensor]:
    """Which tensor fills which parameter, by the parameter's dotted name.

    Raises:
        ValueError: the first of `tensor_problems`, or a head that differs from the embedding it is
            said to be tied to.
    """
    for problem in tensor_problems(stored.tensors, stored.config, stored.origin):
        raise ValueError(problem)
    if stored.config.tie_word_embeddings:
        _require_tied(stored.tensors)
    expected = _by_hf_name(stored.config, stored.tensors)
    return {name: stored.tensors[hf] for hf, name in expected.items()}


def tensor_problems(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, origin: Path
) -> Iterator[str]:
    """Tensors of an unsupported dtype, unknown, of a wrong shape, or missing, one line each."""
    expected = _by_hf_name(config, tensors)
    for hf, tensor in tensors.items():
        if any(pattern.search(hf) for pattern in _IGNORABLE):
            continue
        if not tensor.is_supported:
            yield f"{tensor}: dtype {tensor.dtype} is not supported"
        elif hf not in expected:
            yield f"{tensor}: not a parameter of the model that the config describes"
        elif tensor.shape != (shape := _stored_shape(expected[hf], config)):
            yield f"{tensor}: shape is {list(tensor.shape)}, must be {list(shape)}"
    for hf in expected:
        if hf not in tensors:
            yield f"{origin}: tensor {hf!r} is missing"


def _by_hf_name(config: ModelConfig, tensors: Container[str]) -> dict[str, str]:
    """Parameter by Hugging Face name. A tied head may be stored as either, or as both."""
    expected = {hf_name(name): name for name in _abstract(config)}
    if config.tie_word_embeddings:
        head = expected.pop(_HEAD)
        names = [name for name in (_EMBEDDING, _HEAD) if name in tensors] or [_EMBEDDING]
        expected |= dict.fromkeys(names, head)
    return expected


def _require_tied(tensors: Mapping[str, StoredTensor]) -> None:
    head, embedding = tensors.get(_HEAD), tensors.get(_EMBEDDING)
    if head is None or embedding is None:
        return
    if not np.array_equal(embedding.read_all(), head.read_all()):
        raise ValueError(f"{head}: differs from {_EMBEDDING!r}, though the config ties them")


def read_params(
    matched: Mapping[str, StoredTensor], config: ModelConfig, progress: Progress, mesh: Mesh | None
) -> Iterator[tuple[str, jax.Array]]:
    """Reads tensors one by one, of each the parts that this process's devices keep, each once.

    Args:
        matched: of `match_tensors`, all or some.
        config: what fixes shapes, dtype and quantisation.
        progress: see `Progress`.
        mesh: of the devices they are spread over, see `sharding.py`; None for the default device.

    Yields:
        dotted name and value of every parameter; a quantised kernel is followed by its scale.

    Raises:
        ValueError: NaN or infinity.
    """
    for name in progress(list(matched)):
        tensor, leaf = matched[name], _abstract(config)[name]
        sharding = param_sharding(name, leaf.shape, config, mesh)
        read = functools.partial(_read_part, tensor, name.endswith("kernel"), leaf.dtype)
        array = jax.make_array_from_callback(leaf.shape, sharding, _read_once(read))
        require_finite(array, str(tensor))
        yield from quantized(name, array, config, mesh)


def quantized(
    name: str, array: jax.Array, config: ModelConfig, mesh: Mesh | None
) -> Iterator[tuple[str, jax.Array]]:
    """The parameter as it is, or if it is to be quantised its bytes and its scale."""
    if config.quantization is None or not is_quantized(name):
        yield name, array
        return
    kernel, scale = quantize(array)
    scale_name = name.removesuffix("kernel") + "scale"
    yield name, jax.device_put(kernel, array.sharding)
    yield scale_name, jax.device_put(scale, param_sharding(scale_name, scale.shape, config, mesh))


def unflattened(leaves: Iterable[tuple[str, Any]]) -> Params:
    """The parameter tree of leaves with dotted names."""
    return traverse_util.unflatten_dict(dict(leaves), sep=".")


@functools.lru_cache(maxsize=4)
def _abstract(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters before quantisation, by dotted name."""
    plain = dataclasses.replace(config, quantization=None)
    return flat(LlamaModel(plain).abstract_params())


def _stored_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    shape = _abstract(config)[name].shape
    return shape[::-1] if name.endswith("kernel") else shape


def _read_part(tensor: StoredTensor, is_kernel: bool, dtype: np.dtype, index: Index) -> np.ndarray:
    # A value beyond the range of float16 becomes infinity, which is refused.
    with np.errstate(over="ignore", invalid="ignore"):
        part = np.asarray(tensor.read(index[::-1] if is_kernel else index), dtype=dtype)
    return part.T if is_kernel else part


def _read_once(read: Callable[[Index], np.ndarray]) -> Callable[..., np.ndarray]:
    """`read`, for several devices that keep the same part."""
    parts: dict[tuple, np.ndarray] = {}

    def read_once(index: Index) -> np.ndarray:
        key = tuple((axis.start, axis.stop) for axis in index)  # slices have no hash before 3.12
        if key not in parts:
            parts[key] = read(index)
        return parts[key]

    return read_once


def require_finite(array: jax.Array, what: str) -> None:
    """Raises `ValueError` naming `what` if the array holds NaN or infinity."""
    if not jnp.isfinite(array).all():
        raise ValueError(f"{what}: holds NaN or infinity as {array.dtype}")
