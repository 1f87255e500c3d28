"""Seconds by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

TRAINING = ("rollout", "score", "values", "weights", "tracker", "actor", "critic", "sync")
"""Phases that count as device time of the run; evaluation and saving do not."""
ALL = (*TRAINING, "eval", "save")


class Phases:
    """A stopwatch with one hand for each phase."""

    def __init__(self) -> None:
        """All at 0."""
        self.seconds = dict.fromkeys(ALL, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def training_seconds(self) -> float:
        """Sum over the phases in `TRAINING`."""
        return sum(self.seconds[phase] for phase in TRAINING)

    def reset(self) -> dict[str, float]:
        """Returns the seconds and starts again at 0."""
        taken, self.seconds = self.seconds, dict.fromkeys(ALL, 0.0)
        return taken
