"""VCRL (arXiv 2509.19803): trains on groups whose rewards vary, and replays the best of them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cvpo.samplers.drawing import Drawing
from cvpo.samplers.interface import Feedback, Pool
from cvpo.trackers import checked_counts


def variance_share(
    trials: Float[Tensor, " M"], successes: Float[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """p: a group's reward variance over the largest that a group of its size can have.

    ``s2 = k (G - k) / (G (G - 1))`` against ``G / (4 (G - 1))`` for even G and ``(G + 1) / (4 G)``
    for odd G.

    Decision: a group of one says nothing of its variance, p = 0. Partial credit may lie between
    the two halves of an odd group; p is at most 1.

    Args:
        trials: G, whole, [M].
        successes: k in [0, G], [M].

    Returns:
        p in [0, 1], [M].
    """
    G, k = trials.double(), successes.double()
    # Both sides times 4 G (G - 1): an even group's maximum is G^2, an odd one's G^2 - 1.
    largest = (G.square() - G.remainder(2)).clamp(min=1)
    return (4 * k * (G - k) / largest).clamp(max=1).masked_fill(G < 2, 0)


class VCRL(Drawing):
    """Keeps a group if its p is at least kappa, and refills from a memory bank.

    Fresh prompts come at random. What was kept enters the bank with priority P; when ``keep`` has
    dropped some, ``next`` serves the bank first, highest P first, and what it served is kept
    without another test. An entry is served at most twice. kappa is .3 for the first 20 steps,
    then .8.

    Decisions that the source leaves open:

    - A prompt stands in the bank once. P starts at the p of its first group that is kept; each
      later group moves it, ``P <- .9 P + .1 p``. A fresh group that is kept allows two replays.
    - A step is a call of ``observe``. What a step has handed out is neither replayed in it nor, as
      long as there are other prompts, drawn afresh.
    - A shortage that nobody refilled within its step is made up for in the next one.
    - Equal priorities are served in the order of prompt ids.
    """

    fixed = (
        *Drawing.fixed,
        "kappa_early",
        "kappa_late",
        "early_steps",
        "momentum",
        "max_replays",
    )
    moving = (*Drawing.moving, "steps", "missing", "priority", "replays_left", "handed", "replayed")

    def __init__(
        self,
        pool: Pool,
        *,
        kappa_early: float = 0.3,
        kappa_late: float = 0.8,
        early_steps: int = 20,
        momentum: float = 0.9,
        max_replays: int = 2,
    ) -> None:
        """Starts with an empty bank.

        Args:
            pool: The run's.
            kappa_early: Smallest p that is kept in the first steps, in [0, 1].
            kappa_late: The same later on.
            early_steps: How many steps are the first, at least 0.
            momentum: Of P, in [0, 1].
            max_replays: How often an entry of the bank is served, at least 0.

        Raises:
            ValueError: An argument lies outside its range.
        """
        for name, value in (
            ("kappa_early", kappa_early),
            ("kappa_late", kappa_late),
            ("momentum", momentum),
        ):
            if not 0 <= value <= 1:
                raise ValueError(f"vcrl: {name} must lie in [0, 1], got {value}")
        for name, count in (("early_steps", early_steps), ("max_replays", max_replays)):
            if count < 0:
                raise ValueError(f"vcrl: {name} must be at least 0, got {count}")
        super().__init__(pool)
        self.kappa_early, self.kappa_late, self.early_steps = kappa_early, kappa_late, early_steps
        self.momentum, self.max_replays = momentum, max_replays
        self.steps = self.missing = 0
        self.priority = torch.zeros(self.num_prompts, dtype=torch.float64)
        # A prompt is in the bank while it may still be replayed.
        self.replays_left = torch.zeros(self.num_prompts, dtype=torch.int64)
        self.handed = torch.zeros(self.num_prompts, dtype=torch.bool)
        self.replayed = torch.zeros(self.num_prompts, dtype=torch.bool)

    @property
    def kappa(self) -> float:
        """The smallest p that is kept now."""
        return self.kappa_early if self.steps < self.early_steps else self.kappa_late

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        bank = ((self.replays_left > 0) & ~self.handed).nonzero().flatten()
        best = torch.argsort(self.priority[bank], descending=True, stable=True)
        again = bank[best[: min(count, self.missing)]]
        self.missing = 0
        self.replays_left[again] -= 1
        self.replayed[again] = True
        self.handed[again] = True
        # Prompts in random order, those that were handed out last; a replay never comes twice.
        order = torch.rand(self.num_prompts, generator=self.generator, dtype=torch.float64)
        order += self.handed
        order[again] += 2
        fresh = torch.argsort(order)[: count - len(again)]
        self.replayed[fresh] = False
        self.handed[fresh] = True
        return torch.cat([again, fresh])

    def keep(
        self,
        prompt: Int[Tensor, " M"],
        trials: Float[Tensor, " M"],
        successes: Float[Tensor, " M"],
    ) -> Bool[Tensor, " M"]:
        """Which groups to train on; the bank takes them in.

        Args:
            prompt: What the last ``next`` chose, [M].
            trials: Rollouts of each group, [M].
            successes: In 0..trials, [M].

        Returns:
            Whether a group is trained on, [M].

        Raises:
            ValueError: An unknown prompt or impossible count; names the entry. Nothing is changed.
        """
        prompt, trials, successes = checked_counts(
            "keep", prompt, trials, successes, num_prompts=self.num_prompts
        )
        share = variance_share(trials, successes)
        replayed = self.replayed[prompt]
        kept = replayed | (share >= self.kappa)
        before = self.priority[prompt]
        moved = self.momentum * before + (1 - self.momentum) * share
        self.priority[prompt] = torch.where(before > 0, moved, share * kept)
        self.replays_left[prompt[kept & ~replayed]] = self.max_replays
        self.replayed[prompt] = False
        self.missing = int((~kept).sum())
        return kept

    def _learn(self, feedback: Feedback) -> None:  # noqa: ARG002  (a step is over)
        """Ends the step. What its groups said, ``keep`` has taken in."""
        self.steps += 1
        self.handed.zero_()

    def metrics(self) -> dict[str, float]:
        """The threshold, and how many prompts could be replayed."""
        return {
            "sampler/kappa": self.kappa,
            "sampler/bank": float((self.replays_left > 0).sum()),
        }
