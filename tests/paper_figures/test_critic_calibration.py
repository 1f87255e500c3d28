"""Critic calibration: means and errors are those of the logged cells."""

import math

import numpy as np
import pytest

from analysis import AnalysisError
from analysis.exhibit import save
from analysis.sources import open_sources
from cvpo import RunLog, read_calibration
from cvpo.metrics import calibration
from paper_figures.critic_calibration import PLACES, make
from tests.logs import write_log


def plain_error(rows):
    """sum_b n_b/N |mean V - mean G| over value bins, as a loop."""
    total, size = 0.0, int(rows["n"].sum())
    for value_bin in rows["value_bin"].unique():
        cell = rows[rows["value_bin"] == value_bin]
        total += abs(cell["value_sum"].sum() - cell["return_sum"].sum())
    return total / size


@pytest.mark.parametrize(("when", "step"), [("first", 4), ("last", 12)])
def test_errors_are_means_over_seeds_at_the_first_and_last_step(tmp_path, when, step):
    paths = [write_log(tmp_path / f"s{s}", seed=s) for s in (1, 2)]
    exhibit = make(open_sources(paths))
    logs = [read_calibration(path, steps=[step]) for path in paths]
    table = exhibit.table[(exhibit.table["what"] == "error") & (exhibit.table["when"] == when)]
    whole = table[table["position_bin"].isna()].iloc[0]
    assert whole["error"] == pytest.approx(np.mean([plain_error(rows) for rows in logs]))
    for row in table.dropna(subset="position_bin").to_dict("records"):
        parts = [rows[rows["position_bin"] == row["position_bin"]] for rows in logs]
        assert row["error"] == pytest.approx(np.mean([plain_error(rows) for rows in parts]))
        assert row["position"] == pytest.approx(100 * (row["position_bin"] + 0.5) / 6)
        assert row["n"] == sum(rows["n"].sum() for rows in parts)
    assert "first 4, last 12" in exhibit.caption


def test_curves_pool_the_cells_of_a_third_of_the_response(tmp_path):
    path = write_log(tmp_path / "a")
    table = make(open_sources([path])).table
    rows = read_calibration(path, steps=[12])
    last = table[(table["what"] == "curve") & (table["when"] == "last")]
    for row in last.to_dict("records"):
        place = PLACES.index(row["place"])
        cell = rows[
            rows["position_bin"].isin([2 * place, 2 * place + 1])
            & (rows["value_bin"] == row["value_bin"])
        ]
        assert row["n"] == cell["n"].sum()
        assert row["value"] == pytest.approx(cell["value_sum"].sum() / cell["n"].sum())
        assert row["return"] == pytest.approx(cell["return_sum"].sum() / cell["n"].sum())
    assert last["n"].sum() == rows["n"].sum()


def test_a_right_critic_lies_on_the_diagonal_and_a_wrong_one_off_it(tmp_path):
    rng = np.random.default_rng(0)
    p = rng.choice([0.2, 0.5, 0.8], 20_000)
    G = np.where(rng.random(p.size) < p, 1.0, -1.0)
    for name, V in (("right", 2 * p - 1), ("wrong", 1 - 2 * p)):
        log = RunLog.create(tmp_path / name, config={}, seed=1, method="vapo", verifier="exact")
        mask = np.ones((p.size, 1), dtype=bool)
        log.calibration(1, calibration(V[:, None], G[:, None], mask, (G + 1) / 2))
    error = {
        name: make(open_sources([tmp_path / name])).table.query("what == 'error'")["error"].iloc[0]
        for name in ("right", "wrong")
    }
    assert error["right"] < 0.03
    assert error["wrong"] == pytest.approx(0.8, abs=0.03)  # |V - G| is 1.2, 0 and 1.2


def test_one_seed_has_no_interval_and_the_caption_says_so(tmp_path):
    exhibit = make(open_sources([write_log(tmp_path / "a")]))
    assert all(math.isnan(x) for x in exhibit.table["low"])
    assert "nothing is said about other seeds" in exhibit.caption


def test_runs_without_calibration_are_named_or_an_error(tmp_path):
    grpo = write_log(tmp_path / "a", method="grpo", critic=False)
    with pytest.raises(AnalysisError, match=r"log\.tokens_every"):
        make(open_sources([grpo]))
    exhibit = make(open_sources([grpo, write_log(tmp_path / "b", method="vapo")]))
    assert "a is left out" in exhibit.caption
    assert set(exhibit.table["label"]) == {"vapo"}


def test_the_same_logs_give_the_same_bytes(tmp_path):
    sources = open_sources([write_log(tmp_path / "a")])
    files = [save(make(sources), tmp_path / name, "x") for name in ("one", "two")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_a_place_that_one_seed_has_no_token_in_is_not_of_two_runs(tmp_path):
    rng = np.random.default_rng(0)
    for seed, lengths in ((1, 1), (2, 10)):
        log = RunLog.create(
            tmp_path / f"s{seed}", config={}, seed=seed, method="vapo", verifier="exact"
        )
        V = rng.uniform(-1, 1, (40, 10))
        mask = np.arange(10) < np.full((40, 1), lengths)
        log.calibration(1, calibration(V, np.sign(V), mask, np.ones(40)))
    table = make(open_sources([tmp_path / "s1", tmp_path / "s2"])).table
    runs = table[(table["what"] == "error") & (table["when"] == "last")].set_index("position_bin")
    assert runs.loc[0, "runs"] == 2
    assert runs.loc[9, "runs"] == 1
    assert math.isnan(runs.loc[9, "low"])
