"""Logs of trainings of any size and of known truth, and what can be wrong with a log.

`write_log` writes every part that a training with a critic has, in a moment for a small log and at
the paper's size (`PAPER`, `PAPER_STEPS`) in less than two minutes and 300 MB. The functions below
it damage a log as a kill, a full disk or another version would.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import torch

from cvpo import METHODS, RunLog, StochasticityConfig, difficulty_weight, stochasticity
from cvpo.metrics import calibration
from tests.training_logs import config_of, evaluation_rows, learning

VOCABULARY = (" the", "\n", "\\boxed", "7", "", "你")
SIGMA = 0.08
"""Median standard deviation of a trajectory's values without a shift, in reward."""

_TOKENS = 6  # of a response, as far as calibration sees


@dataclass(frozen=True)
class Size:
    """How much of everything a training has, but for its steps."""

    prompts: int = 8
    batch: int = 8
    """Prompts of a step."""
    samples: int = 4
    """Responses to each."""
    round_steps: int = 4
    every: int = 4
    """Steps from one evaluation to the next, and from one table of tokens and calibration."""
    trajectories_every: int = 1
    problems: Mapping[str, int] = field(default_factory=lambda: {"easy": 5, "hard": 3})
    answers: int = 2
    """Responses to each problem of an evaluation."""
    vocabulary: int = len(VOCABULARY)


SMALL = Size()
PAPER = Size(
    prompts=17_398,
    batch=256,
    samples=16,
    round_steps=68,
    every=10,
    problems={"AIME24": 30, "AIME25": 30, "AMC23": 40, "AMC24": 45, "MATH-500": 500},
    answers=32,
    vocabulary=20_000,
)
PAPER_STEPS = 2000


@dataclass(frozen=True)
class Effect:
    """What is true of a training, so that a test can ask whether an exhibit finds it."""

    rise: float = 0.2
    """Of every problem's success rate, from step 0 to the last one."""
    shift: float = 0.0
    """Of log sigma, against `SIGMA`."""
    bias: float = 0.1
    """By how much values exceed the mean return."""
    drift: float = 0.0
    """Change of sigma's correlation with entropy, from the first step to the last."""
    overhead: float = 0.002
    """Share of a step's seconds that is spent on W_S, and as much again on the tracker."""
    unsolved: float = 0.25
    """Share of prompts that are never solved."""


PLAIN = Effect()


def write_log(
    path: Path,
    *,
    method: str = "cvpo",
    seed: int = 1,
    steps: int = 12,
    size: Size = SMALL,
    effect: Effect = PLAIN,
    critic: bool = True,
    switch: int | None = None,
    scored_by: str | None = None,
    scalars: Mapping[str, float | None] | None = None,
    without: Collection[str] = (),
    **weight: Any,
) -> Path:
    """Write the log of a training of steps 1 to `steps`, evaluated from step 0 on.

    Args:
        path: its folder.
        method: decides which weights there are.
        seed: of the run and of its numbers.
        steps: how many.
        size: of everything else.
        effect: what is true of it.
        critic: whether there are values.
        switch: step whose end switches the phase.
        scored_by: name of a frozen critic that sees twice the sigma.
        scalars: metrics in place of the usual ones; None leaves one out.
        without: parts that are not written.
        **weight: constants of W_S, of `StochasticityConfig`, that differ from the default.
    """
    config = config_of(method, **weight) | {"steps": steps}
    evaluated = range(0, steps + 1, size.every)
    found = learning(size.problems, effect.rise, seed=seed, steps=evaluated, samples=size.answers)
    with patch("os.fsync"):  # a test's log need not outlive a power cut
        log = RunLog.create(path, config=config, seed=seed, method=method, verifier="exact")
        if "evals" not in without:
            for step, verdicts in found.items():
                log.evals(step, evaluation_rows(verdicts))
        for step in range(1, steps + 1):
            rng = np.random.default_rng([seed, len(method), step])
            if step % size.trajectories_every == 0:
                late = switch is not None and step > switch
                rows = trajectories(rng, size, method, effect, critic=critic, late=late, **weight)
                if "trajectories" not in without:
                    log.trajectories(step, rows)
                if scored_by:
                    log.scores(scored_by, step, _scored(rows))
            _write_tables(log, step, rng, size, effect, critic=critic, without=without)
            if "metrics" not in without:
                usual = _metrics(method, effect, step / steps, critic=critic) | {**(scalars or {})}
                kept = {name: value for name, value in usual.items() if value is not None}
                log.metrics(step, time=0.0, device_seconds=step, tokens=step, scalars=kept)
            if step == switch:
                log.event(step, "phase_switch", "round 1: bottleneck")
    return path


