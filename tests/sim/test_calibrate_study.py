"""The calibrate study: golden figure, fits in worlds whose answer is known, verdicts both ways."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.studies.calibrate import (
    BENCHMARKS,
    COEFFICIENTS,
    FIGURE,
    OURS,
    PRECISE,
    SAMPLES,
    SIGNS,
    STUDY,
    CalibrateSettings,
    candidate_settings,
    choose_problems,
    differences,
    draw_candidates,
    figure_rows,
    fit,
    has_shape,
    recover,
    run_covariance,
    sampling_covariance,
    shape_verdict,
)
from sim.study import SimError, read_settings, run_study
from sim.trace import Array

property_test = settings(max_examples=50, deadline=None)


def test_the_differences_of_figure_4() -> None:
    expected = [0.062, 0.047, 0.051, -0.053, 0.051, -0.016]
    assert differences(FIGURE) == pytest.approx(expected)
    assert (np.sign(differences(FIGURE)) == SIGNS).all()


@property_test
@given(st.integers(0, 2**31))
def test_differences_by_a_loop(seed: int) -> None:
    scores = np.random.default_rng(seed).random((4, 3, len(BENCHMARKS)))
    found = differences(scores)
    for candidate in range(4):
        steps = [
            scores[candidate, step + 1, b] - scores[candidate, step, b]
            for b in range(len(BENCHMARKS))
            for step in range(2)
        ]
        assert found[candidate] == pytest.approx(steps)


def test_sampling_error_of_aime24_by_hand_and_by_drawing() -> None:
    found = sampling_covariance(FIGURE, error="paired")
    variance = [0.169 * 0.831 / 960, 0.22 * 0.78 / 960, 0.167 * 0.833 / 960]
    assert found[2, 2] == pytest.approx(variance[0] + variance[1])
    assert found[2, 3] == pytest.approx(-variance[1])
    assert found[3, 3] == pytest.approx(variance[1] + variance[2])
    assert found[0, 2] == 0
    count = np.array([SAMPLES * benchmark.problems for benchmark in BENCHMARKS])
    drawn = np.random.default_rng(0).binomial(count, FIGURE, size=(40_000, 3, 3)) / count
    np.testing.assert_allclose(np.cov(differences(drawn).T), found, atol=2e-5)


def test_problems_that_are_drawn_anew_make_the_error_larger() -> None:
    paired, clustered = (
        sampling_covariance(FIGURE, error=error) for error in ("paired", "clustered")
    )
    np.testing.assert_allclose(clustered, SAMPLES * paired)


@property_test
@given(seed=st.integers(0, 2**31), index=st.integers(0, len(BENCHMARKS) - 1))
def test_a_benchmark_is_the_run_of_neighbours_nearest_to_the_paper_s_vapo(
    seed: int, index: int
) -> None:
    rng, benchmark = np.random.default_rng(seed), BENCHMARKS[index]
    start, end = rng.random((2, 60))
    found = choose_problems(start, end, benchmark)
    order = sorted(range(60), key=lambda prompt: start[prompt])
    runs = [order[i : i + benchmark.problems] for i in range(60 - benchmark.problems + 1)]
    nearest = min(abs(np.mean(end[run]) - benchmark.vapo) for run in runs)
    assert list(found) in runs
    assert abs(end[found].mean() - benchmark.vapo) == pytest.approx(nearest)


@property_test
@given(seed=st.integers(0, 2**31), seeds=st.integers(2, 5))
def test_run_covariance_by_a_loop(seed: int, seeds: int) -> None:
    simulated = np.random.default_rng(seed).random((3, seeds, 6))
    total = sum(np.cov(candidate.T) for candidate in simulated)
    np.testing.assert_allclose(run_covariance(simulated), total / 3)


def test_candidates_begin_with_the_project_s_reading_and_stay_in_range() -> None:
    given_ = CalibrateSettings(candidates=40)
    found = draw_candidates(given_)
    assert tuple(found[0]) == OURS
    assert found.shape == (40, 4)
    assert (found[:, 0] <= given_.most_p).all()
    assert (found[:, 1] <= given_.most_n).all()
    low, high = given_.sharpness
    assert ((found[1:, 2:] >= low) & (found[1:, 2:] <= high)).all()
    # A Latin hypercube: each thirteenth of a sharpness's logarithm holds three of 39.
    place = 13 * np.log(found[1:, 2] / low) / np.log(high / low)
    assert (np.bincount(place.astype(int)) == 3).all()


def test_every_drawn_candidate_can_be_trained() -> None:
    for candidate in draw_candidates(CalibrateSettings(candidates=40)):
        of = candidate_settings(candidate, "x")
        assert [s.stochasticity.alpha_p for s in of] == [c * candidate[0] for c in COEFFICIENTS]


# ------------------------------------------------------------------------------ known answers


def made_up(slopes: Array, *, noise: float, seeds: int = 5) -> Array:
    """Scores [candidates, seeds, 3, benchmarks]: a line in c for each benchmark and candidate."""
    rng = np.random.default_rng(0)
    c = np.array(COEFFICIENTS)[:, None]
    scores = 0.3 + c * slopes[:, None, None, :] + noise * rng.normal(size=(1, seeds, 3, 3))
    return np.asarray(scores + 0.1 * noise * rng.normal(size=(len(slopes), seeds, 3, 3)))


APART = np.random.default_rng(1).uniform(-0.5, 0.5, (40, len(BENCHMARKS)))


def test_a_known_candidate_is_found_where_candidates_lie_apart() -> None:
    found = recover(
        made_up(APART, noise=0.002), samples=PRECISE, generator=np.random.default_rng(0)
    )
    assert found.covered.mean() > 0.9
    assert found.share.mean() < 0.15


def test_nothing_is_ruled_out_where_candidates_are_alike() -> None:
    found = recover(
        made_up(0 * APART, noise=0.002), samples=PRECISE, generator=np.random.default_rng(0)
    )
    assert found.share.mean() > 0.9


def test_few_responses_leave_more_candidates_than_many() -> None:
    scores = made_up(0.3 * APART, noise=0.002)
    many, few = (
        recover(scores, samples=samples, generator=np.random.default_rng(0))
        for samples in (PRECISE, SAMPLES)
    )
    assert few.covered.mean() > 0.9
    assert few.share.mean() > many.share.mean()


def test_the_best_candidate_is_the_one_that_drew_the_figure() -> None:
    simulated = differences(made_up(APART, noise=0.001))
    truth = 7
    figure = differences(0.3 + np.array(COEFFICIENTS)[:, None] * APART[truth])
    found = fit(simulated, figure, sampling_covariance(FIGURE, error="paired"))
    assert found.kept[truth]
    assert found.chance > 0.05
    assert found.loss[found.best] <= found.loss[truth] < found.unmoved
    impossible = fit(simulated, figure + 1, sampling_covariance(FIGURE, error="paired"))
    assert impossible.chance < 0.01


def with_signs(signs: Array, *, seeds: int = 5) -> Array:
    """Differences [seeds, 6] of these signs, with a little noise."""
    noise = np.random.default_rng(0).normal(size=(seeds, 6))
    return np.asarray(0.05 * signs + 0.001 * noise)


def test_the_shape_holds_fails_or_is_undecided() -> None:
    assert shape_verdict(with_signs(SIGNS)) == "holds"
    assert shape_verdict(with_signs(np.ones(6))) == "fails"
    assert shape_verdict(with_signs(SIGNS, seeds=4)) == "undecided"
    noisy = with_signs(SIGNS)
    noisy[:, 3] = [0.1, -0.1, 0.1, -0.1, 0.0]
    assert shape_verdict(noisy) == "undecided"


def test_the_rows_of_claim_10_follow_their_numbers() -> None:
    hold, fail = (figure_rows(with_signs(signs), "") for signs in (SIGNS, np.ones(6)))
    assert {row.verdict for row in hold} == {"holds"}
    assert [row.verdict for row in fail] == ["holds"] * 3 + ["fails", "holds", "fails", "fails"]
    assert (hold[-1].value, fail[-1].value) == (6, 4)
    assert has_shape(np.stack([SIGNS, np.ones(6)])).tolist() == [True, False]


# ------------------------------------------------------------------------------------- the study


def test_the_study_runs_and_lists_its_candidates(tmp_path: Path) -> None:
    few = CalibrateSettings(
        seeds=(0, 1, 2), candidates=3, prompts=12, held_out=60, batch=6, rollouts=4, steps=4,
        output=tmp_path, backend="sequential", jobs=1,
    )  # fmt: skip
    rows = run_study(STUDY, few)
    assert {row.claim for row in rows} == {None, 10}
    assert {row.verdict for row in rows if row.claim == 10} == {"undecided"}
    assert all(np.isfinite(row.value) for row in rows)
    assert (tmp_path / "calibrate" / "tables" / "candidates.parquet").exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seeds=[0, 1]", "seeds"),
        ("most_n=2", "most_n"),
        ("sharpness=[50, 5]", "sharpness"),
        ("held_out=10", "held_out"),
    ],
)
def test_settings_that_cannot_be_run_are_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(SimError, match=named):
        read_settings(STUDY, [override])
