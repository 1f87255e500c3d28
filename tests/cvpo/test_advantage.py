"""The advantages against plain loops written from section 2 of the method."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.advantage import (
    GROUP_KINDS,
    gae,
    group_advantage,
    length_adaptive_lambda,
    terminal_rewards,
)

property_test = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(0, 5), st.integers(0, 70))
unit = st.floats(0, 1)
JUNK = (math.nan, math.inf, -math.inf, 3e38)


def loop_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the sequence without its masked slots."""
    slots = [t for t in range(len(mask)) if mask[t]]
    r, V = [rewards[t] for t in slots], [values[t] for t in slots] + [0.0]
    delta = [r[t] + gamma * V[t + 1] - V[t] for t in range(len(slots))]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for t, slot in enumerate(slots):
        advantages[slot] = sum((gamma * lam) ** k * delta[t + k] for k in range(len(slots) - t))
        returns[slot] = advantages[slot] + V[t]
    return advantages, returns


def batch(seed: int, B: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask with gaps; about one trajectory in five is empty."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((B, T)) < rng.random((B, 1))) & (rng.random((B, 1)) < 0.8)
    return (
        torch.tensor(rng.normal(size=(B, T))),
        torch.tensor(rng.normal(size=(B, T))),
        torch.tensor(mask),
    )


def with_junk(x: Tensor, mask: Tensor, seed: int) -> Tensor:
    """A copy of x with NaN, infinities and huge numbers in its masked slots."""
    junk = torch.tensor(np.random.default_rng(seed).choice(JUNK, tuple(x.shape)))
    return torch.where(mask, x, junk.to(x.dtype))


def assert_equals_loop(
    found: tuple[Tensor, Tensor],
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: Tensor,
    tolerance: float,
) -> None:
    for row in range(len(values)):
        expected = loop_gae(
            rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam[row].item()
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(
                x[row].double(),
                torch.tensor(y, dtype=torch.float64),
                rtol=tolerance,
                atol=tolerance,
            )


# ------------------------------------------------------------------------------------------ GAE


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 1.0, [-2.6, -3.7, -4.8, -5.9, -8]),
        (1.0, 0.95, [-1.577813, -2.81875, -4.125, -5.5, -8]),
        (0.99, 0.95, [-1.647956, -2.86864, -4.155917, -5.514, -8]),
        (1.0, 0.0, [1.1, 1.1, 1.1, 2.1, -8]),
    ],
)
def test_gae_golden_with_gaps(gamma: float, lam: float, expected: list[float]) -> None:
    rewards = torch.tensor([[0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0]])
    values = torch.tensor([[50, 0.5, 4, 5, 6, -50, 0.3, 7, 9, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert advantages[mask.bool()].tolist() == pytest.approx(expected, abs=2e-6)
    assert returns[mask.bool()].tolist() == pytest.approx(
        [a + v for a, v in zip(expected, [4, 5, 6, 7, 9], strict=True)], abs=2e-6
    )
    assert advantages[~mask.bool()].eq(0).all()
    assert returns[~mask.bool()].eq(0).all()


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (1.0, [0.8, 0.5, 0.7, 0.2]),
        (0.0, [0.3, -0.2, 0.5, 0.2]),
        (0.95, [0.732725, 0.4555, 0.69, 0.2]),
    ],
)
def test_gae_golden_with_a_terminal_reward(lam: float, expected: list[float]) -> None:
    rewards, values = torch.tensor([[0.0, 0, 0, 1]]), torch.tensor([[0.2, 0.5, 0.3, 0.8]])
    advantages, _ = gae(rewards, values, torch.ones(1, 4), gamma=1.0, lam=torch.tensor([lam]))
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-6)


