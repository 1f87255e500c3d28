"""Small logs of trainings with every part that has values or weights, for tests of the figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cvpo import METHODS, RunLog
from cvpo.metrics import calibration

PROMPTS, SAMPLES, TOKENS = 8, 4, 6
VOCABULARY = (" the", "\n", "\\boxed", "7", "", "你")


def write_values(
    path: Path,
    *,
    method: str = "cvpo",
    seed: int = 1,
    steps: int = 12,
    critic: bool = True,
    shift: float = 0.0,
    switch: int | None = None,
    scored_by: str | None = None,
    scalars: Mapping[str, float | None] | None = None,
    without: Collection[str] = (),
) -> Path:
    """Write a run of steps 1 to `steps`, with a round and the value tables at every fourth.

    Args:
        path: its folder.
        method: decides which weights there are.
        seed: of the run and of its numbers.
        steps: how many.
        critic: whether there are values.
        shift: added to log sigma.
        switch: step whose end switches the phase.
        scored_by: name of a frozen critic that sees twice the sigma.
        scalars: metrics in place of the usual ones; None leaves one out.
        without: parts that are not written.
    """
    log = RunLog.create(path, config={"steps": steps}, seed=seed, method=method, verifier="exact")
    parts = set(without)
    for step in range(1, steps + 1):
        rng = np.random.default_rng([seed, len(method), step])
        rows = _trajectories(rng, method, critic=critic, shift=shift)
        if "trajectories" not in parts:
            log.trajectories(step, rows)
        if scored_by:
            scored = {
                key: rows[key] for key in ("prompt_id", "sample", "value_first", "value_mean")
            }
            log.scores(scored_by, step, scored | {"sigma": 2 * rows["sigma"]})
        if step % 4 == 0:
            _tables(log, step, rng, rows, critic=critic, parts=parts)
        if "metrics" not in parts:
            _metrics(log, step, rng, method, critic=critic, scalars=scalars or {})
        if step == switch:
            log.event(step, "phase_switch", "round 1: bottleneck")
    return path


def _trajectories(
    rng: np.random.Generator, method: str, *, critic: bool, shift: float
) -> dict[str, Any]:
    n = PROMPTS * SAMPLES
    correct = (rng.random(n) < 0.5).astype(float)
    declared = METHODS[method]
    rows: dict[str, Any] = {
        "prompt_id": np.repeat(np.arange(PROMPTS), SAMPLES),
        "sample": np.tile(np.arange(SAMPLES), PROMPTS),
        "length": rng.integers(1, 50, n),
        "truncated": np.zeros(n, dtype=bool),
        "reward": 2 * correct - 1,
        "correct": correct,
        "w_s": 1 + 0.3 * (2 * correct - 1) * rng.random(n)
        if declared.stochasticity
        else np.ones(n),
        "w_d": 0.5 + rng.random(n) if declared.curriculum else np.ones(n),
        "rho": np.repeat(rng.random(PROMPTS), SAMPLES),
        "round": np.zeros(n, dtype=int),
        "advantage_mean": rng.normal(size=n),
    }
    if critic:
        rows |= {
            "sigma": np.exp(rng.normal(-2.5 + shift, 0.3, n)),
            "mu": np.full(n, 0.1),
            "value_first": rng.uniform(-1, 1, n),
            "value_mean": rng.uniform(-1, 1, n),
        }
    return rows


def _tables(
    log: RunLog,
    step: int,
    rng: np.random.Generator,
    rows: Mapping[str, Any],
    *,
    critic: bool,
    parts: Collection[str],
) -> None:
    trials = np.full(PROMPTS, SAMPLES)
    if "prompts" not in parts:
        solved = rng.binomial(SAMPLES, rng.random(PROMPTS)).astype(float)
        log.prompts(
            step // 4 - 1,
            {
                "step": [step] * PROMPTS,
                "round": [step // 4 - 1] * PROMPTS,
                "prompt_id": range(PROMPTS),
                "visits": [step // 4] * PROMPTS,
                "trials": trials,
                "successes": solved,
                "alpha": 1 + solved,
                "beta": 1 + trials - solved,
                "rho": (1 + solved) / (2 + trials),
                "phase": ["early"] * PROMPTS,
            },
        )
    if not critic:
        return
    count = rng.integers(20, 200, len(VOCABULARY))
    value = rng.uniform(-1, 1, len(VOCABULARY))
    if "tokens" not in parts:
        log.tokens(
            step,
            {
                "token_id": range(len(VOCABULARY)),
                "token": VOCABULARY,
                "count": count,
                "value_sum": count * value,
                "value_sq_sum": count * (value**2 + 0.04),
            },
        )
    if "calibration" not in parts:
        correct = np.asarray(rows["correct"])
        values = rng.uniform(-1, 1, (len(correct), TOKENS))
        returns = np.repeat(2 * correct[:, None] - 1, TOKENS, axis=1)
        mask = np.ones_like(values, dtype=bool)
        log.calibration(step, calibration(values, returns, mask, correct, position_bins=6))


def _metrics(
    log: RunLog,
    step: int,
    rng: np.random.Generator,
    method: str,
    *,
    critic: bool,
    scalars: Mapping[str, float | None],
) -> None:
    declared = METHODS[method]
    usual: dict[str, float | None] = {
        "weights/w_s_cv": 0.1 * declared.stochasticity,
        "weights/w_d_cv": 0.2 * declared.curriculum,
    }
    if critic:
        usual |= {f"sigma/corr_{name}": rng.uniform(-1, 1) for name in ("entropy", "length")}
        usual |= {"sigma/corr_surprise": step / 100}
    found = {name: value for name, value in (usual | {**scalars}).items() if value is not None}
    log.metrics(step, time=0.0, device_seconds=float(step), tokens=step, scalars=found)
