"""The studies' command line: what it refuses, what it never deletes, and the log that it leaves."""

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import pytest
import torch
from pydantic import Field

from cvpo import RunLog, read_run
from cvpo.runlog import read_table
from sim.__main__ import main
from sim.claims import CLAIMS
from sim.studies import STUDIES
from sim.study import (
    Desk,
    Row,
    Settings,
    SimError,
    Study,
    Verdict,
    format_rows,
    read_settings,
    run_study,
)

ROOT = Path(__file__).parents[2]
ONE_AT_A_TIME = ("jobs=1", "backend=sequential")


class TrialSettings(Settings):
    """Keys of a study that only the tests know."""

    factor: float = Field(default=3.0, gt=0)
    """What seeds are multiplied with."""
    names: tuple[str, ...] = ("a", "b")
    """Two of them."""


def times(seed: int, factor: float) -> float:
    time.sleep(0.05 if seed == 0 else 0)  # the first one finishes last
    return seed * factor


def run_trial(settings: TrialSettings, desk: Desk) -> list[Row]:
    found = desk.map(times, [(seed, settings.factor) for seed in settings.seeds], desc="times")
    desk.table(
        "products",
        [{"seed": s, "product": p} for s, p in zip(settings.seeds, found, strict=True)],
        {"product": "apples"},
    )
    verdict: Verdict = "holds" if sum(found) > 10 else "fails"
    return [
        Row("sum of products", f"factor {settings.factor:g}", sum(found), claim=3, verdict=verdict,
            n=len(found), unit="apples", paper="more than ten"),
        Row("largest product", "all", max(found), low=0.0, high=99.0),
    ]  # fmt: skip


TRIAL = Study("trial", "multiplies seeds", TrialSettings, run_trial)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "trial", TRIAL)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that ends with status 2."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.out == ""
    return captured.err.removeprefix("error: ").strip()


def run(folder: Path, *arguments: str) -> int:
    return main(["trial", f"output={folder}", *ONE_AT_A_TIME, *arguments])


# ---------------------------------------------------------------------------------------- bad input


def test_an_unknown_study_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refused(capsys, "trail") == "study 'trail' is unknown; did you mean 'trial'?"
    message = refused(capsys, "zzz")
    for name in (*STUDIES, "all"):
        assert name in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["factr=2"], "trial: 'factr' is unknown; did you mean 'factor'?"),
        (["zzz=2"], "trial: 'zzz' is unknown; known: seeds, output"),
        (["factor"], "'factor': settings are written key=value"),
        (["=3"], "'=3': settings are written key=value"),
        (["factor=2", "factor=3"], "factor: given twice"),
        (["factor=0"], "trial: factor: Input should be greater than 0 (got 0)"),
        (["factor=many"], "trial: factor: Input should be a valid number"),
        (["factor=[1"], "factor: '[1' is not a YAML value"),
        (["seeds=[1,1]"], "trial: seeds: holds something twice"),
        (["seeds=[-1]"], "trial: seeds.0: Input should be greater than or equal to 0"),
        (["seeds=[2147483648]"], "trial: seeds.0: Input should be less than 2147483648"),
        (["seeds=[true]"], "trial: seeds.0: Input should be a valid integer"),
        (["seeds=[]"], "trial: seeds: Tuple should have at least 1 item"),
        (["seeds=3"], "trial: seeds: Input should be a valid tuple"),
        (["seeds=[a]"], "trial: seeds.0: Input should be a valid integer"),
        (["jobs=0"], "trial: jobs: jobs must be -1 (every core) or at least 1 (got 0)"),
        (["jobs=-2"], "trial: jobs: jobs must be -1"),
        (["backend=threads"], "trial: backend: Input should be 'loky'"),
        (["overwrite=perhaps"], "trial: overwrite: Input should be a valid boolean"),
    ],
)
def test_a_bad_setting_is_refused_by_its_key(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "trial", *arguments)
    assert not list(tmp_path.iterdir())


def test_every_bad_setting_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "trial", "jobs=0", "factor=-1")
    assert "jobs: " in message
    assert "factor: " in message


def test_a_bad_entry_of_a_list_is_one_complaint(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "trial", "seeds=[-1]")
    assert "at least 1 item" not in message
    assert message.count("seeds") == 1


