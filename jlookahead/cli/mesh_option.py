"""The mesh of a command, out of `--mesh data=2,lookahead=2,tensor=2`."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh

from jlookahead.sharding import AXES


def parse_mesh(text: str | None) -> dict[str, int]:
    """Sizes of the axes by name, in the order given; none without the option.

    Raises:
        ValueError: an unknown axis, one given twice, a size that is no positive integer.
    """
    sizes: dict[str, int] = {}
    for part in [] if text is None else text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES:
            raise ValueError(f"mesh: got axis {name!r}, allowed are {', '.join(AXES)}")
        if name in sizes:
            raise ValueError(f"mesh: got axis {name} twice, allowed is once")
        if not size.isdecimal() or not int(size):
            raise ValueError(f"mesh: got {part!r}, allowed is {name}=SIZE with a size from 1 on")
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int]) -> Mesh | None:
    """The mesh with these axes; None without any, which is the default device.

    Raises:
        ValueError: more devices than there are; with several processes, other than all of them.
    """
    num_devices, wanted = jax.device_count(), math.prod(sizes.values())
    got = ",".join(f"{name}={size}" for name, size in sizes.items()) or "none"
    if jax.process_count() > 1 and (not sizes or wanted != num_devices):
        raise ValueError(
            f"mesh: got {got}, must span all {num_devices} devices of the "
            f"{jax.process_count()} processes, as tensor={num_devices} does"
        )
    if not sizes:
        return None
    if wanted > num_devices:
        raise ValueError(f"mesh: got {got}, which are {wanted} devices, there are {num_devices}")
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
