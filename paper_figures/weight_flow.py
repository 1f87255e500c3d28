"""Where the weight goes: W_S, W_D and their product by success rate and outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import AnalysisError
from analysis.exhibit import PAGE, Exhibit, fitted, style
from analysis.selection import (
    Groups,
    about_seeds,
    describe,
    holding,
    over_seeds,
    paragraph,
    steps_of,
)
from analysis.sources import Source
from analysis.weight_cells import BANDS, COLUMNS, OUTCOMES, PHASES, SUMS, Cells, read_cells

DRAWN = 4
"""At most so many labels are drawn; the table has all."""

_PAINT = {"correct": "#0072B2", "incorrect": "#D55E00"}
_MARKERS = {"w_s": "^", "w_d": "s", "w": "o"}  # by weight: W_S, W_D and their product


def make(sources: Sequence[Source]) -> Exhibit:
    """Mean weights, and how much of all |A| they move, of every training that weighs.

    Raises:
        AnalysisError: no training with a weight logged trajectories.
    """
    selection = holding(
        sources,
        "trajectories",
        COLUMNS,
        remedy="train cvpo with log.trajectories_every above 0",
    )
    candidates = {
        label: runs
        for label, runs in selection.groups.items()
        if any(_may_vary(run) for run in runs)
    }
    read = {label: [read_cells(run) for run in runs] for label, runs in candidates.items()}
    groups = _weighing(selection.groups, read)
    read = {label: read[label] for label in groups}
    tables = [
        summarize([cells.sums for cells in runs]).assign(label=label)
        for label, runs in read.items()
    ]
    table = pd.concat([rows for rows in tables if len(rows)] or [pd.DataFrame()], ignore_index=True)
    if table.empty:
        raise AnalysisError(
            f"no trajectory of {describe(groups)} has {', '.join(COLUMNS)}; train cvpo anew"
        )
    groups = {label: runs for label, runs in groups.items() if label in set(table["label"])}
    dropped = {label: sum(cells.dropped for cells in runs) for label, runs in read.items()}
    steps = {
        run.name: cells.steps
        for label, runs in groups.items()
        for run, cells in zip(runs, read[label], strict=True)
    }
    by_default_first = sorted(groups, key=lambda label: " " in label)
    drawn, set_aside = by_default_first[:DRAWN], by_default_first[DRAWN:]
    caption = paragraph(
        f"Where the weights go, over all logged trajectories of {describe(groups)}: "
        f"{_total(table):,} of them, of {steps_of(steps)}, by their prompt's tracked success rate "
        "rho and by outcome.",
        "Left: mean weights. Right: by how many percentage points a cell's share of all |A| is "
        "larger with the weights than without, |A| being that of a trajectory's summed token "
        "advantages before whitening (the log does not have the tokens).",
        about_seeds(groups),
        "W_D is drawn by phase where a run switched to the bottleneck."
        if (table["phase"] == "bottleneck").any()
        else None,
        _findings(table, drawn),
        f"Not drawn, but in the table: {', '.join(set_aside)}." if set_aside else None,
        *(
            f"{label}: {count:,} trajectories without a weight, rho or advantage are left out."
            for label, count in dropped.items()
            if count
        ),
        *selection.notes,
    )
    with style():
        figure = _draw(table, drawn)
    return Exhibit(caption, table, figure)


def summarize(runs: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Mean weights and shares of each cell, with intervals over seeds.

    Args:
        runs: the sums of `read_cells`, a frame for each seed.

    Returns:
        A row per phase (`all`; and early and bottleneck, if a run switched), band and outcome
        (`both`; incorrect, correct) that holds a trajectory: trajectories, runs; w_s, w_d and w
        (means over a run's trajectories, then over runs), each with _low and _high; before and
        after (the cell's share of all |A| of the phase, 0 to 1) and shift = after - before, with
        _low and _high.
    """
    switched = any(
        cells.loc[cells["phase"] == "bottleneck", "trajectories"].sum() for cells in runs
    )
    rows = []
    for phase in ("all", *PHASES) if switched else ("all",):
        inside = [cells if phase == "all" else cells[cells["phase"] == phase] for cells in runs]
        inside = [cells for cells in inside if cells["trajectories"].sum()]
        for band in BANDS:
            for outcome in ("both", *OUTCOMES):
                row = _cell(inside, band, outcome)
                if row["trajectories"]:
                    rows.append({"phase": phase, "band": band, "outcome": outcome, **row})
    return pd.DataFrame(rows)


def _cell(runs: Sequence[pd.DataFrame], band: str, outcome: str) -> dict[str, Any]:
    numbers = []
    for cells in runs:
        mine = cells[(cells["band"] == band) & cells["outcome"].isin([outcome, *_both(outcome)])]
        total, whole = mine[list(SUMS)].sum(), cells[list(SUMS)].sum()
        count = total["trajectories"] or np.nan
        share = {side: total[side] / (whole[side] or np.nan) for side in ("before", "after")}
        numbers.append(
            {
                "trajectories": int(total["trajectories"]),
                **{name: total[name] / count for name in _MARKERS},
                **share,
                "shift": share["after"] - share["before"],
            }
        )
    frame = pd.DataFrame(numbers)
    row: dict[str, Any] = {
        "trajectories": int(frame["trajectories"].sum()),
        "runs": int((frame["trajectories"] > 0).sum()),
    }
    for name in (*_MARKERS, "before", "after", "shift"):
        mean = over_seeds(frame[name].tolist())
        row |= {name: mean.estimate, f"{name}_low": mean.low, f"{name}_high": mean.high}
    return row


