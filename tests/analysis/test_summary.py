"""The summary's numbers against plain loops over logs whose truth is known, and its refusals."""

import itertools
import math

import matplotlib.image as mpl_image
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from scipy.stats import t as student

from analysis import METHOD_COLORS, method_color
from analysis.__main__ import main
from analysis.labels import color
from analysis.sources import open_sources
from analysis.summary import draw_curves, load_runs, summarize
from cvpo.runlog import RunLog
from tests.training_logs import config_of, write_run

# correct answers of each problem's samples, by step and benchmark
TRUTH = {
    0: {
        "AIME24": [[0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]],
        "AMC23": [[1, 1, 0, 0], [0, 1, 0, 0]],
    },
    8: {
        "AIME24": [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]],
        "AMC23": [[1, 1, 1, 1], [0, 1, 0, 1]],
    },
    16: {
        "AIME24": [[1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1]],
        "AMC23": [[1, 1, 0, 1], [0, 0, 0, 0]],
    },
}


def eval_rows(evaluation, verifier="exact", start=0):
    rows = [
        {"benchmark": name, "problem_id": f"p{start + p}", "sample": s, verifier: float(verdict)}
        for name, problems in evaluation.items()
        for p, samples in enumerate(problems)
        for s, verdict in enumerate(samples)
    ]
    return pd.DataFrame(rows).assign(length=7, truncated=False).sample(frac=1, random_state=0)


def make_run(path, truth=TRUTH, *, method="cvpo", seed=1, verifier="exact", logged=None):
    log = RunLog.create(path, config={}, seed=seed, method=method, verifier=verifier)
    for step, evaluation in truth.items():
        log.evals(step, eval_rows(evaluation, verifier))
    for step in truth if logged is None else logged:
        log.metrics(step, time=0, device_seconds=10.0 + step, tokens=1000 * step, scalars={})
    return path


def row(table, evaluation, benchmark, run=None):
    chosen = table[(table["evaluation"] == evaluation) & (table["benchmark"] == benchmark)]
    chosen = chosen if run is None else chosen[chosen["run"] == run]
    assert len(chosen) == 1
    return chosen.iloc[0]


def summary_of(*paths, k=None):
    return summarize(load_runs(open_sources(paths)), k)


def standard_error(x):
    mean = sum(x) / len(x)
    return math.sqrt(sum((value - mean) ** 2 for value in x) / (len(x) - 1) / len(x))


def pass_at(samples, k):
    draws = list(itertools.combinations(samples, k))
    return sum(any(draw) for draw in draws) / len(draws)


# ------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("label", "step"), [("first", 0), ("last", 16)])
@pytest.mark.parametrize("benchmark", ["AIME24", "AMC23"])
def test_levels_equal_plain_loops_over_problems(tmp_path, k, label, step, benchmark):
    table = summary_of(make_run(tmp_path / "run"), k=k).table
    problems = TRUTH[step][benchmark]
    means = [sum(samples) / len(samples) for samples in problems]
    found = row(table, label, benchmark)
    error = standard_error(means)
    half = student.ppf(0.975, len(means) - 1) * error
    accuracy = sum(means) / len(means)
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["standard_error"] == pytest.approx(error)
    assert found["low"] == pytest.approx(max(accuracy - half, 0))
    assert found["high"] == pytest.approx(min(accuracy + half, 1))
    assert found["pass_at_k"] == pytest.approx(sum(pass_at(s, k) for s in problems) / len(problems))
    assert (found["step"], found["problems"], found["samples_max"]) == (step, len(problems), 4)
    assert (found["device_seconds"], found["tokens"]) == (10 + step, 1000 * step)


