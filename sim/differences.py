"""Differences of two settings, paired by seed, and the verdict on a claim about their sign."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from cvpo.metrics import Interval, paired_t_interval
from sim.study import Row, Verdict

Array = np.ndarray[Any, np.dtype[Any]]

FEWEST_SEEDS = 5
"""Below this no difference is claimed."""


def difference_verdict(interval: Interval, *, sign: Literal[1, -1] = 1) -> Verdict:
    """On "the difference is positive" (or negative): where does its interval over seeds lie?

    Args:
        interval: Of paired differences; its size is the number of seeds.
        sign: The sign that is claimed.
    """
    low, high = sorted((sign * interval.low, sign * interval.high))
    if interval.sizes[0] < FEWEST_SEEDS:
        return "undecided"
    if low > 0:
        return "holds"
    return "fails" if high <= 0 else "undecided"  # no difference in any seed is none


def difference_row(
    quantity: str,
    setting: str,
    a: Float[Array, " seeds"],
    b: Float[Array, " seeds"] | float,
    *,
    paper: str = "",
    claim: int | None = None,
    sign: Literal[1, -1, 0] = 0,
    unit: str = "",
) -> Row:
    """a - b, paired by seed, with its t interval.

    Args:
        quantity: What differs.
        setting: Where.
        a: One number for each seed.
        b: The same of what it is compared with.
        paper: What the paper says.
        claim: The claim's number.
        sign: The sign that the paper claims; 0 if it claims none, then there is no verdict.
        unit: Of both.
    """
    interval = paired_t_interval(np.asarray(a), np.broadcast_to(b, np.shape(a)))
    return Row(
        quantity=quantity,
        setting=setting,
        value=interval.estimate,
        low=interval.low,
        high=interval.high,
        n=len(a),
        unit=unit,
        paper=paper,
        claim=claim,
        verdict=difference_verdict(interval, sign=sign) if sign else "",
    )
