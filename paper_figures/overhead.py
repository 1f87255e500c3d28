"""What W_S and the tracker cost, in percent of a training step (claim 11)."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from analysis import AnalysisError
from analysis.exhibit import COLUMN, Exhibit, fitted, style
from analysis.selection import Groups, about_seeds, describe, holding, over_seeds
from analysis.sources import Source
from cvpo.metrics import Interval

NEGLIGIBLE = 1.0
"""Percent of a step. Decision: the overhead is called negligible if its interval ends below."""

_PARTS = {
    "weights": ("seconds/weights", "W_S", "o"),
    "tracker": ("seconds/tracker", "tracker and W_D", "s"),
}
_NOT_TRAINING = ("seconds/eval", "seconds/save")


def make(sources: Sequence[Source]) -> Exhibit:
    """Seconds in W_S and in the tracker over all seconds of the steps, by label."""
    columns = [column for column, _, _ in _PARTS.values()]
    chosen = holding(
        sources, "metrics", columns, remedy="give logs of python -m train, which times its phases"
    )
    groups, timed, untimed = _timed(chosen.groups)
    table = pd.DataFrame(
        [
            {"label": label, "part": part, "runs": len(runs), "steps": sum(n for _, n in runs)}
            | _row([shares[part] for shares, _ in runs])
            for label, runs in timed.items()
            for part in (*_PARTS, "both")
        ]
    )
    with style():
        figure, panel = plt.subplots(
            figsize=(COLUMN, 1.0 + 0.32 * len(timed)), layout="constrained"
        )
        _draw(panel, table)
    caption = [
        (
            "Share of a training step that is spent on W_S and on the tracker with W_D: seconds of "
            "that phase over seconds of all phases but evaluation and saving, summed over a run's "
            "steps. Every method feeds the tracker; W_S of a method that does not use it is the "
            "cost of a constant 1; where a point is missing nothing was spent. Sigma is read from "
            "values that the critic computes anyway."
        ),
        _verdict(table),
        f"Runs: {describe(groups)}.",
        about_seeds(groups),
        *untimed,
        *chosen.notes,
    ]
    return Exhibit(" ".join(caption), table, figure)


def _timed(
    groups: Groups,
) -> tuple[Groups, dict[str, list[tuple[dict[str, float], int]]], list[str]]:
    """The runs that have timed steps, what `shares_of` says of each, and a note on the others."""
    kept: Groups = {}
    timed: dict[str, list[tuple[dict[str, float], int]]] = {}
    others = []
    for label, runs in groups.items():
        for run in runs:
            found = shares_of(run)
            if found is None:
                others.append(run.name)
            else:
                kept.setdefault(label, []).append(run)
                timed.setdefault(label, []).append(found)
    if not timed:
        raise AnalysisError(
            f"{', '.join(others)}: no step's phases are timed; wait for the first step"
        )
    return kept, timed, [f"{name} is left out: none of its steps is timed." for name in others]


def shares_of(run: Source) -> tuple[dict[str, float], int] | None:
    """Percent of a run's time in each part and in both, and the steps that were timed."""
    names = [name for name in run.contents["metrics"].columns if name.startswith("seconds/")]
    seconds = run.metrics(names).set_index("step")
    phases = seconds.drop(columns=list(_NOT_TRAINING), errors="ignore")
    columns = [column for column, _, _ in _PARTS.values()]
    complete = (phases.sum(axis=1) > 0) & phases[columns].notna().all(axis=1)
    total = float(phases[complete].to_numpy(na_value=0.0).sum())
    if not complete.any():
        return None
    shares = {
        part: 100 * float(phases.loc[complete, column].sum()) / total
        for part, (column, _, _) in _PARTS.items()
    }
    return shares | {"both": sum(shares.values())}, int(complete.sum())


def _row(shares: Sequence[float]) -> dict[str, float]:
    interval: Interval = over_seeds(shares)
    return {"percent": interval.estimate, "low": interval.low, "high": interval.high}


def _verdict(table: pd.DataFrame) -> str:
    both = table[table["part"] == "both"]
    worst = both.sort_values("percent").iloc[-1]
    top = f"At most it is {worst['percent']:.2g} % ({worst['label']})"
    if np.isnan(both["high"]).any():
        return f"{top}; with one run of a label nothing is claimed about other runs."
    below = (both["high"] < NEGLIGIBLE).all()
    return (
        f"{top}; all intervals end {'below' if below else 'not below'} {NEGLIGIBLE:g} %, the bound "
        f"for calling it negligible{'' if below else ', so it is not'}."
    )


def _draw(panel: Axes, table: pd.DataFrame) -> None:
    labels = list(dict.fromkeys(table["label"]))
    for offset, (part, (_, name, marker)) in zip((-0.15, 0.15), _PARTS.items(), strict=True):
        rows = table[(table["part"] == part) & (table["percent"] > 0)]
        y = rows["label"].map(labels.index) + offset
        reach = [rows["percent"] - rows["low"].clip(lower=0), rows["high"] - rows["percent"]]
        panel.errorbar(
            rows["percent"],
            y,
            xerr=np.nan_to_num(np.array(reach)),
            fmt=marker,
            color="#0072B2" if part == "weights" else "#D55E00",
            elinewidth=0.8,
            capsize=1.5,
            label=name,
        )
    panel.axvline(NEGLIGIBLE, color="0.5", linewidth=0.8, linestyle=(0, (1, 2)))
    panel.annotate("negligible ", (NEGLIGIBLE, -0.25), ha="right", color="0.4")
    panel.set_yticks(range(len(labels)), [fitted(label, 1.6) for label in labels])
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("share of a training step (%)")
    panel.grid(axis="x")
    panel.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