def test_the_change_is_paired_by_problem(tmp_path):
    table = summary_of(make_run(tmp_path / "run")).table
    differences = [
        sum(last) / 4 - sum(first) / 4
        for first, last in zip(TRUTH[0]["AIME24"], TRUTH[16]["AIME24"], strict=True)
    ]
    found = row(table, "change", "AIME24")
    error = standard_error(differences)
    assert found["accuracy"] == pytest.approx(sum(differences) / 3)
    assert found["standard_error"] == pytest.approx(error)
    assert found["high"] == pytest.approx(sum(differences) / 3 + student.ppf(0.975, 2) * error)
    assert error < row(table, "last", "AIME24")["standard_error"]  # unpaired, it would be larger
    assert (found["device_seconds"], found["tokens"]) == (16, 16000)


@pytest.mark.parametrize("label", ["first", "last", "change"])
def test_every_benchmark_weighs_the_same_in_the_mean(tmp_path, label):
    table = summary_of(make_run(tmp_path / "run")).table
    parts = [row(table, label, name) for name in ("AIME24", "AMC23")]
    mean = row(table, label, "mean")
    variances = [part["standard_error"] ** 2 / 4 for part in parts]
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 1)
    half = student.ppf(0.975, freedom) * math.sqrt(sum(variances))
    assert mean["accuracy"] == pytest.approx((parts[0]["accuracy"] + parts[1]["accuracy"]) / 2)
    assert mean["standard_error"] == pytest.approx(math.sqrt(sum(variances)))
    lowest = -1 if label == "change" else 0
    assert mean["low"] == pytest.approx(max(mean["accuracy"] - half, lowest))
    assert mean["pass_at_k"] == pytest.approx((parts[0]["pass_at_k"] + parts[1]["pass_at_k"]) / 2)
    assert mean["problems"] == 5


def test_intervals_cover_the_truth_as_often_as_they_say(tmp_path):
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        rate = rng.beta(2, 2, 20)
        truth = {0: {"b": (rng.random((20, 4)) < rate[:, None]).tolist()}}
        found = row(summary_of(make_run(tmp_path / str(trial), truth)).table, "first", "b")
        covered += found["low"] <= 0.5 <= found["high"]
    assert covered >= 51  # 57 expected; fewer than 51 has a chance of .7 %


def test_the_headline_verifier_of_the_run_is_the_one_counted(tmp_path):
    log = RunLog.create(tmp_path / "run", config={}, seed=1, method="ppo", verifier="normalized")
    log.evals(0, eval_rows(TRUTH[0], "exact").assign(normalized=1.0))
    assert row(summary_of(log.path).table, "first", "mean")["accuracy"] == 1.0


# ---------------------------------------------------------------------------------------- gaps


def test_killed_evaluations_are_paired_on_what_both_have_and_say_so(tmp_path):
    short = {"AIME24": [[1, 1], [1]], "AMC23": TRUTH[16]["AMC23"]}
    summary = summary_of(make_run(tmp_path / "run", {0: TRUTH[0], 16: short}))
    change = row(summary.table, "change", "AIME24")
    assert change["accuracy"] == pytest.approx((0.75 + 1.0) / 2)
    assert (change["problems"], change["samples_min"], change["samples_max"]) == (2, 1, 4)
    assert set(summary.table["pass_k"]) == {1}
    notes = "\n".join(summary.notes)
    assert "run: 1 problems of AIME24 stand in only one of steps 0 and 16" in notes
    assert "AIME24 is incomplete at step 16 (from 2 problems)" in notes
    assert "problems of AIME24 have 1 to 2 samples at step 16" in notes


def test_too_large_a_k_gives_no_number_rather_than_a_wrong_one(tmp_path):
    summary = summary_of(make_run(tmp_path / "run"), k=5)
    assert summary.table["pass_at_k"].isna().all()
    assert any("fewer than 5 samples, so there is no pass@5" in note for note in summary.notes)
    assert summary.table["accuracy"].notna().all()


def test_partial_credit_has_an_average_but_no_pass_at_k(tmp_path):
    summary = summary_of(make_run(tmp_path / "run", {0: {"b": [[0.5, 1.0], [0.0, 0.0]]}}))
    assert row(summary.table, "first", "b")["accuracy"] == pytest.approx(0.375)
    assert math.isnan(row(summary.table, "first", "b")["pass_at_k"])
    assert any("partial credit" in note for note in summary.notes)


