"""What every result file says about where it comes from."""

from __future__ import annotations

import collections
import importlib.metadata
import statistics


def versions() -> dict[str, str]:
    """Versions of the packages a result depends on."""
    return {name: importlib.metadata.version(name) for name in ("jlookahead", "jax", "flax")}


def by_category(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of every category, and of `all` of them."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["category"]].append(row)
        groups["all"].append(row)
    return dict(groups)


def summarise_speed(rows: list[dict], key: str = "speed") -> dict[str, dict[str, dict[str, float]]]:
    """Mean and least ratio of everything measured, by category."""
    return {
        category: {
            name: {
                "mean": round(statistics.mean(row[key][name] for row in group), 3),
                "least": min(row[key][name] for row in group),
            }
            for name in rows[0][key]
        }
        for category, group in by_category(rows).items()
    }
