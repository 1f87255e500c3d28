"""Simulated trainings from beginning to end: what happened in them, as arrays.

`simulate` runs settings that differ in numbers only, side by side; `compare` takes any settings,
sorts them into such batches and spreads those over all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from sim.bandit import BanditConfig
from sim.record import Recorder
from sim.study import Desk
from sim.training import Budget, Setting, Step, Training

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Trace:
    """What happened in R runs, E readings apart. Axes: E readings, S steps, R runs, N prompts."""

    seeds: tuple[int, ...]
    """Of each run, [R]."""
    settings: tuple[str, ...]
    """Name of each run's setting, [R]."""
    steps: Int[Array, " E"]
    """Updates before each reading."""
    rates: Float[Array, "E R N"]
    """True success rates; held-out prompts come last."""
    tracked: Float[Array, "E R N"]
    """The tracker's rates of the prompts that are trained."""
    weight: Float[Array, "E R N"]
    """W_D of the prompts that are trained; 1 where the method has none."""
    high_share: Float[Array, "E R"]
    """True share of responses of high spread, mean over prompts that are trained."""
    high_log_odds: Float[Array, "E R 2"]
    """Log-odds of high spread among wrong and among correct responses, mean over the same."""
    rollouts: Int[Array, "E R"]
    """Responses generated so far, discarded ones included."""
    discarded: Int[Array, "E R"]
    """Those whose groups were dropped."""
    accuracy: Float[Array, "S R"]
    """Mean R of the responses that a step trained on."""
    sigma: Float[Array, "S R"]
    """Their mean sigma."""
    w_s: Float[Array, "S R 2"]
    """Mean W_S of wrong and of correct ones; NaN where there are none."""
    switched: Float[Array, " R"]
    """The step in which the phase switched; NaN if it never did."""

    def run(self, index: int) -> Trace:
        """One run alone."""
        return _select(self, [index])


def simulate(
    world: BanditConfig,
    budget: Budget,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    watch: Callable[[Training, Step | None], None] | None = None,
) -> Trace:
    """Trains every setting in every seed's world.

    Args:
        world: The bandit.
        budget: Batch and steps.
        settings: They differ in numbers only (`Setting.shared`); see `compare` for others.
        seeds: Of the worlds.
        watch: Called before the first step (with None) and after each one.

    Raises:
        ValueError: See `Training`.
    """
    training = Training(world, budget, settings, seeds)
    if watch is not None:
        watch(training, None)
    readings, series = [_read(training)], []
    for number in range(1, budget.steps + 1):
        done = training.step()
        series.append(_summary(training, done))
        if watch is not None:
            watch(training, done)
        if number % budget.every == 0 or number == budget.steps:
            readings.append(_read(training))
    read = {name: np.stack([r[name] for r in readings]) for name in readings[0]}
    said = {name: np.stack([s[name] for s in series]) for name in series[0]}
    return Trace(
        seeds=tuple(training.seeds),
        settings=tuple(setting.name for setting in training.settings),
        switched=training.switched.numpy(),
        **read,
        **said,
    )


def compare(
    desk: Desk,
    world: BanditConfig,
    budget: Budget,
    settings: Sequence[Setting],
    *,
    desc: str,
    logged: bool = False,
    seeds: Sequence[int] | None = None,
) -> dict[str, Trace]:
    """Settings of any kind in the worlds of the desk's seeds, on all cores: name -> trace [seeds].

    Args:
        desk: The study's.
        world: The bandit.
        budget: Batch and steps.
        settings: Of distinct names.
        desc: What the progress bar says.
        logged: Whether each run writes a run log of its own, below the study's folder.
        seeds: Of other worlds than the desk's.

    Raises:
        ValueError: Two settings share a name, or the budget is impossible.
    """
    names = [setting.name for setting in settings]
    if len(set(names)) < len(names):
        raise ValueError(f"settings must have distinct names, got {names}")
    seeds = desk.settings.seeds if seeds is None else seeds
    folder = desk.folder / "runs" if logged else None
    rows = desk.settings.trajectories
    batches = list(_batches(settings, runs=max(1, _ROWS // (world.prompts * len(seeds)))))
    traces = desk.map(
        _simulate, [(world, budget, batch, seeds, folder, rows) for batch in batches], desc=desc
    )
    found = {}
    for batch, trace in zip(batches, traces, strict=True):
        for index, setting in enumerate(batch):
            first = index * len(seeds)
            found[setting.name] = _select(trace, range(first, first + len(seeds)))
    return {name: found[name] for name in names}


_ROWS = 1 << 17
"""About so many prompts, over all runs, are carried side by side: then arrays stay in cache."""


def _simulate(
    world: BanditConfig,
    budget: Budget,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    folder: Path | None,
    rows: bool,
) -> Trace:
    watch = None if folder is None else Recorder(folder, world, budget, trajectories=rows)
    return simulate(world, budget, settings, seeds, watch=watch)


def _batches(settings: Sequence[Setting], *, runs: int) -> Iterator[list[Setting]]:
    alike: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in settings:
        alike.setdefault(setting.shared, []).append(setting)
    for group in alike.values():
        for start in range(0, len(group), runs):
            yield group[start : start + runs]


def _read(training: Training) -> dict[str, Array]:
    prompts = training.prompts
    shape = (len(training.seeds), prompts)
    return {
        "steps": np.asarray(training.updates),
        "rates": training.bandit.rates().numpy(),
        "tracked": training.tracker.rho.view(shape).float().numpy(),
        "weight": training.weights().numpy(),
        "high_share": training.bandit.high_share()[:, :prompts].mean(1).numpy(),
        "high_log_odds": training.bandit.high_log_odds()[:, :prompts].mean(1).numpy(),
        "rollouts": training.rollouts.numpy().copy(),
        "discarded": training.discarded.numpy().copy(),
    }


def _summary(training: Training, step: Step) -> dict[str, Array]:
    runs, rollouts = len(training.seeds), step.responses.kind.shape[1]
    owner = step.run.repeat_interleave(rollouts)
    correct = step.responses.correct.flatten()
    count = torch.bincount(owner, minlength=runs)
    cell = 2 * owner + (correct >= 0.5)
    cells = torch.bincount(cell, minlength=2 * runs)
    total = torch.bincount(cell, weights=step.w_s, minlength=2 * runs)
    return {
        "accuracy": (torch.bincount(owner, weights=correct, minlength=runs) / count).numpy(),
        "sigma": (torch.bincount(owner, weights=step.sigma, minlength=runs) / count).numpy(),
        "w_s": (total / cells).view(runs, 2).numpy(),
    }


def _select(trace: Trace, runs: Sequence[int] | range) -> Trace:
    """Some runs of a trace. The axis of runs is the first of per-run fields, else the second."""
    chosen = list(runs)
    return replace(
        trace,
        seeds=tuple(trace.seeds[run] for run in chosen),
        settings=tuple(trace.settings[run] for run in chosen),
        switched=trace.switched[chosen],
        **{
            name: getattr(trace, name)[:, chosen]
            for name in (
                "rates",
                "tracked",
                "weight",
                "high_share",
                "high_log_odds",
                "rollouts",
                "discarded",
                "accuracy",
                "sigma",
                "w_s",
            )
        },
    )
