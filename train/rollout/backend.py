"""Rollout backends. The loop knows the verbs of `Backend` only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopPLogitsWarper,
)

from train.config import Sampling
from train.models import end_of_sequence, load_actor, padding_of
from train.passes import parts
from train.policy import Policy
from train.rollout.batch import Responses, ungraded
from train.rollout.vllm import VllmBackend
from train.world import ALONE, World

_LOGIT_ROWS = 1024
"""Tokens whose logits are held at once where responses are scored."""


class Backend(Protocol):
    """Generates responses from a copy of the policy's weights that `sync` refreshes.

    In a run of many processes each calls every verb with the same arguments and gets the whole
    result; how the work is shared is the backend's affair.

    Attributes:
        model: The language model, or its architecture alone: for names and sizes, not for use.
        pad_id: The token that fills batches.
    """

    model: PreTrainedModel
    pad_id: int

    def sync(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Takes over the policy's weights, which have seen `version` updates."""

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> Responses:
        """One response for each prompt, drawn from the random stream of its own seed."""

    def log_probs_of(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        temperature: float,
    ) -> list[list[float]]:
        """log pi(token) of every token of given responses, by the weights it generates with."""

    def sleep(self) -> None:
        """Gives back what memory it can until it is called again."""


class TransformersBackend:
    """transformers' own `generate` on a second copy of the model. Simple, exact, not fast."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_tokens: Sequence[int],
        pad_id: int,
        batch_size: int,
        world: World = ALONE,
    ) -> None:
        """Takes over a model that nobody else uses.

        Args:
            model: The copy to generate with.
            end_tokens: Tokens that end a response.
            pad_id: Fills prompts on the left.
            batch_size: Responses generated side by side.
            world: The processes of the run; each has its own copy and generates a share.
        """
        self.model = model.eval().requires_grad_(False)
        self.end_tokens = list(end_tokens)
        self.pad_id = pad_id
        self.batch_size = batch_size
        self.world = world
        self.version = 0
        # What the model's authors put there (a repetition penalty, say) would bias the policy.
        self.model.generation_config = GenerationConfig(
            eos_token_id=self.end_tokens, pad_token_id=pad_id, do_sample=False
        )

    @classmethod
    def open(
        cls,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: str,
        device: str,
        batch_size: int,
        world: World = ALONE,
    ) -> Self:
        """The backend for the model at a path, with the end and padding tokens that belong to it.

        Raises:
            ModelError: It cannot be loaded.
        """
        model = load_actor(path, dtype=dtype, device=device)
        return cls(
            model,
            end_tokens=end_of_sequence(model, tokenizer),
            pad_id=padding_of(model, tokenizer),
            batch_size=batch_size,
            world=world,
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
        rows = self.world.spread(
            list(zip(prompts, seeds, strict=True)), lambda mine: self._sorted(mine, sampling)
        )
        return Responses(
            tokens=[tokens for tokens, _ in rows],
            log_probs=[log_probs for _, log_probs in rows],
            truncated=[not tokens or tokens[-1] not in self.end_tokens for tokens, _ in rows],
            version=self.version,
        )

    @torch.no_grad()
    def log_probs_of(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        temperature: float,
    ) -> list[list[float]]:
        """As `Backend.log_probs_of`; every process computes all of it."""
        batch = ungraded(prompts, responses, pad_id=self.pad_id)
        policy = Policy(self.model, rows=_LOGIT_ROWS)
        found = torch.zeros(batch.response_mask.shape)
        for part in parts(
            batch,
            torch.arange(len(batch)),
            model=self.model,
            packed=False,
            budget=self.batch_size * batch.input_ids.shape[1],
            device=self.model.device,
        ):
            log_probs, _ = policy(part.inputs, part.states, part.targets, temperature=temperature)
            slots = part.slots(log_probs).cpu()
            found[part.rows, : slots.shape[1]] = slots
        return [row[: len(tokens)].tolist() for row, tokens in zip(found, responses, strict=True)]

    def sleep(self) -> None:
        """Does nothing: the copy is all there is, and it stays."""

    def _sorted(
        self, asked: Sequence[tuple[Sequence[int], int]], sampling: Sampling
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities for prompts with their seeds, in their order."""
        found: list[Any] = [None] * len(asked)
        # Rows of similar prompts together, so that little is padded.
        order = sorted(range(len(asked)), key=lambda row: len(asked[row][0]))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            part = self._generate(
                [asked[r][0] for r in rows], [asked[r][1] for r in rows], sampling
            )
            for row, tokens, log_probs in zip(rows, *part, strict=True):
                found[row] = tokens, log_probs
        return found

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


BACKENDS: Mapping[str, Any] = {"transformers": TransformersBackend, "vllm": VllmBackend}
"""`rollout.backend` -> the backend."""
