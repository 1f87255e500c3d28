"""Figure 5: shares of the accuracy bins are those of the prompts, in the right panel."""

import math

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.accuracy_bins import BINS, read_bins
from analysis.exhibit import save
from analysis.sources import open_source, open_sources
from paper_figures.figure5_bins import make
from tests.logs import write_log


def runs(tmp_path, *methods, seeds=(1,), steps=8):
    return [
        write_log(tmp_path / f"{m}{s}", method=m, seed=s, steps=steps)
        for m in methods
        for s in seeds
    ]


def test_shares_are_means_over_seeds_with_a_t_interval(tmp_path):
    paths = runs(tmp_path, "cvpo-stochasticity", "cvpo", seeds=(1, 2, 3))
    table = make(open_sources(paths)).table
    plain = {path.name: read_bins(open_source(path)) for path in paths}
    for row in table.to_dict("records"):
        shares = [
            frame.loc[(frame["round"] == row["round"]) & (frame["bin"] == BINS.index(row["bin"]))]
            for name, frame in plain.items()
            if name[:-1] == row["label"]
        ]
        x = [float(share["share"].iloc[0]) for share in shares]
        assert row["share"] == pytest.approx(np.mean(x))
        half = 4.302653 * np.std(x, ddof=1) / math.sqrt(3)  # t of 2 degrees of freedom
        assert row["high"] - row["share"] == pytest.approx(half, rel=1e-5, abs=1e-12)
        assert row["runs"] == 3
    sums = table.groupby(["label", "round"])["share"].sum()
    assert sums.to_numpy() == pytest.approx(np.ones(len(sums)))


@pytest.mark.parametrize(
    ("methods", "panels"),
    [
        (
            ("vapo", "cvpo-stochasticity", "cvpo-curriculum", "cvpo"),
            {"without": "cvpo-stochasticity", "with": "cvpo"},
        ),
        (("vapo", "cvpo-curriculum", "cvpo"), {"without": "vapo", "with": "cvpo-curriculum"}),
        (("vapo", "cvpo"), {"without": "vapo", "with": "cvpo"}),
        (("vapo", "grpo"), {"without": "vapo"}),
        (("cvpo-curriculum",), {"with": "cvpo-curriculum"}),
    ],
)
def test_the_cleanest_pair_that_there_is_gets_compared(tmp_path, methods, panels):
    exhibit = make(open_sources(runs(tmp_path, *methods, steps=4)))
    found = exhibit.table.groupby("panel")["label"].first().to_dict()
    assert found == panels
    assert ("W_S too" in exhibit.caption) == (panels == {"without": "vapo", "with": "cvpo"})
    for panel in {"without", "with"} - panels.keys():
        assert f"The panel {panel} the curriculum is empty" in exhibit.caption


def test_seeds_that_are_behind_are_said(tmp_path):
    paths = [
        write_log(tmp_path / "a", method="vapo", seed=1, steps=12),
        write_log(tmp_path / "b", method="vapo", seed=2, steps=4),
    ]
    exhibit = make(open_sources(paths))
    assert "not every seed has reached the rounds from step 8 on" in exhibit.caption
    assert exhibit.table.groupby("round")["runs"].first().tolist() == [2, 1, 1]


def test_a_switch_of_phase_is_said_where_the_weight_is_used(tmp_path):
    used = write_log(tmp_path / "a", method="cvpo", switch=4)
    watched = write_log(tmp_path / "b", method="vapo", switch=4)
    assert "bottleneck" in make(open_sources([used])).caption
    assert "bottleneck" not in make(open_sources([watched])).caption


def test_logs_without_rounds_or_of_other_methods_are_an_error(tmp_path):
    with pytest.raises(AnalysisError, match="until a round over the prompts is complete"):
        make(open_sources([write_log(tmp_path / "a", steps=3)]))
    with pytest.raises(AnalysisError, match="no run is of vapo"):
        make(open_sources(runs(tmp_path, "grpo")))


def test_the_same_logs_give_the_same_bytes(tmp_path):
    sources = open_sources(runs(tmp_path, "vapo", "cvpo"))
    files = [save(make(sources), tmp_path / name, "x") for name in ("one", "two")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_rounds_that_are_not_in_the_log_are_told_and_not_made_up(tmp_path):
    path = write_log(tmp_path / "a", method="vapo", steps=20)
    (path / "prompts" / "00000002.parquet").unlink()
    exhibit = make(open_sources([path]))
    assert "vapo has no round 2 (counted from 0)" in exhibit.caption
    assert sorted(set(exhibit.table["round"])) == [0, 1, 3, 4]
    assert "has no round" not in make(open_sources(runs(tmp_path, "cvpo"))).caption
