"""Small copies of run logs, to keep or to publish.

What every exhibit rests on stays whole: scalars, events, evaluations, rounds, value tables and a
study's tables. Trajectories, and what a frozen critic says of them, stay for every so many steps
and the last. Response texts stay in the last step alone, token ids nowhere. Names of machines and
folders outside the run go.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from analysis import AnalysisError
from analysis.sources import Source, open_sources
from cvpo import runlog
from cvpo.runlog import RunLog

_LINES = ("metrics.jsonl", "events.jsonl")


def thin(source: Source, folder: Path, *, every: int) -> Path:
    """Write a small copy of a run log to `folder/<name>`.

    The copy grows beside its place and is renamed when whole.

    Args:
        source: one of our own logs.
        folder: made if need be.
        every: of trajectories and scores, steps that are multiples of it stay, and the last.

    Returns:
        The copy's folder.

    Raises:
        AnalysisError: another trainer's log, or a copy is there already.
        RunLogError: a part is damaged.
    """
    if source.kind != "cvpo":
        raise AnalysisError(
            f"{source.path}: is no run log of ours; `python -m analysis export` writes its tables"
        )
    target = folder / source.path.resolve().name
    if target.exists():
        raise AnalysisError(f"{target} is there already; move it away or choose another folder")
    aside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _copy(source, aside, every)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _copy(source: Source, folder: Path, every: int) -> None:
    path = source.path
    run = without_places(runlog.read_run(path))
    run["hosts"] = [f"host-{number}" for number, _ in enumerate(run.get("hosts", []), 1)]
    text = yaml.safe_dump(run, sort_keys=False, allow_unicode=True)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    for name in _LINES:
        if (path / name).exists():
            shutil.copyfile(path / name, folder / name)
    log = RunLog.open(folder)
    for part in source.contents:
        kind, _, name = part.partition("/")
        if part == "problems":
            log.problems(runlog.read_problems(path))
        elif kind == "trajectories":
            last = runlog.list_steps(path, part)[-1]
            for step, frame in _steps(path, part, every):
                dropped = ["token_ids"] if step == last else ["token_ids", "response"]
                log.trajectories(step, frame.drop(columns=dropped, errors="ignore"))
        elif kind == "scores":
            for step, frame in _steps(path, part, every):
                log.scores(name, step, frame)
        elif kind == "tables":
            frame = runlog.read_table(path, name)
            log.table(name, frame, frame.attrs["units"])
        elif part in ("prompts", "evals", "tokens", "calibration"):
            for number, frame in _steps(path, part, 1):
                getattr(log, part)(number, frame)


def _steps(path: Path, part: str, every: int) -> Iterator[tuple[int, Any]]:
    """The multiples of `every` among a part's steps (or rounds), and the last, each read alone."""
    steps = runlog.list_steps(path, part)
    kept = [step for step in steps if step % every == 0 or step == steps[-1]]
    return zip(kept, runlog.scan(path, part, steps=kept), strict=True)


def without_places(value: Any) -> Any:
    """Plain data in which absolute paths are cut to their last part."""
    if isinstance(value, Mapping):
        return {key: without_places(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_places(entry) for entry in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def add_command(commands: Any) -> None:
    """Add `thin` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "thin",
        help="small copies of run logs, to keep or to publish",
        description="Writes FOLDER/<run>: whole scalars, evaluations, rounds and tables; "
        "trajectories of every so many steps, without texts; no names of machines.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run log's folder")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER")
    parser.add_argument(
        "--every", type=int, default=10, metavar="STEPS", help="between trajectories; default: 10"
    )
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> None:
    if arguments.every < 1:
        raise AnalysisError(f"--every must be at least 1, got {arguments.every}")
    sources: Sequence[Source] = open_sources(arguments.runs)
    for source in sources:
        copy = thin(source, Path(arguments.output), every=arguments.every)
        size = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file())
        print(f"wrote {copy} ({size / 1e6:.1f} MB)")
