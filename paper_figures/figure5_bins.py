"""Figure 5: share of prompts in each accuracy bin over steps, without and with the curriculum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import AnalysisError
from analysis.accuracy_bins import BINS, read_bins
from analysis.exhibit import COLUMN, Exhibit, fitted, style
from analysis.selection import Groups, about_seeds, describe, holding, over_seeds, paragraph
from analysis.sources import Source, ranges

PAIRS = (("cvpo-stochasticity", "cvpo"), ("vapo", "cvpo-curriculum"), ("vapo", "cvpo"))
"""Without and with the curriculum, the cleanest comparison first; the last differs in W_S too."""

_COLORS = ("#A50026", "#F46D43", "#FDCB7D", "#D5EAF2", "#74ADD1", "#313695")
_PANELS = ("without", "with")
_SHARES = ("round", "step", "bin", "share", "low", "high", "prompts", "true_share", "runs")


def make(sources: Sequence[Source]) -> Exhibit:
    """Mean shares over the seeds of the first of `PAIRS` that the runs hold.

    Raises:
        AnalysisError: no run with or without the curriculum holds a round.
    """
    selection = holding(
        sources, "prompts", ["successes"], remedy="train until a round over the prompts is complete"
    )
    chosen = _pair(selection.groups)
    shown = {label: selection.groups[label] for label in chosen.values()}
    tables = [
        mean_shares([read_bins(run) for run in shown[label]]).assign(panel=panel, label=label)
        for panel, label in chosen.items()
    ]
    table = pd.concat(tables, ignore_index=True)
    for label in chosen.values():
        if label not in set(table["label"]):
            names = ", ".join(run.name for run in shown[label])
            raise AnalysisError(f"no round of {names} rolled out a prompt; train for longer")
    switches = _switches(shown[chosen["with"]]) if "with" in chosen else []
    caption = paragraph(
        "Prompts by the share of a round's rollouts that were correct, without and with the "
        f"difficulty curriculum: {describe(shown)}; means over seeds, rounds drawn at the step in "
        f"which they end. {_prompts(table)}",
        *(_ends(table[table["panel"] == panel], label) for panel, label in chosen.items()),
        about_seeds(shown),
        *(_missing(panel) for panel in _PANELS if panel not in chosen),
        "Here both weights differ between the panels, W_S too."
        if tuple(chosen.values()) == PAIRS[-1]
        else None,
        "With few rollouts a prompt that is rarely solved often shows as never solved.",
        "Dashed: where the true rates after a round, which simulations know, pass .25, .5, .75."
        if table["true_share"].notna().any()
        else None,
        "Dotted: a seed switches to the bottleneck phase." if switches else None,
        "The paper's bin of the lowest accuracy stays filled without the curriculum, and with it "
        "empties from about step 1000 on.",
        _uneven(table),
        *selection.notes,
    )
    with style():
        figure = _draw(table, chosen, switches)
    return Exhibit(caption, table, figure)


def mean_shares(runs: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Mean of `read_bins` over seeds, rounds matched by number.

    Returns:
        A row per round and bin, of `_SHARES`: step and prompts are means over the runs that have
        the round, bin is its name, low and high are share's 95 % t interval over seeds.
    """
    rows = []
    for _, cell in pd.concat(runs).groupby(["round", "bin"]):
        share = over_seeds(cell["share"].tolist())
        rows.append(
            {
                "round": cell["round"].iloc[0],
                "step": cell["step"].mean(),
                "bin": BINS[cell["bin"].iloc[0]],
                "share": share.estimate,
                "low": share.low,
                "high": share.high,
                "prompts": cell["prompts"].mean(),
                "true_share": cell["true_share"].mean(),
                "runs": len(cell),
            }
        )
    return pd.DataFrame(rows, columns=_SHARES)


def _pair(groups: Groups) -> dict[str, str]:
    """Panel -> label. A method's default comes before its variants."""
    by_method: dict[str, str] = {}
    for label in sorted(groups, key=lambda label: " " in label):
        by_method.setdefault(label.split()[0], label)
    for pair in PAIRS:
        if all(method in by_method for method in pair):
            return {p: by_method[method] for p, method in zip(_PANELS, pair, strict=True)}
    for column, panel in enumerate(_PANELS):
        for pair in PAIRS:
            if pair[column] in by_method:
                return {panel: by_method[pair[column]]}
    raise AnalysisError(
        "no run is of vapo, cvpo-stochasticity, cvpo-curriculum or cvpo, which this compares; "
        f"there are {', '.join(groups)}"
    )


