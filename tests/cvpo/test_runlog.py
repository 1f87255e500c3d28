"""The run log: what is written is read back, and a kill at any moment leaves a usable log."""

import json
import math
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cvpo import runlog
from cvpo.runlog import COLUMNS, METRICS, MissingPartError, RunLog, RunLogError

ROOT = Path(__file__).parents[2]
STEP_PARTS = ("trajectories", "evals", "tokens", "calibration")


def new_log(path, **changes):
    arguments = {"config": {"lr": 1e-6}, "seed": 1, "method": "cvpo", "verifier": "exact"}
    return RunLog.create(path, **(arguments | changes))


def rows_of(part, count=3, **changes):
    """Rows with every declared column that the writer does not fill."""
    values = {
        "int64": lambda: list(range(count)),
        "float64": lambda: [i / 7 for i in range(count)],
        "bool": lambda: [i % 2 == 1 for i in range(count)],
        "string": lambda: [f"x{i}" for i in range(count)],
        "list<int32>": lambda: [list(range(i)) for i in range(count)],
    }
    filled = {"prompts": "round", "problems": None}.get(part, "step")
    rows = {c.name: values[c.dtype]() for c in COLUMNS[part] if c.name != filled}
    return rows | changes


def log_step(log, step, **scalars):
    log.metrics(step, time=1.0, device_seconds=2.0 * step, tokens=3 * step, scalars=scalars)


