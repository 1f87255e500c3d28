"""Error, coverage and lag of the trackers, from the tracker study."""

import math

import numpy as np
import pytest

from analysis import AnalysisError
from cvpo.metrics import paired_t_interval
from paper_figures.tracker_drift import make, synthetic
from tests.study_logs import write_study

WORLDS = ("steady, growth 0.1", "jumps, growth 0.1", "frozen")
TRACKERS = ("beta 1", "beta 0.9", "bots")


def seeds_table(seeds=(0, 1, 2), trackers=TRACKERS):
    rng = np.random.default_rng(1)
    return [
        {
            "world": world,
            "tracker": tracker,
            "seed": seed,
            "truth_error": rng.uniform(0.001, 0.01),
            "covered": rng.uniform(0.5, 1),
        }
        for world in WORLDS
        for tracker in trackers
        for seed in seeds
    ]


def rows(real=True):
    lag = [
        {"quantity": f"rounds to {share} of a jump to 0.9", "setting": where, "value": value}
        for share in ("50%", "90%")
        for where, value in (
            ("beta 1", 20.0),
            ("beta 0.9", 6.0),
            ("bots; not in 1000", math.nan),
        )
    ]
    if not real:
        return lag
    run = [
        {
            "setting": "real run, 500 predictions: beta 1",
            "value": 0.04,
            "low": 0.01,
            "high": 0.09,
            "n": 50,
        },
        {
            "setting": "real run, 500 predictions: bots",
            "value": 0.01,
            "low": 0.01,
            "high": 0.01,
            "n": 50,
        },
    ]
    return lag + [row | {"quantity": "squared error of rho"} for row in run]


def study(path, real=True, **options):
    options = {"growths": [0.1], "num_prompts": 20, "rounds": 30} | options
    table = options.pop("table", None) or seeds_table()
    return write_study(path, "tracker", rows(real), {"tracker_seeds": table}, **options)


def test_errors_are_roots_of_means_over_shapes_and_seeds(tmp_path):
    table = seeds_table()
    found = make([study(tmp_path / "s", table=table)]).table
    mine = found[
        (found["quantity"] == "error")
        & (found["drift"] == "improving, 0.1 a round")
        & (found["tracker"] == "beta 0.9")
    ].iloc[0]
    by_seed = [
        np.mean(
            [
                row["truth_error"]
                for row in table
                if row["seed"] == seed and row["tracker"] == "beta 0.9" and row["world"] != "frozen"
            ]
        )
        for seed in range(3)
    ]
    interval = paired_t_interval(np.array(by_seed), np.zeros(3))
    assert mine["value"] == pytest.approx(math.sqrt(np.mean(by_seed)))
    assert mine["high"] == pytest.approx(math.sqrt(interval.high))
    assert mine["n"] == 3
    assert mine["discount"] == 0.9


def test_the_real_run_stands_beside_with_its_own_interval(tmp_path):
    exhibit = make([study(tmp_path / "s", replay_trials=8)])
    real = exhibit.table[exhibit.table["drift"] == "a real run"]
    first = real.iloc[0]
    assert (first["value"], first["low"], first["high"]) == pytest.approx((0.2, 0.1, 0.3))
    assert "next 8 rollouts of a prompt (500 predictions)" in exhibit.caption
    assert "its interval is over 50 prompts" in exhibit.caption


def test_a_study_without_a_real_run_says_so(tmp_path):
    exhibit = make([study(tmp_path / "s", real=False)])
    assert "without a real run" in exhibit.caption
    assert "a real run" not in set(exhibit.table["drift"])


def test_a_lag_that_never_comes_is_named(tmp_path):
    exhibit = make([study(tmp_path / "s")])
    assert "Not reached in 1000 rounds: bots." in exhibit.caption
    lag = exhibit.table[exhibit.table["quantity"] == "lag"]
    assert lag[lag["tracker"] == "beta 1"]["value"].tolist() == [20, 20]


def test_lags_that_never_come_are_drawn_as_none(tmp_path):
    never = [row | {"value": math.nan} for row in rows(real=False)]
    log = write_study(tmp_path / "s", "tracker", never, {"tracker_seeds": seeds_table()})
    exhibit = make([log])
    exhibit.figure.draw_without_rendering()
    assert "Not reached in 1000 rounds: beta 1, beta 0.9, bots." in exhibit.caption


def test_one_seed_has_no_interval(tmp_path):
    exhibit = make([study(tmp_path / "s", table=seeds_table(seeds=(3,)), seeds=(3,))])
    drift = exhibit.table[exhibit.table["drift"] == "frozen"]
    assert drift[["low", "high"]].isna().all(axis=None)
    assert "seed 3 only" in exhibit.caption


def test_intervals_stay_within_what_a_share_can_be():
    import pandas as pd

    table = pd.DataFrame(seeds_table(seeds=(0, 1)))
    table["covered"] = np.where(table["seed"] == 0, 0.2, 1.0)
    found = synthetic(table)
    assert found["low"].min() >= 0
    assert found["high"].max() <= 1


def test_a_study_of_other_trackers_alone_is_refused(tmp_path):
    table = seeds_table(trackers=("bots",))
    log = write_study(tmp_path / "s", "tracker", [{}], {"tracker_seeds": table})
    with pytest.raises(AnalysisError, match="discounts="):
        make([log])