def test_a_log_still_being_written_says_how_far_it_is(tmp_path):
    path = make_run(tmp_path / "run", {2: TRUTH[0], 16: TRUTH[16]}, logged=[2, 16, 17, 19])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "ti')
    (path / "evals" / ".00000024.parquet.7.tmp").write_bytes(b"half")
    summary = summary_of(path)
    assert row(summary.table, "last", "mean")["step"] == 16
    assert "run: the log goes on to step 19, the last evaluation is of step 16" in summary.notes
    assert "run: the first evaluation is of step 2, not before training" in summary.notes


def test_a_cost_the_log_does_not_state_is_missing_not_guessed(tmp_path):
    summary = summary_of(make_run(tmp_path / "run", logged=[8, 15]))
    assert summary.table["device_seconds"].isna().all()
    assert sum("its cost is not known" in note for note in summary.notes) == 2


def test_one_evaluation_has_no_change(tmp_path):
    summary = summary_of(make_run(tmp_path / "run", {0: TRUTH[0]}))
    assert set(summary.table["evaluation"]) == {"first"}
    assert any("one evaluation only (step 0)" in note for note in summary.notes)


def test_runs_with_different_benchmarks_are_averaged_over_the_shared_ones_only(tmp_path):
    only_aime = {step: {"AIME24": truth["AIME24"]} for step, truth in TRUTH.items()}
    paths = make_run(tmp_path / "a"), make_run(tmp_path / "b", only_aime, method="vapo")
    summary = summary_of(*paths)
    assert summary.benchmarks == ["AIME24"]
    for run in "ab":
        mean, aime = (row(summary.table, "last", name, run) for name in ("mean", "AIME24"))
        assert mean["accuracy"] == aime["accuracy"]
        assert mean["low"] == aime["low"]
    assert row(summary.table, "last", "AMC23", "a")["accuracy"] == pytest.approx(0.375)
    assert any("a: the mean is over AIME24 and leaves out AMC23" in n for n in summary.notes)


def test_incomparable_runs_are_called_so(tmp_path):
    other = {0: {"AIME24": TRUTH[0]["AIME24"][:2], "AMC23": TRUTH[0]["AMC23"]}}
    summary = summary_of(
        make_run(tmp_path / "a", {0: TRUTH[0]}),
        make_run(tmp_path / "b", other, verifier="symbolic"),
    )
    notes = "\n".join(summary.notes)
    assert "judged by different verifiers (a by exact, b by symbolic)" in notes
    assert "a and b evaluated different problems of AIME24: do not compare them" in notes
    assert "problems of AMC23" not in notes


# -------------------------------------------------------------------------------------- errors


