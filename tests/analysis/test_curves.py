"""Several runs on common ground: what counts, what is left out, and that it is said."""

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.curves import collect
from analysis.sources import open_sources
from tests.training_logs import config_of, learning, write_run

SIZES = {"a": 6, "b": 10}


def runs(folder, last_steps, **options):
    """One run of `vapo` for each last step, evaluated every 10 steps."""
    return [
        write_run(
            folder / f"vapo-{seed}",
            learning(SIZES, 0.2, seed=seed, steps=range(0, last + 1, 10)),
            seed=seed,
            **options,
        )
        for seed, last in enumerate(last_steps, 1)
    ]


def collected(*paths, by="label"):
    return collect(open_sources(paths), by=by)


def test_accuracy_is_by_run_step_and_problem(tmp_path):
    paths = runs(tmp_path, [20, 20])
    found = collected(*paths)
    mine = found.curves["vapo"]
    assert (mine.seeds, mine.steps.tolist(), mine.benchmarks) == ([1, 2], [0, 10, 20], ["a", "b"])
    assert found.shared == ["a", "b"]
    for row, seed in enumerate(mine.seeds):
        truth = learning(SIZES, 0.2, seed=seed, steps=range(0, 21, 10))
        for column, (benchmark, problem) in enumerate(mine.problems):
            for at, step in enumerate(mine.steps):
                expected = truth[step][benchmark][int(problem[1:])].mean()
                assert mine.accuracy[row, at, column] == expected
    assert mine.cost["tokens"].tolist() == [[0, 10_000, 20_000]] * 2
    assert mine.sizes == (8, 8)


@pytest.mark.parametrize(
    ("last", "end", "kept"),
    [
        ([30, 30, 10], 30, [1, 2]),
        ([30, 10], 30, [1]),
        ([30, 10, 10], 10, [1, 2, 3]),
        ([40, 30, 20, 0, 0], 20, [1, 2, 3]),
        ([20], 20, [1]),
    ],
)
def test_a_label_ends_where_half_of_its_runs_have_come_to(tmp_path, last, end, kept):
    found = collected(*runs(tmp_path, last))
    mine = found.curves["vapo"]
    assert mine.steps[-1] == end
    assert mine.seeds == kept
    for seed, step in enumerate(last, 1):
        said = f"vapo-{seed} is left out of vapo: it was evaluated to step {step} only"
        assert any(said in note for note in found.notes) == (seed not in kept)


def test_labels_that_were_not_trained_yet_do_not_hold_the_others_back(tmp_path):
    young = write_run(tmp_path / "young", learning(SIZES, 0, seed=1, steps=[0]), method="ppo")
    found = collected(*runs(tmp_path, [20]), young)
    assert list(found.curves) == ["vapo"]
    assert "ppo is left out: it was evaluated before training only." in found.notes
    assert list(collected(young).curves) == ["ppo"]


def test_of_a_benchmark_the_common_problems_count(tmp_path):
    one = learning({"a": 6, "b": 10}, 0, seed=1)
    two = learning({"a": 4, "c": 3}, 0, seed=1)
    first = write_run(tmp_path / "one", one)
    second = write_run(tmp_path / "two", two, method="ppo")
    found = collected(first, second)
    assert [len(mine.of_benchmarks(["a"]).problems) for mine in found.curves.values()] == [4, 4]
    assert found.curves["vapo"].benchmarks == ["a", "b"]
    assert found.shared == ["a"]
    notes = " ".join(found.notes)
    assert "Not all evaluated the same problems of a: the 4 that all have count." in notes
    assert "Means are over a: b only vapo has." in notes


def test_runs_without_a_common_benchmark_have_no_mean(tmp_path):
    first = write_run(tmp_path / "one", learning({"a": 3}, 0, seed=1))
    second = write_run(tmp_path / "two", learning({"b": 3}, 0, seed=1), method="ppo")
    found = collected(first, second)
    assert found.shared == []
    assert "No benchmark is common to all, so there is no mean." in found.notes


def test_a_label_ends_with_a_reason_where_its_runs_share_nothing(tmp_path):
    first = write_run(tmp_path / "one", learning({"a": 3}, 0, seed=1, steps=[5]), seed=1)
    second = write_run(tmp_path / "two", learning({"a": 3}, 0, seed=2, steps=[5, 7]), seed=2)
    third = write_run(tmp_path / "three", learning({"b": 3}, 0, seed=3, steps=[5, 7]), seed=3)
    with pytest.raises(AnalysisError, match=r"vapo share no problem at step 7"):
        collected(second, third)
    assert collected(first, second).curves["vapo"].steps.tolist() == [5, 7]
    fourth = write_run(tmp_path / "four", learning({"a": 3}, 0, seed=4, steps=[7]), seed=4)
    fifth = write_run(tmp_path / "five", learning({"a": 3}, 0, seed=5, steps=[8]), seed=5)
    assert collected(fourth, fifth).curves["vapo"].seeds == [5]


