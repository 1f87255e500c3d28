"""The control arms of W_S against the printed equations: in trainings, and simulated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis import AnalysisError
from analysis.evaluations import Evaluations, read_evaluations
from analysis.exhibit import COLUMN, PAGE, Exhibit, style
from analysis.labels import color, groups, marker, trainings
from analysis.sources import Source
from analysis.studies import (
    FEWEST_SEEDS,
    GREY,
    INK,
    SHADES,
    about,
    find_study,
    forest,
    has_study,
    read_table,
)
from cvpo.metrics import paired_difference, paired_t_interval

MEASURE = "accuracy at the end"
ARMS = {
    "none": "none (W_S = 1)",
    "constant": "constant",
    "matched": "matched constant",
    "shuffled": "shuffled",
    "flipped": "flipped",
    "hard": "hard step",
    "entropy": "entropy for σ",
    "positive_only": "positive only",
    "negative_only": "negative only",
    "outcome_group": "μ per outcome",
}
"""In the order of rows."""
WORLDS = {
    "token trees": (SHADES[1], "s", None),
    "bandit": (INK, "o", None),
    "bandit, high sigma likelier if correct": (SHADES[3], "^", "white"),
    "bandit, high sigma likelier if wrong": (SHADES[4], "v", "white"),
}
"""Worlds that are drawn: colour, marker and filling (None: the colour)."""
_SECTIONS = [
    "model",
    "data",
    "rollout",
    "algorithm",
    "curriculum",
    "actor",
    "critic",
    "pretraining",
]
_ARM = re.compile(r" (?:\((?P<arm>\w+)\)|mu=(?P<mu>outcome_group))")


def make(sources: Sequence[Source]) -> Exhibit:
    """Accuracy of each arm less that of `literal`, in trainings and in the study `weights`."""
    trained, notes = in_trainings(sources)
    simulated = pd.DataFrame(columns=["world", "arm"])
    if has_study(sources, "weights"):
        simulated = in_simulation(find_study(sources, "weights"))
        notes.append(about(find_study(sources, "weights")))
    else:
        notes.append(
            "No log of the study `weights` is among the runs, so nothing simulated is shown."
        )
    if trained.empty and simulated.empty:
        raise AnalysisError(
            "no arm of W_S to compare: train cvpo-stochasticity with stochasticity.arm=constant "
            "(and without, with the same seeds), or run `python -m sim weights`; " + " ".join(notes)
        )
    halves = [
        half for half in ((_draw_trained, trained), (_draw_simulated, simulated)) if len(half[1])
    ]
    shown = [arm for arm in ARMS if any(arm in set(found["arm"]) for _, found in halves)]
    with style():
        figure, panels = plt.subplots(
            1,
            len(halves),
            figsize=(PAGE if len(halves) > 1 else COLUMN, 1.2 + 0.22 * len(shown)),
            layout="constrained",
            sharey=True,
            squeeze=False,
        )
        for panel, (draw, found) in zip(panels[0], halves, strict=True):
            panel.axvline(0, color=GREY, linewidth=0.6)
            draw(panel, found, shown)
        panels[0, 0].set_ylim(len(shown) - 0.5, -0.5)
        panels[0, 0].set_yticks(range(len(shown)), [ARMS[arm] for arm in shown])
    table = pd.concat([trained.assign(panel="trainings"), simulated.assign(panel="simulated")])
    return Exhibit(_caption(trained, simulated, notes), table, figure)


# ------------------------------------------------------------------------------------- trainings


def in_trainings(sources: Sequence[Source]) -> tuple[pd.DataFrame, list[str]]:
    """Every trained arm against its literal twin, and what a reader has to know.

    Twins have the same label but for the arm. They are compared at the last step that all of their
    shared seeds evaluated, on the problems that all evaluated there; every benchmark weighs the
    same.

    Returns:
        method, arm, step, benchmarks, problems, seeds, value, low and high (`paired_difference`).
    """
    trained = trainings(sources)
    evaluated = [run for run in trained if "evals" in run.contents]
    by_label = {label: {run.seed: run for run in runs} for label, runs in groups(evaluated).items()}
    rows = []
    notes = [
        f"{run.name} is left out: {run.lacks('evals')}."
        for run in trained
        if "evals" not in run.contents
    ]
    for label, runs in by_label.items():
        found = _ARM.search(label)
        if found is None:
            continue
        twin = label.replace(found[0], "")
        shared = sorted(
            seed for seed in runs.keys() & by_label.get(twin, {}).keys() if seed is not None
        )
        if not shared:
            notes.append(f"{label} is left out: {twin} was not trained with any of its seeds.")
            continue
        pairs = [(runs[seed], by_label[twin][seed]) for seed in shared]
        notes += _differences(label, pairs)
        both = [(read_evaluations(a), read_evaluations(b)) for a, b in pairs]
        row = _against_literal(both)
        if row is None:
            notes.append(
                f"{label} is left out: it and {twin} share no problem at a step after the start."
            )
            continue
        if any(one.steps[-1] > row["step"] for pair in both for one in pair):
            notes.append(
                f"{label} and its twin are compared at step {row['step']}, the last that all of "
                "their runs evaluated, though some go on."
            )
        arm = found["arm"] or found["mu"]
        rows.append({"method": twin, "arm": arm, "seeds": len(shared), **row})
    return pd.DataFrame(rows), notes


def _differences(label: str, pairs: Sequence[tuple[Source, Source]]) -> list[str]:
    """Sections of the configuration in which an arm differs from its twin, but for the arm."""
    other = [
        name
        for name in _SECTIONS
        if any(run.config.get(name) != twin.config.get(name) for run, twin in pairs)
    ]
    if any(run.verifier != twin.verifier for run, twin in pairs):
        other.append("verifier")
    if not other:
        return []
    return [f"{label} differs from its twin in {', '.join(other)} too: do not compare them."]


def _against_literal(pairs: Sequence[tuple[Evaluations, Evaluations]]) -> dict[str, Any] | None:
    """Difference of the arm from literal, pairs by seed; None if nothing is shared."""
    every = [found for pair in pairs for found in pair]
    steps = set.intersection(*(set(found.steps.tolist()) for found in every)) - {0}
    problems = every[0].problems
    for found in every:
        problems = problems.intersection(found.problems)
    if not steps or not len(problems):
        return None
    step = max(steps)
    a, b = (np.stack([_at(pair[side], step, problems) for pair in pairs]) for side in (0, 1))
    there = ~np.isnan(a - b).any(axis=0)
    if not there.any():
        return None
    benchmark = problems.get_level_values("benchmark").to_numpy(dtype=object)[there]
    interval = paired_difference(a[:, there], b[:, there], strata=benchmark)
    return {
        "step": step,
        "benchmarks": len(set(benchmark)),
        "problems": int(there.sum()),
        "value": interval.estimate,
        "low": interval.low,
        "high": interval.high,
    }


def _at(found: Evaluations, step: int, problems: pd.MultiIndex) -> np.ndarray[Any, Any]:
    """Accuracy of each of the problems at a step; NaN where the step has no sample of it."""
    row = int(np.flatnonzero(found.steps == step)[0])
    accuracy: np.ndarray[Any, Any] = found.accuracy[row, found.problems.get_indexer(problems)]
    return accuracy


# ------------------------------------------------------------------------------------- simulated


def in_simulation(study: Source) -> pd.DataFrame:
    """Every arm against literal in every world of the study: world, arm, value, low, high, seeds.

    Of bandits the log holds differences only, and literal is not among what the arms are compared
    with in every version of it: then it is literal's own difference from the arm that is turned.
    """
    arms = read_table(
        study,
        "arms",
        words=("world", "arm", "less", "measure"),
        numbers=("seeds",),
        gaps=("difference", "low", "high"),  # of measures that a world may not have
        key=("world", "arm", "less", "measure"),
    )
    arms = arms[arms["measure"] == MEASURE].rename(columns={"difference": "value"})
    if arms["value"].isna().any():
        raise AnalysisError(
            f"{study.path}: tables/arms lacks a number of the {MEASURE}; run the study again with "
            "overwrite=true"
        )
    direct = arms[arms["less"] == "literal"]
    turned = arms[arms["arm"] == "literal"].rename(columns={"arm": "less", "less": "arm"})
    turned = turned.assign(value=-turned["value"], low=-turned["high"], high=-turned["low"])
    columns = ["world", "arm", "value", "low", "high", "seeds"]
    bandits = pd.concat([direct, turned]).drop_duplicates(["world", "arm"])[columns]
    trees = _trees(
        read_table(
            study, "trees", words=("arm",), numbers=("seed", "accuracy"), key=("arm", "seed")
        ),
        study,
    )
    return pd.concat([trees, bandits], ignore_index=True)


def _trees(trees: pd.DataFrame, study: Source) -> pd.DataFrame:
    accuracy = trees.pivot(index="seed", columns="arm", values="accuracy")
    common = accuracy.dropna()
    if "literal" not in common or common.empty:
        raise AnalysisError(
            f"{study.path}: tables/trees has no seed of literal and of every arm; run the study "
            "again with overwrite=true"
        )
    rows = []
    for arm in dict.fromkeys(trees["arm"]):
        if arm == "literal":
            continue
        found = paired_t_interval(common[arm].to_numpy(), common["literal"].to_numpy())
        ends = {"value": found.estimate, "low": found.low, "high": found.high}
        rows.append({"world": "token trees", "arm": arm, **ends, "seeds": found.sizes[0]})
    return pd.DataFrame(rows)


# -------------------------------------------------------------------------------------- drawing


def _draw_trained(panel: Any, trained: pd.DataFrame, shown: list[str]) -> None:
    panel.set_title("trainings", loc="left")
    panel.set_xlabel("accuracy less that of literal (points)")
    methods = list(dict.fromkeys(trained["method"]))
    for place, method in enumerate(methods):
        mine = trained[trained["method"] == method].set_index("arm").reindex(shown)
        y = np.arange(len(shown)) + 0.25 * (place - (len(methods) - 1) / 2)
        look = {"color": color(method), "marker": marker(method), "label": method}
        forest(panel, y, mine, scale=100, **look)
    panel.figure.legend(*panel.get_legend_handles_labels(), loc="outside upper left", fontsize=6)


def _draw_simulated(panel: Any, simulated: pd.DataFrame, shown: list[str]) -> None:
    panel.set_title("simulated", loc="left")
    panel.set_xlabel("true accuracy less that of literal (points)")
    for place, (world, (ink, shape, fill)) in enumerate(WORLDS.items()):
        mine = simulated[simulated["world"] == world].set_index("arm").reindex(shown)
        y = np.arange(len(shown)) + 0.18 * (place - (len(WORLDS) - 1) / 2)
        look = {"color": ink, "marker": shape, "markerfacecolor": fill or ink}
        forest(panel, y, mine, scale=100, label=world, markersize=3, **look)
    panel.figure.legend(*panel.get_legend_handles_labels(), loc="outside upper right", fontsize=6)


def _caption(trained: pd.DataFrame, simulated: pd.DataFrame, notes: Sequence[str]) -> str:
    what = (
        "Accuracy of W_S's control arms less that of the printed equations (`literal`, at 0), in "
        "percentage points. If a trajectory's own spread of values tells something, `constant` "
        "and `shuffled` lie left of 0. The paper has none of these controls."
    )
    return " ".join([what, *_on_trainings(trained), *_on_simulation(simulated), *notes])


def _on_trainings(trained: pd.DataFrame) -> list[str]:
    if trained.empty:
        return ["No training of an arm together with its literal twin is among the runs."]
    seeds = trained["seeds"]
    single = trained.loc[seeds == 1, "method"] + " (" + trained.loc[seeds == 1, "arm"] + ")"
    over = "" if len(single) == len(trained) else "seeds and problems"
    if len(single):
        of = f", for {', '.join(single)} " if over else ""
        over += f"{of}problems only, since there is one seed"
    text = (
        f"Trainings, at step {_span(trained['step'])}, {_span(seeds)} seeds, "
        f"{_span(trained['problems'])} problems of {_span(trained['benchmarks'])} benchmarks that "
        f"weigh the same; 95 % bootstrap intervals of paired differences over {over}."
    )
    few = f"Below {FEWEST_SEEDS} seeds no difference is claimed."
    return [text, few] if seeds.min() < FEWEST_SEEDS else [text]


def _on_simulation(simulated: pd.DataFrame) -> list[str]:
    if simulated.empty:
        return []
    what = (
        "Simulated: true accuracy at the end of a training, paired by seed, 95 % t intervals over "
        "seeds; `matched` is the constant with literal's own mean weights."
    )
    text = [what]
    in_bandit = set(simulated.loc[simulated["world"] == "bandit", "arm"])
    absent = [arm for arm in ARMS if arm in set(simulated["arm"]) - in_bandit]
    if absent:
        text.append(f"In the bandits the log does not compare {', '.join(absent)} with literal.")
    rest = [world for world in dict.fromkeys(simulated["world"]) if world not in WORLDS]
    if rest:
        text.append(f"In the table only: {'; '.join(rest)}.")
    return text


def _span(numbers: pd.Series) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"
