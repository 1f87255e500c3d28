"""What a sampler is given, what it is told, and the methods it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from cvpo.trackers import checked_counts, checked_rates


@dataclass(frozen=True)
class Pool:
    """All that a sampler may know of a run. None: this run cannot say; see `required`."""

    num_prompts: int
    """N; prompts are 0..N-1."""
    seed: int
    """Of every random draw."""
    steps: int | None = None
    """Optimiser steps of the whole run."""
    rollouts: int | None = None
    """Responses to a prompt."""
    difficulty: Float[Tensor, " N"] | None = None
    """Fixed, in [0, 1]: the failure rate of the starting policy."""
    predict: Callable[[Int[Tensor, " M"]], Float[Tensor, " M"]] | None = None
    """The critic's V(s_0) of prompts, as it stands when called, in [-1, 1]."""
    truth: Callable[[], Float[Tensor, " N"]] | None = None
    """True success rates, as they stand when called; a simulation's only."""

    def __post_init__(self) -> None:
        """Refuses what no sampler could work with.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        if self.num_prompts < 1:
            raise ValueError(f"a sampler needs at least one prompt, got {self.num_prompts}")
        for name in ("steps", "rollouts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Pool: {name} must be at least 1, got {value}")
        if self.difficulty is not None:
            checked = checked_rates("Pool: difficulty", self.difficulty, self.num_prompts)
            object.__setattr__(self, "difficulty", checked)


_REMEDY = {
    "steps": "say how many optimiser steps the run has",
    "difficulty": "give every problem a `difficulty`, the starting policy's failure rate",
    "predict": "train with a critic",
    "truth": "only a simulation knows the true success rates",
}


def required(pool: Pool, field: str, sampler: str) -> Any:
    """A field of the pool that a sampler cannot do without.

    Raises:
        ValueError: It is None; says which sampler, what is missing and what to do.
    """
    value = getattr(pool, field)
    if value is None:
        raise ValueError(
            f"{sampler} needs `{field}`, which this run lacks; {_REMEDY[field]}, or choose another "
            "sampler"
        )
    return value


@dataclass(frozen=True)
class Feedback:
    """What a step's rollouts say of its prompts, one entry for each group; discarded groups too."""

    prompt: Int[Tensor, " M"]
    trials: Float[Tensor, " M"]
    successes: Float[Tensor, " M"]
    mean_abs_advantage: Float[Tensor, " M"]
    """Of the group's trajectories; NaN where nobody knows, as of most discarded groups."""
    value_first: Float[Tensor, " M"] | None = None
    """The critic's V(s_0), where there is a critic; NaN where nobody knows."""

    def checked(self, num_prompts: int) -> Feedback:
        """The same on the CPU, as int64 and float64. Samplers learn from nothing else.

        Args:
            num_prompts: N of the sampler's pool.

        Raises:
            ValueError: Shapes differ, a prompt is not one of 0..N-1, a count is impossible, an
                advantage negative, or a number infinite; names the entry.
        """
        prompt, trials, successes = checked_counts(
            "Feedback", self.prompt, self.trials, self.successes, num_prompts=num_prompts
        )
        size = _known_or_nan("mean_abs_advantage", self.mean_abs_advantage, len(prompt), least=0)
        first = self.value_first
        if first is not None:
            first = _known_or_nan("value_first", first, len(prompt), least=-math.inf)
        return Feedback(prompt, trials, successes, size, first)


def _known_or_nan(
    field: str, x: Shaped[Tensor, " M"], entries: int, *, least: float
) -> Float[Tensor, " M"]:
    x = torch.as_tensor(x).detach().to("cpu", torch.float64)
    if x.shape != (entries,):
        raise ValueError(f"Feedback: {field} must be [{entries}], got {tuple(x.shape)}")
    possible = x.isnan() | (x.isfinite() & (x >= least))
    if not bool(possible.all()):
        at = int((~possible).nonzero()[0])
        raise ValueError(
            f"Feedback: {field} must be finite and at least {least}, or NaN where nobody knows; "
            f"entry {at} has {x[at].item():g}"
        )
    return x


class Sampler(Protocol):
    """Chooses prompts. State is explicit, so that a resumed run chooses the same ones."""

    def next(self, count: int) -> Int[Tensor, " count"]:
        """The prompts to roll out next, as ids."""

    def observe(self, feedback: Feedback) -> None:
        """Takes in what the rollouts said: once a step, with all its groups.

        `Feedback.checked` refuses what cannot be.
        """

    def metrics(self) -> dict[str, float]:
        """Scalars to log, each under a name of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; refuses one with other fields or of another problem set."""


@runtime_checkable
class Selective(Sampler, Protocol):
    """A sampler that also looks at what was rolled out, before anything is trained on.

    Whoever rolls out drops the groups that are not kept, counts them as discarded, feeds them back
    all the same, and asks `next` for as many again, a bounded number of times a step.
    """

    def keep(
        self,
        prompt: Int[Tensor, " M"],
        trials: Float[Tensor, " M"],
        successes: Float[Tensor, " M"],
    ) -> Bool[Tensor, " M"]:
        """Which groups to train on. Called once after each `next`, with that call's groups."""
