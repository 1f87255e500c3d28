"""What the evaluations of several runs say together: levels, learning curves, their areas.

Everything is a table of accuracies by seed and problem, crossed, so that one bootstrap over seeds
and problems serves all. Every problem of a benchmark weighs the same, and so does every benchmark
in the mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Shaped

from analysis.curves import Collected, Curves, benchmark_of
from cvpo.metrics import Interval, crossed_t_interval, hierarchical_bootstrap

RESAMPLES = 2000
"""Of the bootstrap: the ends of an interval are good to about a thirtieth of its width."""

MEAN = "mean"
SHARE = (0.0, 1.0)


@dataclass(frozen=True, eq=False)
class Cells:
    """One number for each seed and problem."""

    values: Float[np.ndarray, "seeds problems"]
    problems: pd.MultiIndex


# ------------------------------------------------------------------- from curves to one number


def base(started: Sequence[Curves]) -> Cells | None:
    """Accuracy before training, from step 0 of the runs; those of one seed are averaged.

    Runs of one seed draw the same samples from the same model there: they are one observation.

    Args:
        started: labels whose first step is 0; without any the answer is None.
    """
    if not started:
        return None
    runs = [
        pd.Series(accuracy[0], index=mine.problems, name=run.seed)
        for mine in started
        for run, accuracy in zip(mine.runs, mine.accuracy, strict=True)
    ]
    frame = pd.concat(runs, axis=1).sort_index()
    by_seed = frame.T.groupby(level=0, dropna=False).mean()
    return Cells(by_seed.to_numpy(), pd.MultiIndex.from_frame(frame.index.to_frame()))


def final(mine: Curves) -> Cells:
    """Accuracy at the last common step."""
    return Cells(mine.accuracy[:, -1], mine.problems)


def area(mine: Curves) -> Cells:
    """Mean accuracy over the steps, by trapezoids: the curve's area over its length.

    At a single step it is the accuracy there.
    """
    if len(mine.steps) == 1:
        return final(mine)
    total = np.trapezoid(mine.accuracy, mine.steps, axis=1)
    return Cells(total / (mine.steps[-1] - mine.steps[0]), mine.problems)


def best(mine: Curves) -> Cells | None:
    """Accuracy at each run's best step, which other problems have chosen.

    The step is that of the highest mean over benchmarks on one half of the problems (the earliest
    of equals), the accuracy is that of the other half: so a maximum is not its own evidence. None
    if a benchmark has no problem in one of the halves.
    """
    choosing = _choosing_half(mine.problems)
    benchmark = benchmark_of(mine.problems)
    of_each = [benchmark == name for name in mine.benchmarks]
    if not all(choosing[own].any() and not choosing[own].all() for own in of_each):
        return None
    scores = np.mean([mine.accuracy[:, :, choosing & own].mean(axis=2) for own in of_each], axis=0)
    at_best = mine.accuracy[np.arange(len(mine.runs)), scores.argmax(axis=1)]
    return Cells(at_best[:, ~choosing], mine.problems[~choosing])


MEASURES: dict[str, Callable[[Curves], Cells | None]] = {
    "final": final,
    "area": area,
    "best": best,
}


def _choosing_half(problems: pd.MultiIndex) -> Bool[np.ndarray, " problems"]:
    """Half of the problems, by a hash of their ids: the same half in every run and analysis."""
    digests = (hashlib.sha256("/".join(problem).encode()).digest() for problem in problems)
    return np.array([digest[0] % 2 == 0 for digest in digests])


# ---------------------------------------------------------------------------------- statistics


def level(cells: Cells, benchmarks: Sequence[str]) -> Interval:
    """Mean over the benchmarks, with its bootstrap interval over seeds and problems.

    Args:
        cells: hold these benchmarks, and maybe others.
        benchmarks: one, or those of the mean.
    """
    benchmark = benchmark_of(cells.problems)
    chosen = np.isin(benchmark, list(benchmarks))
    return hierarchical_bootstrap(
        cells.values[:, chosen], strata=benchmark[chosen], num_resamples=RESAMPLES
    )


def levels(collected: Collected) -> pd.DataFrame:
    """Before training (step 0 of all runs), and each label at its last step.

    Returns:
        Columns label (`before training` first, where there is a step 0), measure (of `MEASURES`;
        area and best for the mean only), step, benchmark (its name, or `mean`), seeds, problems,
        samples_min, samples_max, accuracy, low, high, standard_error.
    """
    rows = _base_rows(collected)
    for label, mine in collected.curves.items():
        for measure, name, benchmarks in columns(mine.benchmarks, collected.shared):
            used = mine.of_benchmarks(benchmarks)
            cells = MEASURES[measure](used)
            if cells is None:
                continue
            low, high = (used if measure != "final" else used.at(used.steps[-1:])).sizes
            rows.append(
                {
                    "label": label,
                    "measure": measure,
                    "step": int(mine.steps[-1]),
                    "benchmark": name,
                    "seeds": len(mine.runs),
                    "problems": len(cells.problems),
                    "samples_min": low,
                    "samples_max": high,
                }
                | ends(level(cells, benchmarks), "accuracy", SHARE)
            )
    return pd.DataFrame(rows)


def _base_rows(collected: Collected) -> list[dict[str, Any]]:
    started = [mine for mine in collected.curves.values() if mine.steps[0] == 0]
    cells = base(started)
    if cells is None:
        return []
    held = sorted({name for mine in started for name in mine.benchmarks})
    rows = []
    for measure, name, benchmarks in columns(held, collected.shared):
        if measure != "final":
            continue
        chosen = np.isin(benchmark_of(cells.problems), benchmarks)
        used = [mine.at(mine.steps[:1]).of_benchmarks(benchmarks) for mine in started]
        sizes = [mine.sizes for mine in used if len(mine.problems)]
        rows.append(
            {
                "label": "before training",
                "measure": measure,
                "step": 0,
                "benchmark": name,
                "seeds": int((~np.isnan(cells.values[:, chosen])).any(axis=1).sum()),
                "problems": int(chosen.sum()),
                "samples_min": min(low for low, _ in sizes),
                "samples_max": max(high for _, high in sizes),
            }
            | ends(level(cells, benchmarks), "accuracy", SHARE)
        )
    return rows


def curve(mine: Curves, benchmarks: Sequence[str], most: int = 200) -> pd.DataFrame:
    """Mean accuracy over steps with its interval; more than `most` steps are thinned evenly.

    Returns:
        Columns step, accuracy, low, high; a t interval over seeds and problems, or over problems
        with one seed.
    """
    rows = np.unique(np.linspace(0, len(mine.steps) - 1, min(most, len(mine.steps))).astype(int))
    narrowed = mine.at(mine.steps[rows]).of_benchmarks(benchmarks)
    return _band("step", narrowed.steps, narrowed.accuracy, benchmark_of(narrowed.problems))


def curve_by_cost(
    mine: Curves, benchmarks: Sequence[str], axis: str, points: int = 40
) -> pd.DataFrame | None:
    """Mean accuracy over a cost, the runs interpolated between their evaluations.

    Only over the range that every run of the label covers; nothing is extrapolated.

    Args:
        mine: the label's runs.
        benchmarks: the mean is over these.
        axis: device_seconds or tokens.
        points: of the grid.

    Returns:
        Columns `axis`, accuracy, low, high as `curve`; None where no cost is common to all runs.
    """
    low, high = covered([mine], axis)
    if not low <= high:
        return None
    grid = np.linspace(low, high, points) if low < high else np.array([low])
    narrowed = mine.of_benchmarks(benchmarks)
    return _band(axis, grid, at_cost(narrowed, axis, grid), benchmark_of(narrowed.problems))


def covered(curves: Sequence[Curves], axis: str) -> tuple[float, float]:
    """The range of a cost that all of the runs cover.

    NaN where one of them has none, or one that does not grow from evaluation to evaluation.
    """
    runs = [spent[~np.isnan(spent)] for mine in curves for spent in mine.cost[axis]]
    if any(not len(spent) or np.any(np.diff(spent) <= 0) for spent in runs):
        return math.nan, math.nan
    return max(float(spent[0]) for spent in runs), min(float(spent[-1]) for spent in runs)


def at_cost(
    mine: Curves, axis: str, grid: Float[np.ndarray, " grid"]
) -> Float[np.ndarray, "runs grid problems"]:
    """Every problem's accuracy at a cost, linear between the evaluations on both sides of it."""
    found = []
    for spent, accuracy in zip(mine.cost[axis], mine.accuracy, strict=True):
        known = ~np.isnan(spent)
        x, y = spent[known], accuracy[known]
        place = np.interp(grid, x, np.arange(len(x)), left=math.nan, right=math.nan)
        before = np.floor(place).astype(int)
        after = np.minimum(before + 1, len(x) - 1)
        share = (place - before)[:, None]
        found.append((1 - share) * y[before] + share * y[after])
    return np.stack(found)


