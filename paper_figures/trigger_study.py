"""When the phase switches, by setting, for policies that improve, that stop and that never move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.exhibit import PAGE, Exhibit, style
from analysis.sources import Source
from analysis.studies import (
    GREY,
    SHADES,
    about,
    find_study,
    forest,
    read_table,
    rows_where,
    short,
)

PAPER_STEP = 1000
"""Near which the paper reports its switch."""
PAPER_SETTING = "printed, mean, d = 1"
"""The printed rule without forgetting; the mean is this project's choice of quantifier."""

POLICIES = {
    "improving": (SHADES[1], "o"),
    "stopped": (SHADES[2], "^"),
    "frozen": (SHADES[3], "s"),
}
"""Colour and marker."""


def make(sources: Sequence[Source]) -> Exhibit:
    """Step of every switch in synthetic drift, and its epoch on a real run and its control."""
    study = find_study(sources, "trigger")
    switches = named(
        read_table(
            study,
            "switches",
            words=("shape", "detector", "quantifier"),
            numbers=("growth", "seed", "discount"),
            gaps=("stop", "round", "step"),
            key=("shape", "growth", "stop", "seed", "detector", "quantifier", "discount"),
        )
    )
    real = on_the_real_run(study)
    with style():
        figure = _draw(switches, real)
    table = pd.concat([summary(switches).assign(panel="synthetic"), real.assign(panel="real run")])
    return Exhibit(_caption(study, switches, real), table, figure)


def named(switches: pd.DataFrame) -> pd.DataFrame:
    """The study's switches, each with its setting in words and the kind of its policy."""
    quantifier = switches["quantifier"]
    setting = switches["detector"] + np.where(quantifier == "", "", ", " + quantifier)
    setting += ", d = " + switches["discount"].map(short)
    kinds = [switches["shape"] == "frozen", switches["stop"].isna()]
    return switches.assign(
        setting=setting, policy=np.select(kinds, ["frozen", "improving"], "stopped")
    )


def summary(switches: pd.DataFrame) -> pd.DataFrame:
    """By setting, policy, growth and stop: switches, policies (n), and their first and last step.

    `value` is the mean step of those that switch, NaN where none does.
    """
    keys = ["setting", "policy", "growth", "stop"]
    by = switches.groupby(keys, sort=False, dropna=False)["step"]
    return by.agg(value="mean", low="min", high="max", switches="count", n="size").reset_index()


def on_the_real_run(study: Source) -> pd.DataFrame:
    """Epoch of the switch on the real run and, as the mean over draws, on its frozen control.

    `told` says in words what no point shows: never, or how many of the draws switched.
    """
    run = rows_where(study, "epoch of the switch", "real run: (?P<name>.+?)(; never)?", never=True)
    control = rows_where(
        study,
        "epoch of the switch, frozen control",
        r"real run: (?P<name>.+); fires on (?P<fired>\d+) of (?P<draws>\d+).*",
        never=True,
    )
    run["told"] = run["value"].isna().map({True: "never", False: ""})
    control["told"] = control["fired"] + "/" + control["draws"]
    both = pd.concat([run.assign(policy="improving"), control.assign(policy="frozen")])
    both["setting"] = both["name"].str.replace("discount ", "d = ")
    both["setting"] = both["setting"].str.replace(r"\b0\.", ".", regex=True)
    return both[["setting", "policy", "value", "low", "high", "n", "told"]]


def _draw(switches: pd.DataFrame, real: pd.DataFrame) -> Figure:
    """Synthetic drift above, a panel for each speed; below, if there is one, the real run."""
    growths = sorted(set(switches.loc[switches["policy"] != "frozen", "growth"]))
    settings = list(dict.fromkeys(switches["setting"]))
    names = list(dict.fromkeys(real["setting"]))
    heights = [0.3 * len(settings), *([0.26 * len(names)] if names else [])]
    figure = plt.figure(figsize=(PAGE, 0.8 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), len(growths), height_ratios=heights)
    for column, growth in enumerate(growths):
        panel = figure.add_subplot(grid[0, column])
        mine = switches[(switches["growth"] == growth) | (switches["policy"] == "frozen")]
        _draw_switches(panel, mine, settings, first=column == 0)
        panel.set_title(f"synthetic: logits grow by {short(growth)} a round", loc="left")
    if names:
        panel = figure.add_subplot(grid[1, :])
        _draw_real(panel, real, names)
        panel.set_title("a real run that improves, and its frozen control", loc="left")
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="none", label=f"{policy} policy")
        for policy, (color, marker) in POLICIES.items()
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)
    return figure


