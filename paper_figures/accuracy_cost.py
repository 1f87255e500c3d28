"""Accuracy against what it cost: device-hours and response tokens instead of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import AnalysisError
from analysis.curves import COSTS, Collected, collect
from analysis.exhibit import PAGE, Exhibit, style
from analysis.labels import color, dash, marker, of_methods
from analysis.panels import BAND, legend_above
from analysis.selection import describe, paragraph
from analysis.sources import Source
from analysis.statistics import (
    SHARE,
    Cells,
    at_cost,
    covered,
    curve_by_cost,
    ends,
    level,
    over_text,
    sizes_text,
)

_UNITS = {"device_seconds": (3600.0, "device-hours"), "tokens": (1e6, "response tokens (millions)")}

_COLUMNS = ["kind", "axis", "label", "seeds", "cost", "accuracy", "low", "high"]


def make(sources: Sequence[Source]) -> Exhibit:
    """Learning curves over both costs, and the accuracy that all reach at an equal cost."""
    shown, left_out = of_methods(sources)
    collected = collect(shown)
    if not collected.shared:
        raise AnalysisError(f"there is no mean over benchmarks to show: {collected.notes[-1]}")
    budgets = {axis: _budget(collected, axis) for axis in COSTS}
    curves = _curves(collected)
    if curves.empty:
        raise AnalysisError(
            "no run has metrics of the steps it evaluated with a cost that grows, so costs are not "
            "known: copy the runs' metrics.jsonl too"
        )
    with style():
        figure, panels = plt.subplots(1, 2, figsize=(PAGE, 2.6), layout="constrained", sharey=True)
        for axis, panel in zip(COSTS, panels, strict=True):
            _draw(panel, axis, curves[curves["axis"] == axis], budgets[axis])
        panels[0].set_ylabel(f"accuracy, mean of {len(collected.shared)} benchmarks (%)")
        legend_above(figure)
    table = pd.concat([curves, _at_budget(collected, budgets)], ignore_index=True)
    return Exhibit(paragraph(_caption(collected, curves, budgets), left_out), table, figure)


def _budget(collected: Collected, axis: str) -> float:
    """The largest cost that all runs have come to; NaN where a run's is not known."""
    low, high = covered(list(collected.curves.values()), axis)
    return high if low <= high else math.nan


def _curves(collected: Collected) -> pd.DataFrame:
    """`_COLUMNS`, the cost in seconds or tokens."""
    frames = []
    for axis in COSTS:
        for label, mine in collected.curves.items():
            frame = curve_by_cost(mine, collected.shared, axis)
            if frame is not None:
                frame = frame.rename(columns={axis: "cost"})
                frame = frame.assign(kind="curve", axis=axis, label=label, seeds=len(mine.runs))
                frames.append(frame)
    return pd.concat(frames, ignore_index=True)[_COLUMNS] if frames else pd.DataFrame()


def _at_budget(collected: Collected, budgets: dict[str, float]) -> pd.DataFrame:
    """The same columns at the common budget, with a bootstrap interval."""
    rows = []
    for axis, budget in budgets.items():
        if math.isnan(budget):
            continue
        for label, mine in collected.curves.items():
            narrowed = mine.of_benchmarks(collected.shared)
            values = at_cost(narrowed, axis, np.array([budget]))[:, 0]
            interval = level(Cells(values, narrowed.problems), collected.shared)
            rows.append(
                {
                    "kind": "equal cost",
                    "axis": axis,
                    "label": label,
                    "seeds": len(mine.runs),
                    "cost": budget,
                }
                | ends(interval, "accuracy", SHARE)
            )
    return pd.DataFrame(rows).drop(columns="standard_error", errors="ignore")


def _draw(panel: Axes, axis: str, curves: pd.DataFrame, budget: float) -> None:
    unit, name = _UNITS[axis]
    for label, rows in curves.groupby("label", sort=False):
        text = str(label)
        look = {"color": color(text), "linestyle": dash(text), "marker": marker(text)}
        x = rows["cost"] / unit
        panel.plot(x, 100 * rows["accuracy"], **look, markevery=0.2, label=text)
        low, high = 100 * rows["low"], 100 * rows["high"]
        panel.fill_between(x, low, high, color=look["color"], alpha=BAND, linewidth=0)
    if not math.isnan(budget):
        panel.axvline(budget / unit, color="0.5", linewidth=0.8, linestyle=(0, (1, 2)))
        panel.annotate(
            "equal cost ",
            (budget / unit, 0.02),
            xycoords=("data", "axes fraction"),
            ha="right",
            color="0.4",
        )
    panel.set_xlabel(name)
    panel.set_xlim(left=0)
    panel.grid(axis="y")


def _caption(collected: Collected, curves: pd.DataFrame, budgets: dict[str, float]) -> str:
    known = collected.curves
    sentences = [
        (
            "Accuracy (avg@k), mean over benchmarks, against the cumulative cost of rollouts and "
            "updates, value pretraining included, evaluation and warm start not. The runs of a "
            "method are interpolated between their evaluations, over the range that all of them "
            "cover; nothing is extrapolated."
        ),
    ]
    for axis, budget in budgets.items():
        unit, name = _UNITS[axis]
        if math.isnan(budget):
            sentences.append(f"There is no cost in {name} that all runs have come to.")
        else:
            sentences.append(
                f"The dotted line at {budget / unit:.3g} {name} is the largest cost that all have "
                "come to; the table has the accuracies there."
            )
        missing = set(known) - set(curves.loc[curves["axis"] == axis, "label"])
        if missing:
            sentences.append(
                f"{', '.join(sorted(missing))} is not shown over {name}: its cost is not logged at "
                "the steps it evaluated, or does not grow."
            )
    sentences += [
        f"Runs: {describe({label: mine.runs for label, mine in known.items()})}.",
        sizes_text(collected),
        over_text(known.values()),
        *collected.notes,
    ]
    return " ".join(sentences)
