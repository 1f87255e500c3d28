"""Every figure is drawn from run logs alone, and says so when there is nothing to draw."""

import subprocess
import sys

import matplotlib.image as mpl_image
import pytest

from cvpo import RunLog
from paper_figures.__main__ import FIGURES


def make_run(path, method, accuracy):
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
    return path


def figures(*arguments):
    command = [sys.executable, "-m", "paper_figures", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_each_figure_is_drawn_and_again_the_same_bytes(tmp_path, name):
    runs = [
        make_run(tmp_path / "a", "vapo", {0: 2, 10: 5, 20: 6}),
        make_run(tmp_path / "b", "cvpo", {0: 2, 10: 4, 20: 7}),
    ]
    (tmp_path / "again").mkdir()
    first = FIGURES[name](runs, tmp_path)
    again = FIGURES[name](runs, tmp_path / "again")
    assert mpl_image.imread(first).std() > 0
    assert first.read_bytes() == again.read_bytes()


def test_the_command_writes_where_it_is_told(tmp_path):
    run = make_run(tmp_path / "a", "vapo", {0: 2, 10: 5})
    done = figures(run, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert sorted(file.stem for file in (tmp_path / "out").iterdir()) == sorted(FIGURES)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    done = figures(tmp_path, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_that_is_a_file_is_named(tmp_path):
    run = make_run(tmp_path / "a", "vapo", {0: 2, 10: 5})
    (tmp_path / "taken").write_text("mine")
    done = figures(run, "-o", tmp_path / "taken")
    assert done.returncode == 2
    assert str(tmp_path / "taken") in done.stderr
    assert "Traceback" not in done.stderr
