"""Corrects for a rollout engine whose probabilities are not quite the trainer's."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


@torch.no_grad()
def truncated_importance(
    trainer_log_probs: Float[Tensor, "B T"],
    rollout_log_probs: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    cap: float,
) -> Float[Tensor, "B T"]:
    """Truncated importance weights, ``min(pi_trainer(token) / pi_rollout(token), cap)``.

    Two engines that hold the same weights still round differently, so a rollout is drawn from a
    policy slightly other than the one that is trained. A token's loss times its weight has the
    trained policy's expectation, up to what the cap cuts off; the cap keeps the variance finite
    (truncated importance sampling; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training").

    Args:
        trainer_log_probs: Recomputed by the trainer before the update, [B, T].
        rollout_log_probs: Of the engine that drew the tokens, [B, T], at the same temperature.
        mask: Nonzero on response tokens, [B, T]; elsewhere there may be anything, NaN included.
        cap: Largest weight, at least 1: below it even equal policies would be reweighed.

    Returns:
        Constants [B, T] in [0, cap], in float32 at least; 0 on masked slots.

    Raises:
        ValueError: Shapes differ, or the cap is below 1.
    """
    shapes = [tuple(x.shape) for x in (trainer_log_probs, rollout_log_probs, mask)]
    if len(set(shapes)) > 1:
        raise ValueError(f"truncated_importance: shapes differ: {shapes}")
    if not 1 <= cap < math.inf:
        raise ValueError(f"truncated_importance: cap must be finite and at least 1, got {cap}")
    masked = ~mask.bool()
    dtype = torch.promote_types(trainer_log_probs.dtype, rollout_log_probs.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    difference = trainer_log_probs.to(dtype) - rollout_log_probs.to(dtype)
    return difference.exp().clamp(max=cap).masked_fill(masked, 0)
