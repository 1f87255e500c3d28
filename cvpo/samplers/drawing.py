"""What samplers that draw at random share."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cvpo.samplers.interface import Feedback, Pool
from cvpo.trackers import Restorable


class Drawing(Restorable):
    """A sampler with a generator of its own. A child says how it chooses, and what it learns.

    Decision: a call for more prompts than there are takes all of them, as often as they fit, and
    then chooses the rest; so prompts repeat within a call only where they must.
    """

    fixed: ClassVar[tuple[str, ...]] = ("num_prompts",)
    moving: ClassVar[tuple[str, ...]] = ("generator",)

    def __init__(self, pool: Pool) -> None:
        """Starts the generator from the pool's seed."""
        self.num_prompts = pool.num_prompts
        self.generator = torch.Generator().manual_seed(int(pool.seed))

    def next(self, count: int) -> Int[Tensor, " count"]:
        """``count`` prompts, distinct where there are as many.

        Raises:
            ValueError: ``count`` is negative.
        """
        check_count(type(self).__name__, count)
        if count <= self.num_prompts:
            return self._choose(count)
        passes, rest = divmod(count, self.num_prompts)
        return torch.cat([torch.arange(self.num_prompts).repeat(passes), self._choose(rest)])

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        """``count`` distinct prompts, at most as many as there are."""
        raise NotImplementedError

    def observe(self, feedback: Feedback) -> None:
        """Learns from a step's rollouts.

        Raises:
            ValueError: As `Feedback.checked`. Nothing is changed.
        """
        self._learn(feedback.checked(self.num_prompts))

    def _learn(self, feedback: Feedback) -> None:
        """Takes in checked feedback; by default there is nothing to learn."""

    def metrics(self) -> dict[str, float]:
        """Nothing to say."""
        return {}

    def _candidates(self, count: int) -> Int[Tensor, " M"]:
        """So many distinct prompts, or all, in random order."""
        return torch.randperm(self.num_prompts, generator=self.generator)[:count]


def check_count(owner: str, count: int) -> None:
    """Refuses to choose fewer than no prompts.

    Raises:
        ValueError: ``count`` is negative.
    """
    if count < 0:
        raise ValueError(f"{owner}: {count} prompts asked for")


def checked_candidates(owner: str, candidates: float) -> int:
    """How many candidates there are for each prompt taken.

    Raises:
        ValueError: ``candidates`` is not whole or below 1.
    """
    if not (candidates >= 1 and float(candidates).is_integer()):
        raise ValueError(f"{owner}: candidates must be whole and at least 1, got {candidates}")
    return int(candidates)


def nearest(distance: Float[Tensor, " M"], count: int) -> Int[Tensor, " count"]:
    """The places of the ``count`` smallest distances, ascending; the first of equal ones wins."""
    return torch.argsort(distance, stable=True)[:count]
