"""Evaluations added up by problem, against plain loops; that each file is checked."""

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.evaluations import cost, read_evaluations
from analysis.sources import open_source
from cvpo import RunLog
from tests.training_logs import write_run

VERDICTS = {
    0: {"b": [[0, 1, 1], [0, 0, 0]], "a": [[1, 0, 0]]},
    4: {"b": [[1, 1, 1], [0.5, 0, 0]]},
    9: {"b": [[1, 1], [0, 0], [1, 0]], "a": [[1, 1, 0]]},
}


def test_samples_of_a_problem_are_added_up_step_by_step(tmp_path):
    found = read_evaluations(open_source(write_run(tmp_path / "run", VERDICTS)))
    assert found.steps.tolist() == [0, 4, 9]
    assert found.problems.tolist() == [("a", "p0"), ("b", "p0"), ("b", "p1"), ("b", "p2")]
    for row, evaluation in enumerate(VERDICTS.values()):
        for column, (benchmark, problem) in enumerate(found.problems):
            samples = dict(enumerate(evaluation.get(benchmark, []))).get(int(problem[1:]), [])
            assert found.samples[row, column] == len(samples)
            assert found.correct[row, column] == sum(samples)
            expected = sum(samples) / len(samples) if samples else np.nan
            np.testing.assert_equal(found.accuracy[row, column], expected)


def test_steps_and_problems_can_be_chosen(tmp_path):
    found = read_evaluations(open_source(write_run(tmp_path / "run", VERDICTS)))
    chosen = found.at(np.array([0, 9])).on(found.problems[[2, 1]])
    assert chosen.accuracy.tolist() == [[0.0, 2 / 3], [0.0, 1.0]]
    assert chosen.problems.tolist() == [("b", "p1"), ("b", "p0")]


def test_a_log_that_has_grown_is_read_anew(tmp_path):
    path = write_run(tmp_path / "run", {0: {"b": [[0]]}})
    assert len(read_evaluations(open_source(path)).steps) == 1
    log = RunLog.open(path)
    log.evals(
        3,
        {
            "benchmark": ["b"],
            "problem_id": ["p0"],
            "sample": [0],
            "exact": [1.0],
            "length": [1],
            "truncated": [False],
        },
    )
    assert read_evaluations(open_source(path)).accuracy[:, 0].tolist() == [0.0, 1.0]


def test_cost_is_by_step_and_empty_without_metrics(tmp_path):
    run = open_source(write_run(tmp_path / "run", VERDICTS, seconds=2.0))
    assert cost(run).loc[4].tolist() == [8.0, 4000.0]
    bare = write_run(tmp_path / "bare", VERDICTS, logged=[])
    assert cost(open_source(bare)).empty


def test_a_log_without_evaluations_and_a_wrong_verifier_are_named(tmp_path):
    bare = RunLog.create(tmp_path / "bare", config={}, seed=1, method="ppo", verifier="exact")
    with pytest.raises(AnalysisError, match=r"bare has no evals: there is no file in evals/"):
        read_evaluations(open_source(bare.path))
    path = write_run(tmp_path / "run", VERDICTS)
    text = (path / "run.yaml").read_text()
    (path / "run.yaml").write_text(text.replace("verifier: exact", "verifier: guess"))
    with pytest.raises(AnalysisError, match="unknown verifier 'guess'"):
        read_evaluations(open_source(path))


def test_a_wrong_file_after_right_ones_is_named_by_its_step(tmp_path):
    path = write_run(tmp_path / "run", VERDICTS | {12: {"b": [[2.0]]}})
    with pytest.raises(AnalysisError, match=r"evals, step 12: column 'exact' must lie in \[0, 1\]"):
        read_evaluations(open_source(path))
