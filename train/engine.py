"""What computes gradients. The loop knows the verbs of `Engine` only.

Every verb takes the whole batch of the step and returns results for the whole batch; how it is cut
into micro-batches (and, in an engine of many processes, over ranks) changes nothing, because every
loss is divided by counts of the whole optimiser batch (`cvpo.loss`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from cvpo import (
    BatchCounts,
    Method,
    kl_loss,
    policy_loss,
    policy_statistics,
    positive_lm_loss,
    value_loss,
)
from train.config import Config, Optimizer
from train.models import Critic, ModelError
from train.passes import all_log_probs, all_values, log_probs_of, parts, values_of
from train.rollout.batch import Batch
from train.seeds import generator_of


class Engine(Protocol):
    """Models, optimisers and the passes through them."""

    def log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """log pi(token) and entropy (nats) at every response slot, [B, T] each; no gradient."""

    def values(self, batch: Batch) -> Tensor:
        """V before every response token, [B, T], without gradient."""

    def update_critic(
        self, batch: Batch, returns: Tensor, old_values: Tensor, *, passes: int
    ) -> dict[str, float]:
        """Fits the critic to returns [B, T]; returns its metrics."""

    def update_actor(
        self, batch: Batch, advantages: Tensor, old_log_probs: Tensor
    ) -> dict[str, float]:
        """One step of the policy on A' [B, T]; returns its metrics."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's parameters, one at a time, for a rollout backend."""

    def save(self, folder: Path) -> None:
        """Writes models, optimisers and counters into an existing folder."""

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""


class PlainEngine:
    """One process, one device, plain PyTorch."""

    def __init__(
        self,
        config: Config,
        method: Method,
        *,
        actor: PreTrainedModel,
        critic: Critic | None,
        reference: PreTrainedModel | None = None,
    ) -> None:
        """Takes over the models.

        Args:
            config: The run's.
            method: The declaration, with the run's overrides.
            actor: The policy.
            critic: For methods that have one.
            reference: A frozen policy, for the KL loss.
        """
        self.config, self.method = config, method
        self.actor, self.critic, self.reference = actor, critic, reference
        self.device = actor.device
        self.actor_optimizer = _adamw(actor, config.actor)
        self.critic_optimizer = _adamw(critic, config.critic) if critic else None
        # Calls of update_actor and update_critic so far: they set the learning rate and the order.
        self.counters = {"actor": 0, "critic": 0}

    def log_probs(self, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """As `Engine.log_probs`."""
        return all_log_probs(
            self.actor,
            batch,
            temperature=self.config.rollout.temperature,
            budget=self._budget,
        )

    def values(self, batch: Batch) -> Float[Tensor, "B T"]:
        """As `Engine.values`."""
        return all_values(self._fitted(), batch, budget=self._budget)

    def update_critic(
        self,
        batch: Batch,
        returns: Float[Tensor, "B T"],
        old_values: Float[Tensor, "B T"],
        *,
        passes: int,
    ) -> dict[str, float]:
        """As `Engine.update_critic`."""
        critic, settings, optimizer = self._fitted(), self.config.critic, self.critic_optimizer
        assert optimizer is not None
        sums: dict[str, float] = defaultdict(float)
        for rows in self._minibatches("critic", optimizer, len(batch), settings, passes):
            counts = self._counts(batch, rows)
            for part in parts(batch, rows, budget=self._budget, device=self.device):
                loss = value_loss(
                    values_of(critic, part),
                    part.of(returns),
                    part.response_mask,
                    counts=counts,
                    old_values=part.of(old_values),
                    clip=settings.value_clip,
                )
                loss.backward()
                sums["loss"] += loss.item()
            self._optimizer_step(critic, optimizer, settings, sums)
        return {
            "critic/loss": sums["loss"] / max(sums["updates"], 1),
            "critic/grad_norm": sums["grad_norm"] / max(sums["updates"], 1),
            "critic/lr": optimizer.param_groups[0]["lr"],
            "critic/skipped_updates": sums["skipped"],
        }

    def update_actor(
        self, batch: Batch, advantages: Float[Tensor, "B T"], old_log_probs: Float[Tensor, "B T"]
    ) -> dict[str, float]:
        """As `Engine.update_actor`."""
        method, settings, algorithm = self.method, self.config.actor, self.config.algorithm
        temperature, optimizer = self.config.rollout.temperature, self.actor_optimizer
        reference = None
        if self.reference is not None:
            reference, _ = all_log_probs(
                self.reference, batch, temperature=temperature, budget=self._budget
            )
        sums: dict[str, float] = defaultdict(float)
        for rows in self._minibatches("actor", optimizer, len(batch), settings, settings.passes):
            counts = self._counts(batch, rows)
            lm_tokens = (batch.correct * batch.lengths)[rows].sum().item()
            for part in parts(batch, rows, budget=self._budget, device=self.device):
                log_probs, entropy = log_probs_of(
                    self.actor,
                    part,
                    temperature=temperature,
                    entropy_gradient=algorithm.entropy_coefficient > 0,
                )
                old, A = part.of(old_log_probs), part.of(advantages)
                loss = policy_loss(
                    log_probs,
                    old,
                    A,
                    part.response_mask,
                    counts=counts,
                    clip_low=method.clip_low,
                    clip_high=method.clip_high,
                    reduction=method.reduction,
                )
                sums["policy"] += loss.item()
                if method.lm_coefficient:
                    lm = positive_lm_loss(
                        log_probs, part.response_mask, part.of(batch.correct), num_tokens=lm_tokens
                    )
                    sums["lm"] += lm.item()
                    loss = loss + method.lm_coefficient * lm
                if reference is not None:
                    kl = kl_loss(
                        log_probs,
                        part.of(reference),
                        part.response_mask,
                        counts=counts,
                        reduction=method.reduction,
                    )
                    sums["reference_kl"] += kl.item()
                    loss = loss + algorithm.kl_coefficient * kl
                if algorithm.entropy_coefficient:
                    mean = entropy.masked_fill(~part.response_mask, 0).sum() / counts.tokens
                    loss = loss - algorithm.entropy_coefficient * mean
                loss.backward()
                for name, value in policy_statistics(
                    log_probs.detach(),
                    old,
                    A,
                    part.response_mask,
                    clip_low=method.clip_low,
                    clip_high=method.clip_high,
                ).items():
                    sums[name] += value
            self._optimizer_step(self.actor, optimizer, settings, sums)
        tokens, updates = max(sums["tokens"], 1), max(sums["updates"], 1)
        metrics = {
            "policy/loss": sums["policy"] / updates,
            "policy/clip_low": sums["clip_low"] / tokens,
            "policy/clip_high": sums["clip_high"] / tokens,
            "policy/update_kl": sums["kl"] / tokens,
            "policy/ratio_ess": sums["ratio"] ** 2 / (sums["ratio_square"] * tokens or math.nan),
            "policy/grad_norm": sums["grad_norm"] / updates,
            "policy/lr": optimizer.param_groups[0]["lr"],
            "policy/skipped_updates": sums["skipped"],
        }
        if method.lm_coefficient:
            metrics["lm/loss"] = sums["lm"] / updates
        if reference is not None:
            metrics["policy/kl"] = sums["reference_kl"] / updates
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.weights`."""
        for name, parameter in self.actor.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        """As `Engine.save`; the models are written as `save_pretrained` does."""
        self.actor.save_pretrained(folder / "actor")
        state: dict[str, Any] = {
            "counters": self.counters,
            "actor_optimizer": self.actor_optimizer.state_dict(),
            "reference": _fingerprint(self.reference),
        }
        if self.critic is not None and self.critic_optimizer is not None:
            self.critic.save(folder / "critic")
            state["critic_optimizer"] = self.critic_optimizer.state_dict()
        torch.save(state, folder / "optimizers.pt")

    def load(self, folder: Path) -> None:
        """Restores optimisers and counters; the models are built from the folder already."""
        state = torch.load(folder / "optimizers.pt", weights_only=True)
        if state["reference"] != _fingerprint(self.reference):
            raise ModelError(
                f"model.path {self.config.model.path}: is not the model that the run's KL loss "
                "started from; put that one back"
            )
        self.counters = state["counters"]
        self.actor_optimizer.load_state_dict(state["actor_optimizer"])
        if self.critic_optimizer is not None:
            self.critic_optimizer.load_state_dict(state["critic_optimizer"])

    @property
    def _budget(self) -> int:
        return self.config.engine.micro_batch_tokens

    def _fitted(self) -> Critic:
        if self.critic is None:
            raise RuntimeError(f"{self.method.name} has no critic")
        return self.critic

    def _minibatches(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        size: int,
        settings: Optimizer,
        passes: int,
    ) -> Iterator[Int[Tensor, " rows"]]:
        """The rows of each optimiser batch, a new random order in each pass; sets the rate too."""
        count = self.counters[name]
        for group in optimizer.param_groups:
            warmup = settings.warmup_steps
            group["lr"] = settings.lr * (min(1.0, (count + 1) / warmup) if warmup else 1.0)
        for number in range(passes):
            generator = generator_of(self.config.seed, "minibatches", name, count, number)
            order = torch.randperm(size, generator=generator)
            yield from order.tensor_split(min(settings.minibatches, size))
        self.counters[name] += 1

    def _counts(self, batch: Batch, rows: Int[Tensor, " rows"]) -> BatchCounts:
        lengths = batch.lengths[rows]
        return BatchCounts(
            tokens=float(lengths.sum()),
            sequences=float((lengths > 0).sum()),
            max_length=self.config.rollout.max_tokens,
        )

    def _optimizer_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Optimizer,
        sums: dict[str, float],
    ) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm).item()
        if math.isfinite(norm):
            optimizer.step()
            sums["updates"] += 1
            sums["grad_norm"] += norm
        else:
            sums["skipped"] += 1
        optimizer.zero_grad(set_to_none=True)


def _fingerprint(model: nn.Module | None) -> float | None:
    """Tells one frozen model from another; the same on every load of the same weights."""
    if model is None:
        return None
    return sum(weight.double().abs().sum().item() for weight in model.parameters())


def _adamw(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )


ENGINES = {"plain": PlainEngine}
"""`engine.kind` -> the engine."""
