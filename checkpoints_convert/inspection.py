"""`python -m checkpoints_convert inspect SRC`: what a checkpoint holds, without its weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from checkpoints_convert import headers
from checkpoints_convert.headers import Header, Headers
from jlookahead.checkpoints.params import flat
from jlookahead.model import LlamaModel
from jlookahead.model_config import ModelConfig
from jlookahead.quantization import is_quantized
from jlookahead.rope import RopeConfig

_MAX_SHOWN = 20  # problems; --json has all
_LAYER = re.compile(r"\.layers\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors that differ in their layer only.

    Attributes:
        name: with `*` for the number of the layer.
        count: how many there are.
        shape, dtype: of each, as stored.
        num_bytes: of all of them.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint and what follows from its headers.

    Attributes:
        headers: what the files say.
        groups: the tensors, in the order of the files.
        num_parameters: of the network, a tied head counted once and no scales of int8; of the
            tensors if the configuration cannot be used.
        disk_bytes: of all files.
        memory_bytes: of the parameters by dtype; None without a configuration, like the one
            below.
        cache_bytes_per_token: of keys and values by dtype.
    """

    headers: Headers
    groups: list[Group]
    num_parameters: int
    disk_bytes: int
    memory_bytes: dict[str, int] | None
    cache_bytes_per_token: dict[str, int] | None

    @property
    def problems(self) -> list[str]:
        """Why the checkpoint does not load."""
        return self.headers.problems


def inspect(source: str) -> Inspection:
    """Reads everything of a checkpoint but the values of its tensors.

    So NaN, infinity, and a head that differs from the embedding it is tied to are not found.

    Args:
        source: a path or hub id.

    Raises:
        FileNotFoundError: no such path or hub repository.
        ValueError: the path holds no checkpoint.
    """
    found = headers.read_headers(source)
    memory = cache = None
    num_parameters = sum(math.prod(tensor.shape) for tensor in found.tensors)
    if found.config is not None:
        plain = dataclasses.replace(found.config, quantization=None)
        weights = flat(LlamaModel(plain).abstract_params())
        num_parameters = sum(leaf.size for leaf in weights.values())
        memory, cache = _memory_bytes(weights), _cache_bytes(found.config)
    files = [found.path] if found.path.is_file() else found.path.rglob("*")
    return Inspection(
        headers=found,
        groups=_grouped(found.tensors),
        num_parameters=num_parameters,
        disk_bytes=sum(file.stat().st_size for file in files if file.is_file()),
        memory_bytes=memory,
        cache_bytes_per_token=cache,
    )


def _memory_bytes(weights: Mapping[str, Any]) -> dict[str, int]:
    size = sum(leaf.size for leaf in weights.values())
    # 8-bit integers with a float32 scale per output channel; what is no linear layer stays.
    kernels = [leaf for name, leaf in weights.items() if is_quantized(name)]
    in_int8 = sum(leaf.size for leaf in kernels)
    scales = sum(leaf.shape[-1] for leaf in kernels)
    return {
        "float32": 4 * size,
        "bfloat16": 2 * size,
        "int8 and bfloat16": in_int8 + 4 * scales + 2 * (size - in_int8),
    }


def _cache_bytes(config: ModelConfig) -> dict[str, int]:
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {name: values * jnp.dtype(name).itemsize for name in ("float32", "bfloat16")}


def _grouped(tensors: Sequence[Header]) -> list[Group]:
    groups: dict[tuple[Any, ...], Group] = {}
    for tensor in tensors:
        name = _LAYER.sub(".layers.*.", tensor.name)
        key = name, tensor.shape, tensor.dtype
        group = groups.get(key, Group(name, 0, tensor.shape, tensor.dtype, 0))
        groups[key] = dataclasses.replace(
            group, count=group.count + 1, num_bytes=group.num_bytes + tensor.num_bytes
        )
    return list(groups.values())


