"""How many prompts are solved how often: the share of each accuracy bin, round by round."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from analysis.sources import Source

BINS = ("0", "(0, .25]", "(.25, .5]", "(.5, .75]", "(.75, 1)", "1")
"""Accuracy of a prompt's rollouts in a round: never solved, four quarters, always solved."""

_EDGES = np.array([0.25, 0.5, 0.75])


def accuracy_bin(rate: Float[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """Index into `BINS` of rates in [0, 1]; an edge belongs to the bin below it."""
    inner = 1 + np.searchsorted(_EDGES, rate, side="left")
    return np.where(rate <= 0, 0, np.where(rate >= 1, len(BINS) - 1, inner))


def read_bins(run: Source) -> pd.DataFrame:
    """Shares of the bins in each round of a run, over the prompts that the round rolled out.

    Args:
        run: holds `prompts`.

    Returns:
        A row per round and bin: round, step (in which the round ended), bin (index into `BINS`),
        share, prompts (rolled out in the round) and true_share (by the true success rate, which
        simulations know; else NaN). Rounds without a rollout are left out.

    Raises:
        AnalysisError: damage, with the file.
    """
    truth = ["true_rho"] if run.lacks("prompts", "true_rho") is None else []
    rounds = []
    for frame in run.scan("prompts", ["round", "step", "trials", "successes", *truth]):
        seen = frame[frame["trials"] > 0]
        if seen.empty:
            continue
        rounds.append(
            pd.DataFrame(
                {
                    "round": int(seen["round"].iloc[0]),
                    "step": int(seen["step"].iloc[0]),
                    "bin": range(len(BINS)),
                    "share": _shares((seen["successes"] / seen["trials"]).to_numpy()),
                    "prompts": len(seen),
                    "true_share": _shares(seen["true_rho"].to_numpy()) if truth else np.nan,
                }
            )
        )
    columns = ["round", "step", "bin", "share", "prompts", "true_share"]
    return pd.concat(rounds, ignore_index=True) if rounds else pd.DataFrame(columns=columns)


def _shares(rate: np.ndarray) -> np.ndarray:
    known = rate[~np.isnan(rate)]
    if known.size == 0:
        return np.full(len(BINS), np.nan)
    return np.asarray(np.bincount(accuracy_bin(known), minlength=len(BINS)) / known.size)
