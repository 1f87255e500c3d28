"""The report: every rule fires and does not fire, numbers are the log's, nothing in it is code."""

import html
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import method_color
from analysis.__main__ import main
from analysis.report import charts, examples, report, rules, runs
from analysis.report.headline import headline
from analysis.report.page import visible
from analysis.sources import open_sources
from analysis.summary import load_runs, summarize
from cvpo.runlog import RunLog

SHARED = Path(__file__).parents[3] / "shared" / "data" / "runs"
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"

# ----------------------------------------------------------------------------------------- logs


def trajectories(prompts=4, samples=4, response=None):
    rows = pd.MultiIndex.from_product([range(prompts), range(samples)]).to_frame(index=False)
    rows.columns = ["prompt_id", "sample"]
    rows["correct"] = (rows["sample"] < rows["prompt_id"]).astype(float)
    rows["reward"] = 2 * rows["correct"] - 1
    rows = rows.assign(length=5, truncated=False)
    if response is not None:
        rows["response"] = response
    return rows


def evaluation(rates, samples=4):
    return pd.DataFrame(
        [
            {"benchmark": name, "problem_id": f"p{p}", "sample": s, "exact": float(s < correct)}
            for name, counts in rates.items()
            for p, correct in enumerate(counts)
            for s in range(samples)
        ]
    ).assign(length=5, truncated=False)


def make_run(path, *, method="cvpo", seed=1, steps=12, config=None, response="2+2=4", text="2+2="):
    config = {"steps": steps} | (config or {})
    log = RunLog.create(path, config=config, seed=seed, method=method, verifier="exact")
    table = {"prompt_id": range(4), "dataset": "d", "text": text, "gold": "4"}
    log.problems(pd.DataFrame(table))
    log.evals(0, evaluation({"AIME": [0, 1, 2, 0], "AMC": [1, 4, 0, 0]}))
    for step in range(1, steps + 1):
        scalars = {"reward/mean": step / 10 + seed, "policy/entropy": 1.0, "length/mean": 9.0}
        log.metrics(step, time=step, device_seconds=36.0 * step, tokens=100 * step, scalars=scalars)
        log.trajectories(step, trajectories(response=response))
    log.evals(steps, evaluation({"AIME": [1, 3, 4, 0], "AMC": [0, 4, 1, 2]}))
    return path


def text_of(page):
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


# ---------------------------------------------------------------------------------------- rules


def frames(events=(), steps=None, **scalars):
    """Metrics from lists; a single number stands for 30 equal ones. `__` is a slash."""
    columns = {name.replace("__", "/"): value for name, value in scalars.items()}
    length = max((len(v) for v in columns.values() if isinstance(v, list)), default=30)
    metrics = pd.DataFrame({"step": steps or range(1, length + 1)})
    for name, value in columns.items():
        metrics[name] = np.asarray(value, dtype=float)
    return rules.Frames(metrics, pd.DataFrame(list(events), columns=["step", "kind", "message"]))


FALL = [1.0] * 20 + [0.1] * 10
HELD = [1.0] * 20 + [0.6] * 10

