"""One line for each run: what it says, and that a bad one does not hide the others."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from analysis.__main__ import main
from analysis.ls import gaps, list_runs, logged_steps
from analysis.sources import open_source
from cvpo.runlog import RunLog


def make_run(path, steps, total, seed=1):
    log = RunLog.create(path, config={"steps": total}, seed=seed, method="vapo", verifier="exact")
    for step in steps:
        log.metrics(step, time=0, device_seconds=0, tokens=0, scalars={"reward/mean": 0.5})
    return path


def test_a_finished_run_in_one_line(tmp_path):
    table, notes, errors = list_runs([make_run(tmp_path / "r", range(1, 5), 4)])
    row = table.iloc[0]
    assert row[["run", "kind", "method", "seed"]].tolist() == ["r", "cvpo", "vapo", "1"]
    assert row[["steps", "state", "parts"]].tolist() == ["1-4", "finished", "metrics 4"]
    assert row["missing"].startswith("events, problems, trajectories,")
    assert "metrics: accuracy/mean" in row["missing"]
    assert not notes
    assert not errors


@pytest.mark.parametrize(
    ("steps", "total", "span", "state"),
    [
        ([1, 2, 3, 6, 7], 9, "1-7 without 4-5", "running or killed at 7 of 9"),
        ([0, 5, 10, 20, 25, 26], 26, "0-26 without 15", "finished"),
        ([3], 8, "3", "running or killed at 3 of 8"),
        ([], 8, "-", "running or killed at 0 of 8"),
        ([1, 2], None, "1-2", "unknown"),
    ],
)
def test_steps_gaps_and_state(tmp_path, steps, total, span, state):
    row = list_runs([make_run(tmp_path / "r", steps, total)])[0].iloc[0]
    assert (row["steps"], row["state"]) == (span, state)


@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(6, 30),
    st.sets(st.integers(1, 28), max_size=3),
)
def test_gaps_are_the_steps_that_were_left_out(start, apart, count, left_out):
    every = [start + apart * index for index in range(count)]
    lost = [step for index, step in enumerate(every) if index in left_out and index < count - 1]
    kept = [step for step in every if step not in lost]
    assume((np.diff(kept) == apart).sum() > len(kept) / 2)
    assert gaps(kept) == lost


def test_peers_stand_beside_ours(tmp_path):
    (tmp_path / "v.jsonl").write_text('{"step": 1, "data": {"actor/entropy": 0.5}}\n')
    (tmp_path / "d").mkdir()
    row = {"input": "p", "output": "o", "gts": "1", "score": 1.0, "step": 7}
    (tmp_path / "d" / "7.jsonl").write_text(json.dumps(row) + "\n")
    table, _, errors = list_runs([tmp_path / "v.jsonl", tmp_path / "d"])
    assert table["kind"].tolist() == ["verl-jsonl", "verl-dump"]
    assert table["steps"].tolist() == ["1", "7"]
    assert table["parts"].tolist() == ["metrics 1", "trajectories 1, problems 1"]
    assert not errors


def test_a_bad_path_does_not_hide_the_others(tmp_path, capsys):
    run = make_run(tmp_path / "r", [1], 1)
    (tmp_path / "empty").mkdir()
    assert main(["ls", str(tmp_path / "empty"), str(run), str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert "finished" in out
    assert "empty: the folder is empty" in err
    assert "none does not exist" in err


def test_a_damaged_part_is_an_error_of_its_run_alone(tmp_path):
    run = make_run(tmp_path / "r", [1], 1)
    log = RunLog.open(run)
    log.table("a", {"x": [1.0]})
    file = run / "tables" / "a.parquet"
    file.write_bytes(file.read_bytes()[:30])
    table, _, errors = list_runs([run, make_run(tmp_path / "ok", [1], 1)])
    assert table["run"].tolist() == ["ok"]
    assert "a.parquet is not a whole Parquet file" in errors[0]


def test_why_says_the_reasons(tmp_path, capsys):
    run = make_run(tmp_path / "r", [1], 1)
    assert main(["ls", "--why", str(run)]) == 0
    assert "note: r has no evals: there is no file in evals/" in capsys.readouterr().out


def test_a_torn_log_is_noted(tmp_path):
    run = make_run(tmp_path / "r", [1, 2], 5)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"st')
    _, notes, _ = list_runs([run])
    assert "r: " in notes[0]
    assert "torn" in notes[0]


def test_a_table_with_rows_of_no_step_is_listed(tmp_path: Path) -> None:
    log = RunLog.create(
        tmp_path / "study", config={"study": "trial"}, seed=0, method="sim-trial", verifier="exact"
    )
    log.table("study", pd.DataFrame({"step": [3.0, float("nan"), 7.0], "value": [1, 2, 3]}))
    assert logged_steps(open_source(tmp_path / "study")) == [3, 7]
