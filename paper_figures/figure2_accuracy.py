"""Figure 2: accuracy over training steps, by method, in the mean and for each benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes

from analysis.curves import Collected, collect
from analysis.exhibit import Exhibit, style
from analysis.labels import color, dash, marker, of_methods
from analysis.panels import BAND, benchmark_panels, legend_above
from analysis.selection import describe, paragraph
from analysis.sources import Source
from analysis.statistics import MEAN, curve, over_text, sizes_text

_MARKED = 12  # points of a curve that still get a marker each


def make(sources: Sequence[Source]) -> Exhibit:
    """Mean over the seeds of each label, with its interval."""
    shown, left_out = of_methods(sources)
    collected = collect(shown)
    curves = _curves(collected)
    with style():
        shared = len(collected.shared)
        figure, panels = benchmark_panels(_all_benchmarks(collected), mean=shared > 1)
        for name, panel in panels.items():
            _draw(panel, curves[curves["benchmark"] == name])
        if MEAN in panels:
            panels[MEAN].set_title(f"mean of {shared} benchmarks")
        figure.supxlabel("training step", fontsize=7)
        figure.supylabel("accuracy, avg@k (%)", fontsize=7)
        legend_above(figure)
    return Exhibit(paragraph(_caption(collected), left_out), curves, figure)


def _curves(collected: Collected) -> pd.DataFrame:
    """label, benchmark, seeds, step, accuracy, low, high."""
    frames = []
    for label, mine in collected.curves.items():
        names = {name: [name] for name in mine.benchmarks}
        if len(collected.shared) > 1:
            names[MEAN] = collected.shared
        for name, benchmarks in names.items():
            frame = curve(mine, benchmarks)
            frame.insert(0, "label", label)
            frame.insert(1, "benchmark", name)
            frame.insert(2, "seeds", len(mine.runs))
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _draw(panel: Axes, curves: pd.DataFrame) -> None:
    for label, rows in curves.groupby("label", sort=False):
        name = str(label)
        seeds = int(rows["seeds"].iloc[0])
        panel.plot(
            rows["step"],
            100 * rows["accuracy"],
            color=color(name),
            linestyle=dash(name),
            marker=marker(name) if len(rows) <= _MARKED else None,
            label=f"{name} ({seeds} seed{'s' if seeds > 1 else ''})",
        )
        low, high = 100 * rows["low"], 100 * rows["high"]
        panel.fill_between(rows["step"], low, high, color=color(name), alpha=BAND, linewidth=0)
    panel.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5, integer=True))


def _caption(collected: Collected) -> str:
    curves = collected.curves
    sentences = [
        "Accuracy (avg@k) over training steps: mean over the seeds of each method, with bands.",
        f"Runs: {describe({label: mine.runs for label, mine in curves.items()})}.",
        sizes_text(collected),
        over_text(curves.values()),
    ]
    if any(len(mine.steps) > 200 for mine in curves.values()):
        sentences.append("Of more than 200 evaluations 200 are drawn, evenly spaced.")
    return " ".join([*sentences, *collected.notes])


def _all_benchmarks(collected: Collected) -> list[str]:
    return sorted({name for mine in collected.curves.values() for name in mine.benchmarks})
