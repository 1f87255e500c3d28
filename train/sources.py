"""Where problems and prompts come from: a file, a folder, the hub, or the built-in task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from train import addition
from train.config import Config, ConfigError, Dataset
from train.data import DataError, Problem, read_problems, render_prompt


def problems_from(dataset: Dataset) -> list[Problem]:
    """Reads the problems that a `Dataset` section describes, with dense ids from 0.

    Raises:
        DataError: As `read_problems`; or no problem has one of the levels.
    """
    if dataset.source == addition.DATASET:
        levels = dataset.levels or tuple(addition.LEVELS)
        try:
            problems = addition.problems(
                dataset.split,  # type: ignore[arg-type]  # it refuses what is no split of its own
                count=dataset.limit or 256,
                levels=levels,
            )
        except ValueError as error:
            raise DataError(f"addition: {error}") from error
        name = dataset.name or addition.DATASET
        return [replace(problem, dataset=name) for problem in problems]
    chosen = read_problems(
        dataset.source,
        name=dataset.name,
        split=dataset.split,
        limit=None if dataset.levels else dataset.limit,
        deduplicate=dataset.deduplicate,
    )
    if dataset.levels:
        found = sorted({problem.level for problem in chosen if problem.level is not None})
        chosen = [problem for problem in chosen if problem.level in dataset.levels]
        if not chosen:
            raise DataError(
                f"{dataset.source}: no problem of levels {list(dataset.levels)}; it has {found}"
            )
        chosen = chosen[: dataset.limit]
    return [replace(problem, prompt_id=index) for index, problem in enumerate(chosen)]


def prompts_of(
    problems: Sequence[Problem], config: Config, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """The tokens that each problem is asked with, under the configured template.

    Raises:
        ConfigError: The tokenizer has no chat template, or a prompt is empty or longer than
            `data.max_prompt_tokens`.
    """
    limit = config.data.max_prompt_tokens
    prompts = []
    for problem in problems:
        try:
            prompt = render_prompt(problem.text, template=config.data.template, tokenizer=tokenizer)
        except ValueError as error:
            raise ConfigError(f"data.template: {error}") from error
        name = f"the prompt of problem {problem.source_id} of {problem.dataset}"
        if not prompt:
            raise ConfigError(
                f"data.train: {name} has no tokens; does the tokenizer belong to the model?"
            )
        if len(prompt) > limit:
            raise ConfigError(
                f"data.max_prompt_tokens: {name} has {len(prompt)} tokens, the limit is {limit}"
            )
        prompts.append(prompt)
    return prompts
