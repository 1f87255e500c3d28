"""Every exhibit on logs that lack something or are damaged: the rest is shown and the gap is told.

An exhibit that cannot be made says which file or run it is and what to do. No other error passes.
"""

import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
import yaml

from analysis import AnalysisError
from analysis.exhibit import Exhibit, style
from analysis.sources import Source, open_source, open_sources
from analysis.thin import thin
from cvpo import RunLog, difficulty_weight, read_table
from cvpo.runlog import RunLogError
from paper_figures import EXHIBITS
from tests.logs import (
    Effect,
    Size,
    empty,
    files_of,
    interrupt,
    lose,
    renew,
    silence,
    tear,
    truncate,
    write_log,
)
from tests.study_logs import SMALL_STUDIES, run_small

pytestmark = pytest.mark.slow

PARTS = ("metrics", "trajectories", "prompts", "evals", "tokens", "calibration", "scores/judge")
OF_STUDIES = {
    "bound": ("bound_tightness", "study", "worlds"),
    "tracker": ("tracker_drift", "study", "tracker_seeds"),
    "trigger": ("trigger_study", "study", "switches"),
    "sensitivity": ("sensitivity", "one_at_a_time", "sobol"),
    "weights": ("arms", "arms", "trees"),
    "curriculum": ("curriculum_samplers", "study"),
}
"""Study -> its exhibit, and the tables that this reads."""
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
    paths: Sequence[Path],
    before: Mapping[str, Exhibit | str] | None = None,
    *,
    only: str | None = None,
) -> dict[str, Exhibit | str]:
    """Every exhibit (or one), or the error that it ended in; those that changed are drawn too."""
    names = list(EXHIBITS) if only is None else [only]
    try:
        sources = open_sources(paths)
    except AnalysisError as error:
        return dict.fromkeys(names, str(error))
    return {name: _exhibit(name, sources, (before or {}).get(name)) for name in names}


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
    assert not silent, list(silent)
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


@pytest.mark.parametrize("part", PARTS)
def test_a_run_without_a_part_is_left_out_by_name(copy, whole, part) -> None:
    lose(copy / "cvpo-1", part)
    show_damaged(copy, whole, "cvpo-1", "cvpo (seed 2)", "its cost is not logged")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_no_run_has_is_named(copy, whole, part) -> None:
    for run in copy.iterdir():
        lose(run, part)
    found = show_damaged(copy, whole, part.split("/")[0], "evaluated", "is empty")
    lost = {
        name for name in EXHIBITS if isinstance(found[name], str) != isinstance(whole[name], str)
    }
    assert len(lost) <= (6 if part == "evals" else 3)


def test_metrics_without_a_number_are_a_gap(copy, whole) -> None:
    for run in copy.iterdir():
        silence(run)
    show_damaged(copy, whole, "NaN", "null", "timed", "cost")


def test_a_run_that_has_logged_nothing_yet_is_left_out(copy, whole) -> None:
    for part in PARTS:
        lose(copy / "cvpo-1", part)
    show_damaged(copy, whole, "cvpo-1", "cvpo (seed 2)", "its cost is not logged")


def test_an_empty_folder_is_refused_by_name(copy, tmp_path) -> None:
    (tmp_path / "nothing").mkdir()
    found = show([*sorted(copy.iterdir()), tmp_path / "nothing"])
    assert all(str(tmp_path / "nothing") in str(error) for error in found.values())
    assert all("the folder is empty" in str(error) for error in found.values())


# ----------------------------------------------------------------------------------- what is torn


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


def test_a_line_torn_in_the_middle_is_named(copy) -> None:
    file = copy / "cvpo-1" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], lines[3][:40], *lines[4:]]) + "\n")
    found = show(sorted(copy.iterdir()))
    assert all(f"{file}, line 4" in str(error) for error in found.values())


def test_a_log_that_is_being_written_counts_as_far_as_it_is(copy, whole) -> None:
    interrupt(copy / "cvpo-1")
    show_damaged(copy, whole, "cvpo-1")


# ------------------------------------------------------------------------------ what is thinned


def test_thinned_logs_give_the_same_but_for_what_rests_on_trajectories(
    copy, whole, tmp_path
) -> None:
    for source in open_sources(sorted(copy.iterdir())):
        thin(source, tmp_path / "thin", every=3)
    found = show(sorted((tmp_path / "thin").iterdir()), whole)
    differ = {name for name in EXHIBITS if not _is_same(found[name], whole[name])}
    assert differ - {"table_claims"} == {"figure3_spread", "weight_flow"}
    for name in ("figure3_spread", "weight_flow"):
        assert "every 3rd step from 3 to 12" in found[name].caption


