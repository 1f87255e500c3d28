"""Truncated importance weights against a plain loop, and what they are for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from train.rollout.mismatch import truncated_importance

property_test = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)
caps = st.floats(1, 10)
JUNK = (math.nan, math.inf, -math.inf, 1e30)


def batch(seed: int, B: int = 5, T: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    rollout = -rng.gamma(1, 1.0, (B, T))
    trainer = rollout + rng.normal(0, 1.0, (B, T))
    return torch.tensor(trainer), torch.tensor(rollout), torch.tensor(rng.random((B, T)) < 0.7)


def loop(trainer: Tensor, rollout: Tensor, mask: Tensor, cap: float) -> Tensor:
    weights = torch.zeros(trainer.shape, dtype=torch.float64)
    for i in range(trainer.shape[0]):
        for t in range(trainer.shape[1]):
            if mask[i, t]:
                ratio = math.exp(trainer[i, t].item() - rollout[i, t].item())
                weights[i, t] = min(ratio, cap)
    return weights


@property_test
@given(seeds, caps)
def test_it_is_the_loop(seed: int, cap: float) -> None:
    trainer, rollout, mask = batch(seed)
    found = truncated_importance(trainer, rollout, mask, cap)
    torch.testing.assert_close(found, loop(trainer, rollout, mask, cap))


@property_test
@given(seeds, caps, st.sampled_from(JUNK))
def test_masked_slots_may_hold_anything(seed: int, cap: float, junk: float) -> None:
    trainer, rollout, mask = batch(seed)
    expected = truncated_importance(trainer, rollout, mask, cap)
    for spoiled in (trainer, rollout):
        spoiled[~mask] = junk
        assert torch.equal(truncated_importance(trainer, rollout, mask, cap), expected)


@property_test
@given(seeds, st.integers(1, 50))
def test_equal_policies_are_not_reweighed(seed: int, cap: int) -> None:
    trainer, _, mask = batch(seed)
    assert torch.equal(truncated_importance(trainer, trainer, mask, cap), mask.double())


@property_test
@given(seeds)
def test_a_high_cap_gives_the_trained_policy_s_expectation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trainer, rollout = (torch.tensor(rng.dirichlet(np.ones(6))).log()[None] for _ in range(2))
    reward = torch.tensor(rng.normal(size=(1, 6)))
    weights = truncated_importance(trainer, rollout, torch.ones(1, 6), 1e12)
    found, expected = (rollout.exp() * weights * reward).sum(), (trainer.exp() * reward).sum()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_golden_numbers() -> None:
    trainer = torch.tensor([[0.5, 0.2, 0.6, 0.1]]).log()
    rollout = torch.tensor([[0.25, 0.4, 0.1, 0.1]]).log()
    found = truncated_importance(trainer, rollout, torch.tensor([[1, 1, 1, 0]]), 3.0)
    torch.testing.assert_close(found, torch.tensor([[2.0, 0.5, 3.0, 0.0]]))


@pytest.mark.parametrize(
    ("trainer", "rollout", "expected"),
    [
        (-1.0, -math.inf, 2.0),
        (-math.inf, -1.0, 0.0),
        (1000.0, -1000.0, 2.0),
        (-0.1, math.nan, None),
    ],
)
def test_extremes(trainer: float, rollout: float, expected: float | None) -> None:
    found = truncated_importance(
        torch.tensor([[trainer]]), torch.tensor([[rollout]]), torch.ones(1, 1), 2.0
    ).item()
    # A NaN is handed on: to hide it would be to train on it.
    assert math.isnan(found) if expected is None else found == expected


def test_the_weights_are_constants() -> None:
    trainer, rollout, mask = batch(0)
    trainer.requires_grad_()
    assert not truncated_importance(trainer, rollout, mask, 2.0).requires_grad


def test_half_precision_is_widened_first() -> None:
    trainer, rollout = torch.tensor([[-0.7891]]), torch.tensor([[-1.2345]])
    half = (trainer.bfloat16(), rollout.bfloat16())
    found = truncated_importance(*half, torch.ones(1, 1), 5.0)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(math.exp(half[0].item() - half[1].item()), rel=1e-6)


@pytest.mark.parametrize("cap", [0.0, 0.99, -1.0, math.inf, math.nan])
def test_a_cap_below_one_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="cap must be finite and at least 1"):
        truncated_importance(*batch(0), cap)


def test_shapes_that_differ_are_refused() -> None:
    trainer, rollout, mask = batch(0)
    with pytest.raises(ValueError, match="shapes differ"):
        truncated_importance(trainer, rollout[:, :-1], mask, 2.0)
