"""A run's folder: who may write there, and whether what stands there belongs to this run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from cvpo import RunLog
from cvpo.runlog import RunLogError, read_run
from train.config import Config, ConfigError
from train.data import Problem, problem_table

MAY_CHANGE = {"steps", "run_dir", "evaluation", "checkpoints", "log", "engine", "warmstart"}
"""Sections that a resumed run may set anew: none of them changes what is trained. (Other threads or
micro-batches change the rounding, so the resumed run is then equal up to that.)"""


def open_log(config: Config, problems: list[Problem], step: int) -> RunLog:
    """A new log, or the run's own, rewound to a step (-1: to its very beginning).

    The folder is there, and `claimed` by this process.
    """
    folder, resolved = config.folder, config.resolved()
    table = problem_table(problems)
    if not (folder / "run.yaml").exists():
        if step >= 0:
            raise ConfigError(f"run_dir {folder}: has checkpoints but no run.yaml; move it away")
        try:
            log = RunLog.create(
                folder,
                config=resolved,
                seed=config.seed,
                method=config.method,
                verifier=config.verifier,
            )
        except FileExistsError as error:
            raise ConfigError(f"run_dir {error}") from error
    else:
        changed = _differences(read_run(folder)["config"], resolved)
        if changed:
            raise ConfigError(
                f"run_dir {folder}: holds a run of another configuration; {changed[0]}. Set "
                "run_dir to a new folder, or give the run its own configuration again"
            )
        log = RunLog.open(folder)
        last = -1 if log.last_step is None else log.last_step
        if last < step:
            raise ConfigError(
                f"run_dir {folder}: metrics.jsonl has lost its rows up to the checkpoint of step "
                f"{step}; put it back, or move the folder away"
            )
        if step < 0 < last:  # step 0 alone may lack its checkpoint: a kill came between
            raise ConfigError(
                f"run_dir {folder}: holds a run of {last} steps and no checkpoint to go on from, "
                "and starting again would erase it; put checkpoints back, or move the folder away"
            )
    try:
        log.problems(table)
    except (RunLogError, FileExistsError) as error:
        raise ConfigError(f"data.train: {error}") from error
    log.rewind(step)  # last: a refused run keeps every row
    return log


def claimed(folder: Path) -> TextIO:
    """An open file that keeps other processes out of the folder until this one ends, or closes it.

    Raises:
        ConfigError: Another process is writing there: a run that trains, or a scoring. Or it is no
            folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"run_dir {folder}: a file stands in its place") from error
    claim = (folder / ".lock").open("w")
    try:
        fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        claim.close()
        raise ConfigError(
            f"run_dir {folder}: another process is writing there; wait for it, end it, or set "
            "run_dir to a new folder"
        ) from None
    return claim


def _differences(before: Any, now: dict[str, Any]) -> list[str]:
    # Through JSON, so that a tuple equals the list that it was written as.
    before, now = json.loads(json.dumps(before)), json.loads(json.dumps(now))
    # What the method came to follows from the keys: it is named only where nothing else differs.
    sections = sorted(
        (before.keys() | now.keys()) - MAY_CHANGE, key=lambda name: (name == "declared", name)
    )
    return [
        line
        for section in sections
        for line in _changes(section, before.get(section), now.get(section))
    ]


def _changes(key: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _changes(f"{key}.{name}", before.get(name), now.get(name))
    elif before != now:
        yield f"{key} was {before}, now {now}"
