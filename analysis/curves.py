"""The evaluations of several runs on common ground: the same steps and problems.

Runs are gathered by label; those of a label are seeds of one training. What keeps runs from being
compared is noted here, in sentences for a caption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped

from analysis import AnalysisError
from analysis.evaluations import Evaluations, cost, read_evaluations
from analysis.selection import holding
from analysis.sources import Source, ranges
from cvpo.metrics import crossed_t_interval, holm, p_value

COSTS = ("device_seconds", "tokens")


_NAMES = ["benchmark", "problem_id"]


@dataclass(frozen=True, eq=False)
class Curves:
    """The runs of a label, at the steps and on the problems that all of them evaluated.

    Attributes:
        label: what tables call them.
        runs: by seed.
        steps: ascending.
        problems: benchmark and problem_id, sorted.
        accuracy: share of correct samples, in [0, 1]; no NaN.
        samples: how many samples each accuracy is of.
        cost: device_seconds and tokens, cumulative, by run and step; NaN where not logged.
    """

    label: str
    runs: tuple[Source, ...]
    steps: Int[np.ndarray, " steps"]
    problems: pd.MultiIndex
    accuracy: Float[np.ndarray, "runs steps problems"]
    samples: Int[np.ndarray, "runs steps problems"]
    cost: Mapping[str, Float[np.ndarray, "runs steps"]]

    @property
    def seeds(self) -> list[int | None]:
        """The runs' seeds."""
        return [run.seed for run in self.runs]

    @property
    def sizes(self) -> tuple[int, int]:
        """Fewest and most samples of a problem."""
        return int(self.samples.min()), int(self.samples.max())

    @property
    def benchmarks(self) -> list[str]:
        """Names, sorted."""
        return sorted(set(benchmark_of(self.problems)))

    def on(self, problems: pd.MultiIndex) -> Curves:
        """The same on some of the problems."""
        columns = self.problems.get_indexer(problems)
        return self._cut(np.s_[:, :, columns], problems=problems)

    def of_benchmarks(self, names: Sequence[str]) -> Curves:
        """The same on the problems of some benchmarks."""
        return self.on(self.problems[np.isin(benchmark_of(self.problems), list(names))])

    def at(self, steps: Int[np.ndarray, " some"]) -> Curves:
        """The same at some of the steps."""
        rows = np.searchsorted(self.steps, steps)
        costs = {name: spent[:, rows] for name, spent in self.cost.items()}
        return self._cut(np.s_[:, rows], steps=steps, cost=costs)

    def of_runs(self, rows: Sequence[int]) -> Curves:
        """The same of some of the runs."""
        costs = {name: spent[list(rows)] for name, spent in self.cost.items()}
        runs = tuple(self.runs[row] for row in rows)
        return self._cut(np.s_[list(rows)], runs=runs, cost=costs)

    def _cut(self, cells: Any, **changes: Any) -> Curves:
        accuracy, samples = self.accuracy[cells], self.samples[cells]
        return replace(self, accuracy=accuracy, samples=samples, **changes)


@dataclass(frozen=True)
class Collected:
    """Curves by label, the benchmarks that all have (means are over these), and what to know."""

    curves: dict[str, Curves]
    shared: list[str]
    notes: tuple[str, ...]


# ----------------------------------------------------------------------------------- gathering


def collect(sources: Sequence[Source], *, by: Literal["label", "run"] = "label") -> Collected:
    """The evaluations of all trainings among the sources, on common ground.

    A label ends at the last step that at least half of its runs have come to; runs that stopped
    before are left out and named, and so are labels that end at step 0 if others do not. Of a
    benchmark that several labels have, the problems count that all of them evaluated.

    Args:
        sources: logs of any kind.
        by: run takes every run for itself, under its name.

    Raises:
        AnalysisError: no training has an evaluation, an evaluation is damaged, two runs of a label
            have one seed, or runs of a label share no evaluated step or problem.
    """
    chosen = holding(sources, "evals", remedy="set evaluation.every, or use python -m train eval")
    gathered = chosen.groups
    if by == "run":
        gathered = {run.name: [run] for runs in gathered.values() for run in runs}
    notes = list(chosen.notes)
    curves = {}
    for label, runs in gathered.items():
        curves[label], own = _gather(label, runs)
        notes += own
    curves, untrained = _trained(curves)
    curves, uncommon = _common_problems(curves)
    shared = sorted(set.intersection(*(set(mine.benchmarks) for mine in curves.values())))
    notes += [*untrained, *uncommon]
    notes += [*_means(curves, shared), *_unlike(curves), *_starts(curves, shared)]
    return Collected(curves, shared, tuple(dict.fromkeys(notes)))


