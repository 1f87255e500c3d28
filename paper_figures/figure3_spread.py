"""Figure 3: how much the values vary within a trajectory, by policy.

Panel (a) has each policy under its own critic, as the paper has. A shift to the right may there be
the critic's as well as the policy's, so panel (b) has all of them under one frozen critic.

Decision: the variance sigma^2 is drawn, as in the paper, on a logarithmic axis; the standard
deviation sigma, which W_S is made of, stands on the axis above.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analysis import AnalysisError
from analysis.exhibit import PAGE, Exhibit, fitted, style
from analysis.labels import color, trainings
from analysis.selection import (
    Groups,
    Selection,
    about_seeds,
    at_the_end,
    describe,
    holding,
    over_seeds,
    paragraph,
    steps_of,
)
from analysis.sources import Source
from analysis.spread import LAST_STEPS, OWN, Spread, read_spread

REFERENCE = "vapo"
PAPER = {"paper: others": (0.005, 0.010), "paper: CVPO": (0.010, 0.015)}
"""Where the paper's distributions peak: of its base model, VAPO and GRPO, and of CVPO; reward^2."""

_QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9}
_BIN = 0.02  # of the histogram, in log10 of the variance
_KERNEL = np.exp(-0.5 * (np.arange(-12, 13) / 4) ** 2)  # smooths it, sd .08 decades
_SCORE = "python -m train score --critic CHECKPOINT --run RUN [--run RUN ...]"

Spreads = Mapping[str, Mapping[int | str, Spread]]
"""Label -> seed (the run's name where the seed is unknown) -> what was read."""


@dataclass(frozen=True)
class _Panel:
    name: str
    critic: str
    selection: Selection
    spreads: Spreads


def make(sources: Sequence[Source]) -> Exhibit:
    """Distributions over the last logged steps, and each label's median against VAPO's.

    Raises:
        AnalysisError: no run logged sigma, and none was scored.
    """
    panels = [panel for panel in (_own(sources), _frozen(sources)) if panel is not None]
    if not panels:
        raise AnalysisError(
            "no run has what this shows, sigma in trajectories: train a method that has a critic, "
            f"such as vapo; or score the responses of any method with a frozen one: {_SCORE}"
        )
    tables = [summarize(p.spreads).assign(panel=p.name, critic=p.critic) for p in panels]
    table = pd.concat(tables, ignore_index=True)
    caption = paragraph(
        "Variance of the critic's values within a trajectory, over the last steps of each run that "
        f"have trajectories, {LAST_STEPS} at most; every seed weighs the same.",
        *(f"({p.name}) {_about(p)}" for p in panels),
        "Dot: median, bar: quartiles (means over seeds); line: interval of the median.",
        about_seeds({k: runs for p in panels for k, runs in p.selection.groups.items()}),
        None if any(p.name == "a" for p in panels) else "(a) is empty: no run logged sigma.",
        None if any(p.name == "b" for p in panels) else f"(b) is empty, it needs scores: {_SCORE}.",
        "Grey: where the paper's distributions peak, at a variance of .005-.01 for its base model, "
        "VAPO and GRPO, and of .01-.015 for CVPO; its claim is that CVPO lies further right.",
        _findings(table),
        _zeros(table),
        *(f"({p.name}) {note}" for p in panels for note in p.selection.notes),
    )
    with style():
        figure = _draw({panel.name: panel for panel in panels}, table)
    return Exhibit(caption, table, figure)


def summarize(spreads: Spreads) -> pd.DataFrame:
    """Quantiles of the variance by label, and its median against the reference's.

    Args:
        spreads: by label and seed.

    Returns:
        A row per label: label, runs, trajectories, first_step, last_step, zero (share of
        trajectories without any variance), p10, p25, median, p75, p90 (means over seeds of a
        seed's quantile, reward^2), median_low, median_high, and ratio (geometric mean over the
        common seeds of median / VAPO's median, where both are above 0), ratio_low, ratio_high,
        ratio_seeds (how many those are). NaN where there is none.
    """
    rows = []
    for label, by_seed in spreads.items():
        variances = [spread.variance for spread in by_seed.values()]
        quantiles = {
            name: over_seeds([float(np.quantile(x, q)) for x in variances])
            for name, q in _QUANTILES.items()
        }
        ratio = _ratio(by_seed, spreads.get(REFERENCE, {}))
        rows.append(
            {
                "label": label,
                "runs": len(by_seed),
                "trajectories": sum(map(len, variances)),
                "first_step": min(spread.steps[0] for spread in by_seed.values()),
                "last_step": max(spread.steps[-1] for spread in by_seed.values()),
                "zero": float(np.mean([np.mean(x == 0) for x in variances])),
                **{name: interval.estimate for name, interval in quantiles.items()},
                "median_low": quantiles["median"].low,
                "median_high": quantiles["median"].high,
                **ratio,
            }
        )
    return pd.DataFrame(rows)


