"""The gradient bound, link by link (eq. 3-13), and a sound bound on the episodic gradient.

With E, Var and Cov over the visited tokens (s, a) of all prompts and g = grad log pi(a|s)::

    ||E[g A]|| <= E[||g|| |A|] <= C E|A| <= C sqrt(E[A^2]) = C sqrt(Var A)
                = C sqrt(Var Q + Var V - 2 Cov(Q, V)) <= C (sigma_Q + sqrt(Var V))

What to know of it:

- The left side is ``grad J / E[T]``, the mean over tokens. For the gradient of the expected return
  J itself a factor E[T] is missing, and the printed bound is false.
- C (4) is an assumption: at most sqrt(2) for the logits, unbounded for a network's weights.
- ``Var A = E[A^2]`` (6) needs E[A] = 0, which a biased critic and weights on trajectories break.
- With the exact V, Cov(Q, V) = Var V and so Var A = Var Q - Var V: at a given Var Q a larger Var V
  means a *smaller* advantage. That (13) grows with Var V comes from its worst case (10) alone.
- Rewards +1 and -1, success rates p: ``||grad J|| <= C sqrt(E[T] E_q[4 p (1 - p)])`` is sound.

A ``weight`` is a visitation: ``d_t(s) pi(a|s)`` in an exact world, 1 for every sampled token, or a
response mask. Only its proportions count. Tokens of weight 0 may hold anything, NaN included.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from cvpo.stochasticity import trajectory_std

Number = float | Float[Tensor, ""]
"""Functions of numbers alone take floats and give a float, or take tensors and give one."""

# ------------------------------------------------------------------------ means over visited tokens


def token_mean(x: Float[Tensor, "*tokens"], weight: Shaped[Tensor, "*tokens"]) -> Float[Tensor, ""]:
    """E[x] over the visited tokens, in float32 or better.

    Args:
        x: One number for each token, any shape.
        weight: Visitation of each token, at least 0, the same shape.

    Raises:
        ValueError: Shapes differ, a weight is negative or not finite, or all are 0.
    """
    share = _shares(weight, like=x)
    return (share * _wide(x).masked_fill(share == 0, 0)).sum()


def token_covariance(
    x: Float[Tensor, "*tokens"],
    y: Float[Tensor, "*tokens"],
    weight: Shaped[Tensor, "*tokens"],
) -> Float[Tensor, ""]:
    """Cov(x, y) over the visited tokens, by two passes. Arguments as for `token_mean`."""
    x, y = _wide(x), _wide(y)
    return token_mean((x - token_mean(x, weight)) * (y - token_mean(y, weight)), weight)


def token_variance(
    x: Float[Tensor, "*tokens"], weight: Shaped[Tensor, "*tokens"]
) -> Float[Tensor, ""]:
    """Var(x) over the visited tokens, by two passes. Arguments as for `token_mean`."""
    return token_covariance(x, x, weight)


def _wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """In float32 at least: half precision would lose what a mean of squares needs."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _shares(
    weight: Shaped[Tensor, "*tokens"], *, like: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """Each token's part of the visitation; they sum to 1."""
    if like.shape != weight.shape:
        raise ValueError(
            "weight must have one entry for each token, got "
            f"{tuple(weight.shape)} for {tuple(like.shape)}"
        )
    weight = weight.to(_wide(like).dtype)
    total = weight.sum()
    if bool((weight < 0).any()) or not bool(total.isfinite()) or not bool(total > 0):
        raise ValueError("weight must be finite, at least 0, and positive for some token")
    return weight / total


# ---------------------------------------------------------------------------------------- the links


def token_gradient(
    scores: Float[Tensor, "n P"],
    advantages: Float[Tensor, " n"],
    weight: Shaped[Tensor, " n"],
) -> Float[Tensor, " P"]:
    """E[g A] (3): the mean over tokens, grad J / E[T] if the advantages are exact.

    Args:
        scores: g = grad log pi(a|s) of each token, [n, P].
        advantages: A(s, a), [n].
        weight: Visitation, [n].

    Raises:
        ValueError: As `token_mean`.
    """
    products = _wide(scores) * _wide(advantages)[:, None]
    share = _shares(weight, like=advantages.to(products.dtype))
    return share @ products.masked_fill(share[:, None] == 0, 0)


def score_bound(
    score_norm: Float[Tensor, "*tokens"], weight: Shaped[Tensor, "*tokens"]
) -> Float[Tensor, ""]:
    """C (4), measured: the largest norm of grad log pi among the visited tokens."""
    return _wide(score_norm)[_shares(weight, like=score_norm) > 0].max()


