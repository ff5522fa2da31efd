"""How parameters are laid out over the devices of a mesh.

Along the axis `tensor`, Megatron's split: the first product of a block by output, the second by
input, so that a block needs one sum over devices. What does not divide evenly is replicated, and
so are keys and values if there are fewer heads than devices.

Source: Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jlookahead.model_config import ModelConfig

TENSOR = "tensor"
_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
_BY_INPUT = ("o_proj", "down_proj")


def check_mesh(mesh: Mesh | None) -> None:
    """Raises `ValueError` unless `mesh` is None or has an axis `tensor`, perhaps among others."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh: got {mesh!r}, allowed is a jax.sharding.Mesh")
    if TENSOR not in mesh.shape:
        raise ValueError(f"mesh: got axes {tuple(mesh.axis_names)}, must have one named {TENSOR!r}")


def param_sharding(
    name: str, shape: tuple[int, ...], config: ModelConfig, mesh: Mesh | None
) -> jax.sharding.Sharding:
    """The sharding of one parameter: the default device without a mesh.

    Args:
        name: dotted, as `layers_0.mlp.up_proj.kernel`.
        shape: of the parameter.
        config: of its network.
        mesh: as `check_mesh` wants it.
    """
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
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
    # XLA finds the layout of everything else; a mesh with explicit axes would want to be told.
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    return NamedSharding(automatic, PartitionSpec(*spec))


def _axis(module: str, leaf: str, ndim: int) -> int | None:
    """The axis that is split, if any."""
    if module in _BY_OUTPUT:
        return ndim - 1
    if module in _BY_INPUT and leaf == "kernel":
        return 0
    return None