def _ratio(mine: Mapping[int | str, Spread], its: Mapping[int | str, Spread]) -> dict[str, float]:
    """Median over median, paired by seed, and the ends of a t interval of its logarithm."""
    common = [seed for seed in mine if seed in its]
    medians = [[float(np.median(side[seed].variance)) for side in (mine, its)] for seed in common]
    logs = [math.log(a / b) for a, b in medians if a > 0 and b > 0]
    found = over_seeds(logs)
    with np.errstate(over="ignore"):  # two seeds that disagree may leave the interval without end
        ratio, low, high = np.exp([found.estimate, found.low, found.high]).tolist()
    return {"ratio": ratio, "ratio_low": low, "ratio_high": high, "ratio_seeds": len(logs)}


# ------------------------------------------------------------------------------------- reading


def _own(sources: Sequence[Source]) -> _Panel | None:
    if not any(run.lacks(OWN, "sigma") is None for run in trainings(sources)):
        return None
    return _panel("a", "each policy's own", OWN, sources)


def _frozen(sources: Sequence[Source]) -> _Panel | None:
    """Under the critic that scored most of the runs; by name among several."""
    scored = Counter(
        part for run in trainings(sources) for part in run.parts if part.startswith("scores/")
    )
    if not scored:
        return None
    part = max(sorted(scored), key=lambda name: scored[name])
    return _panel("b", part.removeprefix("scores/"), part, sources)


def _panel(name: str, critic: str, part: str, sources: Sequence[Source]) -> _Panel | None:
    selection = at_the_end(holding(sources, part, ["sigma"], remedy=_SCORE))
    notes = list(selection.notes)
    groups: Groups = {}
    read: dict[str, dict[int | str, Spread]] = {}
    for label, runs in selection.groups.items():
        for run in runs:
            spread = read_spread(run, part)
            if len(spread.variance):
                groups.setdefault(label, []).append(run)
                read.setdefault(label, {})[run.name if run.seed is None else run.seed] = spread
            else:
                notes.append(f"{run.name} is left out: no sigma in its last {LAST_STEPS} steps.")
    return _Panel(name, critic, Selection(groups, tuple(notes)), read) if groups else None


# ------------------------------------------------------------------------------------- caption


def _about(panel: _Panel) -> str:
    whose = "its own critic" if panel.name == "a" else f"one frozen critic, {panel.critic}"
    spreads = [s for by_seed in panel.spreads.values() for s in by_seed.values()]
    runs = [run.name for runs in panel.selection.groups.values() for run in runs]
    steps = steps_of({name: s.steps for name, s in zip(runs, spreads, strict=True)})
    count = sum(len(s.variance) for s in spreads)
    shown = describe(panel.selection.groups)
    return f"{shown}, each under {whose}: {count:,} trajectories of {steps}."


def _findings(table: pd.DataFrame) -> str | None:
    """Every label's median against the reference's, in words."""
    found = []
    for row in table[table["ratio"].notna() & (table["label"] != REFERENCE)].to_dict("records"):
        sure = "" if math.isnan(row["ratio_low"]) else _interval(row)
        seeds = f"{row['ratio_seeds']} seed{'s' if row['ratio_seeds'] > 1 else ''} of both"
        found.append(f"{row['label']} {row['ratio']:.2f}{sure} ({row['panel']}, {seeds})")
    return f"Median over {REFERENCE}'s, paired by seed: {', '.join(found)}." if found else None


def _interval(row: Mapping[Any, Any]) -> str:
    return f" [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"


def _zeros(table: pd.DataFrame) -> str | None:
    worst = table["zero"].max()
    if worst == 0:
        return None
    return f"Up to {worst:.1%} of a label's trajectories vary not at all and lie off the axis."


# ------------------------------------------------------------------------------------- drawing


