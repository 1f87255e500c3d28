"""AdaRFT (arXiv 2504.05520): a target difficulty that follows the policy's accuracy."""

from __future__ import annotations

import math

from jaxtyping import Int
from torch import Tensor

from cvpo.samplers.drawing import Drawing, nearest
from cvpo.samplers.interface import Feedback, Pool, required


class AdaRFT(Drawing):
    """The prompts whose fixed difficulty ``d = 100 difficulty`` is nearest to a target T.

    ``T <- clip(T + eta tanh(k (R - goal)), 0, 100)`` after each step, R the mean accuracy over its
    rollouts, discarded groups included.

    Decision: ties are broken at random. Measured difficulties take few values; a fixed order
    would roll out the same few prompts until T moves.
    """

    fixed = (*Drawing.fixed, "difficulty", "rate", "sharpness", "goal")
    moving = (*Drawing.moving, "target")

    def __init__(
        self,
        pool: Pool,
        *,
        rate: float = 50.0,
        sharpness: float = 2.0,
        goal: float = 0.5,
        start: float = 0.0,
    ) -> None:
        """The target starts at the easiest.

        Args:
            pool: The run's.
            rate: eta, the target's largest step, at least 0.
            sharpness: k, at least 0.
            goal: Accuracy at which the target rests, in [0, 1].
            start: T before the first step, in [0, 100].

        Raises:
            ValueError: The pool has no difficulty, or an argument lies outside its range.
        """
        super().__init__(pool)
        for name, value in (("rate", rate), ("sharpness", sharpness)):
            if not 0 <= value < math.inf:
                raise ValueError(f"adarft: {name} must be finite and at least 0, got {value}")
        if not 0 <= goal <= 1:
            raise ValueError(f"adarft: goal must lie in [0, 1], got {goal}")
        if not 0 <= start <= 100:
            raise ValueError(f"adarft: start must lie in [0, 100], got {start}")
        self.difficulty = 100 * required(pool, "difficulty", "adarft")
        self.rate, self.sharpness, self.goal = rate, sharpness, goal
        self.target = float(start)

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        prompt = self._candidates(self.num_prompts)
        return prompt[nearest((self.difficulty[prompt] - self.target).abs(), count)]

    def _learn(self, feedback: Feedback) -> None:
        """Moves the target; a step without rollouts leaves it where it is."""
        trials = feedback.trials.sum().item()
        if trials > 0:
            accuracy = feedback.successes.sum().item() / trials
            step = self.rate * math.tanh(self.sharpness * (accuracy - self.goal))
            self.target = min(100.0, max(0.0, self.target + step))

    def metrics(self) -> dict[str, float]:
        """The target."""
        return {"sampler/target": self.target}
