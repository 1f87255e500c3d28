"""avg@k on held-out problems, under every configured verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cvpo import avg_at_k, pass_at_k
from cvpo.reward import VERIFIERS
from train.config import Config, benchmark_name
from train.data import Problem
from train.grading import Grader
from train.models import text_of
from train.rollout.backend import Backend
from train.seeds import seed_of
from train.sources import problems_from, prompts_of


@dataclass(frozen=True)
class Benchmark:
    """A named set of held-out problems and their prompts."""

    name: str
    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]


def load_benchmarks(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Benchmark]:
    """Reads every configured benchmark.

    Raises:
        DataError: A benchmark cannot be read.
        ConfigError: A prompt is too long.
    """
    benchmarks = []
    for dataset in config.evaluation.benchmarks:
        problems = problems_from(dataset)
        prompts = prompts_of(problems, config, tokenizer)
        benchmarks.append(Benchmark(benchmark_name(dataset), problems, prompts))
    return benchmarks


def evaluate(
    benchmarks: Sequence[Benchmark],
    *,
    config: Config,
    backend: Backend,
    tokenizer: PreTrainedTokenizerBase,
    grader: Grader,
    step: int,
) -> dict[str, list[Any]]:
    """k responses to every problem, graded.

    Returns:
        The columns of the run log's `evals` part, one row for each response.
    """
    settings = config.evaluation
    rows: dict[str, list[Any]] = {
        name: []
        for name in ("benchmark", "problem_id", "sample", *VERIFIERS, "length", "truncated")
    }
    jobs = [
        (benchmark.name, problem, prompt, sample)
        for benchmark in benchmarks
        for problem, prompt in zip(benchmark.problems, benchmark.prompts, strict=True)
        for sample in range(settings.samples)
    ]
    if not jobs:
        return rows
    responses = backend.generate(
        [prompt for _, _, prompt, _ in jobs],
        [
            seed_of(config.seed, "evaluation", step, name, problem.prompt_id, sample)
            for name, problem, _, sample in jobs
        ],
        settings,
    )
    texts = [text_of(tokens, tokenizer) for tokens in responses.tokens]
    golds = [problem.gold for _, problem, _, _ in jobs]
    verdicts = grader.grade_all(texts, golds, settings.verifiers)
    rows["benchmark"] = [name for name, _, _, _ in jobs]
    rows["problem_id"] = [f"{problem.prompt_id}:{problem.source_id}" for _, problem, _, _ in jobs]
    rows["sample"] = [sample for _, _, _, sample in jobs]
    for verifier in VERIFIERS:
        rows[verifier] = verdicts.get(verifier, [None] * len(jobs))
    rows["length"] = [len(tokens) for tokens in responses.tokens]
    rows["truncated"] = list(responses.truncated)
    return rows


@dataclass(frozen=True)
class Score:
    """A benchmark's result under one verifier."""

    problems: int
    samples: int
    mean: float
    standard_error: float
    """Clustered by problem; NaN for one problem."""
    pass_at_k: float


def summarize(rows: Mapping[str, Sequence[Any]], *, verifier: str) -> dict[str, Score]:
    """avg@k with its standard error and pass@k (k: all samples), for each benchmark and `all`."""
    names = np.array(rows["benchmark"])
    verdicts = np.array(rows[verifier], dtype=float)
    keys = np.array([f"{b}/{p}" for b, p in zip(names, rows["problem_id"], strict=True)])
    scores: dict[str, Score] = {}
    for name in [*dict.fromkeys(rows["benchmark"]), "all"]:
        chosen = np.ones(len(names), bool) if name == "all" else names == name
        _, problem = np.unique(keys[chosen], return_inverse=True)
        correct = verdicts[chosen][np.argsort(problem, kind="stable")].reshape(
            problem.max() + 1, -1
        )
        k = correct.shape[1]
        mean, error = avg_at_k(correct)
        solved = pass_at_k(np.full(len(correct), k), (correct >= 0.5).sum(1), k)
        scores[name] = Score(len(correct), k, mean, error, float(np.mean(solved)))
    return scores
