"""Draws a result of `speed` or `peers`: speed against plain decoding by category.

python -m benchmarks.plot result.json plot.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    from matplotlib.figure import Figure

    result = json.loads(Path(sys.argv[1]).read_text())
    categories = result["categories"]
    systems = list(next(iter(categories.values())))
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        values = [category[system]["mean"] for category in categories.values()]
        axes.bar(np.arange(len(categories)) + (i + 0.5) * width - 0.4, values, width, label=system)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), list(categories))
    axes.set_ylabel("speed, plain decoding = 1")
    axes.set_title(f"{result['model']}, {result['max_new_tokens']} new tokens", fontsize=10)
    axes.legend(fontsize=8, ncols=min(4, len(systems)))
    figure.savefig(sys.argv[2])


if __name__ == "__main__":
    main()