def score_times_advantage(
    score_norm: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    weight: Shaped[Tensor, "*tokens"],
) -> Float[Tensor, ""]:
    """E[||g|| |A|], the middle of (5). Arguments as for `token_mean`."""
    return token_mean(_wide(score_norm) * _wide(advantages).abs(), weight)


def absolute_advantage(
    advantages: Float[Tensor, "*tokens"], weight: Shaped[Tensor, "*tokens"]
) -> Float[Tensor, ""]:
    """E|A|, the right of (5). Arguments as for `token_mean`."""
    return token_mean(advantages.abs(), weight)


def second_moment(
    advantages: Float[Tensor, "*tokens"], weight: Shaped[Tensor, "*tokens"]
) -> Float[Tensor, ""]:
    """E[A^2] (6)-(7): at least (E|A|)^2, and Var A where E[A] = 0. Arguments as `token_mean`."""
    return token_mean(_wide(advantages).square(), weight)


def expanded_variance(
    q: Float[Tensor, "*tokens"],
    v: Float[Tensor, "*tokens"],
    weight: Shaped[Tensor, "*tokens"],
) -> Float[Tensor, ""]:
    """Var(Q) + Var(V) - 2 Cov(Q, V) (9): Var A where A = Q - V. Arguments as for `token_mean`."""
    return (
        token_variance(q, weight) + token_variance(v, weight) - 2 * token_covariance(q, v, weight)
    )


def exact_variance(
    q: Float[Tensor, "*tokens"],
    v: Float[Tensor, "*tokens"],
    weight: Shaped[Tensor, "*tokens"],
) -> Float[Tensor, ""]:
    """Var(Q) - Var(V): what (9) equals if V(s) = E[Q(s, a) | s], since then Cov(Q, V) = Var(V).

    Arguments as for `token_mean`.
    """
    return token_variance(q, weight) - token_variance(v, weight)


def worst_case_variance(variance_q: Number, variance_v: Number) -> Number:
    """(sigma_Q + sqrt(Var V))^2 (10)-(11), the least favourable covariance of Q and V."""
    return (variance_q**0.5 + variance_v**0.5) ** 2


def printed_bound(*, score_bound: Number, variance_q: Number, variance_v: Number) -> Number:
    """C (sigma_Q + sqrt(Var V)) (12)-(13).

    C = 1, sigma_Q = .05: .07 at Var V = .0004 and .10 at Var V = .0025, 42.9 % more.

    Args:
        score_bound: C, at least 0.
        variance_q: Var Q = sigma_Q^2 over the visited tokens, at least 0.
        variance_v: Var V over the visited states of all prompts, at least 0.
    """
    return score_bound * worst_case_variance(variance_q, variance_v) ** 0.5


class Links(NamedTuple):
    """The chain in order: each entry is claimed to be at most the next one."""

    gradient: Float[Tensor, ""]
    """Norm of the gradient that is being bounded."""
    score_times_advantage: Float[Tensor, ""]
    """E[||g|| |A|], from (3) by the triangle inequality (5)."""
    absolute_advantage: Float[Tensor, ""]
    """C E|A|, by (4) in (5)."""
    root_mean_square: Float[Tensor, ""]
    """C sqrt(E[A^2]), by Jensen (7)."""
    deviation: Float[Tensor, ""]
    """C sqrt(Var A), by (6): equal to the last if E[A] = 0, smaller otherwise."""
    expanded: Float[Tensor, ""]
    """C sqrt(Var Q + Var V - 2 Cov(Q, V)) (9): equal to the last if A = Q - V."""
    printed: Float[Tensor, ""]
    """C (sigma_Q + sqrt(Var V)) (13)."""


def links(
    *,
    gradient_norm: Number,
    score_norm: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    q: Float[Tensor, "*tokens"],
    v: Float[Tensor, "*tokens"],
    weight: Shaped[Tensor, "*tokens"],
) -> Links:
    """Evaluates the whole chain, on exact visitations or on sampled tokens.

    Args:
        gradient_norm: ||E[g A]||, the token mean, for the chain as it can be proved; the norm of
            any other gradient to see whether the chain bounds it.
        score_norm: ||grad log pi(a|s)|| of each token. C is its largest value.
        advantages: What multiplies the scores. Whitened or weighted ones may be given: the links
            that then fail show what the printed derivation assumed.
        q: Q(s, a), or its estimate, the return from the token on.
        v: V(s) of the state before the token.
        weight: Visitation.

    Raises:
        ValueError: As `token_mean`.
    """
    C = score_bound(score_norm, weight)
    # A variance that is 0 can come out of (9) as minus a rounding error.
    expanded = expanded_variance(q, v, weight).clamp(min=0)
    return Links(
        gradient=torch.as_tensor(gradient_norm, dtype=C.dtype, device=C.device),
        score_times_advantage=score_times_advantage(score_norm, advantages, weight),
        absolute_advantage=C * absolute_advantage(advantages, weight),
        root_mean_square=C * second_moment(advantages, weight).sqrt(),
        deviation=C * token_variance(advantages, weight).sqrt(),
        expanded=C * expanded.sqrt(),
        printed=torch.as_tensor(
            printed_bound(
                score_bound=C,
                variance_q=token_variance(q, weight),
                variance_v=token_variance(v, weight),
            )
        ),
    )


