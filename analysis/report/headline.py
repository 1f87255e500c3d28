"""The report's main table: accuracy at the first and last evaluation, and the change between them.

All numbers are those of `analysis.summary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import AnalysisError
from analysis.sources import Source
from analysis.summary import Run, Summary, load_runs, summarize


@dataclass(frozen=True)
class Cell:
    """One benchmark of one run, in words."""

    last: str
    interval: str
    first: str
    change: str
    change_interval: str
    pass_at_k: str
    clear: str
    """up or down where the interval of the change leaves 0 out, else empty."""


@dataclass(frozen=True)
class Headline:
    """The table.

    Attributes:
        benchmarks: columns, `mean` first.
        shared: the benchmarks that every mean is over; empty where each run has its own.
        rows: run -> benchmark -> cell; a benchmark that a run lacks is not there.
        notes: what a reader has to know.
    """

    benchmarks: tuple[str, ...]
    shared: tuple[str, ...]
    rows: dict[str, dict[str, Cell]]
    notes: tuple[str, ...]


def headline(sources: Sequence[Source]) -> Headline | None:
    """The table of all runs that have evaluations; None if none has.

    Raises:
        AnalysisError: a damaged evaluation.
    """
    runs = load_runs([source for source in sources if "evals" in source.contents])
    if not runs:
        return None
    notes: list[str] = []
    try:
        summaries = [summarize(runs)]
    except AnalysisError:
        summaries, notes = _each_alone(runs)
    shared = tuple(summaries[0].benchmarks) if len(summaries) == 1 else ()
    names = {name for summary in summaries for name in summary.table["benchmark"]}
    return Headline(
        benchmarks=("mean", *sorted(names - {"mean"})),
        shared=shared,
        rows={name: row for summary in summaries for name, row in _rows(summary).items()},
        notes=(*notes, *(note for summary in summaries for note in summary.notes)),
    )


def _each_alone(runs: Sequence[Run]) -> tuple[list[Summary], list[str]]:
    """Summaries of runs that share no benchmark, and why a run has none."""
    summaries, notes = [], []
    for run in runs:
        try:
            summaries.append(summarize([run]))
        except AnalysisError as error:
            notes.append(str(error))
    if len(summaries) > 1:
        notes.append(
            "The runs share no benchmark: each mean is over the run's own, so do not compare them."
        )
    return summaries, notes


def _rows(summary: Summary) -> dict[str, dict[str, Cell]]:
    rows: dict[str, dict[str, Cell]] = {}
    for (run, benchmark), found in summary.table.groupby(["run", "benchmark"], sort=False):
        by_evaluation = {str(row["evaluation"]): row for _, row in found.iterrows()}
        rows.setdefault(str(run), {})[str(benchmark)] = _cell(by_evaluation)
    return rows


def _cell(rows: Mapping[str, Any]) -> Cell:
    nothing = dict.fromkeys(("accuracy", "low", "high", "pass_at_k", "pass_k"), math.nan)
    first, change = rows.get("first", nothing), rows.get("change", nothing)
    last = rows.get("last", nothing if "change" in rows else first)
    return Cell(
        last=_percent(last["accuracy"]),
        interval=_interval(last),
        first=_percent(first["accuracy"]),
        change=_percent(change["accuracy"], "+"),
        change_interval=_interval(change, "+"),
        pass_at_k="-"
        if math.isnan(last["pass_at_k"])
        else f"pass@{last['pass_k']} {_percent(last['pass_at_k'])}",
        clear="up" if change["low"] > 0 else "down" if change["high"] < 0 else "",
    )


def _interval(row: Any, sign: str = "") -> str:
    if math.isnan(row["low"]):
        return ""
    return f"[{_percent(row['low'], sign)}, {_percent(row['high'], sign)}]"


def _percent(value: float, sign: str = "") -> str:
    """A share in percent, with a true minus."""
    return "-" if math.isnan(value) else f"{100 * value:{sign}.1f}".replace("-", "\N{MINUS SIGN}")
