import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cvpo import read_events, read_metrics
from train.__main__ import main
from train.checkpoint import checkpoints
from train.config import Config, ConfigError
from train.sweep import OUTPUT, plan, run_sweep

MakeConfig = Callable[..., Config]

ROOT = Path(__file__).parents[2]


def sweep_file(tmp_path: Path, **changes: object) -> Path:
    sweep = {
        "folder": str(tmp_path / "runs"),
        "seeds": [1, 2],
        "common": {"steps": 1},
        "runs": {"late": {"method": "grpo-async"}, "plain": {"method": "grpo", "steps": 2}},
        **changes,
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in sweep.items() if value != "-"}))
    return file


def without_folder(tiny_arguments: list[str]) -> list[str]:
    """Overrides for all runs; steps and folder are the sweep's own."""
    own = ("run_dir=", "steps=", "evaluation.benchmarks=")
    return [
        *(text for text in tiny_arguments if not text.startswith(own)),
        "evaluation.benchmarks=[]",
    ]


def test_a_sweep_is_every_entry_under_every_seed_in_whole_sets(tmp_path: Path) -> None:
    runs = plan(sweep_file(tmp_path), None, ["actor.lr=1e-3"])
    assert [run.name for run in runs] == ["late-1", "plain-1", "late-2", "plain-2"]
    assert [run.config.seed for run in runs] == [1, 1, 2, 2]
    assert [run.config.method for run in runs] == ["grpo-async", "grpo"] * 2
    assert [run.config.steps for run in runs] == [1, 2, 1, 2]
    assert {run.config.actor.lr for run in runs} == {1e-3}
    assert [run.config.folder for run in runs] == [tmp_path / "runs" / run.name for run in runs]


def test_the_kept_sweep_file_holds_what_the_exhibits_need() -> None:
    runs = plan(ROOT / "train" / "configs" / "exhibits.yaml", None, [])
    coefficients = {run.config.stochasticity.alpha_p for run in runs if run.config.method == "cvpo"}
    assert coefficients == {0.1, 0.3, 0.5}
    assert {run.config.method for run in runs} == {
        "cvpo", "cvpo-stochasticity", "cvpo-curriculum", "vapo", "grpo-async",
    }  # fmt: skip
    assert {run.config.stochasticity.arm for run in runs} == {
        "literal", "constant", "shuffled", "flipped",
    }  # fmt: skip
    per_name = {run.name.rpartition("-")[0] for run in runs}
    assert len(runs) == 3 * len(per_name)
    assert len({run.config.model.path for run in runs}) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs": {"odd": {"methd": "grpo"}}}, "run odd: .*'methd' is unknown; did you mean"),
        ({"runs": {"odd": {"method": "grpoo"}}}, "run odd: .*'grpoo' is unknown; did you mean"),
        ({"runs": {}}, "runs: "),
        ({"seeds": []}, "seeds: "),
        ({"seeds": "-"}, "seeds: Field required"),
        ({"colour": "red"}, "colour: "),
    ],
)
def test_a_bad_sweep_file_is_refused_by_key(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    file = sweep_file(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"(?s)sweep\.yaml: {said}"):
        plan(file, None, [])


def test_a_sweep_file_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--sweep", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_trains_everything_once(
    tiny_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    arguments = ["sweep", "--sweep", str(sweep_file(tmp_path)), *without_folder(tiny_arguments)]
    assert main(arguments) == 0
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["late-1", "late-2", "plain-1", "plain-2"]
    assert [read_metrics(folder)["step"].iloc[-1] for folder in folders] == [1, 1, 2, 2]
    written = {folder: (folder / OUTPUT).stat().st_mtime_ns for folder in folders}
    assert main(arguments) == 0  # nothing is left to do
    assert {folder: (folder / OUTPUT).stat().st_mtime_ns for folder in folders} == written


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(
    tiny_arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = sweep_file(tmp_path, seeds=[1])
    runs = plan(file, None, without_folder(tiny_arguments))
    (tmp_path / "runs").mkdir()
    (runs[0].config.folder).mkdir()
    (runs[0].config.folder / "metrics.jsonl").write_text("of something else\n")
    assert run_sweep(runs, base=None, at_once=2) == ["late-1"]
    assert "already holds a run" in (runs[0].config.folder / OUTPUT).read_text()
    assert runs[1].done


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(tiny_arguments: list[str], tmp_path: Path) -> None:
    file = sweep_file(tmp_path, seeds=[1], runs={"long": {"method": "grpo"}})
    shared = [*without_folder(tiny_arguments), "checkpoints.every=1"]
    command = [sys.executable, "-m", "train", "sweep", "--sweep", str(file), *shared]
    process = subprocess.Popen(
        [*command, "steps=10000"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    folder = tmp_path / "runs" / "long-1"
    give_up = time.monotonic() + 90
    while len(checkpoints(folder / "checkpoints")) < 2 and time.monotonic() < give_up:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    saved, _ = checkpoints(folder / "checkpoints")[-1]
    runs = plan(file, None, [*shared, f"steps={saved + 1}"])
    assert run_sweep(runs, base=None, at_once=1) == []
    assert runs[0].done
    assert "resume" in read_events(folder)["kind"].tolist()
