"""Levels, areas, best steps and curves over cost, against plain loops over the same logs."""

import hashlib
import math

import numpy as np
import pandas as pd
import pytest

from analysis.curves import Curves, collect
from analysis.sources import open_sources
from analysis.statistics import (
    MEASURES,
    area,
    at_cost,
    base,
    best,
    covered,
    curve,
    curve_by_cost,
    final,
    levels,
    over_text,
    sizes_text,
)
from cvpo.metrics import crossed_t_interval, hierarchical_bootstrap
from tests.training_logs import learning, write_run

SIZES = {"a": 8, "b": 14}
STEPS = (0, 10, 40)


def verdicts(seed, rise=0.3):
    return learning(SIZES, rise, seed=seed, steps=STEPS)


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Three seeds of vapo, a step costing 10, 11 and 12 seconds, and two of ppo."""
    folder = tmp_path_factory.mktemp("runs")
    paths = [
        write_run(folder / f"vapo-{seed}", verdicts(seed), seed=seed, seconds=9.0 + seed)
        for seed in (1, 2, 3)
    ]
    paths += [
        write_run(folder / f"ppo-{seed}", verdicts(seed, 0.0), seed=seed, method="ppo")
        for seed in (1, 2)
    ]
    return collect(open_sources(paths))


def truth(seed, step, benchmark):
    """Mean accuracy of a run of vapo at a step, by problem."""
    return verdicts(seed)[step][benchmark].mean(axis=1)


def by_id(cells):
    """Problems in the order of their ids, p1, p10, p2, which resampling depends on."""
    return cells[:, sorted(range(cells.shape[1]), key=lambda p: f"p{p}")]


def row(table, **wanted):
    for name, value in wanted.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_a_level_is_the_mean_over_problems_seeds_and_benchmarks(collected):
    table = levels(collected)
    by_benchmark = {}
    for benchmark, size in SIZES.items():
        cells = by_id(np.stack([truth(seed, 40, benchmark) for seed in (1, 2, 3)]))
        found = row(table, label="vapo", benchmark=benchmark, measure="final")
        expected = hierarchical_bootstrap(cells, num_resamples=2000)
        assert found["accuracy"] == pytest.approx(cells.mean())
        assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
        assert (found["seeds"], found["problems"], found["step"]) == (3, size, 40)
        by_benchmark[benchmark] = cells
    mean = row(table, label="vapo", benchmark="mean", measure="final")
    assert mean["accuracy"] == pytest.approx(np.mean([c.mean() for c in by_benchmark.values()]))
    assert mean["low"] < mean["accuracy"] < mean["high"]
    assert set(table["measure"]) == set(MEASURES)


def test_before_training_runs_of_one_seed_are_one_observation(collected):
    # Seeds 1 and 2 have two runs each, whose step 0 is the same draw.
    found = row(levels(collected), label="before training", benchmark="a")
    cells = np.stack([truth(seed, 0, "a") for seed in (1, 2, 3)])
    assert found["seeds"] == 3
    assert found["accuracy"] == pytest.approx(cells.mean())
    expected = hierarchical_bootstrap(cells, num_resamples=2000)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert base([]) is None


def test_the_area_is_the_trapezoids_over_the_length(collected):
    mine = collected.curves["vapo"]
    found = area(mine)
    for run, seed in enumerate((1, 2, 3)):
        for column, (benchmark, problem) in enumerate(mine.problems):
            y = [truth(seed, step, benchmark)[int(problem[1:])] for step in STEPS]
            expected = ((y[0] + y[1]) / 2 * 10 + (y[1] + y[2]) / 2 * 30) / 40
            assert found.values[run, column] == pytest.approx(expected)
    alone = mine.at(np.array([10]))
    assert area(alone).values.tolist() == final(alone).values.tolist()


def choosing(benchmark, problem):
    return hashlib.sha256(f"{benchmark}/{problem}".encode()).digest()[0] % 2 == 0


def test_the_best_step_is_chosen_on_one_half_and_reported_on_the_other(collected):
    mine = collected.curves["vapo"]
    found = best(mine)
    held_out = [problem for problem in mine.problems if not choosing(*problem)]
    assert found.problems.tolist() == held_out
    for run, seed in enumerate((1, 2, 3)):
        scores = {}
        for step in STEPS:
            of_each = []
            for benchmark, size in SIZES.items():
                half = [p for p in range(size) if choosing(benchmark, f"p{p}")]
                of_each.append(truth(seed, step, benchmark)[half].mean())
            scores[step] = np.mean(of_each)
        step = max(scores, key=scores.get)
        expected = [truth(seed, step, name)[int(problem[1:])] for name, problem in held_out]
        assert found.values[run].tolist() == pytest.approx(expected)


def test_the_maximum_of_pure_noise_is_not_its_own_evidence(collected):
    rng = np.random.default_rng(0)
    ids = [("a", f"p{problem}") for problem in range(100)]
    noise = (rng.random((200, 20, 100)) < 0.5).astype(float)
    mine = Curves(
        label="noise",
        runs=collected.curves["vapo"].runs[:1] * 200,
        steps=np.arange(20),
        problems=pd.MultiIndex.from_tuples(ids, names=["benchmark", "problem_id"]),
        accuracy=noise,
        samples=np.ones(noise.shape, dtype=int),
        cost={},
    )
    assert noise.mean(axis=2).max(axis=1).mean() > 0.58
    assert best(mine).values.mean() == pytest.approx(0.5, abs=0.015)  # 3 standard errors


def test_a_benchmark_too_small_for_two_halves_has_no_best_step(tmp_path):
    run = write_run(tmp_path / "run", learning({"a": 1}, 0, seed=1))
    found = collect(open_sources([run]))
    assert best(found.curves["vapo"]) is None
    assert "best" not in set(levels(found)["measure"])
    assert {"final", "area"} <= set(levels(found)["measure"])


def test_a_curve_has_a_t_interval_at_each_step(collected):
    found = curve(collected.curves["vapo"], ["b"])
    assert found["step"].tolist() == list(STEPS)
    for point, step in enumerate(STEPS):
        cells = np.stack([truth(seed, step, "b") for seed in (1, 2, 3)])
        expected = crossed_t_interval(cells)
        assert found["accuracy"][point] == pytest.approx(expected.estimate)
        assert found["high"][point] == pytest.approx(min(expected.high, 1))
    thinned = curve(collected.curves["vapo"], ["b"], most=2)
    assert thinned["step"].tolist() == [0, 40]


def test_over_a_cost_runs_are_interpolated_where_all_of_them_have_been(collected):
    mine = collected.curves["vapo"]
    assert covered([mine], "device_seconds") == (0.0, 400.0)  # the others end at 440 and 480
    assert covered(list(collected.curves.values()), "tokens") == (0.0, 40_000.0)
    found = at_cost(mine, "device_seconds", np.array([0.0, 55.0, 400.0]))
    for run, seed in enumerate((1, 2, 3)):
        a_step = 9.0 + seed
        for column, (benchmark, problem) in enumerate(mine.problems):
            y = [truth(seed, step, benchmark)[int(problem[1:])] for step in STEPS]
            x = [a_step * step for step in STEPS]
            expected = np.interp([0.0, 55.0, 400.0], x, y)
            assert found[run, :, column].tolist() == pytest.approx(expected.tolist())


def test_a_curve_over_cost_does_not_leave_the_common_range(collected):
    mine = collected.curves["vapo"]
    found = curve_by_cost(mine, ["a", "b"], "device_seconds", points=5)
    assert found["device_seconds"].tolist() == [0.0, 100.0, 200.0, 300.0, 400.0]
    assert found["accuracy"].iloc[0] == pytest.approx(curve(mine, ["a", "b"])["accuracy"].iloc[0])


def test_without_a_common_cost_there_is_no_curve_over_it(tmp_path):
    known = write_run(tmp_path / "known", verdicts(1), seed=1)
    bare = write_run(tmp_path / "bare", verdicts(2), seed=2, logged=[])
    mine = collect(open_sources([known, bare])).curves["vapo"]
    assert math.isnan(covered([mine], "tokens")[0])
    assert curve_by_cost(mine, ["a"], "tokens") is None
    late = write_run(tmp_path / "late", verdicts(3), seed=3, logged=[40])
    mine = collect(open_sources([known, late])).curves["vapo"]
    found = curve_by_cost(mine, ["a"], "tokens")
    assert found["tokens"].tolist() == [40_000.0]


def test_sentences_state_problems_samples_and_single_runs(collected, tmp_path):
    assert sizes_text(collected) == "Problems: a 8, b 14; 8 samples of each."
    assert over_text(collected.curves.values()) == "Intervals (95 %) are over seeds and problems."
    alone = collect(open_sources([write_run(tmp_path / "run", verdicts(1))]))
    assert "vapo has one run: there they are over problems only" in over_text(alone.curves.values())


def test_samples_are_those_of_the_benchmark_and_the_step(tmp_path):
    def evaluation(k):
        return (
            learning({"a": 3}, 0, seed=1, samples=4 * k)[0]
            | (learning({"b": 5}, 0, seed=1, samples=k)[0])
        )

    few = write_run(tmp_path / "few", {0: evaluation(4), 10: evaluation(1), 20: evaluation(2)})
    many = {0: evaluation(8), 20: evaluation(8)}
    more = write_run(tmp_path / "more", many, method="ppo")
    found = collect(open_sources([few, more]))
    table = levels(found)
    for label, benchmark, measure, samples in (
        ("vapo", "a", "final", (8, 8)),
        ("vapo", "b", "final", (2, 2)),
        ("vapo", "mean", "final", (2, 8)),
        ("vapo", "mean", "area", (1, 16)),
        ("ppo", "b", "final", (8, 8)),
        ("before training", "a", "final", (16, 32)),
        ("before training", "b", "final", (4, 8)),
    ):
        cell = row(table, label=label, benchmark=benchmark, measure=measure)
        assert (cell["samples_min"], cell["samples_max"]) == samples
    assert sizes_text(found) == "Problems (samples of each): a 3 (4 to 32), b 5 (1 to 8)."


def test_seeds_before_training_are_those_that_evaluated_the_benchmark(tmp_path):
    paths = [
        write_run(tmp_path / "a", learning({"a": 3, "b": 4}, 0, seed=1), seed=1),
        write_run(tmp_path / "b", learning({"a": 3}, 0, seed=2), seed=2, method="ppo"),
    ]
    table = levels(collect(open_sources(paths)))
    counts = {name: row(table, label="before training", benchmark=name)["seeds"] for name in "ab"}
    assert counts == {"a": 2, "b": 1}


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_cost_that_does_not_grow_has_no_curve_over_it(tmp_path, seconds):
    flat = write_run(tmp_path / "flat", verdicts(1), seconds=seconds)
    mine = collect(open_sources([flat])).curves["vapo"]
    assert math.isnan(covered([mine], "device_seconds")[0])
    assert curve_by_cost(mine, ["a"], "device_seconds") is None
    assert covered([mine], "tokens") == (0.0, 40_000.0)


def test_one_problem_is_said_to_say_nothing_of_others(tmp_path):
    paths = [
        write_run(tmp_path / f"{s}", learning({"a": 1, "b": 9}, 0, seed=s), seed=s) for s in (1, 2)
    ]
    text = over_text(collect(open_sources(paths)).curves.values())
    assert text.endswith("Of a there is one problem: nothing is said about others like it.")
