"""Checkpoints are whole or absent: written aside, then renamed; only then do old ones go."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

_NAME = re.compile(r"step-(\d{8})")
_STATE = "state.pt"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and says what to do."""


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    state: Mapping[str, Any],
    write_models: Callable[[Path], None],
    keep: int,
) -> Path:
    """Writes `folder/step-<step>` and then deletes all but the newest `keep`.

    Args:
        folder: The run's checkpoints.
        step: Completed steps.
        state: Tensors and plain data only: it is read back without running any code.
        write_models: Writes models and optimisers into the folder it is given.
        keep: At least 1.

    Raises:
        OSError: It cannot be written (a full disk); the checkpoints there stay.
    """
    target = folder / f"step-{step:08d}"
    aside = folder / f".{target.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write_models(aside)
        sizes = {
            file.relative_to(aside).as_posix(): file.stat().st_size
            for file in aside.rglob("*")
            if file.is_file()
        }
        torch.save({"state": dict(state), "files": sizes}, aside / _STATE)
    except (RuntimeError, SafetensorError) as error:  # what they make of a failed write
        raise OSError(
            f"{target}: cannot be written ({' '.join(str(error).split())}); is the disk full?"
        ) from error
    for path in (*aside.rglob("*"), aside):
        _flush(path)
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    _flush(folder)
    for _, old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Whole checkpoints, oldest first, with their steps."""
    if not folder.is_dir():
        return []
    found = [(m, path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted((int(m.group(1)), path) for m, path in found)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state that `save_checkpoint` was given.

    Raises:
        CheckpointError: There is none, it cannot be read, or a file beside it is missing or cut.
    """
    file = checkpoint / _STATE
    if not file.is_file():
        raise CheckpointError(f"{checkpoint}: not a checkpoint ({_STATE} is missing); move it away")
    if not zipfile.is_zipfile(file):  # torch would try to read it in a form of long ago
        raise _damaged(checkpoint, _STATE, "no whole archive")
    try:
        saved: dict[str, Any] = torch.load(file, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise _damaged(checkpoint, _STATE, str(error).partition("\n")[0]) from error
    for name, size in saved["files"].items():
        found = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else 0
        if found != size:
            raise _damaged(checkpoint, name, f"{found} of {size} bytes")
    state: dict[str, Any] = saved["state"]
    return state


def _damaged(checkpoint: Path, name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint / name}: damaged ({reason}); delete {checkpoint.name} to go on from the "
        "checkpoint before it"
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
