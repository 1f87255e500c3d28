"""Rollout backends. The loop knows these two verbs only: `sync` weights, `generate` responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TopPLogitsWarper,
)

from train.config import Sampling
from train.rollout.batch import Responses


class Backend(Protocol):
    """Generates responses from a copy of the policy's weights that `sync` refreshes."""

    def sync(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Takes over the policy's weights, which have seen `version` updates."""

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Responses:
        """One response for each prompt, drawn from the random stream of its own seed."""


class TransformersBackend:
    """transformers' own `generate` on a second copy of the model. Simple, exact, not fast."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_tokens: Sequence[int],
        pad_id: int,
        batch_size: int,
    ) -> None:
        """Takes over a model that nobody else uses.

        Args:
            model: The copy to generate with.
            end_tokens: Tokens that end a response.
            pad_id: Fills prompts on the left.
            batch_size: Responses generated side by side.
        """
        self.model = model.eval().requires_grad_(False)
        self.end_tokens = list(end_tokens)
        self.pad_id = pad_id
        self.batch_size = batch_size
        self.version = 0
        # What the model's authors put there (a repetition penalty, say) would bias the policy.
        self.model.generation_config = GenerationConfig(
            eos_token_id=self.end_tokens, pad_token_id=pad_id, do_sample=False
        )

    @torch.no_grad()
    def sync(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copies every parameter.

        Raises:
            RuntimeError: A parameter is unknown here, or one was not sent.
        """
        here = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name not in here:
                raise RuntimeError(f"weight sync: the rollout model has no parameter {name}")
            here.pop(name).copy_(tensor)
        if here:
            raise RuntimeError(f"weight sync: never received {sorted(here)}")
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Responses:
        """As `Backend.generate`.

        A response depends on its prompt, its seed and the weights, not on its batch, up to the
        rounding of the matrix products (about 1e-7 of a probability).
        """
        tokens: list[list[int]] = []
        log_probs: list[list[float]] = []
        # Rows of similar prompts together, so that little is padded; handed back in order.
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            part = self._generate([prompts[r] for r in rows], [seeds[r] for r in rows], sampling)
            tokens += part[0]
            log_probs += part[1]
        back = sorted(range(len(order)), key=order.__getitem__)
        tokens, log_probs = [tokens[i] for i in back], [log_probs[i] for i in back]
        truncated = [not row or row[-1] not in self.end_tokens for row in tokens]
        return Responses(tokens, log_probs, truncated, self.version)

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> tuple[list[list[int]], list[list[float]]]:
        width = max(map(len, prompts))
        device = self.model.device
        ids = torch.full((len(prompts), width), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        choose = _SeededChoice(seeds, sampling, device)
        generate: Callable[..., Any] = self.model.generate
        sequences = generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=sampling.max_tokens,
            logits_processor=LogitsProcessorList([choose]),
        )
        new = sequences[:, width:].cpu()
        log_probs = torch.stack(choose.log_probs, dim=1).cpu()
        ends = torch.isin(new, torch.tensor(self.end_tokens))
        # Up to and including the first end token; the whole row where there is none.
        length = torch.where(ends.any(1), ends.int().argmax(1) + 1, new.shape[1]).tolist()
        rows = range(len(prompts))
        return (
            [new[row, : length[row]].tolist() for row in rows],
            [log_probs[row, : length[row]].tolist() for row in rows],
        )


class _SeededChoice(LogitsProcessor):
    """Samples each row by inverse CDF from its own uniform stream and leaves that token only.

    `generate` then takes the largest logit. One uniform number a token and row is all the
    randomness there is, so a row's tokens do not depend on which rows stand beside it.
    """

    def __init__(self, seeds: Sequence[int], sampling: Sampling, device: torch.device) -> None:
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = [torch.rand(sampling.max_tokens, generator=stream) for stream in streams]
        # float32 draws leave room below 1: in float64 the product with the total stays below it.
        self.uniform = torch.stack(uniform).double().to(device)
        self.temperature = sampling.temperature
        self.top_p = TopPLogitsWarper(sampling.top_p) if sampling.top_p < 1 else None
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.float() / self.temperature
        kept = scores if self.top_p is None else self.top_p(input_ids, scores)
        cdf = kept.softmax(-1).double().cumsum(-1)
        threshold = self.uniform[:, len(self.log_probs), None] * cdf[:, -1:]
        choice = torch.searchsorted(cdf, threshold, right=True)
        self.log_probs.append(scores.log_softmax(-1).gather(-1, choice).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter_(-1, choice, 0.0)


BACKENDS = {"transformers": TransformersBackend}
"""`rollout.backend` -> the backend."""
