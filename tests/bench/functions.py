"""The functions of a step at the paper's batch size, against a loop and against a copy."""

import torch
from torch import Tensor

from cvpo import BetaTracker, gae, group_mean, stochasticity_weight, trajectory_std
from tests.bench.table import Row, fastest

SAMPLES = 16
PROBLEMS = 17_398


def loop_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lam: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """GAE as trainers usually write it: a reverse loop over T, masked slots carried through."""
    keep = mask.to(values.dtype)
    next_value = following = torch.zeros(len(values))
    backwards = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * following
        next_value = keep[:, t] * values[:, t] + (1 - keep[:, t]) * next_value
        following = keep[:, t] * advantage + (1 - keep[:, t]) * following
        backwards.append(keep[:, t] * following)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + keep * values


def batch(B: int, T: int, *, gaps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, a mask and lambdas: ragged lengths, padded on the right.

    With gaps, one slot in ten inside a response is masked too, as a tool's output would be.
    """
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(B, T, generator=generator)
    values = torch.randn(B, T, generator=generator)
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=generator)
    if gaps:
        mask &= torch.rand(B, T, generator=generator) < 0.9
    return rewards, values, mask, 0.9 + 0.1 * torch.rand(B, generator=generator)


@torch.no_grad()
def gae_rows(B: int, T: int, *, repeats: int) -> list[Row]:
    """`gae` against the loop, and against a copy of what it reads."""
    rows = []
    for gaps in (False, True):
        rewards, values, mask, lam = batch(B, T, gaps=gaps)
        found = gae(rewards, values, mask, gamma=1.0, lam=lam)
        for ours, theirs in zip(
            found, loop_gae(rewards, values, mask, lam, gamma=1.0), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        del found, ours, theirs

        def vectorised(data: tuple[Tensor, ...] = (rewards, values, mask, lam)) -> object:
            return gae(*data[:3], gamma=1.0, lam=data[3])

        def loop(data: tuple[Tensor, ...] = (rewards, values, mask, lam)) -> object:
            return loop_gae(*data, gamma=1.0)

        def copy(data: tuple[Tensor, ...] = (rewards, values, mask)) -> object:
            return [tensor.clone() for tensor in data]

        jobs = {"gae": vectorised, "copy": copy}
        seconds = fastest(jobs, repeats=repeats)
        # The loop takes seconds: fewer turns, with gae beside it again.
        slow = fastest({"gae": vectorised, "loop": loop}, repeats=max(2, repeats // 5))
        what = f"gae [{B}, {T}]{', gaps in the mask' if gaps else ''}"
        faster, slower = slow["loop"] / slow["gae"], seconds["gae"] / seconds["copy"]
        loop_limits, copy_limits = ((None, None),) * 2 if gaps else ((5.0, 8.0), (4.0, 3.0))
        rows += [
            Row(what, "reverse loop", slow["gae"], faster, True, *loop_limits),
            Row(what, "copy of its inputs", seconds["gae"], slower, False, *copy_limits),
        ]
    return rows


@torch.no_grad()
def weighting_rows(B: int, T: int, *, repeats: int) -> list[Row]:
    """All that CVPO adds to a step, W_S from the values on and the tracker, against a copy."""
    _, values, mask, _ = batch(B, T, gaps=False)
    generator = torch.Generator().manual_seed(1)
    prompts = B // SAMPLES
    group = torch.arange(prompts).repeat_interleave(SAMPLES)
    correct = torch.randint(0, 2, (prompts * SAMPLES,), generator=generator)
    values, mask = values[: len(group)], mask[: len(group)]
    chosen = torch.randperm(PROBLEMS, generator=generator)[:prompts]
    tracker = BetaTracker(PROBLEMS)
    trials = torch.full((prompts,), SAMPLES)
    successes = correct.view(prompts, SAMPLES).sum(1)

    def weigh() -> object:
        sigma = trajectory_std(values, mask)
        mu = group_mean(sigma, group)
        weight = stochasticity_weight(
            sigma, mu, correct, alpha_p=0.3, alpha_n=0.3, lambda_p=50.0, lambda_n=50.0
        )
        tracker.observe(chosen, trials, successes)
        return weight

    seconds = fastest({"weigh": weigh, "copy": values.clone}, repeats=repeats)
    return [
        Row(
            f"sigma + mu + W_S + tracker [{B}, {T}], {prompts} prompts of {PROBLEMS}",
            "copy of the values",
            seconds["weigh"],
            seconds["weigh"] / seconds["copy"],
            faster=False,
            target=3.0,
        )
    ]
