"""From a sampler's prompts to a scored batch (lines 2-4 of algorithm 2).

Behind one verb, `next`: which prompts, how many responses, their verdicts and rewards, refilling
what dynamic sampling or the sampler drops, and whether the batch is fresh or one update old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cvpo import (
    Feedback,
    Method,
    Pool,
    Sampler,
    Selective,
    ShuffledEpochs,
    extract_answer,
    group_mean,
)
from cvpo.reward import overlong_penalty, training_reward
from cvpo.trackers import check_fields
from train.config import Config
from train.data import Problem
from train.grading import Grader
from train.models import text_of
from train.rollout.backend import Backend
from train.rollout.batch import Batch, Responses, pad
from train.seeds import seed_of
from train.timing import Phases


@dataclass(frozen=True)
class _Rolled:
    """One round of rollouts: whole groups, one row for each response."""

    prompt_ids: list[int]
    samples: list[int]
    responses: Responses
    texts: list[str]
    correct: Tensor

    def groups(self, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Prompt, trials and successes of each group."""
        successes = self.correct.view(-1, samples).sum(1)
        prompt = torch.tensor(self.prompt_ids).view(-1, samples)[:, 0]
        return prompt, torch.full_like(successes, samples), successes


class Collector:
    """Makes the batches of a run."""

    def __init__(
        self,
        config: Config,
        method: Method,
        *,
        problems: Sequence[Problem],
        prompts: Sequence[Sequence[int]],
        backend: Backend,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        pad_id: int,
        phases: Phases,
        grader: Grader,
    ) -> None:
        """Nothing is generated yet.

        Args:
            config: The run's.
            method: The declaration, with the run's overrides.
            problems: The problem table; an id is an index into it.
            prompts: Their prompts as tokens.
            backend: Generates.
            sampler: Chooses prompts.
            tokenizer: Turns responses into text.
            pad_id: Fills the batch.
            phases: Takes the seconds of `rollout` and `score`.
            grader: Verifies responses.
        """
        self.grader = grader
        self.config, self.method = config, method
        self.problems, self.prompts = problems, prompts
        self.backend, self.sampler = backend, sampler
        self.tokenizer, self.pad_id = tokenizer, pad_id
        self.phases = phases
        self.pending: Batch | None = None
        # Value pretraining draws prompts of its own, so that the first round of training is the
        # sampler's first pass.
        self.pretraining_sampler = ShuffledEpochs(
            Pool(len(problems), seed=seed_of(config.seed, "pretraining sampler"))
        )

    def next(self, step: int) -> Batch:
        """The batch that step trains on.

        With lag 0 it is generated now. With lag 1 it was generated before the previous update, and
        the next one is generated before this step's update: always exactly one update old, except
        the very first, which cannot be.
        """
        batch = self.pending or self._collect("rollout", step, self.sampler)
        self.pending = self._collect("rollout", step + 1, self.sampler) if self.method.lag else None
        return batch

    def frozen(self, step: int) -> Batch:
        """Batch number `step` of value pretraining, from the policy as it stands."""
        return self._collect("pretraining", step, self.pretraining_sampler)

    def observe(self, batch: Batch, advantages: Tensor, values: Tensor | None) -> None:
        """Tells the sampler what the step has shown of its prompts, discarded groups included.

        Args:
            batch: The step's trajectories.
            advantages: A before the weights, [B, T].
            values: The critic's, [B, T]; None without a critic.
        """
        size = torch.where(batch.response_mask, advantages.abs(), 0).sum(1)
        size = group_mean(size / batch.lengths.clamp(min=1), batch.prompt_id)
        first = None if values is None else values[:, 0]
        prompt, trials, successes = (
            batch.observed[name] for name in ("prompt", "trials", "successes")
        )
        # A discarded group was never valued. Against each other equal verdicts are worth 0; against
        # a critic, or if they differ, nobody knows.
        worthless = (successes == 0) | (successes == trials)
        unknown = torch.where(worthless & (values is None), 0.0, torch.nan)
        row_of = {prompt: row for row, prompt in enumerate(batch.prompt_id.tolist())}
        rows = [row_of.get(name, -1) for name in prompt.tolist()]
        here, row = torch.tensor(rows) >= 0, torch.tensor(rows)
        self.sampler.observe(
            Feedback(
                prompt=prompt,
                trials=trials,
                successes=successes,
                mean_abs_advantage=torch.where(here, size[row], unknown),
                value_first=None if first is None else torch.where(here, first[row], torch.nan),
            )
        )

    def _collect(self, stream: str, step: int, sampler: Sampler) -> Batch:
        rollout = self.config.rollout
        taken: Counter[int] = Counter()
        parts: list[_Rolled] = []
        kept: list[tuple[int, int]] = []  # (part, first row) of each group that is trained on
        spare: list[tuple[int, int]] = []
        choosy = self.method.dynamic_sampling or isinstance(sampler, Selective)
        rounds = 1 + (rollout.max_refills if choosy else 0)
        for _ in range(rounds):
            missing = rollout.prompts - len(kept)
            if missing <= 0:
                break
            part = self._roll_out(stream, step, sampler.next(missing).tolist(), taken)
            parts.append(part)
            for group, useful in enumerate(self._useful(part, sampler).tolist()):
                where = (len(parts) - 1, group * rollout.samples)
                (kept if useful else spare).append(where)
        # A batch of no group at all could not be trained on; signal-free groups do no harm.
        chosen = kept or spare[: rollout.prompts]
        return self._batch(parts, chosen)

    def _useful(self, part: _Rolled, sampler: Sampler) -> Bool[Tensor, " groups"]:
        """Which groups of one round are trained on, by dynamic sampling and by the sampler."""
        prompt, trials, successes = part.groups(self.config.rollout.samples)
        useful = torch.ones(len(prompt), dtype=torch.bool)
        if self.method.dynamic_sampling:
            useful &= (successes > 0) & (successes < trials)
        if isinstance(sampler, Selective):
            useful &= sampler.keep(prompt, trials, successes)
        return useful

    def _roll_out(
        self, stream: str, step: int, drawn: Sequence[int], taken: Counter[int]
    ) -> _Rolled:
        prompt_ids: list[int] = []
        samples: list[int] = []
        for prompt in drawn:
            # A prompt that is drawn twice in a step goes on counting its samples.
            first = taken[prompt]
            taken[prompt] += self.config.rollout.samples
            prompt_ids += [prompt] * self.config.rollout.samples
            samples += range(first, taken[prompt])
        seeds = [
            seed_of(self.config.seed, stream, step, prompt, sample)
            for prompt, sample in zip(prompt_ids, samples, strict=True)
        ]
        with self.phases("rollout"):
            responses = self.backend.generate(
                [self.prompts[prompt] for prompt in prompt_ids], seeds, self.config.rollout
            )
        with self.phases("score"):
            texts = [text_of(tokens, self.tokenizer) for tokens in responses.tokens]
            golds = [self.problems[prompt].gold for prompt in prompt_ids]
            correct = self.grader.grade(texts, golds, verifier=self.config.verifier)
        return _Rolled(prompt_ids, samples, responses, texts, correct)

    def _batch(self, parts: Sequence[_Rolled], chosen: Sequence[tuple[int, int]]) -> Batch:
        n = self.config.rollout.samples
        rows = [(parts[part], row) for part, first in chosen for row in range(first, first + n)]
        prompt_ids = [part.prompt_ids[row] for part, row in rows]
        responses = Responses(
            [part.responses.tokens[row] for part, row in rows],
            [part.responses.log_probs[row] for part, row in rows],
            [part.responses.truncated[row] for part, row in rows],
            parts[0].responses.version,
        )
        texts = [part.texts[row] for part, row in rows]
        correct = torch.stack([part.correct[row] for part, row in rows])
        reward = training_reward(correct)
        if self.method.overlong_penalty:
            limit, cache = self.config.rollout.max_tokens, self.config.rollout.overlong_cache
            reward = reward + overlong_penalty(
                torch.tensor([len(tokens) for tokens in responses.tokens]),
                max_length=limit,
                cache=limit // 5 if cache is None else cache,
            )
        groups = [part.groups(n) for part in parts]
        everyone, trials, successes = (torch.cat(column) for column in zip(*groups, strict=True))
        return Batch(
            prompt_id=torch.tensor(prompt_ids),
            sample=torch.tensor([part.samples[row] for part, row in rows]),
            **pad([self.prompts[p] for p in prompt_ids], responses, pad_id=self.pad_id),
            truncated=torch.tensor(responses.truncated),
            correct=correct,
            reward=reward,
            responses=texts,
            answers=[extract_answer(text) for text in texts],
            version=responses.version,
            observed={
                "prompt": everyone,
                "trials": trials,
                "successes": successes,
            },
            generated_tokens=sum(len(tokens) for part in parts for tokens in part.responses.tokens),
        )

    def state_dict(self) -> dict[str, Any]:
        """The sampler, and the batch that waits for its step."""
        return {
            "sampler": self.sampler.state_dict(),
            "pending": self.pending.state_dict() if self.pending else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: Fields are missing or unknown.
        """
        check_fields("Collector", state, self.state_dict())
        self.sampler.load_state_dict(state["sampler"])
        self.pending = Batch.from_state(state["pending"]) if state["pending"] else None
