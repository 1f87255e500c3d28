"""The kept runs: what is among them, and that every exhibit is made from them, always the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.labels import groups
from analysis.sources import open_sources
from cvpo.runlog import read_run
from paper_figures import EXHIBITS
from paper_figures.kept import ARCHIVE, kept_runs

ROOT = Path(__file__).parents[2]
STUDIES = {
    "bound",
    "tracker",
    "trigger",
    "weights",
    "curriculum",
    "sensitivity",
    "calibrate",
    "partial-credit",
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return kept_runs(folder=tmp_path_factory.mktemp("kept") / "runs")


def make(folder, hash_seed):
    done = subprocess.run(
        [sys.executable, "-m", "paper_figures", "-o", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All exhibits, and what was said of those that could not be made."""
    folder = tmp_path_factory.mktemp("made")
    return folder, make(folder, "1")


def test_the_archive_is_small(kept):
    assert ARCHIVE.stat().st_size < 40e6
    assert len(kept) > 30


def test_it_holds_the_runs_that_the_exhibits_need(kept):
    sources = open_sources(kept)
    seeds = {name: [run.seed for run in runs] for name, runs in groups(sources).items()}
    for name in (
        "grpo-async",
        "vapo",
        "cvpo-stochasticity",
        "cvpo-curriculum",
        "cvpo",
        "cvpo c=.1",
        "cvpo c=.5",
    ):
        assert seeds[name] == [1, 2, 3], name
    for name in ("(constant)", "(shuffled)", "(flipped)"):
        assert len(seeds[f"cvpo-stochasticity {name}"]) >= 2, name
    assert all(run.finished for run in sources)
    assert {run.config["study"] for run in sources if "study" in run.config} == STUDIES


def test_it_names_no_machine(kept):
    for run in kept:
        text = (run / "run.yaml").read_text()
        assert all(re.fullmatch(r"host-\d+", host) for host in read_run(run)["hosts"])
        assert not re.search(r"(?m)(^|[\s'\"=])/\w", text)  # a path from the root


@pytest.mark.slow
def test_every_exhibit_is_made_from_it(made):
    folder, said = made
    assert "not made" not in said
    for name in EXHIBITS:
        assert (folder / f"{name}.csv").stat().st_size > 0
        assert (folder / f"{name}.caption.txt").stat().st_size > 0


@pytest.mark.slow
def test_they_are_the_same_bytes_each_time(made, tmp_path):
    folder, _ = made
    make(tmp_path, "2")
    names = sorted(file.name for file in folder.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    different = [n for n in names if (folder / n).read_bytes() != (tmp_path / n).read_bytes()]
    assert not different


@pytest.mark.slow
def test_the_kept_table_of_claims_is_the_one_that_is_made(made):
    folder, _ = made
    assert (ROOT / "docs" / "claims.md").read_text() == (folder / "table_claims.md").read_text()
