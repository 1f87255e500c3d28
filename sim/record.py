"""The run logs of simulated trainings: the same file format as the trainer's."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cvpo import RunLog, weight_diagnostics

if TYPE_CHECKING:
    from sim.bandit import BanditConfig
    from sim.training import Budget, EndedRound, Step, Training

BANDS = ("hard", "medium", "easy")
"""Benchmarks of a simulated run: thirds of the prompts by their rate at the start."""

SAMPLES = 8
"""Responses to each problem of a benchmark."""


def bands(rates: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Index into `BANDS` of every prompt: thirds by rank, ties by position."""
    order = torch.argsort(rates, stable=True)
    band = torch.empty(len(rates), dtype=torch.int64)
    band[order] = torch.arange(len(rates)) * len(BANDS) // len(rates)
    return band


class Recorder:
    """Writes one run log for each run of a `Training`, in folders ``<setting>-<seed>``.

    Benchmarks are the held-out prompts, or the trained ones where none are held out; their
    responses are drawn from the true rates.
    """

    def __init__(
        self, folder: Path, world: BanditConfig, budget: Budget, *, trajectories: bool = False
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: Where the runs' folders go.
            world: The bandit.
            budget: Batch and steps; metrics and benchmarks are written every `Budget.every` steps.
            trajectories: Whether trajectory rows are written as often. At the paper's size they are
                4096 rows a step.
        """
        self.folder, self.world, self.budget = folder, world, budget
        self.trajectories = trajectories
        self.logs: list[RunLog] = []
        self.start = time.perf_counter()

    def __call__(self, training: Training, step: Step | None) -> None:
        """What happened in a step, or the start (None)."""
        if step is None:
            self._open(training)
            self._metrics(training, None)
            return
        for run, ended in step.ended.items():
            self._round(training, run, ended)
        if training.updates % self.budget.every == 0 or training.updates == self.budget.steps:
            self._metrics(training, step)

    def _open(self, training: Training) -> None:
        rates = training.bandit.rates()
        first = self.world.prompts if self.world.held_out else 0
        self.benchmark = torch.arange(first, rates.shape[1])
        self.band = [bands(row[self.benchmark]) for row in rates]
        self.generators = [np.random.default_rng([seed, 5]) for seed in training.seeds]
        for run, (setting, seed) in enumerate(zip(training.settings, training.seeds, strict=True)):
            log = RunLog.create(
                self.folder / f"{setting.name}-{seed}",
                config={
                    "world": asdict(self.world),
                    "budget": asdict(self.budget),
                    "setting": asdict(setting),
                },
                seed=seed,
                method=setting.name,
                verifier="exact",
            )
            trained = rates[run, : self.world.prompts]
            log.problems(
                {
                    "prompt_id": torch.arange(self.world.prompts),
                    "dataset": ["bandit"] * self.world.prompts,
                    "level": [BANDS[band] for band in bands(trained)],
                    "difficulty": training.difficulty[run],
                }
            )
            self.logs.append(log)

    def _metrics(self, training: Training, step: Step | None) -> None:
        rates = training.bandit.rates()
        seconds = (time.perf_counter() - self.start) / len(self.logs)
        tokens = training.rollouts * self.world.responses.tokens
        for run, log in enumerate(self.logs):
            scalars = self._evaluate(training, run, rates[run])
            scalars["accuracy/true"] = rates[run, : self.world.prompts].mean().item()
            if step is not None:
                scalars |= self._of_step(training, run, step)
            log.metrics(
                training.updates,
                time=time.time(),
                device_seconds=seconds,
                tokens=int(tokens[run]),
                scalars=scalars,
            )

    def _of_step(self, training: Training, run: int, step: Step) -> dict[str, float]:
        rollouts = self.budget.rollouts
        mine = step.run == run
        rows = mine.repeat_interleave(rollouts)
        responses = step.responses
        correct = responses.correct[mine].flatten()
        reward = 2 * correct - 1
        first = responses.values[mine][:, :, 0].flatten()
        tokens = self.world.responses.tokens
        lengths = torch.full((len(correct),), tokens)
        found = weight_diagnostics(
            w_s=step.w_s[rows],
            w_d=step.w_d[mine].repeat_interleave(rollouts),
            correct=correct,
            advantage_sum=step.raw[rows].sum(1),
            lengths=lengths,
            sigma=step.sigma[rows],
            entropy=responses.entropy[mine].flatten(),
            surprise=(reward - first).abs(),
        )
        solved = responses.correct[mine].mean(1)
        if self.trajectories:
            self._trajectories(training, run, step, rows)
        return {
            "reward/mean": reward.mean().item(),
            "accuracy/mean": correct.mean().item(),
            "length/mean": float(tokens),
            "groups/all_correct": (solved == 1).float().mean().item(),
            "groups/all_wrong": (solved == 0).float().mean().item(),
            "policy/entropy": responses.entropy[mine].mean().item(),
            "curriculum/phase": float(training.detectors[run].phase == "bottleneck"),
            "rollout/lag": 0.0,
            **found,
        }

    def _trajectories(self, training: Training, run: int, step: Step, rows: Tensor) -> None:
        mine = step.run == run
        groups, rollouts = int(mine.sum()), self.budget.rollouts
        prompt = step.responses.row[mine] - run * training.bandit.size
        values = step.responses.values[mine].flatten(0, 1)
        correct = step.responses.correct[mine].flatten().double()
        tokens = self.world.responses.tokens
        each = torch.arange(groups).repeat_interleave(rollouts)
        # A prompt that is drawn twice in a step goes on counting its samples.
        earlier = (prompt[:, None] == prompt).tril(-1).sum(1)
        rho = training.tracker.rho[run * training.prompts + prompt]
        self.logs[run].trajectories(
            training.updates,
            {
                "step": [training.updates] * len(each),
                "prompt_id": prompt[each],
                "sample": (rollouts * earlier[:, None] + torch.arange(rollouts)).flatten(),
                "length": [tokens] * len(each),
                "truncated": [False] * len(each),
                "reward": 2 * correct - 1,
                "correct": correct,
                "sigma": step.sigma[rows],
                "mu": step.mu[rows],
                "w_s": step.w_s[rows],
                "w_d": step.w_d[mine][each],
                "rho": rho[each],
                "round": [training.detectors[run].rounds - (run in step.ended)] * len(each),
                "value_first": values[:, 0],
                "value_mean": values.mean(1),
                "advantage_mean": step.raw[rows].mean(1),
                "entropy_mean": step.responses.entropy[mine].flatten(),
            },
        )

    def _round(self, training: Training, run: int, ended: EndedRound) -> None:
        prompts, report = training.prompts, ended.report
        tracker, mine = training.tracker, slice(run * prompts, (run + 1) * prompts)
        self.logs[run].prompts(
            report.round - 1,
            {
                "step": [training.updates] * prompts,
                "round": [report.round - 1] * prompts,
                "prompt_id": torch.arange(prompts),
                "visits": tracker.visits[mine],
                "trials": ended.trials.long(),
                "successes": ended.successes,
                "alpha": tracker.alpha[mine],
                "beta": tracker.beta[mine],
                "rho": tracker.rho[mine],
                "delta": tracker.delta[mine],
                "w_d": ended.w_d,
                "phase": [ended.phase] * prompts,
                "true_rho": training.rates()[run].double(),
            },
        )
        if report.switched:
            self.logs[run].event(
                training.updates,
                "phase_switch",
                f"round {report.round}: bottleneck; {report.reason}",
            )

    def _evaluate(
        self, training: Training, run: int, rates: Float[Tensor, " size"]
    ) -> dict[str, float]:
        chance = rates[self.benchmark].double().clamp(0, 1).numpy()
        solved = self.generators[run].random((len(chance), SAMPLES)) < chance[:, None]
        problem = np.repeat(self.benchmark.numpy(), SAMPLES)
        band = self.band[run].numpy()
        verdict = solved.astype(float).ravel()
        rows: dict[str, Any] = {
            "step": [training.updates] * len(problem),
            "benchmark": [BANDS[b] for b in np.repeat(band, SAMPLES)],
            "problem_id": problem.astype(str),
            "sample": np.tile(np.arange(SAMPLES), len(chance)),
            "exact": verdict,
            "normalized": verdict,
            "symbolic": verdict,
            "length": [self.world.responses.tokens] * len(problem),
            "truncated": [False] * len(problem),
        }
        self.logs[run].evals(training.updates, rows)
        scores = {
            f"eval/{name}": solved[band == index].mean().item()
            for index, name in enumerate(BANDS)
            if (band == index).any()
        }
        return {**scores, "eval/all": solved.mean().item()}
