"""From rewards and values to A': observe, then weigh (algorithm 1; 2, lines 5-12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cvpo import (
    BetaTracker,
    DifficultyCurriculum,
    Method,
    RoundClock,
    RoundReport,
    advantage_moments,
    estimate_advantages,
    mean_and_deviation,
    stochasticity,
    trajectory_std,
    weight_diagnostics,
    weighted_advantages,
)
from train.config import Config
from train.rollout.batch import Batch
from train.seeds import generator_of
from train.timing import Phases


@dataclass(frozen=True)
class Weighed:
    """What a step's trajectories are worth."""

    advantages: Float[Tensor, "B T"]
    """A', ready for the policy loss."""
    returns: Float[Tensor, "B T"] | None
    """The critic's targets."""
    raw: Float[Tensor, "B T"]
    """A before whitening and weights."""
    w_s: Float[Tensor, " B"]
    w_d: Float[Tensor, " B"]
    rho: Float[Tensor, " B"]
    sigma: Float[Tensor, " B"] | None
    mu: Float[Tensor, " B"] | None
    round: int
    """The curriculum's round that this step belongs to, from 0."""
    diagnostics: dict[str, float]


@dataclass(frozen=True)
class Round:
    """A round that has ended: its report, and what the run log keeps of every prompt."""

    number: int
    report: RoundReport
    rows: dict[str, Any]


class Weigher:
    """Keeps the curriculum, and turns each batch into weighted advantages."""

    def __init__(self, config: Config, method: Method, *, num_prompts: int, phases: Phases) -> None:
        """Nothing has been observed yet.

        Args:
            config: The run's.
            method: The declaration, with the run's overrides.
            num_prompts: Size of the problem table.
            phases: Takes the seconds of `weights` (W_S) and `tracker` (W_D).
        """
        self.config, self.method, self.phases = config, method, phases
        self.curriculum = DifficultyCurriculum(num_prompts, config=config.curriculum.declared())
        self.clock = RoundClock(num_prompts, round_steps=config.curriculum.round_steps)

    @property
    def tracker(self) -> BetaTracker:
        """The curriculum's tracker. It watches under every method."""
        return self.curriculum.tracker

    def weigh(
        self,
        step: int,
        batch: Batch,
        values: Tensor | None,
        entropy: Float[Tensor, "B T"],
        ends: Float[Tensor, " B"] | None = None,
    ) -> Weighed:
        """A' and the critic's targets of a batch.

        Args:
            step: Seeds the `shuffled` arm.
            batch: The step's trajectories.
            values: The critic's [B, T]; None without a critic.
            entropy: Token entropies [B, T].
            ends: What each trajectory's return ends with, [B]; None: its reward.
        """
        mask, lengths = batch.response_mask, batch.lengths
        estimate = estimate_advantages(
            self.method,
            batch.reward if ends is None else ends,
            batch.prompt_id,
            mask,
            values=values,
            gamma=self.config.algorithm.gamma,
        )
        entropy_mean = entropy.masked_fill(~mask, 0).sum(1) / lengths.clamp(min=1)
        ones = torch.ones(len(batch))
        with self.phases("tracker"):
            self.curriculum.observe(**batch.observed)
            w_d = self.curriculum.weight(batch.prompt_id) if self.method.curriculum else ones
            rho = self.tracker.rho[batch.prompt_id]
        w_s, sigma, mu = ones, None, None
        if values is not None:
            with self.phases("weights"):
                sigma = trajectory_std(values, mask)
                found = stochasticity(
                    sigma,
                    batch.prompt_id,
                    batch.correct,
                    config=self.config.stochasticity.declared(),
                    valid=lengths > 0,
                    entropy=entropy_mean,
                    generator=generator_of(self.config.seed, "shuffled arm", step),
                )
                mu = found.mu
                if self.method.stochasticity:
                    w_s = found.weight
        mean, deviation = mean_and_deviation(advantage_moments(estimate.advantages, mask))
        diagnostics = weight_diagnostics(
            w_s=w_s,
            w_d=w_d,
            correct=batch.correct,
            advantage_sum=estimate.advantages.sum(1),
            lengths=lengths,
            sigma=sigma,
            entropy=entropy_mean,
            surprise=None if values is None else (batch.reward - values[:, 0]).abs(),
        )
        return Weighed(
            advantages=weighted_advantages(
                estimate.advantages,
                mask,
                w_s=w_s,
                w_d=w_d,
                whiten=self.config.algorithm.whiten,
                mean=mean,
                deviation=deviation,
            ),
            returns=estimate.returns,
            raw=estimate.advantages,
            w_s=w_s,
            w_d=w_d,
            rho=rho,
            sigma=sigma,
            mu=mu,
            round=self.curriculum.rounds,
            diagnostics={**diagnostics, "advantage/sd": deviation},
        )

    def end_step(self, batch: Batch) -> Round | None:
        """Ends the round if the step completes it. A switch of phase acts from the next step on."""
        with self.phases("tracker"):
            if not self.clock.tick(len(batch.observed["prompt"])):
                return None
            curriculum, number, phase = (
                self.curriculum,
                self.curriculum.rounds,
                self.curriculum.phase,
            )
            every = torch.arange(len(self.tracker.alpha))
            rows = {
                "prompt_id": every,
                "visits": self.tracker.visits.clone(),
                "trials": curriculum.round_trials.long(),
                "successes": curriculum.round_successes.clone(),
                "alpha": self.tracker.alpha.clone(),
                "beta": self.tracker.beta.clone(),
                "rho": self.tracker.rho,
                "delta": self.tracker.delta.clone(),
                "w_d": curriculum.weight(every),
                "phase": [phase] * len(every),
            }
            return Round(number, curriculum.end_round(), rows)

    def state_dict(self) -> dict[str, Any]:
        """The curriculum and how far its round is."""
        return {"curriculum": self.curriculum.state_dict(), "clock": self.clock.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: It does not fit this problem set or configuration.
        """
        self.curriculum.load_state_dict(state["curriculum"])
        self.clock.load_state_dict(state["clock"])
