"""A thinned log says what the whole one says, in less room and without naming machines."""

import pandas as pd
import pytest

from analysis import AnalysisError
from analysis.__main__ import main
from analysis.sources import open_source
from analysis.thin import thin, without_places
from cvpo.runlog import RunLog, read_run
from tests.logs import write_log

STEPS = (5, 10, 15, 20, 25)


def rows(count=3):
    return {
        "prompt_id": list(range(count)),
        "sample": [0] * count,
        "length": [4] * count,
        "truncated": [False] * count,
        "reward": [1.0] * count,
        "correct": [1.0] * count,
        "response": ["1+1=2"] * count,
        "token_ids": [[1, 2, 3, 4]] * count,
    }


@pytest.fixture
def run(tmp_path):
    config = {"steps": 25, "model": {"path": "/models/small"}, "run_dir": "runs/a"}
    log = RunLog.create(
        tmp_path / "run", config=config, seed=3, method="vapo", verifier="exact", hosts=["gpu-17"]
    )
    for step in STEPS:
        log.trajectories(step, rows())
        log.scores("frozen", step, {"prompt_id": [0], "sample": [0], "sigma": [0.1 * step]})
        log.metrics(step, time=0, device_seconds=step, tokens=step, scalars={"reward/mean": step})
    log.event(5, "warning", "look")
    log.table("curve", {"x": [1.5, None]}, {"x": "nats"})
    return tmp_path / "run"


def test_every_so_many_steps_and_the_last_stay(run, tmp_path):
    copy = open_source(thin(open_source(run), tmp_path / "out", every=10))
    assert sorted(set(copy.read("trajectories")["step"])) == [10, 20, 25]
    assert copy.read("scores/frozen")["sigma"].tolist() == [1.0, 2.0, 2.5]


def test_texts_stay_in_the_last_step_and_token_ids_nowhere(run, tmp_path):
    copy = open_source(thin(open_source(run), tmp_path / "out", every=10))
    found = copy.read("trajectories")
    assert "token_ids" not in found
    assert found.loc[found["step"] == 25, "response"].tolist() == ["1+1=2"] * 3
    assert found.loc[found["step"] < 25, "response"].isna().all()


def test_no_machine_is_named(run, tmp_path):
    copy = thin(open_source(run), tmp_path / "out", every=10)
    found = read_run(copy)
    assert found["hosts"] == ["host-1"]
    assert found["config"]["model"]["path"] == "small"
    assert found["config"]["run_dir"] == "runs/a"
    assert b"gpu-17" not in b"".join(f.read_bytes() for f in copy.rglob("*") if f.is_file())


def test_absolute_paths_are_cut_wherever_they_stand():
    held = {"a": ["/x/y", {"b": "/z"}], "c": "x/y", "d": 1, "e": None}
    assert without_places(held) == {"a": ["y", {"b": "z"}], "c": "x/y", "d": 1, "e": None}


def test_everything_else_is_the_log_itself(tmp_path):
    whole = open_source(write_log(tmp_path / "run"))
    copy = open_source(thin(whole, tmp_path / "out", every=1))
    assert set(copy.contents) == set(whole.contents)
    for part in whole.contents:
        expected = whole.read(part).drop(columns=["response", "token_ids"], errors="ignore")
        found = copy.read(part).drop(columns=["response", "token_ids"], errors="ignore")
        pd.testing.assert_frame_equal(found, expected)
    assert copy.read("trajectories").memory_usage().sum() > 0


def test_units_of_a_table_stay(run, tmp_path):
    from cvpo.runlog import read_table

    copy = thin(open_source(run), tmp_path / "out", every=10)
    assert read_table(copy, "curve").attrs["units"] == {"x": "nats"}


def test_a_copy_is_never_overwritten(run, tmp_path):
    thin(open_source(run), tmp_path / "out", every=10)
    with pytest.raises(AnalysisError, match="is there already"):
        thin(open_source(run), tmp_path / "out", every=10)


def test_a_damaged_part_leaves_no_half_copy(run, tmp_path):
    file = run / "trajectories" / "00000010.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    assert main(["thin", str(run), "-o", str(tmp_path / "out"), "--every", "10"]) == 2
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_says_what_it_wrote(run, tmp_path, capsys):
    assert main(["thin", str(run), "-o", str(tmp_path / "out")]) == 0
    assert f"wrote {tmp_path / 'out' / 'run'}" in capsys.readouterr().out
    assert main(["thin", str(run), "-o", str(tmp_path / "o"), "--every", "0"]) == 2
