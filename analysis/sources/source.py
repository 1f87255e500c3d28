"""What every log looks like to an analysis, whoever wrote it.

Parts and columns are those of the run log (`cvpo.runlog.COLUMNS`); a peer's own columns and scalars
keep their names. What a log lacks stands in `Source.missing`, and asking for it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import AnalysisError
from cvpo.runlog import COLUMNS, METRICS

PARTS = (
    "metrics",
    "events",
    "problems",
    "trajectories",
    "prompts",
    "evals",
    "tokens",
    "calibration",
    "scores",
    "tables",
)
"""In the order they are listed. The last two come as `scores/<critic>` and `tables/<name>`."""

METRIC_NAMES = (
    "time",
    "device_seconds",
    "tokens",
    *(name for name in METRICS if not name.startswith(("eval/", "sampler/", "pretraining/"))),
)
"""Scalars whose absence is worth a word; the others only some methods have."""

Scan = Callable[[Sequence[str] | None, Collection[int] | None], Iterator[pd.DataFrame]]
"""Columns (None: all) and steps (None: all) -> one frame for each file or chunk, in order."""


@dataclass(frozen=True)
class Part:
    """One part of a log: its columns, how it is read, and how its rows are counted."""

    columns: tuple[str, ...]
    scan: Scan
    rows: Callable[[], int]


@dataclass(frozen=True)
class Source:
    """A log as it stood when it was opened.

    Attributes:
        path: the folder or file.
        kind: cvpo, verl-console, verl-jsonl, verl-dump, trl, tensorboard or evaluations.
        name: what tables call it; distinct among the sources of one `open_sources`.
        contents: the parts it holds.
        missing: part, or `part.column`, -> why it is not there, in words. A column that is there
            but null throughout the part's newest file is listed too.
        method: None where unknown, as are `seed` and `verifier`.
        config: the resolved configuration; empty where unknown.
        total_steps: steps the run was to take; None where unknown.
        finished: whether it took them; None where unknown. A run that is not finished may be
            running or killed: a log cannot tell.
        notes: what a reader of its numbers has to know: torn lines, steps logged twice, columns
            left out.
    """

    path: Path
    kind: str
    name: str
    contents: Mapping[str, Part]
    missing: Mapping[str, str]
    method: str | None = None
    seed: int | None = None
    verifier: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    finished: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts it holds, in the order of `PARTS`."""
        return tuple(sorted(self.contents, key=lambda name: PARTS.index(name.split("/")[0])))

    def lacks(self, part: str, column: str | None = None) -> str | None:
        """Why a part or a column is not there, in words; None if it is."""
        if part not in self.contents:
            return self.missing.get(part, "the log has no such part")
        if column is None or column in self.contents[part].columns:
            return self.missing.get(f"{part}.{column}")
        return self.missing.get(f"{part}.{column}", "the log has no such column")

    def metrics(self, names: Sequence[str] | None = None) -> pd.DataFrame:
        """One row per step, ascending: step and the scalars, NaN where a step did not log one.

        Args:
            names: which scalars; default: all.

        Raises:
            AnalysisError: the log has no metrics, or not these.
        """
        return self.read("metrics", None if names is None else ["step", *names])

    def scan(
        self,
        part: str,
        columns: Sequence[str] | None = None,
        steps: Collection[int] | None = None,
    ) -> Iterator[pd.DataFrame]:
        """Read a part file by file, holding one at a time.

        Args:
            part: one of `parts`.
            columns: which columns, in this order; default: all.
            steps: which steps (rounds, for prompts); default: all. Absent ones are passed over,
                and a part without steps is read whole.

        Raises:
            AnalysisError: no such part or column; while reading: damage, with the file and line.
        """
        if part not in self.contents:
            raise AnalysisError(f"{self.path} has no {part}: {self.lacks(part)}")
        held = self.contents[part].columns
        for column in columns or ():
            if column not in held:
                raise AnalysisError(
                    f"{self.path}: {part} has no {column!r}: {self.lacks(part, column)}"
                )
        return self.contents[part].scan(columns, steps)

    def read(self, part: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A whole part in one frame; for a long run name columns, or use `scan`. Raises as it."""
        frames = list(self.scan(part, columns))
        if not frames:
            return pd.DataFrame(columns=list(columns or self.contents[part].columns))
        return frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)


def frame_part(frame: pd.DataFrame) -> Part:
    """A part that is small enough to have been read already."""

    def scan(
        columns: Sequence[str] | None, steps: Collection[int] | None
    ) -> Iterator[pd.DataFrame]:
        yield select(frame, columns, steps)

    return Part(tuple(frame.columns), scan, lambda: len(frame))


def select(
    frame: pd.DataFrame, columns: Sequence[str] | None, steps: Collection[int] | None
) -> pd.DataFrame:
    """The named columns of the rows of these steps."""
    if steps is not None and "step" in frame.columns:
        frame = frame[frame["step"].isin(list(steps))]
    chosen = frame if columns is None else frame[list(columns)]
    return chosen.reset_index(drop=True)


def what_is_missing(
    contents: Mapping[str, Part], because: str, reasons: Mapping[str, str]
) -> dict[str, str]:
    """`Source.missing` from what a log holds.

    Args:
        contents: its parts.
        because: why anything is missing that has no reason of its own.
        reasons: part or `part.column` -> its own reason.
    """
    missing = {}
    for part in PARTS:
        if not any(name.split("/")[0] == part for name in contents):
            missing[part] = reasons.get(part, because)
    for name, held in contents.items():
        part = name.split("/")[0]
        wanted = METRIC_NAMES if part == "metrics" else [c.name for c in COLUMNS.get(part, ())]
        for column in wanted:
            if column not in held.columns:
                key = f"{name}.{column}"
                missing[key] = reasons.get(key, because)
    return missing


def ranges(steps: Iterable[int]) -> str:
    """Whole numbers in short: 1-3, 7."""
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
