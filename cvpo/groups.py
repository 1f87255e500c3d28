"""Statistics over the rollouts of one prompt. A group is named by any integer, in any order."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def group_index(group: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], int]:
    """Renumbers groups densely: the index [B] of each trajectory's group, and their number."""
    names, index = torch.unique(group, return_inverse=True)
    return index, len(names)


def group_mean(
    x: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    *,
    valid: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Mean of x over each trajectory's own group (mu_k of section 4, with x = sigma).

    The batch must be the whole batch of the step: over all ranks and micro-batches.

    Args:
        x: One number for each trajectory, [B].
        group: Its prompt, [B].
        valid: Which trajectories count, [B]; all when None. Invalid ones may hold NaN.

    Returns:
        [B], the mean of the group over its valid trajectories, given to all of them; 0 for a group
        without a valid one.

    Raises:
        ValueError: Shapes differ.
    """
    if x.ndim != 1 or x.shape != group.shape or (valid is not None and valid.shape != x.shape):
        shapes = [tuple(t.shape) for t in (x, group, valid) if t is not None]
        raise ValueError(f"group_mean: x, group and valid must all be [B], got {shapes}")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = torch.ones_like(x) if valid is None else valid.to(x.dtype)
    if valid is not None:
        x = x.masked_fill(~valid.bool(), 0)
    index, num_groups = group_index(group)
    zeros = x.new_zeros(num_groups)
    total, count = zeros.index_add(0, index, x), zeros.index_add(0, index, weight)
    return (total / count.clamp(min=1))[index]


def shuffle_within(
    x: Shaped[Tensor, " B"],
    group: Int[Tensor, " B"],
    outcome: Shaped[Tensor, " B"],
    *,
    generator: torch.Generator,
) -> Shaped[Tensor, " B"]:
    """Permutes x at random among the trajectories of the same group and the same outcome.

    The control arm ``shuffled``: every statistic of a group stays, what x says of one trajectory is
    lost.

    Args:
        x: One number for each trajectory, [B].
        group: Its prompt, [B].
        outcome: Its outcome class, [B]; any discrete values (booleans, integers).
        generator: Source of the permutation, on any device.
    """
    outcome_index, num_outcomes = group_index(outcome)
    cell, _ = group_index(group_index(group)[0] * max(num_outcomes, 1) + outcome_index)
    key = torch.rand(len(x), generator=generator, device=generator.device).to(x.device)
    by_key = torch.argsort(key)
    source = by_key[torch.argsort(cell[by_key], stable=True)]
    target = torch.argsort(cell, stable=True)
    shuffled = torch.empty_like(x)
    shuffled[target] = x[source]
    return shuffled
