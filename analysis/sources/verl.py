"""verl's logs: what it prints, what its file logger writes, and its dumps of responses.

- The console log has a line `step:12 - name:value - ...` for each step, behind colours, Ray's
  `(TaskRunner pid=..)` and much else; numbers may stand as `np.float64(0.5)`.
- The file logger writes `{"step": 12, "data": {name: value}}` a line; flat rows are read too.
- `trainer.rollout_data_dir` and `validation_data_dir` hold a `<step>.jsonl` for each step, with
  input, output, gts, score, step and whatever the reward function adds (acc, pred, ..).

Decision: rollouts and validation are dumped alike, and nothing in the files tells them apart, so
both are read as `trajectories`; give the folder that is meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import AnalysisError
from analysis.sources import dumps
from analysis.sources.lines import json_lines, torn_note
from analysis.sources.scalars import OTHER_DEFINITION, gather_steps, in_our_terms
from analysis.sources.source import Source, frame_part, what_is_missing

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_REPEATED = re.compile(r"\s*\[repeated \d+x[^\]]*\]\s*$")  # Ray's, behind a line it says once
_STEP = re.compile(r"(?:^|[\s\])])step:(\d+) - (\S.*)$")
_NUMBER = re.compile(
    r"(?:[\w.]+\()?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf)|true|false)\)?", re.I
)
_HEAD = 8192  # bytes in which a binary file gives itself away
_TOTAL = re.compile(r"Total training steps: (\d+)")

_IN_DUMPS = dict.fromkeys(
    ("trajectories", "problems"),
    "verl dumps responses to trainer.rollout_data_dir, if it is told to: give that folder",
)
_DUMPED = {
    "output": "response",
    "score": "reward",
    "acc": "correct",
    "pred": "answer",
    "gts": "gold",
    "data_source": "dataset",
}


# ------------------------------------------------------------------------------------- console


def is_console(path: Path) -> bool:
    """Whether a file is text with a line of a step."""
    with path.open("rb") as file:
        if b"\0" in file.read(_HEAD):
            return False
        file.seek(0)
        return any(True for _ in _step_lines(path, file))


def open_console(path: Path) -> Source:
    """Open a console log.

    Raises:
        AnalysisError: a step's line holds something that is no number; file and line are named.
    """
    total: list[int] = []

    def lines() -> Iterator[bytes]:
        with path.open("rb") as file:
            for line in file:
                total.extend(int(found) for found in _TOTAL.findall(line.decode(errors="replace")))
                yield line

    steps = list(_step_lines(path, lines()))
    return _metrics_source(path, "verl-console", steps, total[-1] if total else None)


def _step_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, float]]]:
    for number, line in enumerate(lines, 1):
        if b"step:" not in line:
            continue
        text = _COLOUR.sub("", line.decode(errors="replace"))
        for piece in text.rstrip("\r\n").split("\r"):  # a progress bar may stand before it
            found = _STEP.search(_REPEATED.sub("", piece))
            if not found:
                continue
            items = found[2].split(" - ")
            if _item(items[0]) is None:
                continue  # prose
            if not line.endswith(b"\n"):
                items = items[:-1]  # the last number may be cut short
            scalars = {}
            for item in items:
                scalar = _item(item)
                if scalar is None:
                    raise AnalysisError(
                        f"{path}, line {number}: {item!r} of step {found[1]} is no name:number; "
                        "mend or remove the line"
                    )
                scalars[scalar[0]] = scalar[1]
            if scalars:
                yield int(found[1]), scalars


def _item(text: str) -> tuple[str, float] | None:
    name, _, value = text.strip().rpartition(":")
    number = _NUMBER.fullmatch(value)
    if not name or number is None:
        return None
    word = number[1].lower()
    return name, float({"true": 1, "false": 0}.get(word, word))


# ---------------------------------------------------------------------------------- JSON lines


def json_kind(row: Any) -> str | None:
    """What a file of JSON lines holds, from its first row."""
    if not isinstance(row, dict) or {"device_seconds", "tokens"} <= row.keys():
        return None  # the latter is our own metrics.jsonl, away from its run
    if {"input", "output", "score"} <= row.keys():
        return "verl-dump"
    if not _is_step(row.get("step")):
        return None
    scalars = row.get("data", row)
    numbers = isinstance(scalars, dict) and [k for k, v in scalars.items() if _is_number(v)]
    return "verl-jsonl" if numbers and set(numbers) != {"step"} else None


def open_metrics(path: Path) -> Source:
    """Open the file logger's JSON lines.

    Raises:
        AnalysisError: damage, or a row without a step; file and line are named.
    """

    def steps() -> Iterator[tuple[int, dict[str, float]]]:
        for number, row in json_lines(path):
            step = row.get("step")
            if not isinstance(step, int) or not _is_step(step):
                raise AnalysisError(
                    f"{path}, line {number}: 'step' is {step!r}, not a whole number from 0; mend "
                    "or remove the line"
                )
            scalars = row.get("data", row)
            if not isinstance(scalars, dict):
                raise AnalysisError(f"{path}, line {number}: 'data' holds no scalars; remove it")
            yield step, {k: _float(v) for k, v in scalars.items() if k != "step" and _is_number(v)}

    return _metrics_source(path, "verl-jsonl", steps(), None)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def _float(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _metrics_source(
    path: Path, kind: str, steps: Iterable[tuple[int, dict[str, float]]], total: int | None
) -> Source:
    frame, notes = gather_steps(steps)
    if frame.empty:
        raise AnalysisError(f"{path} has no line of a step yet; wait for the first")
    frame = in_our_terms(frame)
    contents = {"metrics": frame_part(frame)}
    return Source(
        path=path,
        kind=kind,
        name=path.stem,
        contents=contents,
        missing=what_is_missing(
            contents, "verl does not log it here", _IN_DUMPS | OTHER_DEFINITION
        ),
        total_steps=total,
        finished=None if total is None else bool(frame["step"].iloc[-1] >= total),
        notes=(*notes, *torn_note(path)),
    )


# --------------------------------------------------------------------------------------- dumps


def dump_files(folder: Path) -> list[Path]:
    """A folder's dumps, `<step>.jsonl`, in order of steps."""
    files = [file for file in folder.glob("*.jsonl") if re.fullmatch(r"\d+", file.stem)]
    return sorted(files, key=lambda file: int(file.stem))


