"""Samplers over bins of a fixed difficulty: a schedule (E2H) and a bandit (SEC).

Decisions that the sources leave open: bins hold equally many prompts (up to one), by rank of
difficulty, bin 0 the easiest; equal difficulties are ranked by prompt id. A bin that holds fewer
prompts than were drawn from it gives all it has, and the rest is drawn from the other bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cvpo.samplers.drawing import Drawing
from cvpo.samplers.interface import Feedback, Pool, required

BINS = 5
"""Decision: as many as MATH has levels; the sources do not agree on a number."""


def bin_index(difficulty: Float[Tensor, " N"], bins: int) -> Int[Tensor, " N"]:
    """Each prompt's bin in 0..bins-1, 0 the easiest; some are empty where N < bins."""
    rank = torch.empty(len(difficulty), dtype=torch.int64)
    rank[torch.argsort(difficulty, stable=True)] = torch.arange(len(difficulty))
    return rank * bins // len(difficulty)


def cosine_schedule(progress: float, bins: int) -> Float[Tensor, " K"]:
    """E2H's cosine form: ``P_i = w (K - i) / Z + (1 - w) (i + 1) / Z``, floored at p_min.

    ``w = (1 + cos(pi t/T)) / 2`` and ``Z = K (K + 1) / 2``. (The floor ``p_min = 1/Z`` never
    binds.)

    Args:
        progress: t/T in [0, 1].
        bins: K.

    Returns:
        P of each bin, [K].
    """
    i = torch.arange(bins, dtype=torch.float64)
    w, z = (1 + math.cos(math.pi * progress)) / 2, bins * (bins + 1) / 2
    p = (w * (bins - i) / z + (1 - w) * (i + 1) / z).clamp(min=1 / z)
    return p / p.sum()


def gaussian_schedule(progress: float, bins: int) -> Float[Tensor, " K"]:
    """E2H's Gaussian form: a bump that moves from the easiest bin to the hardest.

    ``P_i = p_min + (1 - K p_min) q_i`` with ``q_i ~ exp(-(i - mu)^2 / (2 * .5^2))`` normalised,
    ``mu = (t/T)^.5 (K - 1)`` and ``p_min = 2 / (K (K + 1))``.

    Args:
        progress: t/T in [0, 1].
        bins: K.

    Returns:
        P of each bin, [K].
    """
    i = torch.arange(bins, dtype=torch.float64)
    mu, p_min = math.sqrt(progress) * (bins - 1), 2 / (bins * (bins + 1))
    q = torch.softmax(-(i - mu).square() / (2 * 0.5**2), 0)
    return p_min + (1 - bins * p_min) * q


SCHEDULES: dict[str, Callable[[float, int], Float[Tensor, " K"]]] = {
    "cosine": cosine_schedule,
    "gaussian": gaussian_schedule,
}


class _Binned(Drawing):
    """Draws bins by their probabilities, then prompts uniformly within each bin."""

    fixed = (*Drawing.fixed, "bins", "difficulty")

    def __init__(self, pool: Pool, *, bins: int, name: str) -> None:
        super().__init__(pool)
        if bins < 1:
            raise ValueError(f"{name}: bins must be at least 1, got {bins}")
        self.bins = bins
        self.difficulty = required(pool, "difficulty", name)
        self.bin_of = bin_index(self.difficulty, bins)
        self._members = [(self.bin_of == i).nonzero().flatten() for i in range(bins)]

    def probabilities(self) -> Float[Tensor, " K"]:
        """P of each bin, as it stands."""
        raise NotImplementedError

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        taken = self._divide(count)
        parts = [
            members[torch.randperm(len(members), generator=self.generator)[:number]]
            for members, number in zip(self._members, taken.tolist(), strict=True)
        ]
        return torch.cat(parts)

    def _divide(self, count: int) -> Int[Tensor, " K"]:
        """How many prompts each bin gives."""
        sizes = torch.tensor([len(members) for members in self._members])
        taken = torch.zeros_like(sizes)
        # Never quite 0: a bin that is left over must be drawn, however improbable it is.
        p = self.probabilities().clamp(min=1e-30)
        while missing := count - int(taken.sum()):
            drawn = torch.multinomial(
                torch.where(taken < sizes, p, 0),
                missing,
                replacement=True,
                generator=self.generator,
            )
            taken = torch.minimum(taken + drawn.bincount(minlength=self.bins), sizes)
        return taken

    def metrics(self) -> dict[str, float]:
        """The mean bin under P."""
        index = torch.arange(self.bins, dtype=torch.float64)
        return {"sampler/bin": (self.probabilities() * index).sum().item()}


