"""W_D used as a sampler: it decides which prompts are rolled out, not what they count for."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from cvpo.curriculum import CurriculumConfig, DifficultyCurriculum, RoundClock
from cvpo.samplers.drawing import Drawing
from cvpo.samplers.interface import Feedback, Pool


class WD(Drawing):
    """Prompts drawn without replacement with probability proportional to W_D (eq. 25-26).

    The curriculum is the sampler's own: it observes, ends rounds and switches as that of a method
    whose loss is weighted, but the run's loss knows nothing of it.
    """

    moving = (*Drawing.moving, "curriculum", "clock")

    def __init__(
        self,
        pool: Pool,
        *,
        config: CurriculumConfig | None = None,
        round_steps: int | None = None,
    ) -> None:
        """Starts in the early phase with nothing observed.

        Args:
            pool: The run's.
            config: Of the curriculum; the paper's when None.
            round_steps: Steps of a round; a pass over the prompts when None.
        """
        super().__init__(pool)
        self.curriculum = DifficultyCurriculum(self.num_prompts, config=config)
        self.clock = RoundClock(self.num_prompts, round_steps=round_steps)

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        if not count:
            return torch.empty(0, dtype=torch.int64)
        # W_D is 0 only at rho = 1, which the prior keeps away; rounding must not bring it back.
        weight = self.curriculum.weight(torch.arange(self.num_prompts)).clamp(min=1e-30)
        return torch.multinomial(weight, count, generator=self.generator)

    def _learn(self, feedback: Feedback) -> None:
        """Updates the tracker, and ends a round when it is over."""
        self.curriculum.observe(feedback.prompt, feedback.trials, feedback.successes)
        if self.clock.tick(len(feedback.prompt)):
            self.curriculum.end_round()

    def metrics(self) -> dict[str, float]:
        """The phase of its curriculum."""
        return {"sampler/phase": float(self.curriculum.phase == "bottleneck")}
