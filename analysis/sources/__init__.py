"""Logs of runs, ours and other trainers', behind one seam: detected from the files.

`open_source` looks at a path and gives a `Source`, whose parts and columns are those of the run log
as far as the log holds them. A new kind of log is one module with a function that opens it and one
line here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from analysis import AnalysisError
from analysis.sources import evaluations, ours, tensorboard, trl, verl
from analysis.sources.source import PARTS, Part, Source, ranges

__all__ = ["PARTS", "Part", "Source", "open_source", "open_sources", "ranges"]

_OPENERS: dict[str, Callable[[Path], Source]] = {
    "cvpo": ours.open_run_log,
    "verl-console": verl.open_console,
    "verl-jsonl": verl.open_metrics,
    "verl-dump": verl.open_dump,
    "trl": trl.open_completions,
    "tensorboard": tensorboard.open_events,
    "evaluations": evaluations.open_table,
}

_LONGEST = 1 << 24  # bytes of a first line; a dumped response is far shorter

_KNOWN = (
    "a run log's folder; verl's console log, JSON lines or rollout dumps; a folder of TRL's "
    "completions_*.parquet; a folder of TensorBoard event files; a CSV of evaluations"
)


def open_source(path: str | Path) -> Source:
    """Find out what a path holds, and open it.

    Raises:
        AnalysisError: there is nothing, nothing known, or something damaged; a folder that holds
            runs is answered with their names.
    """
    path = Path(path)
    if not path.exists():
        raise AnalysisError(f"{path} does not exist")
    kind = _kind(path)
    if kind is None:
        raise AnalysisError(f"{path}: {_what_instead(path)}")
    return _OPENERS[kind](path)


def open_sources(paths: Sequence[str | Path]) -> list[Source]:
    """Open several; those of one name are called by their paths.

    Raises:
        AnalysisError: as `open_source`, or a path is given twice.
    """
    places = [Path(path).resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise AnalysisError(f"{path} is given twice; name each run once")
    sources = [open_source(path) for path in paths]
    names = [source.name for source in sources]
    return [
        source if names.count(source.name) == 1 else replace(source, name=str(source.path))
        for source in sources
    ]


def _kind(path: Path) -> str | None:
    """What a path holds, as far as can be told without opening it; None: nothing known."""
    return _folder_kind(path) if path.is_dir() else _file_kind(path)


def _folder_kind(path: Path) -> str | None:
    if (path / "run.yaml").exists():
        return "cvpo"
    if trl.completion_files(path):
        return "trl"
    if tensorboard.event_files(path):
        return "tensorboard"
    if verl.dump_files(path):
        return "verl-dump"
    return None


def _file_kind(path: Path) -> str | None:
    if tensorboard.event_files(path):
        return "tensorboard"
    if path.suffix == ".parquet":
        return "trl" if trl.is_completions(path) else None
    if path.suffix == ".csv":
        return "evaluations" if evaluations.is_table(path) else None
    with path.open("rb") as file:
        first = file.readline(_LONGEST)
    if not first.startswith(b"{"):
        return "verl-console" if verl.is_console(path) else None
    try:
        row = json.loads(first)
    except ValueError:
        return None
    return verl.json_kind(row)


def _what_instead(path: Path) -> str:
    """What a path that holds no log holds, and what to give in its place."""
    if path.is_dir():
        children = sorted(child for child in path.iterdir() if not child.name.startswith("."))
        if not children:
            return f"the folder is empty; give {_KNOWN}"
        inside = [str(child) for child in children if _kind(child)]
        if inside:
            return f"is no log itself but holds some; give those: {' '.join(inside)}"
        if (path / "metrics.jsonl").exists():
            return "a run log without its run.yaml; copy that file too"
    elif path.name == "run.yaml" or (path.parent / "run.yaml").exists():
        return f"a part of a run log; give its folder {path.parent}"
    elif path.stat().st_size == 0:
        return "the file is empty; nothing has been logged yet"
    return (
        f"nothing known; give {_KNOWN}. If it is a console log: it has no line of a step "
        "(step:12 - name:value) yet"
    )