def test_a_run_that_is_thinned_beside_whole_ones_is_told_from_them(copy, whole, tmp_path) -> None:
    thinned = thin(open_source(copy / "cvpo-1"), tmp_path / "thin", every=3)
    shutil.rmtree(copy / "cvpo-1")
    thinned.rename(copy / "cvpo-1")
    found = show(sorted(copy.iterdir()), whole)
    for name in ("figure3_spread", "weight_flow"):
        assert "every 3rd step from 3 to 12 (cvpo-1)" in found[name].caption
        assert not _is_same(found[name], whole[name])


def test_steps_without_metrics_are_no_zeros(copy, whole) -> None:
    for run in copy.iterdir():
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join([*lines[:3], *lines[7:]]))
    found = show(sorted(copy.iterdir()), whole)
    for label in ("vapo", "cvpo"):
        before, after = (
            shown["overhead"].table.set_index(["label", "part"]) for shown in (whole, found)
        )
        assert after.loc[(label, "both"), "percent"] == pytest.approx(
            before.loc[(label, "both"), "percent"]
        )
        frame = found["circularity"].table
        line = frame[(frame["label"] == label) & (frame["metric"] == "sigma/corr_surprise")]
        assert line.loc[line["what"] == "window", "correlation"].tolist() == pytest.approx(
            [0.3] * (line["what"] == "window").sum()
        )
    for name in ("table1", "figure2_accuracy", "figure5_bins", "weight_flow", "pass_at_k"):
        assert _is_same(found[name], whole[name]), name


# ----------------------------------------------------------------------------------- what differs


@pytest.mark.parametrize("part", PARTS[1:])
def test_a_newer_schema_version_is_refused_by_name(copy, whole, part) -> None:
    file = files_of(copy / "cvpo-1", part)[0]
    renew(file)
    show_damaged(copy, whole, f"{file} has schema version 2")


def test_a_run_of_another_schema_version_is_refused_by_name(copy) -> None:
    file = copy / "cvpo-1" / "run.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"schema_version": 2}))
    found = show(sorted(copy.iterdir()))
    assert all(f"{file} has schema version 2" in str(error) for error in found.values())


@pytest.mark.parametrize(
    "problems", [{"easy": 5}, {"easy": 2, "hard": 3, "other": 4}, {"other": 4}]
)
def test_other_benchmarks_in_one_run_are_told(copy, whole, problems) -> None:
    for seed in (1, 2):
        run = copy / f"vapo-{seed}"
        shutil.rmtree(run)
        size = Size(problems=problems)
        write_log(run, method="vapo", seed=seed, size=size, scored_by="judge")
    show_damaged(copy, whole, *problems, "No benchmark is common")


def test_one_seed_is_told(copy, whole) -> None:
    for run in ("vapo-2", "cvpo-2"):
        shutil.rmtree(copy / run)
    show_damaged(copy, whole, "one seed", "one run", "problems only", "seed 1")


@pytest.mark.parametrize("run", ["vapo-1", "cvpo-1", "grpo-1"])
def test_one_run_alone_is_no_surprise(copy, run) -> None:
    found = show([copy / run])
    assert isinstance(found["figure2_accuracy"], Exhibit)
    for error in found.values():
        assert isinstance(error, Exhibit) or error


# --------------------------------------------------------------------------------------- studies


@pytest.fixture(scope="module", params=SMALL_STUDIES)
def study(request, tmp_path_factory) -> Path:
    """The log of a study, made small."""
    return run_small(request.param, tmp_path_factory.mktemp("studies"))


def test_a_study_s_missing_torn_or_empty_table_is_named(study, tmp_path) -> None:
    whole = show([study])
    assert isinstance(whole[OF_STUDIES[study.name][0]], Exhibit)
    for table in files_of(study, "tables"):
        for damage in (Path.unlink, truncate, empty):
            copy = Path(shutil.copytree(study, tmp_path / damage.__name__ / study.name))
            file = copy / "tables" / table.name
            damage(file)
            for name, exhibit in show([copy]).items():
                if _is_same(exhibit, whole[name]):
                    continue
                text = exhibit if isinstance(exhibit, str) else exhibit.caption
                assert f"tables/{table.stem}" in text or str(copy) in text, (name, text)
            shutil.rmtree(copy)


@pytest.mark.parametrize("every", [1, 2], ids=["all", "half"])
def test_what_a_study_lacks_is_a_gap_or_named(study, tmp_path, every) -> None:
    """A column that is null throughout has no type; one that is null here and there has."""
    name, *tables = OF_STUDIES[study.name]
    whole = show([study], only=name)
    copy = Path(shutil.copytree(study, tmp_path / study.name))
    for table in tables:
        file = study / "tables" / f"{table}.parquet"
        frame = read_table(study, table)
        for column in frame.columns:
            if study.name == "trigger" and column in MEANS_NEVER:
                continue
            kept = [entry if row % every else None for row, entry in enumerate(frame[column])]
            (copy / "tables" / file.name).unlink()
            RunLog.open(copy).table(table, frame.assign(**{column: kept}))
            found = show([copy], whole, only=name)[name]
            if isinstance(found, Exhibit):
                _check_gaps(found.table, whole[name].table)
            else:
                assert f"tables/{table}" in found, (column, found)
        shutil.copyfile(file, copy / "tables" / file.name)


