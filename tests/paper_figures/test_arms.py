"""The control arms of W_S against the printed equations, trained and simulated."""

import math

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.sources import open_source
from cvpo.metrics import paired_difference, paired_t_interval
from paper_figures.arms import make
from tests.study_logs import write_study
from tests.training_logs import config_of, write_run

METHOD = "cvpo-stochasticity"


def verdicts(seed, problems=4, step=10):
    rng = np.random.default_rng([seed, step])
    return {
        "easy": rng.integers(0, 2, (problems, 4)).astype(float),
        "hard": rng.integers(0, 2, (2 * problems, 4)).astype(float),
    }


def run(path, arm, seed, steps=(10,), **changes):
    config = config_of(METHOD, arm=arm) | changes
    offset = 100 if arm == "literal" else 0
    evaluated = {step: verdicts(seed + offset, step=step) for step in steps}
    where = path / f"{arm}-{seed}"
    return open_source(write_run(where, evaluated, method=METHOD, seed=seed, config=config))


def weights(path, tables=None, **options):
    trees = [
        {"arm": arm, "seed": seed, "accuracy": base + 0.01 * seed * seed}
        for arm, base in (("literal", 0.5), ("constant", 0.4), ("flipped", 0.45))
        for seed in range(5)
    ]
    trees[-1]["accuracy"] += 0.02
    common = {"measure": "accuracy at the end", "seeds": 5}
    arms = [
        {"world": "bandit", "arm": "literal", "less": "constant", "difference": 0.02}
        | {"low": 0.01, "high": 0.04}
        | common,
        {"world": "bandit", "arm": "constant", "less": "none", "difference": 9.0}
        | {"low": 9.0, "high": 9.0}
        | common,
        {"world": "bandit, spread 0.8", "arm": "hard", "less": "literal", "difference": -0.1}
        | {"low": -0.2, "high": 0.0}
        | common,
    ]
    return write_study(path, "weights", tables=tables or {"trees": trees, "arms": arms}, **options)


def test_an_arm_is_paired_with_literal_by_seed_and_problem_and_benchmarks_weigh_the_same(tmp_path):
    sources = [run(tmp_path, arm, seed) for arm in ("literal", "constant") for seed in (1, 2)]
    exhibit = make(sources)
    row = exhibit.table.iloc[0]
    a, b = (
        np.array(
            [[v.mean(axis=1) for v in verdicts(seed + more).values()] for seed in (1, 2)], object
        )
        for more in (0, 100)
    )
    difference = a - b
    expected = np.mean([[part.mean() for part in seed] for seed in difference])
    assert row["value"] == pytest.approx(expected)
    cells = np.array([np.concatenate(list(seed)) for seed in difference])
    strata = np.repeat(["easy", "hard"], [4, 8])
    interval = paired_difference(cells, np.zeros_like(cells), strata=strata)
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
    assert (row["arm"], row["seeds"], row["problems"], row["benchmarks"]) == ("constant", 2, 12, 2)
    assert "Below 5 seeds no difference is claimed" in exhibit.caption


def test_runs_are_compared_at_the_last_step_that_all_of_them_evaluated(tmp_path):
    sources = [
        run(tmp_path, "literal", 1, steps=(0, 10, 20)),
        run(tmp_path, "constant", 1, steps=(0, 10)),  # still being written
    ]
    exhibit = make(sources)
    assert exhibit.table["step"].tolist() == [10]
    assert "its twin are compared at step 10, the last that all of their runs" in exhibit.caption


def test_the_start_says_nothing_of_an_arm(tmp_path):
    sources = [
        run(tmp_path, "literal", 1, steps=(0, 10)),
        run(tmp_path, "constant", 1, steps=(0,)),
        run(tmp_path, "none", 1, steps=(0, 10)),
    ]
    exhibit = make(sources)
    assert exhibit.table["arm"].tolist() == ["none"]
    assert (
        "(constant) is left out: it and cvpo-stochasticity share no problem at a step after "
        in (exhibit.caption)
    )


