import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from cvpo import (
    RunLog,
    read_calibration,
    read_evals,
    read_events,
    read_metrics,
    read_problems,
    read_prompts,
    read_run,
    read_tokens,
    read_trajectories,
)
from train.checkpoint import checkpoints
from train.config import Config, ConfigError
from train.loop import train

MakeConfig = Callable[..., Config]

ROOT = Path(__file__).parents[2]
STEPS = 6
LONG = [
    f"steps={STEPS}",
    "evaluation.every=2",
    "rollout.prompts=6",  # rounds of 16 prompts do not end where checkpoints do
    "curriculum.low_delta=9",
    "curriculum.high_delta=9",
]
# Wall-clock times are exempt, and nothing else is.
CLOCKS = ("time", "device_seconds", "pretraining/device_seconds")


def metrics_of(run: Path) -> pd.DataFrame:
    frame = read_metrics(run)
    clocks = [name for name in frame if name in CLOCKS or name.startswith("seconds/")]
    return frame.drop(columns=clocks).sort_index(axis=1)


def assert_same_run(found: Path, expected: Path) -> None:
    assert_frame_equal(metrics_of(found), metrics_of(expected), check_exact=True)
    for read in (read_trajectories, read_evals, read_prompts, read_tokens, read_problems):
        rows = read(expected)
        assert len(rows)
        assert_frame_equal(read(found), rows, check_exact=True)
    events = [read_events(run) for run in (found, expected)]
    without = [frame[frame["kind"] != "resume"].reset_index(drop=True) for frame in events]
    assert_frame_equal(without[0], without[1])
    assert (found / "calibration").exists() == (expected / "calibration").exists()
    if (expected / "calibration").exists():
        assert_frame_equal(read_calibration(found), read_calibration(expected), check_exact=True)
    last = [checkpoints(run / "checkpoints") for run in (found, expected)]
    assert [step for step, _ in last[0]] == [step for step, _ in last[1]]
    (_, a), (_, b) = last[0][-1], last[1][-1]
    weights = sorted(file.relative_to(b) for file in b.rglob("*.safetensors"))
    assert Path("actor/model.safetensors") in weights
    for file in weights:
        assert (a / file).read_bytes() == (b / file).read_bytes(), file


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=cvpo"],
        ["method=grpo-async"],
        ["method=dapo", "rollout.sampler=uniform"],
        ["method=grpo-async", "rollout.sampler=mopps"],
        ["method=cvpo", "rollout.sampler=pcl"],
        ["method=grpo", "rollout.sampler=vcrl"],
        ["method=ppo", "rollout.lag=1", "algorithm.kl_coefficient=0.1"],
        ["method=cvpo", "curriculum.detector=pooled", "curriculum.window=2"],
    ],
    ids=lambda overrides: "-".join(o.partition("=")[2] for o in overrides),
)
def test_a_run_in_two_parts_is_the_run_in_one(
    tiny_config: MakeConfig, tmp_path: Path, overrides: list[str]
) -> None:
    whole = tiny_config(*LONG, *overrides, f"run_dir={tmp_path / 'whole'}")
    train(whole)
    for steps in (2, 4, STEPS):  # `steps` may be raised
        train(tiny_config(*LONG, *overrides, f"run_dir={tmp_path / 'parts'}", f"steps={steps}"))
    resumed = read_events(tmp_path / "parts").query("kind == 'resume'")
    assert resumed["step"].tolist() == [2, 4]
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_finished_run_has_nothing_left_to_do(tiny_config: MakeConfig) -> None:
    config = tiny_config("method=grpo", "steps=2")
    train(config)
    before = metrics_of(config.folder)
    assert train(config).step == 2
    assert_frame_equal(metrics_of(config.folder), before)


