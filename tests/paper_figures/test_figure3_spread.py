"""Figure 3: medians and ratios are those of the trajectories, under either critic."""

import math

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.exhibit import save
from analysis.sources import open_source, open_sources
from analysis.spread import LAST_STEPS
from analysis.thin import thin
from cvpo import RunLog, read_scores, read_trajectories
from paper_figures.figure3_spread import make
from tests.logs import Effect, write_log


def median(path, read=read_trajectories, steps=12):
    rows = read(path, steps=range(steps - LAST_STEPS + 1, steps + 1))
    return float(np.median(rows["sigma"] ** 2))


def row(exhibit, label, panel="a"):
    table = exhibit.table
    return table[(table["label"] == label) & (table["panel"] == panel)].iloc[0]


def test_the_median_is_that_of_the_trajectories_and_its_ratio_is_paired_by_seed(tmp_path):
    paths = {
        (m, s): write_log(
            tmp_path / f"{m}{s}", method=m, seed=s, effect=Effect(shift=0.3 * (m == "cvpo"))
        )
        for m in ("vapo", "cvpo")
        for s in (1, 2, 3)
    }
    exhibit = make(open_sources(list(paths.values())))
    medians = {key: median(path) for key, path in paths.items()}
    found = row(exhibit, "cvpo")
    assert found["median"] == pytest.approx(np.mean([medians["cvpo", s] for s in (1, 2, 3)]))
    logs = [math.log(medians["cvpo", s] / medians["vapo", s]) for s in (1, 2, 3)]
    assert found["ratio"] == pytest.approx(math.exp(np.mean(logs)))
    half = 4.302653 * np.std(logs, ddof=1) / math.sqrt(3)  # t of 2 degrees of freedom
    assert found["ratio_high"] == pytest.approx(math.exp(np.mean(logs) + half), rel=1e-5)
    assert found["ratio"] == pytest.approx(math.exp(0.6), rel=0.2)  # sigma is shifted by e^.3
    assert found["trajectories"] == 3 * 32 * LAST_STEPS
    assert (found["first_step"], found["last_step"]) == (3, 12)
    assert "paired by seed: cvpo" in exhibit.caption
    assert f"{6 * 32 * LAST_STEPS:,} trajectories of steps 3-12" in exhibit.caption


def test_the_frozen_critic_has_a_panel_of_its_own(tmp_path):
    paths = [
        write_log(tmp_path / "a", method="vapo", scored_by="judge"),
        write_log(tmp_path / "b", method="cvpo", scored_by="judge"),
    ]
    exhibit = make(open_sources(paths))
    frozen = row(exhibit, "cvpo", "b")
    assert frozen["median"] == pytest.approx(
        median(paths[1], lambda path, steps: read_scores(path, "judge", steps=steps))
    )
    assert frozen["median"] == pytest.approx(4 * row(exhibit, "cvpo")["median"])
    assert frozen["critic"] == "judge"
    assert "one frozen critic, judge" in exhibit.caption


def test_of_several_critics_the_one_that_saw_most_runs_is_shown(tmp_path):
    paths = [
        write_log(tmp_path / "a", method="vapo", scored_by="few"),
        write_log(tmp_path / "b", method="cvpo", scored_by="many"),
        write_log(tmp_path / "c", method="ppo", scored_by="many"),
    ]
    table = make(open_sources(paths)).table
    assert set(table.loc[table["panel"] == "b", "critic"]) == {"many"}


def test_without_scores_the_figure_says_how_to_make_them(tmp_path):
    exhibit = make(open_sources([write_log(tmp_path / "a", method="vapo")]))
    assert "(b) is empty" in exhibit.caption
    assert "python -m train score --critic CHECKPOINT --run RUN" in exhibit.caption
    assert set(exhibit.table["panel"]) == {"a"}


def test_one_seed_has_no_interval_and_the_caption_says_so(tmp_path):
    paths = [write_log(tmp_path / m, method=m) for m in ("vapo", "cvpo")]
    exhibit = make(open_sources(paths))
    assert math.isnan(row(exhibit, "cvpo")["median_low"])
    assert not math.isnan(row(exhibit, "cvpo")["ratio"])
    assert "nothing is said about other seeds" in exhibit.caption


def test_a_run_that_is_not_finished_is_not_compared(tmp_path):
    paths = [
        write_log(tmp_path / "a", method="vapo", steps=12),
        write_log(tmp_path / "b", method="cvpo", steps=4),
    ]
    exhibit = make(open_sources(paths))
    assert exhibit.table["label"].tolist() == ["vapo"]
    assert "b is left out: it has come to step 4 only, of 12" in exhibit.caption


def test_runs_without_values_are_an_error_that_says_what_to_do(tmp_path):
    sources = open_sources([write_log(tmp_path / "a", method="grpo", critic=False)])
    with pytest.raises(AnalysisError, match="train a method that has a critic"):
        make(sources)


def test_a_policy_without_a_critic_is_shown_once_it_was_scored(tmp_path):
    path = write_log(tmp_path / "a", method="grpo", scored_by="judge")
    for file in (path / "trajectories").iterdir():
        file.unlink()
    exhibit = make(open_sources([path]))
    assert exhibit.table["panel"].tolist() == ["b"]
    assert "(a) is empty" in exhibit.caption


def test_the_same_logs_give_the_same_bytes(tmp_path):
    sources = open_sources([write_log(tmp_path / "a", method="vapo", scored_by="judge")])
    files = [save(make(sources), tmp_path / name, "x") for name in ("one", "two")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_a_ratio_is_over_the_seeds_of_both_and_says_how_many(tmp_path):
    paths = [write_log(tmp_path / f"v{s}", method="vapo", seed=s) for s in (1, 2, 3)]
    paths += [write_log(tmp_path / f"c{s}", seed=s) for s in (2, 3, 4)]
    exhibit = make(open_sources(paths))
    found = row(exhibit, "cvpo")
    logs = [math.log(median(tmp_path / f"c{s}") / median(tmp_path / f"v{s}")) for s in (2, 3)]
    assert found["ratio"] == pytest.approx(math.exp(np.mean(logs)))
    assert found["ratio_seeds"] == 2
    assert "(a, 2 seeds of both)" in exhibit.caption


def test_a_thinned_log_says_which_steps_it_rests_on_and_is_of_these(tmp_path):
    path = write_log(tmp_path / "a", method="vapo", steps=42)
    thinned = thin(open_source(path), tmp_path / "thin", every=5)
    exhibit = make(open_sources([thinned]))
    assert "trajectories of every 5th step from 5 to 40, and step 42." in exhibit.caption
    kept = read_trajectories(path, steps=[*range(5, 41, 5), 42])["sigma"]
    assert row(exhibit, "vapo")["median"] == pytest.approx(np.median(kept**2))


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_a_spread_of_any_size_is_drawn_where_it_lies(tmp_path, size):
    path = write_log(tmp_path / "a", method="vapo", steps=1)
    rows = read_trajectories(path).drop(columns="step")
    (path / "trajectories" / "00000001.parquet").unlink()
    RunLog.open(path).trajectories(1, rows.assign(sigma=size * rows["sigma"]))
    panel = make(open_sources([path])).figure.axes[0]
    middle = (size * np.median(rows["sigma"])) ** 2
    low, high = panel.get_xlim()
    assert low < middle < high
    curve = max(panel.lines, key=lambda line: len(line.get_xdata()))
    drawn = np.asarray(curve.get_xdata())[np.isfinite(curve.get_ydata())]
    assert drawn.min() < middle < drawn.max()
