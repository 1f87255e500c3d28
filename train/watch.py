"""Where a run can be watched while it trains: TensorBoard and Weights & Biases.

A board only shows what `metrics.jsonl` keeps in any case, so a board that is lost loses nothing.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from cvpo import RunLog
from train.config import ConfigError

WandBMode = Literal["online", "offline", "disabled"]

_FINISH_SECONDS = 60.0
"""A dead network may hold the end of a run for so long; what was not sent stays in its folder."""


class Board(Protocol):
    """Shows scalars."""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows a step's scalars; those that are not finite are left out."""

    def close(self) -> None:
        """Writes what is left, and lets go."""


def boards_of(
    log: RunLog, *, tensorboard: bool, wandb: WandBMode, resolved: Mapping[str, Any]
) -> list[Board]:
    """Opens a run's boards behind the last step of its log.

    Args:
        log: The run's; its folder takes what the boards write.
        tensorboard: Whether to write for TensorBoard.
        wandb: Whether to send to W&B, to write for a later `wandb sync`, or neither.
        resolved: The run's resolved configuration, for W&B to show.

    Raises:
        ConfigError: A board is asked for and not installed.
    """
    boards: list[Board] = []
    if tensorboard:
        boards.append(TensorBoard(log))
    if wandb != "disabled":
        boards.append(WandB(log, mode=wandb, resolved=resolved))
    return boards


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, log: RunLog) -> None:
        """Hides what an earlier process showed of steps that are not in the log.

        Raises:
            ConfigError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"log.tensorboard: {error}; install it, or say false") from error
        step = -1 if log.last_step is None else log.last_step
        self._writer = SummaryWriter(str(log.path / "tensorboard"), purge_step=step + 1)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows a step's scalars; those that are not finite are left out."""
        for name, value in _finite(scalars).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandB:
    """A run at Weights & Biases, the same one whenever the run's folder is the same.

    Account, project (`cvpo` if nothing is said) and server are W&B's own environment variables:
    WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_BASE_URL.

    Nothing that W&B raises ends a training: the first error becomes a warning in the log, and W&B
    is left alone from then on. W&B cannot take rows back, so what an interrupted run has shown
    beyond its last checkpoint is shown twice, the second time by the run that was resumed.
    """

    def __init__(
        self, log: RunLog, *, mode: Literal["online", "offline"], resolved: Mapping[str, Any]
    ) -> None:
        """Opens the run, or goes on with it.

        Args:
            log: The run's.
            mode: Whether to send, or only to write.
            resolved: Its resolved configuration; runs of one `method` make a group.

        Raises:
            ConfigError: W&B is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "log.wandb: wandb is not installed; pip install 'cvpo[wandb]', or say disabled"
            ) from error
        self._log = log
        self._step = log.last_step or 0
        self._run: Any = None
        with self._forgiving():
            self._run = wandb.init(
                mode=mode,
                id=_run_id(log.path),
                resume="allow",
                dir=log.path,
                project=os.environ.get("WANDB_PROJECT", "cvpo"),
                name=log.path.name,
                group=resolved.get("method"),
                config=dict(resolved),
                # The terminal is the progress bar's.
                settings=wandb.Settings(console="off", finish_timeout=_FINISH_SECONDS),
            )
            # W&B's own step may only grow, which that of a resumed run does not.
            self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows a step's scalars; those that are not finite are left out."""
        self._step = step
        if self._run is not None:
            with self._forgiving():
                self._run.log({"step": step, **_finite(scalars)})

    def close(self) -> None:
        """Ends the W&B run; as failed, where an error is ending the training."""
        failed = sys.exc_info()[0] is not None
        if self._run is not None:
            with self._forgiving():
                self._run.finish(exit_code=int(failed))
            self._run = None

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - W&B's errors share no base class
            self._run = None
            self._log.event(
                self._step,
                "warning",
                f"W&B shows nothing from here on: {type(error).__name__}: {error}",
            )


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if math.isfinite(value)}


def _run_id(folder: Path) -> str:
    """The run's name at W&B, made up once."""
    file = folder / "wandb-id.txt"
    if not file.exists():
        file.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
    return file.read_text(encoding="ascii").strip()
