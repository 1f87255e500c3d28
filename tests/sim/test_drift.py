"""Synthetic drift: the worlds have the growth, the stops and the shapes that they are said to."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.drift import SHAPES, Drift, draw_counts, step_of_round, true_rates

SMALL = Drift(num_prompts=40, rounds=12)
drifts = st.builds(
    lambda shape, growth, stop: replace(SMALL, shape=shape, growth=growth, stop=stop),
    st.sampled_from(SHAPES),
    st.sampled_from([0.0, 0.05, 0.4]),
    st.sampled_from([None, 0, 1, 5, 11, 99]),
)
property_test = settings(max_examples=40, deadline=None)


def logits(drift: Drift, seed: int = 0) -> np.ndarray:
    p = true_rates(drift, [seed])[0]
    return np.log(p) - np.log1p(-p)


@property_test
@given(drifts, st.integers(0, 1000))
def test_a_policy_moves_until_its_stop_and_not_after(drift: Drift, seed: int) -> None:
    stopped = true_rates(drift, [seed])[0]
    improving = true_rates(replace(drift, stop=None), [seed])[0]
    assert ((stopped > 0) & (stopped < 1)).all()
    for round_ in range(drift.rounds):
        last = round_ if drift.stop is None else min(round_, drift.stop)
        assert np.array_equal(stopped[:, round_], improving[:, last])


@property_test
@given(drifts, st.lists(st.integers(0, 50), min_size=1, max_size=3, unique=True))
def test_a_seed_draws_the_same_world_alone_or_among_others(drift: Drift, seeds: list[int]) -> None:
    rates = true_rates(drift, seeds)
    counts = draw_counts(rates, seeds, trials=4)
    for rate, count, seed in zip(rates, counts, seeds, strict=True):
        alone = true_rates(drift, [seed])
        assert np.array_equal(alone[0], rate)
        assert np.array_equal(draw_counts(alone, [seed], trials=4)[0], count)
    assert len({rate.tobytes() for rate in rates}) == len(seeds)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("growth", [0.03, 0.2])
def test_every_shape_grows_by_the_mean_growth(shape: str, growth: float) -> None:
    drift = Drift(shape=shape, growth=growth, num_prompts=500, rounds=11)
    p = true_rates(drift, range(30))
    gained = np.log(p / (1 - p))
    by_seed = (gained[..., -1] - gained[..., 0]).mean(axis=1) / 10
    error = by_seed.std(ddof=1) / math.sqrt(30)
    assert by_seed.mean() == pytest.approx(growth, abs=4 * error)
    assert error < 0.1 * growth


def test_steady_prompts_grow_by_their_own_constant_amount() -> None:
    steps = np.diff(logits(replace(SMALL, spread=0.5)), axis=1)
    assert np.ptp(steps, axis=1).max() < 1e-9
    assert steps[:, 0].std() == pytest.approx(0.05, rel=0.4)
    same = np.diff(logits(replace(SMALL, spread=0.0)), axis=1)
    assert same == pytest.approx(SMALL.growth)


def test_jumping_prompts_stand_still_or_jump() -> None:
    drift = replace(SMALL, shape="jumps", growth=0.6, jump=2.0)
    steps = np.diff(logits(drift), axis=1)
    jumped = steps > 1
    assert steps[jumped] == pytest.approx(2.0)
    assert steps[~jumped] == pytest.approx(0.0, abs=1e-9)
    assert jumped.mean() == pytest.approx(0.3, abs=0.07)


def test_prompts_with_shared_skills_move_in_as_many_ways_as_there_are_skills() -> None:
    drift = replace(SMALL, shape="skills", num_skills=3)
    assert np.linalg.matrix_rank(np.diff(logits(drift), axis=1), tol=1e-8) == 3
    assert np.diff(logits(drift), axis=1).min() > -1e-9


def test_counts_are_binomial() -> None:
    rates = np.tile([[0.1], [0.5], [0.97]], (1, 1, 20_000))
    counts = draw_counts(rates, [0], trials=16)[0]
    assert counts.min() >= 0
    assert counts.max() <= 16
    for p, row in zip(rates[0, :, 0], counts, strict=True):
        assert row.mean() == pytest.approx(16 * p, abs=0.06)
        assert row.var() == pytest.approx(16 * p * (1 - p), rel=0.06)


def test_rounds_become_steps_of_the_paper() -> None:
    # 17 398 prompts at 256 a step: 67.96 steps a round.
    assert [step_of_round(round_) for round_ in (0, 14, 28)] == [68, 1020, 1971]
    assert math.isnan(step_of_round(math.nan))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shape", "sudden"),
        ("growth", -0.1),
        ("growth", 4.0),
        ("growth", math.nan),
        ("stop", -1),
        ("num_prompts", 0),
        ("rounds", 0),
        ("spread", -1.0),
        ("jump", 0.0),
        ("num_skills", 0),
        ("burstiness", 0.0),
        ("initial_mean", math.inf),
        ("initial_sd", -1.0),
    ],
)
def test_an_impossible_drift_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Drift(**{name: value})
