"""Samplers that take the prompts which are solved half of the time: by a critic, by the truth."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cvpo.samplers.drawing import Drawing, checked_candidates, nearest
from cvpo.samplers.interface import Pool, required
from cvpo.trackers import checked_rates


class NearHalf(Drawing):
    """Takes the candidates whose success rate, as a child makes it out, is nearest to 1/2."""

    moving = (*Drawing.moving, "distance")

    def __init__(self, pool: Pool) -> None:
        """Nothing is drawn yet."""
        super().__init__(pool)
        self.distance = math.nan

    def _take(
        self, prompt: Int[Tensor, " M"], rate: Float[Tensor, " M"], count: int
    ) -> Int[Tensor, " count"]:
        distance = (rate - 0.5).abs()
        chosen = nearest(distance, count)
        if count:
            self.distance = distance[chosen].mean().item()
        return prompt[chosen]

    def metrics(self) -> dict[str, float]:
        """How near to 1/2 the prompts were that were taken last."""
        return {"sampler/distance": self.distance}


class PCL(NearHalf):
    """Prompt curriculum learning (arXiv 2510.01135): the critic predicts what is worth rolling out.

    Of 4 m candidates, drawn without replacement, the m whose predicted success rate
    ``(V(s_0) + 1) / 2`` is nearest to 1/2. Values live in [-1, 1].
    """

    fixed = (*Drawing.fixed, "candidates")

    def __init__(self, pool: Pool, *, candidates: int = 4) -> None:
        """Nothing is drawn yet.

        Args:
            pool: The run's.
            candidates: c, candidates for each prompt taken, at least 1.

        Raises:
            ValueError: The pool has no predictions, or c is not whole or below 1.
        """
        super().__init__(pool)
        self.candidates = checked_candidates("pcl", candidates)
        self._predict = required(pool, "predict", "pcl")

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        prompt = self._candidates(self.candidates * count)
        if not count:
            return prompt
        value = torch.as_tensor(self._predict(prompt)).detach().to("cpu", torch.float64)
        if value.shape != prompt.shape or not bool(value.isfinite().all()):
            raise ValueError(
                f"pcl: `predict` must give one finite value for each of {len(prompt)} prompts, got "
                f"{tuple(value.shape)}"
            )
        return self._take(prompt, (value + 1) / 2, count)


class Oracle(NearHalf):
    """The ceiling: of all prompts those whose true success rate is nearest to 1/2.

    Ties are broken at random.
    """

    def __init__(self, pool: Pool) -> None:
        """Nothing is drawn yet.

        Raises:
            ValueError: The pool does not know the truth.
        """
        super().__init__(pool)
        self._truth = required(pool, "truth", "oracle")

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        prompt = self._candidates(self.num_prompts)
        rate = checked_rates("oracle: truth", self._truth(), self.num_prompts)
        return self._take(prompt, rate[prompt], count)
