"""The command that makes exhibits, and what all of them have in common."""

from pathlib import Path

import matplotlib.image as mpl_image
import pytest

from cvpo import RunLog
from paper_figures import EXHIBITS
from paper_figures.__main__ import main

ROOT = Path(__file__).parents[2]


def make_run(path: Path, method: str, accuracy: dict[int, int]) -> str:
    log = RunLog.create(path, config={}, seed=1, method=method, verifier="exact")
    for step, right in accuracy.items():
        rows = {
            "benchmark": ["add-2"] * 8,
            "problem_id": [f"p{row // 2}" for row in range(8)],
            "sample": [row % 2 for row in range(8)],
            "exact": [float(row < right) for row in range(8)],
            "length": [9] * 8,
            "truncated": [False] * 8,
        }
        log.evals(step, rows)
        log.metrics(step, time=0, device_seconds=float(step), tokens=step, scalars={})
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        make_run(tmp_path / "vapo-1", "vapo", {0: 2, 10: 5, 20: 6}),
        make_run(tmp_path / "cvpo-1", "cvpo", {0: 2, 10: 4, 20: 7}),
    ]


def test_every_script_of_the_folder_is_an_exhibit() -> None:
    scripts = {file.stem for file in (ROOT / "paper_figures").glob("[a-z]*.py")}
    assert scripts - {"kept"} == set(EXHIBITS)


def test_a_named_exhibit_is_written_the_same_bytes_each_time(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("first", "again"):
        arguments = ["figure2_accuracy", "table1", "--runs", *runs]
        assert main([*arguments, "-o", str(tmp_path / folder)]) == 0
    printed = {Path(line).name for line in capsys.readouterr().out.split()}
    first = {file.name: file.read_bytes() for file in (tmp_path / "first").iterdir()}
    again = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert first == again
    assert set(first) == printed
    assert {f"figure2_accuracy.{kind}" for kind in ("png", "pdf", "csv", "caption.txt")} <= printed
    assert {f"table1.{kind}" for kind in ("md", "csv", "caption.txt")} <= printed
    assert mpl_image.imread(tmp_path / "first" / "figure2_accuracy.png").std() > 0


def test_without_a_name_all_are_made_and_the_rest_says_why(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--runs", *runs, "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    made = {Path(line).name.partition(".")[0] for line in said.out.split()}
    passed_over = {line.partition(":")[0] for line in said.err.splitlines()}
    assert {"table1", "figure2_accuracy", "table_designs"} <= made
    assert {"sensitivity", "weight_flow"} <= passed_over
    assert made | passed_over == set(EXHIBITS)
    assert not made & passed_over


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["figure9", "--runs", "{run}"], "no exhibit 'figure9'"),
        (["sensitivity", "--runs", "{run}"], "python -m sim sensitivity"),
        (["--runs", "{empty}"], "{empty}"),
        (["--runs", "{run}", "{run}"], "given twice"),
        (["figure2_accuracy", "--runs", "{run}", "-o", "{taken}"], "{taken}"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_an_exit_status(
    tmp_path: Path,
    runs: list[str],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").write_text("mine")
    places = {"run": runs[0], "empty": tmp_path / "empty", "taken": tmp_path / "taken"}
    given = [argument.format(**places) for argument in arguments]
    if "-o" not in given:
        given += ["-o", str(tmp_path / "out")]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said.format(**places) in error
    assert (tmp_path / "taken").read_text() == "mine"