@property_test
@given(seeds, sizes, unit, st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_agrees_with_its_loop_with_a_lambda_for_each_trajectory(
    seed: int, size: tuple[int, int], lam: float, gamma: float
) -> None:
    rewards, values, mask = batch(seed, *size)
    lams = torch.tensor(np.random.default_rng(seed).choice([0.0, lam, 1.0], size[0]))
    found = gae(rewards, values, mask, gamma=gamma, lam=lams)
    assert_equals_loop(found, rewards, values, mask, gamma, lams, 1e-10)
    one_for_all = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert_equals_loop(
        one_for_all,
        rewards,
        values,
        mask,
        gamma,
        torch.full((size[0],), lam, dtype=torch.float64),
        1e-10,
    )


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 1100])
def test_gae_agrees_with_its_recurrence_at_every_length_near_a_block(T: int) -> None:
    rewards, values, _ = batch(T, 2, T)
    lams = [1.0, 0.97]
    advantages, _ = gae(
        rewards, values, torch.ones(2, T), gamma=0.999, lam=torch.tensor(lams, dtype=torch.float64)
    )
    for row, lam in enumerate(lams):
        following, next_value = 0.0, 0.0
        for t in reversed(range(T)):
            V = values[row, t].item()
            delta = rewards[row, t].item() + 0.999 * next_value - V
            following, next_value = delta + 0.999 * lam * following, V
            assert advantages[row, t].item() == pytest.approx(following, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_gae_computes_narrow_floats_in_single(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    rewards, values, mask = batch(3, 4, 40)
    rewards, values = rewards.to(dtype), values.to(dtype)
    advantages, returns = gae(rewards, values, mask.to(mask_dtype), gamma=1.0, lam=0.95)
    expected_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert advantages.dtype == returns.dtype == expected_dtype
    assert_equals_loop(
        (advantages, returns),
        rewards,
        values,
        mask,
        1.0,
        torch.full((4,), 0.95, dtype=torch.float64),
        1e-5,
    )


def test_gae_of_bfloat16_values_under_double_rewards_and_a_single_lambda() -> None:
    rewards, values, mask = batch(4, 3, 20)
    advantages, _ = gae(
        rewards, values.bfloat16(), mask, gamma=1.0, lam=torch.tensor([0.5, 1.0, 0.0]).bfloat16()
    )
    expected, _ = gae(
        rewards,
        values.bfloat16().double(),
        mask,
        gamma=1.0,
        lam=torch.tensor([0.5, 1.0, 0.0]).double(),
    )
    torch.testing.assert_close(advantages, expected)


@property_test
@given(seeds, st.integers(1, 5), st.integers(0, 70))
def test_junk_in_masked_slots_changes_neither_advantages_nor_gradients(
    seed: int, B: int, T: int
) -> None:
    rewards, values, mask = batch(seed, B, T)
    lam = torch.rand(B, generator=torch.Generator().manual_seed(seed % 1000)).double()
    outcomes = []
    for fill in (torch.zeros_like, lambda x: with_junk(x, mask, seed)):
        r = torch.where(mask, rewards, fill(rewards)).requires_grad_()
        v = torch.where(mask, values, fill(values)).requires_grad_()
        advantages, returns = gae(r, v, mask, gamma=0.9, lam=lam)
        (advantages.square().sum() + returns.sin().sum()).backward()
        outcomes.append((advantages.detach(), returns.detach(), r.grad, v.grad))
    for clean, dirty in zip(*outcomes, strict=True):
        torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
        assert clean[~mask].eq(0).all()


@property_test
@given(seeds, st.integers(1, 4), st.integers(0, 40))
def test_gae_bridges_gaps_as_if_the_masked_slots_were_removed(seed: int, B: int, T: int) -> None:
    rewards, values, _ = batch(seed, B, T)
    full = torch.ones(B, T)
    rng = np.random.default_rng(seed)
    wide = torch.zeros(B, 2 * T + 1, dtype=torch.bool)
    for row in range(B):
        wide[row, torch.tensor(rng.choice(2 * T + 1, T, replace=False), dtype=torch.long)] = True
    wide_rewards = torch.full((B, 2 * T + 1), 7.0).double()
    wide_values = torch.full((B, 2 * T + 1), -9.0).double()
    wide_rewards[wide], wide_values[wide] = rewards.flatten(), values.flatten()
    dense = gae(rewards, values, full, gamma=0.97, lam=0.9)
    spread = gae(wide_rewards, wide_values, wide, gamma=0.97, lam=0.9)
    for x, y in zip(dense, spread, strict=True):
        torch.testing.assert_close(y[wide], x.flatten(), rtol=1e-12, atol=1e-12)


@property_test
@given(seeds, st.integers(1, 5), st.integers(1, 50))
def test_lambda_one_gives_monte_carlo_returns_and_lambda_zero_td_errors(
    seed: int, B: int, T: int
) -> None:
    rewards, values, _ = batch(seed, B, T)
    full = torch.ones(B, T)
    _, returns = gae(rewards, values, full, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))
    advantages, _ = gae(rewards, values, full, gamma=0.9, lam=0.0)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    torch.testing.assert_close(advantages, rewards + 0.9 * following - values)


@property_test
@given(seeds, st.integers(1, 6), st.integers(1, 40))
def test_gae_of_permuted_trajectories_is_permuted(seed: int, B: int, T: int) -> None:
    rewards, values, mask = batch(seed, B, T)
    order = torch.tensor(np.random.default_rng(seed).permutation(B))
    lam = torch.linspace(0, 1, B).double()
    plain = gae(rewards, values, mask, gamma=0.9, lam=lam)
    permuted = gae(rewards[order], values[order], mask[order], gamma=0.9, lam=lam[order])
    for x, y in zip(plain, permuted, strict=True):
        torch.testing.assert_close(y, x[order], rtol=1e-12, atol=1e-12)


def test_gae_of_a_batch_of_more_than_one_chunk_is_that_of_its_rows() -> None:
    rewards, values, mask = batch(0, 5, 220_000)
    mask[2:4] = True  # rows with gaps and rows without in one batch
    lam = torch.tensor([1.0, 0.99, 0.5, 1.0, 0.9]).double()
    whole = gae(rewards, values, mask, gamma=1.0, lam=lam)
    for row in range(5):
        one = slice(row, row + 1)
        alone = gae(rewards[one], values[one], mask[one], gamma=1.0, lam=lam[one])
        for x, y in zip(whole, alone, strict=True):
            torch.testing.assert_close(x[one], y)


def test_gae_in_single_precision_stays_exact_over_a_response_of_paper_length() -> None:
    rewards, values, mask = batch(1, 3, 6144)
    mask[:] = True
    lam = torch.tensor([1.0, 0.999043, 0.95]).double()
    double = gae(rewards, values, mask, gamma=1.0, lam=lam)
    single = gae(rewards.float(), values.float(), mask, gamma=1.0, lam=lam.float())
    for x, y in zip(double, single, strict=True):
        torch.testing.assert_close(y.double(), x, rtol=1e-3, atol=1e-3)


def test_gae_of_nothing_is_nothing() -> None:
    for B, T in ((0, 5), (3, 0), (0, 0)):
        for lam in (0.5, torch.full((B,), 0.5)):
            advantages, returns = gae(
                torch.zeros(B, T), torch.zeros(B, T), torch.zeros(B, T), gamma=1.0, lam=lam
            )
            assert advantages.shape == returns.shape == (B, T)


def test_gae_refuses_shapes_that_would_broadcast_and_numbers_out_of_range() -> None:
    x = torch.zeros(2, 3)
    for arguments in ((x, x, x[:1]), (x, x[:, :1], x), (x[0], x[0], x[0])):
        with pytest.raises(ValueError, match=r"\[B, T\]"):
            gae(*arguments, gamma=1.0, lam=1.0)
    for gamma in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="gamma"):
            gae(x, x, x, gamma=gamma, lam=1.0)
    for lam in (-0.1, 1.1, math.nan, torch.tensor([0.5, 1.1]), torch.tensor([math.nan, 0.5])):
        with pytest.raises(ValueError, match="lam"):
            gae(x, x, x, gamma=1.0, lam=lam)
    with pytest.raises(ValueError, match="lam"):
        gae(x, x, x, gamma=1.0, lam=torch.ones(3))