MEANS_NEVER = ("value", "stop", "round", "step")
"""Columns of the study `trigger` in which no number is a finding."""


def _check_gaps(found: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Every number is the whole one, or missing."""
    assert found.shape == whole.shape
    for column in whole.columns:
        same = (found[column] == whole[column]) | found[column].isna()
        assert same.all(), column


def test_two_logs_of_a_study_are_refused_by_path(study, tmp_path) -> None:
    copy = Path(shutil.copytree(study, tmp_path / "again"))
    told = [error for error in show([study, copy]).values() if isinstance(error, str)]
    assert any(f"{study} {copy}" in error for error in told)


# ------------------------------------------------------------------------------------ peers' logs


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real logs in shared/data/runs")
def test_logs_of_other_trainers_give_an_exhibit_or_one_error() -> None:
    for path in sorted(REAL.iterdir()):
        for exhibit in show([path]).values():
            assert isinstance(exhibit, Exhibit) or exhibit


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real logs in shared/data/runs")
def test_logs_of_other_trainers_beside_ours_change_no_number(trainings, whole) -> None:
    theirs = [path for path in sorted(REAL.iterdir()) if _opens(path)]
    assert theirs
    found = show([*sorted(trainings.iterdir()), *theirs], whole)
    for name, exhibit in whole.items():
        assert _is_same(found[name], exhibit), name


def _opens(path: Path) -> bool:
    try:
        open_sources([path])
    except AnalysisError:
        return False
    return True


# ------------------------------------------------------------------------------------ known truth

WIDE = Size(
    prompts=64,
    batch=32,
    samples=8,
    round_steps=2,
    problems={"easy": 60, "hard": 60},
    answers=16,
)
TRUTH = {
    "vapo": Effect(rise=0.05, bias=0.6),
    "cvpo": Effect(rise=0.30, shift=0.2, drift=-0.4, overhead=0.004, bias=0.6),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> dict[str, Exhibit]:
    """What the exhibits say of trainings whose effects are `TRUTH`."""
    folder = tmp_path_factory.mktemp("known")
    paths = [
        write_log(
            folder / f"{method}-{seed}",
            method=method,
            seed=seed,
            steps=24,
            size=WIDE,
            effect=effect,
            switch=12,
        )
        for method, effect in TRUTH.items()
        for seed in (1, 2, 3)
    ]
    return {name: made for name, made in show(paths).items() if isinstance(made, Exhibit)}


def test_the_exhibits_find_what_is_true_of_the_logs(known) -> None:
    frame = known["figure2_accuracy"].table
    end = frame[(frame["step"] == 24) & (frame["benchmark"] == "mean")].set_index("label")
    assert end.loc["cvpo", "accuracy"] - end.loc["vapo", "accuracy"] == pytest.approx(
        0.25, abs=0.05
    )

    frame = known["figure3_spread"].table.set_index("label")
    assert frame.loc["cvpo", "ratio"] == pytest.approx(math.exp(2 * 0.2), rel=0.05)

    frame = known["overhead"].table.set_index(["label", "part"])
    assert frame.loc[("cvpo", "both"), "percent"] == pytest.approx(0.8)
    assert frame.loc[("vapo", "both"), "percent"] == pytest.approx(0.4)

    frame = known["circularity"].table
    change = frame[(frame["what"] == "change") & (frame["metric"] == "sigma/corr_entropy")]
    change = change.set_index("label")["correlation"]
    assert change["cvpo"] == pytest.approx(-0.4 * (22.5 - 2.5) / 24)
    assert change["vapo"] == pytest.approx(0)

    frame = known["critic_calibration"].table
    error = frame[(frame["what"] == "error") & frame["position_bin"].isna()]["error"]
    assert error.tolist() == pytest.approx([0.6] * 4, abs=0.1)

    frame = known["figure5_bins"].table
    never = frame[(frame["bin"] == "0") & (frame["label"] == "cvpo")]
    assert never["share"].tolist() == pytest.approx([0.25] * 12, abs=0.02)

    frame = known["figure1_words"].table
    assert frame["token_id"].tolist() == sorted(frame["token_id"])


def test_the_weights_of_each_phase_are_the_method_s(known) -> None:
    frame = known["weight_flow"].table
    frame = frame[(frame["label"] == "cvpo") & (frame["outcome"] == "both")]
    for phase in ("early", "bottleneck"):
        for band, (low, high) in {"0-.1": (0, 0.1), ".8-1": (0.8, 1)}.items():
            rho = torch.linspace(low, high, 1001)
            expected = float(difficulty_weight(rho, phase=phase).mean())
            mine = frame[(frame["phase"] == phase) & (frame["band"] == band)]
            assert mine["w_d"].item() == pytest.approx(expected, abs=0.03)