def _as_fields(inspection: Inspection) -> dict[str, Any]:
    found = inspection.headers
    return {
        "path": str(found.path),
        "kind": found.kind,
        "family": found.family,
        "config": None if found.config is None else dataclasses.asdict(found.config),
        "defaults": None if found.defaults is None else dataclasses.asdict(found.defaults),
        "has_tokenizer": found.has_tokenizer,
        "num_parameters": inspection.num_parameters,
        "disk_bytes": inspection.disk_bytes,
        "memory_bytes": inspection.memory_bytes,
        "cache_bytes_per_token": inspection.cache_bytes_per_token,
        "tensors": [dataclasses.asdict(group) for group in inspection.groups],
        "problems": inspection.problems,
    }


def _print(inspection: Inspection) -> None:
    console = Console(highlight=False)
    found = inspection.headers
    console.print(Text(f"{found.kind} {found.path}"), soft_wrap=True)
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(inspection):
        figures.add_row(name, Text(value))
    console.print(figures)
    tensors = Table(box=None, pad_edge=False)
    tensors.add_column("", justify="right")
    tensors.add_column("tensor", overflow="fold")
    tensors.add_column("shape")
    tensors.add_column("dtype")
    tensors.add_column("size", justify="right")
    for group in inspection.groups:
        shape = "x".join(map(str, group.shape))
        size = decimal(group.num_bytes)
        tensors.add_row(f"{group.count} x", Text(group.name), shape, group.dtype, size)
    console.print(tensors)
    for problem in inspection.problems[:_MAX_SHOWN]:
        console.print(Text(f"problem: {problem}"), soft_wrap=True)
    if len(inspection.problems) > _MAX_SHOWN:
        console.print(f"and {len(inspection.problems) - _MAX_SHOWN} more, see --json")
    if not inspection.problems:
        console.print("no problems; the values of the tensors were not read")


def _figures(inspection: Inspection) -> Iterator[tuple[str, str]]:
    found = inspection.headers
    yield "family", str(found.family)
    if found.config is not None:
        yield from _network_figures(found.config)
    yield "parameters", f"{inspection.num_parameters:,}"
    yield "on disk", decimal(inspection.disk_bytes)
    if inspection.memory_bytes is not None:
        yield "in memory", _by_dtype(inspection.memory_bytes)
    if inspection.cache_bytes_per_token is not None:
        yield "cache per token", _by_dtype(inspection.cache_bytes_per_token)
    if found.defaults is not None:
        yield "EOS ids", ", ".join(map(str, found.defaults.eos_token_ids)) or "none"
    yield "tokenizer", "yes" if found.has_tokenizer else "no"


def _network_figures(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Sizes, the position embedding, and what differs from a plain LLaMA."""
    yield "context", f"{config.max_position_embeddings:,}"
    rope = dataclasses.asdict(config.rope)
    kind = rope.pop("type")
    unused = dataclasses.asdict(RopeConfig())
    scaling = {name: value for name, value in rope.items() if value != unused[name]}
    yield "RoPE", " ".join([kind, *(f"{name}={value}" for name, value in scaling.items())])
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        if (
            field.name not in ("max_position_embeddings", "rope", "dtype")
            and value != field.default
        ):
            yield field.name, str(value)


def _by_dtype(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{decimal(size)} in {dtype}" for dtype, size in sizes.items())


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of argparse."""
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, without reading its weights",
        description="Exit status 0 if nothing is wrong with it, 1 if it would not load, 2 if it "
        "is no checkpoint. Values are not read: NaN, infinity, and a head that differs from the "
        "embedding it is tied to are not found. A hub id is downloaded.",
    )
    parser.add_argument("source", metavar="SRC", help="directory, .gguf file or hub id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    inspection = inspect(options.source)
    if options.json:
        print(json.dumps(_as_fields(inspection)))
    else:
        _print(inspection)
    return 1 if inspection.problems else 0
