"""pass@k at the last evaluation: do the methods that raise avg@k lose variety?"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import AnalysisError
from analysis.curves import Collected, Curves, benchmark_of, collect
from analysis.exhibit import Exhibit, style
from analysis.labels import color, dash, marker, of_methods
from analysis.panels import BAND, benchmark_panels, legend_above
from analysis.selection import describe, paragraph
from analysis.sources import Source
from analysis.statistics import MEAN, SHARE, ends, over_text, sizes_text
from cvpo.metrics import crossed_t_interval, pass_at_k


def make(sources: Sequence[Source]) -> Exhibit:
    """1 - C(n-c, k) / C(n, k) of each run and problem, for k up to the fewest samples."""
    shown, left_out = of_methods(sources)
    collected = collect(shown)
    whole = {label: mine for label, mine in collected.curves.items() if _is_whole(mine)}
    if not whole:
        raise AnalysisError("every run grades with partial credit, for which pass@k is not defined")
    table = pd.concat(
        [_curve(mine, collected.shared) for mine in whole.values()], ignore_index=True
    )
    shared, benchmarks = len(collected.shared), sorted(set(table["benchmark"]) - {MEAN})
    with style():
        figure, panels = benchmark_panels(benchmarks, mean=shared > 1)
        for name, panel in panels.items():
            _draw(panel, table[table["benchmark"] == name])
        if MEAN in panels:
            panels[MEAN].set_title(f"mean of {shared} benchmarks")
        figure.supxlabel("k, samples that one may submit", fontsize=7)
        figure.supylabel("pass@k (%)", fontsize=7)
        legend_above(figure)
    return Exhibit(paragraph(_caption(collected, whole), left_out), table, figure)


def _counts(mine: Curves) -> np.ndarray:
    return np.asarray(mine.accuracy[:, -1] * mine.samples[:, -1])


def _is_whole(mine: Curves) -> bool:
    counts = _counts(mine)
    return bool(np.allclose(counts, np.round(counts), atol=1e-6))


def _ks(most: int) -> list[int]:
    """Powers of two, and the most samples there are."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def _curve(mine: Curves, shared: Sequence[str]) -> pd.DataFrame:
    """label, benchmark, seeds, step, k, pass_at_k, low, high."""
    n, c = mine.samples[:, -1], np.round(_counts(mine)).astype(int)
    benchmark = benchmark_of(mine.problems)
    names = {name: [name] for name in mine.benchmarks}
    if len(shared) > 1:
        names[MEAN] = list(shared)
    rows = []
    for name, benchmarks in names.items():
        chosen = np.isin(benchmark, benchmarks)
        for k in _ks(int(n[:, chosen].min())):
            cells = np.asarray(pass_at_k(n[:, chosen], c[:, chosen], k))
            interval = crossed_t_interval(cells, strata=benchmark[chosen])
            rows.append(
                {
                    "label": mine.label,
                    "benchmark": name,
                    "seeds": len(mine.runs),
                    "step": int(mine.steps[-1]),
                    "k": k,
                }
                | ends(interval, "pass_at_k", SHARE)
            )
    return pd.DataFrame(rows)


def _draw(panel: Axes, table: pd.DataFrame) -> None:
    for label, rows in table.groupby("label", sort=False):
        name = str(label)
        look = {"color": color(name), "linestyle": dash(name), "marker": marker(name)}
        panel.plot(rows["k"], 100 * rows["pass_at_k"], **look, label=name)
        low, high = 100 * rows["low"], 100 * rows["high"]
        panel.fill_between(rows["k"], low, high, color=look["color"], alpha=BAND, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_locator(mpl.ticker.NullLocator())


def _caption(collected: Collected, whole: dict[str, Curves]) -> str:
    steps = {label: int(mine.steps[-1]) for label, mine in whole.items()}
    if len(set(steps.values())) == 1:
        when = f"step {next(iter(steps.values()))}"
    else:
        when = "the last step of each: " + ", ".join(f"{k} {step}" for k, step in steps.items())
    sentences = [
        f"pass@k (unbiased, 1 - C(n-c, k) / C(n, k)) at {when}; pass@1 is avg@k's value.",
        "A benchmark's k goes up to the fewest samples of a problem.",
        f"Runs: {describe({label: mine.runs for label, mine in whole.items()})}.",
        sizes_text(collected),
        over_text(whole.values()),
    ]
    partial = [label for label in collected.curves if label not in whole]
    if partial:
        sentences.append(f"{', '.join(partial)} has partial credit, and no pass@k.")
    return " ".join([*sentences, *collected.notes])