@pytest.mark.parametrize("key", ["factor=1", "sed=[1]", "seeds"])
def test_all_takes_only_keys_that_every_study_has(
    capsys: pytest.CaptureFixture[str], key: str
) -> None:
    message = refused(capsys, "all", key)
    assert ("keys of every study" in message) == (key != "seeds")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_a_missing_backend_is_refused_before_anything_is_deleted(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    before = (tmp_path / "trial" / "run.yaml").read_bytes()
    assert main(["trial", f"output={tmp_path}", "backend=ray", "overwrite=true"]) == 2
    assert (tmp_path / "trial" / "run.yaml").read_bytes() == before


def test_the_process_ends_with_status_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "sim", "nope"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------- what lies there already


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def other_study(folder: Path) -> None:
    RunLog.create(folder, config={}, seed=0, method="sim-bound", verifier="exact", study="bound")


def a_training_run(folder: Path) -> None:
    RunLog.create(folder, config={"study": "trial"}, seed=0, method="cvpo", verifier="exact")


def notes(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("of my study: trial")


def text_for_a_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.yaml").write_text("study: trial\n")


def a_word_for_a_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.yaml").write_text("notes of a study")


def bytes_for_a_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.yaml").write_bytes(b"\xff\xfe\xfa\x00study")


def a_file(folder: Path) -> None:
    folder.write_text("study")


@pytest.mark.parametrize("overwrite", ["true", "false"])
@pytest.mark.parametrize(
    "make",
    [other_study, a_training_run, notes, text_for_a_run, a_word_for_a_run, bytes_for_a_run, a_file],
)
def test_what_is_no_log_of_the_study_is_never_deleted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: object, overwrite: str
) -> None:
    assert callable(make)
    make(tmp_path / "trial")
    before = everything(tmp_path)
    message = refused(
        capsys, "trial", f"output={tmp_path}", f"overwrite={overwrite}", *ONE_AT_A_TIME
    )
    assert str(tmp_path / "trial") in message
    assert everything(tmp_path) == before


def test_an_earlier_run_is_kept_unless_it_may_be_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(tmp_path) == 0
    (tmp_path / "trial" / "runs").mkdir()
    before = everything(tmp_path)
    message = refused(capsys, "trial", f"output={tmp_path}", "factor=5", *ONE_AT_A_TIME)
    assert "overwrite=true" in message
    assert everything(tmp_path) == before
    assert run(tmp_path, "factor=5", "overwrite=true") == 0
    assert read_run(tmp_path / "trial")["config"]["factor"] == 5
    assert not (tmp_path / "trial" / "runs").exists()


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "trial").mkdir()
    assert run(tmp_path) == 0


def test_all_looks_at_every_folder_before_the_first_study_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in STUDIES if name != "trial"]:
        monkeypatch.delitem(STUDIES, name)
    monkeypatch.setitem(STUDIES, "last", Study("last", "too", TrialSettings, run_trial))
    notes(tmp_path / "last")
    assert "last" in refused(capsys, "all", f"output={tmp_path}", *ONE_AT_A_TIME)
    assert not (tmp_path / "trial").exists()


# ---------------------------------------------------------------------------------- what is written


def test_rows_become_the_table_study_with_the_text_of_their_claims(tmp_path: Path) -> None:
    assert run(tmp_path, "seeds=[0, 2, 4]") == 0
    rows = read_table(tmp_path / "trial", "study")
    assert rows["quantity"].tolist() == ["sum of products", "largest product"]
    assert rows["value"].tolist() == [18, 12]
    assert rows["claim_text"].tolist() == [CLAIMS[3], ""]
    assert rows["verdict"].tolist() == ["holds", ""]
    assert rows["low"].isna().tolist() == [True, False]
    assert rows["claim"].tolist()[0] == 3
    assert rows["claim"].isna().tolist() == [False, True]
    said = read_run(tmp_path / "trial")
    assert said["study"] == "trial"
    assert said["method"] == "sim-trial"
    assert said["config"]["seeds"] == [0, 2, 4]
    assert said["config"]["factor"] == 3


def test_the_order_of_seeds_says_nothing(tmp_path: Path) -> None:
    for folder, seeds in (("a", "[4, 0, 2]"), ("b", "[0, 2, 4]")):
        assert main(["trial", f"seeds={seeds}", f"output={tmp_path / folder}"]) == 0
    tables = [read_table(tmp_path / folder / "trial", "products") for folder in "ab"]
    pd.testing.assert_frame_equal(*tables)


