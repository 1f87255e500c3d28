"""Forward passes over a batch: log-probabilities, entropies and values at the response slots."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from train.models import Critic, position_ids
from train.rollout.batch import Batch


@dataclass(frozen=True)
class Part:
    """A micro-batch on the device: b rows, their padding trimmed to w response slots."""

    rows: Int[Tensor, " b"]
    width: int
    input_ids: Int[Tensor, "b L"]
    attention_mask: Int[Tensor, "b L"]
    response_mask: Tensor

    @classmethod
    def cut(
        cls, batch: Batch, rows: list[int], prompt: int, response: int, device: torch.device
    ) -> Part:
        """These rows, with only so many prompt and response slots as the longest needs."""
        P, width = batch.prompt_width, max(response, 1)
        columns = slice(P - prompt, P + width)
        index = torch.tensor(rows)
        return cls(
            rows=index,
            width=width,
            input_ids=batch.input_ids[index, columns].to(device),
            attention_mask=batch.attention_mask[index, columns].to(device),
            response_mask=batch.response_mask[index, :width].to(device),
        )

    @property
    def response_ids(self) -> Int[Tensor, "b w"]:
        """The tokens whose probabilities are asked for."""
        return self.input_ids[:, -self.width :]

    def of(self, x: Tensor) -> Tensor:
        """These rows of a tensor [B] or [B, T], trimmed, on the device."""
        x = x[self.rows]
        return (x if x.ndim == 1 else x[:, : self.width]).to(self.input_ids.device)

    def inputs(self, model: PreTrainedModel) -> dict[str, Any]:
        """The arguments of a model's forward pass, those that it knows."""
        accepted = inspect.signature(model.forward).parameters
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
        }
        if "position_ids" in accepted:
            inputs["position_ids"] = position_ids(self.attention_mask)
        if "logits_to_keep" in accepted:
            inputs["logits_to_keep"] = self.width + 1
        return inputs


def parts(
    batch: Batch, rows: Int[Tensor, " rows"], *, budget: int, device: torch.device
) -> Iterator[Part]:
    """Cuts rows into micro-batches of similar length.

    Args:
        batch: The step's trajectories.
        rows: Which of them.
        budget: Prompt and response slots of one part, padding included; a longer row stands alone.
        device: Where the parts go.
    """
    prompt_lengths = batch.attention_mask[:, : batch.prompt_width].sum(1)
    lengths = batch.lengths
    order = rows[torch.argsort(prompt_lengths[rows] + lengths[rows])]
    chosen: list[int] = []
    widest_prompt = widest_response = 0
    for row in order.tolist():
        prompt = max(widest_prompt, int(prompt_lengths[row]))
        response = max(widest_response, int(lengths[row]))
        if chosen and (len(chosen) + 1) * (prompt + response) > budget:
            yield Part.cut(batch, chosen, widest_prompt, widest_response, device)
            chosen, prompt, response = [], int(prompt_lengths[row]), int(lengths[row])
        chosen.append(row)
        widest_prompt, widest_response = prompt, response
    if chosen:
        yield Part.cut(batch, chosen, widest_prompt, widest_response, device)


def log_probs_of(
    model: PreTrainedModel, part: Part, *, temperature: float, entropy_gradient: bool = False
) -> tuple[Float[Tensor, "b w"], Float[Tensor, "b w"]]:
    """log pi(token) and entropy (nats) at the response slots of a part.

    Args:
        model: The policy.
        part: A micro-batch.
        temperature: Of the rollouts: the policy is the softmax of logits / temperature.
        entropy_gradient: Whether the entropy is trained; where it is only watched, its graph would
            cost memory for nothing.
    """
    inputs = part.inputs(model)
    logits = model(**inputs, use_cache=False).logits[:, -part.width - 1 : -1].float()
    logits = logits / temperature
    normalizer = logits.logsumexp(-1)
    chosen = logits.gather(-1, part.response_ids[..., None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropy = normalizer - (logits.softmax(-1) * logits).sum(-1)
    return chosen - normalizer, entropy


def values_of(critic: Critic, part: Part) -> Float[Tensor, "b w"]:
    """V before each response token of a part: read where the token before it stands."""
    values: Tensor = critic(**part.inputs(critic.trunk), use_cache=False)
    return values[:, -part.width - 1 : -1]


@torch.no_grad()
def all_log_probs(
    model: PreTrainedModel, batch: Batch, *, temperature: float, budget: int
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """`log_probs_of` for a whole batch, on the CPU."""
    log_probs = torch.zeros(batch.response_mask.shape)
    entropies = torch.zeros(batch.response_mask.shape)
    for part in parts(batch, torch.arange(len(batch)), budget=budget, device=model.device):
        found, entropy = log_probs_of(model, part, temperature=temperature)
        log_probs[part.rows, : part.width] = found.cpu()
        entropies[part.rows, : part.width] = entropy.cpu()
    return log_probs, entropies


@torch.no_grad()
def all_values(critic: Critic, batch: Batch, *, budget: int) -> Float[Tensor, "B T"]:
    """`values_of` for a whole batch, on the CPU."""
    values = torch.zeros(batch.response_mask.shape)
    for part in parts(batch, torch.arange(len(batch)), budget=budget, device=critic.trunk.device):
        values[part.rows, : part.width] = values_of(critic, part).cpu()
    return values