def full_log(path, steps):
    log = new_log(path)
    log.problems(rows_of("problems"))
    for step in steps:
        log_step(log, step, **{"accuracy/mean": step / 10})
        log.event(step, "checkpoint", f"saved {step}")
        log.trajectories(step, rows_of("trajectories"))
        log.evals(step, rows_of("evals"))
        log.tokens(step, rows_of("tokens"))
        log.calibration(step, rows_of("calibration"))
        log.scores("frozen", step, rows_of("scores"))
        log.prompts(step // 2, rows_of("prompts", step=[step] * 3)) if step % 2 == 0 else None
    return log


def frames(path):
    """Every part that a log has, by name."""
    found = {"metrics": runlog.read_metrics(path), "events": runlog.read_events(path)}
    for part in (*STEP_PARTS, "prompts", "scores/frozen"):
        if (path / part).is_dir() and any((path / part).glob("*.parquet")):
            found[part] = pd.concat(runlog.scan(path, part), ignore_index=True)
    return found


# ------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("part", STEP_PARTS)
def test_every_step_part_reads_back_what_was_written(tmp_path, part):
    log = new_log(tmp_path / "run")
    rows = rows_of(part)
    for step in (2, 10, 9):
        getattr(log, part)(step, rows)
    frame = getattr(runlog, f"read_{part}")(log.path)
    assert list(frame.columns) == [c.name for c in COLUMNS[part]]
    assert frame["step"].tolist() == [2] * 3 + [9] * 3 + [10] * 3
    for name, values in rows.items():
        assert [list(x) if isinstance(x, np.ndarray) else x for x in frame[name][:3]] == values


def test_problems_prompts_scores_and_tables_read_back(tmp_path):
    log = new_log(tmp_path / "run")
    log.problems(rows_of("problems"))
    assert runlog.read_problems(log.path)["text"].tolist() == ["x0", "x1", "x2"]
    log.prompts(4, rows_of("prompts", step=[7, 7, 7]))
    prompts = runlog.read_prompts(log.path)
    assert prompts["round"].tolist() == [4, 4, 4]
    assert prompts["step"].tolist() == [7, 7, 7]
    log.scores("step-100", 5, rows_of("scores"))
    assert runlog.read_scores(log.path, "step-100")["step"].tolist() == [5, 5, 5]
    log.table("bound", {"horizon": [5, 25], "name": ["a", "b"]}, units={"horizon": "tokens"})
    table = runlog.read_table(log.path, "bound")
    assert table.to_dict("list") == {"horizon": [5, 25], "name": ["a", "b"]}
    assert table.attrs["units"] == {"horizon": "tokens"}


def test_run_yaml_holds_what_a_reader_needs(tmp_path):
    config = {"a": (1, np.float32(0.5)), "b": {"c": None, "path": Path("x"), "lr": 1e-6}}
    log = new_log(tmp_path / "run", config=config, study="bound")
    run = runlog.read_run(log.path)
    assert run["schema_version"] == 1
    assert run["config"] == {"a": [1, 0.5], "b": {"c": None, "path": "x", "lr": 1e-6}}
    assert (run["seed"], run["method"], run["verifier"], run["study"]) == (
        1, "cvpo", "exact", "bound",
    )  # fmt: skip
    assert run["packages"]["torch"] == torch.__version__.split("+")[0] or run["packages"]["torch"]
    assert run["code_version"]
    assert run["hosts"]
    assert run["devices"]
    assert run["start"].endswith("+00:00")
    assert "!!" not in (log.path / "run.yaml").read_text()


def test_frames_arrays_and_tensors_are_rows_too(tmp_path):
    log = new_log(tmp_path / "run")
    rows = rows_of("trajectories")
    del rows["token_ids"]
    log.trajectories(1, pd.DataFrame(rows, index=[7, 8, 9]))
    rows["sigma"] = torch.tensor(rows["sigma"], dtype=torch.bfloat16, requires_grad=True)
    rows["correct"] = np.array([True, False, True])
    rows["truncated"] = torch.tensor([1, 0, 1])
    rows["token_ids"] = [torch.tensor([1, 2]), None, np.array([3])]
    log.trajectories(2, rows)
    frame = runlog.read_trajectories(log.path, steps=[2])
    assert frame["sigma"].tolist() == rows["sigma"].double().tolist()
    assert frame["correct"].tolist() == [1.0, 0.0, 1.0]
    assert frame["truncated"].tolist() == [True, False, True]
    assert frame["token_ids"][1] is None
    assert runlog.read_trajectories(log.path)["token_ids"].isna().tolist()[:3] == [True] * 3


def test_a_method_without_a_critic_leaves_its_columns_null(tmp_path):
    log = new_log(tmp_path / "run")
    needed = {c.name for c in COLUMNS["trajectories"] if c.presence == "value"}
    rows = {k: v for k, v in rows_of("trajectories").items() if k in needed}
    log.trajectories(1, rows)
    frame = runlog.read_trajectories(log.path)
    assert frame["sigma"].isna().all()
    assert frame["sigma"].dtype == np.float64
    assert "response" not in frame
    asked = runlog.read_trajectories(log.path, columns=["response", "length"])
    assert asked["response"].isna().all()
    assert asked["length"].tolist() == [0, 1, 2]


def test_true_rho_is_a_column_in_a_simulation_only(tmp_path):
    log = new_log(tmp_path / "run")
    rows = rows_of("prompts")
    log.prompts(1, rows)
    del rows["true_rho"]
    log.prompts(0, rows)
    first, second = runlog.scan(log.path, "prompts")
    assert "true_rho" not in first
    assert "true_rho" in second


def test_nan_is_missing_in_parquet_and_null_in_json(tmp_path):
    log = new_log(tmp_path / "run")
    scalars = {"a": math.nan, "b": None, "c": math.inf, "d": torch.tensor(0.5), "e": np.float32(2)}
    log_step(log, 1, **scalars)
    log_step(log, 2, f=1)
    lines = (log.path / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0], parse_constant=lambda token: pytest.fail(f"not JSON: {token}"))
    assert [first[k] for k in "abcde"] == [None, None, None, 0.5, 2.0]
    frame = runlog.read_metrics(log.path)
    assert frame["step"].tolist() == [1, 2]
    assert frame[list("abcdef")].dtypes.eq(np.float64).all()
    assert frame.loc[0, list("abcf")].isna().all()
    assert frame.loc[1, "f"] == 1.0
    log.trajectories(1, rows_of("trajectories", sigma=[math.nan, 1.0, None]))
    file = log.path / "trajectories" / "00000001.parquet"
    assert pq.read_table(file, partitioning=None)["sigma"].null_count == 2


