"""Start here: what each method is, and how its advantage A' is put together (eq. 27).

A `Method` says which critic, which advantage, which weights, which loss reduction and which lag.
`METHODS` holds every method that the trainer runs; each is one declaration, with its source.

From rollouts to the number that multiplies a token's log-probability::

    A  = gae(r, V, lambda_policy)             or a grouped advantage, the same for all tokens
    A  = A / sd(A)                            whiten="scale"; off by default
    A' = W_S W_D A                            each factor 1 where the method does not use it
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cvpo.advantage import gae, group_advantage, length_adaptive_lambda, terminal_rewards

Whiten = Literal["none", "scale", "full"]


@dataclass(frozen=True)
class Method:
    """A method's declaration. Every number here can be overridden by a run's configuration."""

    name: str
    source: str
    advantage: Literal["gae", "grpo", "dr-grpo", "rloo"]
    reduction: Literal["token", "sequence", "fixed"]
    """Of the policy loss: see `cvpo.loss.token_weights`."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    lambda_critic: float = 1.0
    """Makes the value targets. Read with a critic only, like the next three."""
    lambda_policy: float = 0.95
    """Makes the policy's advantages, unless `length_adaptive_alpha` is set."""
    length_adaptive_alpha: float | None = None
    """lambda_policy = 1 - 1/(alpha l) instead, one for each trajectory."""
    value_pretraining_steps: int = 0
    """Rollout batches on which the critic is fitted before the first update of the policy."""
    lm_coefficient: float = 0.0
    """Weight of the positive-example language-model loss."""
    stochasticity: bool = False
    """W_S."""
    curriculum: bool = False
    """W_D. (The tracker always watches; this says whether its weight is used.)"""
    lag: int = 0
    """1: batch t+1 is generated with the weights of before update t."""
    dynamic_sampling: bool = False
    """Groups that are all correct or all wrong are dropped and replaced."""
    overlong_penalty: bool = False
    """DAPO's soft penalty on responses near the length limit."""

    @property
    def critic(self) -> bool:
        """Whether the method has a critic."""
        return self.advantage == "gae"


_PPO = Method("ppo", "arXiv 1707.06347", advantage="gae", reduction="sequence", lambda_critic=0.95)
_VC_PPO = replace(
    _PPO, name="vc-ppo", source="arXiv 2503.01491", lambda_critic=1.0, value_pretraining_steps=100
)
_VAPO = Method(
    "vapo",
    "arXiv 2504.05118",
    advantage="gae",
    reduction="token",
    clip_high=0.28,
    length_adaptive_alpha=0.05,
    value_pretraining_steps=50,
    lm_coefficient=0.1,
)
_CVPO = replace(
    _VAPO,
    name="cvpo",
    source="arXiv 2608.03068",
    length_adaptive_alpha=0.17,
    value_pretraining_steps=21,
    stochasticity=True,
    curriculum=True,
)
_GRPO = Method("grpo", "arXiv 2402.03300", advantage="grpo", reduction="sequence")
_DAPO = replace(
    _GRPO,
    name="dapo",
    source="arXiv 2503.14476",
    reduction="token",
    clip_high=0.28,
    dynamic_sampling=True,
    overlong_penalty=True,
)

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _PPO,
        _VC_PPO,
        _VAPO,
        _GRPO,
        replace(
            _GRPO,
            name="grpo-async",
            source="arXiv 2608.03068, its GRPO (ASYN) baseline",
            reduction="token",
            clip_high=0.28,
            lag=1,
        ),
        Method("dr-grpo", "arXiv 2503.20783", advantage="dr-grpo", reduction="fixed"),
        _DAPO,
        Method("rloo", "arXiv 2402.14740", advantage="rloo", reduction="token"),
        _CVPO,
        replace(_CVPO, name="cvpo-stochasticity", curriculum=False),
        replace(_CVPO, name="cvpo-curriculum", stochasticity=False),
    )
}


