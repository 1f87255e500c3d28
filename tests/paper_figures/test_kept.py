"""The kept set of runs: packed to the same bytes, unpacked once, and what can be wrong with it."""

import lzma
import os

import pytest

from analysis import AnalysisError
from analysis.sources import open_sources
from paper_figures.__main__ import main
from paper_figures.kept import kept_runs, pack
from tests.training_logs import write_run

VERDICTS = {0: {"easy": [[0, 1]]}, 10: {"easy": [[1, 1]]}}


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / "logs" / name, VERDICTS) for name in ("a", "b")]


def test_what_was_packed_is_unpacked(runs, tmp_path):
    archive = pack(runs, tmp_path / "kept.tar.xz")
    found = kept_runs(archive, tmp_path / "out")
    assert [run.name for run in found] == ["a", "b"]
    for run, copy in zip(runs, found, strict=True):
        files = sorted(file.relative_to(run) for file in run.rglob("*") if file.is_file())
        assert sorted(f.relative_to(copy) for f in copy.rglob("*") if f.is_file()) == files
        assert all((run / file).read_bytes() == (copy / file).read_bytes() for file in files)
    assert len(open_sources(found)) == 2


def test_the_same_runs_make_the_same_bytes(runs, tmp_path):
    first = pack(runs, tmp_path / "1.tar.xz").read_bytes()
    for file in runs[0].rglob("*"):
        os.utime(file, (1, 1))
    assert pack(runs[::-1], tmp_path / "2.tar.xz").read_bytes() == first


def test_unpacking_happens_once(runs, tmp_path):
    archive = pack(runs, tmp_path / "kept.tar.xz")
    kept = kept_runs(archive, tmp_path / "out")
    before = (kept[0] / "run.yaml").stat().st_ino
    kept_runs(archive, tmp_path / "out")
    assert (kept[0] / "run.yaml").stat().st_ino == before


def test_another_archive_takes_the_place_of_the_first(runs, tmp_path):
    kept_runs(pack(runs, tmp_path / "kept.tar.xz"), tmp_path / "out")
    found = kept_runs(pack(runs[:1], tmp_path / "kept.tar.xz"), tmp_path / "out")
    assert [run.name for run in found] == ["a"]


def test_a_folder_of_somebody_else_is_left_alone(runs, tmp_path):
    archive = pack(runs, tmp_path / "kept.tar.xz")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(AnalysisError, match="in the way"):
        kept_runs(archive, tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()


@pytest.mark.parametrize("damage", ["truncated", "no archive", "flipped"])
def test_a_damaged_archive_is_named(runs, tmp_path, damage):
    archive = pack(runs, tmp_path / "kept.tar.xz")
    content = bytearray(archive.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "no archive":
        content = bytearray(lzma.compress(b"hello"))
    else:
        content[len(content) // 2] ^= 255
    archive.write_bytes(bytes(content))
    with pytest.raises(AnalysisError, match=r"kept\.tar\.xz: cannot be unpacked"):
        kept_runs(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_an_archive_the_remedy_is_named(tmp_path):
    with pytest.raises(AnalysisError, match="make runs"):
        kept_runs(tmp_path / "none.tar.xz")


def test_what_is_no_run_is_not_packed(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(AnalysisError, match="no run log"):
        pack([*runs, tmp_path / "empty"], tmp_path / "kept.tar.xz")
    with pytest.raises(AnalysisError, match="called a too"):
        pack([*runs, write_run(tmp_path / "other" / "a", VERDICTS)], tmp_path / "kept.tar.xz")
    assert not (tmp_path / "kept.tar.xz").exists()


def test_exhibits_can_still_be_made_of_named_runs(runs, tmp_path):
    assert main(["table1", "--runs", *map(str, runs[:1]), "-o", str(tmp_path / "out")]) == 0
