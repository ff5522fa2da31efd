"""How parameters and calls are laid out over the devices of a mesh.

Three named axes, each optional. Along `data` the rows of a batch are divided, along `lookahead` the
packed rows of a round (see `division.py`), along `tensor` the parameters and the heads of the
cache, which XLA's partitioner makes a program of. The rounds are written per device of the first
two and know nothing of the third.

Along `tensor`, Megatron's split: the first product of a block by output, the second by input, so
that a block needs one sum over devices. What does not divide evenly is replicated, and so are keys
and values if there are fewer heads than devices.

Source: Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jlookahead.model_config import ModelConfig

DATA, LOOKAHEAD, TENSOR = AXES = ("data", "lookahead", "tensor")
BY_ROW, SHARED = PartitionSpec(DATA), PartitionSpec()

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
# The table of embeddings by token, so that its rows come out whole.
_BY_INPUT = ("o_proj", "down_proj", "embed_tokens")


def complete_mesh(mesh: Mesh) -> Mesh:
    """The mesh with all three axes, of which it may lack some, and their layout left to XLA.

    Raises:
        ValueError: it is no mesh, or has other axes.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: got {mesh!r}, allowed is a jax.sharding.Mesh")
    names = tuple(mesh.axis_names)
    if not names or not set(names) <= set(AXES):
        raise ValueError(f"mesh: got axes {names}, allowed are {', '.join(map(repr, AXES))}")
    missing = tuple(axis for axis in AXES if axis not in names)
    devices = mesh.devices.reshape(mesh.devices.shape + (1,) * len(missing))
    return Mesh(devices, names + missing, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters lie on; None if it is one device or has axes of another scheme."""
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and mesh.size > 1:
            return complete_mesh(mesh) if set(mesh.axis_names) <= set(AXES) else None
    return None


def shard(params: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Lays parameters out over a mesh; `generate` then runs on its devices.

    Args:
        params: a nested dict of arrays.
        config: of their network.
        mesh: with axes named `data`, `lookahead`, `tensor`, or some of them.

    Raises:
        ValueError: a mesh with other axes.
    """
    whole = complete_mesh(mesh)

    def place(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jax.device_put(leaf, param_sharding(name, leaf.shape, config, whole))

    return jax.tree_util.tree_map_with_path(place, params)


def param_sharding(
    name: str, shape: tuple[int, ...], config: ModelConfig, mesh: Mesh | None
) -> jax.sharding.Sharding:
    """The sharding of one parameter: the default device without a mesh.

    Args:
        name: dotted, as `layers_0.mlp.up_proj.kernel`.
        shape: of the parameter.
        config: of its network.
        mesh: as `complete_mesh` makes it.
    """
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    *_, module, leaf = name.split(".")
    axis = _axis(module, leaf, len(shape))
    units = shape[axis] if axis is not None else 1
    if module in ("q_proj", "o_proj"):
        units = config.num_attention_heads
    elif module in ("k_proj", "v_proj"):
        units = config.num_key_value_heads
    spec: list[str | None] = [None] * len(shape)
    if axis is not None and units % mesh.shape[TENSOR] == 0:
        spec[axis] = TENSOR
    return NamedSharding(mesh, PartitionSpec(*spec))


def _axis(module: str, leaf: str, ndim: int) -> int | None:
    """The axis that is split, if any."""
    if module in _BY_OUTPUT:
        return ndim - 1
    if module in _BY_INPUT and leaf in ("kernel", "weight"):
        return 0
    return None


# What all rows of a batch share, in a call's arrays and in a state, by the name of the field.
_SHARED_FIELDS = frozenset(
    ("eos_ids", "pad_id", "num_reused", "processors", "table")
    + ("temperature", "top_k", "top_p", "min_p", "seed")
)


def per_row(tree: Any) -> Any:
    """Which leaves of a state, or of a call's arrays, hold one entry for each batch row, on axis 0;
    the other ones serve all rows of a call.

    Args:
        tree: of arrays or of their shapes.

    Returns:
        the same structure with bools as leaves.
    """

    def has_rows(path: Any, _: Any) -> bool:
        return _SHARED_FIELDS.isdisjoint(getattr(key, "name", None) for key in path)

    return jax.tree_util.tree_map_with_path(has_rows, tree)


def row_specs(tree: Any) -> Any:
    """How a state or a call's arrays are divided along `data`: `BY_ROW` or `SHARED`, by leaf."""
    return jax.tree.map(lambda has_rows: BY_ROW if has_rows else SHARED, per_row(tree))


def put(tree: Any, mesh: Mesh) -> Any:
    """A call's arrays on the mesh; of several processes each holds them all and places its part."""

    def place(spec: PartitionSpec, leaf: Any) -> jax.Array:
        whole = np.asarray(leaf)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(place, row_specs(tree), tree)


def per_device(
    function: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` for the rows of one device along `data`, one of those along `lookahead`.

    Args:
        function: of global arrays, or of each device's part where there is a mesh.
        mesh: as `complete_mesh` makes it; None runs `function` as it is.
        in_specs, out_specs: `BY_ROW` or `SHARED`, see `jax.shard_map`.
    """
    if mesh is None:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={DATA, LOOKAHEAD},
        # Devices along `lookahead` differ within a round and agree at its end, which JAX cannot
        # tell from the exchange that makes them agree.
        check_vma=False,
    )


def num_row_groups(mesh: Mesh | None) -> int:
    """Groups of rows that a batch is divided into."""
    return 1 if mesh is None else mesh.shape[DATA]


def num_sharing(mesh: Mesh | None) -> int:
    """Devices that share a round."""
    return 1 if mesh is None else mesh.shape[LOOKAHEAD]


def split_heads(cache: Any) -> Any:
    """The cache `[B, K, S, D]` with its heads divided along `tensor`, if their number allows it."""

    def split(slots: jax.Array) -> jax.Array:
        num_devices = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
        return slots if slots.shape[1] % num_devices else _along_tensor(slots, None, TENSOR)

    return jax.tree.map(split, cache)


def gather_vocabulary(logits: jax.Array) -> jax.Array:
    """`logits [B, V]` whole on every device: sampling passes over them many times."""
    return _along_tensor(logits)


def largest_anywhere(value: jax.Array) -> jax.Array:
    """The largest of the values that devices have, for loops that all must run equally often.

    Only where a loop may hold XLA's collectives over `tensor`: in some of them every device of the
    mesh takes part, whichever rows it has. Elsewhere the device's own value.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    if shape.get(TENSOR, 1) == 1 or shape[DATA] * shape[LOOKAHEAD] == 1:
        return value
    return lax.pmax(value, (DATA, LOOKAHEAD))


def _along_tensor(x: jax.Array, *spec: str | None) -> jax.Array:
    """Lays an array out along `tensor` within `per_device`; nothing to do elsewhere."""
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """The same on every device, so that every process can read it."""
    if mesh is None:
        return tree
    return lax.with_sharding_constraint(tree, NamedSharding(mesh, SHARED))