def _draw(panels: Mapping[str, _Panel], table: pd.DataFrame) -> Figure:
    labels = list(dict.fromkeys(table["label"]))
    figure, axes = plt.subplots(
        1, 2, figsize=(PAGE, 1.2 + 0.34 * len(labels)), sharey=True, layout="constrained"
    )
    ends = table[["p10", "median", "p90"]].to_numpy()
    shown = [*ends[ends > 0], PAPER["paper: others"][0], PAPER["paper: CVPO"][1]]
    limits = min(shown) / 4, 4 * max(shown)
    for ax, (name, title) in zip(axes, _TITLES.items(), strict=True):
        ax.set_title(f"({name}) {title}", loc="left")
        if name not in panels:
            ax.set_axis_off()
            ax.text(0.5, 0.5, _EMPTY[name], transform=ax.transAxes, ha="center", va="center")
            continue
        ax.set(xscale="log", xlim=limits, ylim=(len(labels) - 0.7, -1.0))
        ax.set_xlabel("variance of V within a trajectory (reward²)")
        ax.set_yticks(range(len(labels)), [fitted(label, 1.8) for label in labels])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        _draw_paper(ax)
        _draw_rows(ax, panels[name].spreads, labels)
        _draw_medians(ax, table[table["panel"] == name], labels)
        above = ax.secondary_xaxis("top", functions=(_root, np.square))
        above.set_xlabel("standard deviation sigma (reward)")
        for axis in (ax.xaxis, above.xaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    return figure


_TITLES = {
    "a": "each policy under its own critic",
    "b": "all policies under one frozen critic",
}
_EMPTY = {
    "a": "No run logged sigma.",
    "b": "No responses were scored.\n"
    + _SCORE.replace(" --critic", "\n--critic").replace(" --run", "\n--run", 1),
}


def _root(x: Any) -> Any:
    return np.sqrt(np.maximum(x, 0))


def _draw_paper(ax: Any) -> None:
    for (whose, (start, end)), shade in zip(PAPER.items(), ("0.93", "0.86"), strict=True):
        ax.axvspan(start, end, color=shade, linewidth=0, zorder=0)
        ax.text(math.sqrt(start * end), -0.95, whose, ha="center", va="top", rotation=90, size=5)


def _draw_rows(ax: Any, spreads: Spreads, labels: Sequence[str]) -> None:
    """A density over each label's line, all on one scale of heights."""
    edges = _edges([s.variance for by_seed in spreads.values() for s in by_seed.values()])
    density = {label: _density(by_seed.values(), edges) for label, by_seed in spreads.items()}
    top = max(float(height.max()) for height in density.values())
    x = 10 ** ((edges[:-1] + edges[1:]) / 2)
    for label, height in density.items():
        line = labels.index(label)
        y = line - 0.85 * height / top if top > 0 else np.full_like(x, line)
        ax.fill_between(x, line, y, color=color(label), alpha=0.35, linewidth=0, zorder=2)
        ax.plot(x, np.where(height > 1e-3 * top, y, np.nan), color=color(label), linewidth=0.8)


def _edges(variances: Sequence[np.ndarray]) -> np.ndarray:
    """Of a histogram of log10 of all of these, with room for its smoothing at either end."""
    positive = np.concatenate(variances)
    logs = np.log10(positive[positive > 0]) if (positive > 0).any() else np.zeros(1)
    room = _BIN * len(_KERNEL)
    return np.arange(logs.min() - room, logs.max() + room + _BIN, _BIN)


def _density(spreads: Any, edges: np.ndarray) -> np.ndarray:
    """Of log10 of the variance, seeds weighing the same; smoothed."""
    parts = []
    for spread in spreads:
        positive = spread.variance[spread.variance > 0]
        counts = np.histogram(np.log10(positive), bins=edges)[0]
        parts.append(counts / max(len(spread.variance), 1))
    return np.convolve(np.mean(parts, axis=0), _KERNEL / _KERNEL.sum(), mode="same")


def _draw_medians(ax: Any, table: pd.DataFrame, labels: Sequence[str]) -> None:
    for row in table.to_dict("records"):
        line = labels.index(row["label"]) + 0.09
        paint = color(row["label"])
        ax.plot([row["p25"], row["p75"]], [line, line], color=paint, linewidth=2.2, alpha=0.5)
        ax.plot([row["median_low"], row["median_high"]], [line, line], color="black", linewidth=0.7)
        ax.plot(row["median"], line, "o", color=paint, markeredgecolor="black", markeredgewidth=0.4)
    for row in table[table["label"] == REFERENCE].to_dict("records"):
        ax.axvline(row["median"], color=color(REFERENCE), linewidth=0.6, linestyle=":", zorder=1)
