"""Boards show what the log holds, go on where a run was interrupted, and never end a training."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cvpo import RunLog, read_events
from train.config import ConfigError
from train.watch import TensorBoard, WandB, boards_of

RESOLVED = {"method": "cvpo", "seed": 1, "model": {"path": "tiny"}}


def start(folder: Path) -> RunLog:
    return RunLog.create(folder, config=RESOLVED, seed=1, method="cvpo", verifier="exact")


def grown(log: RunLog, upto: int) -> RunLog:
    """The log with rows to a step, opened anew."""
    for step in range(-1 if log.last_step is None else log.last_step, upto):
        log.metrics(step + 1, time=0.0, device_seconds=0.0, tokens=0, scalars={})
    return RunLog.open(log.path)


def warnings(log: RunLog) -> list[tuple[int, str]]:
    if not (log.path / "events.jsonl").exists():
        return []
    events = read_events(log.path)
    events = events[events["kind"] == "warning"]
    return list(zip(events["step"].tolist(), events["message"].tolist(), strict=True))


# --- TensorBoard -----------------------------------------------------------------------------


def shown(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in board.Scalars(name)}


def test_tensorboard_shows_finite_scalars_at_once(tmp_path: Path) -> None:
    (board,) = boards_of(
        start(tmp_path / "run"), tensorboard=True, wandb="disabled", resolved=RESOLVED
    )
    board.scalars(0, {"reward/mean": 0.5, "critic/loss": float("nan")})
    board.scalars(1, {"reward/mean": float("inf"), "critic/loss": 2.0})
    assert shown(tmp_path / "run", "reward/mean") == {0: 0.5}
    assert shown(tmp_path / "run", "critic/loss") == {1: 2.0}
    board.close()


def test_tensorboard_of_a_resumed_run_hides_the_steps_that_are_done_again(tmp_path: Path) -> None:
    log = start(tmp_path / "run")
    first = TensorBoard(log)
    for step in range(5):
        first.scalars(step, {"reward/mean": float(step)})
    first.close()
    second = TensorBoard(grown(log, upto=2))
    second.scalars(3, {"reward/mean": 30.0})
    second.close()
    assert shown(log.path, "reward/mean") == {0: 0.0, 1: 1.0, 2: 2.0, 3: 30.0}


def test_boards_that_are_not_asked_for_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = start(tmp_path / "run")
    assert boards_of(log, tensorboard=False, wandb="disabled", resolved=RESOLVED) == []
    with pytest.raises(ConfigError, match=r"^log\.tensorboard: .*say false"):
        boards_of(log, tensorboard=True, wandb="disabled", resolved=RESOLVED)
    with pytest.raises(ConfigError, match=r"^log\.wandb: .*'cvpo\[wandb\]', or say disabled"):
        boards_of(log, tensorboard=False, wandb="offline", resolved=RESOLVED)


# --- Weights & Biases ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wandb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """W&B without the account of whoever runs the tests, and without a server."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        patch.setenv("WANDB_API_KEY", "no such key")
        patch.setenv("WANDB_SILENT", "true")
        yield pytest.importorskip("wandb", reason="needs W&B: pip install 'cvpo[wandb]'")


def records(file: Path) -> Iterator[bytes]:
    """What W&B writes offline: a LevelDB log of blocks behind a header of 7 bytes."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last piece of one
            yield whole
            whole = b""


def sessions(folder: Path) -> list[list[Any]]:
    """The records of each time that the run was opened offline, complete once it was closed."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):  # by time
        deadline = time.monotonic() + 30
        session: list[Any] = []
        # W&B's own process writes, and may still be at it.
        while "exit" not in map(kind_of, session) and time.monotonic() < deadline:
            session = [Record.FromString(record) for record in records(file)]
        found.append(session)
    return found


def kind_of(record: Any) -> str:
    return str(record.WhichOneof("record_type"))


