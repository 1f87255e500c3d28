"""The overhead's shares against plain sums over the log."""

import math

import pytest

from analysis import AnalysisError
from analysis.exhibit import plt
from analysis.sources import open_sources
from cvpo.metrics import paired_t_interval
from paper_figures.overhead import make
from tests.training_logs import write_run

VERDICTS = {0: {"b": [[0]]}}


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def run(path, seconds, *, method="cvpo", seed=1, steps=(0, 1, 2, 3)):
    """A run whose phases take `seconds(step)` each."""
    return write_run(
        path,
        VERDICTS,
        method=method,
        seed=seed,
        logged=steps,
        scalars=lambda step: {f"seconds/{name}": value for name, value in seconds(step).items()},
    )


def phases(weights=0.01, tracker=0.02):
    def at(step):
        if step == 0:
            return {"rollout": 0.0, "weights": 0.0, "tracker": 0.0, "eval": 9.0}
        return {
            "rollout": 1.0 * step,
            "actor": 2.0,
            "weights": weights,
            "tracker": tracker,
            "eval": 50.0,
            "save": 7.0,
        }

    return at


def row(table, label, part):
    return table[(table["label"] == label) & (table["part"] == part)].iloc[0]


def test_shares_are_of_the_seconds_of_all_training_phases(tmp_path):
    sources = open_sources(
        [run(tmp_path / str(seed), phases(0.01 * seed), seed=seed) for seed in (1, 2, 3)]
    )
    exhibit = make(sources)
    shares = {"weights": [], "tracker": [], "both": []}
    for seed in (1, 2, 3):
        total = sum(1.0 * step + 2.0 + 0.01 * seed + 0.02 for step in (1, 2, 3))
        shares["weights"].append(100 * 3 * 0.01 * seed / total)
        shares["tracker"].append(100 * 3 * 0.02 / total)
        shares["both"].append(shares["weights"][-1] + shares["tracker"][-1])
    for part, values in shares.items():
        found = row(exhibit.table, "cvpo", part)
        expected = paired_t_interval(values, [0.0] * 3)
        assert found["percent"] == pytest.approx(expected.estimate)
        assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
        assert (found["runs"], found["steps"]) == (3, 9)
    assert "not below 1 %" in exhibit.caption


def test_small_shares_of_several_runs_are_called_negligible(tmp_path):
    sources = open_sources(
        [run(tmp_path / str(seed), phases(1e-4 * seed, 1e-4), seed=seed) for seed in (1, 2, 3)]
    )
    assert "all intervals end below 1 %" in make(sources).caption


def test_one_run_has_shares_and_no_claim(tmp_path):
    exhibit = make(open_sources([run(tmp_path / "a", phases())]))
    assert math.isnan(row(exhibit.table, "cvpo", "both")["high"])
    assert "nothing is claimed about other runs" in exhibit.caption


def test_steps_without_a_number_are_left_out(tmp_path):
    def holed(step):
        return phases()(step) | ({"weights": math.nan} if step == 2 else {})

    found = row(make(open_sources([run(tmp_path / "a", holed)])).table, "cvpo", "weights")
    assert found["steps"] == 2
    assert found["percent"] == pytest.approx(100 * 0.02 / (3.03 + 5.03))


def test_a_method_that_spends_nothing_is_in_the_table(tmp_path):
    sources = open_sources(
        [run(tmp_path / "a", phases()), run(tmp_path / "b", phases(0.0), method="grpo")]
    )
    assert row(make(sources).table, "grpo", "weights")["percent"] == 0.0


def test_a_log_without_timed_phases_is_left_out_or_refused(tmp_path):
    bare = write_run(tmp_path / "bare", VERDICTS, method="ppo")
    with pytest.raises(AnalysisError, match="python -m train"):
        make(open_sources([bare]))
    exhibit = make(open_sources([bare, run(tmp_path / "a", phases())]))
    assert "bare is left out" in exhibit.caption
    with pytest.raises(AnalysisError, match="no step's phases are timed"):
        make(open_sources([run(tmp_path / "young", phases(), steps=(0,))]))


def test_runs_without_a_timed_step_are_not_counted(tmp_path):
    young = run(tmp_path / "young", phases(), seed=2, steps=(0,))
    exhibit = make(open_sources([young, run(tmp_path / "a", phases())]))
    assert row(exhibit.table, "cvpo", "both")["runs"] == 1
    assert "Runs: cvpo (seed 1)." in exhibit.caption
    assert "young is left out: none of its steps is timed." in exhibit.caption
