"""What W_S and W_D do to whom: sums over trajectories by phase, success rate and outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.sources import Source

BANDS = ("0-.1", ".1-.3", ".3-.5", ".5-.8", ".8-1")
"""Of a prompt's tracked success rate rho. The method's low set is the first two (rho <= .3), its
high set the last (rho >= .8)."""

OUTCOMES = ("incorrect", "correct")
PHASES = ("early", "bottleneck")
SUMS = ("trajectories", "w_s", "w_d", "w", "before", "after")

_EDGES = np.array([0.1, 0.3, 0.5, math.nextafter(0.8, 0.0)])  # the band below includes its edge
COLUMNS = ("length", "correct", "rho", "w_s", "w_d", "advantage_mean")


@dataclass(frozen=True)
class Cells:
    """A run's trajectories, added up.

    Attributes:
        sums: a row for each phase, band and outcome (R >= .5 is correct): phase, band, outcome, the
            number of trajectories, the sums of w_s, w_d and w = w_s w_d, and of |A| before and
            after the weights. |A| is that of a trajectory's summed token advantages, length times
            |advantage_mean|: the log does not have the tokens.
        dropped: trajectories left out because one of `COLUMNS` is missing.
        steps: that have trajectories, ascending.
    """

    sums: pd.DataFrame
    dropped: int
    steps: tuple[int, ...]


def read_cells(run: Source) -> Cells:
    """Sums by cell over all logged trajectories of a run; files are read one at a time.

    Args:
        run: holds `COLUMNS` in its trajectories.

    Raises:
        AnalysisError: damage, with the file.
    """
    switch = _switch(run)
    shape = (len(PHASES), len(BANDS), len(OUTCOMES))
    sums = np.zeros((len(SUMS), math.prod(shape)))
    dropped, steps = 0, []
    for frame in run.scan("trajectories", ["step", *COLUMNS]):
        whole = frame.dropna()
        dropped += len(frame) - len(whole)
        steps += frame["step"].unique().tolist()
        x = {name: whole[name].to_numpy() for name in ("step", *COLUMNS)}
        where = (
            (x["step"] > switch).astype(int),
            np.searchsorted(_EDGES, x["rho"], side="left"),
            (x["correct"] >= 0.5).astype(int),
        )
        cell = np.ravel_multi_index(where, shape)
        weight = x["w_s"] * x["w_d"]
        size = x["length"] * np.abs(x["advantage_mean"])
        columns = (np.ones(len(whole)), x["w_s"], x["w_d"], weight, size, weight * size)
        for total, column in zip(sums, columns, strict=True):
            total += np.bincount(cell, weights=column, minlength=total.size)
    cells = pd.MultiIndex.from_product(
        (PHASES, BANDS, OUTCOMES), names=("phase", "band", "outcome")
    ).to_frame(index=False)
    return Cells(cells.assign(**dict(zip(SUMS, sums, strict=True))), dropped, tuple(steps))


def _switch(run: Source) -> float:
    """The step after which the phase is bottleneck; infinite where it never is."""
    if "events" not in run.contents:
        return math.inf
    events = run.read("events", ["step", "kind"])
    steps = events.loc[events["kind"] == "phase_switch", "step"]
    return float(steps.min()) if len(steps) else math.inf
