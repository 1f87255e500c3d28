"""The tracker study: its scores against plain loops, its golden numbers, and its verdicts."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_distribution
from scipy.stats import betabinom, binom
from scipy.stats import t as student

from cvpo import read_table
from cvpo.metrics import Interval
from cvpo.trackers import TRACKERS, BetaTracker
from sim.drift import ROLLOUTS, Drift, true_rates
from sim.replay import REAL_RUN, Replay, read_replay
from sim.studies.tracker import (
    COVERAGE,
    FEWEST_UNITS,
    MARGIN,
    PAPER,
    STUDY,
    Contender,
    TrackerSettings,
    contenders,
    excesses,
    follow,
    lag,
    on_drift,
    on_replay,
    rate_noise,
    ratio_interval,
    real_rows,
    tracking_verdict,
    world_rows,
)
from sim.study import Row, SimError, read_settings, run_study

property_test = settings(max_examples=25, deadline=None)
ALL = contenders(TrackerSettings())
FORGETFUL = Contender("beta", 0.8)


# -------------------------------------------------------------------------------------- scores


@property_test
@given(st.sampled_from(ALL), st.integers(0, 1000), st.integers(1, 4), st.integers(1, 6))
def test_scores_are_those_of_a_loop_over_prompts_and_rounds(
    contender: Contender, seed: int, num_prompts: int, rounds: int
) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.02, 0.98, (num_prompts, rounds))
    counts = rng.binomial(8, rates)
    lengths = rng.integers(1, rounds + 1, num_prompts)
    mask = np.arange(rounds) < lengths[:, None]
    scores = follow(contender.build(counts[:, 0] / 8), counts, trials=8, mask=mask, rates=rates)
    for i in range(num_prompts):
        alone = contender.build(counts[i : i + 1, 0] / 8)
        for e in range(rounds):
            if e >= lengths[i]:
                assert all(math.isnan(score[i, e]) for score in scores)
                continue
            s = counts[i, e]
            expected = betabinom(8, alone.alpha.item(), alone.beta.item()).logpmf(s)
            assert scores.log_likelihood[i, e] == pytest.approx(expected, rel=1e-9)
            error = (alone.rho.item() - s / 8) ** 2
            assert scores.prediction_error[i, e] == pytest.approx(error, rel=1e-9, abs=1e-15)
            alone.observe(torch.tensor([0]), torch.tensor([8]), torch.tensor([s]))
            error = (alone.rho.item() - rates[i, e]) ** 2
            assert scores.truth_error[i, e] == pytest.approx(error, rel=1e-9, abs=1e-15)
            low, high = beta_distribution(alone.alpha.item(), alone.beta.item()).interval(COVERAGE)
            assert scores.covered[i, e] == (low <= rates[i, e] <= high)


@pytest.mark.parametrize("solved", [True, False])
def test_a_tracker_that_has_forgotten_its_prior_is_scored_in_every_round(solved: bool) -> None:
    # After 1100 rounds of one outcome DBB's smaller parameter is exactly 0.
    counts = np.full((1, 1100), 8 if solved else 0)
    tracker = Contender("dbb", 0.5).build(counts[:, 0] / 8)
    scores = follow(tracker, counts, trials=8, rates=np.full((1, 1100), 0.5))
    assert min(tracker.alpha.item(), tracker.beta.item()) == 0
    assert all(np.isfinite(score).all() for score in scores)
    assert scores.log_likelihood[0, -1] == pytest.approx(0, abs=1e-9)
    assert scores.covered[0, -1] == 0


def test_without_a_truth_there_is_no_error_against_it() -> None:
    scores = follow(BetaTracker(2), np.array([[1, 2], [3, 4]]), trials=8)
    assert np.isnan(scores.truth_error).all()
    assert np.isnan(scores.covered).all()
    assert np.isfinite(scores.log_likelihood).all()


def test_no_forgetting_covers_a_constant_rate_as_often_as_it_says() -> None:
    frozen = Drift(stop=0, num_prompts=4000, rounds=12)
    covered = on_drift(PAPER, frozen, [0], 5).by_seed["covered"][0]
    assert covered == pytest.approx(COVERAGE, abs=0.02)


def test_every_tracker_of_the_library_takes_part() -> None:
    assert {contender.kind for contender in ALL} == set(TRACKERS)
    assert ALL[0] == PAPER
    assert len({str(contender) for contender in ALL}) == len(ALL)


# ----------------------------------------------------------------------------------------- lag


@pytest.mark.parametrize(("discount", "rounds"), [(1.0, 20), (0.9, 6), (0.75, 3), (0.5, 1)])
def test_rounds_until_a_jump_is_half_seen(discount: float, rounds: int) -> None:
    assert lag(BetaTracker(1, discount=discount), 0.5) == rounds


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("window", [1, 4, 7])
def test_a_moving_average_has_seen_a_share_of_a_jump_after_that_share_of_its_window(
    window: int, share: float
) -> None:
    tracker = Contender("moving-average", window).build(np.zeros(1))
    assert lag(tracker, share) == math.ceil(share * window)


def test_a_fixed_difficulty_that_has_become_wrong_holds_an_estimate_back_for_ever() -> None:
    # A fifth of the evidence is the old difficulty's: rho tends to .8 * .9 < .81.
    assert math.isnan(lag(Contender("bots").build(np.zeros(1)), 0.9))


# ------------------------------------------------------------------------------------ verdicts


def test_a_ratio_with_equal_denominators_has_the_ordinary_t_interval() -> None:
    x = np.array([1.0, 2.0, 4.0, 7.0])
    found = ratio_interval(x, np.full(4, 2.0))
    half = student.ppf(0.975, 3) * x.std(ddof=1) / 2 / 2
    assert found.estimate == pytest.approx(1.75)
    assert (found.low, found.high) == pytest.approx((1.75 - half, 1.75 + half))


@property_test
@given(st.integers(0, 10_000), st.floats(0.01, 100))
def test_a_ratio_is_that_of_the_sums_and_scales_with_them(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(0.1, 1, (2, 6))
    found, scaled = ratio_interval(a, b), ratio_interval(scale * a, b)
    assert found.estimate == pytest.approx(a.sum() / b.sum())
    assert found.low < found.estimate < found.high
    ends = (scaled.low, scaled.estimate, scaled.high)
    assert ends == pytest.approx([scale * x for x in (found.low, found.estimate, found.high)])


def test_the_interval_of_a_ratio_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        b = rng.gamma(5, 1, 30)
        found = ratio_interval(b * rng.gamma(4, 0.3, 30), b)
        inside += found.low <= 1.2 <= found.high
    assert 0.91 <= inside / 400 <= 0.98


def interval(low: float, high: float, units: int = 5) -> Interval:
    return Interval((low + high) / 2, low, high, math.nan, 0.95, ("problems",), (units,))


@pytest.mark.parametrize(
    ("excess", "verdict"),
    [
        ([interval(-0.3, -0.1), interval(-0.1, MARGIN / 2)], "holds"),
        ([interval(-0.3, -0.1), interval(2 * MARGIN, 1.0)], "fails"),
        ([interval(-0.3, -0.1), interval(MARGIN / 2, 2 * MARGIN)], "undecided"),
        ([interval(2 * MARGIN, 1.0, units=4)], "undecided"),
        ([interval(-0.3, -0.1, units=4)], "undecided"),
        ([interval(math.nan, math.nan, units=1)], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_on_the_fifth_claim(excess: list[Interval], verdict: str) -> None:
    assert tracking_verdict(excess) == verdict


def test_the_intervals_of_several_comparisons_hold_together() -> None:
    rng = np.random.default_rng(0)
    paper, other = rng.uniform(1, 2, (2, 50))
    alone = excesses(paper, {FORGETFUL: other})[FORGETFUL]
    among = excesses(paper, {Contender("beta", d): other for d in (0.5, 0.7, 0.8)})[FORGETFUL]
    assert alone.estimate == among.estimate == pytest.approx(paper.sum() / other.sum() - 1)
    assert among.low < alone.low < alone.high < among.high


def verdict_in(drift: Drift) -> Row:
    chosen = [PAPER, FORGETFUL, Contender("beta", 0.5)]
    found = {contender: on_drift(contender, drift, range(5), 5) for contender in chosen}
    return world_rows("somewhere", found, improving=True)[0]


def test_where_rates_are_constant_no_forgetting_is_best() -> None:
    row = verdict_in(Drift(stop=0, num_prompts=300))
    assert (row.claim, row.verdict) == (5, "holds")
    assert row.high < 0


def test_where_rates_drift_no_forgetting_does_not_follow() -> None:
    row = verdict_in(Drift(growth=0.1, num_prompts=300))
    assert (row.claim, row.verdict) == (5, "fails")
    assert row.low > 1


@property_test
@given(st.integers(0, 10_000))
def test_a_ratio_to_what_may_be_0_has_no_interval(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, 1, (2, 8))
    for denominator in (np.zeros(8), b - b.mean(), -np.abs(b)):
        found = ratio_interval(a, denominator)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    assert math.isnan(ratio_interval(a, -np.abs(b)).estimate)
    assert ratio_interval(a, 2 + 0.1 * b).low < a.mean() / (2 + 0.1 * b).mean()


# ---------------------------------------------------------------------------- runs without truth


def replay_of(rates: np.ndarray, trials: int, seed: int = 1) -> Replay:
    counts = np.random.default_rng(seed).binomial(trials, rates)
    names = tuple(map(str, range(len(rates))))
    return Replay(names, counts, np.full(len(rates), rates.shape[1]), trials)


def rows_of(replay: Replay, burn_in: int = 5) -> list[Row]:
    chosen = [Contender("beta", discount) for discount in (1.0, 0.95, 0.9, 0.8, 0.7)]
    return real_rows({c: on_replay(c, replay, burn_in) for c in chosen}, replay)


def true_excess(replay: Replay, rates: np.ndarray, burn_in: int = 5) -> float:
    """Of the paper's squared error over the best discount's, of predictions against the truth."""

    def error(discount: float) -> float:
        tracker, total = BetaTracker(len(rates), discount=discount), 0.0
        prompt, k = torch.arange(len(rates)), torch.full((len(rates),), replay.trials)
        for epoch, s in enumerate(torch.from_numpy(replay.counts.T.copy())):
            if epoch >= burn_in:
                total += float(np.square(tracker.rho.numpy() - rates[:, epoch]).sum())
            tracker.observe(prompt, k, s)
        return total

    return error(1.0) / min(map(error, (0.95, 0.9, 0.8, 0.7))) - 1


def drifting(growth: float, rounds: int = 30, num_prompts: int = 300) -> np.ndarray:
    found = true_rates(Drift(growth=growth, rounds=rounds, num_prompts=num_prompts), [0])[0]
    return np.asarray(found)


@property_test
@given(st.integers(2, 9))
def test_the_noise_of_a_rate_is_estimated_without_bias(trials: int) -> None:
    p, s = np.linspace(0, 1, 21)[:, None], np.arange(trials + 1)
    expected = (binom.pmf(s, trials, p) * rate_noise(s, trials)).sum(axis=1)
    assert expected == pytest.approx((p * (1 - p) / trials)[:, 0], abs=1e-12)


@pytest.mark.parametrize("trials", [2, 8])
@pytest.mark.parametrize("growth", [0.03, 0.1])
def test_a_real_run_decides_by_the_error_against_rates_that_nobody_sees(
    trials: int, growth: float
) -> None:
    rates = drifting(growth)
    replay = replay_of(rates, trials)
    *_, noisy, row = rows_of(replay)
    truth = true_excess(replay, rates)
    assert row.low < truth < row.high
    if truth > MARGIN:
        assert row.verdict != "holds"
        assert noisy.value < row.value  # the noise hides an excess
    if growth == 0.1:
        assert row.verdict == "fails"
    assert (noisy.verdict, row.claim) == ("", 5)


@pytest.mark.parametrize("trials", [2, 8])
def test_a_run_without_drift_decides_nothing(trials: int) -> None:
    rates = np.repeat(np.random.default_rng(0).beta(0.7, 1, (300, 1)), 30, axis=1)
    rows = rows_of(replay_of(rates, trials))
    assert {row.verdict for row in rows} == {""}
    assert rows[-1].claim is None
    assert rows[-1].high < MARGIN  # though no forgetting is best there


def test_rates_that_fall_are_drift_as_well() -> None:
    rates = np.linspace(0.8, 0.2, 30) + np.random.default_rng(0).uniform(-0.1, 0.1, (200, 1))
    assert rows_of(replay_of(rates, 8))[-1].verdict == "fails"


def test_single_rollouts_decide_nothing() -> None:
    rows = rows_of(replay_of(drifting(0.1), 1))
    assert rows[0].low > 0  # drift there is
    assert {row.verdict for row in rows} == {""}


def test_a_slow_drift_of_a_large_run_is_followed() -> None:
    rates = drifting(0.003, rounds=15, num_prompts=3000)
    row = rows_of(replay_of(rates, 8))[-1]
    assert true_excess(replay_of(rates, 8), rates) < MARGIN
    assert row.verdict == "holds"


def test_constant_counts_leave_nothing_to_compare(tmp_path: Path) -> None:
    # The tracker starts at 1/2 and is right for ever: 0 / 0.
    history = tmp_path / "run.json"
    history.write_text(json.dumps(dict.fromkeys("abcdef", [0.5] * 7)))
    rows = run_study(STUDY, TrackerSettings(**SMALL, output=tmp_path, replay=history, seeds=(0,)))
    (excess,) = [row for row in rows if "less the rates' noise" in row.setting]
    assert math.isnan(excess.value)
    assert excess.verdict == ""


def test_what_stands_behind_a_row_of_the_real_run() -> None:
    rows = rows_of(replay_of(drifting(0.1, num_prompts=20), 8))
    assert {row.n for row in rows} == {20}
    assert rows[1].setting == "real run, 500 predictions: beta 1"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda k: st.tuples(
            st.just(k),
            st.lists(st.lists(st.integers(0, k), min_size=1, max_size=5), min_size=1, max_size=7),
        )
    ),
)
def test_any_tiny_history_has_rows(run: tuple[int, list[list[int]]]) -> None:
    trials, histories = run
    lengths = np.array(list(map(len, histories)))
    counts = np.array([history + [0] * (5 - len(history)) for history in histories])
    assume(lengths.max() > 1)  # else it is refused: no epoch is scored
    replay = Replay(tuple(map(str, range(len(histories)))), counts, lengths, trials)
    rows = real_rows({c: on_replay(c, replay, 1) for c in ALL}, replay)
    assert all(np.isfinite(row.value) for row in rows if "predictions" in row.setting)
    if (lengths > 1).sum() < FEWEST_UNITS:
        assert {row.verdict for row in rows} <= {"", "undecided"}


# -------------------------------------------------------------------------------- the real run


def test_how_well_each_discount_predicts_the_real_run() -> None:
    if not REAL_RUN.exists():
        pytest.skip(f"needs ../shared/data/runs/{REAL_RUN.name}, the history of a real run")
    replay = read_replay(REAL_RUN, trials=8)
    golden = {
        1.0: (-1.1344, 0.01895),
        0.95: (-1.0820, 0.01641),
        0.9: (-1.0644, 0.01534),
        0.8: (-1.0760, 0.01519),
        0.7: (-1.1049, 0.01589),
        0.5: (-1.1711, 0.01817),
    }
    chosen = [Contender("beta", discount) for discount in golden]
    _, *rows, excess, beyond = real_rows({c: on_replay(c, replay, 5) for c in chosen}, replay)
    likelihoods, errors = rows[: len(golden)], rows[len(golden) :]
    for row, (expected, _) in zip(likelihoods, golden.values(), strict=True):
        assert row.value == pytest.approx(expected, abs=5.1e-5)
    for row, (_, expected) in zip(errors, golden.values(), strict=True):
        assert row.value == pytest.approx(expected, abs=5.1e-6)
    assert {(row.claim, row.n) for row in rows} == {(5, 1209)}
    assert all("57955 predictions" in row.setting for row in rows)
    assert "against beta 0.8" in excess.setting
    assert excess.value == pytest.approx(0.01895 / 0.01519 - 1, abs=1e-3)
    assert beyond.value > 5 * excess.value
    assert (excess.verdict, beyond.claim, beyond.verdict) == ("", 5, "fails")


# ------------------------------------------------------------------------------------ the study

SMALL: dict[str, Any] = {
    "num_prompts": 30,
    "rounds": 8,
    "growths": (0.1,),
    "discounts": (0.8,),
    "dbb_discounts": (),
    "windows": (3,),
    "jobs": 1,
}


def test_the_study_measures_every_tracker_in_every_world(tmp_path: Path) -> None:
    history = tmp_path / "run.csv"
    history.write_text("prompt,0,1,2,3,4,5,6\na,1,2,3,4,5,6,7\nb,0,0,1,0,2,1,\n")
    given_settings = TrackerSettings(**SMALL, output=tmp_path, replay=history, seeds=(3, 4))
    rows = run_study(STUDY, given_settings)
    trackers = {"beta 1", "beta 0.8", "bots", "moving-average 3"}
    worlds = {f"{shape}, growth 0.1" for shape in ("steady", "jumps", "skills")}
    by_seed = read_table(tmp_path / "tracker", "tracker_seeds")
    by_round = read_table(tmp_path / "tracker", "tracker_rounds")
    for table in (by_seed, by_round):
        assert set(table["tracker"]) == trackers
        assert set(table["world"]) == worlds | {"plateau", "frozen"}
    assert len(by_seed) == 5 * 4 * 2
    assert len(by_round) == 5 * 4 * 8
    one = by_seed.query("world == 'frozen' and tracker == 'beta 1' and seed == 4")
    alone = on_drift(PAPER, Drift(stop=0, num_prompts=30, rounds=8), [4], 5)
    assert one["truth_error"].item() == pytest.approx(alone.by_seed["truth_error"][0])
    # Two seeds and two prompts: shown, but nothing is claimed.
    assert {row.verdict for row in rows} == {"", "undecided"}
    assert {row.n for row in rows if row.setting.startswith("real run, 3 predictions: ")} == {2}
    assert {row.setting for row in rows if row.quantity.startswith("rounds to 50")} == trackers


def test_the_study_says_that_the_real_run_is_missing(tmp_path: Path) -> None:
    rows = run_study(STUDY, TrackerSettings(**SMALL, output=tmp_path, replay=None, seeds=(0,)))
    assert rows[0].setting.startswith("not measured")


def test_a_run_too_short_to_score_is_refused(tmp_path: Path) -> None:
    history = tmp_path / "run.json"
    history.write_text('{"a": [1, 2, 3, 4, 5]}')
    with pytest.raises(SimError, match=r"burn_in: no prompt of .*run\.json has more than 5"):
        run_study(STUDY, TrackerSettings(**SMALL, output=tmp_path / "log", replay=history))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("burn_in=30", "burn_in must lie below rounds"),
        ("discounts=[0.9, 0.9]", "discounts: holds something twice"),
        ("discounts=[1.5]", "discounts"),
        ("windows=[0]", "windows"),
        ("growths=[]", "growths"),
        ("replay_trials=0", "replay_trials"),
        ("replay_trials=99999999999999999999", "replay_trials"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(override: str, message: str) -> None:
    with pytest.raises(SimError, match=message):
        read_settings(STUDY, [override])


def test_the_first_round_is_the_difficulty_that_bots_is_given() -> None:
    tracker = Contender("bots").build(np.array([0.25, 1.0]))
    tracker.observe(torch.arange(2), torch.tensor([10, 10]), torch.tensor([0, 0]))
    # l = r = .2: alpha = 1 + .2 * 10 * (1 - difficulty).
    assert tracker.alpha.tolist() == pytest.approx([1.5, 3.0])
    assert ROLLOUTS == 16