def _both(outcome: str) -> tuple[str, ...]:
    return OUTCOMES if outcome == "both" else ()


# ------------------------------------------------------------------------------------- reading


def _weighing(groups: Groups, read: Mapping[str, Sequence[Cells]]) -> Groups:
    """The labels with a run whose weights are not all 1, as far as they are there."""
    weighing = {
        label: groups[label]
        for label, runs in read.items()
        if not all(_all_one(cells.sums) for cells in runs)
    }
    if not weighing:
        raise AnalysisError(
            f"none of the trainings uses a weight ({', '.join(groups)}): train cvpo, "
            "cvpo-stochasticity or cvpo-curriculum"
        )
    return weighing


def _all_one(cells: pd.DataFrame) -> bool:
    """Whether there are trajectories and both weights are 1 in all of them."""
    n = cells["trajectories"]
    return bool(n.any() and (cells["w_s"] == n).all() and (cells["w_d"] == n).all())


def _may_vary(run: Source) -> bool:
    """Whether the metrics saw W_S or W_D vary; where they do not say, the weights are read."""
    names = ["weights/w_s_cv", "weights/w_d_cv"]
    if any(run.lacks("metrics", name) for name in names):
        return True
    return bool((run.metrics(names)[names] != 0).to_numpy().any())  # NaN is not 0


# ------------------------------------------------------------------------------------- caption


def _total(table: pd.DataFrame) -> int:
    rows = table[(table["phase"] == "all") & (table["outcome"] == "both")]
    return int(rows["trajectories"].sum())


def _findings(table: pd.DataFrame, labels: Sequence[str]) -> str:
    """Claim 7: what the hard prompts, rho <= .3, get."""
    told = []
    for label in labels:
        rows = table[(table["label"] == label) & (table["outcome"] == "both")]
        hard = rows[(rows["phase"] == rows["phase"].iloc[-1]) & rows["band"].isin(BANDS[:2])]
        before, after = (hard[side].sum(skipna=False) for side in ("before", "after"))
        shares = "no advantage but 0" if np.isnan(before) else f"{before:.1%} and {after:.1%}"
        told.append(f"{label} {shares}")
    return (
        "Share of |A| on prompts with rho <= .3, without and with the weights (after the switch, "
        f"where there was one): {', '.join(told)}."
    )


# ------------------------------------------------------------------------------------- drawing


def _draw(table: pd.DataFrame, labels: Sequence[str]) -> Figure:
    figure, axes = plt.subplots(
        len(labels),
        2,
        figsize=(PAGE, 0.8 + 1.3 * len(labels)),
        sharex=True,
        sharey="col",
        squeeze=False,
        layout="constrained",
    )
    for (left, right), label in zip(axes, labels, strict=True):
        rows = table[table["label"] == label]
        _draw_weights(left, rows)
        _draw_shifts(right, rows[rows["phase"] == "all"])
        left.set_title(fitted(label, PAGE / 2), loc="left")
        left.set_ylabel("mean weight")
        right.set_ylabel("share of |A|,\nchange (points)")
        for ax in (left, right):
            ax.grid(axis="y")
            ax.set_xticks(range(len(BANDS)), BANDS)
    figure.supxlabel("tracked success rate rho of the prompt", fontsize=7)
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        found, names = ax.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, handlelength=2.6
    )
    return figure


def _draw_weights(ax: Any, rows: pd.DataFrame) -> None:
    ax.axhline(1, color="0.5", linewidth=0.5)
    whole = rows[rows["phase"] == "all"]
    for outcome, paint in _PAINT.items():
        cells = whole[whole["outcome"] == outcome]
        _line(ax, cells, "w_s", f"W_S, {outcome}", color=paint, linestyle=(0, (1.2, 1.2)))
        _line(ax, cells, "w", f"W_S W_D, {outcome}", color=paint, linestyle="-")
    both = rows[rows["outcome"] == "both"]
    phases = [p for p in PHASES if (both["phase"] == p).any()] or ["all"]
    for phase in phases:
        late = phase == "bottleneck"
        look = {"color": "0.35", "linestyle": (0, (4, 1.5)) if late else "-"}
        _line(ax, both[both["phase"] == phase], "w_d", f"W_D{', bottleneck' * late}", **look)


def _line(ax: Any, cells: pd.DataFrame, name: str, label: str, **look: Any) -> None:
    x = [BANDS.index(band) for band in cells["band"]]
    ax.plot(x, cells[name], marker=_MARKERS[name], label=label, **look)
    ax.vlines(x, cells[f"{name}_low"], cells[f"{name}_high"], color=look["color"], linewidth=0.6)


def _draw_shifts(ax: Any, rows: pd.DataFrame) -> None:
    ax.axhline(0, color="0.5", linewidth=0.5)
    for side, (outcome, paint) in zip((0.18, -0.18), _PAINT.items(), strict=True):
        cells = rows[rows["outcome"] == outcome]
        x = np.array([BANDS.index(band) for band in cells["band"]]) + side
        hatch = None if outcome == "correct" else "////"
        ax.bar(
            x,
            100 * cells["shift"],
            width=0.32,
            facecolor=paint if hatch is None else "white",
            edgecolor=paint,
            hatch=hatch,
            linewidth=0.6,
            label=f"change, {outcome}",
        )
        ax.vlines(
            x, 100 * cells["shift_low"], 100 * cells["shift_high"], color="black", linewidth=0.7
        )