def test_rows_after_the_checkpoint_are_taken_back(tiny_config: MakeConfig, tmp_path: Path) -> None:
    overrides = ["method=cvpo", "evaluation.every=1", "checkpoints.keep=9"]
    whole = tiny_config(*overrides, "steps=4", f"run_dir={tmp_path / 'whole'}")
    train(whole)
    again = tiny_config(*overrides, "steps=4", f"run_dir={tmp_path / 'again'}")
    train(again)
    # As after a kill between the last step and its checkpoint.
    _, last = checkpoints(again.folder / "checkpoints")[-1]
    last.rename(tmp_path / "gone")
    assert train(again).step == 4
    assert_same_run(tmp_path / "again", tmp_path / "whole")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.lr=2e-3", "actor.lr was 0.001, now 0.002"),
        ("seed=2", "seed was 1, now 2"),
        ("rollout.lag=1", "rollout.lag was None, now 1"),
        ("algorithm.clip_high=0.3", "algorithm.clip_high was None, now 0.3"),
        ("data.train.limit=12", "data.train.limit was 16, now 12"),
        ("curriculum.early=[1, 2, 3, 4]", "curriculum.early was [1.6, -0.2, 2.0, 1.2], now"),
        ("method=vapo", "method was cvpo, now vapo"),
        ("verifier=normalized", "verifier was exact, now normalized"),
    ],
)
def test_a_changed_key_is_refused_by_name(
    tiny_config: MakeConfig, override: str, said: str
) -> None:
    config = tiny_config("steps=1")
    train(config)
    before = metrics_of(config.folder)
    with pytest.raises(ConfigError) as caught:
        train(tiny_config("steps=2", override))
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"run_dir {config.folder}: holds a run of another")
    assert_frame_equal(metrics_of(config.folder), before)


def test_what_does_not_change_the_training_may_be_changed(tiny_config: MakeConfig) -> None:
    train(tiny_config("method=grpo", "steps=1"))
    config = tiny_config(
        "method=grpo",
        "steps=2",
        "evaluation.samples=1",
        "checkpoints.keep=1",
        "checkpoints.every=1",
        "log.text_share=0",
        "engine.micro_batch_tokens=100",
        "warmstart.steps=3",
    )
    assert train(config).step == 2
    assert len(read_evals(config.folder).query("step == 2")) == 5


def test_a_folder_with_another_program_s_run_is_not_touched(tiny_config: MakeConfig) -> None:
    config = tiny_config("method=grpo")
    log = RunLog.create(
        config.folder, config={"world": "chain"}, seed=0, method="grpo", verifier="exact"
    )
    log.metrics(1, time=0.0, device_seconds=0.0, tokens=0, scalars={"reward/mean": 1.0})
    with pytest.raises(ConfigError, match="holds a run of another configuration"):
        train(config)
    assert read_metrics(config.folder)["reward/mean"].tolist() == [1.0]
    assert read_run(config.folder)["config"] == {"world": "chain"}


def steps_logged(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cvpo", "grpo-async"])
def test_a_run_that_is_killed_again_and_again_is_the_run_in_one(
    tiny_arguments: list[str], tiny_config: MakeConfig, tmp_path: Path, method: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(tiny_config(*LONG, f"method={method}", f"run_dir={whole}"))
    command = [sys.executable, "-m", "train", "run", *tiny_arguments, *LONG, f"method={method}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, f"run_dir={killed}"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    moments, kills = random.Random(method), 0
    # From before the first checkpoint to the last step: each time somewhere in the step or two
    # after so many lines of the log.
    for lines in (0, 1, 3, 5):
        process = start()
        give_up = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < give_up:
            if (killed / "run.yaml").exists() and steps_logged(killed) >= lines:
                break
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.3))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, stderr = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGKILL), stderr.decode()
    process = start()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr.decode()
    assert kills >= 2
    assert_same_run(killed, whole)


