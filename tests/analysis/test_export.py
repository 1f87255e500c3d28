"""What is exported is what was logged, as CSV and as Parquet."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from analysis import AnalysisError
from analysis.__main__ import main
from analysis.export import export
from analysis.sources import open_source, open_sources
from cvpo.runlog import RunLog

RESPONSE = 'says "1,5"\nand more: é'


def make_run(path, **first):
    log = RunLog.create(path, config={"steps": 2}, seed=1, method="vapo", verifier="exact")
    rows = {
        "prompt_id": [0, 0, 1],
        "sample": [0, 1, 0],
        "length": [5, 6, 7],
        "truncated": [False, True, False],
        "reward": [1.0, -1.0, 1.0],
        "correct": [1.0, 0.0, 1.0],
    }
    # what is null throughout the first file has a type in the second
    log.trajectories(1, rows | first)
    log.trajectories(
        2,
        rows
        | {"sigma": [0.1, 0.2, 0.3], "answer": ["a", None, "b"]}
        | {"response": [RESPONSE, None, "x"], "token_ids": [[1, 2], None, [3]]},
    )
    for step in (1, 2):
        log.metrics(step, time=0, device_seconds=0, tokens=0, scalars={"reward/mean": None})
    log.scores("frozen", 2, {"prompt_id": [0], "sample": [0]})
    log.table("curve", {"x": [1.5], "name": ["a"]})
    return path


def test_parquet_is_the_log_itself(tmp_path):
    source = open_source(make_run(tmp_path / "r"))
    files, notes = export([source], tmp_path / "out", file_format="parquet")
    assert [str(file.relative_to(tmp_path / "out" / "r")) for file in files] == [
        "metrics.parquet",
        "trajectories.parquet",
        "scores/frozen.parquet",
        "tables/curve.parquet",
    ]
    assert not notes
    for part, file in zip(source.parts, files, strict=True):
        found = pd.read_parquet(file)
        expected = source.read(part)
        assert list(found.columns) == list(expected.columns)
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)
    assert pq.read_schema(files[1]).field("sigma").metadata == {b"unit": b"reward"}
    assert pd.read_parquet(files[1])["length"].dtype == np.int64


def test_csv_is_the_log_itself(tmp_path):
    source = open_source(make_run(tmp_path / "r"))
    export([source], tmp_path / "out")
    found = pd.read_csv(tmp_path / "out" / "r" / "trajectories.csv")
    expected = source.read("trajectories")
    assert list(found.columns) == list(expected.columns)
    for name in ("step", "sample", "reward", "truncated", "sigma", "response", "answer"):
        pd.testing.assert_series_equal(found[name], expected[name], check_dtype=False)
    assert found["token_ids"].map(json.loads, na_action="ignore").tolist()[3:] == [
        [1, 2],
        pytest.approx(np.nan, nan_ok=True),
        [3],
    ]


def test_chosen_parts_of_several_logs_in_folders_of_their_own(tmp_path, capsys):
    first, second = make_run(tmp_path / "a" / "r"), make_run(tmp_path / "b" / "r")
    peer = tmp_path / "v.jsonl"
    peer.write_text('{"step": 1, "data": {"actor/entropy": 0.5}}\n')
    out = tmp_path / "out"
    arguments = ["export", str(first), str(second), str(peer), "-o", str(out)]
    assert main([*arguments, "--parts", "metrics", "scores"]) == 0
    printed = capsys.readouterr().out
    assert "note: v has no scores" in printed
    written = sorted(str(f.relative_to(out)) for f in out.rglob("*.csv"))
    assert len(written) == 5
    assert written[-1] == "v/metrics.csv"
    assert pd.read_csv(out / "v" / "metrics.csv").to_dict("list") == {
        "step": [1],
        "policy/entropy": [0.5],
    }


def test_a_second_export_replaces_the_first_and_leaves_nothing_aside(tmp_path):
    source = open_source(make_run(tmp_path / "r"))
    for _ in range(2):
        export([source], tmp_path / "out", parts=["tables/curve"])
    assert [f.name for f in (tmp_path / "out").rglob("*") if f.is_file()] == ["curve.csv"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [(["metricks"], "unknown part 'metricks'"), (["evals"], "nothing to export: r has no evals")],
)
def test_parts_that_are_not_there_are_refused(tmp_path, parts, message):
    source = open_source(make_run(tmp_path / "r"))
    with pytest.raises(AnalysisError, match=message):
        export([source], tmp_path / "out", parts=parts)


def test_a_damaged_file_leaves_no_half_export(tmp_path):
    run = make_run(tmp_path / "r")
    file = run / "trajectories" / "00000001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    for file_format in ("csv", "parquet"):
        with pytest.raises(AnalysisError, match=r"00000001.parquet is not a whole"):
            export(
                [open_source(run)],
                tmp_path / "out",
                file_format=file_format,
                parts=["trajectories"],
            )
    assert not [f for f in (tmp_path / "out").rglob("*") if f.is_file()]


def test_a_column_of_two_types_is_named_and_goes_to_csv(tmp_path):
    (tmp_path / "d").mkdir()
    for step, tag in ((1, 0.5), (2, "text")):
        row = {"input": "p", "output": "o", "gts": "1", "score": 1.0, "step": step, "tag": tag}
        (tmp_path / "d" / f"{step}.jsonl").write_text(json.dumps(row) + "\n")
    sources = open_sources([tmp_path / "d"])
    with pytest.raises(AnalysisError, match=r"different types .*tag.*export it as CSV"):
        export(sources, tmp_path / "out", file_format="parquet")
    export(sources, tmp_path / "out")
    found = pd.read_csv(tmp_path / "out" / "d" / "trajectories.csv")
    assert found["tag"].tolist() == ["0.5", "text"]