def _gather(label: str, runs: Sequence[Source]) -> tuple[Curves, list[str]]:
    """A label's runs at their common steps and on their common problems."""
    kept, notes = _at_the_end(label, runs)
    found = [read_evaluations(run) for run in kept]
    steps = reduce(np.intersect1d, (run.steps for run in found))
    if not len(steps):
        names = ", ".join(run.name for run in kept)
        raise AnalysisError(f"the runs of {label} ({names}) share no evaluated step: give one")
    found = [run.at(steps) for run in found]
    if all(read_evaluations(run).steps[-1] > steps[-1] for run in kept):
        notes.append(f"{label} ends at step {steps[-1]}, the last that all of its runs evaluated.")
    last = [run.problems[run.samples[-1] > 0] for run in found]
    problems = pd.MultiIndex.from_tuples(sorted(set.intersection(*map(set, last))), names=_NAMES)
    if not len(problems):
        raise AnalysisError(f"the runs of {label} share no problem at step {steps[-1]}: give one")
    if any(len(mine) > len(problems) for mine in last):
        notes.append(f"{label}: its runs evaluated different problems, the common ones count.")
    notes += _not_at_the_end(label, found, last)
    found = [run.on(problems) for run in found]
    complete = np.all([(run.samples > 0).all(axis=1) for run in found], axis=0)
    if not complete.all():
        left_out = ranges(steps[~complete].tolist())
        notes.append(f"{label}: step {left_out} did not evaluate every problem and is left out.")
    steps = steps[complete]
    found = [run.at(steps) for run in found]
    spent = [cost(run).reindex(steps) for run in kept]
    gathered = Curves(
        label=label,
        runs=kept,
        steps=steps,
        problems=problems,
        accuracy=np.stack([run.accuracy for run in found]),
        samples=np.stack([run.samples for run in found]),
        cost={name: np.stack([frame[name].to_numpy() for frame in spent]) for name in COSTS},
    )
    return gathered, notes


def _not_at_the_end(
    label: str, found: Sequence[Evaluations], last: Sequence[pd.MultiIndex]
) -> list[str]:
    """What runs evaluated before, but not at the last step, which decides what is shown."""
    lost = {
        problem
        for run, held in zip(found, last, strict=True)
        for problem in run.problems.difference(held)
    }
    if not lost:
        return []
    names = ", ".join(sorted({benchmark for benchmark, _ in lost}))
    last_step, count = found[0].steps[-1], len(lost)
    return [
        f"{label}: {count} problems of {names}, not evaluated at step {last_step}, are left out."
    ]


