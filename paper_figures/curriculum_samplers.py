"""CVPO's weights, their controls, and samplers against plain VAPO, at equal steps and rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from analysis import AnalysisError, method_color
from analysis.exhibit import PAGE, Exhibit, style
from analysis.sources import Source
from analysis.studies import GREY, INK, about, find_study, forest, rows_where

MEASURES = {
    "final accuracy": "a  accuracy at the end",
    "area under the accuracy curve": "b  mean accuracy over training",
}
BUDGETS = {"equal rollouts": ("o", None), "equal steps": ("D", "white")}
"""Marker and filling."""
_SETTING = r"(?P<method>.+) - vapo; (?P<budget>equal steps and rollouts|equal steps|equal rollouts)"
_OWN = ("cvpo", "w_d=")


def make(sources: Sequence[Source]) -> Exhibit:
    """A forest plot of differences against VAPO."""
    study = find_study(sources, "curriculum")
    found = pd.concat([differences(study, measure) for measure in MEASURES], ignore_index=True)
    if found.empty:
        raise AnalysisError(
            f"{study.path}: no difference from VAPO among its rows; make the study again with this "
            "version"
        )
    discards = rows_where(study, "share of rollouts that are discarded", "(?P<method>.+)")
    share = discards.set_index("method")["value"]
    order = ordered(found)
    with style():
        figure, panels = plt.subplots(
            1, 2, figsize=(PAGE, 0.9 + 0.145 * len(order)), layout="constrained", sharey=True
        )
        for panel, (measure, title) in zip(panels, MEASURES.items(), strict=True):
            _draw(panel, found[found["measure"] == measure], order)
            panel.set_title(title, loc="left")
        panels[0].set_ylim(len(order) - 0.5, -0.5)
        panels[0].set_yticks(range(len(order)), [_named(method, share) for method in order])
        figure.legend(*_legend(), loc="outside upper right", ncols=2)
    table = found.assign(discarded=found["method"].map(share))
    return Exhibit(_caption(study, share), table, figure)


def differences(study: Source, measure: str) -> pd.DataFrame:
    """Rows by method and budget; one that discards no rollouts counts for both budgets."""
    rows = rows_where(study, measure, _SETTING).assign(measure=measure)
    both = rows["budget"] == "equal steps and rollouts"
    parts = [rows[~both], *(rows[both].assign(budget=budget) for budget in BUDGETS)]
    columns = ["measure", "method", "budget", "value", "low", "high", "n"]
    return pd.concat(parts)[columns].sort_values(["method", "budget"], kind="stable")


def ordered(found: pd.DataFrame) -> list[str]:
    """CVPO's own weights and their controls first, then rivals; by accuracy at equal rollouts."""
    mine = found[(found["measure"] == "final accuracy") & (found["budget"] == "equal rollouts")]
    best = mine.sort_values("value", ascending=False, kind="stable")["method"].tolist()
    return sorted(best, key=lambda method: not method.startswith(_OWN))


def _named(method: str, share: pd.Series) -> str:
    name = method.removeprefix("sampler=")
    return f"{name} ({share[method]:.0%} discarded)" if method in share else name


def _color(method: str) -> str:
    """CVPO and the trained methods have their colours, controls and samplers are grey."""
    known = method_color(method)
    return INK if known == method_color("") else known


def _draw(panel: Any, found: pd.DataFrame, order: list[str]) -> None:
    panel.axvline(0, color=GREY, linewidth=0.6)
    own = sum(method.startswith(_OWN) for method in order)
    panel.axhline(own - 0.5, color=GREY, linewidth=0.4)
    for place, (budget, (marker, fill)) in enumerate(BUDGETS.items()):
        mine = found[found["budget"] == budget].set_index("method").reindex(order)
        for y, (method, row) in enumerate(mine.iterrows()):
            color = _color(str(method))
            look = {"color": color, "marker": marker, "markerfacecolor": fill or color}
            forest(panel, [y + 0.26 * (place - 0.5)], row.to_frame().T, scale=100, **look)
    panel.set_xlabel("difference from VAPO (percentage points)")


def _legend() -> tuple[list[Any], list[str]]:
    handles = [
        Line2D([], [], color=INK, marker=marker, markerfacecolor=fill or INK, linestyle="none")
        for marker, fill in BUDGETS.values()
    ]
    return handles, list(BUDGETS)


def _caption(study: Source, share: pd.Series) -> str:
    config = study.config
    few = (
        f"{' and '.join(name.removeprefix('sampler=') for name in share.index)} discard rollouts, "
        "so for them the two budgets differ; the others' markers agree. "
        if len(share)
        else ""
    )
    return (
        "True accuracy in a simulated training less that of plain VAPO (shuffled epochs, no "
        "weights), after as many optimiser steps, and after as many generated responses. Above the "
        "line: CVPO, its two halves, and controls of its weights; below: methods that choose the "
        "prompts, with VAPO's loss, and critic-free methods. `w_d=constant` has W_D's mean weight "
        "and none of its allocation; `oracle` knows the true rates. "
        f"{few}{config.get('prompts', '?')} prompts, {config.get('steps', '?')} steps; differences "
        "paired by seed, lines: 95 % t intervals over seeds, not adjusted for the number of rows. "
        "The paper compares with no sampler. " + about(study)
    )
