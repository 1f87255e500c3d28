"""Every exhibit on logs that lack something or are damaged: the rest is shown and the gap is told.

An exhibit that cannot be made says which file or run it is and what to do. No other error passes.
"""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import yaml

from analysis import AnalysisError
from analysis.exhibit import Exhibit, style
from analysis.sources import Source, open_sources
from cvpo.runlog import RunLogError
from paper_figures import EXHIBITS
from tests.logs import (
    Size,
    files_of,
    interrupt,
    lose,
    renew,
    silence,
    tear,
    truncate,
    write_log,
)

PARTS = ("metrics", "trajectories", "prompts", "evals", "tokens", "calibration", "scores/judge")
REAL = Path(__file__).parents[3] / "shared" / "data" / "runs"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory) -> Path:
    """A folder of trainings that every exhibit of trainings can be made from."""
    folder = tmp_path_factory.mktemp("trainings")
    for method, seed in [("vapo", 1), ("vapo", 2), ("cvpo", 1), ("cvpo", 2)]:
        write_log(folder / f"{method}-{seed}", method=method, seed=seed, scored_by="judge")
    for half in ("cvpo-stochasticity", "cvpo-curriculum"):
        write_log(folder / f"{half}-1", method=half)
    write_log(folder / "constant-1", method="cvpo-stochasticity", arm="constant")
    write_log(folder / "weak-1", alpha_p=0.1, alpha_n=0.1)
    write_log(folder / "grpo-1", method="grpo", critic=False)
    return folder


@pytest.fixture(scope="module")
def whole(trainings) -> Mapping[str, Exhibit | str]:
    """What the undamaged trainings give."""
    return show(sorted(trainings.iterdir()))


@pytest.fixture
def copy(trainings, tmp_path) -> Path:
    """The trainings, to be damaged."""
    return Path(shutil.copytree(trainings, tmp_path / "runs"))


def show(
    paths: Sequence[Path], before: Mapping[str, Exhibit | str] | None = None
) -> dict[str, Exhibit | str]:
    """Every exhibit, or the one error that it ended in; those that changed are drawn too."""
    try:
        sources = open_sources(paths)
    except AnalysisError as error:
        return dict.fromkeys(EXHIBITS, str(error))
    return {name: _exhibit(name, sources, (before or {}).get(name)) for name in EXHIBITS}


