"""Which of CVPO's constants matter: each one moved alone, and all at once by Sobol's indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis import AnalysisError
from analysis.exhibit import PAGE, Exhibit, style
from analysis.sources import Source
from analysis.studies import GREY, SHADES, about, find_study, forest, read_table, short

ENDS = {"low": ("lowest value", SHADES[1], "<"), "high": ("highest value", SHADES[2], ">")}
OUTCOMES = {
    "final accuracy": (SHADES[0], "o", None),
    "final accuracy beyond the mean weight": (SHADES[3], "s", "white"),
}
"""Of which the variance is divided: colour, marker and filling (None: the colour)."""


def make(sources: Sequence[Source]) -> Exhibit:
    """Change of the final accuracy at both ends of each range, and Sobol's total indices."""
    study = find_study(sources, "sensitivity")
    sides = read_table(
        study,
        "one_at_a_time",
        words=("parameter",),
        numbers=("value", "default", "difference"),
        gaps=("low", "high", "seed_noise"),
        key=("parameter", "value"),
    )
    indices = ("first", "first_low", "first_high", "total", "total_low", "total_high")
    sobol = read_table(
        study,
        "sobol",
        words=("outcome", "parameter"),
        gaps=indices,  # where the outcome does not vary there is none
        key=("outcome", "parameter"),
    )
    undefined = sobol["first"].isna() | sobol["total"].isna()
    if (undefined != undefined.groupby(sobol["outcome"]).transform("all")).any():
        raise AnalysisError(
            f"{study.path}: tables/sobol has indices of some constants only; run the study again "
            "with overwrite=true"
        )
    alone, order = one_at_a_time(sides), ranked(sobol)
    if set(order) != set(alone["parameter"]):
        raise AnalysisError(
            f"{study.path}: tables/one_at_a_time and tables/sobol are not of the same constants; "
            "run the study again with overwrite=true"
        )
    with style():
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(PAGE, 0.9 + 0.15 * len(order)), layout="constrained", sharey=True
        )
        _draw_alone(left, alone, order)
        _draw_sobol(right, sobol, order)
        left.set_ylim(len(order) - 0.5, -0.5)
        left.set_yticks(range(len(order)), [_named(alone, parameter) for parameter in order])
    table = pd.concat([alone.assign(panel="one at a time"), sobol.assign(panel="Sobol")])
    return Exhibit(_caption(study, alone, sobol), table, figure)


def one_at_a_time(sides: pd.DataFrame) -> pd.DataFrame:
    """The study's table with the ends of each range told apart and the usual names.

    Returns:
        parameter, end (low, high), setting (the constant there), default, value (change of the
        final accuracy), low and high (its 95 % interval), and seed_noise.
    """
    frame = sides.assign(end=np.where(sides["value"] < sides["default"], "low", "high"))
    return frame.rename(columns={"value": "setting", "difference": "value"})


def ranked(sobol: pd.DataFrame) -> list[str]:
    """The parameters, that of the largest total index of the final accuracy first."""
    mine = sobol[sobol["outcome"] == "final accuracy"]
    return mine.sort_values("total", ascending=False, kind="stable")["parameter"].tolist()


def _named(alone: pd.DataFrame, parameter: str) -> str:
    mine = alone[alone["parameter"] == parameter]
    ends = mine["setting"].min(), mine["setting"].max()
    low, high = (short(float(f"{end:.3g}")) for end in ends)
    return f"{parameter}  {short(mine['default'].iloc[0])} ({low} to {high})"


def _draw_alone(panel: Any, alone: pd.DataFrame, order: list[str]) -> None:
    noise = 100 * alone["seed_noise"].iloc[0]
    if noise > 0:
        panel.axvspan(
            -noise, noise, color=GREY, alpha=0.15, linewidth=0, label="± sd of a run's gain"
        )
    panel.axvline(0, color=GREY, linewidth=0.6)
    for place, (end, (name, color, marker)) in enumerate(ENDS.items()):
        mine = alone[alone["end"] == end].set_index("parameter").reindex(order)
        y = np.arange(len(order)) + 0.24 * (place - 0.5)
        forest(panel, y, mine, scale=100, color=color, marker=marker, label=name, markersize=3)
    panel.set_xlabel("change of final accuracy (percentage points)")
    panel.set_title("a  one constant moved", loc="left")
    panel.legend(loc="lower right", fontsize=6)


def _draw_sobol(panel: Any, sobol: pd.DataFrame, order: list[str]) -> None:
    panel.axvline(0, color=GREY, linewidth=0.6)
    for place, (outcome, (color, marker, fill)) in enumerate(OUTCOMES.items()):
        mine = sobol[sobol["outcome"] == outcome].set_index("parameter").reindex(order)
        y = np.arange(len(order)) + 0.3 * (place - 0.5)
        total = pd.DataFrame(
            {"value": mine["total"], "low": mine["total_low"], "high": mine["total_high"]}
        )
        look = {"color": color, "markerfacecolor": fill or color, "label": f"of {outcome}"}
        forest(panel, y, total, scale=100, marker=marker, markersize=3, **look)
        panel.plot(100 * mine["first"], y, linestyle="none", marker="|", color=color, markersize=4)
    panel.set_xlabel("total index, share of the variance (%);  | first order")
    panel.set_title("b  all moved at once (Sobol)", loc="left")
    panel.legend(loc="lower right", fontsize=6)


def _caption(study: Source, alone: pd.DataFrame, sobol: pd.DataFrame) -> str:
    noise = alone["seed_noise"].iloc[0]
    first = sobol[sobol["outcome"] == "final accuracy"]["first"].sum(skipna=False)
    shares = (
        "there is none, since the final accuracy is the same at every point"
        if np.isnan(first)
        else f"the first-order shares sum to {100 * first:.0f} %"
    )
    spread = (
        f"Grey: one standard deviation over seeds of what a run gains ({100 * noise:.1f} points). "
        if noise > 0
        else ""
    )
    return (
        "How much CVPO's constants matter in a small simulated world; the paper varies none of "
        "them but the coefficient. Labels give the default and the range, which is ours. "
        "(a) Final true accuracy with one constant at an end of its range less that of the "
        f"defaults, paired by seed, with 95 % t intervals over seeds. {spread}"
        "(b) Share of the variance of the final accuracy, averaged over seeds, that a constant "
        "has a hand in when all move at once (marker), and that it explains alone (bar); "
        f"{shares}. Lines are 95 % bootstrap intervals over "
        f"the {study.config.get('points', '?')} points of the design. Open: of what a straight "
        "line in the mean weight leaves of the accuracy, since a larger weight is a larger step. "
        + about(study)
    )
