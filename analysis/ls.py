"""What runs there are: one line for each, of whichever trainer."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import AnalysisError
from analysis.sources import Source, open_source, ranges

_NAMED = 4  # missing columns that the line names, of each part


def list_runs(
    paths: Sequence[str | Path], *, why: bool = False
) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Look at every path; one that cannot be read does not hide the others.

    Args:
        paths: logs.
        why: whether the notes also say why things are missing.

    Returns:
        A row for each log: run, kind, method, seed, steps (first-last, with what is missing in
        between), state, parts (with rows), missing; then notes, and the errors of the other paths.
    """
    rows, notes, errors = [], [], []
    for path in paths:
        try:
            source = open_source(path)
            rows.append(_row(source))
        except AnalysisError as error:
            errors.append(str(error))
            continue
        notes += [f"{source.name}: {note}" for note in source.notes]
        if why:
            notes += [f"{source.name} has no {key}: {r}" for key, r in source.missing.items()]
    return pd.DataFrame(rows), notes, errors


def _row(source: Source) -> dict[str, str]:
    steps = logged_steps(source)
    parts = (f"{name} {held.rows():,}" for name, held in source.contents.items())
    return {
        "run": source.name,
        "kind": source.kind,
        "method": source.method or "-",
        "seed": "-" if source.seed is None else str(source.seed),
        "steps": _format_steps(steps),
        "state": _state(source, steps),
        "parts": ", ".join(parts) or "-",
        "missing": _format_missing(source) or "-",
    }


def logged_steps(source: Source) -> list[int]:
    """Steps of the metrics or, without them, of the first part that has steps; ascending."""
    for part in source.parts:
        if "step" in source.contents[part].columns and part != "events":
            frames = source.scan(part, ["step"])
            # A study's own table may have rows that belong to no step.
            return sorted(
                {int(step) for frame in frames for step in frame["step"].dropna().unique()}
            )
    return []


def gaps(steps: Sequence[int]) -> list[int]:
    """Steps that a log passes over: where two are further apart than most neighbours are."""
    if len(steps) < 3:
        return []
    apart = np.diff(steps)
    usual = int(np.bincount(apart).argmax())
    return [
        step
        for first, last in itertools.pairwise(steps)
        for step in range(first + usual, last, usual)
        if last - first > usual
    ]


def _format_steps(steps: Sequence[int]) -> str:
    if not steps:
        return "-"
    lost = gaps(steps)
    span = str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    return f"{span} without {ranges(lost)}" if lost else span


def _state(source: Source, steps: Sequence[int]) -> str:
    if source.finished is None:
        return "unknown"
    if source.finished:
        return "finished"
    last = steps[-1] if steps else 0
    of = "" if source.total_steps is None else f" at {last} of {source.total_steps}"
    return f"running or killed{of}"


def _format_missing(source: Source) -> str:
    """Parts, then columns by part."""
    parts = [key for key in source.missing if "." not in key]
    columns: dict[str, list[str]] = {}
    for key in source.missing:
        part, dot, column = key.partition(".")
        if dot:
            columns.setdefault(part, []).append(column)
    told = [", ".join(parts)] if parts else []
    for part, names in columns.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        told.append(f"{part}: {', '.join(names[:_NAMED])}{more}")
    return "; ".join(told)


def format_runs(table: pd.DataFrame, notes: Sequence[str]) -> str:
    """The table as plain text, with the notes below."""
    widths = {name: max(map(len, [name, *table[name]])) for name in table.columns}
    padded = pd.DataFrame(
        {name.ljust(width): table[name].str.ljust(width) for name, width in widths.items()}
    )
    lines = [] if table.empty else padded.to_string(index=False, justify="left").splitlines()
    return "\n".join([line.rstrip() for line in lines] + [f"note: {note}" for note in notes])


def add_command(commands: Any) -> None:
    """Add `ls` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ls",
        help="what runs there are: kind, steps, state, parts, and what is missing",
        description="One line for each log, ours or another trainer's.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a log's folder or file")
    parser.add_argument(
        "--why", action="store_true", help="also say of everything missing why it is"
    )
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> None:
    table, notes, errors = list_runs(arguments.runs, why=arguments.why)
    if text := format_runs(table, notes):
        print(text)
    if errors:
        raise AnalysisError("\n".join(errors))