def test_text_that_is_no_unicode_is_mended_and_kept(tmp_path):
    log = new_log(tmp_path / "run", config={"text": "a\ud800"})
    text = ["ok \U0001f600", "lone \ud83d end", "pair \ud83d\ude00"]
    log.trajectories(1, rows_of("trajectories", response=text))
    log.event(1, "warning", text[1])
    log.table("t", {"text": text})
    mended = ["ok \U0001f600", "lone � end", "pair \U0001f600"]
    assert runlog.read_trajectories(log.path)["response"].tolist() == mended
    assert runlog.read_events(log.path)["message"].tolist() == [mended[1]]
    assert runlog.read_table(log.path, "t")["text"].tolist() == mended
    assert runlog.read_run(log.path)["config"] == {"text": "a�"}


def test_units_stand_in_the_column_metadata(tmp_path):
    log = new_log(tmp_path / "run")
    log.trajectories(1, rows_of("trajectories"))
    schema = pq.read_schema(log.path / "trajectories" / "00000001.parquet")
    assert schema.field("length").metadata == {b"unit": b"tokens"}
    assert (
        pq.ParquetFile(log.path / "trajectories" / "00000001.parquet")
        .metadata.row_group(0)
        .column(0)
        .compression
        == "ZSTD"
    )


def test_files_sort_by_number_and_unpadded_names_are_read(tmp_path):
    log = new_log(tmp_path / "run")
    for step in (100, 9, 10):
        log.evals(step, rows_of("evals"))
    assert (log.path / "evals" / "00000100.parquet").exists()
    (log.path / "evals" / "00000009.parquet").rename(log.path / "evals" / "9.parquet")
    assert runlog.list_steps(log.path, "evals") == [9, 10, 100]
    assert [f["step"][0] for f in runlog.scan(log.path, "evals", ["step"])] == [9, 10, 100]
    assert list(runlog.read_evals(log.path, steps=[10, 11])["step"].unique()) == [10]


def test_metric_and_column_tables_cover_the_schema():
    assert {"reward/mean", "weights/w_d_cv", "advantage/mean_correct_weighted"} <= METRICS.keys()
    assert {"seconds/rollout", "seconds/tracker", "seconds/save"} <= METRICS.keys()
    for columns in COLUMNS.values():
        assert len({c.name for c in columns}) == len(columns)
        assert all(c.about for c in columns)


def test_a_huge_step_of_trajectories_is_small_on_disk(tmp_path):
    log = new_log(tmp_path / "run")
    rng = np.random.default_rng(0)
    rows = rows_of("trajectories", 4096)
    del rows["response"], rows["token_ids"]
    for name, values in rows.items():
        if isinstance(values[0], float):
            rows[name] = rng.random(4096, dtype=np.float32)
    log.trajectories(1, rows)
    assert (log.path / "trajectories" / "00000001.parquet").stat().st_size < 500_000


# --------------------------------------------------------------------------- kills and rewinds

