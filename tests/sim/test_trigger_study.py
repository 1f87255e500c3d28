"""The trigger study: its golden epochs, its intervals, and verdicts on triggers good and bad."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cvpo import CurriculumConfig, read_table
from sim.drift import SHAPES, Drift
from sim.replay import REAL_RUN, read_replay
from sim.studies.trigger import (
    NEVER,
    STUDY,
    Discrimination,
    Outcome,
    TriggerSettings,
    control,
    describe,
    discriminate,
    frozen_counts,
    grid,
    moving_mean,
    outcomes,
    real_configs,
    real_rows,
    setting_rows,
    share_interval,
    switch_round,
    timing_rows,
    trigger_verdict,
)
from sim.study import Row, SimError, read_settings, run_study

PRINTED = CurriculumConfig()
POOLED = CurriculumConfig(detector="pooled", discount=0.9)


def find(rows: list[Row], quantity: str) -> Row:
    (row,) = [row for row in rows if row.quantity.startswith(quantity)]
    return row


# ------------------------------------------------------------------------------------ intervals


@pytest.mark.parametrize(
    ("events", "runs", "expected"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0, 0.1611))],
)
def test_the_interval_of_a_share_is_wilsons(
    events: int, runs: int, expected: tuple[float, float]
) -> None:
    # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3.
    assert share_interval(events, runs) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((56, 70), (48, 80), (0.0524, 0.3339)),
        ((9, 10), (3, 10), (0.1705, 0.8090)),
        ((10, 10), (0, 20), (0.6791, 1.0)),
        ((10, 10), (0, 10), (0.6075, 1.0)),
    ],
)
def test_the_interval_of_a_difference_is_newcombes(
    first: tuple[int, int], second: tuple[int, int], expected: tuple[float, float]
) -> None:
    # Newcombe 1998, Statistics in Medicine 17, 873-890, table II, method 10.
    found = Discrimination(
        detections=first[0], stopped=first[1], alarms=second[0], improving=second[1]
    )
    assert found.estimate == pytest.approx(first[0] / first[1] - second[0] / second[1])
    assert found.interval == pytest.approx(expected, abs=5e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.data())
def test_intervals_hold_their_estimates_and_stay_in_range(runs: int, data: st.DataObject) -> None:
    events = data.draw(st.integers(0, runs))
    low, high = share_interval(events, runs)
    assert 0 <= low <= events / runs <= high <= 1
    assert high - low > 0
    found = Discrimination(
        alarms=data.draw(st.integers(0, 30)), improving=30, detections=events, stopped=runs
    )
    low, high = found.interval
    assert -1 - 1e-12 <= low <= found.estimate <= high <= 1 + 1e-12


# ------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("alarms", "detections", "verdict"),
    [
        (0, 20, "holds"),  # fires when a policy stops, and only then
        (20, 20, "fails"),  # a clock
        (0, 0, "fails"),  # never fires
        (20, 0, "fails"),  # fires on the wrong ones
        (5, 15, "undecided"),
    ],
)
def test_the_verdict_on_the_sixth_claim(alarms: int, detections: int, verdict: str) -> None:
    found = Discrimination(alarms, 20, detections, 20)
    assert trigger_verdict(found, seeds=5) == verdict
    assert trigger_verdict(found, seeds=4) == "undecided"


def test_a_switch_while_the_policy_still_improves_is_no_detection() -> None:
    found = discriminate([NEVER, 29.0], [(11.0, 10), (10.0, 10), (3.0, 10), (NEVER, 10), (0.0, -1)])
    assert found == Discrimination(alarms=1, improving=2, detections=2, stopped=5)


def rows_of(switch_of_stop: dict[int | None, float]) -> list[Row]:
    """Rows of a trigger that switches in these rounds, in five seeds of every shape."""
    found = [
        Outcome(Drift(shape=shape, stop=stop), seed, PRINTED, switch)
        for stop, switch in switch_of_stop.items()
        for shape in (SHAPES if stop != 0 else SHAPES[:1])
        for seed in range(5)
    ]
    return setting_rows(PRINTED, 0.1, found, seeds=5)


def test_a_trigger_that_works_is_said_to_work() -> None:
    rows = rows_of({None: NEVER, 10: 14.0, 20: 26.0, 0: 12.0})
    verdict = find(rows, "detections minus")
    assert (verdict.value, verdict.claim, verdict.verdict) == (1, 6, "holds")
    assert find(rows, "fires while").value == 0
    assert find(rows, "fires after").value == 1
    assert find(rows, "delay").value == 5
    assert not [row for row in rows if row.quantity.startswith("step")]


def test_a_clock_is_said_to_be_one() -> None:
    rows = rows_of({None: 22.0, 10: 22.0, 20: 22.0, 0: 22.0})
    verdict = find(rows, "detections minus")
    assert (verdict.value, verdict.claim, verdict.verdict) == (0, 6, "fails")
    assert find(rows, "fires while").value == 1
    assert find(rows, "step of the switch").value == math.ceil(23 * 17_398 / 256)


def test_settings_near_the_papers_step_are_named() -> None:
    early, late = CurriculumConfig(discount=0.9), CurriculumConfig(discount=0.8)
    found = [
        Outcome(Drift(), 0, PRINTED, 14.0),  # step 1020
        Outcome(Drift(), 0, early, 10.0),
        Outcome(Drift(), 0, late, NEVER),
        Outcome(Drift(), 1, late, NEVER),
    ]
    near, never = timing_rows(found)
    assert (near.value, near.setting) == (1, describe(PRINTED))
    assert (never.value, never.setting) == (1, describe(late))


# ------------------------------------------------------------------------- the real detectors


def test_the_grid_holds_every_quantifier_and_the_pooled_detector() -> None:
    names = [describe(config) for config in grid([1.0, 0.9])]
    assert len(set(names)) == len(names) == 8
    assert len({describe(config) for config in real_configs()}) == 10


def test_the_printed_rule_takes_a_slowly_improving_policy_for_a_frozen_one() -> None:
    small = 2000
    slow, frozen = Drift(growth=0.03, num_prompts=small), Drift(stop=0, num_prompts=small)
    (improving,), (still,) = outcomes(slow, 0, [PRINTED]), outcomes(frozen, 0, [PRINTED])
    assert 18 <= still.switch <= improving.switch <= 22


def test_the_pooled_detector_waits_for_the_stop() -> None:
    for growth in (0.03, 0.1):
        improving = Drift(growth=growth, num_prompts=4000)
        stopped = Drift(growth=growth, num_prompts=4000, stop=12)
        assert math.isnan(outcomes(improving, 0, [POOLED])[0].switch)
        assert 12 < outcomes(stopped, 0, [POOLED])[0].switch <= 22


def test_a_sole_observation_of_solved_and_unsolved_prompts_is_no_bottleneck() -> None:
    counts = np.array([[0] * 3, [8] * 3])
    assert math.isnan(switch_round(counts, PRINTED, trials=8))


# ------------------------------------------------------------------------------- the real run


def common_counts() -> np.ndarray:
    if not REAL_RUN.exists():
        pytest.skip(f"needs ../shared/data/runs/{REAL_RUN.name}, the history of a real run")
    return read_replay(REAL_RUN, trials=8).common


def test_when_each_setting_fires_on_the_improving_run() -> None:
    counts = common_counts()
    assert counts.shape == (1209, 44)
    found = {describe(c): switch_round(counts, c, trials=8) for c in real_configs()}
    fires = {name: epoch for name, epoch in found.items() if not math.isnan(epoch)}
    assert fires == {
        "printed, mean, discount 1": 22,
        "printed, mean, discount 0.98": 26,
        "printed, mean, discount 0.95": 35,
        "printed, fraction, discount 1": 35,
    }


@pytest.mark.slow
def test_when_each_setting_fires_on_the_frozen_control() -> None:
    counts = common_counts()

    def epochs(config: CurriculumConfig, seeds: int) -> list[float]:
        by_epoch = config.detector == "printed"
        return [
            switch_round(frozen_counts(counts, seed, trials=8, by_epoch=by_epoch), config, trials=8)
            for seed in range(seeds)
        ]

    assert set(epochs(PRINTED, 20)) == {20, 21}
    later = epochs(CurriculumConfig(discount=0.95), 20)
    assert (min(later), max(later)) == (24, 32)
    assert np.isnan(epochs(CurriculumConfig(discount=0.9), 20)).all()
    pooled = epochs(POOLED, 10)
    assert (min(pooled), max(pooled)) == (10, 19)


def test_the_verdicts_on_the_real_run() -> None:
    counts = common_counts()
    verdicts = {}
    for config in (PRINTED, POOLED):
        rows = real_rows(
            config,
            switch_round(counts, config, trials=8),
            [control(counts, config, seed, 8) for seed in range(8)],
            epochs=counts.shape[1],
            improves=True,
        )
        verdicts[config.detector] = find(rows, "detections minus")
        assert "(epochs, prompts)" in rows[1].setting or config == POOLED
    assert (verdicts["printed"].value, verdicts["printed"].verdict) == (0, "fails")
    # Ours is no claim of the paper's.
    assert (verdicts["pooled"].value, verdicts["pooled"].claim) == (1, None)


def test_a_run_that_does_not_improve_says_nothing_of_the_claim() -> None:
    rows = real_rows(PRINTED, 2.0, [(2.0, 2.0)] * 5, epochs=4, improves=False)
    assert {row.verdict for row in rows} == {""}
    rows = real_rows(PRINTED, 2.0, [(2.0, 2.0)] * 20, epochs=4, improves=True)
    assert [row.verdict for row in rows] == ["", "", "fails"]


def test_a_switch_after_the_end_of_the_run_is_no_detection() -> None:
    rows = real_rows(PRINTED, NEVER, [(NEVER, 60.0)] * 10, epochs=44, improves=True)
    assert find(rows, "detections minus").value == 0
    assert find(rows, "epoch of the switch, frozen").value == 60


@pytest.mark.parametrize("by_epoch", [True, False])
def test_the_frozen_control_keeps_every_prompts_mean_rate(by_epoch: bool) -> None:
    counts = np.array([[0, 0, 0], [2, 4, 6], [8, 8, 8]])
    drawn = np.concatenate(
        [frozen_counts(counts, seed, trials=8, by_epoch=by_epoch) for seed in range(20)], axis=1
    )
    assert drawn.shape == (3, 20 * 80)
    assert drawn.mean(axis=1) == pytest.approx([0, 4, 8], abs=0.15)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 3, 7]), st.integers(0, 999))
def test_a_moving_mean_is_that_of_a_loop(rows: int, columns: int, window: int, seed: int) -> None:
    x = np.random.default_rng(seed).random((rows, columns))
    found = moving_mean(x, window)
    for i in range(rows):
        for e in range(columns):
            near = [x[i, j] for j in range(columns) if abs(j - e) <= window // 2]
            assert found[i, e] == pytest.approx(sum(near) / len(near))


# ------------------------------------------------------------------------------------ the study

SMALL: dict[str, Any] = {"num_prompts": 40, "rounds": 6, "stops": (2,), "jobs": 1}


def test_the_study_tries_every_setting_on_every_policy(tmp_path: Path) -> None:
    history = tmp_path / "run.json"
    history.write_text('{"a": [1, 2, 3, 4], "b": [7, 8, 8, 8, 8], "c": [0, 0, 1, 2]}')
    given_settings = TriggerSettings(
        **SMALL, output=tmp_path, replay=history, control_seeds=2, seeds=(0, 5)
    )
    rows = run_study(STUDY, given_settings)
    table = read_table(tmp_path / "trigger", "switches")
    policies = 2 * len(SHAPES) * 2 + 1
    assert len(table) == policies * 2 * 8
    assert len(table.drop_duplicates(table.columns[:-2])) == len(table)
    assert set(table["seed"]) == {0, 5}
    told = [row for row in rows if row.quantity == "detections minus false alarms"]
    assert len(told) == 10 + 8 * 2
    assert {row.n for row in told if row.setting.startswith("real run")} == {4}
    assert {row.n for row in told if "growth" in row.setting} == {len(SHAPES) * 2 * 2 + 2}
    assert {row.verdict for row in rows} == {"", "undecided"}


def test_the_study_says_that_the_real_run_is_missing(tmp_path: Path) -> None:
    rows = run_study(STUDY, TriggerSettings(**SMALL, output=tmp_path, replay=None, seeds=(0,)))
    assert rows[0].setting.startswith("not measured")


def test_a_real_run_of_one_epoch_is_refused(tmp_path: Path) -> None:
    history = tmp_path / "run.json"
    history.write_text('{"a": [1, 2], "b": [3]}')
    with pytest.raises(SimError, match=r"replay: prompt 'b' of .*run\.json has a single epoch"):
        run_study(STUDY, TriggerSettings(**SMALL, output=tmp_path / "log", replay=history))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stops=[40]", "stops must lie below rounds"),
        ("stops=[0]", "stops"),
        ("growths=[0.1, 0.1]", "growths: holds something twice"),
        ("discounts=[0]", "discounts"),
        ("control_seeds=0", "control_seeds"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(override: str, message: str) -> None:
    with pytest.raises(SimError, match=message):
        read_settings(STUDY, [override])
