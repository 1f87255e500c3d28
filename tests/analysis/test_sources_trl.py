"""TRL's completions, in the layout it writes, and TensorBoard's event files."""

import struct

import pandas as pd
import pytest

from analysis import AnalysisError
from analysis.sources import open_source

# ------------------------------------------------------------------------------------------- TRL


def completions(folder, step, **columns):
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "step": [step] * 4,
        "prompt": ["p", "p", "q", "q"],
        "completion": ["a", "b", "c", "d"],
        **columns,
        "advantage": [1.0, -1.0, 0.5, -0.5],
    }
    pd.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


def test_completions_are_trajectories(tmp_path):
    for step in (5, 10):
        completions(tmp_path / "out" / "completions", step, accuracy_reward=[1.0, 0, 0, 1])
    source = open_source(tmp_path / "out")
    assert (source.kind, source.name) == ("trl", "out")
    assert source.parts == ("problems", "trajectories")
    frame = next(source.scan("trajectories", steps=[10]))
    assert frame["step"].tolist() == [10] * 4
    assert frame["prompt_id"].tolist() == [0, 0, 1, 1]
    assert frame["sample"].tolist() == [0, 1, 0, 1]
    assert frame["advantage_mean"].tolist() == [1.0, -1.0, 0.5, -0.5]
    for name in ("reward", "correct", "accuracy_reward"):
        assert frame[name].tolist() == [1, 0, 0, 1]
    assert source.read("problems").to_dict("list") == {"prompt_id": [0, 1], "prompt": ["p", "q"]}


def test_completions_are_read_in_order_of_steps(tmp_path):
    for step in (99999, 100000, 7):
        completions(tmp_path, step, score=[1.0, 2, 3, 4])
    steps = open_source(tmp_path).read("trajectories", ["step"])["step"]
    assert steps.drop_duplicates().tolist() == [7, 99999, 100000]


def test_no_total_is_invented_for_several_reward_functions(tmp_path):
    completions(tmp_path, 1, fmt=[0.5, 0.5, 0, 0], brevity=[1.0, 2, 3, 4])
    source = open_source(tmp_path)
    assert "weights of the scores fmt, brevity" in source.missing["trajectories.reward"]
    assert "trajectories.correct" in source.missing
    assert source.read("trajectories", ["brevity"])["brevity"].tolist() == [1, 2, 3, 4]
    with pytest.raises(AnalysisError, match="trajectories has no 'reward': the weights"):
        source.scan("trajectories", ["reward"])


def test_a_column_named_reward_is_the_reward(tmp_path):
    completions(tmp_path, 1, fmt=[0.5, 0.5, 0, 0], reward=[1.0, 2, 3, 4])
    assert open_source(tmp_path).read("trajectories", ["reward"])["reward"].tolist() == [1, 2, 3, 4]


def test_conversations_are_told_apart_as_text(tmp_path):
    messages = [[{"role": "user", "content": c}] for c in "ppqq"]
    completions(tmp_path, 1, prompt=messages, score=[1.0, 2, 3, 4])
    frame = open_source(tmp_path).read("trajectories", ["prompt_id"])
    assert frame["prompt_id"].tolist() == [0, 0, 1, 1]


def test_a_column_that_only_calls_itself_correct_is_refused(tmp_path):
    completions(tmp_path, 1, accuracy=[0.0, 7.0, 1, 1])
    source = open_source(tmp_path)
    assert source.read("trajectories", ["reward"])["reward"].tolist() == [0, 7, 1, 1]
    with pytest.raises(AnalysisError, match=r"row 2: 'accuracy' is 7.0"):
        source.read("trajectories", ["correct"])


def test_cut_off_completions_are_named(tmp_path):
    for step in (1, 2):
        completions(tmp_path, step, score=[1.0, 2, 3, 4])
    file = tmp_path / "completions_00001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    source = open_source(tmp_path)
    with pytest.raises(AnalysisError, match=r"completions_00001.parquet is not a whole Parquet"):
        source.read("trajectories")
    with pytest.raises(AnalysisError, match=r"completions_00001.parquet is not a whole Parquet"):
        open_source(file)


