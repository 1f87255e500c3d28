"""W_S against plain loops written from section 4 of the method."""

import dataclasses
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.groups import group_mean, shuffle_within
from cvpo.stochasticity import (
    ARMS,
    WEIGHT_ARMS,
    StochasticityConfig,
    stochasticity,
    stochasticity_weight,
    trajectory_std,
    weight_diagnostics,
)

property_test = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)
JUNK = (math.nan, math.inf, -math.inf, 3e38)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def population_sd(x: list[float]) -> float:
    if len(x) == 0:
        return 0.0
    mean = math.fsum(x) / len(x)
    return math.sqrt(math.fsum((a - mean) ** 2 for a in x) / len(x))


def step(x: float) -> float:
    return 0.5 if x == 0 else float(x > 0)


def loop_weight(
    sigma: float,
    mu: float,
    R: float,
    *,
    alpha_p: float,
    alpha_n: float,
    lambda_p: float,
    lambda_n: float,
    arm: str,
) -> float:
    """Equations 15-16, the arms of 4.2 and partial credit of 4.4, one trajectory at a time."""
    plus_argument, minus_argument = lambda_p * (sigma - mu), lambda_n * (mu - sigma)
    S = sigmoid
    if arm == "none":
        return 1.0
    if arm == "constant":
        plus_argument = minus_argument = 0.0
    elif arm == "flipped":
        plus_argument, minus_argument = -plus_argument, -minus_argument
    elif arm == "hard":
        S = step
    W_plus = 1 + alpha_p * S(plus_argument)
    W_minus = 1 - alpha_n * S(minus_argument)
    return R * W_plus + (1 - R) * W_minus


def loop_stochasticity(
    signal: list[float],
    group: list[int],
    correct: list[float],
    valid: list[bool],
    config: StochasticityConfig,
) -> list[float]:
    """Algorithm 1 with every unit and arm that needs no randomness."""
    if config.signal == "variance":
        signal = [x**2 for x in signal]
    members = defaultdict(list)
    for i, k in enumerate(group):
        if valid[i]:
            members[k, config.mu == "outcome_group" and correct[i] >= 0.5].append(signal[i])
    mu = [0.0] * len(signal)
    for i, k in enumerate(group):
        if valid[i]:
            own = members[k, config.mu == "outcome_group" and correct[i] >= 0.5]
            mu[i] = math.fsum(own) / len(own)
    unit = 1.0
    if config.sharpness_unit == "deviation_sd":
        sd = population_sd([x - m for x, m, v in zip(signal, mu, valid, strict=True) if v])
        unit = 1 / sd if sd > 0 else 0.0
    return [
        loop_weight(
            signal[i],
            mu[i],
            correct[i],
            alpha_p=0.0 if config.arm == "negative_only" else config.alpha_p,
            alpha_n=0.0 if config.arm == "positive_only" else config.alpha_n,
            lambda_p=config.lambda_p * unit,
            lambda_n=config.lambda_n * unit,
            arm=config.arm,
        )
        if valid[i]
        else 1.0
        for i in range(len(signal))
    ]


def batch(seed: int, B: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    return {
        "sigma": torch.tensor(rng.gamma(2, 0.05, B)),
        "group": torch.tensor(rng.choice(np.array([5, -7, 10**6]), B)),
        "correct": torch.tensor(rng.choice([0.0, 1.0, 0.0, 1.0, 0.3, 0.5], B)),
        "valid": torch.tensor(rng.random(B) < 0.85),
    }


# ------------------------------------------------------------------------------------- sigma


@property_test
@given(seeds, st.integers(0, 5), st.integers(0, 40))
def test_sigma_agrees_with_its_loop_and_is_not_negative(seed: int, B: int, T: int) -> None:
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(B, T)), rng.random((B, T)) < rng.random((B, 1))
    expected = [population_sd(values[i][mask[i]].tolist()) for i in range(B)]
    values[~mask] = rng.choice(JUNK, int((~mask).sum()))
    found = trajectory_std(torch.tensor(values), torch.tensor(mask))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.ge(0).all()


