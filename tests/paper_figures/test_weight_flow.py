"""Weight flow: mean weights and shares are those of the trajectories."""

import math

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.exhibit import save
from analysis.sources import open_source, open_sources
from analysis.thin import thin
from analysis.weight_cells import BANDS
from cvpo import RunLog, read_trajectories
from paper_figures import weight_flow
from paper_figures.weight_flow import make
from tests.logs import write_log


def plain(path, phase="all", switch=math.inf):
    """Every trajectory of a phase with its band, its outcome and its |A|."""
    rows = read_trajectories(path)
    if phase != "all":
        rows = rows[(rows["step"] > switch) == (phase == "bottleneck")]
    band = [
        BANDS[4] if rho >= 0.8 else BANDS[sum(rho > e for e in (0.1, 0.3, 0.5))]
        for rho in rows["rho"]
    ]
    outcome = np.where(rows["correct"] >= 0.5, "correct", "incorrect")
    size = rows["length"] * rows["advantage_mean"].abs()
    return rows.assign(band=band, outcome=outcome, w=rows["w_s"] * rows["w_d"], size=size)


def test_cells_are_the_means_over_seeds_of_a_plain_computation(tmp_path):
    paths = [write_log(tmp_path / f"s{s}", seed=s, switch=6) for s in (1, 2, 3)]
    table = make(open_sources(paths)).table
    phases = ("all", "early", "bottleneck")
    assert set(table["phase"]) == set(phases)
    every = {phase: [plain(path, phase, switch=6) for path in paths] for phase in phases}
    for row in table.to_dict("records"):
        means, shifts = [], []
        for rows in every[row["phase"]]:
            chosen = rows["band"] == row["band"]
            if row["outcome"] != "both":
                chosen &= rows["outcome"] == row["outcome"]
            weighted = rows["w"] * rows["size"]
            if chosen.any():
                means.append(rows.loc[chosen, ["w_s", "w_d", "w"]].mean())
            shifts.append(
                weighted[chosen].sum() / weighted.sum()
                - rows.loc[chosen, "size"].sum() / rows["size"].sum()
            )
        for name in ("w_s", "w_d", "w"):
            assert row[name] == pytest.approx(np.mean([mean[name] for mean in means]))
        assert row["shift"] == pytest.approx(np.mean(shifts), abs=1e-12)
        assert row["runs"] == len(means)


def test_shares_add_up_and_shifts_cancel(tmp_path):
    table = make(open_sources([write_log(tmp_path / "a")])).table
    rows = table[table["outcome"] != "both"]
    assert rows["before"].sum() == pytest.approx(1)
    assert rows["after"].sum() == pytest.approx(1)
    assert rows["shift"].sum() == pytest.approx(0, abs=1e-12)
    assert set(table["phase"]) == {"all"}


def test_methods_without_weights_are_not_shown(tmp_path):
    vapo = write_log(tmp_path / "a", method="vapo")
    half = write_log(tmp_path / "b", method="cvpo-curriculum")
    assert set(make(open_sources([vapo, half])).table["label"]) == {"cvpo-curriculum"}
    with pytest.raises(AnalysisError, match="none of the trainings uses a weight"):
        make(open_sources([vapo]))


def test_what_is_not_drawn_is_named_and_in_the_table(tmp_path, monkeypatch):
    methods = ("cvpo", "cvpo-curriculum", "cvpo-stochasticity")
    sources = open_sources([write_log(tmp_path / m, method=m, steps=2) for m in methods])
    assert "Not drawn" not in make(sources).caption
    monkeypatch.setattr(weight_flow, "DRAWN", 2)
    exhibit = make(sources)
    assert "Not drawn, but in the table: cvpo." in exhibit.caption
    assert set(exhibit.table["label"]) == set(methods)


def test_trajectories_without_rho_are_left_out_and_said(tmp_path):
    path = write_log(tmp_path / "a", steps=2)
    log = RunLog.open(path)
    rows = read_trajectories(path, steps=[1]).drop(columns="step")
    log.trajectories(3, rows.assign(rho=rows["rho"].where(rows["prompt_id"] > 0)))
    assert "cvpo: 4 trajectories without" in make(open_sources([path])).caption


def test_logs_without_trajectories_are_an_error(tmp_path):
    with pytest.raises(AnalysisError, match=r"log\.trajectories_every"):
        make(open_sources([write_log(tmp_path / "a", without=["trajectories"])]))


def test_without_metrics_the_weights_are_read_all_the_same(tmp_path):
    found = [
        make(open_sources([write_log(tmp_path / name, without=without)])).table["shift"]
        for name, without in (("a", ()), ("b", ("metrics",)))
    ]
    assert found[0].tolist() == found[1].tolist()


def test_the_same_logs_give_the_same_bytes(tmp_path):
    sources = open_sources([write_log(tmp_path / "a", switch=5)])
    files = [save(make(sources), tmp_path / name, "x") for name in ("one", "two")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_a_thinned_log_says_which_steps_it_rests_on_and_is_of_these(tmp_path):
    path = write_log(tmp_path / "a", steps=24)
    thinned = thin(open_source(path), tmp_path / "thin", every=5)
    exhibit = make(open_sources([thinned]))
    assert "of every 5th step from 5 to 20, and step 24" in exhibit.caption
    rows = plain(path)
    rows = rows[rows["step"].isin([5, 10, 15, 20, 24])]
    found = exhibit.table[(exhibit.table["outcome"] == "both")].set_index("band")
    assert found["trajectories"].sum() == len(rows)
    for band, inside in rows.groupby("band"):
        assert found.loc[band, "w"] == pytest.approx(inside["w"].mean())
        assert found.loc[band, "before"] == pytest.approx(inside["size"].sum() / rows["size"].sum())


def test_shares_of_advantages_that_are_all_0_are_no_number(tmp_path):
    path = write_log(tmp_path / "a", steps=2)
    rows = read_trajectories(path, steps=[1]).drop(columns="step").assign(advantage_mean=0.0)
    for file in (path / "trajectories").iterdir():
        file.unlink()
    RunLog.open(path).trajectories(1, rows)
    exhibit = make(open_sources([path]))
    assert "cvpo no advantage but 0." in exhibit.caption
    assert exhibit.table["before"].isna().all()
    assert exhibit.table["w"].notna().all()
