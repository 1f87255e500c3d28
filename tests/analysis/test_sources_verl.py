"""verl's logs: real samples, made-up ones of known content, and damage."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import AnalysisError
from analysis.sources import open_source

REAL = Path(__file__).parents[3] / "shared" / "data" / "runs"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="needs the real logs in shared/data/runs")


def write(path, *lines, end="\n"):
    path.write_bytes("\n".join(lines).encode() + end.encode())
    return path


def dump(path, rows):
    path.parent.mkdir(exist_ok=True)
    return write(path, *(json.dumps(row) for row in rows))


def row(step, prompt, score=1.0, **more):
    return {"input": prompt, "output": "y", "gts": "7", "score": score, "step": step, **more}


# ---------------------------------------------------------------------------------- real samples


@needs_real
def test_the_real_console_and_the_real_json_lines_tell_the_same():
    console = open_source(REAL / "verl_ppo_gsm8k_console.log")
    lines = open_source(REAL / "verl_ppo_gsm8k_metrics.jsonl")
    assert (console.kind, lines.kind) == ("verl-console", "verl-jsonl")
    pd.testing.assert_frame_equal(console.metrics(), lines.metrics())
    frame = console.metrics(["reward/mean", "length/mean", "policy/entropy", "critic/loss"])
    assert frame["step"].tolist() == list(range(61))
    assert frame.iloc[0].tolist() == [0, 0.012, 235.977, 0.461, 10.488]
    assert console.notes == lines.notes == ()


@needs_real
def test_real_colours_and_ray_prefixes_are_seen_through():
    frame = open_source(REAL / "verl_console_ansi_ray_prefix.log").metrics()
    assert frame["step"].tolist() == [1, 2]
    assert frame["reward/mean"].tolist() == [0.6530305743217468, 0.6419896483421326]
    assert frame["reward_extra_info/false_move"].tolist() == [0.40625, 0.4427083333333333]
    assert frame["policy/loss"].tolist() == [6.183079727109635e-10, 3.859289182716122e-10]


@needs_real
def test_real_numpy_numbers_are_numbers():
    source = open_source(REAL / "verl_console_npfloat_sample.log")
    frame = source.metrics()
    assert frame["step"].tolist() == [71]
    assert frame["critic/loss"].tolist() == [0.007003280876688223]
    # against lambda-returns, so it is not our critic/explained_variance
    assert frame["critic/vf_explained_var"].tolist() == [0.27253496646881104]
    assert "another definition" in source.missing["metrics.critic/explained_variance"]


@needs_real
def test_the_real_groups_are_numbered_and_counted_as_a_plain_loop_does():
    source = open_source(REAL / "qwen_math_groups_as_verl_dump.jsonl")
    frame = source.read("trajectories")
    text = (REAL / "qwen_math_groups_as_verl_dump.jsonl").read_text(encoding="utf-8")
    raw = [json.loads(line) for line in text.splitlines()]
    ids, counts = {}, {}
    for index, entry in enumerate(raw):
        prompt = ids.setdefault(entry["input"], len(ids))
        sample = counts.get(prompt, 0)
        counts[prompt] = sample + 1
        found = frame.iloc[index]
        assert (found["prompt_id"], found["sample"]) == (prompt, sample)
        assert (found["reward"], found["correct"]) == (entry["score"], entry["acc"])
        assert (found["response"], found["orm"]) == (entry["output"], entry["orm"])
    assert set(counts.values()) == {8}
    problems = source.read("problems")
    assert dict(zip(problems["prompt"], problems["prompt_id"], strict=True)) == ids
    assert problems["gold"].tolist()[0] == raw[0]["gts"]


@needs_real
def test_the_real_rollout_row_keeps_what_its_reward_function_added():
    source = open_source(REAL / "verl_rollout_dump_sample.jsonl")
    frame = source.read("trajectories", ["step", "reward", "correct", "incorrect_format", "answer"])
    assert frame.iloc[0, :4].tolist() == [1, 1.0, 1.0, 0]
    assert frame["answer"][0].startswith("Actions: ['parseExpression']")
    assert "number of tokens" in source.missing["trajectories.length"]
    with pytest.raises(AnalysisError, match="trajectories has no 'length'"):
        source.scan("trajectories", ["length"])


# --------------------------------------------------------------------------------------- console


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_whatever_number_is_printed_is_read_back(tmp_path_factory, numbers):
    file = tmp_path_factory.mktemp("log") / "a.log"
    write(
        file,
        *(f"(W pid=1) step:{i} - a:{x!r} - b/c:np.float64({x!r})" for i, x in enumerate(numbers)),
    )
    frame = open_source(file).metrics()
    assert frame["a"].tolist() == numbers
    assert frame["b/c"].tolist() == numbers


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("1e-05", 1e-5),
        ("np.float32(0.5)", 0.5),
        ("np.int64(-3)", -3),
        ("True", 1),
        ("inf", np.inf),
        ("nan", np.nan),
        (".5", 0.5),
        ("0.5 [repeated 2x across cluster]", 0.5),
    ],
)
def test_other_forms_of_numbers(tmp_path, printed, number):
    frame = open_source(write(tmp_path / "a.log", f"step:3 - x:1 - val-core/a:b/mean@4:{printed}"))
    np.testing.assert_equal(frame.metrics()["val-core/a:b/mean@4"].tolist(), [number])


def test_the_rest_of_a_console_is_passed_over(tmp_path):
    file = write(
        tmp_path / "a.log",
        "(main pid=1) {'trainer': {'steps': 3}}",
        "Total training steps: 3",
        "Training Progress: 33%|###  | 1/3 [00:01<00:02]\rstep:1 - x:1.0",
        "step:2 - x:2.0\rTraining Progress: 66%|######| 2/3 [00:02<00:01]",
        "local_global_step_folder: /x/global_step_1",
        "saved at step:2 - ok",
        "\x1b[36m(W pid=2, ip=10.0.0.1)\x1b[0m step:3 - x:3.0",
    )
    source = open_source(file)
    assert source.metrics().to_dict("list") == {"step": [1, 2, 3], "x": [1, 2, 3]}
    assert (source.total_steps, source.finished) == (3, True)


def test_a_line_mixed_up_with_another_is_named(tmp_path):
    file = write(tmp_path / "a.log", "step:1 - x:1.0", "step:2 - x:1.0 - y:0.(W pid=1) hello")
    with pytest.raises(AnalysisError, match=r"a.log, line 2: 'y:0.\(W pid=1\) hello' of step 2"):
        open_source(file)


def test_the_last_number_of_a_torn_line_is_not_trusted(tmp_path):
    file = write(tmp_path / "a.log", "step:1 - x:1.5 - y:2.25", "step:2 - x:1.5 - y:2.", end="")
    source = open_source(file)
    frame = source.metrics()
    assert frame["x"].tolist() == [1.5, 1.5]
    assert np.isnan(frame["y"].tolist()[1])
    assert "torn" in source.notes[0]


def test_a_resumed_console_counts_the_later_lines(tmp_path):
    steps = [*range(1, 7), 4, 5]
    file = write(tmp_path / "a.log", *(f"step:{s} - x:{i}.0" for i, s in enumerate(steps)))
    source = open_source(file)
    assert source.metrics()["x"].tolist() == [0, 1, 2, 6, 7]
    assert len(source.notes) == 2


# ------------------------------------------------------------------------------------ JSON lines


def test_the_file_loggers_nested_rows_are_read(tmp_path):
    rows = [{"step": s, "data": {"actor/entropy": s / 2, "note": "x", "ok": True}} for s in (1, 2)]
    source = open_source(write(tmp_path / "m.jsonl", *map(json.dumps, rows)))
    assert source.metrics().to_dict("list") == {
        "step": [1, 2],
        "policy/entropy": [0.5, 1.0],
        "ok": [1, 1],
    }


def test_the_first_of_two_scalars_of_one_meaning_counts(tmp_path):
    scalars = {"actor/entropy_loss": 2.0, "actor/entropy": 1.0}
    file = write(tmp_path / "m.jsonl", json.dumps({"step": 1, "data": scalars}))
    frame = open_source(file).metrics()
    assert frame["policy/entropy"].tolist() == [1.0]
    assert frame["actor/entropy_loss"].tolist() == [2.0]


def test_a_torn_last_line_is_dropped_and_told(tmp_path):
    file = write(tmp_path / "m.jsonl", '{"step": 1, "x": 1.0}', '{"step": 2, "x"', end="")
    source = open_source(file)
    assert source.metrics()["step"].tolist() == [1]
    assert "torn" in source.notes[0]


@pytest.mark.parametrize("damage", ['{"step": 2, "x', '{"step": 2, "x{"step": 3, "x": 1.0}', "[1]"])
def test_damage_in_the_middle_names_file_and_line(tmp_path, damage):
    file = write(tmp_path / "m.jsonl", '{"step": 1, "x": 1.0}', damage, '{"step": 3, "x": 1.0}')
    with pytest.raises(AnalysisError, match=r"m.jsonl, line 2 .*remove the line"):
        open_source(file)


@pytest.mark.parametrize("step", [None, "2", -1, 1.5, True])
def test_a_row_without_a_step_names_file_and_line(tmp_path, step):
    rows = [{"step": 1, "x": 1.0}, {"step": step, "x": 1.0}]
    with pytest.raises(AnalysisError, match=r"m.jsonl, line 2: 'step' is"):
        open_source(write(tmp_path / "m.jsonl", *map(json.dumps, rows)))


# ----------------------------------------------------------------------------------------- dumps


def test_a_folder_of_dumps_is_read_in_order_of_steps(tmp_path):
    dump(tmp_path / "d" / "10.jsonl", [row(10, "b"), row(10, "c", acc=False), row(10, "b")])
    dump(tmp_path / "d" / "9.jsonl", [row(9, "a"), row(9, "b", -1)])
    source = open_source(tmp_path / "d")
    frame = source.read("trajectories", ["step", "prompt_id", "sample", "reward"])
    assert frame.to_numpy().tolist() == [
        [9, 0, 0, 1],
        [9, 1, 0, -1],
        [10, 1, 0, 1],
        [10, 2, 0, 1],
        [10, 1, 1, 1],
    ]
    assert source.read("problems", ["prompt"])["prompt"].tolist() == ["a", "b", "c"]
    assert source.contents["trajectories"].rows() == 5


def test_one_file_may_hold_several_steps(tmp_path):
    file = dump(tmp_path / "all.jsonl", [row(1, "a"), row(1, "a"), row(2, "a"), row(2, "b")])
    frame = open_source(file).read("trajectories", ["step", "prompt_id", "sample"])
    assert frame.to_numpy().tolist() == [[1, 0, 0], [1, 0, 1], [2, 0, 0], [2, 1, 0]]


def test_prompts_keep_their_numbers_whatever_steps_are_read(tmp_path):
    dump(tmp_path / "d" / "1.jsonl", [row(1, "a"), row(1, "b")])
    dump(tmp_path / "d" / "2.jsonl", [row(2, "c"), row(2, "a")])
    frames = list(open_source(tmp_path / "d").scan("trajectories", ["prompt_id"], steps=[2]))
    assert [frame["prompt_id"].tolist() for frame in frames] == [[2, 0]]


def test_correctness_is_only_what_says_so(tmp_path):
    source = open_source(dump(tmp_path / "d" / "1.jsonl", [row(1, "a", 1.0)]))
    assert "a score need not be correctness" in source.missing["trajectories.correct"]
    source = open_source(
        dump(tmp_path / "d" / "2.jsonl", [row(2, "a", acc=1), row(2, "a", acc=-1)])
    )
    with pytest.raises(AnalysisError, match=r"2.jsonl, row 2: 'acc' is -1.0"):
        source.read("trajectories")


def test_a_column_of_our_name_and_another_meaning_is_renamed(tmp_path):
    file = dump(tmp_path / "d" / "1.jsonl", [row(1, "a", length=12, sigma="x", deep={"k": [1]})])
    source = open_source(file)
    assert "trajectories.length" in source.missing
    frame = source.read("trajectories", ["verl_length", "verl_sigma", "deep"])
    assert frame.iloc[0].tolist() == [12, "x", '{"k": [1]}']


@pytest.mark.parametrize(
    "entry", [{"score": None}, {"score": float("nan")}, {"step": "1"}, {"input": 3}]
)
def test_a_row_that_cannot_be_used_names_file_and_line(tmp_path, entry):
    file = dump(tmp_path / "d" / "1.jsonl", [row(1, "a"), row(1, "a") | entry])
    with pytest.raises(AnalysisError, match=rf"1.jsonl, line 2: '{next(iter(entry))}' is"):
        open_source(file).read("trajectories")


def test_a_dump_that_is_being_written_loses_its_torn_line_only(tmp_path):
    file = dump(tmp_path / "d" / "1.jsonl", [row(1, "a"), row(1, "b")])
    file.write_bytes(file.read_bytes()[:-9])
    source = open_source(tmp_path / "d")
    assert len(source.read("trajectories")) == 1
    assert "1.jsonl: the last line is torn" in source.notes[0]