def open_dump(path: Path) -> Source:
    """Open a folder of dumps, or one of them.

    Raises:
        AnalysisError: there is no row, or a first row that is none of a dump.
    """
    files = dump_files(path) if path.is_dir() else [path]
    files = [file for file in files if file.stat().st_size]
    rows = [row for file in files[:1] + files[-1:] for _, row in _first(file)]
    if not rows:
        raise AnalysisError(f"{path} has no whole row yet; wait for the first")
    if json_kind(rows[0]) != "verl-dump":
        raise AnalysisError(f"{files[0]}, line 1 lacks input, output or score; it is no dump")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    names = dumps.own_names(keys, _DUMPED | {"input": "prompt", "step": "step"}, "verl")
    held = [name for name in names.values() if name not in {"step", "prompt"}]

    def load(file: Path, wanted: Collection[str]) -> pd.DataFrame:
        return _load(file, names, wanted)

    trajectories = dumps.trajectories_part(files, load, held)
    contents = {
        "trajectories": trajectories,
        "problems": dumps.problems_part(trajectories, load, files),
    }
    reasons = dumps.REASONS | {
        "trajectories.correct": "no column acc; a score need not be correctness",
        "trajectories.answer": "no column pred",
    }
    return Source(
        path=path,
        kind="verl-dump",
        name=path.resolve().name if path.is_dir() else path.stem,
        contents=contents,
        missing=what_is_missing(contents, "verl does not dump it", reasons),
        notes=tuple(note for file in files for note in torn_note(file)),
    )


def _first(file: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = json_lines(file)
    return [first] if (first := next(rows, None)) else []


def _load(file: Path, names: Mapping[str, str], wanted: Collection[str]) -> pd.DataFrame:
    """One dump as a frame; text and nested entries of extra columns become text."""
    chosen = {peer: name for peer, name in names.items() if name in wanted}
    columns: dict[str, list[Any]] = {name: [] for name in chosen.values()}
    for number, row in json_lines(file):
        for key in ("input", "output", "score", "step"):
            right = _is_step(row.get(key)) if key == "step" else _RIGHT[key](row.get(key))
            if not right:
                raise AnalysisError(
                    f"{file}, line {number}: {key!r} is {row.get(key)!r}; mend or remove the line"
                )
        for peer, name in chosen.items():
            columns[name].append(row.get(peer))
    frame = pd.DataFrame({name: _series(entries, name) for name, entries in columns.items()})
    dumps.check_correct(frame, file, "acc")
    return frame


def _is_score(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and value == value  # not NaN


_RIGHT = {
    "input": lambda value: isinstance(value, str),
    "output": lambda value: isinstance(value, str),
    "score": _is_score,
}


def _series(entries: list[Any], name: str) -> pd.Series[Any]:
    """Numbers as numbers, everything else as text, null as null."""
    kinds = {type(entry) for entry in entries}
    if name not in {"answer", "gold"} and kinds <= {bool, int, float, type(None)}:
        plain = len(kinds) == 1 and name not in {"reward", "correct"}
        return pd.Series(entries, dtype=None if plain else "float64")
    text = [
        entry if entry is None or isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)
        for entry in entries
    ]
    return pd.Series(text, dtype="object")
