"""Does the critic mean what it says: mean return against value, by place in the response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.exhibit import COLUMN, Exhibit, fitted, style
from analysis.labels import color, dash, marker, of_methods
from analysis.panels import legend_above
from analysis.selection import (
    about_seeds,
    at_the_end,
    describe,
    headline,
    holding,
    over_seeds,
    paragraph,
    recent,
)
from analysis.sources import Source
from cvpo.metrics import expected_calibration_error

MIN_TOKENS = 50
"""Value bins with fewer tokens are in the table and not drawn."""

PLACES = ("first third", "middle third", "last third")
"""Of a response: the log's position bins, merged."""

_WHEN = ("first", "last")
_COLUMNS = ("step", "position_bin", "value_bin", "n", "value_sum", "return_sum")
_LOOKS = (("#56B4E9", "o"), ("#CC79A7", "s"), ("#000000", "^"))


def make(sources: Sequence[Source]) -> Exhibit:
    """Calibration at the first and at the last logged step, and its error by position.

    Raises:
        AnalysisError: no run logged calibration.
    """
    chosen, left_out = of_methods(sources)
    selection = at_the_end(
        holding(
            chosen,
            "calibration",
            remedy="train a method that has a critic with log.tokens_every above 0",
        )
    )
    read = {label: [_ends(run) for run in runs] for label, runs in selection.groups.items()}
    shown = headline(selection.groups)
    bins = 1 + max(
        int(rows["position_bin"].max())
        for runs in read.values()
        for e in runs
        for rows in e.values()
    )
    curves = [
        curve(pd.concat([e[when] for e in read[shown]]), bins).assign(label=shown, when=when)
        for when in _WHEN
    ]
    errors = [
        error(runs, when, bins).assign(label=label, when=when)
        for label, runs in read.items()
        for when in _WHEN
    ]
    table = pd.concat([*curves, *errors], ignore_index=True)
    steps = {when: _steps(read, when) for when in _WHEN}
    caption = paragraph(
        f"Top: mean return of tokens by their value, {describe({shown: selection.groups[shown]})}, "
        "over all tokens of the first and of the last logged step; on the diagonal the critic is "
        f"right on average. Bins of fewer than {MIN_TOKENS} tokens are not drawn.",
        "Bottom: expected calibration error, the mean distance of value from return over value "
        "bins, by position in the response; thin: first step, thick: last step; "
        f"{describe(selection.groups)}.",
        f"Steps: first {steps['first']}, last {steps['last']}.",
        about_seeds(selection.groups),
        _findings(table),
        "All tokens of a response share its outcome, so that with few responses even a right "
        "critic has an error above 0.",
        *selection.notes,
    )
    with style():
        figure = _draw(table, list(read))
    return Exhibit(paragraph(caption, left_out), table, figure)


Ends = Mapping[str, pd.DataFrame]
"""The calibration rows of a run's first and last logged step."""


def _ends(run: Source) -> Ends:
    last = recent(run, "calibration", _COLUMNS, 1)[-1]
    first = next(frame for frame in run.scan("calibration", _COLUMNS) if len(frame))
    return {"first": first, "last": last}


def curve(rows: pd.DataFrame, bins: int) -> pd.DataFrame:
    """Mean value and mean return by place and value bin.

    Args:
        rows: position_bin, value_bin, n, value_sum and return_sum; a cell may stand in several.
        bins: parts that responses were cut into, as far as any log shows.

    Returns:
        what ("curve"), place (of `PLACES`), value_bin, n (tokens), and value and return (means, in
        reward).
    """
    place = rows["position_bin"] * len(PLACES) // bins
    sums = rows.groupby([place, "value_bin"])[["n", "value_sum", "return_sum"]].sum().reset_index()
    return pd.DataFrame(
        {
            "what": "curve",
            "place": [PLACES[index] for index in sums["position_bin"]],
            "value_bin": sums["value_bin"],
            "n": sums["n"],
            "value": sums["value_sum"] / sums["n"],
            "return": sums["return_sum"] / sums["n"],
        }
    )