def rows(session: list[Any]) -> list[dict[str, float]]:
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in found.history.item}
        for found in session
        if kind_of(found) == "history"
    ]


def run_of(session: list[Any]) -> Any:
    return next(found.run for found in session if kind_of(found) == "run")


@pytest.mark.usefixtures("wandb")
def test_wandb_offline_keeps_what_a_resumed_run_adds_in_one_run(tmp_path: Path) -> None:
    log = start(tmp_path / "cvpo-1")
    (first,) = boards_of(log, tensorboard=False, wandb="offline", resolved=RESOLVED)
    first.scalars(0, {"reward/mean": 0.25, "critic/loss": float("nan")})
    first.scalars(1, {"reward/mean": 0.5})
    first.scalars(2, {"reward/mean": 0.75})
    first.close()
    time.sleep(1.1)  # the names of W&B's folders are exact to the second
    (second,) = boards_of(grown(log, upto=1), tensorboard=False, wandb="offline", resolved=RESOLVED)
    second.scalars(2, {"reward/mean": 0.75})
    second.close()

    before, after = sessions(log.path)
    logged = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows(before)]
    assert logged == [
        {"step": 0, "reward/mean": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75},
    ]
    assert [(row["step"], row["reward/mean"]) for row in rows(after)] == [(2, 0.75)]
    run, again = run_of(before), run_of(after)
    assert run.run_id == again.run_id == (log.path / "wandb-id.txt").read_text().strip()
    assert (run.project, run.display_name, run.run_group) == ("cvpo", "cvpo-1", "cvpo")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in RESOLVED} == RESOLVED
    assert warnings(log) == []


@pytest.mark.usefixtures("wandb")
def test_other_folders_are_other_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        WandB(start(tmp_path / name), mode="offline", resolved=RESOLVED).close()
    ids = {(tmp_path / name / "wandb-id.txt").read_text() for name in ("a", "b")}
    assert len(ids) == 2


@pytest.mark.usefixtures("wandb")
def test_wandb_that_cannot_start_is_one_warning_and_no_error(tmp_path: Path) -> None:
    log = grown(start(tmp_path / "run"), upto=4)
    board = WandB(log, mode="online", resolved=RESOLVED)
    board.scalars(5, {"reward/mean": 0.5})
    board.close()
    ((step, message),) = warnings(log)
    assert step == 4
    assert message.startswith("W&B shows nothing from here on: ")


def wandb_service() -> list[int]:
    children = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [int(line.split()[0]) for line in children if "wandb-core" in line]


KILLED = """
import os, signal, sys
from pathlib import Path
from cvpo import RunLog
from tests.train.test_watch import RESOLVED, start, wandb_service
from train.watch import WandB
log = start(Path(sys.argv[1]))
board = WandB(log, mode="offline", resolved=RESOLVED)
board.scalars(0, {"reward/mean": 0.5})
(service,) = wandb_service()
os.kill(service, signal.SIGKILL)
for step in range(1, 200):
    board.scalars(step, {"reward/mean": 0.5})
board.close()
print("trained to the end")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("wandb")
def test_wandb_that_dies_on_the_way_is_one_warning_and_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        # Without a service of its own a child takes its parent's.
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "trained to the end\n", done.stderr
    assert done.returncode == 0
    ((_, message),) = warnings(RunLog.open(tmp_path / "run"))
    assert message.startswith("W&B shows nothing from here on: ")


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize("fails", [False, True])
def test_wandb_run_ends_as_failed_where_the_training_does(tmp_path: Path, fails: bool) -> None:
    log = start(tmp_path / "run")
    board = WandB(log, mode="offline", resolved=RESOLVED)
    try:
        if fails:
            raise RuntimeError("the training ends here")
    except RuntimeError:
        board.close()
    else:
        board.close()
    (session,) = sessions(log.path)
    (code,) = [record.exit.exit_code for record in session if kind_of(record) == "exit"]
    assert code == int(fails)