def test_sigma_of_one_token_or_none_is_exactly_zero() -> None:
    values = torch.tensor([[0.7, 0.1, math.nan], [0.3, 0.2, 0.9]])
    mask = torch.tensor([[1, 0, 0], [0, 0, 0]])
    assert trajectory_std(values, mask).tolist() == [0.0, 0.0]
    assert trajectory_std(torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [0.0, 0.0]


@property_test
@given(seeds, st.floats(-50, 50), st.floats(0.01, 100))
def test_sigma_ignores_a_shift_and_scales_with_the_values(
    seed: int, shift: float, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    values = torch.tensor(rng.normal(size=(3, 11)))
    mask = torch.tensor(rng.random((3, 11)) < 0.7)
    sigma = trajectory_std(values, mask)
    torch.testing.assert_close(trajectory_std(values + shift, mask), sigma, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(trajectory_std(scale * values, mask), scale * sigma)
    order = torch.tensor(rng.permutation(11))
    torch.testing.assert_close(trajectory_std(values[:, order], mask[:, order]), sigma)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sigma_is_computed_in_single_precision_and_in_two_passes(dtype: torch.dtype) -> None:
    # A mean square minus a squared mean would lose sigma = .01 at an offset of 100 altogether.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 500, generator=generator)
    values = (noise * 0.01 + (100 if dtype == torch.float32 else 1)).to(dtype)
    sigma = trajectory_std(values, torch.ones(4, 500))
    assert sigma.dtype == torch.float32
    expected = [population_sd(row) for row in values.tolist()]
    assert sigma.tolist() == pytest.approx(expected, rel=1e-4)


def test_sigma_of_a_batch_of_more_than_one_chunk_is_that_of_its_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 220_000, generator=generator)
    mask = torch.rand(5, 220_000, generator=generator) < 0.5
    whole = trajectory_std(values, mask)
    rows = [trajectory_std(values[i : i + 1], mask[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(whole, torch.cat(rows), rtol=0, atol=0)


@property_test
@given(seeds, st.integers(1, 5), st.integers(1, 20))
def test_junk_in_masked_slots_changes_neither_sigma_nor_its_gradient(
    seed: int, B: int, T: int
) -> None:
    rng = np.random.default_rng(seed)
    values = torch.tensor(rng.normal(size=(B, T)))
    mask = torch.tensor(rng.random((B, T)) < 0.6)
    junk = torch.tensor(rng.choice(JUNK, (B, T)))
    outcomes = []
    for fill in (torch.zeros_like(values), junk):
        v = torch.where(mask, values, fill).requires_grad_()
        sigma = trajectory_std(v, mask)
        sigma.square().sum().backward()
        outcomes.append((sigma.detach(), v.grad))
    for clean, dirty in zip(*outcomes, strict=True):
        torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
        assert clean.isfinite().all()


def test_sigma_refuses_shapes_that_would_broadcast() -> None:
    for values, mask in ((torch.ones(2, 3), torch.ones(1, 3)), (torch.ones(3), torch.ones(3))):
        with pytest.raises(ValueError, match=r"\[B, T\]"):
            trajectory_std(values, mask)


# ----------------------------------------------------------------------------- group statistics


@property_test
@given(seeds, st.integers(0, 25), st.booleans())
def test_group_mean_agrees_with_its_loop_and_leaves_invalid_entries_out(
    seed: int, B: int, all_valid: bool
) -> None:
    data = batch(seed, B)
    sigma, group = data["sigma"], data["group"]
    valid = torch.ones(B, dtype=torch.bool) if all_valid else data["valid"]
    junk = torch.tensor(np.random.default_rng(seed).choice(JUNK, B))
    found = group_mean(torch.where(valid, sigma, junk), group, valid=None if all_valid else valid)
    for i in range(B):
        own = [sigma[j].item() for j in range(B) if group[j] == group[i] and valid[j]]
        expected = math.fsum(own) / len(own) if own else 0.0
        assert found[i].item() == pytest.approx(expected, rel=1e-12)


def test_group_mean_of_narrow_floats_is_computed_in_single_precision() -> None:
    x = torch.full((3000,), 0.0101).bfloat16()
    mean = group_mean(x, torch.zeros(3000, dtype=torch.int32))
    assert mean.dtype == torch.float32
    assert mean[0].item() == pytest.approx(x[0].item(), rel=1e-4)
    with pytest.raises(ValueError, match=r"\[B\]"):
        group_mean(torch.ones(2), torch.zeros(3, dtype=torch.long))


@property_test
@given(seeds, st.integers(0, 25))
def test_shuffling_keeps_what_each_group_and_outcome_holds(seed: int, B: int) -> None:
    rng = np.random.default_rng(seed)
    x = torch.arange(B).double()
    group = torch.tensor(rng.choice(np.array([5, -7, 10**6]), B))
    outcome = torch.tensor(rng.integers(0, 2, B))

    def shuffled() -> Tensor:
        return shuffle_within(x, group, outcome, generator=torch.Generator().manual_seed(3))

    cells = list(zip(group.tolist(), outcome.tolist(), strict=True))
    assert Counter(zip(cells, x.tolist(), strict=True)) == Counter(
        zip(cells, shuffled().tolist(), strict=True)
    )
    assert torch.equal(shuffled(), shuffled())
    assert torch.equal(x, torch.arange(B).double())


def test_shuffling_makes_every_order_of_a_cell_about_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([1.0, 9.0, 2.0, 3.0])
    group, outcome = torch.tensor([4, 8, 4, 4]), torch.tensor([True, True, True, True])
    counts = Counter(
        tuple(shuffle_within(x, group, outcome, generator=generator).tolist()) for _ in range(1200)
    )
    assert len(counts) == 6
    assert all(order[1] == 9.0 for order in counts)
    assert min(counts.values()) > 140  # 200 expected, sd 13


# ----------------------------------------------------------------------------------- the weight

GOLDEN = {"alpha_p": 0.5, "alpha_n": 0.5, "lambda_p": 50.0, "lambda_n": 50.0}


def test_weight_golden() -> None:
    sigma = torch.tensor([0.008, 0.015, 0.006, 0.020], dtype=torch.float64)
    correct, group = torch.tensor([1, 1, 0, 0]), torch.zeros(4, dtype=torch.long)
    expected = [1.22353701, 1.26716047, 0.71125232, 0.79784037]
    mu = group_mean(sigma, group)
    assert mu.tolist() == pytest.approx([0.01225] * 4)
    weight = stochasticity_weight(sigma, mu, correct, **GOLDEN)
    assert weight.tolist() == pytest.approx(expected, abs=5e-9)
    found = stochasticity(sigma, group, correct, config=StochasticityConfig(**GOLDEN))
    assert found.weight.tolist() == pytest.approx(expected, abs=5e-9)
    assert found.mu.tolist() == pytest.approx([0.01225] * 4)


@property_test
@given(
    seeds,
    st.integers(0, 20),
    st.sampled_from(WEIGHT_ARMS),
    st.floats(0, 3),
    st.floats(0, 0.99),
    st.floats(0, 300),
    st.floats(0, 300),
)
def test_weight_agrees_with_its_loop(
    seed: int,
    B: int,
    arm: str,
    alpha_p: float,
    alpha_n: float,
    lambda_p: float,
    lambda_n: float,
) -> None:
    data = batch(seed, B)
    mu = group_mean(data["sigma"], data["group"], valid=data["valid"])
    constants: dict[str, Any] = {
        "alpha_p": alpha_p,
        "alpha_n": alpha_n,
        "lambda_p": lambda_p,
        "lambda_n": lambda_n,
        "arm": arm,
    }
    dirty = torch.where(data["valid"], data["sigma"], math.nan)
    found = stochasticity_weight(dirty, mu, data["correct"], valid=data["valid"], **constants)
    for i in range(B):
        expected = 1.0
        if data["valid"][i]:
            sigma, R = data["sigma"][i].item(), data["correct"][i].item()
            expected = loop_weight(sigma, mu[i].item(), R, **constants)
        assert found[i].item() == pytest.approx(expected, abs=1e-9)
        assert found[i].item() > 0


@property_test
@given(
    st.lists(st.floats(0, 0.3), min_size=2, max_size=20), st.floats(0.01, 1), st.floats(0.01, 0.9)
)
def test_literal_weight_stays_in_its_range_and_never_falls_with_sigma(
    sigmas: list[float], alpha_p: float, alpha_n: float
) -> None:
    sigma = torch.tensor(sorted(sigmas), dtype=torch.float64)
    mu = sigma.mean().expand_as(sigma)
    constants = {"alpha_p": alpha_p, "alpha_n": alpha_n, "lambda_p": 50.0, "lambda_n": 50.0}
    correct = stochasticity_weight(sigma, mu, torch.ones_like(sigma), **constants)
    wrong = stochasticity_weight(sigma, mu, torch.zeros_like(sigma), **constants)
    assert correct.gt(1).all()
    assert correct.lt(1 + alpha_p).all()
    assert wrong.gt(1 - alpha_n).all()
    assert wrong.lt(1).all()
    assert correct.diff().ge(0).all()
    assert wrong.diff().ge(0).all()
    for R in (torch.ones_like(sigma), torch.zeros_like(sigma)):
        flipped = stochasticity_weight(sigma, mu, R, arm="flipped", **constants)
        assert flipped.diff().le(0).all()


@property_test
@given(seeds, st.integers(1, 20), st.floats(0, 1))
def test_partial_credit_mixes_the_two_branches(seed: int, B: int, R: float) -> None:
    data = batch(seed, B)
    mu = group_mean(data["sigma"], data["group"])
    mixed, plus, minus = (
        stochasticity_weight(data["sigma"], mu, torch.full((B,), x, dtype=torch.float64), **GOLDEN)
        for x in (R, 1.0, 0.0)
    )
    torch.testing.assert_close(mixed, R * plus + (1 - R) * minus)


@pytest.mark.parametrize("R", [True, 1, 1.0])
def test_correctness_may_be_boolean_integer_or_float(R: float) -> None:
    sigma, mu = torch.tensor([0.2]), torch.tensor([0.1])
    found = stochasticity_weight(sigma.bfloat16(), mu.bfloat16(), torch.tensor([R]), **GOLDEN)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1 + 0.5 * sigmoid(5), abs=1e-3)


def test_a_reward_of_minus_one_is_refused_as_correctness() -> None:
    sigma = torch.tensor([0.1, 0.2])
    for wrong in (-1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            stochasticity_weight(sigma, sigma, torch.tensor([1.0, wrong]), **GOLDEN)
    empty = torch.tensor([True, False])
    weight = stochasticity_weight(
        sigma, sigma, torch.tensor([1.0, math.nan]), valid=empty, **GOLDEN
    )
    assert weight.tolist() == [1.25, 1.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha_p", -0.1),
        ("alpha_n", 1.0),
        ("alpha_n", -0.1),
        ("lambda_p", -1.0),
        ("lambda_n", math.inf),
        ("alpha_p", math.nan),
    ],
)
def test_coefficients_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        StochasticityConfig(**{field: value})
    sigma = torch.tensor([0.1])
    with pytest.raises(ValueError, match=field):
        stochasticity_weight(sigma, sigma, sigma, **{**GOLDEN, field: value})


@pytest.mark.parametrize("field", ["arm", "mu", "signal", "sharpness_unit"])
def test_unknown_choices_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        StochasticityConfig(**{field: "other"})
    with pytest.raises(ValueError, match="arm"):
        stochasticity_weight(*[torch.ones(1)] * 3, **GOLDEN, arm="other")
    with pytest.raises(ValueError, match=r"\[B\]"):
        stochasticity_weight(torch.ones(2), torch.ones(1), torch.ones(2), **GOLDEN)


# --------------------------------------------------------------------------------- algorithm 1

DETERMINISTIC = [arm for arm in ARMS if arm not in ("shuffled", "entropy")]


@property_test
@given(
    seeds,
    st.integers(0, 20),
    st.sampled_from(DETERMINISTIC),
    st.sampled_from(["group", "outcome_group"]),
    st.sampled_from(["std", "variance"]),
    st.sampled_from(["absolute", "deviation_sd"]),
)
def test_every_arm_and_unit_agrees_with_its_loop(
    seed: int, B: int, arm: Any, mu: Any, signal: Any, unit: Any
) -> None:
    data = batch(seed, B)
    sharpness = 50.0 if unit == "absolute" else 1.5
    config = StochasticityConfig(
        alpha_p=0.4,
        alpha_n=0.3,
        lambda_p=sharpness,
        lambda_n=0.7 * sharpness,
        arm=arm,
        mu=mu,
        signal=signal,
        sharpness_unit=unit,
    )
    dirty = torch.where(data["valid"], data["sigma"], 0.0)
    found = stochasticity(dirty, data["group"], data["correct"], config=config, valid=data["valid"])
    expected = loop_stochasticity(
        data["sigma"].tolist(),
        data["group"].tolist(),
        data["correct"].tolist(),
        data["valid"].tolist(),
        config,
    )
    if arm == "hard":
        # A step cannot tell a deviation of 0 from its rounding; only compare clear ones.
        clear = (found.signal - found.mu).abs() > 1e-12
        assert found.weight[clear].tolist() == pytest.approx(
            [x for x, c in zip(expected, clear.tolist(), strict=True) if c], abs=1e-9
        )
        return
    assert found.weight.tolist() == pytest.approx(expected, abs=1e-9)


@property_test
@given(seeds, st.integers(1, 20), st.sampled_from(["group", "outcome_group"]))
def test_weights_ignore_the_order_of_trajectories_and_the_names_of_groups(
    seed: int, B: int, mu: Any
) -> None:
    data = batch(seed, B)
    config = StochasticityConfig(mu=mu, sharpness_unit="deviation_sd", lambda_p=1.0, lambda_n=2.0)
    plain = stochasticity(**data, config=config).weight
    order = torch.tensor(np.random.default_rng(seed).permutation(B))
    permuted = stochasticity(**{name: x[order] for name, x in data.items()}, config=config).weight
    torch.testing.assert_close(permuted, plain[order], rtol=1e-9, atol=1e-9)
    renamed = {**data, "group": 11 - 3 * data["group"]}
    torch.testing.assert_close(
        stochasticity(**renamed, config=config).weight, plain, rtol=1e-9, atol=1e-9
    )


@property_test
@given(seeds, st.integers(1, 20), st.floats(0, 10), st.sampled_from(["group", "outcome_group"]))
def test_a_common_shift_of_all_sigmas_of_a_group_changes_no_weight(
    seed: int, B: int, shift: float, mu: Any
) -> None:
    data = batch(seed, B)
    config = StochasticityConfig(mu=mu)
    plain = stochasticity(**data, config=config).weight
    shifted = {**data, "sigma": data["sigma"] + shift * (data["group"] % 3)}
    torch.testing.assert_close(
        stochasticity(**shifted, config=config).weight, plain, rtol=1e-9, atol=1e-9
    )


@property_test
@given(seeds, st.integers(1, 20), st.sampled_from(["group", "outcome_group"]))
def test_coefficients_of_each_trajectory_weigh_it_as_the_same_numbers_for_all(
    seed: int, B: int, mu: Any
) -> None:
    data, rng = batch(seed, B), np.random.default_rng(seed)
    settings = [
        {"alpha_p": 0.3, "alpha_n": 0.2, "lambda_p": 50.0, "lambda_n": 20.0},
        {"alpha_p": 1.5, "alpha_n": 0.0, "lambda_p": 0.0, "lambda_n": 300.0},
    ]
    which = torch.tensor(rng.integers(2, size=B))
    each = {name: torch.tensor([s[name] for s in settings])[which] for name in settings[0]}
    found = stochasticity(**data, config=StochasticityConfig(mu=mu, **each)).weight
    for index, constants in enumerate(settings):
        alone = stochasticity(**data, config=StochasticityConfig(mu=mu, **constants)).weight
        chosen = which == index
        torch.testing.assert_close(found[chosen], alone[chosen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["alpha_p", "alpha_n", "lambda_p", "lambda_n"])
def test_one_impossible_coefficient_among_many_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        StochasticityConfig(**{name: torch.tensor([0.3, -0.1, 0.3])})
    with pytest.raises(ValueError, match=f"^{name} must"):
        StochasticityConfig(**{name: torch.tensor([0.3, math.nan])})


@property_test
@given(seeds, st.integers(2, 20), st.floats(0.01, 100))
def test_sharpness_in_deviations_has_no_unit(seed: int, B: int, scale: float) -> None:
    data = batch(seed, B)
    config = StochasticityConfig(sharpness_unit="deviation_sd", lambda_p=2.0, lambda_n=2.0)
    plain = stochasticity(**data, config=config).weight
    scaled = stochasticity(**{**data, "sigma": scale * data["sigma"]}, config=config).weight
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-6)


def test_equal_sigmas_have_no_deviation_to_measure_in_and_get_the_midpoint() -> None:
    config = StochasticityConfig(sharpness_unit="deviation_sd", alpha_p=0.4, alpha_n=0.2)
    correct = torch.tensor([1.0, 0.0] * 4)
    for sigma in (0.7, 0.1, 0.0):
        found = stochasticity(
            torch.full((8,), sigma), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]), correct, config=config
        )
        assert found.weight.tolist() == pytest.approx([1.2, 0.9] * 4)


def test_a_critic_that_says_the_same_everywhere_gives_the_midpoint_in_every_unit() -> None:
    lengths = torch.arange(1, 17)
    mask = torch.arange(16) < lengths[:, None]
    sigma = trajectory_std(torch.full((16, 16), 0.7), mask)
    correct, group = torch.arange(16) % 2, torch.arange(16) // 4
    expected = [0.9, 1.2] * 8
    for unit, arm in (
        ("absolute", "literal"),
        ("deviation_sd", "literal"),
        ("deviation_sd", "flipped"),
        ("absolute", "hard"),
    ):
        config = StochasticityConfig(sharpness_unit=unit, arm=arm, alpha_p=0.4, alpha_n=0.2)
        found = stochasticity(sigma, group, correct, config=config)
        assert found.weight.tolist() == pytest.approx(expected, abs=1e-4), (unit, arm)


def test_an_empty_trajectory_gets_one_and_does_not_move_its_group() -> None:
    values = torch.tensor([[0.1, 0.5], [0.2, 0.9], [math.nan, math.nan]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    sigma, correct = trajectory_std(values, mask), torch.tensor([1.0, 0.0, 0.0])
    group, valid = torch.zeros(3, dtype=torch.long), mask.any(1)
    found = stochasticity(sigma, group, correct, config=StochasticityConfig(), valid=valid)
    without = stochasticity(sigma[:2], group[:2], correct[:2], config=StochasticityConfig())
    assert found.weight[2] == 1
    torch.testing.assert_close(found.weight[:2], without.weight)
    torch.testing.assert_close(found.mu[:2], without.mu)


@property_test
@given(seeds, st.integers(1, 24))
def test_the_shuffled_arm_weighs_a_permutation_within_prompt_and_outcome(seed: int, B: int) -> None:
    data = batch(seed, B)
    config = StochasticityConfig(arm="shuffled")
    found = stochasticity(
        **data, config=config, generator=torch.Generator().manual_seed(seed % 1000)
    )
    outcome, valid = (data["correct"] >= 0.5).tolist(), data["valid"].tolist()
    cells = list(zip(data["group"].tolist(), outcome, valid, strict=True))
    before = Counter(zip(cells, data["sigma"].tolist(), strict=True))
    assert Counter(zip(cells, found.signal.tolist(), strict=True)) == before
    expected = loop_stochasticity(
        found.signal.tolist(),
        data["group"].tolist(),
        data["correct"].tolist(),
        valid,
        dataclasses.replace(config, arm="literal"),
    )
    assert found.weight.tolist() == pytest.approx(expected, abs=1e-9)
    plain = stochasticity(**data, config=StochasticityConfig())
    torch.testing.assert_close(found.mu, plain.mu)


def test_the_entropy_arm_puts_entropy_in_the_place_of_sigma() -> None:
    data = batch(0, 12)
    entropy = torch.rand(12, generator=torch.Generator().manual_seed(0)).double()
    found = stochasticity(**data, config=StochasticityConfig(arm="entropy"), entropy=entropy)
    expected = stochasticity(**{**data, "sigma": entropy}, config=StochasticityConfig())
    torch.testing.assert_close(found.weight, expected.weight)
    torch.testing.assert_close(found.mu, expected.mu)


def test_an_arm_without_what_it_needs_is_refused() -> None:
    data = batch(0, 4)
    for arm, needed in (("entropy", "entrop"), ("shuffled", "generator")):
        with pytest.raises(ValueError, match=needed):
            stochasticity(**data, config=StochasticityConfig(arm=arm))


def test_the_default_is_the_printed_equation_at_the_headline_coefficient() -> None:
    config = StochasticityConfig()
    assert (config.alpha_p, config.alpha_n, config.lambda_p, config.lambda_n) == (0.3, 0.3, 50, 50)
    assert (config.arm, config.mu, config.signal, config.sharpness_unit) == (
        "literal",
        "group",
        "std",
        "absolute",
    )


# --------------------------------------------------------------------------------- diagnostics


def test_diagnostics_agree_with_their_definitions_and_leave_empty_trajectories_out() -> None:
    rng = np.random.default_rng(0)
    B = 12
    lengths = np.array([3, 5, 0, 7, 2, 9, 4, 4, 6, 0, 8, 1])
    correct = rng.integers(0, 2, B).astype(float)
    w_s, w_d = rng.uniform(0.7, 1.3, B), rng.uniform(0.5, 1.2, B)
    advantage_sum, sigma = rng.normal(size=B), rng.random(B)
    entropy, surprise = rng.random(B), rng.random(B)
    w_s[2] = w_d[9] = sigma[2] = entropy[9] = surprise[2] = advantage_sum[2] = math.nan
    found = weight_diagnostics(
        w_s=torch.tensor(w_s),
        w_d=torch.tensor(w_d),
        correct=torch.tensor(correct),
        advantage_sum=torch.tensor(advantage_sum),
        lengths=torch.tensor(lengths),
        sigma=torch.tensor(sigma),
        entropy=torch.tensor(entropy),
        surprise=torch.tensor(surprise),
    )
    full = lengths > 0
    for name, chosen in (("correct", full & (correct == 1)), ("incorrect", full & (correct == 0))):
        tokens = lengths[chosen].sum()
        weighted = (w_s * w_d * advantage_sum)[chosen].sum()
        assert found[f"weights/w_s_mean_{name}"] == pytest.approx(w_s[chosen].mean())
        assert found[f"weights/w_s_cv_{name}"] == pytest.approx(
            w_s[chosen].std() / w_s[chosen].mean()
        )
        assert found[f"advantage/mean_{name}"] == pytest.approx(
            advantage_sum[chosen].sum() / tokens
        )
        assert found[f"advantage/mean_{name}_weighted"] == pytest.approx(weighted / tokens)
    assert found["weights/w_s_cv"] == pytest.approx(w_s[full].std() / w_s[full].mean())
    assert found["weights/w_d_mean"] == pytest.approx(w_d[full].mean())
    assert found["weights/w_d_cv"] == pytest.approx(w_d[full].std() / w_d[full].mean())
    assert found["sigma/mean"] == pytest.approx(sigma[full].mean())
    for name, other in (("entropy", entropy), ("length", lengths), ("surprise", surprise)):
        expected = np.corrcoef(sigma[full], other[full])[0, 1]
        assert found[f"sigma/corr_{name}"] == pytest.approx(expected)


def test_diagnostics_of_a_batch_without_a_correct_answer_are_missing_not_zero() -> None:
    ones = torch.ones(3)
    found = weight_diagnostics(
        w_s=ones, w_d=ones, correct=0 * ones, advantage_sum=-ones, lengths=ones.long()
    )
    assert math.isnan(found["weights/w_s_mean_correct"])
    assert math.isnan(found["advantage/mean_correct"])
    assert found["advantage/mean_incorrect"] == -1
    assert "sigma/mean" not in found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_group_ids_of_any_size_name_different_groups(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    ids = torch.tensor([info.min, info.max // 2 + 1, info.max]).to(dtype).repeat_interleave(4)
    sigma, R = (
        torch.rand(12, generator=torch.Generator().manual_seed(0)),
        torch.tensor([1, 1, 0, 0]),
    )
    config = StochasticityConfig(mu="outcome_group", lambda_p=9.0, lambda_n=9.0)
    plain = torch.arange(3).repeat_interleave(4)
    found, expected = (
        stochasticity(sigma, group, R.repeat(3), config=config).weight for group in (ids, plain)
    )
    assert torch.equal(found, expected)


def test_a_sigma_that_is_not_finite_cannot_set_the_unit() -> None:
    config = StochasticityConfig(sharpness_unit="deviation_sd")
    sigma, group, R = torch.tensor([0.1, math.nan, 0.3]), torch.zeros(3).long(), torch.ones(3)
    with pytest.raises(ValueError, match="sigma of a trajectory that counts is not finite"):
        stochasticity(sigma, group, R, config=config)
    ignored = torch.tensor([True, False, True])
    weight = stochasticity(sigma, group, R, config=config, valid=ignored).weight
    assert weight[1] == 1
    assert weight.isfinite().all()


def test_a_valid_mask_of_another_shape_is_not_spread() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match="must share one shape"):
        stochasticity_weight(
            x, x, x, alpha_p=0.1, alpha_n=0.1, lambda_p=1, lambda_n=1, valid=torch.tensor([True])
        )