WRITER = """
    import os, random, signal, sys, time
    import numpy, pandas, pyarrow, pyarrow.parquet, torch, yaml
    from cvpo.runlog import COLUMNS, RunLog

    def rows(part, **given):
        value = {"int64": 1, "float64": .5, "bool": True, "string": "x" * 50, "list<int32>": [1, 2]}
        return {c.name: [value[c.dtype]] * 200 for c in COLUMNS[part] if c.name != "step"} | given

    def write(path):
        log = RunLog.create(path, config={}, seed=0, method="ppo", verifier="exact")
        for step in range(1, 100_000):
            log.trajectories(step, rows("trajectories"))
            if step % 2 == 0:
                prompts = rows("prompts", step=[step] * 200)
                del prompts["round"]
                log.prompts(step // 2, prompts)
            scalars = {f"metric/{i}": float(step) for i in range(200)}
            log.metrics(step, time=0.0, device_seconds=step, tokens=step, scalars=scalars)
            log.event(step, "checkpoint", "y" * 2000)

    random.seed(int(sys.argv[2]))
    for trial in range(20):
        writer = os.fork()
        if writer == 0:
            write(f"{sys.argv[1]}/{trial}")
        time.sleep(random.uniform(0.0, 0.15) + 0.005 * trial)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_log_that_reads_and_rewinds(tmp_path):
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), "0"], check=True, cwd=ROOT
    )
    reached = []
    for path in sorted(tmp_path.iterdir()):
        if not (path / "run.yaml").exists():  # killed before there was a run
            new_log(path)
        RunLog.open(path)
        steps = runlog.read_metrics(path)["step"].tolist()
        reached.append(len(steps))
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) - len(runlog.read_events(path)) in (0, 1)
        if (path / "trajectories").exists() and any((path / "trajectories").glob("*.parquet")):
            written = [f["step"].unique().tolist() for f in runlog.scan(path, "trajectories")]
            assert written == [[s] for s in range(1, len(written) + 1)]
            assert len(written) - len(steps) in (0, 1)
        target = max(len(steps) - 3, 0)
        log = RunLog.open(path)
        log.rewind(target)
        assert not list(path.rglob("*.tmp"))
        rewound = frames(path)
        assert rewound["metrics"]["step"].tolist() == list(range(1, target + 1))
        assert rewound["events"]["step"].tolist() == list(range(1, target + 1))
        for part, every in (("trajectories", 1), ("prompts", 2)):
            if target >= every:
                assert sorted(set(rewound[part]["step"])) == list(range(every, target + 1, every))
        log_step(log, target + 1)
        assert runlog.read_metrics(path)["step"].iloc[-1] == target + 1
    assert len(reached) >= 10
    assert max(reached) > 3  # the kills did hit logs in full swing


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_line_torn_at_any_byte_is_dropped_and_the_log_goes_on(tmp_path, name):
    log = new_log(tmp_path / "run")
    read = runlog.read_metrics if name == "metrics.jsonl" else runlog.read_events
    for step in (1, 2):
        log_step(log, step, é=1.5)
        log.event(step, "warning", "ü")
    whole = (log.path / name).read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        (log.path / name).write_bytes(whole[:cut])
        complete = cut >= len(whole) - 1  # only the line feed is missing: nothing is lost
        before = [1, 2] if complete else [1]
        assert read(log.path)["step"].tolist() == before
        again = RunLog.open(log.path)
        if name == "metrics.jsonl":
            assert again.last_step == before[-1]
            log_step(again, 3)
        else:
            again.event(3, "resume", "")
        assert read(log.path)["step"].tolist() == [*before, 3]


@settings(max_examples=8, deadline=None)
@given(
    steps=st.lists(st.integers(0, 40), unique=True, max_size=4).map(sorted),
    target=st.integers(-1, 41),
)
def test_rewinding_equals_never_having_gone_further(tmp_path_factory, steps, target):
    folder = tmp_path_factory.mktemp("rewind")
    log = full_log(folder / "long", steps)
    log.rewind(target)
    short = full_log(folder / "short", [s for s in steps if s <= target])
    assert log.last_step == short.last_step
    left, right = frames(log.path), frames(short.path)
    assert left.keys() == right.keys()
    for part in left:
        pd.testing.assert_frame_equal(left[part], right[part])
    log.rewind(target)
    assert frames(log.path).keys() == left.keys()
    log_step(log, target + 1)


def test_rewind_keeps_problems_cuts_tables_by_step_and_sweeps_leftovers(tmp_path):
    log = full_log(tmp_path / "run", [1, 2, 3])
    log.table("free", {"x": [1, 2]})
    log.table("stepped", {"step": [1, 2, 3], "x": [1, 2, 3]})
    log.table("late", {"step": [3], "x": [1]})
    log.scores("prompts", 3, rows_of("scores"))
    log.table("named", {"step": ["first", "last"]})
    for leftover in (".run.yaml.1.tmp", "evals/.00000003.parquet.1.tmp", "tables/.x.parquet.1.tmp"):
        (log.path / leftover).write_bytes(b"half")
    (log.path / "checkpoints").mkdir()
    (log.path / "checkpoints" / ".mine.tmp").write_bytes(b"not the log's")
    assert len(runlog.read_evals(log.path)) == 9
    log.rewind(2)
    assert len(runlog.read_problems(log.path)) == 3
    assert runlog.read_table(log.path, "free")["x"].tolist() == [1, 2]
    assert runlog.read_table(log.path, "named")["step"].tolist() == ["first", "last"]
    assert runlog.read_table(log.path, "stepped")["step"].tolist() == [1, 2]
    with pytest.raises(MissingPartError):
        runlog.read_table(log.path, "late")
    with pytest.raises(MissingPartError):
        runlog.read_scores(log.path, "prompts")
    assert [p.name for p in log.path.rglob("*.tmp")] == [".mine.tmp"]


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path):
    script = """
        import resource, signal, sys
        from cvpo.runlog import RunLog, read_metrics
        log = RunLog.create(sys.argv[1], config={}, seed=0, method="ppo", verifier="exact")
        many = {f"m{i}": 1.0 for i in range(200)}
        log.metrics(1, time=0, device_seconds=0, tokens=0, scalars=many)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = (log.path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        try:
            log.metrics(2, time=0, device_seconds=0, tokens=0, scalars=many)
        except OSError as error:
            print("refused", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.metrics(2, time=0, device_seconds=0, tokens=0, scalars=many)
        assert read_metrics(log.path)["step"].tolist() == [1, 2]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "refused" in done.stdout


def test_a_log_is_readable_while_it_is_written(tmp_path):
    log = new_log(tmp_path / "run")
    log_step(log, 0, loss=0.0)
    log.evals(0, rows_of("evals"))
    done = threading.Event()

    def write():
        try:
            for step in range(1, 40):
                log.evals(step, rows_of("evals"))
                log_step(log, step, loss=float(step), **{f"m{i}": 1.0 for i in range(300)})
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while not done.is_set():
        metrics = runlog.read_metrics(log.path)
        assert metrics["loss"].tolist() == metrics["step"].tolist()
        assert len(metrics) >= seen
        seen = len(metrics)
        assert all(len(frame) == 3 for frame in runlog.scan(log.path, "evals"))
    writer.join()
    assert len(runlog.read_metrics(log.path)) == 40


def test_scanning_holds_one_file_at_a_time(tmp_path):
    log = new_log(tmp_path / "run")
    for step in (1, 2):
        log.evals(step, rows_of("evals"))
    frames_of = runlog.scan(log.path, "evals")
    next(frames_of)
    (log.path / "evals" / "00000002.parquet").write_bytes(b"broken after the scan began")
    with pytest.raises(RunLogError, match="00000002"):
        next(frames_of)


# -------------------------------------------------------------------------------------- errors


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    new_log(tmp_path / "run")
    with pytest.raises(FileExistsError, match=r"run already holds a run.*RunLog\.open"):
        new_log(tmp_path / "run")
    (tmp_path / "other" / "evals").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="evals"):
        new_log(tmp_path / "other")


def test_run_yaml_refuses_what_it_cannot_hold(tmp_path):
    with pytest.raises(RunLogError, match=r"config\.a\[1\] must be plain data, got object"):
        new_log(tmp_path / "run", config={"a": [1, object()]})
    with pytest.raises(RunLogError, match="verifier must be one of exact"):
        new_log(tmp_path / "run", verifier="llm")
    with pytest.raises(RunLogError, match="'packages'"):
        new_log(tmp_path / "run", packages={})
    assert not (tmp_path / "run").exists()


def change_run_yaml(path, **changes):
    run = yaml.safe_load((path / "run.yaml").read_text()) | changes
    (path / "run.yaml").write_text(yaml.safe_dump({k: v for k, v in run.items() if v is not None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, r"run\.yaml has schema version 2, this cvpo reads 1: update cvpo"),
        ({"schema_version": 0}, r"schema version 0.*read it with the cvpo it names"),
        ({"schema_version": None}, r"names no schema_version"),
        ({"verifier": None}, r"run\.yaml lacks verifier"),
    ],
)
def test_another_schema_is_refused_by_reader_and_writer(tmp_path, changes, message):
    log = new_log(tmp_path / "run")
    change_run_yaml(log.path, **changes)
    for read in (RunLog.open, runlog.read_metrics, runlog.read_run):
        with pytest.raises(RunLogError, match=message):
            read(log.path)


def test_what_is_no_run_or_lacks_a_part_is_named(tmp_path):
    with pytest.raises(MissingPartError, match=r"is not a run log: there is no .*run\.yaml"):
        runlog.read_metrics(tmp_path)
    log = new_log(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="has no part evals"):
        runlog.read_evals(log.path)
    with pytest.raises(MissingPartError, match=r"no part problems: .*problems\.parquet"):
        runlog.read_problems(log.path)
    with pytest.raises(MissingPartError, match="no part scores/frozen"):
        runlog.read_scores(log.path, "frozen")
    with pytest.raises(RunLogError, match="unknown part 'scores'"):
        runlog.scan(log.path, "scores")
    (log.path / "metrics.jsonl").unlink()
    with pytest.raises(MissingPartError, match=r"no part metrics\.jsonl"):
        runlog.read_metrics(log.path)
    log.evals(1, rows_of("evals"))
    with pytest.raises(MissingPartError, match="none of the steps"):
        runlog.read_evals(log.path, steps=[2])
    with pytest.raises(RunLogError, match="unknown column 'lenght'"):
        runlog.read_evals(log.path, columns=["lenght"])
    (log.path / "run.yaml").write_text("a: [")
    with pytest.raises(RunLogError, match=r"run\.yaml is not YAML"):
        runlog.read_run(log.path)


def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path):
    log = new_log(tmp_path / "run")
    for step in (1, 2, 3):
        log_step(log, step)
    file = log.path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    broken = lines[0] + lines[1][:9] + b"\n" + lines[2]
    file.write_bytes(broken)
    for act in (runlog.read_metrics, RunLog.open):
        with pytest.raises(RunLogError, match=r"metrics\.jsonl, line 2 is no JSON"):
            act(log.path)
    with pytest.raises(RunLogError, match="line 2"):
        log.rewind(1)
    assert file.read_bytes() == broken
    file.write_bytes(lines[0] + b'{"step": "2"}\n' + lines[2])
    with pytest.raises(RunLogError, match=r"line 2: 'step' must be of type int, got '2'"):
        runlog.read_metrics(log.path)
    file.write_bytes(lines[1] + lines[0])
    with pytest.raises(RunLogError, match="line 2: step 1 does not follow step 2"):
        runlog.read_metrics(log.path)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_parquet_file_is_named(tmp_path, keep):
    log = full_log(tmp_path / "run", [2])
    for part, read in (("evals", runlog.read_evals), ("prompts", runlog.read_prompts)):
        file = next((log.path / part).glob("*.parquet"))
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(RunLogError, match=f"{file.name} is not a whole Parquet file"):
            read(log.path)