def _draw_switches(
    panel: Any, switches: pd.DataFrame, settings: Sequence[str], *, first: bool
) -> None:
    """A marker for each policy and seed; at the right edge how many switched of how many."""
    for row, setting in enumerate(settings):
        for place, (policy, (color, marker)) in enumerate(POLICIES.items()):
            mine = switches[(switches["setting"] == setting) & (switches["policy"] == policy)]
            y = row + 0.25 * (place - 1)
            panel.plot(
                mine["step"],
                np.full(len(mine), y),
                color=color,
                marker=marker,
                linestyle="none",
                alpha=0.5,
                markeredgewidth=0,
            )
            fired = int(mine["step"].notna().sum())
            _at_the_edge(panel, y, f"{fired}/{len(mine)}", color)
    panel.axvline(PAPER_STEP, color=GREY, linewidth=0.8, linestyle=(0, (4, 1.5)))
    panel.set_xlim(0, 1.03 * np.nanmax([2 * PAPER_STEP, *switches["step"]]))
    panel.set_ylim(len(settings) - 0.5, -0.6)
    panel.set_yticks(range(len(settings)), settings if first else [])
    panel.hlines(np.arange(1, len(settings)) - 0.5, *panel.get_xlim(), GREY, linewidth=0.2)
    for stop in sorted(set(switches["stop"].dropna()) - {0.0}):
        panel.axvline(stop * _steps_per_round(switches), color=SHADES[2], linewidth=0.6, alpha=0.6)
    panel.set_xlabel("step of the switch")


def _steps_per_round(switches: pd.DataFrame) -> float:
    """From the switches themselves; NaN if there is none."""
    return float((switches["step"] / (switches["round"] + 1)).median())


def _draw_real(panel: Any, real: pd.DataFrame, names: list[str]) -> None:
    for place, policy in enumerate(("improving", "frozen")):
        color, marker = POLICIES[policy]
        mine = real[real["policy"] == policy].set_index("setting").reindex(names)
        y = np.arange(len(names)) + 0.3 * (place - 0.5)
        forest(panel, y, mine, color=color, marker=marker)
        for height, told in zip(y, mine["told"].fillna(""), strict=True):
            _at_the_edge(panel, height, told, color)
    panel.set_ylim(len(names) - 0.5, -0.6)
    panel.set_yticks(range(len(names)), names)
    panel.set_xlim(left=0)
    panel.set_xlabel("epoch of the switch")


def _at_the_edge(panel: Any, y: float, text: str, color: str) -> None:
    """Writes right of the panel."""
    x_of_axes = panel.get_yaxis_transform()
    panel.text(1.01, y, text, transform=x_of_axes, va="center", size=5, color=color)


def _caption(study: Source, switches: pd.DataFrame, real: pd.DataFrame) -> str:
    text = [
        (
            "When the switch to the second phase comes. A trigger that detects a bottleneck fires "
            "on policies that stopped, after their stop, and not on improving ones; one that fires "
            "on all alike is a clock."
        ),
        (
            f"Upper panels: synthetic drift, {study.config.get('num_prompts', '?')} prompts and "
            f"{study.config.get('rounds', '?')} rounds: one marker for each shape of drift, stop "
            "and seed; at the right, how many switched of how many. Solid lines: where the stopped "
            "policies cease to improve. The frozen policy is the same in each. Dashed: "
            f"step {PAPER_STEP}, near which the paper reports its switch."
        ),
        _on_the_paper(switches),
    ]
    if real.empty:
        text.append("The study was made without a real run, so none is shown.")
    else:
        text.append(
            "Lower panel: epochs of a real run whose accuracy rises, and of draws in which each "
            "prompt keeps its mean rate: mean epoch with 95 % bootstrap interval over draws; at "
            "the right, draws that switched."
        )
    return " ".join([*filter(None, text), about(study)])


def _on_the_paper(switches: pd.DataFrame) -> str:
    """What the paper's setting does, as far as the study has it, in a sentence."""
    mine = switches[switches["setting"] == PAPER_SETTING]
    by_policy = {policy: mine.loc[mine["policy"] == policy, "step"] for policy in POLICIES}
    shares = [
        f"{steps.count()} of {len(steps)} {policy}"
        for policy, steps in by_policy.items()
        if len(steps)
    ]
    if not shares:
        return ""
    return f"The printed rule ({PAPER_SETTING}) switches on {', '.join(shares)} policies."
