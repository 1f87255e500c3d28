"""Figure 4: the coefficient c = alpha_P = alpha_N of W_S, ours beside the paper's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import AnalysisError
from analysis.compare import CLAIM_SEEDS, differences
from analysis.curves import Collected, collect
from analysis.exhibit import PAGE, Exhibit, fitted, style
from analysis.labels import coefficient, groups
from analysis.panels import legend_above
from analysis.paper import DISAGREEMENT, FIGURE_4, OVERLAP, paper_benchmark
from analysis.selection import describe
from analysis.sources import Source
from analysis.statistics import MEAN, levels, over_text, sizes_text

_WANTED = (
    "the ablation needs evaluated runs of cvpo or cvpo-stochasticity with at least two "
    "coefficients: train with stochasticity.alpha_p and alpha_n at .1, .3 and .5"
)
_METHODS = ("cvpo", "cvpo-stochasticity")
_MARKERS = "osD^v<>p"


def make(sources: Sequence[Source]) -> Exhibit:
    """Accuracy of the runs that differ in c alone, at their last step, by benchmark."""
    method, chosen = _ablation(sources)
    collected = collect(chosen)
    if len(collected.curves) < 2:
        raise AnalysisError(f"{_WANTED}. {' '.join(collected.notes)}")
    ours = levels(collected)
    ours = ours[(ours["measure"] == "final") & ours["label"].isin(collected.curves)]
    ours.insert(1, "c", ours["label"].map(coefficient))
    paper = pd.DataFrame(
        {"label": "paper", "c": c, "benchmark": benchmark, "accuracy": accuracy}
        for benchmark, known in FIGURE_4.items()
        for c, accuracy in known.items()
    )
    with style():
        figure, panels = plt.subplots(1, 2, figsize=(PAGE, 2.8), layout="constrained")
        looks = _looks([*ours["benchmark"], *paper["benchmark"]])
        for panel, rows, title in (
            (panels[0], ours, f"ours: {method}"),
            (panels[1], paper, "the paper's figure 4 (avg@32)"),
        ):
            _draw(panel, rows, looks)
            panel.set_title(fitted(title, PAGE / 2 - 0.5))
        legend_above(figure)
    compared, notes = _against_default(collected, method)
    table = pd.concat([ours, paper, compared], ignore_index=True)
    return Exhibit(_caption(collected, ours, compared, notes), table, figure)


def _ablation(sources: Sequence[Source]) -> tuple[str, list[Source]]:
    """The method with most coefficients, and its runs, among those that differ in c alone."""
    found = {}
    for method in _METHODS:
        pattern = re.compile(rf"{method}( c=[0-9.]+)?")
        found[method] = [
            runs
            for label, runs in groups(sources).items()
            if pattern.fullmatch(label) and any("evals" in run.contents for run in runs)
        ]
    method = max(_METHODS, key=lambda name: len(found[name]))
    if len(found[method]) < 2:
        raise AnalysisError(_WANTED)
    return method, [run for runs in found[method] for run in runs]


def _looks(benchmarks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of a benchmark, the same in both panels; the mean is black and dashed."""
    names = [name for name in sorted(set(benchmarks)) if name != MEAN]
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.85, len(names)))
    looks = {
        name: {"color": mpl.colors.to_hex(shade), "marker": _MARKERS[index % len(_MARKERS)]}
        for index, (name, shade) in enumerate(zip(names, shades, strict=True))
    }
    return looks | {MEAN: {"color": "black", "marker": "X", "linestyle": "--"}}


def _draw(panel: Axes, rows: pd.DataFrame, looks: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(rows["benchmark"]))
    coefficients = sorted(set(rows["c"]))
    apart = 0.3 * min(np.diff(coefficients), default=0.0) if "low" in rows else 0.0
    for index, name in enumerate(names):
        own = rows[rows["benchmark"] == name].sort_values("c")
        x = own["c"] + apart * (index / max(len(names) - 1, 1) - 0.5)
        reach = None
        if "low" in own:
            reach = 100 * np.array([own["accuracy"] - own["low"], own["high"] - own["accuracy"]])
        y = 100 * own["accuracy"]
        panel.errorbar(x, y, yerr=reach, elinewidth=0.7, capsize=1.5, label=name, **looks[name])
    panel.set_xticks(coefficients, [f"{c:g}" for c in coefficients])
    panel.set_xlabel("coefficient c of W_S")
    panel.set_ylabel("accuracy, avg@k (%)")
    panel.grid(axis="y")


def _against_default(collected: Collected, method: str) -> tuple[pd.DataFrame, list[str]]:
    """c minus the default c, as `analysis.compare.differences`; nothing without a default."""
    if method not in collected.curves:
        return pd.DataFrame(), ["There is no run at c = .3, so no difference from it."]
    others = [label for label in collected.curves if label != method]
    return differences(collected, method, others)


def _caption(
    collected: Collected, ours: pd.DataFrame, compared: pd.DataFrame, notes: Sequence[str]
) -> str:
    steps = ours.drop_duplicates("label").set_index("label")["step"]
    if steps.nunique() == 1:
        when = f"step {steps.iloc[0]}"
    else:
        when = f"the last step of each ({', '.join(f'{k} {step}' for k, step in steps.items())})"
    sentences = [
        f"Accuracy at {when} by c = alpha_P = alpha_N of W_S; points of one c are set apart.",
        f"Runs: {describe({label: mine.runs for label, mine in collected.curves.items()})}.",
        sizes_text(collected),
        over_text(collected.curves.values()),
    ]
    if len(compared):
        means = compared[(compared["benchmark"] == MEAN) & (compared["measure"] == "final")]
        sentences += [_difference_text(row) for row in means.to_dict("records")]
        sentences.append(
            "Differences are paired by problem and seed; Holm's adjustment is over all of them in "
            f"the table; a claim takes {CLAIM_SEEDS} seeds."
        )
    sentences += [*notes, *collected.notes]
    sentences.append(f"The paper gives no intervals. {DISAGREEMENT}")
    if any(paper_benchmark(name) == "AMC23" for name in ours["benchmark"]):
        sentences.append(OVERLAP)
    return " ".join(dict.fromkeys(sentences))


def _difference_text(row: Mapping[Any, Any]) -> str:
    return (
        f"In the mean {row['a']} - {row['b']} is {100 * row['difference']:+.1f} points "
        f"[{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]: {row['verdict']}."
    )
