"""A step's trajectories, as every stage of the loop sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Responses:
    """What a backend generated for a list of prompts, in their order."""

    tokens: list[list[int]]
    """Response tokens, the end-of-sequence token included where there is one."""
    log_probs: list[list[float]]
    """log pi(token) of the policy that generated, at the sampling temperature, before top-p."""
    truncated: list[bool]
    """Cut off at the length limit, without an end-of-sequence token."""
    version: int
    """Updates of the policy that the generating weights had seen."""


@dataclass(frozen=True)
class Batch:
    """B trajectories of the whole step: prompts padded on the left, responses on the right.

    Every process holds the whole batch (on the CPU); only engines and backends split it.
    """

    prompt_id: Int[Tensor, " B"]
    sample: Int[Tensor, " B"]
    input_ids: Int[Tensor, "B P+T"]
    attention_mask: Int[Tensor, "B P+T"]
    response_mask: Bool[Tensor, "B T"]
    behaviour_log_probs: Float[Tensor, "B T"]
    truncated: Bool[Tensor, " B"]
    correct: Float[Tensor, " B"]
    """R in [0, 1], from the verifier."""
    reward: Float[Tensor, " B"]
    responses: list[str]
    answers: list[str | None]
    version: int
    observed: dict[str, Tensor]
    """prompt, trials, successes of every group rolled out, also of those that were discarded."""
    generated_tokens: int
    """Response tokens generated for this batch, discarded ones included."""

    def __len__(self) -> int:
        """B."""
        return len(self.prompt_id)

    @property
    def prompt_width(self) -> int:
        """P, the slots before the first response slot."""
        return self.input_ids.shape[1] - self.response_mask.shape[1]

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Response tokens of each trajectory."""
        return self.response_mask.sum(1)

    @property
    def response_ids(self) -> Int[Tensor, "B T"]:
        """Response tokens, padding where the mask is 0."""
        return self.input_ids[:, self.prompt_width :]

    def take(self, rows: Int[Tensor, " b"]) -> Batch:
        """Some of the trajectories; what was observed and generated stays that of the step."""
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in _ROWS}
        taken |= {name: [getattr(self, name)[row] for row in rows.tolist()] for name in _TEXTS}
        return replace(self, **taken)

    def state_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Batch:
        """The batch that `state_dict` described."""
        return cls(**state)


_TEXTS = ("responses", "answers")
_ROWS = (
    "prompt_id",
    "sample",
    "input_ids",
    "attention_mask",
    "response_mask",
    "behaviour_log_probs",
    "truncated",
    "correct",
    "reward",
)


def pad(
    prompts: Sequence[Sequence[int]], responses: Responses, *, pad_id: int
) -> dict[str, Tensor]:
    """The token tensors of a `Batch`."""
    P = max(map(len, prompts))
    T = max(1, max(map(len, responses.tokens)))
    B = len(prompts)
    input_ids = torch.full((B, P + T), pad_id)
    attention_mask = torch.zeros(B, P + T, dtype=torch.int64)
    log_probs = torch.zeros(B, T)
    for row, (prompt, tokens) in enumerate(zip(prompts, responses.tokens, strict=True)):
        here = slice(P - len(prompt), P + len(tokens))
        input_ids[row, here] = torch.tensor([*prompt, *tokens])
        attention_mask[row, here] = 1
        log_probs[row, : len(tokens)] = torch.tensor(responses.log_probs[row])
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "response_mask": attention_mask[:, P:].bool(),
        "behaviour_log_probs": log_probs,
    }


def ungraded(
    prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], *, pad_id: int
) -> Batch:
    """A batch of given tokens that nobody has graded, for passes that read tokens alone."""
    B = len(prompts)
    responses = Responses(
        tokens=[list(row) for row in tokens],
        log_probs=[[0.0] * len(row) for row in tokens],
        truncated=[False] * B,
        version=0,
    )
    return Batch(
        prompt_id=torch.zeros(B, dtype=torch.int64),
        sample=torch.arange(B),
        **pad(prompts, responses, pad_id=pad_id),
        truncated=torch.zeros(B, dtype=torch.bool),
        correct=torch.zeros(B),
        reward=torch.zeros(B),
        responses=[""] * B,
        answers=[None] * B,
        version=0,
        observed={},
        generated_tokens=0,
    )
