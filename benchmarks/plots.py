"""``python -m benchmarks plots RESULT``: a result's cases that have sizes as pictures, and all of it as a page.

A picture is cost against size, both logarithmic: a line a contender, Phalanx's thick, the floor's dashed, with the
exponent of its growth. Each is written twice, for light and for dark pages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.case import FLOOR, PHALANX

LOOKS = {"light": ("#1f2328", "#d1d9e0"), "dark": ("#e6edf3", "#3d444d")}
"""The colours of text and of the grid."""

_OURS = {"light": "#0b62d6", "dark": "#58a6ff"}


def points(case: dict[str, Any], figure: str, contender: str) -> dict[int, float]:
    """Return size -> median of a figure, where it is more than nothing."""
    found = {}
    for run in case["runs"]:
        values = [value for values in run["figures"].get(contender, {}).get(figure, []) for value in values]
        if values and median(values) > 0:
            found[run["size"]] = median(values)
    return found


def contenders(case: dict[str, Any]) -> list[str]:
    """Return all that took part, Phalanx first, the floor last."""
    seen = dict.fromkeys(name for run in case["runs"] for name in run["figures"])
    return sorted(seen, key=lambda name: (name != PHALANX, name == FLOOR))


def plot(name: str, case: dict[str, Any], figure: str, look: str, path: Path) -> None:
    """Write one picture, as SVG."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "phalanx"  # the same file for the same figures
    text, grid = LOOKS[look]
    canvas, axes = plt.subplots(figsize=(7, 4.2))
    for contender in contenders(case):
        found = points(case, figure, contender)
        if not found:
            continue
        grows = case["growth"].get(figure, {}).get(contender)
        style: dict[str, Any] = {"linewidth": 1.2, "marker": "."}
        if contender == PHALANX:
            style = {"linewidth": 3, "marker": "o", "color": _OURS[look], "zorder": 5}
        elif contender == FLOOR:
            style = {"linewidth": 1.5, "linestyle": "--", "color": text}
        label = contender if grows is None else f"{contender}  (N^{grows:.2f})"
        axes.plot(list(found), list(found.values()), label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="N", ylabel=case["units"][figure], title=f"{name}: {figure}")
    sizes = [run["size"] for run in case["runs"]]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(color=grid, linewidth=0.6)
    axes.set_facecolor("none")
    for part in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
        part.set_color(text)
    axes.tick_params(colors=text)
    for spine in axes.spines.values():
        spine.set_color(grid)
    axes.legend(frameon=False, labelcolor=text, loc="center left", bbox_to_anchor=(1.0, 0.5))
    canvas.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(canvas)


def main(argv: list[str]) -> int:
    """Write the pictures into a folder, and print their names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plots", description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT", help="what `python -m benchmarks --json` has written")
    parser.add_argument(
        "--to", type=Path, default=Path(), metavar="FOLDER", help="where the pictures go (default: here)"
    )
    options = parser.parse_args(argv)
    result = json.loads(options.result.read_text())
    for name, case in result["cases"].items():
        if len(case["runs"]) < 2:
            continue
        for figure in case["units"]:
            if len(points(case, figure, PHALANX)) < 2:
                continue
            for look in LOOKS:
                path = options.to / f"{name}-{figure.replace(', ', '-').replace(' ', '-')}-{look}.svg"
                plot(name, case, figure, look, path)
                print(path)
    return 0
