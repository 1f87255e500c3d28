"""Losses of section 6: sums over response tokens, divided by a count that the caller passes.

The count is that of the **whole optimiser batch**, over all ranks and micro-batches. A loss is
then a plain sum over its pieces: the gradient does not depend on how the batch is cut. (Dividing
by the micro-batch's own token count instead weighs short micro-batches up; it is the field's most
frequent silent error.)

Masked slots may hold anything, NaN and infinity included, and change neither loss nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""A token whose log-probability rose by more within one step gets no more gradient."""

REDUCTIONS = ("token", "sequence", "fixed")


@dataclass(frozen=True)
class BatchCounts:
    """Sizes of the whole optimiser batch, over all ranks and micro-batches."""

    tokens: float
    """Response tokens."""
    sequences: float
    """Responses with at least one token."""
    max_length: int
    """The most response tokens that a response may have; ``fixed`` divides by it."""


def token_weights(
    response_mask: Shaped[Tensor, "B T"], counts: BatchCounts, *, reduction: str
) -> Float[Tensor, "B T"]:
    """What one token's loss is multiplied by, so that a sum over the batch is the reduction.

    - ``token``: 1 / tokens; every token of the batch counts the same (DAPO, VAPO, CVPO).
    - ``sequence``: 1 / (sequences |o_i|); the mean over responses of their token means (PPO, GRPO).
    - ``fixed``: 1 / (sequences max_length); no normalisation by length (Dr.GRPO).

    Returns:
        [B, T] in float32, 0 on masked slots.

    Raises:
        ValueError: Unknown reduction.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    mask = response_mask.bool()
    ones = mask.to(torch.float32)
    if reduction == "token":
        return ones / max(counts.tokens, 1)
    if reduction == "sequence":
        return ones / (max(counts.sequences, 1) * ones.sum(1, keepdim=True).clamp(min=1))
    return ones / (max(counts.sequences, 1) * max(counts.max_length, 1))


def policy_loss(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    counts: BatchCounts,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    reduction: str = "token",
) -> Float[Tensor, ""]:
    """Clipped surrogate (eq. 1): ``-sum w min(rho A', clip(rho, 1 - low, 1 + high) A')``.

    rho is the ratio of the new to the old probability of the token (at most e^20), A' the weighted
    advantage (27), w the token's share under the reduction (1/N for ``token``).

    Args:
        log_probs: Under the policy that is being updated, [B, T].
        old_log_probs: Under the policy before the update, [B, T].
        advantages: A', [B, T].
        response_mask: Nonzero on response tokens, [B, T].
        counts: Sizes of the whole optimiser batch.
        clip_low: At least 0.
        clip_high: At least 0.
        reduction: ``token``, ``sequence`` or ``fixed``.

    Raises:
        ValueError: Shapes differ or the reduction is unknown.
    """
    _same_shape("policy_loss", log_probs, old_log_probs, advantages, response_mask)
    masked = ~response_mask.bool()
    log_probs, old_log_probs, advantages = _wide(log_probs, old_log_probs, advantages)
    # Where the ratio overflows, the clipped branch wins, but inf times its gradient of 0 is NaN.
    ratio = (log_probs - old_log_probs).masked_fill(masked, 0).clamp(max=_MAX_LOG_RATIO).exp()
    A = advantages.masked_fill(masked, 0)
    surrogate = torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
    return -(token_weights(response_mask, counts, reduction=reduction) * surrogate).sum()


def value_loss(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    counts: BatchCounts,
    old_values: Float[Tensor, "B T"] | None = None,
    clip: float | None = None,
) -> Float[Tensor, ""]:
    """Half the squared error to the lambda_critic returns, over the token count.

    With ``clip``, the larger of that and the error of the value clipped to ``old_values +- clip``
    (PPO's value clipping).

    Raises:
        ValueError: Shapes differ, or clip without old_values.
    """
    _same_shape("value_loss", values, returns, response_mask)
    masked = ~response_mask.bool()
    values, returns = (x.masked_fill(masked, 0) for x in _wide(values, returns))
    error = (values - returns).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("value_loss: clip needs old_values")
        _same_shape("value_loss", values, old_values)
        (old,) = (x.masked_fill(masked, 0) for x in _wide(old_values))
        clipped = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * (token_weights(response_mask, counts, reduction="token") * error).sum()


def positive_lm_loss(
    log_probs: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    correct: Shaped[Tensor, " B"],
    *,
    num_tokens: float,
) -> Float[Tensor, ""]:
    """VAPO's positive-example language-model loss: mean negative log-likelihood of correct tokens.

    Args:
        log_probs: Under the policy that is being updated, [B, T].
        response_mask: Nonzero on response tokens, [B, T].
        correct: R in [0, 1], [B]; with partial credit a token weighs R.
        num_tokens: ``sum_i R_i T_i`` over the whole optimiser batch. If it is 0 the loss is 0.

    Raises:
        ValueError: Shapes differ.
    """
    _same_shape("positive_lm_loss", log_probs, response_mask)
    if correct.shape != log_probs.shape[:1]:
        raise ValueError(
            f"positive_lm_loss: correct must be [B] = [{len(log_probs)}], got "
            f"{tuple(correct.shape)}"
        )
    (log_probs,) = _wide(log_probs)
    # Not only masked tokens but whole incorrect responses are cut out before the product: 0 * inf.
    weight = response_mask.bool() * correct[:, None].to(log_probs.dtype)
    likelihood = log_probs.masked_fill(weight == 0, 0)
    return -(weight * likelihood).sum() / (num_tokens if num_tokens > 0 else 1.0)


def kl_loss(
    log_probs: Float[Tensor, "B T"],
    reference_log_probs: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    counts: BatchCounts,
    reduction: str = "token",
) -> Float[Tensor, ""]:
    """KL to a reference policy by the k3 estimator, ``exp(d) - d - 1`` with d = log ref - log pi.

    Raises:
        ValueError: Shapes differ or the reduction is unknown.
    """
    _same_shape("kl_loss", log_probs, reference_log_probs, response_mask)
    reference_log_probs, log_probs = _wide(reference_log_probs, log_probs)
    d = (reference_log_probs - log_probs).masked_fill(~response_mask.bool(), 0)
    return (token_weights(response_mask, counts, reduction=reduction) * (d.exp() - d - 1)).sum()


@torch.no_grad()
def policy_statistics(
    log_probs: Float[Tensor, "B T"],
    old_log_probs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, float]:
    """Sums over response tokens from which a step's policy diagnostics are made; they add up.

    Returns:
        ``tokens``; ``clip_low`` and ``clip_high``, tokens whose gradient the clipping cut on that
        side; ``kl``, the sum of the k3 estimate of KL(old || new); ``ratio`` and
        ``ratio_square``, whose ratio of squares is the effective sample size.

    Raises:
        ValueError: Shapes differ.
    """
    _same_shape("policy_statistics", log_probs, old_log_probs, advantages, response_mask)
    mask = response_mask.bool()
    d = (log_probs - old_log_probs)[mask].double()
    ratio, A = d.exp(), advantages[mask]
    return {
        "tokens": float(mask.sum()),
        "clip_low": float(((ratio < 1 - clip_low) & (A < 0)).sum()),
        "clip_high": float(((ratio > 1 + clip_high) & (A > 0)).sum()),
        "kl": float((ratio - d - 1).sum()),
        "ratio": float(ratio.sum()),
        "ratio_square": float(ratio.square().sum()),
    }


def _wide(*tensors: Tensor) -> list[Tensor]:
    """In float32 or better: half precision would lose the small ratios that PPO is about."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _same_shape(name: str, *tensors: Tensor) -> None:
    # Broadcasting would turn a transposed or truncated argument into a wrong number.
    shapes = [tuple(t.shape) for t in tensors]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise ValueError(f"{name}: the arguments must share one shape [B, T], got {shapes}")
