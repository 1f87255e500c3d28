"""Peers' dumps of responses, as the parts `trajectories` and `problems`.

A reader hands in its files and how one of them becomes a frame with the columns `step`, `prompt`
(the text as the policy saw it) and whatever else it holds under our names. Here the prompts are
numbered and the responses of a prompt counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from analysis import AnalysisError
from analysis.sources.source import Part
from cvpo.runlog import COLUMNS

Load = Callable[[Path, Collection[str]], pd.DataFrame]
"""File, columns -> a frame of these columns (more do no harm), `step` and `prompt` among them."""

_NUMBERED = ("step", "prompt_id", "sample")
_PROBLEM = ("dataset", "gold")

REASONS = {
    "trajectories.length": "the log has the text, not the number of tokens",
    "trajectories.truncated": "the log does not say why a response ended",
    "problems.text": "the log has the prompt as the policy saw it: column prompt",
    "problems.source_id": "the log has no ids; prompts are numbered by their text",
}
"""Reasons for `Source.missing` that every dump has."""


def own_names(names: Iterable[str], ours: dict[str, str], kind: str) -> dict[str, str]:
    """A dump's column -> its name here.

    One that we have a word for gets it, others keep their own unless that word means something
    else with us: then the kind of log stands before it.
    """
    taken = {column.name for column in COLUMNS["trajectories"]} | {"prompt"}
    return {name: ours.get(name) or (f"{kind}_{name}" if name in taken else name) for name in names}


def trajectories_part(files: Sequence[Path], load: Load, held: Sequence[str]) -> Part:
    """The responses. `prompt_id` numbers the prompts by their text, in order of appearance.

    Args:
        files: in order of steps.
        load: reads one.
        held: the columns of a loaded file but `step` and `prompt`.
    """
    columns = (*_NUMBERED, *held)

    def scan(chosen: Sequence[str] | None, steps: Collection[int] | None) -> Iterator[pd.DataFrame]:
        wanted = list(columns if chosen is None else chosen)
        numbers: dict[str, int] = {}
        for file in files:
            frame = load(file, {"step", "prompt", *wanted} - {"prompt_id", "sample"})
            # numbered before rows are left out, so that the ids do not depend on the steps
            new = frame["prompt"].drop_duplicates()
            for prompt in new[~new.isin(numbers)]:
                numbers[prompt] = len(numbers)
            frame["prompt_id"] = frame["prompt"].map(numbers).astype("int64")
            frame["sample"] = frame.groupby(["step", "prompt_id"]).cumcount()
            if steps is not None:
                frame = frame[frame["step"].isin(list(steps))]
            if len(frame) or steps is None:
                yield frame[wanted].reset_index(drop=True)

    return Part(columns, scan, lambda: sum(len(frame) for frame in scan(["step"], None)))


def problems_part(trajectories: Part, load: Load, files: Sequence[Path]) -> Part:
    """The prompts, each once: prompt_id, prompt, and dataset and gold where the dump has them."""
    extra = [name for name in _PROBLEM if name in trajectories.columns]
    columns = ("prompt_id", "prompt", *extra)

    def scan(
        chosen: Sequence[str] | None,
        steps: Collection[int] | None,  # noqa: ARG001  (a scan takes it)
    ) -> Iterator[pd.DataFrame]:
        seen: set[str] = set()
        first = []
        for file in files:
            frame = load(file, {"step", *columns} - {"prompt_id"}).drop_duplicates("prompt")
            first.append(frame[~frame["prompt"].isin(seen)])
            seen.update(frame["prompt"])
        problems = pd.concat(first, ignore_index=True)
        problems["prompt_id"] = problems.index
        yield problems[list(columns if chosen is None else chosen)]

    return Part(columns, scan, lambda: len(next(scan(["prompt_id"], None))))


def check_correct(frame: pd.DataFrame, where: Path, column: str) -> None:
    """Refuse a column of correctness that is none.

    Raises:
        AnalysisError: an entry is no number from 0 to 1; null is allowed.
    """
    if "correct" not in frame:
        return
    wrong = ~(frame["correct"].between(0, 1) | frame["correct"].isna())
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise AnalysisError(
            f"{where}, row {row + 1}: {column!r} is {frame['correct'].iloc[row]}, but correctness "
            "lies in [0, 1]; rename that column in the dump, or read the others by name"
        )