CASES = {
    rules.critic_explains_little: (
        {"critic__explained_variance": [0.9] * 20 + [0.04] * 10},
        {"critic__explained_variance": [0.0] * 20 + [0.2] * 10},
        ["critic/explained_variance is 0.04 over steps 21-30", "below 0.1", "pretraining.max_st"],
    ),
    rules.weight_is_a_constant: (
        {"weights__w_s_cv_correct": 0.008, "weights__w_s_mean_correct": 1.15},
        {"weights__w_s_cv_correct": 0.03, "weights__w_s_cv_incorrect": 0.025},
        ["weights/w_s_cv_correct is 0.008", "mean of 1.15", "under 0.02", "sharpness_unit"],
    ),
    rules.entropy_collapsed: (
        {"policy__entropy": FALL},
        {"policy__entropy": HELD},
        ["policy/entropy is 0.1 over steps 21-30", "less than 20%", "clip_high"],
    ),
    rules.length_collapsed: (
        {"length__mean": FALL},
        {"length__mean": HELD},
        ["length/mean is 0.1", "less than 50% of the 1 it began", "length_adaptive_alpha"],
    ),
    rules.clipping_too_often: (
        {"policy__clip_low": 0.15, "policy__clip_high": 0.1},
        {"policy__clip_low": 0.1, "policy__clip_high": 0.1},
        ["policy/clip_low is 0.15", "policy/clip_high is 0.1", "over 20%", "actor.lr"],
    ),
    rules.truncated_too_often: (
        {"truncated__rate": [0.0] * 20 + [0.2] * 10},
        {"truncated__rate": [0.9] * 20 + [0.05] * 10},
        ["truncated/rate is 0.2", "over 10%", "rollout.max_tokens"],
    ),
    rules.answers_not_found: (
        {"format__rate": 0.5},
        {"format__rate": 0.95},
        ["format/rate is 0.5", "under 80%", "template"],
    ),
    rules.groups_without_contrast: (
        {"groups__all_correct": 0.3, "groups__all_wrong": 0.6},
        {"groups__all_correct": 0.3, "groups__all_wrong": 0.4},
        ["groups/all_correct is 0.3", "groups/all_wrong is 0.6", "over 80%", "rollout.sampler"],
    ),
    rules.updates_skipped: (
        {"policy__skipped_updates": [0.0, 2.0, 1.0]},
        {"policy__skipped_updates": 0.0, "critic__skipped_updates": 0.0},
        ["policy/skipped_updates adds up to 3", "expected 0", "learning rate"],
    ),
    rules.losses_not_finite: (
        {"policy__loss": [0.1, math.nan, 0.1, 0.1, math.nan]},
        {"policy__loss": [math.nan, math.nan, 0.1, 0.1, 0.2]},
        ["policy/loss at step 2, 5", "expected at every step", "overflow"],
    ),
    rules.engines_disagree: (
        {"rollout__logprob_gap": 0.2},
        {"rollout__logprob_gap": 0.01},
        ["rollout/logprob_gap is 0.2", "over 0.05", "synchronised"],
    ),
    rules.steps_missing: (
        {"steps": [1, 2, 3, 6, 7, 8]},
        {"steps": [0, 5, 10, 15]},
        ["No metrics of 2 steps", "4-5", "expected none"],
    ),
}


def test_every_rule_has_a_case():
    assert set(CASES) == set(rules.RULES)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_fires_where_it_should_and_names_metric_value_threshold_and_remedy(rule):
    fires, holds, said = CASES[rule]
    text = rule(frames(**fires))
    for part in said:
        assert part in text
    assert rule(frames(**holds)) is None
    assert list(rules.warnings(frames(**fires))) == [rule.__name__.replace("_", " ")]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_metric_that_is_missing_or_nan_throughout_says_nothing(rule):
    fires, _, _ = CASES[rule]
    assert rule(frames()) is None
    lost = {name: math.nan for name in fires if name != "steps"}
    assert rule(frames(**lost)) is None


def test_a_blind_critic_is_blamed_on_w_s_only_where_w_s_varies():
    blind = {"critic__explained_variance": 0.01, "weights__w_s_mean_correct": 1.1}
    varied = rules.critic_explains_little(frames(**blind, weights__w_s_cv_correct=0.09))
    assert "W_S still varies (sd / mean 0.09)" in varied
    assert "W_S" not in rules.critic_explains_little(frames(**blind, weights__w_s_cv_correct=0.0))


def test_a_weight_that_is_meant_to_be_constant_is_not_blamed():
    assert rules.weight_is_a_constant(frames(weights__w_s_cv_correct=0.0)) is None


def test_a_short_log_has_not_collapsed():
    assert rules.entropy_collapsed(frames(policy__entropy=[1.0] * 5 + [0.0] * 5)) is None


def test_verls_clipping_and_explained_variance_are_judged_under_their_names():
    found = rules.warnings(frames(actor__pg_clipfrac=0.4, critic__vf_explained_var=-0.2))
    assert "actor/pg_clipfrac is 0.4" in found["clipping too often"]
    assert "critic/vf_explained_var is -0.2" in found["critic explains little"]


def test_skipped_steps_are_events_too():
    said = rules.updates_skipped(frames(events=[(7, "skipped_step", "nan")]))
    assert "skipped_step events at step 7" in said


