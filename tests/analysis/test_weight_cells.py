"""Sums of weights by phase, success rate and outcome."""

from collections import defaultdict

import pytest

from analysis.sources import open_source
from analysis.weight_cells import BANDS, SUMS, read_cells
from cvpo import RunLog, read_trajectories
from tests.logs import write_log


def band_of(rho):
    if rho >= 0.8:
        return ".8-1"
    return BANDS[sum(rho > edge for edge in (0.1, 0.3, 0.5))]


def test_cells_are_those_of_a_plain_loop(tmp_path):
    path = write_log(tmp_path / "a", switch=8)
    found = read_cells(open_source(path))
    expected = defaultdict(lambda: dict.fromkeys(SUMS, 0.0))
    for row in read_trajectories(path).to_dict("records"):
        phase = "bottleneck" if row["step"] > 8 else "early"
        outcome = "correct" if row["correct"] >= 0.5 else "incorrect"
        cell = expected[phase, band_of(row["rho"]), outcome]
        size = row["length"] * abs(row["advantage_mean"])
        w = row["w_s"] * row["w_d"]
        for name, x in zip(SUMS, (1, row["w_s"], row["w_d"], w, size, w * size), strict=True):
            cell[name] += x
    for row in found.sums.to_dict("records"):
        key = row["phase"], row["band"], row["outcome"]
        assert {name: row[name] for name in SUMS} == pytest.approx(expected[key])
    assert found.dropped == 0
    assert found.steps == tuple(range(1, 13))


@pytest.mark.parametrize(
    ("rho", "band"),
    [(0.0, "0-.1"), (0.1, "0-.1"), (0.3, ".1-.3"), (0.31, ".3-.5"), (0.79, ".5-.8"),
     (0.8, ".8-1"), (1.0, ".8-1")],
)  # fmt: skip
def test_the_low_and_the_high_set_are_whole_bands(tmp_path, rho, band):
    write(tmp_path / "a", rho=rho)
    cells = read_cells(open_source(tmp_path / "a")).sums
    assert cells.loc[cells["trajectories"] == 1, "band"].tolist() == [band]


def test_a_run_without_a_switch_is_early_throughout(tmp_path):
    cells = read_cells(open_source(write_log(tmp_path / "a"))).sums
    assert cells.loc[cells["phase"] == "bottleneck", "trajectories"].sum() == 0


def test_trajectories_that_lack_a_weight_are_counted_and_left_out(tmp_path):
    write(tmp_path / "a", w_s=None)
    found = read_cells(open_source(tmp_path / "a"))
    assert found.dropped == 1
    assert found.sums["trajectories"].sum() == 0


def write(path, **changed):
    log = RunLog.create(path, config={}, seed=1, method="cvpo", verifier="exact")
    row = {
        "prompt_id": 0, "sample": 0, "length": 3, "truncated": False, "reward": 1.0,
        "correct": 1.0, "w_s": 1.1, "w_d": 1.2, "rho": 0.5, "advantage_mean": -0.5,
    }  # fmt: skip
    log.trajectories(1, {name: [value] for name, value in (row | changed).items()})
