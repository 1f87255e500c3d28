"""Figures that show the mean over benchmarks and, in smaller panels below it, each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibit import COLUMN

BAND = 0.09
"""Opacity of an interval's band: several may lie over each other."""


def benchmark_panels(benchmarks: Sequence[str]) -> tuple[Figure, dict[str, Axes]]:
    """An empty figure one column wide; make it and draw in it inside `exhibit.style`.

    Returns:
        The figure, and its panels by name: `mean` on top, then the benchmarks, two in a row. With
        one benchmark there is its panel alone.
    """
    small = [] if len(benchmarks) == 1 else list(benchmarks)
    rows = math.ceil(len(small) / 2)
    figure = plt.figure(figsize=(COLUMN, 2.5 + 1.25 * rows), layout="constrained")
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=[2.0, *[1.0] * rows])
    panels = {"mean" if small else benchmarks[0]: figure.add_subplot(grid[0, :])}
    for index, name in enumerate(small):
        panels[name] = figure.add_subplot(grid[1 + index // 2, index % 2])
    for panel in panels.values():
        panel.grid(axis="y")
        panel.yaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
    return figure, panels


def legend_above(figure: Figure, panel: Axes, title: str | None = None, **options: Any) -> None:
    """The panel's legend over the whole figure; `options` are `Figure.legend`'s.

    It has as many columns as the labels leave room for, four at most.
    """
    handles, labels = panel.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    room = int(figure.get_figwidth() / (0.45 + 0.052 * longest))  # inches: handle, letters of 7 pt
    figure.legend(
        handles,
        labels,
        title=title,
        title_fontsize=6.5,
        **{
            "loc": "outside upper center",
            "ncols": max(1, min(len(labels), 4, room)),
            "columnspacing": 1.0,
            "handlelength": 2.4,
        }
        | options,
    )
