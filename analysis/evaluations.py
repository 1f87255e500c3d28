"""A run's evaluations, read once and added up by problem.

Accuracy is that of the run's headline verifier. The samples of a problem are added up file by file,
so that a long run takes one number for each problem and evaluated step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from analysis import AnalysisError
from analysis.sources import Part, Source

_KEYS = ["benchmark", "problem_id", "sample"]

_RESERVED = ("mean", "area", "best step")
"""Names that tables give to numbers over all benchmarks."""


@dataclass(frozen=True, eq=False)
class Evaluations:
    """What a run's evaluations say of each problem.

    Attributes:
        steps: evaluated steps, ascending.
        problems: benchmark and problem_id of every problem that any of them holds, sorted.
        samples: responses to a problem at a step; 0 where the step did not evaluate it.
        correct: their summed verdicts, in [0, samples].
    """

    steps: Int[np.ndarray, " steps"]
    problems: pd.MultiIndex
    samples: Int[np.ndarray, "steps problems"]
    correct: Float[np.ndarray, "steps problems"]

    @property
    def accuracy(self) -> Float[np.ndarray, "steps problems"]:
        """Share of correct samples in [0, 1], NaN where there is none."""
        share = np.full(self.samples.shape, np.nan)
        np.divide(self.correct, self.samples, out=share, where=self.samples > 0)
        return share

    def at(self, steps: Int[np.ndarray, " some"]) -> Evaluations:
        """The same at some of the steps, in the order that they are given in."""
        rows = np.searchsorted(self.steps, steps)
        return Evaluations(steps, self.problems, self.samples[rows], self.correct[rows])

    def on(self, problems: pd.MultiIndex) -> Evaluations:
        """The same on some of the problems, in the order that they are given in."""
        columns = self.problems.get_indexer(problems)
        return Evaluations(self.steps, problems, self.samples[:, columns], self.correct[:, columns])


def read_evaluations(source: Source) -> Evaluations:
    """Read and check a run's evaluations; asked again for the same source, it has them ready.

    Raises:
        AnalysisError: the log has no evaluation or a damaged one; an evaluation is empty, lacks
            verdicts of the run's headline verifier, has one outside [0, 1] or a sample twice, or
            calls a benchmark by a name of `_RESERVED`.
    """
    if "evals" not in source.contents:
        raise AnalysisError(f"{source.path} has no evals: {source.lacks('evals')}")
    verifier = source.verifier
    if verifier not in source.contents["evals"].columns:
        raise AnalysisError(f"{source.path}: unknown verifier {verifier!r}; mend its run.yaml")
    return _read(source.contents["evals"], source.path, verifier)


def cost(source: Source) -> pd.DataFrame:
    """Cumulative device_seconds and tokens of a run by step; empty without metrics."""
    columns = ["device_seconds", "tokens"]
    if any(source.lacks("metrics", column) for column in columns):
        return pd.DataFrame(columns=columns, index=pd.Index([], name="step"), dtype=np.float64)
    return source.metrics(columns).set_index("step").astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Which problem each row of a file belongs to. Most files of a run have the same."""

    keys: pd.DataFrame
    problems: pd.MultiIndex
    problem: Int[np.ndarray, " rows"]
    samples: Int[np.ndarray, " problems"]


@lru_cache(maxsize=64)  # several exhibits read the same evaluations; a source's parts do not change
def _read(part: Part, path: Path, verifier: str) -> Evaluations:
    found = list(_scan(part, path, verifier))
    problems = found[0][1].problems
    for layout in {id(layout): layout for _, layout, _ in found}.values():
        problems = problems.union(layout.problems)
    samples = np.zeros((len(found), len(problems)), dtype=np.int32)
    correct = np.zeros((len(found), len(problems)))
    for row, (_, layout, verdicts) in enumerate(found):
        columns = problems.get_indexer(layout.problems)
        samples[row, columns] = layout.samples
        correct[row, columns] = verdicts
    return Evaluations(np.array([step for step, _, _ in found]), problems, samples, correct)


def _scan(
    part: Part, path: Path, verifier: str
) -> Iterator[tuple[int, _Layout, Float[np.ndarray, " problems"]]]:
    """Of each evaluation: its step, its layout, and each problem's summed verdicts."""
    step, layout = -1, None
    for frame in part.scan(["step", *_KEYS, verifier], None):
        if frame.empty:
            after = f"the one after step {step}" if step >= 0 else "the first"
            raise AnalysisError(
                f"{path}/evals: {after} is an evaluation that has no row; remove the file"
            )
        step = int(frame["step"].iloc[0])
        where = f"{path}/evals, step {step}"
        if layout is None or not frame[_KEYS].equals(layout.keys):
            layout = _layout(frame[_KEYS], where)
        _check(frame[verifier], where)
        yield step, layout, np.bincount(layout.problem, weights=frame[verifier])


def _layout(keys: pd.DataFrame, where: str) -> _Layout:
    again = keys.duplicated()
    if again.any():
        row = keys[again].iloc[0]
        raise AnalysisError(
            f"{where}: {row['benchmark']}, problem {row['problem_id']}, sample {row['sample']} "
            "stands there twice; remove one"
        )
    for name in _RESERVED:
        if (keys["benchmark"] == name).any():
            raise AnalysisError(f"{where}: {name!r} is the tables' own row; rename that benchmark")
    by_problem = keys.groupby(["benchmark", "problem_id"])
    size = by_problem.size()
    problems = pd.MultiIndex.from_frame(size.index.to_frame())
    return _Layout(keys, problems, by_problem.ngroup().to_numpy(), size.to_numpy())


def _check(verdicts: pd.Series, where: str) -> None:
    if verdicts.isna().any():
        raise AnalysisError(
            f"{where}: {int(verdicts.isna().sum())} of {len(verdicts)} rows have no "
            f"{verdicts.name!r} verdict, the run's headline verifier; grade them, or remove the "
            "file"
        )
    if not verdicts.between(0.0, 1.0).all():
        raise AnalysisError(f"{where}: column {verdicts.name!r} must lie in [0, 1]")
