"""A CSV of evaluations by checkpoint: step, task, metric, value and, where known, exp and stderr.

That is how results of lighteval and the like are gathered. It has means only, no verdict by problem
and sample, so it is no `evals` part but the table `tables/evaluations`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis import AnalysisError
from analysis.sources.source import Source, frame_part, ranges, what_is_missing

_NAMES = {
    "exp": "experiment",
    "step": "step",
    "task": "benchmark",
    "metric": "metric",
    "value": "value",
    "stderr": "standard_error",
}
_NEEDED = {"step", "task", "metric", "value"}


def is_table(file: Path) -> bool:
    """Whether a CSV has the columns of evaluations."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        return set(lines.readline().strip().split(",")) >= _NEEDED


def open_table(path: Path) -> Source:
    """Open a table of evaluations; one that stands there more than once counts once, the last.

    Raises:
        AnalysisError: the file is no CSV, or a step or value is no number.
    """
    try:
        read = pd.read_csv(path)
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise AnalysisError(f"{path} is no CSV ({error}); mend it") from error
    frame = read[[name for name in _NAMES if name in read]].rename(columns=_NAMES)
    for name in ("step", "value"):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        if numbers.isna().any():
            row = int(numbers.isna().to_numpy().argmax())
            raise AnalysisError(
                f"{path}, row {row + 2}: {name!r} is {frame[name].iloc[row]!r}, no number; mend or "
                "remove the row"
            )
        frame[name] = numbers
    keys = [k for k in ("experiment", "step", "benchmark", "metric") if k in frame]
    again = frame.duplicated(keys, keep="last")
    notes = []
    if again.any():
        steps = ranges(frame.loc[again, "step"])
        notes.append(f"evaluated more than once at step {steps}; the last row of each counts")
    contents = {"tables/evaluations": frame_part(frame[~again].reset_index(drop=True))}
    reasons = {"evals": "means only, no verdict by problem and sample"}
    return Source(
        path=path,
        kind="evaluations",
        name=path.stem,
        contents=contents,
        missing=what_is_missing(contents, "a table of evaluations does not hold it", reasons),
        notes=tuple(notes),
    )