CURRICULUM = {"curriculum": {"detector": "printed", "low_delta": 0.05, "high_delta": 0.03}}
SEEN = {
    "curriculum__phase": [0.0, 0.0, 0.0],
    "curriculum__low_count": [math.nan, 8.0, math.nan],
    "curriculum__low_delta": [math.nan, 0.2, math.nan],
    "curriculum__high_count": [math.nan, 0.0, math.nan],
    "curriculum__high_delta": math.nan,
}


def test_the_tracker_says_why_the_phase_has_not_switched():
    said = rules.phase(frames(**SEEN), CURRICULUM)
    assert said.startswith("Early, never switched. At the last test (step 2) the low set has 8")
    assert "a change of +0.200 (stalled within 0.05)" in said
    assert "the high set has 0 prompts. Both have to stop" in said
    watched = rules.phase(frames(**SEEN), CURRICULUM | {"declared": {"curriculum": False}})
    assert watched.endswith("its tracker only watches.")


def test_the_tracker_says_when_and_why_the_phase_switched():
    switched = frames(events=[(2, "phase_switch", "round 1: both stopped")], **SEEN)
    assert rules.phase(switched, {}) == "Bottleneck since step 2: round 1: both stopped."
    assert rules.phase(frames(reward__mean=1.0), {}) is None


# ---------------------------------------------------------------------------- numbers on the page


def test_the_headline_is_that_of_the_summary(tmp_path):
    sources = open_sources([make_run(tmp_path / "a"), make_run(tmp_path / "b", method="vapo")])
    table = summarize(load_runs(sources)).table.set_index(["run", "evaluation", "benchmark"])
    found = headline(sources)
    assert found.benchmarks == ("mean", "AIME", "AMC")
    for run in "ab":
        for name in found.benchmarks:
            cell = found.rows[run][name]
            last = table.loc[(run, "last", name)]
            change = table.loc[(run, "change", name)]
            assert cell.last == f"{100 * last['accuracy']:.1f}"
            assert cell.interval == f"[{100 * last['low']:.1f}, {100 * last['high']:.1f}]"
            assert cell.first == f"{100 * table.loc[(run, 'first', name), 'accuracy']:.1f}"
            assert cell.change.replace("\u2212", "-") == f"{100 * change['accuracy']:+.1f}"
            clear = "up" if change["low"] > 0 else "down" if change["high"] < 0 else ""
            assert cell.clear == clear


def test_runs_that_share_no_benchmark_keep_their_own_means(tmp_path):
    log = RunLog.create(tmp_path / "b", config={}, seed=1, method="ppo", verifier="exact")
    log.evals(0, evaluation({"other": [1, 2]}))
    found = headline(open_sources([make_run(tmp_path / "a"), log.path]))
    assert found.shared == ()
    assert set(found.rows["b"]) == {"other", "mean"}
    assert found.rows["b"]["mean"].change == "-"
    assert any("do not compare" in note for note in found.notes)


def test_the_curves_hold_the_evaluations_and_all_three_axes(tmp_path):
    sources = open_sources([make_run(tmp_path / "a")])
    mean, aime, amc = charts.accuracy_panels(sources, ["AIME", "AMC"])
    assert aime.series[0]["step"] == [0, 12]
    assert aime.series[0]["value"] == [pytest.approx(300 / 16), 50]
    assert mean.series[0]["value"][1] == pytest.approx((50 + 700 / 16) / 2)
    assert amc.series[0]["tokens"] == [None, 1200]  # nothing is logged of step 0
    assert amc.series[0]["device_hours"] == [None, 0.12]
    low, high = aime.series[0]["low"][1], aime.series[0]["high"][1]
    assert 0 <= low < 50 < high <= 100


def test_a_metric_is_drawn_as_logged_and_smoothed_over_a_twentieth(tmp_path):
    sources = open_sources([make_run(tmp_path / "a", steps=60)])
    reward = next(p for p in charts.metric_panels(sources) if p.title == "Reward")
    (line,) = reward.series
    assert line["value"] == [pytest.approx(1 + step / 10) for step in range(1, 61)]
    assert line["smooth"][10] == pytest.approx(np.mean(line["value"][9:12]))
    assert line["tokens"][-1] == 6000
    titles = [panel.title for panel in charts.metric_panels(sources)]
    assert "Explained variance" not in titles  # this log has none