class E2H(_Binned):
    """Easy to hard (arXiv 2506.06632): a schedule over the bins of a fixed difficulty.

    Progress is t/T, t the calls of ``next`` so far and T the run's steps, at most 1. Refills are
    calls too. Decision: a run that is resumed with another number of steps goes on under the
    schedule of the new one.
    """

    fixed = (*_Binned.fixed, "schedule")
    moving = (*Drawing.moving, "calls")

    def __init__(
        self, pool: Pool, *, schedule: Literal["cosine", "gaussian"], bins: int = BINS
    ) -> None:
        """Starts with the easiest bin in front.

        Args:
            pool: The run's.
            schedule: One of `SCHEDULES`.
            bins: K, at least 1.

        Raises:
            ValueError: The pool has no difficulty or no number of steps, or there is no such
                schedule.
        """
        if schedule not in SCHEDULES:
            raise ValueError(f"e2h: schedule must be one of {list(SCHEDULES)}, got {schedule!r}")
        super().__init__(pool, bins=bins, name=f"e2h-{schedule}")
        self.schedule = schedule
        self.calls = 0
        self._steps: int = required(pool, "steps", f"e2h-{schedule}")

    @property
    def progress(self) -> float:
        """t/T in [0, 1]."""
        return min(1.0, self.calls / self._steps)

    def probabilities(self) -> Float[Tensor, " K"]:
        """P of each bin for the next call."""
        return SCHEDULES[self.schedule](self.progress, self.bins)

    def next(self, count: int) -> Int[Tensor, " count"]:
        """As `Drawing.next`; moves the schedule on by one call, unless it asks for nothing."""
        chosen = super().next(count)
        self.calls += count > 0
        return chosen

    def metrics(self) -> dict[str, float]:
        """The mean bin under P, and t/T."""
        return {**super().metrics(), "sampler/progress": self.progress}


class SEC(_Binned):
    """Self-evolving curriculum (arXiv 2505.14970): a bandit whose arms are the bins.

    ``Q <- (1 - a) Q + a mean|A|`` of the bin's groups in a step, from 0, and
    ``P = softmax(Q / tau)``.

    Decision: groups whose advantage nobody knows (NaN) are left out, and a bin without any other
    keeps its Q.
    """

    fixed = (*_Binned.fixed, "rate", "temperature")
    moving = (*Drawing.moving, "q")

    def __init__(
        self, pool: Pool, *, rate: float = 0.1, temperature: float = 1.0, bins: int = BINS
    ) -> None:
        """All bins are equally likely.

        Args:
            pool: The run's.
            rate: a in (0, 1].
            temperature: tau, above 0.
            bins: K, at least 1.

        Raises:
            ValueError: The pool has no difficulty, or an argument lies outside its range.
        """
        super().__init__(pool, bins=bins, name="sec")
        if not 0 < rate <= 1:
            raise ValueError(f"sec: rate must lie in (0, 1], got {rate}")
        if not temperature > 0:
            raise ValueError(f"sec: temperature must be above 0, got {temperature}")
        self.rate, self.temperature = rate, temperature
        self.q = torch.zeros(bins, dtype=torch.float64)

    def probabilities(self) -> Float[Tensor, " K"]:
        """P of each bin, as it stands."""
        return torch.softmax(self.q / self.temperature, 0)

    def _learn(self, feedback: Feedback) -> None:
        """Moves Q of the bins that were seen."""
        reward = feedback.mean_abs_advantage
        known = ~reward.isnan()
        index = self.bin_of[feedback.prompt[known]]
        count = index.bincount(minlength=self.bins)
        mean = index.bincount(reward[known], minlength=self.bins) / count.clamp(min=1)
        moved = (1 - self.rate) * self.q + self.rate * mean
        self.q = torch.where(count > 0, moved, self.q)