def _band(
    axis: str,
    x: Shaped[np.ndarray, " points"],
    accuracy: Float[np.ndarray, "runs points problems"],
    strata: Shaped[np.ndarray, " problems"],
) -> pd.DataFrame:
    rows = []
    for point, value in enumerate(x):
        interval = crossed_t_interval(accuracy[:, point], strata=strata)
        rows.append({axis: value} | ends(interval, "accuracy", SHARE))
    return pd.DataFrame(rows).drop(columns="standard_error")


# ---------------------------------------------------------------------------------- small parts


def columns(
    benchmarks: Sequence[str], shared: Sequence[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """A table's numbers of one label: measure, name, and the benchmarks that it is over."""
    for name in benchmarks:
        yield "final", name, [name]
    if shared:
        for measure in MEASURES:
            yield measure, MEAN, list(shared)


def sizes_text(collected: Collected) -> str:
    """Problems and samples, over all evaluations shown, as a sentence."""
    counts: dict[str, int] = {}
    samples: dict[str, set[int]] = {}
    for mine in collected.curves.values():
        for name in mine.benchmarks:
            own = mine.of_benchmarks([name])
            counts[name] = len(own.problems)
            samples.setdefault(name, set()).update(own.sizes)
    k = {name: _span(sizes) for name, sizes in samples.items()}
    if len(set(k.values())) == 1:
        listed = ", ".join(f"{name} {counts[name]}" for name in sorted(counts))
        return f"Problems: {listed}; {next(iter(k.values()))} samples of each."
    listed = ", ".join(f"{name} {counts[name]} ({k[name]})" for name in sorted(counts))
    return f"Problems (samples of each): {listed}."


def _span(sizes: Iterable[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low}" if low == high else f"{low} to {high}"


def over_text(curves: Iterable[Curves]) -> str:
    """What the intervals are over, in a sentence or two."""
    single, lone = [], set()
    for mine in curves:
        if len(mine.runs) == 1:
            single.append(mine.label)
        names, counts = np.unique(benchmark_of(mine.problems), return_counts=True)
        lone |= set(names[counts == 1])
    text = "Intervals (95 %) are over seeds and problems"
    if single:
        have = "has one run" if len(single) == 1 else "have one run each"
        text += (
            f"; {', '.join(single)} {have}: there they are over problems only and say nothing "
            "about other seeds"
        )
    if lone:
        text += (
            f". Of {', '.join(sorted(lone))} there is one problem: nothing is said about others "
            "like it"
        )
    return f"{text}."


def ends(
    interval: Interval, name: str, within: tuple[float, float] = (-1.0, 1.0)
) -> dict[str, float]:
    """An interval as columns, its estimate under a name of its own, its ends within a range."""
    return {
        name: interval.estimate,
        "low": float(np.clip(interval.low, *within)),
        "high": float(np.clip(interval.high, *within)),
        "standard_error": interval.standard_error,
    }
