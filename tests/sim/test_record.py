"""Run logs of simulated trainings, read back and held against what truly happened."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from cvpo import (
    CurriculumConfig,
    difficulty_weight,
    read_evals,
    read_events,
    read_metrics,
    read_problems,
    read_prompts,
    read_run,
    read_trajectories,
)
from cvpo.runlog import MissingPartError
from sim.bandit import BanditConfig
from sim.record import BANDS, SAMPLES, Recorder, bands
from sim.study import Desk, Settings
from sim.trace import Trace, compare, simulate
from sim.training import Budget, Setting, Step, Training

ROOT = Path(__file__).parents[2]
WORLD = BanditConfig(prompts=21, held_out=9)
BUDGET = Budget(batch=5, rollouts=4, steps=32, every=10)
SOON = CurriculumConfig(low_delta=1e9, high_delta=1e9)
NEVER = CurriculumConfig(high_delta=-1e9)
FORMS = [Setting("soon", curriculum=SOON), Setting("never", curriculum=NEVER)]
SEEDS = (3, 8)


class Told:
    """What happened, as the training itself says after each step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.steps: list[Step] = []
        self.rates: list[Tensor] = []
        self.rounds: list[list[int]] = []
        self.difficulty: Tensor = torch.empty(0)

    def __call__(self, training: Training, step: Step | None) -> None:
        self.recorder(training, step)
        self.rates.append(training.bandit.rates())
        self.rounds.append([detector.rounds for detector in training.detectors])
        self.difficulty = training.difficulty
        if step is not None:
            self.steps.append(step)


def record(
    folder: Path,
    world: BanditConfig = WORLD,
    budget: Budget = BUDGET,
    forms: list[Setting] = FORMS,
    *,
    trajectories: bool = False,
) -> tuple[Trace, Told]:
    told = Told(Recorder(folder, world, budget, trajectories=trajectories))
    return simulate(world, budget, forms, SEEDS, watch=told), told


def parts(frame: pd.DataFrame, column: str) -> Iterator[tuple[int, pd.DataFrame]]:
    """The rows of each step or round, in order."""
    for number in sorted(frame[column].unique().tolist()):
        yield number, frame[frame[column] == number]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace, Told]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, *record(folder, trajectories=True)


RUNS = [(index, f"{form.name}-{seed}") for index, (form, seed) in enumerate(
    (form, seed) for form in FORMS for seed in SEEDS
)]  # fmt: skip
each_run = pytest.mark.parametrize(("run", "name"), RUNS, ids=[name for _, name in RUNS])
Recorded = tuple[Path, Trace, Told]


