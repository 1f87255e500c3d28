"""What computes gradients. The loop knows the verbs of `Engine` only.

Every verb takes the whole batch of the step and returns results for the whole batch; how it is cut
into micro-batches and over processes changes nothing, because every loss is divided by counts of
the whole optimiser batch (`cvpo.loss`). What differs between one process with plain PyTorch and
many with DeepSpeed is behind `Learner`: one model with its optimiser.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

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
from train.attention import pack
from train.checkpoint import CheckpointError
from train.config import Config, Optimizer
from train.learner import Learner, PlainLearner
from train.models import Critic, ModelError
from train.passes import Part, all_values, parts, values_of
from train.policy import Policy, Scored
from train.rollout.batch import Batch
from train.seeds import generator_of
from train.world import ALONE, World
from train.zero import ZeroLearner


class Engine:
    """Models, their learners, and the passes through them.

    Attributes:
        actor: The language model, for its configuration and for saving.
        critic: None for methods without.
        counters: Calls of `update_actor` and `update_critic` so far: they set the learning rate and
            the order.
        packed: Whether sequences are packed without padding.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        *,
        actor: PreTrainedModel,
        critic: Critic | None,
        reference: PreTrainedModel | None = None,
        world: World = ALONE,
    ) -> None:
        """Takes over the models.

        Args:
            config: The run's.
            method: The declaration, with the run's overrides.
            actor: The policy.
            critic: For methods that have one.
            reference: A frozen policy, for the KL loss.
            world: The processes that share the work; each has the same models.

        Raises:
            ModelError: Sequences are to be packed and the model cannot.
        """
        self.config, self.method, self.world = config, method, world
        self.actor, self.critic = actor, critic
        self.device = actor.device
        self.counters = {"actor": 0, "critic": 0}
        trunks = [actor, *([critic.trunk] if critic else []), *([reference] if reference else [])]
        self.packed = pack(trunks, config.engine.packed)
        if config.engine.checkpoint_activations:
            for trunk in trunks:  # transformers does so in training mode only; dropout is 0 anyway
                trunk.gradient_checkpointing_enable({"use_reentrant": False})
                trunk.train()
        rows = config.engine.logit_rows
        learner = LEARNERS[config.engine.kind]
        self.policy = learner(Policy(actor, rows=rows), config, config.actor, world)
        self.value = learner(critic, config, config.critic, world) if critic else None
        self.reference = Policy(reference, rows=rows) if reference else None

    def log_probs(self, batch: Batch) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """log pi(token) and entropy (nats) at every response slot, [B, T] each; no gradient."""
        return self._log_probs(self.policy.module, batch)

    def values(self, batch: Batch) -> Float[Tensor, "B T"]:
        """V before every response token, [B, T], without gradient."""
        cut = self._parts(batch, torch.arange(len(batch)), "critic")
        return self.world.sum(all_values(self._fitted().module, batch, cut))

    def update_critic(
        self,
        batch: Batch,
        returns: Float[Tensor, "B T"],
        old_values: Float[Tensor, "B T"],
        *,
        passes: int,
    ) -> dict[str, float]:
        """Fits the critic to returns [B, T]; returns its metrics."""
        if not len(batch):
            return {}
        learner, settings = self._fitted(), self.config.critic
        tally = _Tally(self.world)
        lr = self._learning_rate("critic", settings)
        for rows in self._minibatches("critic", len(batch), settings, passes):
            counts = self._counts(batch, rows)
            for part in self._parts(batch, rows, "critic"):
                loss = value_loss(
                    values_of(learner.module, part),
                    part.of(returns),
                    part.response_mask,
                    counts=counts,
                    old_values=part.of(old_values),
                    clip=settings.value_clip,
                )
                tally.add(loss=loss)
                learner.backward(loss)
            tally.step(learner.step(lr))
        sums = tally.total()
        return {
            "critic/loss": sums["loss"] / max(tally.updates, 1),
            "critic/grad_norm": tally.grad_norm,
            "critic/lr": lr,
            "critic/skipped_updates": tally.skipped,
        }

    def update_actor(
        self, batch: Batch, advantages: Float[Tensor, "B T"], old_log_probs: Float[Tensor, "B T"]
    ) -> dict[str, float]:
        """One step of the policy on A' [B, T]; returns its metrics."""
        if not len(batch):
            return {}
        method, settings, algorithm = self.method, self.config.actor, self.config.algorithm
        reference = None
        if self.reference is not None:
            reference, _ = self._log_probs(self.reference, batch)
        tally = _Tally(self.world)
        lr = self._learning_rate("actor", settings)
        for rows in self._minibatches("actor", len(batch), settings, settings.passes):
            counts = self._counts(batch, rows)
            lm_tokens = (batch.correct * batch.lengths)[rows].sum().item()
            for part in self._parts(batch, rows, "actor"):
                log_probs, entropy = self._scored(
                    self.policy.module, part, entropy_gradient=algorithm.entropy_coefficient > 0
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
                tally.add(policy=loss)
                if method.lm_coefficient:
                    lm = positive_lm_loss(
                        log_probs, part.response_mask, part.of(batch.correct), num_tokens=lm_tokens
                    )
                    tally.add(lm=lm)
                    loss = loss + method.lm_coefficient * lm
                if reference is not None:
                    kl = kl_loss(
                        log_probs,
                        part.of(reference),
                        part.response_mask,
                        counts=counts,
                        reduction=method.reduction,
                    )
                    tally.add(reference_kl=kl)
                    loss = loss + algorithm.kl_coefficient * kl
                if algorithm.entropy_coefficient:
                    mean = entropy.masked_fill(~part.response_mask, 0).sum() / counts.tokens
                    loss = loss - algorithm.entropy_coefficient * mean
                self.policy.backward(loss)
                tally.add(
                    **policy_statistics(
                        log_probs.detach(),
                        old,
                        A,
                        part.response_mask,
                        clip_low=method.clip_low,
                        clip_high=method.clip_high,
                    )
                )
            tally.step(self.policy.step(lr))
        sums = tally.total()
        tokens, updates = max(sums["tokens"], 1), max(tally.updates, 1)
        metrics = {
            "policy/loss": sums["policy"] / updates,
            "policy/clip_low": sums["clip_low"] / tokens,
            "policy/clip_high": sums["clip_high"] / tokens,
            "policy/update_kl": sums["kl"] / tokens,
            "policy/ratio_ess": sums["ratio"] ** 2 / (sums["ratio_square"] * tokens or math.nan),
            "policy/grad_norm": tally.grad_norm,
            "policy/lr": lr,
            "policy/skipped_updates": tally.skipped,
        }
        if method.lm_coefficient:
            metrics["lm/loss"] = sums["lm"] / updates
        if reference is not None:
            metrics["policy/kl"] = sums["reference_kl"] / updates
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's parameters by the actor's names, whole, one at a time, on every process."""
        for name, tensor in self.policy.parameters():
            yield name.removeprefix("actor."), tensor

    def save(self, folder: Path) -> None:
        """Writes models (as `save_pretrained` does), optimisers and counters into a folder."""
        self.policy.save(folder / "actor", self.actor, "actor.")
        if self.value is not None and self.critic is not None:
            self.value.save(folder / "critic", self.critic, "")
        if self.world.rank == 0:
            state = {"counters": self.counters, "reference": _fingerprint(self.reference)}
            torch.save(state, folder / "engine.pt")

    def load(self, folder: Path) -> None:
        """Restores optimisers and counters; the models are built from the folder already.

        Raises:
            CheckpointError: It is of another version.
            ModelError: The reference is another model.
        """
        file = folder / "engine.pt"
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: there is no {file.name}; it is of another version of this trainer, "
                "start the run anew"
            )
        state = torch.load(file, weights_only=True)
        if state["reference"] != _fingerprint(self.reference):
            raise ModelError(
                f"model.path {self.config.model.path}: is not the model that the run's KL loss "
                "started from; put that one back"
            )
        self.counters = state["counters"]
        self.policy.load(folder / "actor")
        if self.value is not None:
            self.value.load(folder / "critic")

    def _fitted(self) -> Learner:
        if self.value is None:
            raise RuntimeError(f"{self.method.name} has no critic")
        return self.value

    @torch.no_grad()
    def _log_probs(self, policy: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        log_probs, entropies = torch.zeros(2, *batch.response_mask.shape)
        for part in self._parts(batch, torch.arange(len(batch)), "actor"):
            found, entropy = self._scored(policy, part)
            log_probs[part.rows, : found.shape[1]] += found.cpu()
            entropies[part.rows, : found.shape[1]] += entropy.cpu()
        return self.world.sum(log_probs), self.world.sum(entropies)

    def _scored(self, policy: nn.Module, part: Part, *, entropy_gradient: bool = False) -> Scored:
        log_probs, entropy = policy(
            part.inputs,
            part.states,
            part.targets,
            temperature=self.config.rollout.temperature,
            entropy_gradient=entropy_gradient,
        )
        return part.slots(log_probs), part.slots(entropy)

    def _parts(self, batch: Batch, rows: Int[Tensor, " rows"], who: str) -> Iterator[Part]:
        return parts(
            batch,
            rows,
            model=self.actor if who == "actor" or self.critic is None else self.critic.trunk,
            packed=self.packed,
            budget=self.config.engine.micro_batch_tokens,
            device=self.device,
            world=self.world,
        )

    def _learning_rate(self, name: str, settings: Optimizer) -> float:
        warmup = settings.warmup_steps
        return settings.lr * (min(1.0, (self.counters[name] + 1) / warmup) if warmup else 1.0)

    def _minibatches(
        self, name: str, size: int, settings: Optimizer, passes: int
    ) -> Iterator[Int[Tensor, " rows"]]:
        """The rows of each optimiser batch, a new random order in each pass."""
        count = self.counters[name]
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


class _Tally:
    """Sums over the micro-batches of all processes, and what the optimiser steps came to."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, Tensor] = {}
        self._norms = 0.0
        self.updates, self.skipped = 0.0, 0.0

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            entry = torch.as_tensor(value, dtype=torch.float64).detach()
            self._sums[name] = self._sums.get(name, 0) + entry

    def step(self, norm: float) -> None:
        """Counts an optimiser step of this gradient norm; it was skipped if that is not finite."""
        if math.isfinite(norm):
            self.updates += 1
            self._norms += norm
        else:
            self.skipped += 1

    @property
    def grad_norm(self) -> float:
        return self._norms / max(self.updates, 1)

    def total(self) -> defaultdict[str, float]:
        names = sorted(self._sums)
        found = self._world.sum(torch.stack([self._sums[name].cpu() for name in names]))
        return defaultdict(float, zip(names, found.tolist(), strict=True))


def _fingerprint(policy: nn.Module | None) -> float | None:
    """Tells one frozen model from another; the same on every load of the same weights."""
    if policy is None:
        return None
    return sum(weight.double().abs().sum().item() for weight in policy.parameters())


LEARNERS: dict[str, Callable[..., Learner]] = {"plain": PlainLearner, "deepspeed": ZeroLearner}
"""`engine.kind` -> what trains a model."""