def error(runs: Sequence[Ends], when: str, bins: int) -> pd.DataFrame:
    """Expected calibration error by position bin, and of all positions together.

    Args:
        runs: one for each seed.
        when: first or last.
        bins: as for `curve`.

    Returns:
        what ("error"), position_bin (NaN for all together), position (its middle, % of the
        response), n (tokens), error (mean over seeds, reward), low, high (95 % t interval over
        seeds), runs (that have tokens there).
    """
    frames = [ends[when] for ends in runs]
    rows = []
    for position in (None, *range(bins)):
        parts = [
            frame if position is None else frame[frame["position_bin"] == position]
            for frame in frames
        ]
        found = [_error(part) for part in parts if len(part)]
        mean = over_seeds(found)
        rows.append(
            {
                "what": "error",
                "position_bin": np.nan if position is None else position,
                "position": np.nan if position is None else 100 * (position + 0.5) / bins,
                "n": int(sum(part["n"].sum() for part in parts)),
                "error": mean.estimate,
                "low": mean.low,
                "high": mean.high,
                "runs": len(found),
            }
        )
    return pd.DataFrame(rows)


def _error(rows: pd.DataFrame) -> float:
    return expected_calibration_error({str(name): rows[name].to_numpy() for name in rows})


# ------------------------------------------------------------------------------------- caption


def _steps(read: Mapping[str, Sequence[Ends]], when: str) -> str:
    steps = {int(ends[when]["step"].iloc[0]) for runs in read.values() for ends in runs}
    return f"{min(steps)}" if len(steps) == 1 else f"{min(steps)}-{max(steps)}"


def _findings(table: pd.DataFrame) -> str:
    rows = table[(table["what"] == "error") & table["position_bin"].isna()]
    told = []
    for label in dict.fromkeys(rows["label"]):
        first, last = (rows[(rows["label"] == label) & (rows["when"] == when)] for when in _WHEN)
        told.append(f"{label} {first['error'].iloc[0]:.3f} and {last['error'].iloc[0]:.3f}")
    return f"Error over all positions, first and last: {', '.join(told)}."


# ------------------------------------------------------------------------------------- drawing


def _draw(table: pd.DataFrame, labels: Sequence[str]) -> Figure:
    figure = plt.figure(figsize=(COLUMN, 4.3), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1.15, 1.0])
    curves = table[table["what"] == "curve"]
    left = None
    for column, when in enumerate(_WHEN):
        ax = figure.add_subplot(grid[0, column], sharex=left, sharey=left)
        _draw_curves(ax, curves[curves["when"] == when])
        ax.set_title(fitted(f"{curves['label'].iloc[0]}, {when} step", COLUMN / 2 - 0.3))
        if left is None:
            left = ax
            ax.set_ylabel("mean return (reward)")
            ax.legend(loc="upper left", fontsize=5.5, handlelength=1.6, borderaxespad=0)
        else:
            ax.tick_params(labelleft=False)
    bottom = figure.add_subplot(grid[1, :])
    _draw_errors(bottom, table[(table["what"] == "error") & table["position"].notna()], labels)
    legend_above(figure, bottom, loc="outside lower center")
    return figure


def _draw_curves(ax: Any, rows: pd.DataFrame) -> None:
    ax.plot([-1, 1], [-1, 1], color="0.6", linewidth=0.6, zorder=0)
    for place, (paint, sign) in zip(PLACES, _LOOKS, strict=True):
        line = rows[(rows["place"] == place) & (rows["n"] >= MIN_TOKENS)]
        ax.plot(line["value"], line["return"], marker=sign, color=paint, linewidth=0.9, label=place)
    ax.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal", xlabel="mean value V (reward)")
    ax.set_xticks([-1, 0, 1])
    ax.set_yticks([-1, 0, 1])


def _draw_errors(ax: Any, rows: pd.DataFrame, labels: Sequence[str]) -> None:
    for label in labels:
        for when, width in zip(_WHEN, (0.5, 1.3), strict=True):
            line = rows[(rows["label"] == label) & (rows["when"] == when)]
            ax.plot(
                line["position"],
                line["error"],
                color=color(label),
                linestyle=dash(label),
                linewidth=width,
                marker=marker(label) if when == "last" else None,
                label=label if when == "last" else None,
            )
            if when == "last":
                ax.vlines(line["position"], line["low"], line["high"], color=color(label), lw=0.5)
    ax.set(xlim=(0, 100), xlabel="position in the response (%)")
    ax.set_ylim(0, 1.15 * max(float(rows["error"].max()), 0.01))
    ax.set_ylabel("calibration error (reward)")
    ax.set_title("thin: first step, thick: last step", loc="left")
    ax.grid(axis="y")