def test_a_flipped_byte_in_a_page_is_not_read_as_data(tmp_path):
    log = new_log(tmp_path / "run")
    log.evals(1, rows_of("evals", 500, length=np.random.default_rng(0).integers(0, 2**40, 500)))
    file = log.path / "evals" / "00000001.parquet"
    column = pq.ParquetFile(file).metadata.row_group(0).column(7)
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(RunLogError, match="not a whole Parquet file"):
        runlog.read_evals(log.path)


def test_a_file_of_another_schema_is_named(tmp_path):
    log = new_log(tmp_path / "run")
    (log.path / "evals").mkdir()
    file = log.path / "evals" / "1.parquet"
    pq.write_table(pa.table({"step": [1]}), file)
    with pytest.raises(RunLogError, match=r"1\.parquet: column 'benchmark' is missing"):
        runlog.read_evals(log.path)
    pq.write_table(pa.table({"step": ["one"]}), file)
    with pytest.raises(RunLogError, match="column 'step' is string, the schema says int64"):
        runlog.read_evals(log.path, columns=["step"])
    file.rename(file.with_name("last.parquet"))
    with pytest.raises(RunLogError, match=r"last\.parquet is not named by a step"):
        runlog.read_evals(log.path)
    file.with_name("last.parquet").rename(file)
    with pytest.raises(FileExistsError, match="evals has step 1 already"):
        log.evals(1, rows_of("evals"))
    file.with_name("00000001.parquet").write_bytes(file.read_bytes())
    with pytest.raises(RunLogError, match="are the same step"):
        runlog.read_evals(log.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lenght": [1, 2, 3]}, "evals: unknown column 'lenght'; its columns are step, benchmark"),
        ({"length": None}, "evals: column 'length' is missing"),
        ({"length": [1, 2]}, "evals: column 'length' has 2 rows, column 'benchmark' has 3"),
        ({"length": [1, 2.5, 3]}, "evals: column 'length' does not fit int64"),
        ({"length": [1, None, 3]}, "evals: column 'length' has no value in row 1"),
        ({"length": ["1", "2", "3"]}, "evals: column 'length' does not fit int64: entries are"),
        ({"length": np.zeros((3, 2))}, "evals: column 'length' does not fit int64"),
        ({"length": 3}, "evals: column 'length' must be a sequence, got 3"),
        ({"length": torch.tensor(3)}, "evals: column 'length' must be a sequence"),
        ({"length": [2**70, 1, 1]}, "evals: column 'length' does not fit int64"),
        ({"truncated": [0, 2, 1]}, "evals: column 'truncated' does not fit bool"),
        ({"problem_id": [1.5, 2.0, 3.0]}, "evals: column 'problem_id' does not fit string"),
        ({"benchmark": "aime24"}, "evals: column 'benchmark' must be a sequence"),
        ({"benchmark": ["a", 2.5, None]}, "evals: column 'benchmark' does not fit string"),
        ({"step": [8, 8, 9]}, "evals: column 'step' must be 8 in every row"),
        ({5: [1, 2, 3]}, "evals: column names must be text, got 5"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_part_and_column(tmp_path, changes, message):
    log = new_log(tmp_path / "run")
    rows = {k: v for k, v in (rows_of("evals") | changes).items() if v is not None}
    with pytest.raises(RunLogError, match=message):
        log.evals(8, rows)
    assert not (log.path / "evals").exists()


def test_whole_numbers_are_taken_as_ids(tmp_path):
    log = new_log(tmp_path / "run")
    log.evals(1, rows_of("evals", problem_id=np.array([7, 8, 9])))
    assert runlog.read_evals(log.path)["problem_id"].tolist() == ["7", "8", "9"]


def test_the_other_writers_name_what_is_wrong(tmp_path):
    log = new_log(tmp_path / "run")
    log_step(log, 5)
    for step in (5, 4):
        with pytest.raises(RunLogError, match=rf"step {step} does not follow step 5.*rewind"):
            log_step(log, step)
    for bad in (-1, 1.5, True, 2**63, None):
        with pytest.raises(RunLogError, match="metrics: step must be a whole number"):
            log_step(log, bad) if bad is not None else log.metrics(
                None, time=0, device_seconds=0, tokens=0, scalars={}
            )
    for name in ("step", "", 3):
        with pytest.raises(RunLogError, match=f"{name!r} cannot name a scalar"):
            log.metrics(6, time=0, device_seconds=0, tokens=0, scalars={name: 1.0})
    for value in ("high", torch.ones(2), [1], 10**400):
        with pytest.raises(RunLogError, match="'loss' must be a number"):
            log_step(log, 6, loss=value)
    with pytest.raises(RunLogError, match="device_seconds of step 6 must be a finite number"):
        log.metrics(6, time=0, device_seconds=math.nan, tokens=0, scalars={})
    with pytest.raises(RunLogError, match="tokens of step 6 must be a finite number"):
        log.metrics(6, time=0, device_seconds=0, tokens=math.nan, scalars={})
    with pytest.raises(RunLogError, match=r"tokens of step 6 must be whole, got 1\.5"):
        log.metrics(6, time=0, device_seconds=0, tokens=1.5, scalars={})
    with pytest.raises(RunLogError, match="kind must be one of phase_switch"):
        log.event(6, "crash", "")
    with pytest.raises(RunLogError, match="0 to N-1"):
        log.problems(rows_of("problems", prompt_id=[0, 2, 3]))
    log.problems(rows_of("problems"))
    log.problems(rows_of("problems"))
    with pytest.raises(FileExistsError, match="another problem table"):
        log.problems(rows_of("problems", gold=["a", "b", "c"]))
    for name in ("../x", "", ".hidden"):
        with pytest.raises(RunLogError, match="cannot name a file"):
            log.table(name, {"x": [1]})
    with pytest.raises(RunLogError, match="unit is given for 'y'"):
        log.table("t", {"x": [1]}, units={"y": "s"})
    with pytest.raises(RunLogError, match="tables/t: column 'x'"):
        log.table("t", {"x": [1, "a"]})
    with pytest.raises(RunLogError, match="rewind needs the step"):
        log.rewind(-2)
    assert runlog.read_metrics(log.path)["step"].tolist() == [5]


@pytest.mark.parametrize("value", ['"high"', "[1]", "1" + "0" * 400])
def test_a_scalar_that_is_no_number_is_named_by_its_file(tmp_path, value):
    log = new_log(tmp_path / "run")
    line = f'{{"step": 1, "time": 0, "device_seconds": 0, "tokens": 0, "loss": {value}}}\n'
    (log.path / "metrics.jsonl").write_text(line)
    with pytest.raises(RunLogError, match=r"metrics\.jsonl holds a scalar that is no number"):
        runlog.read_metrics(log.path)


@pytest.mark.parametrize(
    ("key", "value"), [("method", ["a"]), ("method", None), ("seed", {"a": 1}), ("verifier", 3)]
)
def test_run_yaml_with_an_entry_of_another_type_is_refused_by_its_key(tmp_path, key, value):
    log = new_log(tmp_path / "run")
    file = log.path / "run.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {key: value}))
    with pytest.raises(RunLogError, match=rf"run\.yaml: {key} must be of type"):
        runlog.read_run(log.path)


@pytest.mark.parametrize("missing", ["pandas", "pyarrow", "yaml"])
def test_a_missing_package_names_the_extra(tmp_path, missing):
    script = f"""
        import sys
        class NotInstalled:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "{missing}":
                    raise ModuleNotFoundError(f"No module named {{name!r}}")
        sys.meta_path.insert(0, NotInstalled())
        from cvpo import runlog
        try:
            log = runlog.RunLog.create(
                sys.argv[1], config={{}}, seed=0, method="ppo", verifier="exact"
            )
            log.table("t", {{"x": [1]}})
            runlog.read_table(log.path, "t")
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert f"the run log needs {missing}" in done.stdout
    assert "pip install 'cvpo[log]'" in done.stdout


def test_importing_the_run_log_imports_no_heavy_library():
    script = (
        "import sys, cvpo.runlog; print(sorted({'pandas', 'pyarrow', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