def test_arms_of_one_seed_and_of_several_say_what_their_intervals_are_over(tmp_path):
    sources = [run(tmp_path, arm, seed) for arm in ("literal", "none") for seed in (1, 2)]
    caption = make([*sources, run(tmp_path, "hard", 1)]).caption
    assert (
        "over seeds and problems, for cvpo-stochasticity (hard) problems only, since there is one"
    ) in caption


def test_seeds_without_a_twin_do_not_count(tmp_path):
    sources = [run(tmp_path, "literal", 1), *(run(tmp_path, "none", seed) for seed in (1, 2))]
    exhibit = make(sources)
    assert exhibit.table["seeds"].tolist() == [1]
    assert "problems only, since there is one seed" in exhibit.caption


def test_an_arm_that_differs_in_more_than_the_arm_is_named(tmp_path):
    sources = [run(tmp_path, "literal", 1), run(tmp_path, "none", 1, actor={"lr": 0.1})]
    assert "differs from its twin in actor too: do not compare" in make(sources).caption


def test_an_arm_without_its_twin_is_left_out_by_name(tmp_path):
    with pytest.raises(AnalysisError, match=r"\(none\) is left out") as error:
        make([run(tmp_path, "none", 1), run(tmp_path, "literal", 2)])
    assert "stochasticity.arm=constant" in str(error.value)


def test_trees_are_paired_by_seed_and_bandits_turned_to_be_against_literal(tmp_path):
    exhibit = make([weights(tmp_path / "weights")])
    found = exhibit.table.set_index(["world", "arm"])
    flipped = np.array([-0.05, -0.05, -0.05, -0.05, -0.03])
    interval = paired_t_interval(flipped, np.zeros(5))
    assert found.loc[("token trees", "flipped"), "value"] == pytest.approx(flipped.mean())
    assert found.loc[("token trees", "flipped"), "low"] == pytest.approx(interval.low)
    turned = found.loc[("bandit", "constant"), ["value", "low", "high"]]
    assert turned.tolist() == pytest.approx([-0.02, -0.04, -0.01])
    assert found.loc[("bandit, spread 0.8", "hard"), "value"] == -0.1
    assert 9.0 not in set(exhibit.table["value"])
    assert "the log does not compare flipped, hard with literal" in exhibit.caption
    assert "In the table only: bandit, spread 0.8." in exhibit.caption


def test_what_is_missing_is_said_and_not_drawn(tmp_path):
    alone = make([weights(tmp_path / "weights")])
    assert "No training of an arm" in alone.caption
    assert len(alone.figure.axes) == 1
    runs = [run(tmp_path, arm, 1) for arm in ("literal", "constant")]
    assert "No log of the study `weights`" in make(runs).caption
    assert len(make([*runs, open_source(tmp_path / "weights")]).figure.axes) == 2


def test_nothing_at_all_says_how_to_get_some():
    with pytest.raises(AnalysisError, match="python -m sim weights"):
        make([])


def test_trees_without_literal_are_refused(tmp_path):
    trees = [{"arm": "none", "seed": 1, "accuracy": 0.5}]
    arms = [
        {"world": "bandit", "arm": "literal", "less": "none", "difference": 0.1}
        | {"measure": "accuracy at the end", "low": 0.0, "high": 0.2, "seeds": 5}
    ]
    with pytest.raises(AnalysisError, match="tables/trees has no seed of literal"):
        make([weights(tmp_path / "s", {"trees": trees, "arms": arms})])


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_of_one_seed_there_is_no_interval_and_without_a_number_no_arm(tmp_path, nothing):
    trees = [{"arm": arm, "seed": 1, "accuracy": 0.5} for arm in ("literal", "none")]
    row = {"world": "bandit", "arm": "literal", "less": "none", "difference": 0.1, "seeds": 1}
    row |= {"measure": "accuracy at the end", "low": nothing, "high": nothing}
    exhibit = make([weights(tmp_path / "s", {"trees": trees, "arms": [row]}, seeds=(1,))])
    assert exhibit.table["value"].tolist() == [0.0, -0.1]
    assert exhibit.table["low"].isna().all()
    lost = [row | {"difference": nothing}]
    with pytest.raises(AnalysisError, match="tables/arms lacks a number of the accuracy"):
        make([weights(tmp_path / "t", {"trees": trees, "arms": lost}, seeds=(1,))])
