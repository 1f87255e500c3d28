"""Samplers that learn nothing."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from cvpo.samplers.drawing import Drawing, check_count
from cvpo.samplers.interface import Feedback, Pool
from cvpo.trackers import Restorable


class ShuffledEpochs(Restorable):
    """Every prompt once an epoch, in a new random order each time. The default.

    A batch that crosses the end of an epoch takes the rest from the next one.
    """

    fixed = ("num_prompts", "seed")
    moving = ("drawn",)

    def __init__(self, pool: Pool) -> None:
        """Starts before the first epoch."""
        self.num_prompts = pool.num_prompts
        self.seed = int(pool.seed)  # a NumPy integer would overflow in `_mix`
        self.drawn = 0

    def next(self, count: int) -> Int[Tensor, " count"]:
        """The next ``count`` prompts in order; a prompt repeats only over an epoch's border.

        Raises:
            ValueError: ``count`` is negative.
        """
        check_count(type(self).__name__, count)
        chosen: list[Tensor] = []
        while count > 0:
            epoch, position = divmod(self.drawn, self.num_prompts)
            generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
            order = torch.randperm(self.num_prompts, generator=generator)
            part = order[position : position + count]
            chosen.append(part)
            self.drawn += len(part)
            count -= len(part)
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn.

        Raises:
            ValueError: As `Feedback.checked`.
        """
        feedback.checked(self.num_prompts)

    def metrics(self) -> dict[str, float]:
        """Passes over the prompts so far."""
        return {"sampler/epoch": self.drawn / self.num_prompts}


class Uniform(Drawing):
    """Prompts drawn independently at every step, without a repeat within one step."""

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        return self._candidates(count)


def _mix(seed: int, epoch: int) -> int:
    """A seed of its own for each epoch: neighbouring run seeds must not share an order."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % (1 << 63)
