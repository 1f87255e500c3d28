"""TensorBoard's event files: scalars by step."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from analysis import AnalysisError
from analysis.sources.scalars import gather_steps, in_our_terms
from analysis.sources.source import Source, frame_part, what_is_missing

_HEADER = struct.Struct("<QI")  # a record: length, its checksum, the data, their checksum


def event_files(path: Path) -> list[Path]:
    """The event files of a folder in the order they were begun, or the one that is given."""
    files = path.iterdir() if path.is_dir() else [path]
    return sorted(file for file in files if "tfevents" in file.name and file.is_file())


def open_events(path: Path) -> Source:
    """Open a folder of event files, or one of them; subfolders are runs of their own.

    Raises:
        AnalysisError: a damaged record, no scalar at all, or TensorBoard is not installed.
    """
    notes: list[str] = []
    scalars = (scalar for file in event_files(path) for scalar in _scalars(file, notes))
    frame, repeated = gather_steps(scalars)
    if frame.empty:
        raise AnalysisError(f"{path} has no scalar yet; wait for the first")
    frame = in_our_terms(frame)
    contents = {"metrics": frame_part(frame)}
    return Source(
        path=path,
        kind="tensorboard",
        name=path.resolve().name if path.is_dir() else path.stem,
        contents=contents,
        missing=what_is_missing(contents, "event files hold scalars, and this is none of them", {}),
        notes=(*repeated, *notes),
    )


def _scalars(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    try:
        from tensorboard.backend.event_processing.event_file_loader import (
            LegacyEventFileLoader,
        )
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise AnalysisError(f"{file} needs TensorBoard: pip install tensorboard") from error
    whole, torn = _records(file)
    if torn:
        notes.append(f"{file}: the last record is torn: its writer was killed, or is writing now")
    read = 0
    tensors: set[str] = set()  # only a tag's first record says that its tensors are scalars
    for event in LegacyEventFileLoader(str(file)).Load():
        read += 1
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                tensors.add(value.tag)
            if value.HasField("simple_value"):
                yield event.step, {value.tag: value.simple_value}
            elif value.HasField("tensor") and value.tag in tensors:
                yield event.step, {value.tag: float(tensor_util.make_ndarray(value.tensor))}
    if read < whole:  # the loader stops there without a word
        raise AnalysisError(f"{file}: record {read + 1} of {whole} is damaged; copy the file anew")


def _records(file: Path) -> tuple[int, bool]:
    """Whole records of an event file, by their lengths, and whether a torn one follows."""
    size = file.stat().st_size
    count, position = 0, 0
    with file.open("rb") as records:
        while position + _HEADER.size <= size:
            records.seek(position)
            length, _ = _HEADER.unpack(records.read(_HEADER.size))
            end = position + _HEADER.size + length + 4
            if end > size:
                break
            count, position = count + 1, end
    return count, position < size
