"""The sensitivity study: indices of functions whose variance is known, and of worlds alike."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cvpo import StochasticityConfig
from sim.bandit import BanditConfig
from sim.studies.sensitivity import (
    DEFAULTS,
    PARAMETERS,
    STUDY,
    Index,
    Parameter,
    SensitivitySettings,
    beyond,
    design,
    index_rows,
    indices,
    one_at_a_time,
    outcome,
    setting,
    side_rows,
    sides,
    study_parameters,
)
from sim.study import Desk, Row, SimError, read_settings, run_study
from sim.trace import simulate
from sim.training import Budget, Setting

property_test = settings(max_examples=50, deadline=None)

WORLD = BanditConfig(prompts=16)
BUDGET = Budget(batch=8, steps=12, every=6)


def desk(tmp_path: Path, seeds: Sequence[int] = (0, 1)) -> Desk:
    chosen = SensitivitySettings(seeds=seeds, output=tmp_path, jobs=1, backend="sequential")
    return Desk("sensitivity", chosen)


def totals(rows: Sequence[Row]) -> dict[str, float]:
    """Total indices of the final accuracy by parameter."""
    return {
        row.setting.split()[0]: row.value
        for row in rows
        if row.quantity == "Sobol, final accuracy: total index"
    }


# ------------------------------------------------------------------------------ the constants


def test_there_are_sixteen_constants_and_their_defaults_lie_inside() -> None:
    assert len({parameter.name for parameter in PARAMETERS}) == 16
    for parameter in PARAMETERS:
        assert parameter.low < DEFAULTS[parameter.name] < parameter.high


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_setting_changes_its_constant_and_nothing_else(parameter: Parameter) -> None:
    plain = Setting("x")
    assert setting("x", {parameter.name: DEFAULTS[parameter.name]}) == plain
    changed = setting("x", {parameter.name: parameter.low})
    owner, _, field = parameter.name.rpartition(".")
    if owner:
        curve = getattr(plain.curriculum, owner)._replace(**{field: parameter.low})
        expected = replace(plain, curriculum=replace(plain.curriculum, **{owner: curve}))
    elif field in vars(StochasticityConfig()):
        weights = replace(plain.stochasticity, **{field: parameter.low})
        expected = replace(plain, stochasticity=weights)
    else:
        curriculum = replace(plain.curriculum, **{field: parameter.low})
        expected = replace(plain, curriculum=curriculum)
    assert changed == expected != plain


@property_test
@given(st.lists(st.floats(0, 1), min_size=16, max_size=16))
def test_every_corner_of_the_ranges_is_a_setting_that_can_be_trained(cube: list[float]) -> None:
    values = {p.name: float(p.at(np.array([u]))[0]) for p, u in zip(PARAMETERS, cube, strict=True)}
    made = setting("x", values)
    assert made.curriculum.low < made.curriculum.high
    for parameter in PARAMETERS:
        value = values[parameter.name]
        assert parameter.low - 1e-9 <= value <= parameter.high * (1 + 1e-9)


def test_a_logarithmic_range_has_the_geometric_mean_in_its_middle() -> None:
    assert Parameter("x", 2.0, 8.0, log=True).at(np.array([0, 0.5, 1])) == pytest.approx([2, 4, 8])
    assert Parameter("x", 2.0, 8.0).at(np.array([0, 0.5, 1])) == pytest.approx([2, 5, 8])


# -------------------------------------------------------------------------------- all at once


def test_the_design_takes_one_column_at_a_time_from_the_other_matrix() -> None:
    d, n = 3, 8
    blocks = design(d, n, seed=1).reshape(d + 2, n, d)
    a, b = blocks[:2]
    for column in range(d):
        for row in range(n):
            expected = [b[row, i] if i == column else a[row, i] for i in range(d)]
            assert blocks[2 + column, row].tolist() == expected
    assert ((blocks >= 0) & (blocks < 1)).all()
    assert not np.array_equal(design(d, n, seed=2), blocks.reshape(-1, d))


def test_indices_of_ishigamis_function() -> None:
    x = (2 * design(3, 2048, seed=0) - 1) * math.pi
    y = np.sin(x[:, 0]) + 7 * np.sin(x[:, 1]) ** 2 + 0.1 * x[:, 2] ** 4 * np.sin(x[:, 0])
    found = indices(y, 3, seed=0)
    assert [index.first for index in found] == pytest.approx([0.3139, 0.4424, 0.0], abs=0.03)
    assert [index.total for index in found] == pytest.approx([0.5576, 0.4424, 0.2437], abs=0.03)
    for index in found:
        assert index.first_low <= index.first <= index.first_high
        assert index.total_low <= index.total <= index.total_high
    assert indices(y, 3, seed=0) == found


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=5).filter(lambda w: max(map(abs, w)) > 0.1))
def test_in_a_sum_everyone_has_the_share_of_his_own_variance(slopes: list[float]) -> None:
    cube = design(len(slopes), 256, seed=0)
    found = indices(cube @ np.array(slopes), len(slopes), seed=0)
    variance = np.square(slopes)
    assert [index.total for index in found] == pytest.approx(variance / variance.sum(), abs=0.05)


def test_a_product_of_centred_factors_is_all_interaction() -> None:
    cube = design(3, 1024, seed=0) - 0.5
    first, second, absent = indices(cube[:, 0] * cube[:, 1], 3, seed=0)
    for index in (first, second):
        assert index.first == pytest.approx(0, abs=0.1)
        assert index.total == pytest.approx(1, abs=0.1)
    assert absent == Index(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("level", [0.7, 1 / 3, 0.0])
def test_where_nothing_changes_every_index_is_zero(level: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = indices(np.full(4 * 16, level), 2, seed=0)
    assert found == [Index(0, 0, 0, 0, 0, 0)] * 2


def test_rows_begin_with_the_largest_total() -> None:
    small, large = Index(0.1, 0, 0.2, 0.2, 0.1, 0.3), Index(0.7, 0.6, 0.8, 0.9, 0.8, 1.0)
    chosen = [Parameter("alpha_p", 0, 1), Parameter("alpha_n", 0, 1)]
    rows = index_rows(chosen, [small, large], of="y", points=16)
    assert [row.value for row in rows] == pytest.approx([0.9, 0.7, 0.2, 0.1, 0.8])
    assert (rows[0].low, rows[0].high) == (0.8, 1.0)
    assert rows[0].setting.startswith("alpha_n")


def test_beyond_the_mean_weight_a_line_in_it_is_gone() -> None:
    weight = np.linspace(0.5, 1.5, 20)
    assert beyond(0.3 + 0.2 * weight, weight) == pytest.approx(np.zeros(20), abs=1e-12)
    bump = np.cos(np.linspace(0, 2 * np.pi, 20))
    bump -= np.polyval(np.polyfit(weight, bump, 1), weight)
    assert beyond(0.3 + 0.2 * weight + bump, weight) == pytest.approx(bump)
    assert beyond(bump, np.ones(20)) is bump


# ------------------------------------------------------------------------------ one at a time


def test_effects_are_paired_by_seed_and_the_largest_comes_first() -> None:
    weak, strong = PARAMETERS[0], PARAMETERS[1]
    base = np.array([0.1, 0.5, 0.9])  # worlds differ by far more than the effects
    effects = [0.001, 0.002, -0.05, 0.01]
    jitter = np.array([-1e-4, 0.0, 1e-4])
    found = one_at_a_time(sides([weak, strong]), [base + e + jitter for e in effects], base)
    assert [side.parameter for side in found] == [strong, strong, weak, weak]
    assert [side.difference for side in found] == pytest.approx([-0.05, 0.01, 0.001, 0.002])
    assert found[0].high < -0.049
    assert [side.value for side in found[:2]] == [strong.low, strong.high]
    ratios = [row.value for row in side_rows(found, 0.1, seeds=3) if row.unit == "sd"]
    assert ratios == pytest.approx([0.5, 0.02])


# ------------------------------------------------------------------------------------- worlds


def test_the_mean_weight_of_a_method_without_weights_is_one() -> None:
    budget = Budget(batch=8, steps=10)
    plain, both = (
        outcome(simulate(WORLD, budget, [Setting(m, method=m)], [0, 1])) for m in ("vapo", "cvpo")
    )
    assert plain.weight == pytest.approx([1, 1])
    assert (both.weight > 1.02).all()
    assert (plain.gain > 0).all()
    assert (plain.accuracy > plain.gain).all()


def test_the_mean_weight_is_that_of_the_responses() -> None:
    constant = StochasticityConfig(alpha_p=0.4, alpha_n=0.2, arm="constant")
    method = Setting("x", method="cvpo-stochasticity", stochasticity=constant)
    trace = simulate(WORLD, Budget(batch=8, steps=10), [method], [0, 1])
    expected = [
        np.mean([r * 1.2 + (1 - r) * 0.9 for r in trace.accuracy[:, run]]) for run in range(2)
    ]
    assert outcome(trace).weight == pytest.approx(expected, rel=1e-5)


def test_without_alpha_lambda_does_not_matter(tmp_path: Path) -> None:
    chosen = [
        Parameter("alpha_p", 0.0, 0.0),
        Parameter("alpha_n", 0.0, 0.0),
        Parameter("lambda_p", 10.0, 400.0),
        Parameter("early.c1", -1.0, 1.0),
    ]
    found = totals(study_parameters(desk(tmp_path), WORLD, BUDGET, chosen, points=16))
    assert found["early.c1"] == pytest.approx(1, abs=0.25)
    for name in ("alpha_p", "alpha_n", "lambda_p"):
        assert found[name] == pytest.approx(0, abs=1e-6)


def test_with_alpha_and_without_w_ds_slope_lambda_is_all_that_matters(tmp_path: Path) -> None:
    chosen = [
        Parameter("alpha_p", 0.9, 0.9),
        Parameter("lambda_p", 0.0, 400.0),
        Parameter("early.c1", -0.2, -0.2),
    ]
    found = totals(study_parameters(desk(tmp_path), WORLD, BUDGET, chosen, points=16))
    assert found["lambda_p"] == pytest.approx(1, abs=0.25)
    assert found["early.c1"] == pytest.approx(0, abs=1e-6)


def test_in_a_frozen_world_nothing_matters(tmp_path: Path) -> None:
    frozen = replace(WORLD, own_rate=0.0, skill_rate=0.0)
    rows = study_parameters(desk(tmp_path), frozen, BUDGET, PARAMETERS[:2], points=4)
    assert set(totals(rows).values()) == {0.0}
    assert {row.value for row in rows if row.quantity.startswith("one at a time: change")} == {0.0}


@pytest.mark.slow
def test_the_phase_switches_in_the_default_world_and_no_verdict_is_given(tmp_path: Path) -> None:
    chosen = SensitivitySettings(
        points=2, seeds=(0, 1), output=tmp_path, jobs=1, backend="sequential"
    )
    rows = run_study(STUDY, chosen)
    share, step = (
        next(row.value for row in rows if row.quantity == quantity and row.setting == "defaults")
        for quantity in ("runs that switch", "step of the switch")
    )
    assert share == 1
    assert 40 < step < 110
    assert all(row.verdict == "" and row.claim is None for row in rows)
    tables = {file.stem for file in (tmp_path / "sensitivity" / "tables").iterdir()}
    assert {"study", "one_at_a_time", "sobol", "settings"} <= tables
    assert len(totals(rows)) == 16


@pytest.mark.parametrize(
    ("given_", "key"), [("points=48", "points"), ("prompts=30", "prompts"), ("rounds=1", "rounds")]
)
def test_bad_settings_are_refused_by_name(given_: str, key: str) -> None:
    with pytest.raises(SimError, match=key):
        read_settings(STUDY, [given_])
