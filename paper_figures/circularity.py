"""What sigma goes with, over training: does the critic come to serve the weight?

W_S is made of the critic's values and shapes what the critic is trained on. If the critic adapted
its variance to the weight, sigma would come apart from the policy's entropy under W_S, and not
without it (sections 4.3 and 9 of the reading note).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import AnalysisError
from analysis.exhibit import COLUMN, Exhibit, style
from analysis.labels import color, dash, marker, of_methods
from analysis.panels import legend_above
from analysis.selection import about_seeds, describe, holding, over_seeds, paragraph
from analysis.sources import Source

PARTNERS = {
    "sigma/corr_entropy": "mean token entropy",
    "sigma/corr_length": "response length",
    "sigma/corr_surprise": "|r - V(prompt)|",
}
"""Metric -> what the correlation of sigma is with, over the trajectories of a step."""

WINDOWS = 20
"""Training is cut into at most so many equal windows of steps, each drawn as one point."""


def make(sources: Sequence[Source]) -> Exhibit:
    """Correlations by label in the mean over seeds, and their change from first to last fifth.

    Raises:
        AnalysisError: no run logged a correlation of sigma.
    """
    chosen, left_out = of_methods(sources)
    selection = holding(
        chosen, "metrics", ["sigma/corr_entropy"], remedy="train a method that has a critic"
    )
    read = {
        label: {run.name: _correlations(run) for run in runs}
        for label, runs in selection.groups.items()
    }
    empty = [label for label, runs in read.items() if all(run.empty for run in runs.values())]
    shown = {label: runs for label, runs in selection.groups.items() if label not in empty}
    if not shown:
        raise AnalysisError(
            "sigma's correlations are NaN at every step of every run: with one trajectory a step, "
            "or values that do not vary, there is none; log more trajectories a step"
        )
    table = pd.concat(
        [
            frame(read[label].values(), name).assign(label=label, metric=name)
            for label in shown
            for name in PARTNERS
            for frame in (curve, change)
        ],
        ignore_index=True,
    )
    caption = paragraph(
        "Correlation over the trajectories of a step of sigma, the standard deviation of a "
        "trajectory's values, with what the panels' titles name; "
        f"{describe(shown)}. Points are means over windows of steps and over seeds.",
        about_seeds(shown),
        "A fall with entropy under W_S, and not without W_S, would say that the critic adapts its "
        "variance to the weight.",
        _findings(table),
        _undefined({label: read[label] for label in shown}),
        *(f"{label} is left out: its correlations are NaN at every step." for label in empty),
        *selection.notes,
    )
    with style():
        figure = _draw(table)
    return Exhibit(paragraph(caption, left_out), table, figure)


def _correlations(run: Source) -> pd.DataFrame:
    """step and each of `PARTNERS`, of the steps that have one of them; what is lacking is NaN."""
    held = [name for name in PARTNERS if run.lacks("metrics", name) is None]
    frame = run.metrics(held).reindex(columns=["step", *PARTNERS])
    return frame.dropna(subset=list(PARTNERS), how="all")


def curve(runs: Iterable[pd.DataFrame], name: str) -> pd.DataFrame:
    """A metric's course over the seeds of a label.

    Args:
        runs: step and the metric, one frame for each seed.
        name: the metric.

    Returns:
        A row per window of steps: what ("window"), correlation (mean over seeds of a seed's mean
        over the steps that have one), low, high (95 % t interval over seeds), runs and steps (that
        have one) and step (the mean of those). Windows without any are left out.
    """
    present = [run[["step", name]].dropna() for run in runs]
    every = np.unique(np.concatenate([run["step"].to_numpy() for run in present]))
    if every.size == 0:
        return pd.DataFrame()
    windows = min(WINDOWS, every.size)
    edges = np.linspace(every[0], every[-1] + 1, windows + 1)
    rows = []
    for start, end in pairwise(edges):
        inside = [
            run.loc[run["step"].between(start, end, inclusive="left"), name] for run in present
        ]
        means = [float(part.mean()) for part in inside if len(part)]
        if means:
            middle = float(every[(every >= start) & (every < end)].mean())
            rows.append(_row("window", middle, means, sum(map(len, inside))))
    return pd.DataFrame(rows)


def change(runs: Iterable[pd.DataFrame], name: str) -> pd.DataFrame:
    """By how much a metric's mean over the last fifth of its steps exceeds that over the first.

    Args:
        runs: as for `curve`; a run with fewer than five values takes no part.
        name: the metric.

    Returns:
        One row as those of `curve`: what is "change", step is the last one; empty without a run.
    """
    present = [run[["step", name]].dropna() for run in runs]
    long = [run for run in present if len(run) >= 5]
    if not long:
        return pd.DataFrame()
    changes = []
    for run in long:
        fifth = len(run) // 5
        values = run.sort_values("step")[name]
        changes.append(float(values.tail(fifth).mean() - values.head(fifth).mean()))
    last = max(int(run["step"].max()) for run in long)
    return pd.DataFrame([_row("change", last, changes, sum(map(len, long)))])


def _row(what: str, step: float, values: Sequence[float], steps: int) -> dict[str, Any]:
    mean = over_seeds(values)
    return {
        "what": what,
        "step": step,
        "correlation": mean.estimate,
        "low": mean.low,
        "high": mean.high,
        "runs": len(values),
        "steps": steps,
    }


# ------------------------------------------------------------------------------------- caption


def _findings(table: pd.DataFrame) -> str | None:
    """The change of the correlation with entropy, label by label."""
    rows = table[(table["what"] == "change") & (table["metric"] == "sigma/corr_entropy")]
    if rows.empty:
        return None
    told = []
    for row in rows.to_dict("records"):
        sure = "" if np.isnan(row["low"]) else f" [{row['low']:+.2f}, {row['high']:+.2f}]"
        early = row["step"] < 0.9 * rows["step"].max()
        until = f" (up to step {row['step']:.0f} only)" if early else ""
        told.append(f"{row['label']} {row['correlation']:+.2f}{sure}{until}")
    return f"Its change with entropy, last fifth of the steps less the first: {', '.join(told)}."


def _undefined(read: Mapping[str, Mapping[str, pd.DataFrame]]) -> str | None:
    """Where a correlation is not defined, because its partner does not vary, say."""
    told = []
    for name, partner in PARTNERS.items():
        for label, runs in read.items():
            missing = sum(int(run[name].isna().sum()) for run in runs.values())
            if missing:
                total = sum(map(len, runs.values()))
                told.append(f"of {label} with {partner} at {missing} of {total} steps")
    return f"There is none {', '.join(told)}." if told else None


# ------------------------------------------------------------------------------------- drawing


def _draw(table: pd.DataFrame) -> Figure:
    figure, axes = plt.subplots(
        len(PARTNERS), 1, figsize=(COLUMN, 4.0), sharex=True, layout="constrained"
    )
    windows = table[table["what"] == "window"]
    for ax, (name, partner) in zip(axes, PARTNERS.items(), strict=True):
        ax.set_title(f"with {partner}", loc="left")
        ax.axhline(0, color="0.5", linewidth=0.5)
        rows = windows[windows["metric"] == name]
        if rows.empty:
            ax.text(0.5, 0.6, "not defined in these logs", transform=ax.transAxes, ha="center")
        for label in dict.fromkeys(windows["label"]):
            line = rows[rows["label"] == label]
            paint = color(label)
            ax.plot(
                line["step"],
                line["correlation"],
                color=paint,
                linestyle=dash(label),
                marker=marker(label),
                markevery=max(1, len(line) // 6),
                label=label,
            )
            ax.fill_between(line["step"], line["low"], line["high"], color=paint, alpha=0.15, lw=0)
        ax.set_ylim(*_limits(rows))
        ax.grid(axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.supylabel("correlation of sigma", fontsize=7)
    axes[-1].set_xlabel("training step")
    legend_above(figure)
    return figure


def _limits(rows: pd.DataFrame) -> tuple[float, float]:
    """Around the means: the t interval of two seeds reaches far beyond them."""
    if rows.empty:
        return -1.0, 1.0
    low, high = min(rows["correlation"].min(), 0.0), max(rows["correlation"].max(), 0.0)
    return max(low - 0.15, -1.02), min(high + 0.15, 1.02)