@property_test
@given(seeds, sizes)
def test_terminal_reward_lies_on_the_last_response_token(seed: int, size: tuple[int, int]) -> None:
    _, _, mask = batch(seed, *size)
    reward = torch.tensor(np.random.default_rng(seed).normal(size=size[0]))
    placed = terminal_rewards(reward, mask.long())
    expected = torch.zeros(size, dtype=torch.float64)
    for row in range(size[0]):
        slots = [t for t in range(size[1]) if mask[row, t]]
        if slots:
            expected[row, slots[-1]] = reward[row]
    torch.testing.assert_close(placed, expected)


# -------------------------------------------------------------------- length-adaptive lambda


@pytest.mark.parametrize(
    ("alpha", "length", "expected"),
    [
        (0.17, 100, 0.941176),
        (0.17, 500, 0.988235),
        (0.17, 1000, 0.994118),
        (0.17, 6144, 0.999043),
        (0.05, 20, 0.0),
        (0.05, 1, 0.0),
        (0.05, 40, 0.5),
        (0.05, 100, 0.8),
        (0.05, 400, 0.95),
        (1.0, 0, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
def test_length_adaptive_lambda_golden(
    alpha: float, length: int, expected: float, dtype: torch.dtype
) -> None:
    lam = length_adaptive_lambda(torch.tensor([length], dtype=dtype), alpha=alpha)
    assert lam.is_floating_point()
    assert lam.tolist() == pytest.approx([expected], abs=5e-7)


@property_test
@given(st.lists(st.integers(0, 100_000), max_size=20), st.floats(1e-3, 10))
def test_length_adaptive_lambda_grows_with_length_inside_its_range(
    lengths: list[int], alpha: float
) -> None:
    lam = length_adaptive_lambda(torch.tensor(sorted(lengths), dtype=torch.long), alpha=alpha)
    for x, length in zip(lam.tolist(), sorted(lengths), strict=True):
        expected = 1 - 1 / (alpha * length) if length else 0.0
        assert x == pytest.approx(min(1.0, max(0.0, expected)), abs=1e-6)
    assert lam.diff().ge(0).all()


def test_length_adaptive_lambda_refuses_an_alpha_without_horizon() -> None:
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            length_adaptive_lambda(torch.tensor([10]), alpha=alpha)


# ------------------------------------------------------------------------- grouped estimators


def loop_group_advantage(rewards: list[float], group: list[int], kind: str) -> list[float]:
    members = defaultdict(list)
    for i, k in enumerate(group):
        members[k].append(i)
    result = [0.0] * len(rewards)
    for indices in members.values():
        r = [rewards[i] for i in indices]
        n, mean = len(r), math.fsum(r) / len(r)
        if max(r) == min(r):
            continue
        for i in indices:
            if kind == "dr-grpo":
                result[i] = rewards[i] - mean
            elif kind == "rloo":
                result[i] = rewards[i] - (math.fsum(r) - rewards[i]) / (n - 1)
            else:
                variance = math.fsum((x - mean) ** 2 for x in r) / (n - 1)
                result[i] = (rewards[i] - mean) / (math.sqrt(variance) + 1e-6)
    return result


def groups(seed: int, B: int) -> tuple[Tensor, Tensor]:
    """Rewards with ties, in groups of at least two under arbitrary names."""
    rng = np.random.default_rng(seed)
    names = rng.choice(np.arange(-50, 1_000_000, 997), max(B // 2, 1), replace=False)
    group = names[rng.integers(0, max(B // 3, 1), B)]
    lonely = [k for k in np.unique(group) if (group == k).sum() == 1]
    group = np.concatenate([group, np.array(lonely, dtype=group.dtype)])
    rewards = rng.choice([-1.0, 1.0, 0.7, rng.normal()], len(group))
    order = rng.permutation(len(group))
    return torch.tensor(rewards[order]), torch.tensor(group[order])


@property_test
@given(seeds, st.integers(0, 20), st.sampled_from(GROUP_KINDS))
def test_group_advantage_agrees_with_its_loop(seed: int, B: int, kind: str) -> None:
    rewards, group = groups(seed, B)
    found = group_advantage(rewards, group, kind=kind)
    expected = loop_group_advantage(rewards.tolist(), group.tolist(), kind)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    single = group_advantage(rewards.float(), group, kind=kind)
    assert single.tolist() == pytest.approx(
        loop_group_advantage(rewards.float().tolist(), group.tolist(), kind), abs=1e-4
    )


@property_test
@given(seeds, st.integers(1, 20), st.sampled_from(GROUP_KINDS), st.floats(-5, 5))
def test_group_advantage_ignores_order_names_and_a_shift_of_the_rewards(
    seed: int, B: int, kind: str, shift: float
) -> None:
    rewards, group = groups(seed, B)
    plain = group_advantage(rewards, group, kind=kind)
    order = torch.tensor(np.random.default_rng(seed).permutation(len(rewards)))
    torch.testing.assert_close(
        group_advantage(rewards[order], group[order], kind=kind), plain[order]
    )
    renamed = group_advantage(rewards, 3 - 2 * group, kind=kind)
    torch.testing.assert_close(renamed, plain)
    # Equal rewards stay equal after a shift, so groups without signal stay without.
    shifted = group_advantage(rewards + shift, group, kind=kind)
    torch.testing.assert_close(shifted, plain, rtol=1e-6, atol=1e-6)
    for k in group.unique():
        assert plain[group == k].sum().item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_equal_rewards_carry_no_signal(kind: str, dtype: torch.dtype, size: int) -> None:
    equal = torch.full((size,), 0.7, dtype=dtype)
    mixed = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
    group = torch.tensor([4] * size + [1] * 3)
    found = group_advantage(torch.cat([equal, mixed]), group, kind=kind)
    assert found[:size].eq(0).all()
    assert found[size:].ne(0).all()


def test_the_std_of_equal_rewards_in_single_precision_is_not_zero() -> None:
    # Why the rule above is max == min: this is the number that would be divided by.
    assert torch.full((8,), 0.7).std().item() > 0


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_group_advantage_reads_narrow_floats_integers_and_empty_batches(kind: str) -> None:
    rewards, group = torch.tensor([1, -1, 1, -1, -1]), torch.tensor([0, 0, 5, 5, 5])
    expected = loop_group_advantage(rewards.tolist(), group.tolist(), kind)
    for dtype in (torch.int64, torch.bfloat16, torch.float16, torch.float32):
        found = group_advantage(rewards.to(dtype), group.to(torch.int32), kind=kind)
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
    empty = group_advantage(torch.zeros(0), torch.zeros(0, dtype=torch.long), kind=kind)
    assert empty.shape == (0,)


def test_rloo_of_one_rollout_is_refused_by_its_group_and_grpo_gives_it_nothing() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([3, 3, 17])
    with pytest.raises(ValueError, match="17"):
        group_advantage(rewards, group, kind="rloo")
    for kind in ("grpo", "dr-grpo"):
        assert group_advantage(rewards, group, kind=kind)[2] == 0


def test_group_advantage_refuses_unknown_kinds_and_shapes() -> None:
    with pytest.raises(ValueError, match="kind"):
        group_advantage(torch.ones(2), torch.zeros(2, dtype=torch.long), kind="ppo")
    with pytest.raises(ValueError, match=r"\[B\]"):
        group_advantage(torch.ones(2), torch.zeros(3, dtype=torch.long), kind="grpo")


@pytest.mark.parametrize("reward", [torch.ones(1), torch.ones(2), torch.ones(3, 1)])
def test_terminal_rewards_wants_one_reward_a_row(reward: Tensor) -> None:
    with pytest.raises(ValueError, match=r"reward must be \[B\]"):
        terminal_rewards(reward, torch.ones(3, 4))


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_a_horizon_that_is_no_positive_number_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be positive"):
        length_adaptive_lambda(torch.tensor([0, 3]), alpha=alpha)