def _write_tables(
    log: RunLog,
    step: int,
    rng: np.random.Generator,
    size: Size,
    effect: Effect,
    *,
    critic: bool,
    without: Collection[str],
) -> None:
    """Write what only some steps have: the round that ends in one, and the critic's tables."""
    if step % size.round_steps == 0 and "prompts" not in without:
        log.prompts(step // size.round_steps - 1, _prompts(rng, size, effect, step))
    if step % size.every == 0 and critic:
        if "tokens" not in without:
            log.tokens(step, _tokens(rng, size))
        if "calibration" not in without:
            log.calibration(step, _calibration(rng, size, effect))


def trajectories(
    rng: np.random.Generator,
    size: Size,
    method: str,
    effect: Effect,
    *,
    critic: bool = True,
    late: bool = False,
    **weight: Any,
) -> dict[str, Any]:
    """A step's rows. W_S is the method's own of sigma, W_D of rho, in the phase that it is in."""
    n = size.batch * size.samples
    prompt = rng.choice(size.prompts, size.batch, replace=False).repeat(size.samples)
    correct = (rng.random(n) < 0.5).astype(float)
    rho = _cut(rng.random(size.batch)).repeat(size.samples)
    rows: dict[str, Any] = {
        "prompt_id": prompt,
        "sample": np.tile(np.arange(size.samples), size.batch),
        "length": rng.integers(1, 50, n),
        "truncated": np.zeros(n, dtype=bool),
        "reward": 2 * correct - 1,
        "correct": correct,
        "answer": np.array([*"0123456789"])[rng.integers(0, 10, n)],
        "w_s": np.ones(n),
        "w_d": np.ones(n),
        "rho": rho,
        "round": np.zeros(n, dtype=int),
        "advantage_mean": _cut(rng.normal(size=n)),
        "entropy_mean": _cut(rng.random(n)),
        "logprob_gap": np.zeros(n),
    }
    if METHODS[method].curriculum:
        phase = "bottleneck" if late else "early"
        rows["w_d"] = _cut(difficulty_weight(torch.from_numpy(rho), phase=phase).numpy())
    if not critic:
        return rows
    sigma = _cut(SIGMA * np.exp(rng.normal(effect.shift, 0.3, n)))
    weighed = stochasticity(
        *map(torch.from_numpy, (sigma, prompt, correct)), config=StochasticityConfig(**weight)
    )
    if METHODS[method].stochasticity:
        rows["w_s"] = _cut(weighed.weight.numpy())
    return rows | {
        "sigma": sigma,
        "mu": _cut(weighed.mu.numpy()),
        "value_first": _cut(rng.uniform(-1, 1, n)),
        "value_mean": _cut(rng.uniform(-1, 1, n)),
    }


def _cut(x: np.ndarray) -> np.ndarray:
    """To a grid of 1/1024: a file of few distinct values takes a sixth of the room."""
    return np.round(x * 1024) / 1024


def _scored(rows: Mapping[str, Any]) -> dict[str, Any]:
    same = ("prompt_id", "sample", "value_first", "value_mean")
    return {name: rows[name] for name in same} | {"sigma": 2 * rows["sigma"]}


def _prompts(rng: np.random.Generator, size: Size, effect: Effect, step: int) -> dict[str, Any]:
    n = size.prompts
    unsolved = np.arange(n) < effect.unsolved * n
    trials = np.full(n, size.samples)
    solved = rng.binomial(trials, np.where(unsolved, 0.0, rng.uniform(0.4, 1.0, n))).astype(float)
    return {
        "step": np.full(n, step),
        "round": np.full(n, step // size.round_steps - 1),
        "prompt_id": np.arange(n),
        "visits": np.full(n, step // size.round_steps),
        "trials": trials,
        "successes": solved,
        "alpha": 1 + solved,
        "beta": 1 + trials - solved,
        "rho": (1 + solved) / (2 + trials),
        "phase": np.full(n, "early"),
    }


def token_value(token: np.ndarray) -> np.ndarray:
    """A vocabulary entry's mean value: the later, the lower."""
    return 0.9 - 1.8 * token / (token + 3)


def _tokens(rng: np.random.Generator, size: Size) -> dict[str, Any]:
    token = np.arange(size.vocabulary)
    count = rng.integers(40, 200, size.vocabulary)
    value = token_value(token)
    return {
        "token_id": token,
        "token": [*VOCABULARY, *map("t{}".format, token)][: size.vocabulary],
        "count": count,
        "value_sum": count * value,
        "value_sq_sum": count * (value**2 + 0.04),
    }


def _calibration(rng: np.random.Generator, size: Size, effect: Effect) -> dict[str, np.ndarray]:
    """Values are a trajectory's expected return, from one place in the response to the last."""
    n = size.batch * size.samples
    rate = rng.random((n, 1))
    correct = (rng.random((n, 1)) < rate).astype(float)
    values, returns = (np.repeat(x, _TOKENS, axis=1) for x in (2 * rate - 1, 2 * correct - 1))
    mask = np.ones_like(values, dtype=bool)
    return calibration(values + effect.bias, returns, mask, correct[:, 0], position_bins=_TOKENS)


def _metrics(
    method: str, effect: Effect, progress: float, *, critic: bool
) -> dict[str, float | None]:
    """A step's scalars at a progress in (0, 1]."""
    declared = METHODS[method]
    spent = 10 * effect.overhead
    found: dict[str, float | None] = {
        "weights/w_s_cv": 0.1 * declared.stochasticity,
        "weights/w_d_cv": 0.2 * declared.curriculum,
        "seconds/rollout": 10 - 2 * spent,
        "seconds/weights": spent,
        "seconds/tracker": spent,
        "seconds/eval": 5.0,
    }
    if critic:
        found |= {
            "sigma/corr_entropy": 0.2 + effect.drift * progress,
            "sigma/corr_length": 0.1 * progress,
            "sigma/corr_surprise": 0.3,
        }
    return found


# ------------------------------------------------------------------------------- what goes wrong


def files_of(path: Path, part: str) -> list[Path]:
    """The files of a part, in order of steps."""
    lines = path / f"{part}.jsonl"
    return [lines] if lines.exists() else sorted((path / part).glob("[!.]*.parquet"))


def lose(path: Path, part: str) -> None:
    """Remove a part."""
    for file in files_of(path, part):
        file.unlink()


def truncate(file: Path) -> None:
    """Leave the first half of a file."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def empty(file: Path) -> None:
    """Leave no row in a Parquet file."""
    pq.write_table(pq.read_table(file).slice(0, 0), file)


def tear(path: Path) -> None:
    """Leave half of the last line of the metrics, as a kill does."""
    file = path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:-1], lines[-1][: len(lines[-1]) // 2]]))


def interrupt(path: Path) -> None:
    """Make it a log that is being written: the last line torn, the last files under way."""
    tear(path)
    for folder in {file.parent for file in path.rglob("*.parquet")}:
        last = files_of(folder.parent, folder.name)[-1]
        last.rename(last.with_name(f".{last.name}.1.tmp"))


def silence(path: Path) -> None:
    """Make every scalar of every step null, which is read as NaN."""
    file = path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    silent = [
        {name: value if "/" not in name else None for name, value in row.items()} for row in rows
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in silent))


def renew(file: Path) -> None:
    """Make a Parquet file one of the next schema version."""
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({"cvpo_schema_version": "2"}), file)
