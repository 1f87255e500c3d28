"""MoPPS (arXiv 2507.04632): Thompson sampling of the prompts that are solved half of the time.

Its rule runs on any tracker (`Thompson`), and its probabilities make a weight
(`thompson_weight`), so that what the tracker, the rule and the schedule contribute can be told
apart.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cvpo.samplers.drawing import checked_candidates
from cvpo.samplers.interface import Feedback, Pool, required
from cvpo.samplers.near_half import NearHalf
from cvpo.trackers import BetaTracker, BOTSTracker, DBBTracker, MovingAverageTracker, Tracker


class Thompson(NearHalf):
    """Draws c times as many candidates as it needs, and a success rate for each from its posterior.

    Of ``g ~ Beta(alpha, beta)`` the B with the smallest ``(g - 1/2)^2`` are taken, among c B
    candidates drawn without replacement (or all prompts, where there are fewer).
    """

    fixed = (*NearHalf.fixed, "candidates")
    moving = (*NearHalf.moving, "tracker")

    def __init__(self, pool: Pool, *, tracker: Tracker, candidates: int = 16) -> None:
        """Nothing is observed yet.

        Args:
            pool: The run's.
            tracker: Of the pool's prompts, unobserved.
            candidates: c, at least 1; the source takes 16 or 8.

        Raises:
            ValueError: c is not whole or below 1.
        """
        super().__init__(pool)
        self.candidates = checked_candidates("mopps", candidates)
        self.tracker = tracker

    def _choose(self, count: int) -> Int[Tensor, " count"]:
        prompt = self._candidates(self.candidates * count)
        solved = torch._standard_gamma(self.tracker.alpha[prompt], self.generator)
        failed = torch._standard_gamma(self.tracker.beta[prompt], self.generator)
        return self._take(prompt, solved / (solved + failed), count)

    def _learn(self, feedback: Feedback) -> None:
        """Updates the posterior."""
        self.tracker.observe(feedback.prompt, feedback.trials, feedback.successes)


def mopps(pool: Pool, *, discount: float = 0.5, candidates: int = 16) -> Thompson:
    """MoPPS: ``a <- l a + (1 - l) + s`` is CVPO's tracker with discount l.

    Args:
        pool: The run's.
        discount: l in (0, 1]. The source takes 1 on MATH and .5 on everything else, the default.
        candidates: c, as in `Thompson`.
    """
    tracker = BetaTracker(pool.num_prompts, discount=discount)
    return Thompson(pool, tracker=tracker, candidates=candidates)


def dbb(pool: Pool, *, discount: float = 0.5, candidates: int = 16) -> Thompson:
    """MoPPS's rule on `DBBTracker`; arguments as there and in `Thompson`."""
    tracker = DBBTracker(pool.num_prompts, discount=discount)
    return Thompson(pool, tracker=tracker, candidates=candidates)


def bots(
    pool: Pool, *, forgetting: float = 0.2, prior_share: float = 0.2, candidates: int = 16
) -> Thompson:
    """MoPPS's rule on `BOTSTracker`; arguments as there and in `Thompson`.

    Raises:
        ValueError: The pool has no difficulty.
    """
    tracker = BOTSTracker(
        pool.num_prompts,
        difficulty=required(pool, "difficulty", "bots"),
        forgetting=forgetting,
        prior_share=prior_share,
    )
    return Thompson(pool, tracker=tracker, candidates=candidates)


def moving_average(pool: Pool, *, window: int = 5, candidates: int = 16) -> Thompson:
    """MoPPS's rule on `MovingAverageTracker`; arguments as there and in `Thompson`."""
    tracker = MovingAverageTracker(pool.num_prompts, window=window)
    return Thompson(pool, tracker=tracker, candidates=candidates)


def thompson_weight(
    alpha: Float[Tensor, " N"], beta: Float[Tensor, " N"], *, candidates: float = 16
) -> Float[Tensor, " N"]:
    """MoPPS's posterior used as a weight: how much likelier than the average it takes a prompt.

    Of many candidates MoPPS takes the share 1/c whose draw g lies nearest to 1/2, that is those
    with ``|g - 1/2| <= tau``. So ``w_i = c P(|g_i - 1/2| <= tau)``, with tau found by bisection
    such that the mean of w is 1.

    Decision: g is taken as normal with the mean and variance of Beta(alpha, beta). That is close
    from a few observations on; Beta(1, 1) and other wide posteriors leak a little beyond [0, 1].

    Args:
        alpha: Of every prompt's posterior, at least 0, [N].
        beta: Likewise, [N]. Where one of the two is 0 the rate is certain; both must not be.
        candidates: c, candidates for each prompt taken, from 1, where all weights are 1, to a
            million: beyond it, rounding would decide.

    Returns:
        [N], at least 0, mean 1, float64.

    Raises:
        ValueError: c or a posterior lies outside its range, or shapes differ.
    """
    if not 1 <= candidates <= 1e6:
        raise ValueError(
            f"thompson_weight: candidates must be from 1 to a million, got {candidates}"
        )
    if alpha.ndim != 1 or alpha.shape != beta.shape:
        raise ValueError(
            "thompson_weight: alpha and beta must both be [N], got "
            f"{tuple(alpha.shape)}, {tuple(beta.shape)}"
        )
    alpha, beta = alpha.double(), beta.double()
    total = alpha + beta
    proper = (alpha >= 0) & (beta >= 0) & (total > 0) & total.isfinite()
    if not bool(proper.all()):
        at = int((~proper).nonzero()[0])
        raise ValueError(
            "thompson_weight: alpha and beta must be finite, at least 0 and not both 0, prompt "
            f"{at} has {alpha[at].item():g}, {beta[at].item():g}"
        )
    mean = alpha / total
    deviation = (mean * (1 - mean) / (total + 1)).sqrt().clamp(min=1e-9)

    def within(tau: float) -> Float[Tensor, " N"]:
        below, above = ((0.5 + side * tau - mean) / deviation for side in (-1, 1))
        inside: Tensor = torch.special.ndtr(above) - torch.special.ndtr(below)
        return inside

    # No posterior is wider than that of Beta(0, 0), whose deviation is 1/2.
    low, high = 0.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        if within(middle).mean() < 1 / candidates:
            low = middle
        else:
            high = middle
    chance = within(high)
    return chance / chance.mean()