def test_a_long_log_is_drawn_by_few_points_of_the_same_mean(tmp_path):
    log = RunLog.create(tmp_path / "long", config={}, seed=1, method="ppo", verifier="exact")
    rewards = np.random.default_rng(0).normal(size=1000)
    lines = [
        {"step": i, "time": 0.0, "device_seconds": 1.0 * i, "tokens": i, "reward/mean": reward}
        for i, reward in enumerate(rewards)
    ]
    (log.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (panel,) = charts.metric_panels(open_sources([log.path]))
    assert len(panel.series[0]["value"]) == 200
    assert np.mean(panel.series[0]["value"]) == pytest.approx(rewards.mean(), abs=1e-5)


def test_a_method_keeps_its_colour_and_its_seeds_are_told_apart(tmp_path):
    paths = [
        make_run(tmp_path / f"{m}{s}", method=m, seed=s) for m in ("cvpo", "ppo") for s in (1, 2)
    ]
    first, second, black, _ = charts.looks(open_sources(paths))
    assert first.color == second.color == method_color("cvpo")
    assert first.dash != second.dash
    assert black.color == "currentColor"  # of the page: black on black would not be seen


def test_only_what_differs_is_listed(tmp_path):
    paths = [
        make_run(tmp_path / "a", config={"actor": {"lr": 1e-4, "passes": 1}, "run_dir": "x"}),
        make_run(tmp_path / "b", config={"actor": {"lr": 2e-4, "passes": 1}, "run_dir": "y"}),
    ]
    found = {source.name: runs.settings(source) for source in open_sources(paths)}
    assert runs.differences(found) == {"actor.lr": ["0.0001", "0.0002"]}
    assert found["a"]["packages.numpy"] == np.__version__


def test_the_extremes_are_the_lowest_and_the_highest_of_the_last_evaluation(tmp_path):
    (source,) = open_sources([make_run(tmp_path / "a")])
    evaluated, rolled = examples.extremes(source)
    assert evaluated.title == "Evaluation at step 12; change since step 0"
    assert [p.name for p in evaluated.worst] == ["AMC: p0", "AIME: p3", "AIME: p0", "AMC: p2"]
    assert [p.name for p in evaluated.best] == ["AIME: p2", "AMC: p1", "AIME: p1", "AMC: p3"]
    assert [p.change for p in evaluated.worst] == [-0.25, 0, 0.25, 0.25]
    assert [p.success for p in rolled.worst] == [0.0, 0.25]
    assert (rolled.best[0].text, rolled.best[0].gold, rolled.best[0].of) == ("2+2=", "4", 4)


def test_tracked_prompts_are_those_of_the_last_round(tmp_path):
    path = make_run(tmp_path / "a")
    for number in (0, 1):
        successes = [0, 1, 3, 4] if number else [4, 4, 4, 4]
        rows = {"step": 6 + number, "prompt_id": range(4), "visits": 1 + number, "trials": 4}
        more = {"successes": successes, "alpha": 2, "beta": 2, "rho": 0.5, "delta": 0.25}
        rows |= more | {"phase": "early"}
        RunLog.open(path).prompts(number, pd.DataFrame(rows))
    _, tracked = examples.extremes(open_sources([path])[0])
    assert tracked.title == "Training prompts in round 1 (step 7); change of the tracked rate"
    assert [p.success for p in tracked.worst] == [0, 0.25]
    assert tracked.best[0].success == 1
    assert tracked.best[0].change == pytest.approx(0.5 - 0.5 / 1.25)


def test_responses_are_of_both_outcomes_and_of_the_last_step_alone(tmp_path):
    path = make_run(tmp_path / "a")
    for file in (path / "trajectories").glob("*.parquet"):
        if int(file.stem) < 12:
            file.write_bytes(b"")  # whoever reads an earlier step fails
    step, found = examples.responses(open_sources([path])[0])
    assert step == 12
    assert [response.correct for response in found] == [0, 0, 0, 1, 1, 1]
    assert {response.text for response in found} == {"2+2=4"}
    assert dict(found[0].facts)["reward"] == "-1"


# --------------------------------------------------------------------------------- what is refused


def test_nothing_from_a_log_is_code(tmp_path):
    name = "<b>x{{ 7 * 7 }}"
    path = make_run(tmp_path / name, text=EVIL, response=EVIL + "\x00", config={"note": EVIL})
    page = report(open_sources([path]))
    assert page.count("<script") == page.count("</script>") == 3
    before_scripts, data, *_ = page.split("<script")
    assert "<img" not in before_scripts + data
    assert "<b>x" not in page
    assert json.loads(data.split(">", 1)[1].split("</script>")[0])["runs"] == [name]
    shown = text_of(page)
    assert shown.count(EVIL) > 10
    assert EVIL + "\N{SYMBOL FOR NULL}" in shown


def test_what_cannot_be_seen_is_shown_by_its_name():
    assert visible("a\x00\x1b\x7f\nb") == "a\u2400\u241b\u2421\nb"
    assert (
        visible("\ud800 \u202e \u200b")
        == "\u27e8U+D800\u27e9 \u27e8U+202E\u27e9 \u27e8U+200B\u27e9"
    )
    assert visible("2 × π = 6.28\n") == "2 × π = 6.28\n"


@given(st.text(st.characters(), max_size=200))
def test_text_of_a_log_can_always_be_written_and_shows_nothing_invisible(text):
    shown = visible(text)
    shown.encode()
    assert all(c.isprintable() or c in "\n\t\xa0" for c in shown)


def test_an_endless_text_is_cut_in_the_middle():
    shown = visible("a" * 5000 + "b" * 5000)
    assert len(shown) < 4100
    assert shown.startswith("aaa")
    assert shown.endswith("bbb")
    assert "[... 6,000 characters left out ...]" in shown


def test_the_page_is_one_file_of_few_bytes_and_the_same_each_time(tmp_path, capsys):
    path, output = make_run(tmp_path / "a"), tmp_path / "out" / "report.html"
    assert main(["report", str(path), "-o", str(output)]) == 0
    assert "wrote" in capsys.readouterr().out
    page = output.read_text(encoding="utf-8")
    assert output.stat().st_size < 2e6
    assert report(open_sources([path])) == page
    outside = re.findall(r"""(?:src|href)\s*=\s*["']?(?!#)([^"'\s>]+)""", page.split("<script")[0])
    assert [link for link in outside if "w3.org" not in link] == []


def test_without_scripts_the_tables_and_pictures_are_there(tmp_path):
    page = report(open_sources([make_run(tmp_path / "a")]))
    before_scripts = page.split("<script")[0]
    assert before_scripts.count('class="marks"') == before_scripts.count('class="panel"') > 4
    shown = text_of(page)
    for said in ("avg@4 (%)", "46.9", "Worst and best problems", "2+2=4", "training step"):
        assert said in shown


# ------------------------------------------------------------------------------------- other logs


@pytest.mark.skipif(not SHARED.exists(), reason=f"needs {SHARED}")
def test_a_peers_log_gives_a_report_that_says_what_it_lacks():
    names = ("verl_ppo_gsm8k_metrics.jsonl", "qwen_math_groups_as_verl_dump.jsonl")
    shown = text_of(report(open_sources([SHARED / name for name in names])))
    assert "val/test_score/openai/gsm8k" in shown
    assert "not logged by verl-jsonl: events, prompts, evals, tokens" in shown
    assert "No metrics in this log, so nothing is judged." in shown
    assert "Responses to read" in shown
    assert "Results" not in shown


def test_a_study_gives_its_tables(tmp_path):
    config = {"study": "weights"}
    log = RunLog.create(
        tmp_path / "s", config=config, seed=0, method="sim-weights", verifier="exact"
    )
    log.table(
        "study", pd.DataFrame({"claim": ["one <b>"], "value": [0.123456], "step": [math.nan]})
    )
    shown = text_of(report(open_sources([log.path])))
    assert "tables/study" in shown
    assert "one <b>" in shown
    assert "0.1235" in shown
    assert "Curves" not in shown


def test_a_log_that_has_just_begun_gives_a_report(tmp_path):
    log = RunLog.create(tmp_path / "new", config={}, seed=0, method="ppo", verifier="exact")
    assert "No metrics in this log" in text_of(report(open_sources([log.path])))


def test_a_damaged_log_is_one_line_of_error(tmp_path, capsys):
    path = make_run(tmp_path / "a")
    max((path / "evals").glob("*.parquet")).write_bytes(b"PAR1")
    assert main(["report", str(path), "-o", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert "is not a whole Parquet file" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r.html").exists()