def test_tables_keep_order_and_units(tmp_path: Path) -> None:
    assert run(tmp_path, "seeds=[0, 2, 4]") == 0
    table = read_table(tmp_path / "trial", "products")
    assert table["seed"].tolist() == [0, 2, 4]
    assert table["product"].tolist() == [0, 6, 12]
    file = tmp_path / "trial" / "tables" / "products.parquet"
    metadata = pyarrow.parquet.read_schema(file).field("product").metadata
    assert b"apples" in metadata.values()


def test_the_terminal_shows_rows_and_where_the_log_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(tmp_path) == 0
    out = capsys.readouterr().out
    assert "sum of products" in out
    assert "more than ten" in out
    assert "[0, 99]" in out
    assert str(tmp_path / "trial") in out


def test_all_ends_with_every_claim_and_what_was_said_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in STUDIES if name != "trial"]:
        monkeypatch.delitem(STUDIES, name)
    monkeypatch.setitem(STUDIES, "second", Study("second", "too", TrialSettings, run_trial))
    assert main(["all", f"output={tmp_path}", "seeds=[1, 2]", *ONE_AT_A_TIME]) == 0
    said = capsys.readouterr().out.partition("What the simulator says of the paper's claims")[2]
    for number, text in CLAIMS.items():
        assert f"{number:>3}. {text}" in said
    assert said.count("fails     sum of products (factor 3): 9") == 2
    assert said.count("not decided here") == len(CLAIMS) - 1


def test_numbers_that_do_not_exist_are_shown_as_such() -> None:
    text = format_rows([Row("a", "b", math.nan), Row("c", "d", 1234.5678)])
    assert "interval" not in text
    assert "1235" in text
    assert re.search(r"^-  ", text, re.MULTILINE)


# ----------------------------------------------------------------------------------- the desk's map


def desk(folder: Path, **keys: object) -> Desk:
    return Desk("trial", Settings.model_validate({"output": folder, **keys}))


