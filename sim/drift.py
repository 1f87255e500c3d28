"""Synthetic drift: every prompt's true success rate by round, for policies that improve or do not.

A prompt's logit starts at a normal draw and grows by an increment a round; what differs between
shapes is how the increments are shared out over prompts and rounds. All have the mean ``growth``:

- ``steady``: each prompt grows by its own constant amount, ``Normal(growth, (spread growth)^2)``.
- ``jumps``: a prompt stands still, and now and then rises by ``jump`` at once.
- ``skills``: prompts need mixtures of a few skills, and each skill grows in bursts. So the prompts
  that need a skill rise in the same rounds.

Growth ends with round ``stop``: the policy is stationary from there on (a plateau), or throughout
with ``stop = 0`` (frozen). Rates of a round are those under which its rollouts are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

PROMPTS, BATCH, ROLLOUTS = 17_398, 256, 16
"""The paper's prompts, prompts of a step and rollouts of a prompt (section 7 of the method)."""
ROUNDS = 30
"""Rounds of the paper's 2000 steps, the last one begun."""


@dataclass(frozen=True)
class Drift:
    """How a policy's success rates move. Defaults: the paper's size, some 10 % a round."""

    shape: str = "steady"
    """``steady``, ``jumps`` or ``skills``."""
    growth: float = 0.1
    """Mean growth of a logit in a round while the policy improves."""
    stop: int | None = None
    """The round whose rates are kept from then on; None: never, 0: frozen."""
    num_prompts: int = PROMPTS
    rounds: int = ROUNDS
    spread: float = 0.5
    """``steady``: standard deviation of a prompt's growth over its mean. Some get worse."""
    jump: float = 3.0
    """``jumps``: size of a jump in logits."""
    num_skills: int = 20
    burstiness: float = 4.0
    """``skills``: variance of a skill's growth in a round over its squared mean."""
    initial_mean: float = -1.5
    """Of the logits in round 0."""
    initial_sd: float = 2.5
    """Of the logits in round 0. With the mean above, a third of the rollouts succeed."""

    def __post_init__(self) -> None:
        """Refuses what cannot be drawn.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        rules = {
            "shape": (self.shape in _INCREMENTS, f"one of {', '.join(_INCREMENTS)}"),
            "jump": (0 < self.jump < math.inf, "positive"),
            "growth": (0 <= self.growth <= self.jump, "in 0..jump"),
            "stop": (self.stop is None or self.stop >= 0, "at least 0, or None"),
            "num_prompts": (self.num_prompts >= 1, "at least 1"),
            "rounds": (self.rounds >= 1, "at least 1"),
            "spread": (0 <= self.spread < math.inf, "at least 0"),
            "num_skills": (self.num_skills >= 1, "at least 1"),
            "burstiness": (0 < self.burstiness < math.inf, "positive"),
            "initial_mean": (math.isfinite(self.initial_mean), "a number"),
            "initial_sd": (0 <= self.initial_sd < math.inf, "at least 0"),
        }
        for field, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)!r}")


def step_of_round(round_: float) -> float:
    """The paper's step with which a round, counted from 0, is complete; NaN (never) stays NaN."""
    return math.nan if math.isnan(round_) else math.ceil((round_ + 1) * PROMPTS / BATCH)


def true_rates(drift: Drift, seeds: Sequence[int]) -> Float[np.ndarray, "S N E"]:
    """p: the success rate of every prompt in every round, in (0, 1).

    A seed's world is the same whatever other seeds are asked for, and a policy that stops has the
    rates of the one that does not, up to its stop.

    Args:
        drift: The policy, N prompts and E rounds.
        seeds: S of them.
    """
    logits = np.empty((len(seeds), drift.num_prompts, drift.rounds))
    for logit, seed in zip(logits, seeds, strict=True):
        rng = np.random.default_rng([seed, 0])
        logit[:, 0] = rng.normal(drift.initial_mean, drift.initial_sd, drift.num_prompts)
        logit[:, 1:] = _INCREMENTS[drift.shape](drift, rng)
    if drift.stop is not None:
        logits[..., drift.stop + 1 :] = 0
    return np.asarray(1 / (1 + np.exp(-logits.cumsum(axis=-1))))


def draw_counts(
    rates: Float[np.ndarray, "S N E"], seeds: Sequence[int], *, trials: int = ROLLOUTS
) -> Int[np.ndarray, "S N E"]:
    """Successes of ``trials`` rollouts, binomial; a seed's draws do not depend on other seeds."""
    return np.stack(
        [
            np.random.default_rng([seed, 1]).binomial(trials, rate)
            for rate, seed in zip(rates, seeds, strict=True)
        ]
    )


def _steady(drift: Drift, rng: np.random.Generator) -> Float[np.ndarray, "N rounds"]:
    slope = rng.normal(drift.growth, drift.spread * drift.growth, (drift.num_prompts, 1))
    return np.broadcast_to(slope, (drift.num_prompts, drift.rounds - 1))


def _jumps(drift: Drift, rng: np.random.Generator) -> Float[np.ndarray, "N rounds"]:
    draws = rng.random((drift.num_prompts, drift.rounds - 1))
    return drift.jump * (draws < drift.growth / drift.jump)


def _skills(drift: Drift, rng: np.random.Generator) -> Float[np.ndarray, "N rounds"]:
    # Sparse: most of a prompt's need lies on two or three skills.
    need = rng.dirichlet(np.full(drift.num_skills, 0.1), drift.num_prompts)
    bursts = rng.gamma(
        1 / drift.burstiness, drift.burstiness * drift.growth, (drift.num_skills, drift.rounds - 1)
    )
    return np.asarray(need @ bursts)


_INCREMENTS: dict[str, Callable[[Drift, np.random.Generator], Float[np.ndarray, "N rounds"]]] = {
    "steady": _steady,
    "jumps": _jumps,
    "skills": _skills,
}

SHAPES = tuple(_INCREMENTS)