def _at_the_end(label: str, runs: Sequence[Source]) -> tuple[tuple[Source, ...], list[str]]:
    """The runs that have come as far as half of them; why the others are left out."""
    last = [int(read_evaluations(run).steps[-1]) for run in runs]
    end = sorted(last, reverse=True)[(len(runs) - 1) // 2]
    notes = [
        f"{run.name} is left out of {label}: it was evaluated to step {step} only (still running, "
        "or stopped)."
        for run, step in zip(runs, last, strict=True)
        if step < end
    ]
    return tuple(run for run, step in zip(runs, last, strict=True) if step >= end), notes


def _trained(curves: Mapping[str, Curves]) -> tuple[dict[str, Curves], list[str]]:
    """Without the labels that were evaluated before training only, unless all were."""
    trained = {label: mine for label, mine in curves.items() if mine.steps[-1] > 0}
    if not trained:
        return dict(curves), []
    notes = [
        f"{label} is left out: it was evaluated before training only."
        for label in curves
        if label not in trained
    ]
    return trained, notes


def _common_problems(curves: Mapping[str, Curves]) -> tuple[dict[str, Curves], list[str]]:
    """Of each benchmark, the problems that all labels with that benchmark evaluated."""
    notes = []
    kept: dict[str, set[tuple[str, str]]] = {}
    for benchmark in sorted({name for mine in curves.values() for name in mine.benchmarks}):
        sets = [
            set(mine.problems[benchmark_of(mine.problems) == benchmark])
            for mine in curves.values()
            if benchmark in mine.benchmarks
        ]
        kept[benchmark] = set.intersection(*sets)
        if any(found != kept[benchmark] for found in sets):
            notes.append(
                f"Not all evaluated the same problems of {benchmark}: the {len(kept[benchmark])} "
                "that all have count."
            )
    common = set.union(*kept.values())
    if not common:
        raise AnalysisError("the trainings have benchmarks of one name without a problem in common")
    narrowed = {
        label: mine.on(mine.problems[[problem in common for problem in mine.problems]])
        for label, mine in curves.items()
    }
    bare = [label for label, mine in narrowed.items() if not len(mine.problems)]
    notes += [f"{label} is left out: none of its problems is the others' too." for label in bare]
    return {label: mine for label, mine in narrowed.items() if label not in bare}, notes


def _unlike(curves: Mapping[str, Curves]) -> list[str]:
    """What makes the accuracies of different runs incomparable, or less comparable."""
    runs = [run for mine in curves.values() for run in mine.runs]
    notes = []
    verifiers = {run.verifier for run in runs}
    if len(verifiers) > 1:
        judged = ", ".join(f"{run.name} by {run.verifier}" for run in runs)
        notes.append(f"The runs are judged by different verifiers ({judged}): do not compare them.")
    for key in ("temperature", "top_p", "max_tokens"):
        found = {repr(_section_key(run, "evaluation", key)) for run in runs}
        if len(found) > 1:
            notes.append(f"The evaluations differ in {key} ({', '.join(sorted(found))}).")
    return notes


def _means(curves: Mapping[str, Curves], shared: Sequence[str]) -> list[str]:
    """Which benchmarks a mean leaves out."""
    if not shared:
        return ["No benchmark is common to all, so there is no mean."]
    notes = []
    for label, mine in curves.items():
        others = ", ".join(name for name in mine.benchmarks if name not in shared)
        if others:
            notes.append(f"Means are over {', '.join(shared)}: {others} only {label} has.")
    return notes


# ------------------------------------------------------------------------------ the base model


def _starts(curves: Mapping[str, Curves], shared: Sequence[str]) -> list[str]:
    """Where runs did not start from one model, by their configuration or by what step 0 says."""
    started = [mine for mine in curves.values() if mine.steps[0] == 0]
    runs = [run for mine in started for run in mine.runs]
    notes = []
    models = {_section_key(run, "model", "path") for run in runs} - {None}
    if len(models) > 1:
        notes.append(f"The runs start from different models: {', '.join(sorted(models))}.")
    if len(runs) < 2:
        return notes
    # One problem has no spread to judge a difference by.
    several = [name for name in shared if len(started[0].of_benchmarks([name]).problems) > 1]
    if not several:
        return notes
    narrowed = [mine.of_benchmarks(several) for mine in started]
    first = np.concatenate([mine.accuracy[:, 0] for mine in narrowed])
    others = (first.sum(axis=0) - first) / (len(first) - 1)
    strata = benchmark_of(narrowed[0].problems)
    p = [p_value(crossed_t_interval(row[None], strata=strata)) for row in first - others]
    adjusted = holm(np.array(p))
    if np.any(adjusted < 0.05):
        most = runs[int(np.nanargmin(adjusted))].name
        notes.append(
            f"At step 0 the runs differ by more than chance, {most} most: another starting model, "
            "or evaluated in another way."
        )
    return notes


def _section_key(run: Source, section: str, key: str) -> Any:
    found = run.config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def benchmark_of(problems: pd.MultiIndex) -> Shaped[np.ndarray, " problems"]:
    """Each problem's benchmark."""
    return np.asarray(problems.get_level_values("benchmark"), dtype=object)
