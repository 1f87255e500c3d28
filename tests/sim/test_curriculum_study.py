"""The curriculum study: numbers against loops, verdicts in worlds where they must differ."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cvpo import CurriculumConfig, Curve, StochasticityConfig
from cvpo.curriculum import BOTTLENECK
from sim.bandit import BanditConfig
from sim.record import BANDS
from sim.studies.curriculum import (
    CONSTANT,
    CONTROLS,
    CVPO,
    STUDY,
    VAPO,
    W_D,
    W_S,
    CurriculumSettings,
    accuracy,
    area,
    at_rollouts,
    band_of,
    band_records,
    curve_rows,
    early_rows,
    effect_rows,
    equal_rollouts_rows,
    lead_verdict,
    misallocated,
    misallocation,
    moved,
    phase_rows,
    phase_settings,
    rival_rows,
    shares,
    switch_rows,
)
from sim.study import Row, SimError, read_settings, run_study
from sim.trace import Trace, simulate
from sim.training import Budget, Setting

property_test = settings(max_examples=30, deadline=None)
weights = st.lists(st.floats(0.01, 10), min_size=2, max_size=8)

WORLD = BanditConfig(prompts=64, held_out=16)
BUDGET = Budget(batch=16, steps=60, every=3)
SEEDS = tuple(range(5))

PROMOTING = Curve(-20.0, 0.6, 2.0, 3.0)
"""A bottleneck curve that gives hard prompts most of what it takes from easy ones."""
DEMOTING = Curve(20.0, 0.6, 2.0, 2.0)
"""A bottleneck curve that takes from hard prompts most of all."""
FEEBLE = Curve(1.6, 2.0, 2.0, -1.0)
"""An early curve far below 1: W_D as a smaller step."""
PEAKED = Curve(20.0, 0.2, 20.0, 0.8)
"""An early curve that leaves out prompts at both ends: an allocation to speak of."""


@cache
def trained(setting: Setting) -> Trace:
    return simulate(WORLD, BUDGET, [setting], SEEDS)


def traces(*chosen: Setting) -> dict[str, Trace]:
    return {setting.name: trained(setting) for setting in chosen}


def row_of(rows: list[Row], quantity: str, setting: str = "") -> Row:
    (found,) = (row for row in rows if quantity in row.quantity and setting in row.setting)
    return found


def with_curves(setting: Setting, **curves: Curve | float) -> Setting:
    return replace(setting, curriculum=replace(setting.curriculum, **curves))


# ---------------------------------------------------------------------------------- curves


@property_test
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.integers(0, 2**32 - 1))
def test_area_is_the_trapezoids_one_by_one(heights: list[float], seed: int) -> None:
    at = np.random.default_rng(seed).integers(1, 9, size=len(heights)).cumsum()
    total = sum((at[i + 1] - at[i]) * (heights[i] + heights[i + 1]) / 2 for i in range(len(at) - 1))
    found = area(np.array(heights)[:, None], at)
    assert found == pytest.approx([total / (at[-1] - at[0])])


def test_equal_rollouts_are_earlier_for_those_who_discard() -> None:
    vapo = trained(VAPO)
    assert np.array_equal(at_rollouts(vapo, vapo), accuracy(vapo))
    # Twice the rollouts a step, same rates: the reading at VAPO's end is that of half the steps.
    twice = replace(vapo, rollouts=2 * vapo.rollouts)
    middle = list(vapo.steps).index(30)
    assert at_rollouts(twice, vapo)[-1] == pytest.approx(accuracy(vapo)[middle])


def test_a_rival_that_discards_is_compared_in_both_ways() -> None:
    dapo = trained(Setting("dapo", method="dapo"))
    rows = rival_rows("dapo", dapo, trained(VAPO))
    steps, rollouts = (
        row_of(rows, "final accuracy", f"equal {unit}") for unit in ("steps", "rollouts")
    )
    assert steps.value > rollouts.value + 0.01
    assert row_of(rows, "discarded").value == pytest.approx(
        1 - BUDGET.steps * 16 * 8 / dapo.rollouts[-1].mean(), abs=0.05
    )
    whole = rival_rows("grpo", trained(Setting("grpo", method="grpo")), trained(VAPO))
    assert [row.setting for row in whole] == ["grpo - vapo; equal steps and rollouts"] * 2


def test_bands_hold_every_trained_prompt_once_and_average_to_all() -> None:
    frame = pd.DataFrame(band_records("vapo", trained(VAPO)))
    assert len(frame) == len(SEEDS) * len(trained(VAPO).steps) * (len(BANDS) + 2)
    wide = frame.pivot_table(index=["seed", "step"], columns="band", values="accuracy")
    sizes = np.bincount(band_of(trained(VAPO))[0])
    mean = sum(wide[name] * size for name, size in zip(BANDS, sizes, strict=True)) / 64
    assert np.allclose(mean, wide["all"])
    start = wide.xs(0, level="step")
    assert (start["hard"] < start["medium"]).all()
    assert (start["medium"] < start["easy"]).all()


# ---------------------------------------------------------------------------------- weights


@property_test
@given(weights, st.integers(0, 2**32 - 1), st.floats(0.1, 10))
def test_misallocated_weight_is_half_the_summed_distance_of_the_shares(
    weight: list[float], seed: int, scale: float
) -> None:
    ideal = np.random.default_rng(seed).random(len(weight)) + 0.01
    a, b = np.array(weight), ideal
    expected = sum(
        abs(x / sum(weight) - y / ideal.sum()) for x, y in zip(weight, ideal, strict=True)
    )
    assert misallocated(a, b) == pytest.approx(expected / 2)
    assert misallocated(a, scale * a) == pytest.approx(0, abs=1e-12)
    assert misallocated(b, a) == pytest.approx(misallocated(a, b))
    assert 0 <= misallocated(a, b) <= 1


def test_misallocated_weight_is_all_of_it_without_a_common_prompt() -> None:
    assert misallocated(np.array([1.0, 0.0]), np.array([0.0, 3.0])) == 1
    assert shares(np.array([[1.0, 3.0], [2.0, 2.0]])).tolist() == [[0.25, 0.75], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([2.0, 0.5, 0.5], 1.0),  # all that the others lose
        ([1.5, 0.5, 0.5], 0.5),
        ([1.0, 0.5, 0.5], 0.0),  # demotion alone
        ([0.5, 0.5, 0.5], -0.5),
        ([2.0, 1.0, 1.0], math.nan),  # nobody lost: nothing was moved
    ],
)
def test_weight_is_moved_as_far_as_the_hard_gain_what_others_lose(
    after: list[float], expected: float
) -> None:
    hard = np.array([True, False, False])
    assert moved(np.ones(3), np.array(after), hard) == pytest.approx(expected, nan_ok=True)
    assert math.isnan(moved(np.ones(3), np.array(after), np.zeros(3, dtype=bool)))


def test_w_d_at_the_true_rates_is_not_misallocated_and_the_tracked_one_is() -> None:
    (oracle,) = (setting for setting in CONTROLS if setting.difficulty == "oracle")
    found = misallocation(trained(oracle), oracle.curriculum)
    assert np.allclose(found["tracked_true"], 0, atol=1e-6)
    assert np.allclose(found["tracked_information"], found["true_information"], atol=1e-6)
    assert (misallocation(trained(W_D), W_D.curriculum)["tracked_true"] > 1e-3).all()


def test_a_frozen_policy_is_misallocated_less_and_less() -> None:
    early = phase_settings(0.1)[2]
    frozen = simulate(replace(WORLD, stops_after=0), BUDGET, [early], SEEDS)
    distance = misallocation(frozen, early.curriculum)["tracked_true"].mean(axis=1)
    assert distance[-1] < distance[len(distance) // 2] < distance[0]


def test_misallocation_reads_each_reading_in_its_own_phase() -> None:
    both, _, _ = phase_settings(0.1)
    oracle = replace(both, name="oracle", difficulty="oracle")
    trace = trained(oracle)
    assert (trace.switched < BUDGET.steps).all()
    assert np.allclose(misallocation(trace, oracle.curriculum)["tracked_true"], 0, atol=1e-6)


# ---------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("lead", "part", "verdict"),
    [
        (0.02, 0.015, "holds"),
        (0.02, 0.002, "fails"),
        (0.02, 0.01, "undecided"),
        (-0.02, 0.0, "fails"),  # no lead at all
        (0.0, 0.0, "undecided"),
    ],
)
def test_a_lead_comes_from_what_makes_more_than_half_of_it(
    lead: float, part: float, verdict: str
) -> None:
    jitter = np.array([-1.0, 1.0, 0.5, -0.5, 0.0]) * 1e-4
    assert lead_verdict(lead + jitter, part + jitter[::-1]) == verdict


# ------------------------------------------------------------------- claim 7: the second phase


def test_the_printed_curves_demote_the_easy_and_hardly_promote_the_hard() -> None:
    rows = curve_rows(CurriculumConfig())
    assert row_of(rows, "half its range").value == pytest.approx(0.0734, abs=1e-4)
    assert row_of(rows, "change of W_D at the switch", "rho = 0").value == pytest.approx(
        1.031646 / 1.062281 - 1, abs=1e-6
    )
    largest = row_of(rows, "largest change")
    assert 1.143682 / 1.112254 - 1 < largest.value < 0.04
    assert row_of(rows, "mean change", "rho >= 0.8").value < -0.75
    assert row_of(rows, "others lose").verdict == "fails"


@pytest.mark.parametrize(
    ("bottleneck", "share", "part"),
    [(BOTTLENECK, "holds", "fails"), (PROMOTING, "holds", "holds"), (DEMOTING, "fails", "fails")],
)
def test_a_switch_is_judged_by_where_the_weight_goes(
    bottleneck: Curve, share: str, part: str
) -> None:
    both, _, _ = phase_settings(0.2)
    setting = with_curves(both, bottleneck=bottleneck)
    mostly_hard = replace(WORLD, difficulty_mean=-1.5)
    rows = switch_rows(simulate(mostly_hard, BUDGET, [setting], SEEDS), setting.curriculum)
    assert row_of(rows, "runs that switch").value == 1
    who = "rho <= 0.3"
    assert row_of(rows, "rise of their share", who).verdict == share
    assert row_of(rows, "others lose", who).verdict == part
    assert row_of(curve_rows(setting.curriculum), "others lose").verdict == part


def test_a_run_that_never_switches_says_nothing_of_phase_2() -> None:
    never = phase_settings(0.1)[2]
    (only,) = switch_rows(trained(never), never.curriculum)
    assert (only.value, only.verdict) == (0, "")


def test_phase_2_is_compared_with_staying_in_phase_1() -> None:
    chosen = phase_settings(0.1)
    rows = phase_rows(traces(*chosen), chosen)
    both, _, never = (trained(setting) for setting in chosen)
    hard = band_of(both) == BANDS.index("hard")
    expected = np.mean(
        [
            both.rates[-1, r, :64][hard[r]].mean() - never.rates[-1, r, :64][hard[r]].mean()
            for r in range(len(SEEDS))
        ]
    )
    assert row_of(rows, "phase 2", "hard").value == pytest.approx(expected, abs=1e-6)


# -------------------------------------------------------------- claims 8, 9, 12: who beats whom


def test_w_d_beats_vapo_by_its_scale() -> None:
    rows = effect_rows(traces(VAPO, W_D, CONSTANT))
    whole = row_of(rows, "W_D: final accuracy", "trained")
    scale = row_of(rows, "W_D's scale", "trained")
    allocation = row_of(rows, "W_D's allocation", "trained")
    assert (whole.claim, whole.verdict) == (8, "holds")
    assert whole.value == pytest.approx(scale.value + allocation.value)
    assert scale.value > 3 * abs(allocation.value)
    assert len(rows) == 6  # trained and held-out prompts


def test_a_w_d_far_below_one_does_not_beat_vapo() -> None:
    feeble = with_curves(W_D, early=FEEBLE)
    row = row_of(effect_rows(traces(VAPO, feeble)), "W_D: final", "trained")
    assert row.verdict == "fails"


def test_two_weights_need_not_beat_one() -> None:
    # A W_S that only ever shrinks what wrong responses say is a smaller step.
    shrinking = StochasticityConfig(alpha_p=0.0, alpha_n=0.9, arm="constant")
    both = replace(CVPO, stochasticity=shrinking)
    alone = replace(W_S, stochasticity=shrinking)
    rows = effect_rows(traces(W_D, both, alone))
    assert row_of(rows, "both weights over W_D", "trained").verdict == "fails"
    assert row_of(rows, "both weights over W_S", "trained").verdict == "holds"


def test_at_equal_rollouts_a_gain_bought_with_rollouts_is_lost() -> None:
    def gain(factor: float) -> Row:
        cvpo = replace(
            trained(CVPO), rollouts=(factor * trained(CVPO).rollouts).round().astype(int)
        )
        plain = {VAPO.name: trained(VAPO), W_D.name: trained(W_D)}
        return row_of(equal_rollouts_rows({**plain, CVPO.name: cvpo}), "at equal rollouts")

    assert (gain(1.01).claim, gain(1.01).verdict, gain(3).verdict) == (12, "holds", "fails")
    # As many rollouts in a step: the gain at equal steps once more, and nothing about claim 12.
    assert (gain(1).claim, gain(1).verdict) == (None, "")
    assert gain(1).value > gain(1.01).value > 0


# ------------------------------------------------------------------- claim 13: the early lead


def test_the_early_lead_is_mostly_a_larger_step() -> None:
    rows = early_rows(traces(VAPO, W_D, W_S, CVPO, CONSTANT))
    found = row_of(rows, "beyond half")
    assert (found.claim, found.verdict) == (13, "fails")
    lead, scale = row_of(rows, "all of it").value, row_of(rows, "W_D's scale").value
    assert scale > 0.5 * lead > 0
    assert row_of(rows, "runs that switched").value == 0
    assert row_of(rows, "sd(W_D)").value < 0.05


def test_a_curriculum_that_allocates_does_make_an_early_lead() -> None:
    peaked = {
        setting.name: trained(with_curves(setting, early=PEAKED))
        for setting in (W_D, CVPO, CONSTANT)
    }
    rows = early_rows({**traces(VAPO, W_S), **peaked}, share=0.2)
    assert row_of(rows, "beyond half").verdict == "holds"


# -------------------------------------------------------------------------------- the study


@pytest.mark.slow
def test_the_study_runs_and_decides_its_claims(tmp_path: Path) -> None:
    chosen = CurriculumSettings(
        prompts=32, steps=20, seeds=(0, 1), output=tmp_path, jobs=1, backend="sequential"
    )
    rows = run_study(STUDY, chosen)
    assert {row.claim for row in rows if row.verdict} >= {7, 8, 9, 13}
    over_seeds = [row.verdict for row in rows if row.claim and not math.isnan(row.low)]
    assert set(over_seeds) == {"undecided"}  # two seeds claim nothing
    tables = {file.stem for file in (tmp_path / "curriculum" / "tables").iterdir()}
    assert {"study", "accuracy_by_band", "misallocation"} <= tables
    logs = {log.name for log in (tmp_path / "curriculum" / "runs").iterdir()}
    assert len(logs) == 4 * 2
    assert "cvpo-curriculum-1" in logs


@pytest.mark.parametrize("setting", ["steps=19", "prompts=31", "low_delta=-1", "rounds=3"])
def test_bad_settings_are_refused_by_name(setting: str) -> None:
    with pytest.raises(SimError, match=setting.partition("=")[0]):
        read_settings(STUDY, [setting])
