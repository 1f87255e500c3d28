"""How much the values vary within a trajectory, at the end of training, under which critic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.selection import recent
from analysis.sources import Source

LAST_STEPS = 10
"""Logged steps that stand for the end of a run."""

OWN = "trajectories"
"""The part whose sigma is of the run's own critic; `scores/<critic>` is of a frozen one."""


@dataclass(frozen=True)
class Spread:
    """One run's trajectories under one critic."""

    variance: np.ndarray
    """sigma^2 of each trajectory, in reward^2; trajectories without a sigma are left out."""
    steps: tuple[int, ...]
    """The steps they are of, ascending; empty where there are none."""


def read_spread(run: Source, part: str = OWN, *, steps: int = LAST_STEPS) -> Spread:
    """The variance of the values within each trajectory, over a run's last logged steps.

    Args:
        run: holds the part with a sigma in it.
        part: `OWN`, or the scores of a frozen critic.
        steps: how many logged steps.

    Raises:
        AnalysisError: damage, with the file.
    """
    rows = pd.concat(recent(run, part, ["step", "sigma"], steps), ignore_index=True).dropna()
    if rows.empty:
        return Spread(np.empty(0), ())
    return Spread(
        variance=rows["sigma"].to_numpy(dtype=np.float64) ** 2,
        steps=tuple(map(int, rows["step"].unique())),
    )
