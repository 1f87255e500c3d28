"""Our run logs behind the seam, what is detected from the files, and what is refused."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import AnalysisError
from analysis.sources import PARTS, open_source, open_sources, ranges
from analysis.sources.scalars import SAME_MEANING, gather_steps
from cvpo.runlog import METRICS, RunLog

REAL = Path(__file__).parents[3] / "shared" / "data" / "runs"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="needs the real logs in shared/data/runs")


def trajectories(prompts=3, rollouts=2, **more):
    count = prompts * rollouts
    return {
        "prompt_id": np.repeat(np.arange(prompts), rollouts),
        "sample": np.tile(np.arange(rollouts), prompts),
        "length": np.arange(count) + 5,
        "truncated": [False] * count,
        "reward": np.linspace(-1, 1, count),
        "correct": np.arange(count) % 2.0,
        **more,
    }


def tracker(step, prompts=3, **more):
    return {
        "step": [step] * prompts,
        "prompt_id": np.arange(prompts),
        "visits": [1] * prompts,
        "trials": [4] * prompts,
        "successes": [2.0] * prompts,
        "alpha": [3.0] * prompts,
        "beta": [3.0] * prompts,
        "rho": [0.5] * prompts,
        "phase": ["early"] * prompts,
        **more,
    }


def make_log(path, steps=(1, 2, 3), total=3, method="cvpo", **more):
    log = RunLog.create(path, config={"steps": total}, seed=4, method=method, verifier="exact")
    log.problems({"prompt_id": np.arange(3), "dataset": ["d"] * 3, "gold": ["1", "2", "3"]})
    for step in steps:
        log.trajectories(step, trajectories(sigma=np.arange(6) / 10, **more))
        log.metrics(
            step, time=0, device_seconds=step, tokens=10 * step, scalars={"reward/mean": 0.1 * step}
        )
    log.prompts(0, tracker(steps[-1], true_rho=[0.1, 0.2, 0.3]))
    return log


def rewrite(file, change):
    table = change(pq.read_table(file))
    pq.write_table(table, file)


# --------------------------------------------------------------------------------- our run logs


def test_a_run_log_says_who_it_is_and_what_it_holds(tmp_path):
    make_log(tmp_path / "run")
    source = open_source(tmp_path / "run")
    assert (source.kind, source.name, source.method, source.seed) == ("cvpo", "run", "cvpo", 4)
    assert (source.verifier, source.config, source.total_steps) == ("exact", {"steps": 3}, 3)
    assert source.parts == ("metrics", "problems", "trajectories", "prompts")
    assert source.finished
    assert {"events", "evals", "tokens", "calibration", "scores", "tables"} <= source.missing.keys()
    assert source.notes == ()


def test_parts_come_file_by_file_and_by_column(tmp_path):
    make_log(tmp_path / "run", steps=(1, 2, 10))
    source = open_source(tmp_path / "run")
    frames = list(source.scan("trajectories", ["reward", "step"], steps=[2, 10, 99]))
    assert [list(frame.columns) for frame in frames] == [["reward", "step"]] * 2
    assert [set(frame["step"]) for frame in frames] == [{2}, {10}]
    assert len(source.read("trajectories")) == 18 == source.contents["trajectories"].rows()
    assert source.metrics(["reward/mean"])["reward/mean"].tolist() == pytest.approx([0.1, 0.2, 1.0])


def test_a_column_that_is_null_throughout_is_told_and_still_read(tmp_path):
    make_log(tmp_path / "run", answer=["7", None, None, None, None, None])
    source = open_source(tmp_path / "run")
    assert "trajectories.w_s" in source.missing
    assert not {"trajectories.sigma", "trajectories.answer"} & source.missing.keys()
    assert source.lacks("trajectories", "w_s")
    assert source.read("trajectories", ["w_s"])["w_s"].isna().all()


def test_what_is_not_there_is_refused_with_its_reason(tmp_path):
    make_log(tmp_path / "run")
    source = open_source(tmp_path / "run")
    with pytest.raises(AnalysisError, match=r"has no evals: there is no file in evals/"):
        source.read("evals")
    with pytest.raises(AnalysisError, match="trajectories has no 'response'"):
        source.scan("trajectories", ["response"])
    with pytest.raises(AnalysisError, match="metrics has no 'critic/loss'"):
        source.metrics(["critic/loss"])


def test_a_simulated_run_has_true_rates_a_free_method_name_and_no_text(tmp_path):
    log = RunLog.create(
        tmp_path / "literal-0",
        config={"budget": {"steps": 40}},
        seed=0,
        method="literal",
        verifier="exact",
    )
    log.prompts(0, tracker(5, true_rho=[0.1, 0.2, 0.3]))
    log.metrics(5, time=0, device_seconds=0, tokens=0, scalars={})
    source = open_source(tmp_path / "literal-0")
    assert (source.method, source.total_steps, source.finished) == ("literal", 40, False)
    assert source.read("prompts", ["true_rho"])["true_rho"].tolist() == [0.1, 0.2, 0.3]


def test_a_study_has_tables_only_and_is_finished_by_its_rows(tmp_path):
    log = RunLog.create(
        tmp_path / "s", config={}, seed=0, method="sim-s", verifier="exact", study="s"
    )
    log.table("curve", {"step": [1, 2], "x": [0.5, 0.6]}, {"x": "nats"})
    assert open_source(tmp_path / "s").finished is False
    log.table("study", {"value": [1.0]})
    source = open_source(tmp_path / "s")
    assert (source.parts, source.finished) == (("tables/curve", "tables/study"), True)
    assert "metrics.jsonl has no line" in source.missing["metrics"]
    assert source.read("tables/curve", ["x"])["x"].tolist() == [0.5, 0.6]
    assert next(source.scan("tables/curve", steps=[2]))["x"].tolist() == [0.6]


def test_a_killed_run_is_read_without_its_torn_line(tmp_path):
    make_log(tmp_path / "run", total=9)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "ti')
    source = open_source(tmp_path / "run")
    assert source.metrics()["step"].tolist() == [1, 2, 3]
    assert source.finished is False
    assert any("metrics.jsonl: the last line is torn" in note for note in source.notes)


def test_a_resumed_run_says_so(tmp_path):
    log = make_log(tmp_path / "run")
    log.event(2, "resume", "from checkpoint")
    assert open_source(tmp_path / "run").notes == ("resumed at step 2",)


def test_a_line_damaged_in_the_middle_is_named(tmp_path):
    make_log(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(AnalysisError, match=r"metrics.jsonl, line 2"):
        open_source(tmp_path / "run")


def test_a_cut_off_parquet_file_is_named_with_what_to_do(tmp_path):
    make_log(tmp_path / "run")
    file = tmp_path / "run" / "trajectories" / "00000002.parquet"
    file.write_bytes(file.read_bytes()[:200])
    source = open_source(tmp_path / "run")  # the newest file is whole
    with pytest.raises(AnalysisError, match=r"00000002.parquet is not a whole .* remove it"):
        source.read("trajectories")


def test_a_newer_run_is_refused_by_name(tmp_path):
    make_log(tmp_path / "run")
    file = tmp_path / "run" / "run.yaml"
    file.write_text(file.read_text().replace("schema_version: 1", "schema_version: 2"))
    with pytest.raises(AnalysisError, match=r"run.yaml has schema version 2, .*: update cvpo"):
        open_source(tmp_path / "run")


def test_a_newer_file_among_older_ones_is_refused_by_name(tmp_path):
    make_log(tmp_path / "run")
    newer = {b"cvpo_schema_version": b"2"}
    file = tmp_path / "run" / "trajectories" / "00000002.parquet"
    rewrite(file, lambda table: table.replace_schema_metadata(newer))
    frames = open_source(tmp_path / "run").scan("trajectories", ["step"])
    assert set(next(frames)["step"]) == {1}
    with pytest.raises(AnalysisError, match=r"00000002.parquet has schema version 2.*update cvpo"):
        next(frames)


def test_unknown_columns_and_parts_are_left_out_and_listed(tmp_path):
    make_log(tmp_path / "run")
    for step in (1, 2, 3):
        file = tmp_path / "run" / "trajectories" / f"{step:08d}.parquet"
        rewrite(file, lambda table: table.append_column("surprise", table["reward"]))
    (tmp_path / "run" / "gradients").mkdir()
    shutil.copy(file, tmp_path / "run" / "gradients" / file.name)
    source = open_source(tmp_path / "run")
    assert "surprise" not in source.read("trajectories")
    assert "gradients" not in " ".join(source.parts)
    assert any("trajectories: columns" in n and "surprise" in n for n in source.notes)
    assert any("parts" in n and "gradients" in n for n in source.notes)


# ------------------------------------------------------------------------------------ detection


def test_a_folder_of_runs_is_answered_with_their_names(tmp_path):
    make_log(tmp_path / "a")
    make_log(tmp_path / "b")
    with pytest.raises(AnalysisError, match=rf"give those: {tmp_path}/a {tmp_path}/b$"):
        open_source(tmp_path)


def test_a_run_without_its_description_is_told_what_it_needs(tmp_path):
    make_log(tmp_path / "run")
    (tmp_path / "run" / "run.yaml").unlink()
    with pytest.raises(AnalysisError, match=r"without its run.yaml"):
        open_source(tmp_path / "run")


def test_a_file_of_a_run_is_answered_with_its_folder(tmp_path):
    make_log(tmp_path / "run")
    for name in ("metrics.jsonl", "problems.parquet", "run.yaml"):
        with pytest.raises(AnalysisError, match=rf"give its folder {tmp_path}/run$"):
            open_source(tmp_path / "run" / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.log", b"", "the file is empty"),
        ("a.log", b"Loading weights\nstep by step\n", "no line of a step"),
        ("a.log", b"saving at step:10 - done\n", "no line of a step"),
        ("a.bin", b"\0\1\2" * 100, "nothing known"),
        ("a.json", b'{\n  "1": [0.5]\n}\n', "nothing known"),
        ("a.jsonl", b'{"text": "x"}\n', "nothing known"),
        ("a.jsonl", b'{"step": 1, "message": "x"}\n', "nothing known"),
        ("a.csv", b"x,y\n1,2\n", "nothing known"),
        ("a.parquet", b"PAR1", "nothing known"),
    ],
)
def test_files_that_are_no_log_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AnalysisError, match=message) as refusal:
        open_source(tmp_path / name)
    assert name in str(refusal.value)


def test_nothing_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(AnalysisError, match="does not exist"):
        open_source(tmp_path / "none")
    with pytest.raises(AnalysisError, match="the folder is empty"):
        open_source(tmp_path)


def test_sources_have_distinct_names_and_stand_there_once(tmp_path):
    for place in ("x/run", "y/run", "z"):
        make_log(tmp_path / place)
    names = [s.name for s in open_sources([tmp_path / p for p in ("x/run", "y/run", "z")])]
    assert names == [str(tmp_path / "x/run"), str(tmp_path / "y/run"), "z"]
    with pytest.raises(AnalysisError, match="given twice"):
        open_sources([tmp_path / "z", tmp_path / "x" / ".." / "z"])


# ---------------------------------------------------------------------------- evaluations as CSV


@needs_real
def test_real_evaluations_by_checkpoint_are_a_table():
    source = open_source(REAL / "openrs_eval_by_step.csv")
    table = source.read("tables/evaluations")
    assert (source.kind, source.parts) == ("evaluations", ("tables/evaluations",))
    assert len(table) == 69  # of 82 rows, 13 stand there again
    chosen = table[(table["experiment"] == "Exp1") & (table["step"] == 100)]
    values = dict(zip(chosen["benchmark"], chosen["value"], strict=True))
    assert values["custom|amc23|0"] == 0.7
    assert "more than once at step 50, 100, 200" in source.notes[0]


def test_an_evaluation_that_is_no_number_is_named_by_its_row(tmp_path):
    file = tmp_path / "e.csv"
    file.write_text("step,task,metric,value\n1,a,acc,0.5\n2,a,acc,oops\n")
    with pytest.raises(AnalysisError, match=r"e.csv, row 3: 'value' is 'oops'"):
        open_source(file)


# --------------------------------------------------------------------------------- the functions


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_number_once(numbers):
    text = ranges(numbers)
    found = []
    for piece in filter(None, text.split(", ")):
        first, _, last = piece.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)
    for piece, following in itertools.pairwise(text.split(", ")):
        assert int(piece.split("-")[-1]) + 1 < int(following.split("-")[0])


def gather_by_hand(lines):
    """As it is said: line by line, over the plain list of what stands so far."""
    standing = []
    for step, scalars in lines:
        if any(s == step and name in scalars for s, name, _ in standing):
            standing = [(s, name, x) for s, name, x in standing if s <= step]
        standing = [(s, n, x) for s, n, x in standing if s != step or n not in scalars]
        standing += [(step, name, x) for name, x in scalars.items()]
    return {(s, name): x for s, name, x in standing}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.dictionaries(st.sampled_from("abc"), st.floats(-9, 9), min_size=1),
        ),
        max_size=25,
    )
)
def test_gathered_steps_equal_a_plain_loop(lines):
    frame, notes = gather_steps(lines)
    found = {
        (row["step"], name): row[name]
        for row in frame.to_dict("records")
        for name in frame.columns
        if name != "step" and not np.isnan(row[name])
    }
    expected = gather_by_hand(lines)
    assert found == expected
    assert frame["step"].is_monotonic_increasing
    assert frame["step"].is_unique
    logged = {step for step, _ in lines}
    gone = logged - {step for step, _ in expected}
    assert any("left out" in note for note in notes) == bool(gone)


def test_a_resumed_log_counts_the_later_lines_and_drops_the_abandoned_ones():
    first = [(step, {"x": float(step)}) for step in range(1, 8)]
    again = [(step, {"x": 100.0 + step}) for step in (4, 5)]
    frame, notes = gather_steps([*first, *again])
    assert frame["step"].tolist() == [1, 2, 3, 4, 5]
    assert frame["x"].tolist() == [1, 2, 3, 104, 105]
    assert any("more than once" in note and "4-5;" in note for note in notes)
    assert any("left out" in note and "6-7" in note for note in notes)


def test_validation_of_a_step_does_not_count_as_a_resume():
    frame, notes = gather_steps([(1, {"a": 1.0}), (2, {"a": 2.0}), (1, {"val": 0.5})])
    assert frame["val"].tolist()[0] == 0.5
    assert frame["a"].tolist() == [1, 2]
    assert notes == []


def test_numbers_that_are_none_are_told():
    _, notes = gather_steps([(1, {"a": float("nan")}), (2, {"a": float("inf")}), (3, {"a": 1.0})])
    assert notes == ["logged as NaN or infinite: a (step 1-2)"]


def test_peers_scalars_are_called_by_names_that_exist():
    assert set(SAME_MEANING.values()) <= METRICS.keys()
    assert not set(SAME_MEANING) & METRICS.keys()


def test_every_missing_part_is_a_part(tmp_path):
    make_log(tmp_path / "run")
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 1, "data": {"actor/entropy": 0.5}}))
    for path in (tmp_path / "run", tmp_path / "m.jsonl"):
        source = open_source(path)
        told = {key for key in source.missing if "." not in key}
        assert told | {name.split("/")[0] for name in source.parts} == set(PARTS)
        assert all(isinstance(why, str) and why for why in source.missing.values())


def test_steps_that_are_not_there_are_passed_over(tmp_path):
    make_log(tmp_path / "run")
    source = open_source(tmp_path / "run")
    assert list(source.scan("trajectories", ["step"], steps=[77])) == []
    assert next(source.scan("metrics", ["step"], steps=[2, 77]))["step"].tolist() == [2]
    assert len(next(source.scan("problems", ["gold"], steps=[77]))) == 3