def _exhibit(name: str, sources: Sequence[Source], before: Exhibit | str | None) -> Exhibit | str:
    """Made, and drawn if there is something new to draw. A warning is an error too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            exhibit = EXHIBITS[name](sources)
        except (AnalysisError, RunLogError) as error:
            return str(error)
        if exhibit.figure is not None:
            if not _is_same(exhibit, before):
                with style():
                    exhibit.figure.draw_without_rendering()
            plt.close(exhibit.figure)
    return exhibit


def _is_same(exhibit: Exhibit | str, before: Exhibit | str | None) -> bool:
    if isinstance(exhibit, Exhibit) and isinstance(before, Exhibit):
        return exhibit.table.equals(before.table)
    return exhibit == before


def show_damaged(
    runs: Path, whole: Mapping[str, Exhibit | str], *words: str
) -> dict[str, Exhibit | str]:
    """What damaged runs show. Wherever it is not what whole ones do, one of the words is said."""
    found = show(sorted(runs.iterdir()), whole)
    silent = {}
    for name, exhibit in found.items():
        text = exhibit if isinstance(exhibit, str) else exhibit.caption
        if not _is_same(exhibit, whole[name]) and not any(word in text for word in words):
            silent[name] = text
    assert not silent
    return found


def test_every_exhibit_of_trainings_is_made_from_whole_logs(whole) -> None:
    of_studies = {name for name, exhibit in whole.items() if isinstance(exhibit, str)}
    assert of_studies == {
        "bound_tightness",
        "tracker_drift",
        "trigger_study",
        "curriculum_samplers",
        "sensitivity",
    }
    assert all("make one with `python -m sim" in str(whole[name]) for name in of_studies)


# ---------------------------------------------------------------------------------- what is gone


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_run_without_a_part_is_left_out_by_name(copy, whole, part) -> None:
    lose(copy / "cvpo-1", part)
    show_damaged(copy, whole, "cvpo-1", "cvpo (seed 2)")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_no_run_has_is_named(copy, whole, part) -> None:
    for run in copy.iterdir():
        lose(run, part)
    found = show_damaged(copy, whole, part.split("/")[0], "evaluated", "is empty")
    made = sum(isinstance(exhibit, Exhibit) for exhibit in found.values())
    assert made >= len(EXHIBITS) - 5 - (8 if part == "evals" else 4)


@pytest.mark.slow
def test_metrics_without_a_number_are_a_gap(copy, whole) -> None:
    for run in copy.iterdir():
        silence(run)
    show_damaged(copy, whole, "NaN", "null", "timed", "cost")


def test_a_run_that_has_logged_nothing_yet_is_left_out(copy, whole) -> None:
    for part in PARTS:
        lose(copy / "cvpo-1", part)
    show_damaged(copy, whole, "cvpo-1", "cvpo (seed 2)")


def test_an_empty_folder_is_refused_by_name(copy, tmp_path) -> None:
    (tmp_path / "nothing").mkdir()
    found = show([*sorted(copy.iterdir()), tmp_path / "nothing"])
    assert all(str(tmp_path / "nothing") in str(error) for error in found.values())
    assert all("the folder is empty" in str(error) for error in found.values())


# ----------------------------------------------------------------------------------- what is torn


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS[1:])
@pytest.mark.parametrize("which", [0, -1], ids=["first", "newest"])
def test_a_truncated_file_is_named_by_all_that_read_it(copy, whole, part, which) -> None:
    file = files_of(copy / "cvpo-1", part)[which]
    truncate(file)
    found = show_damaged(copy, whole, f"{file} is not a whole Parquet file")
    if which == -1 or part in ("trajectories", "prompts", "evals", "calibration"):
        assert any(isinstance(error, str) and str(file) in error for error in found.values())


def test_a_torn_last_line_is_passed_over(copy, whole) -> None:
    tear(copy / "cvpo-1")
    found = show(sorted(copy.iterdir()))
    assert {name for name in EXHIBITS if isinstance(found[name], str)} == {
        name for name in EXHIBITS if isinstance(whole[name], str)
    }


@pytest.mark.slow
def test_a_line_torn_in_the_middle_is_named(copy) -> None:
    file = copy / "cvpo-1" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], lines[3][:40], *lines[4:]]) + "\n")
    found = show(sorted(copy.iterdir()))
    assert all(f"{file}, line 4" in str(error) for error in found.values())


@pytest.mark.slow
def test_a_log_that_is_being_written_counts_as_far_as_it_is(copy, whole) -> None:
    interrupt(copy / "cvpo-1")
    show_damaged(copy, whole, "cvpo-1")


# ----------------------------------------------------------------------------------- what differs


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS[1:])
def test_a_newer_schema_version_is_refused_by_name(copy, whole, part) -> None:
    file = files_of(copy / "cvpo-1", part)[0]
    renew(file)
    found = show_damaged(copy, whole, f"{file} has schema version 2")


def test_a_run_of_another_schema_version_is_refused_by_name(copy) -> None:
    file = copy / "cvpo-1" / "run.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"schema_version": 2}))
    found = show(sorted(copy.iterdir()))
    assert all(f"{file} has schema version 2" in str(error) for error in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "problems", [{"easy": 5}, {"easy": 2, "hard": 3, "other": 4}, {"other": 4}]
)
def test_other_benchmarks_in_one_run_are_told(copy, whole, problems) -> None:
    shutil.rmtree(copy / "vapo-2")
    shutil.rmtree(copy / "vapo-1")
    write_log(copy / "vapo-1", method="vapo", size=Size(problems=problems), scored_by="judge")
    words = (*problems, "No benchmark is common")
    show_damaged(copy, whole, *words)


@pytest.mark.slow
def test_one_seed_is_told(copy, whole) -> None:
    for run in ("vapo-2", "cvpo-2"):
        shutil.rmtree(copy / run)
    show_damaged(copy, whole, "one seed", "one run", "problems only", "seed 1")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["vapo-1", "cvpo-1", "grpo-1"])
def test_one_run_alone_is_no_surprise(copy, run) -> None:
    found = show([copy / run])
    assert isinstance(found["figure2_accuracy"], Exhibit)
    for error in found.values():
        assert isinstance(error, Exhibit) or error