def test_an_incomplete_evaluation_is_left_out_and_named(tmp_path):
    verdicts = learning({"a": 4}, 0, seed=1, steps=[0, 10, 20])
    verdicts[10] = {"a": verdicts[10]["a"][:2]}
    found = collected(write_run(tmp_path / "run", verdicts))
    assert found.curves["vapo"].steps.tolist() == [0, 20]
    assert "vapo: step 10 did not evaluate every problem and is left out." in found.notes


def test_what_keeps_runs_from_being_compared_is_said(tmp_path):
    plain, hot = config_of("vapo"), config_of("ppo")
    plain["evaluation"] = {"temperature": 1.0}
    hot["evaluation"] = {"temperature": 0.6}
    hot["model"] = {"path": "another"}
    verdicts = learning(SIZES, 0, seed=1)
    first = write_run(tmp_path / "one", verdicts, config=plain)
    second = write_run(tmp_path / "two", verdicts, method="ppo", config=hot, verifier="symbolic")
    notes = " ".join(collected(first, second).notes)
    assert "different verifiers (two by symbolic, one by exact): do not compare them" in notes
    assert "The evaluations differ in temperature (0.6, 1.0)." in notes
    assert "The runs start from different models: another, runs/warmstart." in notes


def test_a_run_that_starts_elsewhere_is_found_by_its_step_0(tmp_path):
    same = [
        write_run(tmp_path / f"vapo-{seed}", learning({"a": 60}, 0.1, seed=seed), seed=seed)
        for seed in range(1, 5)
    ]
    assert not any("At step 0" in note for note in collected(*same).notes)
    better = {
        step: {"a": np.maximum(table["a"], np.random.default_rng(0).random((60, 8)) < 0.3)}
        for step, table in learning({"a": 60}, 0.1, seed=5).items()
    }
    other = write_run(tmp_path / "other", better, method="ppo", seed=5)
    assert any(
        "At step 0 the runs differ by more than chance, other most" in note
        for note in collected(*same, other).notes
    )


def test_by_run_every_run_stands_for_itself(tmp_path):
    assert list(collected(*runs(tmp_path, [10, 10]), by="run").curves) == ["vapo-1", "vapo-2"]


def test_runs_and_steps_can_be_chosen(tmp_path):
    mine = collected(*runs(tmp_path, [20, 20])).curves["vapo"]
    chosen = mine.at(np.array([10, 20])).of_runs([1]).of_benchmarks(["b"])
    assert chosen.accuracy.tolist() == mine.accuracy[1:, 1:, 6:].tolist()
    assert chosen.samples.shape == chosen.accuracy.shape == (1, 2, 10)
    assert chosen.cost["device_seconds"].tolist() == [[100.0, 200.0]]


def test_no_evaluated_training_is_an_error_that_says_how_to_get_one():
    with pytest.raises(AnalysisError, match=r"evaluation\.every"):
        collect([])


def test_what_the_last_evaluation_leaves_out_is_told(tmp_path):
    verdicts = learning(SIZES, 0.2, seed=1, steps=[0, 10, 20])
    verdicts[20] = {"a": verdicts[20]["a"][:4]}
    found = collected(write_run(tmp_path / "run", verdicts))
    assert len(found.curves["vapo"].problems) == 4
    assert "vapo: 12 problems of a, b, not evaluated at step 20, are left out." in found.notes


def test_a_label_whose_runs_share_an_early_step_only_says_where_it_ends(tmp_path):
    paths = [
        write_run(tmp_path / f"{seed}", learning(SIZES, 0.2, seed=seed, steps=steps), seed=seed)
        for seed, steps in enumerate([(0, 10, 40), (0, 10, 50), (0, 10, 60)], 1)
    ]
    found = collected(*paths)
    assert found.curves["vapo"].seeds == [2, 3]
    assert found.curves["vapo"].steps.tolist() == [0, 10]
    assert "vapo ends at step 10, the last that all of its runs evaluated." in found.notes


def test_a_benchmark_of_one_problem_makes_no_start_a_different_one(tmp_path):
    paths = [
        write_run(tmp_path / f"{seed}", learning({"a": 1, "b": 60}, 0.1, seed=seed), seed=seed)
        for seed in range(1, 7)
    ]
    found = collected(*paths)
    first = found.curves["vapo"].of_benchmarks(["a"]).accuracy[:, 0, 0]
    assert len(set(first)) > 1
    assert not any("At step 0" in note for note in found.notes)
