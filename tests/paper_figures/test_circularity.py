"""Circularity: the correlations of sigma are those of the metrics, window by window."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis import AnalysisError
from analysis.exhibit import save
from analysis.sources import open_sources
from cvpo import read_metrics
from paper_figures.circularity import PARTNERS, WINDOWS, change, curve, make
from tests.logs import write_log

ENTROPY = "sigma/corr_entropy"


def frame(values, start=1):
    return pd.DataFrame({"step": range(start, start + len(values)), ENTROPY: values})


def test_a_window_is_the_mean_over_seeds_of_the_mean_over_its_steps():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-1, 1, 60), rng.uniform(-1, 1, 60)
    a[[0, 1, 2]] = np.nan
    found = curve([frame(a), frame(b)], ENTROPY)
    assert len(found) == WINDOWS
    for index, row in enumerate(found.to_dict("records")):
        part = slice(3 * index, 3 * index + 3)
        means = [np.nanmean(x[part]) for x in (a, b) if not np.isnan(x[part]).all()]
        assert row["correlation"] == pytest.approx(np.mean(means))
        assert row["step"] == 3 * index + 2
        assert row["runs"] == len(means)


def test_few_steps_are_a_window_each():
    found = curve([frame([0.1, math.nan, 0.3])], ENTROPY)
    assert found["step"].tolist() == [1, 3]
    assert found["correlation"].tolist() == [0.1, 0.3]
    assert found["low"].isna().all()


def test_the_change_is_last_fifth_less_first_fifth():
    ramp = np.arange(10) / 10
    found = change([frame(ramp), frame(ramp + 0.1), frame([0.5, 0.1])], ENTROPY)
    assert found["correlation"].tolist() == pytest.approx([0.85 - 0.05])
    assert found["runs"].tolist() == [2]
    assert change([frame([0.5, 0.1])], ENTROPY).empty
    assert change([frame([math.nan] * 9)], ENTROPY).empty


def test_the_table_holds_the_metrics_of_the_log(tmp_path):
    path = write_log(tmp_path / "a", steps=12)
    exhibit = make(open_sources([path]))
    metrics = read_metrics(path)
    for name in PARTNERS:
        rows = exhibit.table[
            (exhibit.table["metric"] == name) & (exhibit.table["what"] == "window")
        ]
        assert rows["correlation"].tolist() == pytest.approx(metrics[name].tolist())
    assert "nothing is said about other seeds" in exhibit.caption


def test_a_correlation_that_is_not_defined_is_a_gap_that_is_said(tmp_path):
    constant = {"sigma/corr_length": math.nan}
    sources = open_sources([write_log(tmp_path / "a", scalars=constant)])
    exhibit = make(sources)
    assert "of cvpo with response length at 12 of 12 steps" in exhibit.caption
    assert "sigma/corr_length" not in set(exhibit.table["metric"])


def test_a_correlation_that_was_not_logged_is_a_gap_too(tmp_path):
    sources = open_sources([write_log(tmp_path / "a", scalars={"sigma/corr_surprise": None})])
    assert "|r - V(prompt)| at 12 of 12 steps" in make(sources).caption


def test_methods_without_a_critic_are_left_out_or_an_error(tmp_path):
    grpo = write_log(tmp_path / "a", method="grpo", critic=False)
    with pytest.raises(AnalysisError, match="train a method that has a critic"):
        make(open_sources([grpo]))
    exhibit = make(open_sources([grpo, write_log(tmp_path / "b", method="vapo")]))
    assert set(exhibit.table["label"]) == {"vapo"}
    assert "a is left out" in exhibit.caption


def test_nothing_but_nan_is_an_error(tmp_path):
    path = write_log(tmp_path / "a", scalars=dict.fromkeys(PARTNERS, math.nan))
    with pytest.raises(AnalysisError, match="NaN at every step"):
        make(open_sources([path]))


def test_the_same_logs_give_the_same_bytes(tmp_path):
    sources = open_sources([write_log(tmp_path / "a")])
    files = [save(make(sources), tmp_path / name, "x") for name in ("one", "two")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_the_change_of_a_run_that_ended_early_says_so(tmp_path):
    paths = [
        write_log(tmp_path / "a", method="vapo", steps=12),
        write_log(tmp_path / "b", method="cvpo", steps=6),
    ]
    caption = make(open_sources(paths)).caption
    assert caption.count("only)") == 1
    assert "(up to step 6 only)" in caption