TWO_PROCESSES = pytest.param({"jobs": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("keys", [{"jobs": 1}, {"backend": "sequential"}, TWO_PROCESSES])
def test_map_keeps_the_order_of_its_arguments(tmp_path: Path, keys: dict[str, object]) -> None:
    found = desk(tmp_path, **keys).map(times, [(s, 2.0) for s in range(12)], desc="times")
    assert found == [2.0 * s for s in range(12)]


def threads(_: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


@pytest.mark.slow
def test_processes_have_one_thread_each(tmp_path: Path) -> None:
    found = desk(tmp_path, jobs=2).map(threads, [(i,) for i in range(6)], desc="threads")
    assert {count for _, count in found} == {1}
    assert os.getpid() not in {process for process, _ in found}


def test_the_sequential_backend_stays_in_this_process(tmp_path: Path) -> None:
    sequential = desk(tmp_path, backend="sequential")
    assert sequential.map(threads, [(0,), (1,)], desc="threads") == [(os.getpid(), 1)] * 2


def test_map_of_nothing_is_nothing(tmp_path: Path) -> None:
    assert desk(tmp_path, backend="sequential").map(times, [], desc="nothing") == []


def break_at(number: int) -> int:
    if number == 2:
        raise SimError("two: will not do")
    return number


@pytest.mark.parametrize("keys", [{"backend": "sequential"}, TWO_PROCESSES])
def test_an_error_in_another_process_reaches_the_study(
    tmp_path: Path, keys: dict[str, object]
) -> None:
    with pytest.raises(SimError, match="two: will not do"):
        desk(tmp_path, **keys).map(break_at, [(n,) for n in range(4)], desc="breaking")


@pytest.mark.slow
def test_a_dask_cluster_runs_the_same_study(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.Client(
        n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=str(tmp_path)
    ):
        found = desk(tmp_path, backend="dask").map(
            math.pow, [(float(base), 2.0) for base in range(6)], desc="on a cluster"
        )
    assert found == [base**2 for base in range(6)]


# ----------------------------------------------------------------------------------- a killed study

KILLED = """
import time
from sim.study import Row, Settings, Study, run_study

def run(settings, desk):
    desk.table("early", [{"number": 7}])
    time.sleep(600)

run_study(Study("trial", "sleeps", Settings, run), Settings(output=OUTPUT))
"""


@pytest.mark.slow
def test_a_killed_study_leaves_a_log_that_can_be_read_and_replaced(tmp_path: Path) -> None:
    script = KILLED.replace("OUTPUT", repr(str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        deadline = time.monotonic() + 120
        partial = tmp_path / "trial.partial"
        while not (partial / "tables" / "early.parquet").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert read_run(partial)["study"] == "trial"
    assert read_table(partial, "early")["number"].tolist() == [7]
    assert run(tmp_path) == 2
    assert read_table(partial, "early")["number"].tolist() == [7]
    assert run(tmp_path, "overwrite=true") == 0
    assert not partial.exists()
    assert not (tmp_path / "trial" / "tables" / "early.parquet").exists()


@pytest.mark.parametrize("error", [SimError("the file is not there"), KeyboardInterrupt()])
def test_a_study_that_ends_early_leaves_the_earlier_log_and_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    assert run(tmp_path) == 0
    before = read_table(tmp_path / "trial", "study")

    def fails(_: Settings, desk: Desk) -> list[Row]:
        desk.table("early", [{"number": 7}])
        raise error

    monkeypatch.setitem(STUDIES, "trial", Study("trial", "fails", TrialSettings, fails))
    assert run(tmp_path, "overwrite=true") in (2, 130)
    pd.testing.assert_frame_equal(read_table(tmp_path / "trial", "study"), before)
    assert [folder.name for folder in tmp_path.iterdir()] == ["trial"]
    # And where there was none, none is left: the same command can be given again.
    other = tmp_path / "other"
    assert main(["trial", f"output={other}"]) in (2, 130)
    assert not list(other.iterdir())


def test_a_link_in_the_place_of_a_log_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "real") == 0
    (tmp_path / "trial").symlink_to(tmp_path / "real" / "trial")
    assert "holds something that is no log of this study" in refused(
        capsys, "trial", f"output={tmp_path}", "overwrite=true"
    )
    assert read_table(tmp_path / "real" / "trial", "study") is not None


def test_an_interrupted_study_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> list[Row]:
        raise KeyboardInterrupt

    monkeypatch.setitem(STUDIES, "trial", Study("trial", "stops", TrialSettings, interrupted))
    assert run(tmp_path) == 130
    assert capsys.readouterr().err == "interrupted\n"


# --------------------------------------------------------------------------------- the real studies


REAL = tuple(STUDIES.values())


def test_studies_are_known_by_their_own_names() -> None:
    assert [study.name for study in REAL] == [name for name in STUDIES if name != "trial"]
    assert len({study.about for study in REAL}) == len(REAL)
    assert "all" not in {study.name for study in REAL}


@pytest.mark.parametrize("study", REAL, ids=lambda study: study.name)
def test_every_study_says_what_it_is_and_what_each_key_means(study: Study) -> None:
    assert study.about
    assert "\n" not in study.about
    assert issubclass(study.settings, Settings)
    for key, entry in study.settings.model_fields.items():
        assert not entry.is_required(), f"{study.name}: {key} has no default"
        assert entry.description, f"{study.name}: {key} has no docstring"
    assert read_settings(study, []) == study.settings()


@pytest.mark.parametrize("study", REAL, ids=lambda study: study.name)
def test_keys_lists_defaults_that_can_be_given_back(
    capsys: pytest.CaptureFixture[str], study: Study
) -> None:
    assert main([study.name, "keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{study.name}: {study.about}"
    given = [line.strip() for line in lines if line.startswith("  ") and line[2] != " "]
    assert [line.partition("=")[0] for line in given] == list(study.settings.model_fields)
    assert read_settings(study, given) == study.settings()
    for line in lines[1:]:
        assert len(line) <= 100 or "=" in line


def test_keys_of_all_lists_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "keys"]) == 0
    out = capsys.readouterr().out
    for study in STUDIES.values():
        assert f"{study.name}: {study.about}" in out
    assert "What seeds are multiplied with." in out


def test_scientific_notation_without_a_dot_is_a_number() -> None:
    settings = read_settings(TRIAL, ["factor=3e-4"])
    assert isinstance(settings, TrialSettings)
    assert settings.factor == 3e-4


def test_settings_cannot_be_changed_once_read(tmp_path: Path) -> None:
    settings = read_settings(TRIAL, [f"output={tmp_path}"])
    with pytest.raises(ValueError, match="frozen"):
        settings.jobs = 3
    assert run_study(TRIAL, settings.model_copy(update={"backend": "sequential"}))[1].value == 12
