"""Our own run logs, of the trainer, of the simulator and of its studies.

Everything is read through `cvpo.runlog`. What a later version of it may bring is dealt with here: a
part with a newer schema version is refused by name, columns and parts that this version does not
know are left out and listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis import AnalysisError
from analysis.sources.lines import torn_note
from analysis.sources.source import Part, Source, frame_part, ranges, select, what_is_missing
from cvpo import runlog
from cvpo.runlog import COLUMNS, SCHEMA_VERSION, MissingPartError, RunLogError

_NUMBERED = ("trajectories", "prompts", "evals", "tokens", "calibration")
_LINES: Mapping[str, Callable[[Path], pd.DataFrame]] = {
    "metrics": runlog.read_metrics,
    "events": runlog.read_events,
}


def open_run_log(path: Path) -> Source:
    """Open a run log's folder.

    Raises:
        AnalysisError: `run.yaml`, a line or the newest file of a part is damaged or of a newer
            schema version.
    """
    try:
        return _open(path)
    except RunLogError as error:
        raise AnalysisError(str(error)) from error


def _open(path: Path) -> Source:
    run = runlog.read_run(path)
    contents: dict[str, Part] = {}
    reasons: dict[str, str] = {}
    notes: list[str] = []
    for name, read in _LINES.items():
        file = path / f"{name}.jsonl"
        if not file.exists():
            reasons[name] = f"there is no {file.name}"
            continue
        frame = read(path)
        if len(frame):
            contents[name] = frame_part(frame)
        else:
            reasons[name] = f"{file.name} has no line"
        notes += torn_note(file)
    for part, files in _parquet_parts(path, reasons).items():
        footer = _footer(files[-1])
        contents[part] = _parquet_part(path, part, files, footer)
        for column in _null_columns(part, footer, contents[part].columns):
            reasons[f"{part}.{column}"] = f"null in every row of {files[-1].name}"
        unknown = _unknown_columns(part, footer)
        if unknown:
            notes.append(f"{part}: columns that this version does not know are left out: {unknown}")
    notes += _unknown_parts(path)
    notes += _resumes(contents)
    missing = what_is_missing(contents, "the log has none", reasons)
    total = _total_steps(run["config"])
    return Source(
        path=path,
        kind="cvpo",
        name=path.resolve().name,
        contents=contents,
        missing=missing | {key: why for key, why in reasons.items() if "." in key},
        method=run["method"],
        seed=run["seed"],
        verifier=run["verifier"],
        config=run["config"] if isinstance(run["config"], dict) else {},
        total_steps=total,
        finished=_finished(run, contents, total),
        notes=tuple(notes),
    )


def _parquet_parts(path: Path, reasons: dict[str, str]) -> dict[str, list[Path]]:
    """The Parquet parts that are there, each with its files in order of steps."""
    parts = {}
    if (path / "problems.parquet").exists():
        parts["problems"] = [path / "problems.parquet"]
    critics = [f"scores/{folder.name}" for folder in sorted((path / "scores").glob("*"))]
    for part in (*_NUMBERED, *critics):
        try:
            runlog.list_steps(path, part)
        except MissingPartError:
            reasons[part] = f"there is no file in {part}/"
            continue
        parts[part] = sorted((path / part).glob("[!.]*.parquet"), key=lambda file: int(file.stem))
    for file in sorted((path / "tables").glob("[!.]*.parquet")):
        parts[f"tables/{file.stem}"] = [file]
    return parts


def _parquet_part(path: Path, part: str, files: Sequence[Path], footer: Any) -> Part:
    held = footer.schema.to_arrow_schema().names
    declared = COLUMNS.get(part.split("/")[0])
    columns = (
        tuple(held)
        if declared is None
        else tuple(c.name for c in declared if c.presence != "extra" or c.name in held)
    )
    free = {"tables": _scan_table, "problems": _scan_problems}
    scan = free.get(part.split("/")[0], _scan_numbered)

    def scan_part(
        chosen: Sequence[str] | None, steps: Collection[int] | None
    ) -> Iterator[pd.DataFrame]:
        try:
            yield from scan(path, part, files, list(columns if chosen is None else chosen), steps)
        except RunLogError as error:
            raise AnalysisError(str(error)) from error

    return Part(columns, scan_part, lambda: sum(_footer(file).num_rows for file in files))


def _scan_numbered(
    path: Path,
    part: str,
    files: Sequence[Path],
    columns: list[str],
    steps: Collection[int] | None,
) -> Iterator[pd.DataFrame]:
    chosen = [file for file in files if steps is None or int(file.stem) in steps]
    if not chosen:
        return
    frames = runlog.scan(path, part, columns, {int(file.stem) for file in chosen})
    # a footer is looked at before its file is read, so that a newer version is refused by name
    for _, frame in zip(map(_footer, chosen), frames, strict=False):
        yield frame


def _scan_problems(
    path: Path,
    part: str,  # noqa: ARG001  (a scan takes it)
    files: Sequence[Path],  # noqa: ARG001  (a scan takes it)
    columns: list[str],
    steps: Collection[int] | None,  # noqa: ARG001  (a scan takes it)
) -> Iterator[pd.DataFrame]:
    yield runlog.read_problems(path, columns)


def _scan_table(
    path: Path,
    part: str,
    files: Sequence[Path],  # noqa: ARG001  (a scan takes it)
    columns: list[str],
    steps: Collection[int] | None,
) -> Iterator[pd.DataFrame]:
    yield select(runlog.read_table(path, part.removeprefix("tables/")), columns, steps)


def _footer(file: Path) -> Any:
    """A Parquet file's metadata, without its rows."""
    try:
        footer = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise AnalysisError(
            f"{file} is not a whole Parquet file ({error}); remove it, or rewind the run before it"
        ) from error
    version = int((footer.metadata or {}).get(b"cvpo_schema_version", SCHEMA_VERSION))
    if version > SCHEMA_VERSION:
        raise AnalysisError(
            f"{file} has schema version {version}, this cvpo reads {SCHEMA_VERSION}: update cvpo"
        )
    return footer


