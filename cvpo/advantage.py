"""Advantages: generalized advantage estimation and the grouped, critic-free estimators.

Section 2 of the method. Everything here is measured over response tokens only: whatever stands in a
masked slot, NaN and infinity included, changes neither a result nor a gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from cvpo.groups import group_index, group_mean

GROUP_KINDS = ("grpo", "dr-grpo", "rloo")

_BLOCK = 16
"""Slots that one triangular product covers."""

_CHUNK_ELEMENTS = 1 << 20
"""Rows are processed in chunks of about this many slots, so that intermediates stay in cache."""


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    gamma: float,
    lam: float | Float[Tensor, " B"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalized advantage estimation (eq. 2), exact under masks, lambda by trajectory.

    ``A_t = sum_k (gamma lam)^k delta_{t+k}`` with ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)`` and
    ``V`` after the last response token equal to 0. ``values[:, t]`` is the value of the state
    *before* token t. A masked slot between two response tokens is bridged: the result is that of
    the sequence with the masked slots removed.

    There is no loop over T. ``A`` is a suffix sum with geometric weights; it is computed by blocks,
    one triangular product for each block and the same recurrence, 16 times shorter, between them.

    Args:
        rewards: Reward of each token, [B, T]; a terminal reward sits on the last response token.
        values: Critic's values, [B, T].
        response_mask: Nonzero on response tokens, [B, T].
        gamma: Discount in [0, 1].
        lam: lambda in [0, 1], one number or one per trajectory [B].

    Returns:
        ``(advantages, returns)``, both [B, T], ``returns = advantages + values``; 0 on masked
        slots. float64 stays float64, everything else is computed and returned in float32.

    Raises:
        ValueError: Shapes differ, or gamma or lam lies outside [0, 1].
    """
    if rewards.ndim != 2 or not rewards.shape == values.shape == response_mask.shape:
        raise ValueError(
            "gae: rewards, values and response_mask must share one shape [B, T], got "
            f"{tuple(rewards.shape)}, {tuple(values.shape)}, {tuple(response_mask.shape)}"
        )
    B, T = values.shape
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gae: gamma must lie in [0, 1], got {gamma}")
    if isinstance(lam, Tensor) and lam.ndim > 0:
        if lam.shape != (B,):
            raise ValueError(f"gae: lam must be a number or [B] = [{B}], got {tuple(lam.shape)}")
    else:
        lam = float(lam)
    inside = (lam >= 0) & (lam <= 1) if isinstance(lam, Tensor) else 0.0 <= lam <= 1.0
    if not bool(torch.as_tensor(inside).all()):
        raise ValueError(f"gae: lam must lie in [0, 1], got {lam}")

    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    mask = response_mask.bool()
    if B * T == 0:
        empty = (rewards + values).to(dtype)
        return empty, empty.clone()
    advantages = torch.empty(B, T, dtype=dtype, device=values.device)
    returns = torch.empty_like(advantages)
    decay = gamma * (lam.to(values.device, dtype) if isinstance(lam, Tensor) else lam)
    chunk = max(1, _CHUNK_ELEMENTS // T)
    for start in range(0, B, chunk):
        rows = slice(start, start + chunk)
        advantages[rows], returns[rows] = _gae_rows(
            rewards[rows].to(dtype),
            values[rows].to(dtype),
            mask[rows],
            gamma=gamma,
            decay=decay[rows] if isinstance(decay, Tensor) else decay,
        )
    return advantages, returns


def _gae_rows(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    decay: float | Float[Tensor, " B"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    masked = ~mask
    V = values.masked_fill(masked, 0)
    if (mask[:, 1:] & masked[:, :-1]).any():
        # A response token behind a masked slot: move every row's response tokens to its front.
        front = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)
        packed = _move(values, mask, front)
        delta = _move(rewards, mask, front) - packed
        A = _move(_advantages(delta, packed, gamma=gamma, decay=decay), front, mask)
    else:
        delta = (rewards - values).masked_fill_(masked, 0)
        A = _advantages(delta, V, gamma=gamma, decay=decay)
    return A, V.add_(A)


def _move(
    x: Float[Tensor, "B T"], source: Bool[Tensor, "B T"], target: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The elements of x in `source`, in order, to the slots of `target`; 0 elsewhere."""
    return torch.zeros_like(x).masked_scatter_(target, x.masked_select(source))


def _advantages(
    delta: Float[Tensor, "B T"],
    V: Float[Tensor, "B T"],
    *,
    gamma: float,
    decay: float | Float[Tensor, " B"],
) -> Float[Tensor, "B T"]:
    """From ``r_t - V(s_t)``, which becomes delta in place, with zeros behind the response.

    Behind the last response token delta is 0, and so are the advantages.
    """
    delta[:, :-1].add_(V[:, 1:], alpha=gamma)
    return _discounted_suffix_sum(delta, decay)


def _discounted_suffix_sum(
    x: Float[Tensor, "B T"], decay: float | Float[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """``y_t = x_t + decay y_{t+1}``, by blocks."""
    B, T = x.shape
    K = min(_BLOCK, T)
    padded = torch.nn.functional.pad(x, (0, -T % K)) if T % K else x
    blocks = padded.reshape(B, -1, K)
    base = torch.as_tensor(decay, dtype=x.dtype, device=x.device)[..., None]
    powers = base ** torch.arange(K, -1, -1, device=x.device)  # decay^K, ..., decay, 1
    # Row i, column j: decay^(i - j) from the column's slot to the row's, 0 above the diagonal.
    weight = torch.nn.functional.pad(powers[..., 1:], (0, K - 1)).unfold(-1, K, 1).flip(-2)
    y = blocks @ weight  # [K, K] or [B, K, K]; sums that end with their block
    if y.shape[1] > 1:
        following = _discounted_suffix_sum(y[..., 0].contiguous(), decay**K)[:, 1:, None]
        y[:, :-1].addcmul_(following, powers[..., None, :-1])
    return y.flatten(1)[:, :T]


def terminal_rewards(
    reward: Float[Tensor, " B"], response_mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Token rewards [B, T] of a reward [B] that is paid on the last response token (0 elsewhere).

    A trajectory without response tokens gets no reward.

    Raises:
        ValueError: There is not one reward for each row of the mask.
    """
    if reward.shape != response_mask.shape[:1]:
        raise ValueError(
            f"terminal_rewards: reward must be [B] = [{len(response_mask)}], got "
            f"{tuple(reward.shape)}"
        )
    mask = response_mask.bool()
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).amax(1, keepdim=True) if mask.shape[1] else position
    return torch.where((position == last) & mask, reward[:, None], 0.0)


def length_adaptive_lambda(lengths: Shaped[Tensor, " B"], *, alpha: float) -> Float[Tensor, " B"]:
    """VAPO's lambda for the policy, ``1 - 1 / (alpha l)``, clamped to [0, 1].

    The horizon is ``alpha * l`` tokens: alpha = .05 in VAPO, .17 in CVPO, which are meant for
    responses of thousands of tokens. At 35 tokens .17 leaves a horizon of 6, and training stalls.

    Args:
        lengths: Response tokens of each trajectory, [B]; 0 gives lambda 0.
        alpha: Positive, finite.

    Raises:
        ValueError: alpha is not positive and finite.
    """
    if not 0 < alpha < float("inf"):
        raise ValueError(f"length_adaptive_lambda: alpha must be positive, got {alpha}")
    lengths = lengths.to(torch.promote_types(lengths.dtype, torch.float32))
    return (1 - 1 / (alpha * lengths)).clamp(0, 1)


def group_advantage(
    rewards: Float[Tensor, " B"], group: Int[Tensor, " B"], *, kind: str
) -> Float[Tensor, " B"]:
    """Advantage of each trajectory against the other rollouts of its prompt, without a critic.

    - ``grpo``: ``(r - mean) / (std + 1e-6)``, the sample standard deviation of the group
      (arXiv 2402.03300, as the public trainers compute it).
    - ``dr-grpo``: ``r - mean`` (arXiv 2503.20783).
    - ``rloo``: r minus the mean of the *others* of the group (leave-one-out).

    A group whose rewards are all equal carries no signal and gets exactly 0. That is decided by
    ``max == min``: the float32 standard deviation of eight times 0.7 is 6.4e-8, not 0.

    Args:
        rewards: Reward of each trajectory, [B].
        group: Any integer that names its prompt, [B].
        kind: One of ``grpo``, ``dr-grpo``, ``rloo``.

    Raises:
        ValueError: Unknown kind, shapes differ, or ``rloo`` with a group of one rollout.
    """
    if kind not in GROUP_KINDS:
        raise ValueError(f"group_advantage: kind must be one of {GROUP_KINDS}, got {kind!r}")
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(
            "group_advantage: rewards and group must both be [B], got "
            f"{tuple(rewards.shape)} and {tuple(group.shape)}"
        )
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    index, num_groups = group_index(group)
    count = torch.bincount(index, minlength=num_groups)[index]
    if kind == "rloo" and bool((count == 1).any()):
        lonely = group[count == 1][0].item()
        raise ValueError(
            f"group_advantage: rloo compares a rollout with the others of its group, but group "
            f"{lonely} has one rollout; sample at least two for each prompt"
        )
    bounds = rewards.new_zeros(num_groups)
    highest = bounds.scatter_reduce(0, index, rewards, "amax", include_self=False)
    lowest = bounds.scatter_reduce(0, index, rewards, "amin", include_self=False)
    centred = rewards - group_mean(rewards, group)
    if kind == "grpo":
        variance = group_mean(centred.square(), group) * count / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)
    elif kind == "rloo":
        centred = centred * count / (count - 1).clamp(min=1)
    return torch.where((highest == lowest)[index], 0.0, centred)
