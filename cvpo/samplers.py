"""Samplers choose which prompts are rolled out; W_D, by contrast, only changes what they count for.

A sampler is anything with the five methods of `Sampler`. `SAMPLERS` finds one by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cvpo.curriculum import check_fields


@dataclass(frozen=True)
class Feedback:
    """What a step's rollouts say of its prompts, one entry for each group; discarded groups too."""

    prompt: Int[Tensor, " M"]
    trials: Float[Tensor, " M"]
    successes: Float[Tensor, " M"]
    mean_abs_advantage: Float[Tensor, " M"]
    """Of the group's trajectories; for a discarded group 0, or NaN where a critic would say it."""
    value_first: Float[Tensor, " M"] | None = None
    """The critic's V(s_0), where there is a critic."""


class Sampler(Protocol):
    """Chooses prompts. State is explicit, so that a resumed run chooses the same ones."""

    def next(self, count: int) -> Int[Tensor, " count"]:
        """The prompts to roll out next, as ids."""

    def observe(self, feedback: Feedback) -> None:
        """Takes in what the rollouts said."""

    def metrics(self) -> dict[str, float]:
        """Scalars to log, each under a name of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; refuses one with other fields or of another problem set."""


class ShuffledEpochs:
    """Every prompt once an epoch, in a new random order each time. The default.

    A batch that crosses the end of an epoch takes the rest from the next one.
    """

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        """Starts before the first epoch.

        Raises:
            ValueError: No prompts.
        """
        if num_prompts < 1:
            raise ValueError(f"a sampler needs at least one prompt, got {num_prompts}")
        self.num_prompts = num_prompts
        self.seed = int(seed)  # a NumPy integer would overflow in `_mix`
        self.drawn = 0

    def next(self, count: int) -> Int[Tensor, " count"]:
        """The next ``count`` prompts in order; a prompt repeats only over an epoch's border."""
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
        """Nothing to learn."""

    def metrics(self) -> dict[str, float]:
        """Passes over the prompts so far."""
        return {"sampler/epoch": self.drawn / self.num_prompts}

    def state_dict(self) -> dict[str, Any]:
        """How many prompts were drawn, under which seed."""
        return {"num_prompts": self.num_prompts, "seed": self.seed, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: Other fields, or another number of prompts or seed.
        """
        check_fields("ShuffledEpochs", state, self.state_dict())
        for field in ("num_prompts", "seed"):
            if state[field] != getattr(self, field):
                raise ValueError(
                    f"ShuffledEpochs: the state has {field} {state[field]}, this sampler "
                    f"{getattr(self, field)}"
                )
        self.drawn = state["drawn"]


class Uniform:
    """Prompts drawn independently at every step, without a repeat within one step."""

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        """Starts the generator.

        Raises:
            ValueError: No prompts.
        """
        if num_prompts < 1:
            raise ValueError(f"a sampler needs at least one prompt, got {num_prompts}")
        self.num_prompts = num_prompts
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, count: int) -> Int[Tensor, " count"]:
        """``count`` distinct prompts.

        Raises:
            ValueError: More than there are.
        """
        if not 0 <= count <= self.num_prompts:
            raise ValueError(f"uniform: {count} distinct prompts asked of {self.num_prompts}")
        return torch.randperm(self.num_prompts, generator=self.generator)[:count]

    def observe(self, feedback: Feedback) -> None:
        """Nothing to learn."""

    def metrics(self) -> dict[str, float]:
        """Nothing to say."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"num_prompts": self.num_prompts, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: Other fields, or another number of prompts.
        """
        check_fields("Uniform", state, self.state_dict())
        if state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"Uniform: the state has {state['num_prompts']} prompts, this sampler "
                f"{self.num_prompts}"
            )
        self.generator.set_state(state["generator"])


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "shuffled-epochs": ShuffledEpochs,
    "uniform": Uniform,
}
"""A sampler's name -> its constructor ``(num_prompts, *, seed)``."""


def _mix(seed: int, epoch: int) -> int:
    """A seed of its own for each epoch: neighbouring run seeds must not share an order."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % (1 << 63)
