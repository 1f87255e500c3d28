"""The stochasticity weight W_S (eq. sig-i, 14-16, algorithm 1).

From the token values of a trajectory to the weight on its advantage::

    sigma_i = sd of V(s_{i,0}), ..., V(s_{i,T_i-1})
    mu_k    = mean of sigma_i over the trajectories of prompt k in the whole batch
    W_S     = 1 + alpha_P S(lambda_P (sigma_i - mu_k))     correct
    W_S     = 1 - alpha_N S(lambda_N (mu_k - sigma_i))     incorrect        S: the sigmoid

Decisions where the paper is silent (each one a field of `StochasticityConfig`):

- The paper writes Var in (15)-(16) but compares it with a mean of standard deviations; here both
  are standard deviations. ``signal="variance"`` is the other self-consistent reading.
- alpha and lambda are not printed. The reported coefficient c is alpha_P = alpha_N, and
  lambda_P = lambda_N = 50. Only lambda * sigma matters and sigma's size depends on the critic, so
  ``sharpness_unit="deviation_sd"`` measures lambda in units of 1 / sd(sigma_i - mu_k).
- The prose calls W_S > 1 on a correct trajectory a penalty; as printed, it reinforces. The default
  is what is printed; `ARMS` holds the controls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from cvpo.groups import group_index, group_mean, shuffle_within
from cvpo.metrics import coefficient_of_variation, correlation

Arm = Literal[
    "literal",
    "none",
    "constant",
    "flipped",
    "hard",
    "shuffled",
    "entropy",
    "positive_only",
    "negative_only",
]
ARMS: tuple[str, ...] = get_args(Arm)
"""Every control arm of section 4.2, as `StochasticityConfig.arm` takes it."""

Coefficient = float | Float[Tensor, ""] | Float[Tensor, " B"]
"""A number; or one for each trajectory, where settings are compared side by side in one batch."""

WEIGHT_ARMS = ("literal", "none", "constant", "flipped", "hard")
"""The arms that are a formula of sigma, mu and correctness: `stochasticity_weight` takes them."""

_CHUNK_ELEMENTS = 1 << 19
"""Rows are processed in chunks of about this many slots, so that intermediates stay in cache."""


def trajectory_std(
    values: Float[Tensor, "B T"], response_mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """sigma_i: the population standard deviation of a trajectory's token values (eq. sig-i).

    Two passes (mean first, then deviations), in float32 or better; half precision is upcast.

    Args:
        values: V of the state before each token, [B, T]. Masked slots may hold anything.
        response_mask: Nonzero on response tokens, [B, T].

    Returns:
        [B], at least 0; 0 for a trajectory of one token or none.

    Raises:
        ValueError: Shapes differ.
    """
    if values.ndim != 2 or values.shape != response_mask.shape:
        raise ValueError(
            "trajectory_std: values and response_mask must share one shape [B, T], got "
            f"{tuple(values.shape)} and {tuple(response_mask.shape)}"
        )
    B, T = values.shape
    dtype = torch.promote_types(values.dtype, torch.float32)
    if B * T == 0:
        return values.to(dtype).sum(1)
    sigma = torch.zeros(B, dtype=dtype, device=values.device)
    chunk = max(1, _CHUNK_ELEMENTS // T)
    for start in range(0, B, chunk):
        rows = slice(start, start + chunk)
        mask, x = response_mask[rows].bool(), values[rows].to(dtype)
        masked = ~mask
        count = mask.sum(1, keepdim=True, dtype=torch.int32).clamp(min=1).to(dtype)
        # From a response token, not from 0: then equal values deviate by exactly 0, and a mean far
        # from 0 costs no digits.
        some = mask.max(1, keepdim=True).indices
        deviation = (x - x.gather(1, some)).masked_fill_(masked, 0)
        deviation = (deviation - deviation.sum(1, keepdim=True) / count).masked_fill_(masked, 0)
        # The norm, unlike sqrt of a sum of squares, has gradient 0 where all deviations are 0.
        sigma[rows] = torch.linalg.vector_norm(deviation, dim=1) / count.squeeze(1).sqrt()
    return sigma


def stochasticity_weight(
    sigma: Float[Tensor, " B"],
    mu: Float[Tensor, " B"],
    correct: Shaped[Tensor, " B"],
    *,
    alpha_p: Coefficient,
    alpha_n: Coefficient,
    lambda_p: Coefficient,
    lambda_n: Coefficient,
    arm: str = "literal",
    valid: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """W_S of each trajectory (eq. 14-16, and 4.4 for partial credit).

    ``W_S = R W_plus + (1 - R) W_minus`` with the two branches of the module's docstring, which at
    R in {0, 1} is (15)-(16).

    Args:
        sigma: Spread of each trajectory's values, [B].
        mu: Mean spread of its group, [B].
        correct: R in [0, 1], from the verifier (never ``reward > 0``), [B].
        alpha_p: Weight range of correct trajectories, at least 0: W_S in (1, 1 + alpha_p).
        alpha_n: Weight range of incorrect ones, in [0, 1): W_S in (1 - alpha_n, 1).
        lambda_p: Sharpness of the sigmoid on the correct side, at least 0, in 1/[sigma].
        lambda_n: The same on the incorrect side. All four: a number, or one for each trajectory.
        arm: ``literal`` (as printed), ``none`` (1), ``constant`` (the sigmoid at its midpoint),
            ``flipped`` (both arguments negated) or ``hard`` (a step, 1/2 at 0).
        valid: Trajectories that have response tokens, [B]; the others get 1.

    Raises:
        ValueError: A coefficient is out of range, the arm unknown, R outside [0, 1], shapes differ.
    """
    if arm not in WEIGHT_ARMS:
        raise ValueError(f"stochasticity_weight: arm must be one of {WEIGHT_ARMS}, got {arm!r}")
    _check_coefficients(alpha_p, alpha_n, lambda_p, lambda_n)
    given = [x for x in (sigma, mu, correct, valid) if x is not None]
    if any(x.shape != sigma.shape for x in given):
        raise ValueError(
            "stochasticity_weight: sigma, mu, correct and valid must share one shape [B], got "
            f"{[tuple(x.shape) for x in given]}"
        )
    R = correct.to(torch.promote_types(sigma.dtype, torch.float32))
    counted = torch.ones_like(R, dtype=torch.bool) if valid is None else valid.bool()
    if not bool(((R >= 0) & (R <= 1) | ~counted).all()):
        raise ValueError("stochasticity_weight: correct must lie in [0, 1] (it is not the reward)")
    if arm == "none":
        return torch.ones_like(R)
    deviation = sigma.to(R.dtype) - mu.to(R.dtype)
    if arm == "flipped":
        deviation = -deviation
    elif arm == "constant":
        deviation = torch.zeros_like(deviation)
    sigmoid = _step if arm == "hard" else torch.sigmoid
    plus = 1 + alpha_p * sigmoid(lambda_p * deviation)
    minus = 1 - alpha_n * sigmoid(-lambda_n * deviation)
    return torch.where(counted, R * plus + (1 - R) * minus, 1.0)


@dataclass(frozen=True)
class StochasticityConfig:
    """What the paper leaves open about W_S. Defaults: the printed equations at c = .3."""

    alpha_p: Coefficient = 0.3
    alpha_n: Coefficient = 0.3
    lambda_p: Coefficient = 50.0
    lambda_n: Coefficient = 50.0
    arm: Arm = "literal"
    mu: Literal["group", "outcome_group"] = "group"
    """Compare with all trajectories of the prompt, or those of the same outcome (R >= .5)."""
    signal: Literal["std", "variance"] = "std"
    sharpness_unit: Literal["absolute", "deviation_sd"] = "absolute"
    """lambda as it is, or in units of 1 / sd over the batch of (sigma_i - mu_k); an sd of 0 gives
    sharpness 0, so W_S at its midpoint."""

    def __post_init__(self) -> None:
        """Refuses what `stochasticity` could not carry out.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        _check_coefficients(self.alpha_p, self.alpha_n, self.lambda_p, self.lambda_n)
        choices = {
            "arm": ARMS,
            "mu": ("group", "outcome_group"),
            "signal": ("std", "variance"),
            "sharpness_unit": ("absolute", "deviation_sd"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {getattr(self, field)!r}")


@dataclass(frozen=True)
class Stochasticity:
    """What `stochasticity` found, one number for each trajectory."""

    weight: Float[Tensor, " B"]
    """W_S."""
    signal: Float[Tensor, " B"]
    """What took sigma's place: sigma, its square, its permutation or the mean token entropy."""
    mu: Float[Tensor, " B"]


def stochasticity(
    sigma: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    correct: Shaped[Tensor, " B"],
    *,
    config: StochasticityConfig,
    valid: Bool[Tensor, " B"] | None = None,
    entropy: Float[Tensor, " B"] | None = None,
    generator: torch.Generator | None = None,
) -> Stochasticity:
    """Algorithm 1: from the spreads of a whole batch to the weights, under any control arm.

    The vectors are those of the whole batch of the step, gathered over ranks.

    Args:
        sigma: Spread of each trajectory's values (`trajectory_std`), [B].
        group: Its prompt, [B].
        correct: R in [0, 1], [B].
        config: Constants, arm and units.
        valid: Trajectories that have response tokens, [B]; all when None.
        entropy: Mean token entropy, [B]; needed by the arm ``entropy`` only.
        generator: Source of the permutation; needed by the arm ``shuffled`` only.

    Raises:
        ValueError: The arm needs ``entropy`` or ``generator`` and it is not given, a sigma is not
            finite where its deviation sets the unit, or as `stochasticity_weight`.
    """
    counted = torch.ones_like(sigma, dtype=torch.bool) if valid is None else valid.bool()
    outcome = correct >= 0.5
    signal = sigma
    if config.arm == "entropy":
        if entropy is None:
            raise ValueError("stochasticity: the arm 'entropy' needs the mean token entropies")
        signal = entropy
    signal = signal.to(torch.promote_types(signal.dtype, torch.float32))
    if config.signal == "variance":
        signal = signal.square()
    if config.arm == "shuffled":
        if generator is None:
            raise ValueError("stochasticity: the arm 'shuffled' needs a generator")
        signal = shuffle_within(signal, group, outcome.long() + 2 * ~counted, generator=generator)
    # Renumbered first: twice a large id would run over.
    index, _ = group_index(group)
    reference = index if config.mu == "group" else 2 * index + outcome.long()
    mu = group_mean(signal, reference, valid=counted)

    sharpness: Tensor | float = 1.0
    if config.sharpness_unit == "deviation_sd":
        deviation = (signal - mu)[counted]
        if not bool(deviation.isfinite().all()):
            raise ValueError("stochasticity: sigma of a trajectory that counts is not finite")
        flat = deviation.numel() == 0 or bool(deviation.max() == deviation.min())
        sharpness = 0.0 if flat else 1 / deviation.std(correction=0)
    arm_config = config
    if config.arm == "positive_only":
        arm_config = replace(config, alpha_n=0.0)
    elif config.arm == "negative_only":
        arm_config = replace(config, alpha_p=0.0)
    weight = stochasticity_weight(
        signal,
        mu,
        correct,
        alpha_p=arm_config.alpha_p,
        alpha_n=arm_config.alpha_n,
        lambda_p=config.lambda_p * sharpness,
        lambda_n=config.lambda_n * sharpness,
        arm=config.arm if config.arm in WEIGHT_ARMS else "literal",
        valid=counted,
    )
    return Stochasticity(weight=weight, signal=signal, mu=mu)


def weight_diagnostics(
    *,
    w_s: Float[Tensor, " B"],
    w_d: Float[Tensor, " B"],
    correct: Shaped[Tensor, " B"],
    advantage_sum: Float[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    sigma: Float[Tensor, " B"] | None = None,
    entropy: Float[Tensor, " B"] | None = None,
    surprise: Float[Tensor, " B"] | None = None,
) -> dict[str, float]:
    """The diagnostics of section 4.3, under the run log's metric names.

    Args:
        w_s: Stochasticity weights, [B].
        w_d: Difficulty weights, [B].
        correct: R, [B]; R >= .5 counts as correct here.
        advantage_sum: Sum of a trajectory's token advantages before the weights, [B].
        lengths: Response tokens, [B]; trajectories of length 0 are left out.
        sigma: Spread of values, [B]; None without a critic, and its entries are left out.
        entropy: Mean token entropy, [B].
        surprise: |r - V_0|, [B].

    Returns:
        Scalars; NaN where a class is empty or a correlation is undefined.
    """
    nonempty = lengths > 0
    tokens = lengths.to(advantage_sum.dtype)
    weighted = w_s * w_d * advantage_sum
    found: dict[str, float] = {}
    for name, chosen in (
        ("correct", nonempty & (correct >= 0.5)),
        ("incorrect", nonempty & (correct < 0.5)),
    ):
        found[f"weights/w_s_mean_{name}"] = w_s[chosen].mean().item()
        found[f"weights/w_s_cv_{name}"] = coefficient_of_variation(w_s[chosen])
        found[f"advantage/mean_{name}"] = (
            advantage_sum[chosen].sum() / tokens[chosen].sum()
        ).item()
        found[f"advantage/mean_{name}_weighted"] = (
            weighted[chosen].sum() / tokens[chosen].sum()
        ).item()
    found["weights/w_s_cv"] = coefficient_of_variation(w_s[nonempty])
    found["weights/w_d_mean"] = w_d[nonempty].mean().item()
    found["weights/w_d_cv"] = coefficient_of_variation(w_d[nonempty])
    found["weights/advantage_ratio"] = (
        weighted[nonempty].sum() / advantage_sum[nonempty].sum()
    ).item()
    if sigma is not None:
        found["sigma/mean"] = sigma[nonempty].mean().item()
        against = {"entropy": entropy, "length": lengths, "surprise": surprise}
        for name, other in against.items():
            if other is not None:
                found[f"sigma/corr_{name}"] = correlation(sigma, other, valid=nonempty)
    return found


def _step(x: Tensor) -> Tensor:
    return torch.heaviside(x, x.new_tensor(0.5))


def _check_coefficients(
    alpha_p: Coefficient, alpha_n: Coefficient, lambda_p: Coefficient, lambda_n: Coefficient
) -> None:
    for name, value, below, allowed in (
        ("alpha_p", alpha_p, math.inf, "be a number of at least 0"),
        ("alpha_n", alpha_n, 1.0, "lie in [0, 1), so that W_S stays positive"),
        ("lambda_p", lambda_p, math.inf, "be a number of at least 0"),
        ("lambda_n", lambda_n, math.inf, "be a number of at least 0"),
    ):
        possible = (value >= 0) & (value < below)
        if not (bool(possible.all()) if isinstance(possible, Tensor) else possible):
            raise ValueError(f"{name} must {allowed}, got {value}")
