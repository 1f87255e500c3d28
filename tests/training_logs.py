"""Small logs of trainings whose evaluations are known, for tests of the analysis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cvpo import METHODS, RunLog, StochasticityConfig

Verdicts = Mapping[str, np.ndarray | Sequence[Sequence[float]]]
"""Benchmark -> [problems, samples]."""


def config_of(method: str, **stochasticity: Any) -> dict[str, Any]:
    """A trainer's configuration as far as the analysis reads it."""
    default = StochasticityConfig()
    section = {name: getattr(default, name) for name in StochasticityConfig.__dataclass_fields__}
    declared = METHODS[method]
    return {
        "steps": 100,
        "model": {"path": "runs/warmstart"},
        "stochasticity": section | stochasticity,
        "declared": {
            "stochasticity": declared.stochasticity,
            "curriculum": declared.curriculum,
            "lambda_critic": declared.lambda_critic,
        },
    }


def write_run(
    path: Path,
    verdicts: Mapping[int, Verdicts],
    *,
    method: str = "vapo",
    seed: int = 1,
    config: Mapping[str, Any] | None = None,
    verifier: str = "exact",
    seconds: float = 10.0,
    scalars: Callable[[int], Mapping[str, float]] = lambda step: {},  # noqa: ARG005
    logged: Sequence[int] | None = None,
) -> Path:
    """Write a run: its evaluations, and metrics of the evaluated (or `logged`) steps.

    A step costs `seconds` of the device and 1000 tokens.
    """
    log = RunLog.create(
        path,
        config=config_of(method) if config is None else config,
        seed=seed,
        method=method,
        verifier=verifier,
    )
    for step, evaluation in verdicts.items():
        log.evals(step, evaluation_rows(evaluation, verifier))
    for step in sorted(verdicts) if logged is None else logged:
        log.metrics(
            step,
            time=0.0,
            device_seconds=seconds * step,
            tokens=1000 * step,
            scalars=scalars(step),
        )
    return path


def evaluation_rows(evaluation: Verdicts, verifier: str = "exact") -> dict[str, list[Any]]:
    """The verdicts as rows of the run log's part `evals`."""
    cells = [
        (name, f"p{problem}", sample, float(verdict))
        for name, table in evaluation.items()
        for problem, row in enumerate(table)
        for sample, verdict in enumerate(row)
    ]
    names, problems, samples, correct = (list(column) for column in zip(*cells, strict=True))
    return {
        "benchmark": names,
        "problem_id": problems,
        "sample": samples,
        verifier: correct,
        "length": [7] * len(cells),
        "truncated": [False] * len(cells),
    }


def learning(
    benchmarks: Mapping[str, int],
    rise: float,
    *,
    seed: int,
    steps: Sequence[int] = (0, 25, 50, 75, 100),
    samples: int = 8,
) -> dict[int, dict[str, np.ndarray]]:
    """Verdicts of a run whose success rates rise by `rise` until the last step.

    A problem is as hard for every run. At step 0 runs of one seed draw the same samples.
    """
    rng = np.random.default_rng(seed)
    luck = rng.normal(0, 0.02)
    found = {}
    for step in steps:
        share = step / max(steps) if max(steps) else 0.0
        found[step] = {
            name: rng.random((size, samples)) < _rates(name, size, (rise + luck) * share)[:, None]
            for name, size in benchmarks.items()
        }
    return found


def _rates(name: str, size: int, rise: float) -> np.ndarray:
    hard = np.random.default_rng(sum(name.encode())).beta(1, 2, size)
    return np.clip(hard + rise, 0, 1)
