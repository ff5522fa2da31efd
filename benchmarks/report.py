"""What every result file says about where it comes from."""

from __future__ import annotations

import importlib.metadata


def versions() -> dict[str, str]:
    """Versions of the packages a result depends on."""
    return {name: importlib.metadata.version(name) for name in ("jlookahead", "jax", "flax")}