@pytest.mark.slow
def test_a_second_process_is_kept_out_of_the_folder(
    tiny_arguments: list[str], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "train", "run", *tiny_arguments, "method=grpo", "steps=10000"]
    first = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    config = tiny_config("method=grpo", "steps=10000")
    try:
        give_up = time.monotonic() + 60
        while steps_logged(config.folder) < 5 and time.monotonic() < give_up:
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="another process is writing there"):
            train(config)
        logged = steps_logged(config.folder)
        assert first.poll() is None
        while steps_logged(config.folder) < logged + 5 and time.monotonic() < give_up:
            time.sleep(0.01)
    finally:
        first.kill()  # which frees the folder
        first.wait()
    # The first has lost no step by it: 0 (before the first update), 1, 2, ...
    steps = read_metrics(config.folder)["step"].tolist()
    assert steps == list(range(len(steps)))
    done, _ = checkpoints(config.folder / "checkpoints")[-1]
    assert train(tiny_config("method=grpo", f"steps={done + 1}")).step == done + 1


def test_the_folder_is_claimed_before_anything_in_it_is_read(tiny_config: MakeConfig) -> None:
    # The run that goes on there may be deleting the very checkpoint that is found here.
    config = tiny_config("method=grpo", "steps=1")
    train(config)
    code = "import sys, time; from pathlib import Path; from train.folder import claimed\n"
    code += "claim = claimed(Path(sys.argv[1])); print('claimed', flush=True); time.sleep(600)"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(config.folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        _, last = checkpoints(config.folder / "checkpoints")[-1]
        for file in (last / "state.pt", last / "actor" / "model.safetensors"):
            file.unlink()
            with pytest.raises(ConfigError, match="another process is writing there"):
                train(tiny_config("method=grpo", "steps=2"))
    finally:
        other.kill()
        other.wait()


def test_a_file_in_the_place_of_the_folder_is_named(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    for place in ("taken", "taken/run"):
        with pytest.raises(ConfigError, match=r"taken.*: a file stands in its place"):
            train(tiny_config(f"run_dir={tmp_path / place}"))


def test_a_refused_run_keeps_every_row(tiny_config: MakeConfig, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    lines = [f'{{"problem": "{a}+{b}=", "answer": {a + b}}}\n' for a in range(4) for b in (1, 2)]
    problems.write_text("".join(lines))
    overrides = ["method=grpo", f"data.train.source={problems}", "data.train.levels=null"]
    config = tiny_config(*overrides, "data.train.limit=null", "steps=4")
    train(config)
    # As after a kill two steps behind the checkpoint; then the problems change.
    _, last = checkpoints(config.folder / "checkpoints")[-1]
    last.rename(tmp_path / "gone")
    before = metrics_of(config.folder)
    problems.write_text("".join(reversed(lines)))
    with pytest.raises(ConfigError, match=r"data\.train: .*holds another problem table"):
        train(config)
    assert_frame_equal(metrics_of(config.folder), before)
    assert len(read_trajectories(config.folder)) == 4 * 16
    problems.write_text("".join(lines))
    assert train(config).step == 4
    assert_frame_equal(metrics_of(config.folder), before)


@pytest.mark.parametrize("lost", ["checkpoints", "metrics.jsonl"])
def test_a_run_that_has_lost_a_part_is_not_begun_again(
    tiny_config: MakeConfig, tmp_path: Path, lost: str
) -> None:
    config = tiny_config("method=grpo", "steps=4")
    train(config)
    (config.folder / lost).rename(tmp_path / "lost")
    kept = sorted(path for path in config.folder.rglob("*") if path.is_file())
    with pytest.raises(ConfigError, match="move the folder away"):
        train(tiny_config("method=grpo", "steps=5"))
    assert set(kept) <= set(config.folder.rglob("*"))
    (tmp_path / "lost").replace(config.folder / lost)
    assert train(tiny_config("method=grpo", "steps=5")).step == 5
    assert read_metrics(config.folder)["step"].tolist() == list(range(6))


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(
    tiny_config: MakeConfig,
) -> None:
    config = tiny_config("method=vapo", "steps=1")
    train(config)
    shutil.rmtree(config.folder / "checkpoints")
    log = RunLog.open(config.folder)
    log.rewind(0)
    assert train(config).fresh
    assert read_metrics(config.folder)["step"].tolist() == [0, 1]