def refusal(capsys, *arguments):
    assert main(["summary", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_bad_input_gets_one_line_that_names_the_file_and_the_way_out(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    err = refusal(capsys, tmp_path / "empty")
    assert "empty: the folder is empty; give a run log's folder" in err
    assert "absent does not exist" in refusal(capsys, tmp_path / "absent")
    run = make_run(tmp_path / "runs" / "one")
    assert f"holds some; give those: {run}" in refusal(capsys, tmp_path / "runs")
    assert "is given twice" in refusal(capsys, run, tmp_path / "runs" / "." / "one")
    assert "--k must be at least 1, got 0" in refusal(capsys, run, "--k", 0)
    bare = RunLog.create(tmp_path / "bare", config={}, seed=1, method="ppo", verifier="exact")
    assert "has no evals: there is no file in evals/" in refusal(capsys, bare.path)
    other = make_run(tmp_path / "other", {0: {"MATH-500": [[1, 0], [0, 1]]}})
    err = refusal(capsys, run, other)
    assert "no benchmark stands in the first and last evaluation of every run" in err
    assert "one: AIME24, AMC23; other: MATH-500" in err
    (run / "evals" / "00000008.parquet").write_bytes(b"PAR1")
    assert "00000008.parquet is not a whole Parquet file" in refusal(capsys, run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.assign(exact=math.nan), "3 of 3 rows have no 'exact' verdict"),
        (lambda rows: rows.assign(exact=-1.0), r"column 'exact' must lie in [0, 1]"),
        (lambda rows: rows.assign(sample=0), "b, problem p0, sample 0 stands there twice"),
        (lambda rows: rows[:0], "the first is an evaluation that has no row"),
        (lambda rows: rows.assign(benchmark="mean"), "'mean' is the tables' own row"),
        (lambda rows: rows.assign(benchmark="best step"), "'best step' is the tables' own row"),
    ],
)
def test_an_evaluation_that_cannot_be_counted_is_refused(tmp_path, capsys, change, message):
    log = RunLog.create(tmp_path / "run", config={}, seed=1, method="ppo", verifier="exact")
    log.evals(3, change(eval_rows({"b": [[0, 1, 1]]})))
    err = refusal(capsys, log.path)
    assert message in err
    assert f"{log.path}/evals" in err


# -------------------------------------------------------------------------------------- output


def test_the_command_prints_the_table_and_saves_it_and_the_figure(tmp_path, capsys):
    first = make_run(tmp_path / "a")
    second = make_run(tmp_path / "b", method="vapo")
    assert main(["summary", str(first), str(second), "-o", str(tmp_path / "out"), "--k", "2"]) == 0
    out = capsys.readouterr().out
    assert "pass@2 %" in out
    assert out.count("change") >= 6
    saved = pd.read_csv(tmp_path / "out" / "summary.csv")
    table = summary_of(first, second, k=2).table
    pd.testing.assert_frame_equal(saved, table, check_dtype=False)
    assert len(saved) == 2 * 3 * 3
    change = row(table, "change", "mean", "a")
    assert f"{100 * change['accuracy']:+.1f}" in out
    image = mpl_image.imread(tmp_path / "out" / "learning_curve.png")
    assert image.shape[1] == 1020  # one column at 300 dots per inch


def test_a_method_has_its_own_colour_in_the_figure(tmp_path):
    for method in ("cvpo", "vapo", "my-method"):
        path = make_run(tmp_path / method, method=method)
        runs = load_runs(open_sources([path]))
        draw_curves(runs, ["AIME24", "AMC23"], tmp_path / f"{method}.png")
        pixels = mpl_image.imread(tmp_path / f"{method}.png")[..., :3]
        wanted = [int(method_color(method)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(axis=-1) < 0.01).sum() > 500
    assert len(set(METHOD_COLORS.values())) == len(METHOD_COLORS)


def test_settings_of_a_method_have_colours_of_their_own(tmp_path):
    small = config_of("cvpo", alpha_p=0.1, alpha_n=0.1)
    other = {0: TRUTH[0], 8: TRUTH[16], 16: TRUTH[8]}
    paths = [
        write_run(tmp_path / "a", TRUTH, method="cvpo"),
        write_run(tmp_path / "b", other, method="cvpo", config=small),
    ]
    runs = load_runs(open_sources(paths))
    assert [run.label for run in runs] == ["cvpo", "cvpo c=.1"]
    draw_curves(runs, ["AIME24", "AMC23"], tmp_path / "x.png")
    pixels = mpl_image.imread(tmp_path / "x.png")[..., :3]
    for run in runs:
        assert (np.abs(pixels - to_rgb(color(run.label))).max(axis=-1) < 0.01).sum() > 500


@pytest.mark.parametrize("name", [r"$\frac$", "a_b^c", "100%"])
def test_names_are_drawn_as_they_are_not_as_formulas(tmp_path, name):
    truth = {step: {name: problems["AMC23"]} for step, problems in TRUTH.items()}
    run = make_run(tmp_path / "run", truth, method=name)
    assert main(["summary", str(run), "-o", str(tmp_path / "out")]) == 0
    assert mpl_image.imread(tmp_path / "out" / "learning_curve.png").std() > 0


def test_an_output_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    run = make_run(tmp_path / "run")
    assert main(["summary", str(run), "-o", str(tmp_path / "taken")]) == 2
    assert str(tmp_path / "taken") in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"
