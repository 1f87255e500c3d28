"""Figures that show the mean over benchmarks and, in smaller panels below it, each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.exhibit import COLUMN, LETTER, fitted

BAND = 0.09
"""Opacity of an interval's band: several may lie over each other."""


def benchmark_panels(
    benchmarks: Sequence[str], *, mean: bool = True
) -> tuple[Figure, dict[str, Axes]]:
    """An empty figure one column wide; make it and draw in it inside `exhibit.style`.

    Args:
        benchmarks: at least one.
        mean: whether there is a mean to show, if there are several.

    Returns:
        The figure, and its panels by name: `mean` on top, then the benchmarks, two in a row. With
        one benchmark there is its panel alone.
    """
    small = [] if len(benchmarks) == 1 else list(benchmarks)
    large = list(benchmarks) if not small else ["mean"] if mean else []
    rows = math.ceil(len(small) / 2)
    size = (COLUMN, 0.5 + 2.0 * len(large) + 1.25 * rows)
    figure = plt.figure(figsize=size, layout="constrained")
    heights = [2.0] * len(large) + [1.0] * rows
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    panels = {name: figure.add_subplot(grid[0, :]) for name in large}
    for index, name in enumerate(small):
        panels[name] = figure.add_subplot(grid[len(large) + index // 2, index % 2])
    for name, panel in panels.items():
        panel.set_title(fitted(name, COLUMN / 2 - 0.3 if small else COLUMN - 0.5))
        panel.grid(axis="y")
        panel.yaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
    return figure, panels


def legend_above(figure: Figure, *panels: Axes, title: str | None = None, **options: Any) -> None:
    """One legend of these panels, or of all, over the whole figure.

    It has as many columns as the labels leave room for, four at most, and a figure with a long one
    is made higher by as much. `options` are `Figure.legend`'s.
    """
    handles: dict[str, Any] = {}
    for panel in panels or figure.axes:
        found, labels = panel.get_legend_handles_labels()
        handles = dict(zip(labels, found, strict=True)) | handles
    room = figure.get_figwidth()
    texts = [fitted(label, room - _HANDLE) for label in handles]
    lines = [line for text in texts for line in text.split("\n")]
    across = int(room / (_HANDLE + LETTER * max(map(len, lines), default=0)))
    columns = max(1, min(len(texts), 4, across))
    look: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": columns,
        "columnspacing": 1.0,
        "handlelength": 2.4,
    }
    figure.legend(
        list(handles.values()), texts, title=title, title_fontsize=6.5, **(look | options)
    )
    higher = 0.14 * max(0, math.ceil(len(lines) / columns) - 3)
    figure.set_figheight(figure.get_figheight() + higher)


_HANDLE = 0.45
"""Inches that a line's sample in a legend takes, with the space around it."""