def _null_columns(part: str, footer: Any, columns: Sequence[str]) -> list[str]:
    """Columns without any value in a file, as far as its statistics say."""
    if part.startswith("tables/") or not footer.num_rows:
        return []
    nulls = dict.fromkeys(columns, 0)
    held = set()
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for index in range(group.num_columns):
            column = group.column(index)
            name = column.path_in_schema.split(".")[0]
            held.add(name)
            if column.is_stats_set and column.statistics.has_null_count and name in nulls:
                nulls[name] += column.statistics.null_count
    return [name for name in columns if name not in held or nulls[name] == footer.num_rows]


def _unknown_columns(part: str, footer: Any) -> str:
    declared = COLUMNS.get(part.split("/")[0])
    if declared is None:
        return ""
    known = {column.name for column in declared}
    return ", ".join(n for n in footer.schema.to_arrow_schema().names if n not in known)


def _unknown_parts(path: Path) -> list[str]:
    """Files and folders that look like parts, and that this version does not know."""
    known = {*_NUMBERED, "scores", "tables", "problems.parquet"}
    found = [file.parent.name for file in path.glob("*/[!.]*.parquet")]
    found += [file.name for file in path.glob("[!.]*.parquet")]
    unknown = ", ".join(sorted(set(found) - known))
    return [f"parts that this version does not know are left out: {unknown}"] if unknown else []


def _resumes(contents: Mapping[str, Part]) -> list[str]:
    if "events" not in contents:
        return []
    events = next(contents["events"].scan(None, None))
    steps = events.loc[events["kind"] == "resume", "step"]
    return [f"resumed at step {ranges(steps)}"] if len(steps) else []


def _total_steps(config: Any) -> int | None:
    """Steps the run was to take: the trainer's `steps`, or a simulation's `budget.steps`."""
    if not isinstance(config, dict):
        return None
    budget = config.get("budget")
    total = budget.get("steps") if isinstance(budget, dict) else config.get("steps")
    return total if isinstance(total, int) else None


def _finished(
    run: Mapping[str, Any], contents: Mapping[str, Part], total: int | None
) -> bool | None:
    if "study" in run:  # its rows are the last thing a study writes
        return "tables/study" in contents
    if total is None:
        return None
    if "metrics" not in contents:
        return False
    return bool(next(contents["metrics"].scan(["step"], None))["step"].max() >= total)
