"""TRL's completions: `completions_<step>.parquet` of a trainer with `log_completions`.

A file has a row for each completion of a logging step: step, prompt, completion, one column for
each reward function, whatever else was logged, and, from some version on, advantage.

Decision: every column of scores keeps its name. A single one is also the `reward`, as the function
gave it; with several there is no `reward`, since the weights of their sum are not in the file and
`advantage` cannot tell them. `correct` is a copy of the column that says so by its name. An
advantage is the same for every token of a completion, so it is `advantage_mean`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis import AnalysisError
from analysis.sources import dumps
from analysis.sources.source import Source, what_is_missing

_NEEDED = {"step", "prompt", "completion"}
_OURS = {
    "step": "step",
    "prompt": "prompt",
    "completion": "response",
    "advantage": "advantage_mean",
}
_SAYS_CORRECT = ("correct", "accuracy", "accuracy_reward", "acc")


def completion_files(folder: Path) -> list[Path]:
    """A folder's completions, or those of its subfolder `completions`, in order of steps."""
    files = [*folder.glob("completions_*.parquet")] or [
        *(folder / "completions").glob("completions_*.parquet")
    ]
    return sorted(files, key=lambda file: (len(file.stem), file.stem))  # 99999 before 100000


def is_completions(file: Path) -> bool:
    """Whether a Parquet file has the columns of completions, or at least their file name."""
    if file.stem.startswith("completions_"):
        return True
    try:
        return set(pq.read_schema(file).names) >= _NEEDED
    except (pa.ArrowException, OSError):
        return False


def open_completions(path: Path) -> Source:
    """Open a folder of completions, or one file of them.

    Raises:
        AnalysisError: a file is no whole Parquet file, or its columns are not TRL's.
    """
    files = completion_files(path) if path.is_dir() else [path]
    schema = _schema(files[-1])
    if not set(schema.names) >= _NEEDED:
        lacking = ", ".join(sorted(_NEEDED - set(schema.names)))
        raise AnalysisError(f"{files[-1]} has no column {lacking}; it holds no completions of TRL")
    scores = [field.name for field in schema if _is_score(field)]
    copies = {}
    if len(scores) == 1 or "reward" in scores:
        copies["reward"] = "reward" if "reward" in scores else scores[0]
    if correct := next((name for name in _SAYS_CORRECT if name in scores), None):
        copies["correct"] = correct
    peers = [n for n in schema.names if not n.startswith("__") and n not in {"reward", "correct"}]
    names = dumps.own_names(peers, _OURS, "trl")
    held = [*(name for name in names.values() if name not in {"step", "prompt"}), *copies]

    def load(file: Path, wanted: Collection[str]) -> pd.DataFrame:
        return _load(file, names, copies, wanted)

    trajectories = dumps.trajectories_part(files, load, held)
    contents = {
        "trajectories": trajectories,
        "problems": dumps.problems_part(trajectories, load, files),
    }
    reasons = dumps.REASONS | {
        "trajectories.reward": f"the weights of the scores {', '.join(scores)} are not logged"
        if scores
        else "no column of scores",
        "trajectories.correct": f"no column {' or '.join(_SAYS_CORRECT)}",
        "metrics": "not in the completions; TRL hands them to TensorBoard: give that folder",
    }
    return Source(
        path=path,
        kind="trl",
        name=path.resolve().name if path.is_dir() else path.stem,
        contents=contents,
        missing=what_is_missing(contents, "TRL does not log it with its completions", reasons),
    )


def _is_score(field: pa.Field) -> bool:
    is_number = pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    return field.name not in _OURS and (is_number or pa.types.is_boolean(field.type))


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, error) from error


def _load(
    file: Path, names: dict[str, str], copies: dict[str, str], wanted: Collection[str]
) -> pd.DataFrame:
    chosen = {name: peer for peer, name in names.items() if name in wanted}
    chosen |= {name: peer for name, peer in copies.items() if name in wanted}
    peers = list(dict.fromkeys(chosen.values()))
    held = _schema(file).names
    for peer in peers:
        if peer not in held:
            raise AnalysisError(
                f"{file} has no column {peer!r}, as later files have; keep runs in folders of "
                "their own"
            )
    try:
        columns = pq.read_table(file, columns=peers).to_pandas()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, error) from error
    frame = pd.DataFrame({name: columns[peer] for name, peer in chosen.items()})
    for name in copies.keys() & frame.columns:
        frame[name] = frame[name].astype("float64")
    for name in {"prompt", "response"} & {*frame.columns}:
        frame[name] = frame[name].map(str)  # conversations are lists of messages
    dumps.check_correct(frame, file, copies.get("correct", ""))
    return frame


def _damaged(file: Path, error: Exception) -> AnalysisError:
    return AnalysisError(f"{file} is not a whole Parquet file ({error}); remove it or copy it anew")