def _switches(runs: Sequence[Source]) -> list[int]:
    """Steps after which runs went on in the bottleneck phase."""
    steps = []
    for run in runs:
        if "events" in run.contents:
            events = run.read("events", ["step", "kind"])
            steps += events.loc[events["kind"] == "phase_switch", "step"].tolist()
    return sorted(steps)


# ------------------------------------------------------------------------------------- caption


def _prompts(table: pd.DataFrame) -> str:
    low, high = round(table["prompts"].min()), round(table["prompts"].max())
    return f"{low:,}{'' if low == high else f'-{high:,}'} prompts a round."


def _ends(rows: pd.DataFrame, label: str) -> str:
    """The share that was never solved, in the first and in the last round."""
    never = rows[rows["bin"] == BINS[0]]
    first, last = never.iloc[0], never.iloc[-1]
    return (
        f"{label} never solved {_percent(first)} of the prompts in its first round and "
        f"{_percent(last)} in its last, at step {last['step']:.0f}."
    )


def _percent(row: Any) -> str:
    if np.isnan(row["low"]):
        return f"{row['share']:.1%}"
    return f"{row['share']:.1%} [{max(row['low'], 0):.1%}, {min(row['high'], 1):.1%}]"


def _missing(panel: str) -> str:
    methods = " or ".join(dict.fromkeys(pair[_PANELS.index(panel)] for pair in PAIRS))
    return f"The panel {panel} the curriculum is empty: no run of {methods} is among the logs."


def _uneven(table: pd.DataFrame) -> str | None:
    """Rounds that only some of the seeds have reached, and rounds that none has."""
    told = []
    for label, rows in table.groupby("label"):
        lost = set(range(rows["round"].min(), rows["round"].max())) - set(rows["round"])
        if lost:
            told.append(
                f"{label} has no round {ranges(lost)} (counted from 0): the areas are drawn across."
            )
        partial = rows[rows["runs"] < rows["runs"].max()]
        if len(partial):
            told.append(
                f"{label}: not every seed has reached the rounds from step "
                f"{partial['step'].min():.0f} on."
            )
    return " ".join(told) or None


# ------------------------------------------------------------------------------------- drawing


def _draw(table: pd.DataFrame, chosen: Mapping[str, str], switches: Sequence[int]) -> Figure:
    figure, axes = plt.subplots(
        1, 2, figsize=(COLUMN, 2.3), sharex=True, sharey=True, layout="constrained"
    )
    for ax, letter, panel in zip(axes, "ab", _PANELS, strict=True):
        ax.set_title(f"({letter}) {panel} W_D\n{fitted(chosen.get(panel, ''), COLUMN / 2 - 0.2)}")
        ax.spines[:].set_visible(False)
        ax.tick_params(axis="y", length=2 if panel == "without" else 0)
        if panel not in chosen:
            ax.text(0.5, 0.5, "no such run", transform=ax.transAxes, ha="center", va="center")
            continue
        rows = table[table["panel"] == panel]
        _draw_areas(ax, rows)
        for step in switches if panel == "with" else ():
            ax.axvline(step, color="black", linewidth=0.8, linestyle=":")
        ax.set_ylim(0, 100)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes[0].set_ylabel("prompts (%)")
    figure.supxlabel("training step", fontsize=7)
    patches = [Patch(color=color) for color in _COLORS]
    figure.legend(
        patches,
        BINS,
        loc="outside upper center",
        ncols=6,
        title="share of the prompt's rollouts that were correct",
        title_fontsize=6.5,
        fontsize=6,
        handlelength=0.9,
        handletextpad=0.4,
        columnspacing=0.9,
    )
    return figure


def _draw_areas(ax: Any, rows: pd.DataFrame) -> None:
    """Bins stacked, never solved at the bottom; a single round becomes a bar."""
    wide = rows.pivot(index="round", columns="bin", values="share")[list(BINS)]
    step = rows.groupby("round")["step"].first().to_numpy()
    share = 100 * wide.to_numpy().T
    if len(step) == 1:
        step, share = step[0] + np.array([-0.5, 0.5]), np.repeat(share, 2, axis=1)
    ax.stackplot(step, share, colors=_COLORS, edgecolor="white", linewidth=0.3)
    if rows["true_share"].notna().any():
        true = rows.pivot(index="round", columns="bin", values="true_share")[list(BINS)]
        cumulative = 100 * np.cumsum(true.to_numpy(), axis=1)
        for edge in (1, 2, 3):
            line = cumulative[:, edge]
            ax.plot(step[: len(line)], line, color="black", linewidth=0.7, linestyle=(0, (3, 1.5)))