class Advantages(NamedTuple):
    """Advantages before whitening and weights, and what the critic is fitted to."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None
    """lambda_critic returns; None without a critic."""


def estimate_advantages(
    method: Method,
    reward: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    values: Float[Tensor, "B T"] | None = None,
    gamma: float = 1.0,
) -> Advantages:
    """A and the value targets of a whole batch, as the method declares them.

    Args:
        method: The declaration.
        reward: Terminal reward of each trajectory, [B].
        group: Its prompt, [B].
        response_mask: Nonzero on response tokens, [B, T].
        values: The critic's, [B, T]; needed by methods with a critic.
        gamma: Discount.

    Raises:
        ValueError: The method has a critic and values is None, or shapes differ.
    """
    _check_rows("estimate_advantages", response_mask, reward=reward, group=group)
    mask = response_mask.bool()
    if not method.critic:
        A = group_advantage(reward, group, kind=method.advantage)
        return Advantages(torch.where(mask, A[:, None], 0.0), None)
    if values is None:
        raise ValueError(f"estimate_advantages: {method.name} has a critic and needs its values")
    rewards = terminal_rewards(reward, mask)
    lam: float | Tensor = method.lambda_policy
    if method.length_adaptive_alpha is not None:
        lam = length_adaptive_lambda(mask.sum(1), alpha=method.length_adaptive_alpha)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    if method.length_adaptive_alpha is not None or lam != method.lambda_critic:
        _, returns = gae(rewards, values, mask, gamma=gamma, lam=method.lambda_critic)
    return Advantages(advantages, returns)


@dataclass(frozen=True)
class Moments:
    """Per-trajectory moments: a batch's mean and deviation follow, whoever holds which rows."""

    count: Float[Tensor, " B"]
    mean: Float[Tensor, " B"]
    square: Float[Tensor, " B"]
    """Sum of squared deviations from the trajectory's own mean."""


def advantage_moments(
    advantages: Float[Tensor, "B T"], response_mask: Shaped[Tensor, "B T"]
) -> Moments:
    """Moments of each trajectory's token advantages, in float64. Ranks gather these, not tokens.

    Raises:
        ValueError: Shapes differ.
    """
    _check_tokens("advantage_moments", advantages, response_mask)
    masked = ~response_mask.bool()
    x = advantages.double().masked_fill(masked, 0)
    count = (~masked).sum(1).double()
    mean = x.sum(1) / count.clamp(min=1)
    square = (x - mean[:, None]).masked_fill(masked, 0).square().sum(1)
    return Moments(count, mean, square)


def mean_and_deviation(moments: Moments) -> tuple[float, float]:
    """Mean and population standard deviation over all tokens; (0, 0) of none."""
    total = moments.count.sum()
    if total == 0:
        return 0.0, 0.0
    mean = (moments.count * moments.mean).sum() / total
    between = moments.count * (moments.mean - mean).square()
    return mean.item(), ((moments.square + between).sum() / total).sqrt().item()


def weighted_advantages(
    advantages: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    w_s: Float[Tensor, " B"],
    w_d: Float[Tensor, " B"],
    whiten: Whiten = "none",
    mean: float = 0.0,
    deviation: float = 1.0,
) -> Float[Tensor, "B T"]:
    """A' = W_S W_D A (eq. 27), broadcast to the tokens.

    Without whitening, and with ``scale``, no sign flips, since both weights are at least 0.
    ``full`` also subtracts the batch mean, as other trainers do, and then signs do flip.

    Args:
        advantages: A, [B, T].
        response_mask: Nonzero on response tokens, [B, T].
        w_s: Stochasticity weights, [B].
        w_d: Difficulty weights, [B].
        whiten: ``none``, ``scale`` (divide by the deviation) or ``full`` (subtract the mean first).
        mean: Of all token advantages of the batch (`mean_and_deviation`).
        deviation: Of all token advantages of the batch; 0 leaves them as they are, NaN does not.

    Raises:
        ValueError: Unknown whitening, or shapes differ.
    """
    _check_tokens("weighted_advantages", advantages, response_mask)
    _check_rows("weighted_advantages", response_mask, w_s=w_s, w_d=w_d)
    if whiten not in get_args(Whiten):
        raise ValueError(f"whiten must be one of {get_args(Whiten)}, got {whiten!r}")
    A = advantages.masked_fill(~response_mask.bool(), 0)
    if whiten == "full":
        A = A - mean
    if whiten != "none" and deviation != 0:
        A = A / deviation
    return ((w_s * w_d)[:, None] * A).masked_fill(~response_mask.bool(), 0)


def _check_tokens(name: str, advantages: Tensor, response_mask: Tensor) -> None:
    if advantages.ndim != 2 or advantages.shape != response_mask.shape:
        raise ValueError(
            f"{name}: advantages and response_mask must share one shape [B, T], got "
            f"{tuple(advantages.shape)} and {tuple(response_mask.shape)}"
        )


def _check_rows(name: str, response_mask: Tensor, **rows: Tensor) -> None:
    # Broadcasting would spread one trajectory's number over the whole batch.
    for key, row in rows.items():
        if row.shape != response_mask.shape[:1]:
            raise ValueError(
                f"{name}: {key} must be [B] = [{len(response_mask)}], got {tuple(row.shape)}"
            )