@each_run
def test_run_yaml_says_what_was_run(recorded: Recorded, run: int, name: str) -> None:
    said = read_run(recorded[0] / name)
    assert said["seed"] == SEEDS[run % 2]
    assert said["method"] == FORMS[run // 2].name
    assert said["config"]["world"]["prompts"] == 21
    assert said["config"]["budget"]["steps"] == 32
    assert said["config"]["setting"]["method"] == "cvpo"
    assert said["config"]["setting"]["curriculum"]["high_delta"] == (1e9 if run < 2 else -1e9)


@each_run
def test_problems_have_the_measured_difficulty_and_thirds_by_true_rate(
    recorded: Recorded, run: int, name: str
) -> None:
    folder, _, told = recorded
    problems = read_problems(folder / name)
    assert problems["prompt_id"].tolist() == list(range(21))
    np.testing.assert_allclose(problems["difficulty"], told.difficulty[run])
    rates = told.rates[0][run, :21].numpy()
    assert problems["level"].value_counts().to_dict() == dict.fromkeys(BANDS, 7)
    by_level = [rates[problems["level"] == level] for level in BANDS]
    assert by_level[0].max() <= by_level[1].min()
    assert by_level[1].max() <= by_level[2].min()


@each_run
def test_metrics_are_those_of_the_training(recorded: Recorded, run: int, name: str) -> None:
    folder, trace, told = recorded
    metrics = read_metrics(folder / name)
    assert metrics["step"].tolist() == trace.steps.tolist() == [0, 10, 20, 30, 32]
    np.testing.assert_allclose(
        metrics["accuracy/true"], trace.rates[:, run, :21].mean(1), rtol=1e-5
    )
    assert metrics["tokens"].tolist() == (16 * trace.rollouts[:, run]).tolist()
    assert bool((metrics["device_seconds"].diff().iloc[1:] > 0).all())
    late = metrics.iloc[1:].reset_index(drop=True)
    logged = late["step"].to_numpy() - 1
    np.testing.assert_allclose(late["accuracy/mean"], trace.accuracy[logged, run], rtol=1e-5)
    np.testing.assert_allclose(late["sigma/mean"], trace.sigma[logged, run], rtol=1e-4)
    np.testing.assert_allclose(
        late[["weights/w_s_mean_incorrect", "weights/w_s_mean_correct"]],
        trace.w_s[logged, run],
        rtol=1e-4,
    )
    switched = trace.switched[run]
    assert late["curriculum/phase"].tolist() == (late["step"] >= switched).tolist()
    for row, step in zip(late.to_dict("records"), logged, strict=True):
        mine = told.steps[step].run == run
        solved = told.steps[step].responses.correct[mine].mean(1)
        assert row["groups/all_correct"] == pytest.approx((solved == 1).float().mean().item())
        assert row["groups/all_wrong"] == pytest.approx((solved == 0).float().mean().item())
        assert row["reward/mean"] == pytest.approx(2 * solved.mean().item() - 1, abs=1e-6)
        assert row["weights/w_d_mean"] == pytest.approx(
            told.steps[step].w_d[mine].mean().item(), rel=1e-5
        )


@each_run
def test_rounds_say_true_rates_counts_and_the_phase_they_were_in(
    recorded: Recorded, run: int, name: str
) -> None:
    folder, trace, told = recorded
    prompts = read_prompts(folder / name)
    assert sorted(prompts["round"].unique()) == list(range(5 * 32 // 21))
    total = np.zeros((2, 21))
    for number, rows in parts(prompts, "round"):
        step = int(rows["step"].iloc[0])
        assert step == -(-21 * (number + 1) // 5)
        np.testing.assert_allclose(rows["true_rho"], told.rates[step][run, :21])
        total += rows[["trials", "successes"]].to_numpy().T
        # Without forgetting the posterior is the prior and all counts.
        np.testing.assert_allclose(rows["alpha"], 1 + total[1])
        np.testing.assert_allclose(rows["beta"], 1 + total[0] - total[1])
        np.testing.assert_allclose(rows["rho"], rows["alpha"] / (rows["alpha"] + rows["beta"]))
        assert rows["visits"].tolist() == (total[0] / 4).tolist()
        groups = [s.responses for s in told.steps[:step]]
        mine = [s.run == run for s in told.steps[:step]]
        solved = sum(float(r.correct[m].sum()) for r, m in zip(groups, mine, strict=True))
        assert total[1].sum() == solved
        assert total[0].sum() == 4 * 5 * step
        (phase,) = rows["phase"].unique()
        assert phase == ("bottleneck" if step > trace.switched[run] else "early")
        weight = difficulty_weight(torch.tensor(rows["rho"].to_numpy()), phase=phase)
        np.testing.assert_allclose(rows["w_d"], weight, rtol=1e-5)


@each_run
def test_the_switch_is_an_event(recorded: Recorded, run: int, name: str) -> None:
    folder, trace, _ = recorded
    if run < 2:
        (event,) = read_events(folder / name).to_dict("records")
        assert event["kind"] == "phase_switch"
        assert event["step"] == trace.switched[run]
        assert "bottleneck; printed detector: low set" in event["message"]
    else:
        assert np.isnan(trace.switched[run])
        assert not (folder / name / "events.jsonl").exists() or read_events(folder / name).empty


@each_run
def test_trajectories_are_those_of_the_step(recorded: Recorded, run: int, name: str) -> None:
    folder, trace, told = recorded
    rows = read_trajectories(folder / name)
    assert sorted(rows["step"].unique()) == [10, 20, 30, 32]
    for number, part in parts(rows, "step"):
        step = told.steps[number - 1]
        mine = step.run == run
        chosen = mine.repeat_interleave(4)
        responses = step.responses
        np.testing.assert_allclose(part["correct"], responses.correct[mine].flatten())
        np.testing.assert_allclose(part["reward"], 2 * part["correct"] - 1)
        for column, tensor in (("sigma", step.sigma), ("mu", step.mu), ("w_s", step.w_s)):
            np.testing.assert_allclose(part[column], tensor[chosen], rtol=1e-6)
        values = responses.values[mine].flatten(0, 1)
        np.testing.assert_allclose(part["value_first"], values[:, 0])
        np.testing.assert_allclose(part["value_mean"], values.mean(1), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(part["entropy_mean"], responses.entropy[mine].flatten())
        np.testing.assert_allclose(part["advantage_mean"], step.raw[chosen].mean(1), atol=1e-6)
        prompt = (responses.row[mine] - run * 30).repeat_interleave(4)
        assert part["prompt_id"].tolist() == prompt.tolist()
        assert not part.duplicated(["prompt_id", "sample"]).any()
        # The round that the rollouts belong to, also where it ends with this step.
        assert part["round"].unique().tolist() == [told.rounds[number - 1][run]]
        phase = "bottleneck" if number > trace.switched[run] else "early"
        weight = difficulty_weight(torch.tensor(part["rho"].to_numpy()), phase=phase)
        np.testing.assert_allclose(part["w_d"], weight, rtol=1e-5)


def test_a_prompt_drawn_twice_in_a_step_goes_on_counting_its_samples(tmp_path: Path) -> None:
    world, budget = replace(WORLD, prompts=7), Budget(5, 4, 4, every=1)
    record(tmp_path, world, budget, FORMS[:1], trajectories=True)
    rows = read_trajectories(tmp_path / "soon-3")
    assert not rows.duplicated(["step", "prompt_id", "sample"]).any()
    assert rows["sample"].max() > 3


@each_run
def test_benchmarks_are_thirds_of_the_held_out_prompts(
    recorded: Recorded, run: int, name: str
) -> None:
    folder, _, told = recorded
    evals = read_evals(folder / name)
    assert sorted(evals["step"].unique()) == [0, 10, 20, 30, 32]
    start = told.rates[0][run, 21:]
    scores = read_metrics(folder / name)
    for step, part in parts(evals, "step"):
        said = scores[scores["step"] == step].iloc[0]
        assert part["problem_id"].nunique() == 9
        assert not part.duplicated(["problem_id", "sample"]).any()
        assert len(part) == 9 * SAMPLES
        assert set(part["problem_id"].astype(int)) == set(range(21, 30))
        for benchmark, index in zip(BANDS, range(3), strict=True):
            inside = part[part["benchmark"] == benchmark]
            chosen = inside["problem_id"].astype(int).unique() - 21
            assert (bands(start)[torch.tensor(chosen)] == index).all()
            assert said[f"eval/{benchmark}"] == pytest.approx(inside["exact"].mean())
        assert said["eval/all"] == pytest.approx(part["exact"].mean())


def test_verdicts_come_as_often_as_the_true_rates_say(tmp_path: Path) -> None:
    world = BanditConfig(prompts=2000, stops_after=0)
    budget = Budget(batch=1, rollouts=1, steps=4, every=1)
    _, told = record(tmp_path, world, budget, FORMS[:1])
    evals = read_evals(tmp_path / "soon-3")
    rate = told.rates[0][0].numpy()
    chance = rate[evals["problem_id"].astype(int)]
    # Nothing is held out: the benchmarks are the trained prompts.
    assert evals["problem_id"].nunique() == 2000
    for part in np.array_split(np.argsort(chance), 10):
        error = math.sqrt((chance[part] * (1 - chance[part])).mean() / len(part))
        found = evals["exact"].to_numpy()[part].mean()
        assert found == pytest.approx(chance[part].mean(), abs=5 * error)
    by_step = evals.pivot_table(index="step", columns=["problem_id", "sample"], values="exact")
    assert not by_step.duplicated().any()  # drawn anew each time


def test_trajectories_are_written_only_if_asked_for(tmp_path: Path) -> None:
    record(tmp_path)
    for _, name in RUNS:
        with pytest.raises(MissingPartError):
            read_trajectories(tmp_path / name)


def test_recording_changes_nothing(recorded: Recorded) -> None:
    plain = simulate(WORLD, BUDGET, FORMS, SEEDS)
    np.testing.assert_array_equal(plain.rates, recorded[1].rates)
    np.testing.assert_array_equal(plain.tracked, recorded[1].tracked)


def test_a_second_recording_in_the_same_place_is_refused(tmp_path: Path) -> None:
    budget = replace(BUDGET, steps=1)
    record(tmp_path, budget=budget)
    with pytest.raises(FileExistsError, match="already holds a run"):
        record(tmp_path, budget=budget)


def test_a_step_without_any_group_is_recorded_as_missing(tmp_path: Path) -> None:
    world = replace(WORLD, difficulty_mean=-20, difficulty_sd=0)
    record(tmp_path, world, replace(BUDGET, steps=2), [Setting("x", "dapo")], trajectories=True)
    metrics = read_metrics(tmp_path / "x-3")
    assert metrics["step"].tolist() == [0, 2]
    assert np.isnan(metrics["accuracy/mean"].iloc[-1])
    assert metrics["tokens"].iloc[-1] == 2 * 5 * 5 * 4 * 16


@pytest.mark.parametrize("n", [1, 2, 3, 4, 30, 31])
def test_bands_are_thirds_by_rank(n: int) -> None:
    rates = torch.rand(n, generator=torch.Generator().manual_seed(n))
    band = bands(rates)
    assert torch.equal(band[torch.argsort(rates)], torch.arange(n) * 3 // n)
    assert band.bincount(minlength=3).max() - band.bincount(minlength=3).min() <= 1


def test_equal_rates_are_banded_by_position() -> None:
    assert bands(torch.zeros(6)).tolist() == [0, 0, 1, 1, 2, 2]


def test_compare_logs_every_run_below_the_studys_folder(tmp_path: Path) -> None:
    settings = Settings(seeds=SEEDS, output=tmp_path, jobs=1, backend="sequential")
    desk = Desk("trial", settings)
    forms = [*FORMS, Setting("plain", "vapo")]
    traces = compare(desk, WORLD, BUDGET, forms, desc="logging", logged=True)
    found = {folder.name for folder in (desk.folder / "runs").iterdir()}
    assert found == {f"{form.name}-{seed}" for form in forms for seed in SEEDS}
    metrics = read_metrics(desk.folder / "runs" / "plain-8")
    np.testing.assert_allclose(
        metrics["accuracy/true"], traces["plain"].rates[:, 1, :21].mean(1), rtol=1e-5
    )


@pytest.mark.parametrize("rows", [False, True])
def test_trajectories_are_logged_where_they_are_asked_for(tmp_path: Path, rows: bool) -> None:
    settings = Settings(
        seeds=(0,), output=tmp_path, jobs=1, backend="sequential", trajectories=rows
    )
    desk = Desk("trial", settings)
    compare(desk, WORLD, BUDGET, [Setting("plain", "vapo")], desc="logging", logged=True)
    assert (desk.folder / "runs" / "plain-0" / "trajectories").exists() == rows


@pytest.mark.slow
def test_the_analysis_reads_simulated_runs(recorded: Recorded, tmp_path: Path) -> None:
    folder, _, _ = recorded
    runs = [str(folder / name) for name in ("soon-3", "never-3")]
    command = [sys.executable, "-m", "analysis", "summary", *runs, "-o", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "out" / "summary.csv")
    assert set(table["benchmark"]) >= set(BANDS)
    assert "soon" in done.stdout
    assert "never" in done.stdout
    first = table[(table["run"] == "soon-3") & (table["evaluation"] == "first")]
    evals = read_evals(folder / "soon-3")
    start = evals[evals["step"] == 0].groupby("benchmark")["exact"].mean()
    for benchmark in BANDS:
        row = first[first["benchmark"] == benchmark].iloc[0]
        assert row["accuracy"] == pytest.approx(start[benchmark], abs=1e-6)
