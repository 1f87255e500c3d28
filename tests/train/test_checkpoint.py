import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from train.checkpoint import CheckpointError, checkpoints, load_state, save_checkpoint
from train.config import Config
from train.loop import train
from train.run import Run

MakeConfig = Callable[..., Config]

STATE: dict[str, Any] = {
    "tensor": torch.tensor([0.1, -0.0, float("inf"), 1e-45]),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "nested": {"list": [1, None, "text", True], "float": 0.1 + 0.2},
}


def write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(b"w")


def save(folder: Path, step: int, *, keep: int = 2, state: dict[str, Any] = STATE) -> Path:
    return save_checkpoint(folder, step, state=state, write_models=write, keep=keep)


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = load_state(save(tmp_path, 3))
    assert state.keys() == STATE.keys()
    for name in ("tensor", "half"):
        assert state[name].dtype == STATE[name].dtype
        assert state[name].view(torch.uint8).equal(STATE[name].view(torch.uint8))
    assert state["nested"] == STATE["nested"]


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        save(tmp_path, step, keep=9)
    assert [step for step, _ in checkpoints(tmp_path)] == [3, 20, 100]
    assert checkpoints(tmp_path)[1][1] == tmp_path / "step-00000020"


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none") == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(5):
        save(tmp_path, step, keep=keep)
    assert [step for step, _ in checkpoints(tmp_path)] == list(range(5))[-keep:]
    assert len(list(tmp_path.iterdir())) == keep


def test_a_half_written_checkpoint_is_ignored_and_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = tmp_path / ".step-00000002.partial"
    left.mkdir()
    (left / "state.pt").write_bytes(b"torn")
    (left / "stray").write_bytes(b"from another time")
    assert [step for step, _ in checkpoints(tmp_path)] == [1]
    found = save(tmp_path, 2)
    assert not left.exists()
    assert sorted(path.name for path in found.iterdir()) == ["actor", "state.pt"]


def test_a_failure_while_writing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    before = save(tmp_path, 1, keep=1)

    def disk_full(folder: Path) -> None:
        (folder / "half").write_bytes(b"")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, state=STATE, write_models=disk_full, keep=1)
    assert checkpoints(tmp_path) == [(1, before)]
    assert load_state(before).keys() == STATE.keys()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1, state={"other": 1})
    assert load_state(tmp_path / "step-00000001") == {"other": 1}


def test_a_state_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = tmp_path / "step-00000001"
    folder.mkdir()
    torch.save({"state": Code()}, folder / "state.pt")
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(folder)
    assert not (tmp_path / "ran").exists()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def overwrite(file: Path) -> None:
    file.write_bytes(b"\x80\x02garbage" * 40)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [truncate, empty, overwrite, zero])
def test_a_damaged_state_says_what_to_delete(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = save(tmp_path, 7)
    damage(folder / "state.pt")
    with pytest.raises(CheckpointError) as caught:
        load_state(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'state.pt'}: damaged (")
    assert message.endswith("delete step-00000007 to go on from the checkpoint before it")
    assert "\n" not in message


def test_a_folder_without_state_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_state(tmp_path)


# ------------------------------------------------------------------------ a whole run's checkpoint


@pytest.fixture
def finished(tiny_config: MakeConfig, tmp_path: Path) -> Config:
    config = tiny_config("method=vapo", "steps=1", "run_dir=" + str(tmp_path / "whole"))
    train(config)
    return config


@pytest.mark.parametrize(
    "file",
    [
        "state.pt",
        "engine.pt",
        "actor/optimizer-00000.safetensors",
        "actor/model.safetensors",
        "critic/model.safetensors",
    ],
)
@pytest.mark.parametrize("damage", [truncate, empty, overwrite])
def test_a_damaged_file_of_a_run_s_checkpoint_is_named(
    finished: Config, file: str, damage: Callable[[Path], None]
) -> None:
    checkpoint = checkpoints(finished.folder / "checkpoints")[-1][1]
    damage(checkpoint / file)
    with pytest.raises(CheckpointError) as caught:
        Run(finished)
    assert str(checkpoint) in str(caught.value)
    assert f"delete {checkpoint.name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        "state.pt",
        "engine.pt",
        "critic/optimizer-00000.safetensors",
        "actor/model.safetensors",
        "actor/config.json",
        "critic/model.safetensors",
        "critic/value_head.safetensors",
    ],
)
def test_a_missing_file_of_a_run_s_checkpoint_is_named(finished: Config, file: str) -> None:
    checkpoint = checkpoints(finished.folder / "checkpoints")[-1][1]
    (checkpoint / file).unlink()
    with pytest.raises(CheckpointError) as caught:
        Run(finished)
    assert str(checkpoint) in str(caught.value)


def test_after_deleting_a_damaged_checkpoint_the_run_goes_on_from_the_one_before(
    finished: Config,
) -> None:
    folder = finished.folder / "checkpoints"
    (_, first), (_, last) = checkpoints(folder)
    weights = (last / "actor" / "model.safetensors").read_bytes()
    empty(last / "state.pt")
    shutil.rmtree(last)
    assert train(finished).step == 1
    assert first.exists()
    assert (last / "actor" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("fault", [RuntimeError("enforce fail"), SafetensorError("I/O error")])
def test_a_writer_s_own_error_is_told_as_a_failed_write(tmp_path: Path, fault: Exception) -> None:
    before = save(tmp_path, 1, keep=1)

    def disk_full(_: Path) -> None:
        raise fault

    with pytest.raises(OSError, match=r"step-00000002: cannot be written .*is the disk full\?"):
        save_checkpoint(tmp_path, 2, state=STATE, write_models=disk_full, keep=1)
    assert checkpoints(tmp_path) == [(1, before)]