def holding(chain: Links, *, tolerance: float = 1e-6) -> dict[str, bool]:
    """Whether each link is at least the one before it, by the name of the larger one.

    Args:
        chain: From `links`.
        tolerance: What rounding may take away, as a share of the chain's largest entry or, where
            that is less, of a reward of 1.
    """
    slack = tolerance * max(1.0, *(float(link) for link in chain))
    steps = zip(Links._fields[1:], pairwise(chain), strict=True)
    return {name: bool(smaller <= larger + slack) for name, (smaller, larger) in steps}


# -------------------------------------------------------------------------------- the sound bound


def outcome_variance(
    success: Float[Tensor, " K"], weight: Shaped[Tensor, " K"]
) -> Float[Tensor, ""]:
    """E_q[4 p (1 - p)], the variance of a reward of +1 or -1 within a prompt.

    It is E sum_t A_t^2 where transitions are deterministic (as for tokens), and at least that
    where they are not.

    Args:
        success: p, the success rate of each prompt, in [0, 1], [K].
        weight: q, how often each prompt is drawn, [K].

    Raises:
        ValueError: As `token_mean`.
    """
    return token_mean(4 * success * (1 - success), weight)


def episode_bound(*, score_bound: Number, mean_length: Number, outcome_variance: Number) -> Number:
    """||grad J|| <= C sqrt(E[T] E_q[4 p (1 - p)]): sound for the episodic gradient.

    Args:
        score_bound: C, at least 0.
        mean_length: E[T], tokens.
        outcome_variance: E_q[4 p (1 - p)], or the mean variance within a prompt of any terminal
            reward.
    """
    return score_bound * (mean_length * outcome_variance) ** 0.5


def score_energy_bound(
    score_norm: Float[Tensor, "*tokens"],
    weight: Shaped[Tensor, "*tokens"],
    *,
    mean_length: Number,
    outcome_variance: Number,
) -> Number:
    """||grad J|| <= sqrt(E sum_t ||g_t||^2) sqrt(E_q[4 p (1 - p)]), tighter than `episode_bound`.

    It needs no bound on the score: the mean square takes C's place.

    Args:
        score_norm: ||grad log pi(a|s)|| of each token.
        weight: Visitation.
        mean_length: E[T], tokens.
        outcome_variance: As for `episode_bound`.

    Raises:
        ValueError: As `token_mean`.
    """
    return episode_bound(
        score_bound=second_moment(score_norm, weight).sqrt(),
        mean_length=mean_length,
        outcome_variance=outcome_variance,
    )


# --------------------------------------------------------------------- what W_S sees of Var(V)


class ValueVariance(NamedTuple):
    """Var V of (13) and its parts: ``total = within + between``."""

    total: Float[Tensor, ""]
    """Over the visited states of all prompts."""
    within: Float[Tensor, ""]
    """Mean of sigma_i^2, trajectories weighted by length: the part that W_S measures."""
    between: Float[Tensor, ""]
    """Variance of the trajectories' mean values, weighted by length."""


def value_variance(
    values: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    weight: Float[Tensor, " B"] | None = None,
) -> ValueVariance:
    """Splits Var V into what lies within trajectories and what lies between them.

    Args:
        values: V of the state before each token, [B, T]. Masked slots may hold anything.
        response_mask: Nonzero on response tokens, [B, T].
        weight: Probability of each trajectory, [B]; all alike when None.

    Raises:
        ValueError: Shapes differ, or no trajectory of positive weight has a response token.
    """
    mask = response_mask.bool()
    sigma = trajectory_std(values, mask)
    length = mask.sum(1).to(sigma.dtype)
    of_trajectory = length if weight is None else length * weight
    of_token = mask * (of_trajectory / length.clamp(min=1))[:, None]
    mean = values.to(sigma.dtype).masked_fill(~mask, 0).sum(1) / length.clamp(min=1)
    return ValueVariance(
        total=token_variance(values, of_token),
        within=token_mean(sigma.square(), of_trajectory),
        between=token_variance(mean, of_trajectory),
    )