def test_a_column_that_came_later_is_told_by_file(tmp_path):
    completions(tmp_path, 1, score=[1.0, 2, 3, 4])
    completions(tmp_path, 2, score=[1.0, 2, 3, 4], tag=["x"] * 4)
    with pytest.raises(AnalysisError, match=r"completions_00001.parquet has no column 'tag'"):
        open_source(tmp_path).read("trajectories")


def test_another_file_of_that_name_is_refused(tmp_path):
    pd.DataFrame({"step": [1]}).to_parquet(tmp_path / "completions_00001.parquet")
    with pytest.raises(AnalysisError, match="has no column completion, prompt"):
        open_source(tmp_path)


# ----------------------------------------------------------------------------------- TensorBoard


@pytest.fixture
def writer():
    return pytest.importorskip("torch.utils.tensorboard").SummaryWriter


def log(writer, folder, steps, offset=0.0, **options):
    with writer(str(folder), **options) as board:
        for step in steps:
            board.add_scalar("train/reward", step + offset, step)
            board.add_scalar("own/thing", 2.0, step)


def test_event_files_are_metrics_in_our_terms(tmp_path, writer):
    log(writer, tmp_path / "board", range(3))
    source = open_source(tmp_path / "board")
    assert (source.kind, source.name, source.parts) == ("tensorboard", "board", ("metrics",))
    assert source.metrics().to_dict("list") == {
        "step": [0, 1, 2],
        "reward/mean": [0, 1, 2],
        "own/thing": [2, 2, 2],
    }
    assert source.notes == ()


def test_scalars_stored_as_tensors_are_scalars(tmp_path, writer):
    with writer(str(tmp_path)) as board:
        for step in (1, 2):
            board.add_scalar("x", step / 2, step, new_style=True)
        board.add_text("note", "no scalar", 1)
    assert open_source(tmp_path).metrics().to_dict("list") == {"step": [1, 2], "x": [0.5, 1.0]}


def test_a_resumed_board_counts_its_later_file(tmp_path, writer):
    log(writer, tmp_path, range(6), filename_suffix=".1")
    log(writer, tmp_path, range(3, 5), offset=0.5, filename_suffix=".2")
    source = open_source(tmp_path)
    assert source.metrics()["reward/mean"].tolist() == [0, 1, 2, 3.5, 4.5]
    assert any("more than once" in note for note in source.notes)
    assert any("left out" in note and "5" in note for note in source.notes)


def event_file(folder):
    (file,) = folder.glob("*tfevents*")
    return file


def test_a_torn_record_is_dropped_and_told(tmp_path, writer):
    log(writer, tmp_path, range(3))
    file = event_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    source = open_source(file)
    assert source.metrics()["reward/mean"].tolist() == [0, 1, 2]
    assert source.metrics()["own/thing"].isna().tolist() == [False, False, True]
    assert "the last record is torn" in source.notes[0]


def test_a_damaged_record_is_named(tmp_path, writer):
    log(writer, tmp_path, range(3))
    file = event_file(tmp_path)
    content = bytearray(file.read_bytes())
    first = 12 + struct.unpack("<Q", content[:8])[0] + 4
    content[first + 14] ^= 0xFF  # in the data of the second record
    file.write_bytes(content)
    with pytest.raises(AnalysisError, match=r"record 2 of \d+ is damaged"):
        open_source(tmp_path)


def test_a_board_without_scalars_is_told(tmp_path, writer):
    writer(str(tmp_path)).close()
    with pytest.raises(AnalysisError, match="has no scalar yet"):
        open_source(tmp_path)


def test_boards_below_a_folder_are_named(tmp_path, writer):
    log(writer, tmp_path / "a", range(2))
    with pytest.raises(AnalysisError, match=rf"give those: {tmp_path}/a$"):
        open_source(tmp_path)
