"""FLOPs and seconds of a step, by phase."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from train.plan.layout import Assumptions, Device, Layout
from train.plan.memory import kv_bytes_per_token, micro_batch_tokens
from train.plan.shape import Shape
from train.plan.work import Models, Work

LAUNCH = {"vllm": 1e-4, "transformers": 1e-3}
"""Seconds between the kernels of a layer in one decoding step: as a CUDA graph, or one by one."""


@dataclass(frozen=True)
class ByPhase:
    """A number for each phase of a step, as the run log names them."""

    rollout: float
    values: float
    """Log-probabilities and values, without gradient."""
    critic: float
    actor: float
    sync: float = 0.0

    @property
    def total(self) -> float:
        """Of all phases."""
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class Rollouts:
    """How responses are decoded on one replica."""

    fit: int
    """Prompts with their responses, of mean length, that the KV cache holds."""
    at_once: int
    """Decoded side by side."""
    waves: int
    """One after the other."""
    seconds: float


@dataclass(frozen=True)
class Costs:
    """Turns work into FLOPs and seconds, for one way of running it."""

    layout: Layout
    device: Device
    assume: Assumptions

    @property
    def rate(self) -> float:
        """FLOP/s of one device."""
        return self.device.peak(self.layout.dtype) * self.assume.mfu

    @property
    def bandwidth(self) -> float:
        """Bytes/s of its memory."""
        return self.device.bandwidth * self.assume.bandwidth_use

    @property
    def link(self) -> float:
        """Bytes/s of a ring over all devices: of its slowest piece."""
        several = self.layout.nodes > 1
        slowest = min(self.device.link, self.assume.network) if several else self.device.link
        return slowest * self.assume.network_use

    def flops(self, models: Models, work: Work) -> ByPhase:
        """FLOPs of a step on all devices together."""
        actor = step_flops(models.actor, work, logits=True)
        critic = step_flops(models.critic, work, logits=False) if models.critic else 0.0
        # Forward, backward (two) and forward again. That last one PyTorch ends early, before the
        # MLP's last product: 4 is up to a twelfth too much.
        passes = 4 if self.layout.checkpointing else 3
        return ByPhase(
            rollout=actor,
            values=actor + critic,
            critic=passes * critic * work.critic_passes,
            actor=passes * actor * work.actor_passes + (actor if models.reference else 0.0),
        )

    def seconds(self, models: Models, work: Work, rollout: float) -> ByPhase:
        """Seconds of a step, given those of its rollouts."""
        flops = self.flops(models, work)
        critic = values = 0.0
        if models.critic:
            critic = self.update_seconds(
                models.critic.critic,
                flops.critic,
                work,
                updates=work.critic_updates,
                passes=work.critic_passes,
            )
            values = self.values_seconds(models.critic, work)
        return ByPhase(
            rollout=rollout,
            values=values
            + self._scoring_seconds(
                models.actor.parameters, step_flops(models.actor, work, logits=True), work
            ),
            critic=critic,
            actor=self.update_seconds(
                models.actor.parameters,
                flops.actor,
                work,
                updates=work.actor_updates,
                passes=work.actor_passes,
            ),
            sync=self._sync_seconds(models.actor),
        )

    def values_seconds(self, critic: Shape, work: Work) -> float:
        """Seconds to evaluate the step's responses."""
        return self._scoring_seconds(critic.critic, step_flops(critic, work, logits=False), work)

    def _scoring_seconds(self, parameters: int, flops: float, work: Work) -> float:
        """Of one forward pass; in stage 3 each micro-batch gathers the weights."""
        batches = self._micro_batches(work, updates=1)
        sent = parameters * self.layout.width * batches if self.layout.zero_stage == 3 else 0
        return self._in_turn(flops, sent)

    def update_seconds(
        self, parameters: int, flops: float, work: Work, *, updates: int, passes: int
    ) -> float:
        """Seconds of passes that train.

        What a device sends (section 7 of the ZeRO paper): in stage 0, gradients once an update, all
        the way round and back; in 1, gradients there and updated weights back; in 2, gradients once
        a micro-batch; in 3, weights too, forward and backward.

        Args:
            parameters: Of the model.
            flops: Of all passes.
            work: The step.
            updates: Optimiser batches of one pass.
            passes: Over the step's responses.
        """
        steps = updates * passes
        batches = self._micro_batches(work, updates=updates) * passes
        times = (2 * steps, 2 * steps, batches + steps, 3 * batches)[self.layout.zero_stage]
        sent = times * parameters * self.layout.width
        return self._in_turn(flops, sent) + steps * self._optimizer_seconds(parameters)

    def _in_turn(self, flops: float, sent: float) -> float:
        """Computing, then communicating: the engine does not let them overlap."""
        devices = self.layout.training_devices
        computing = flops / (devices * self.rate)
        return computing + (sent / self.link if devices > 1 else 0.0)

    def _micro_batches(self, work: Work, *, updates: int) -> int:
        """Of one pass on one device."""
        mine = work.tokens / self.layout.training_devices
        return max(
            updates, math.ceil(mine / micro_batch_tokens(self.layout, work, updates=updates))
        )

    def _optimizer_seconds(self, parameters: int) -> float:
        """Reading and writing in one AdamW step; where offloaded, in the node's memory."""
        layout = self.layout
        part = parameters / (layout.training_devices if layout.zero_stage >= 1 else 1)
        there_and_back = 2 * part * layout.width
        touched = 2 * part * layout.optimizer_width + there_and_back
        if not layout.offload_optimizer:
            return touched / self.bandwidth
        beside = min(layout.devices_per_node, layout.training_devices)
        slow = touched * beside / self.assume.host_bandwidth
        return slow + there_and_back / self.assume.host_link

    def _sync_seconds(self, actor: Shape) -> float:
        """The weights through the collectives and into the replica; vLLM's sleep and waking."""
        size = actor.parameters * self.layout.width
        part = size / self.layout.tensor_parallel
        seconds = 2 * part / self.bandwidth
        if self.layout.devices > 1:
            seconds += size / self.link
        if self.layout.sleeps and self.layout.sleep_level == 1:
            seconds += 2 * part / self.assume.host_link
        return seconds

    def rollouts(
        self,
        actor: Shape,
        *,
        kv_cache: float,
        responses: int,
        prompt: float,
        response: float,
        longest: int,
    ) -> Rollouts:
        """Decodes responses in waves as long as the mean, and a last straggler to the limit.

        A decoding step reads all weights and the sequences' keys and values (half their final
        number on average), or multiplies, if that takes longer; `LAUNCH` comes on top.

        Args:
            actor: The policy.
            kv_cache: Bytes of it on one device.
            responses: Over all replicas.
            prompt: Mean tokens.
            response: Mean tokens.
            longest: Tokens of the longest response.
        """
        layout = self.layout
        tensor, width = layout.tensor_parallel, layout.width
        cached = kv_bytes_per_token(actor, width=width, tensor_parallel=tensor)
        mine = math.ceil(responses / layout.replicas)
        fit = int(kv_cache / (cached * (prompt + response)))
        at_once = max(1, min(mine, fit, layout.max_sequences))
        context = prompt + response / 2

        def step(batch: int) -> float:
            read = actor.parameters * width / tensor + batch * context * cached
            # A new token looks at all before it: no pair is left out.
            flops = forward_flops(actor, batch, context=context, logits=batch, causal=False)
            longer = max(read / self.bandwidth, flops / (self.rate * tensor))
            return longer + actor.layers * LAUNCH[layout.backend]

        prefill = mine * forward_flops(actor, prompt, context=prompt, logits=1)
        full, rest = divmod(mine, at_once)
        decoding = response * (full * step(at_once) + (step(rest) if rest else 0.0))
        straggler = (longest - response) * step(1)
        return Rollouts(
            fit=fit,
            at_once=at_once,
            waves=math.ceil(mine / at_once),
            seconds=prefill / (self.rate * tensor) + decoding + straggler,
        )


def forward_flops(
    shape: Shape, tokens: float, *, context: float, logits: float = 0, causal: bool = True
) -> float:
    """FLOPs of a forward pass: 2 a matrix weight and token, 4 a query unit, layer and pair.

    Args:
        shape: The model.
        tokens: In all.
        context: Tokens of each sequence that they form.
        logits: Tokens whose logits are computed.
        causal: Whether pairs that the mask forbids, half of them, are left out, as FlashAttention
            does. (Eager attention computes them, and `train.flops` counts them, as published
            utilisations do.)
    """
    pairs = tokens * context / (2 if causal else 1)
    return (
        2 * tokens * shape.layers * shape.layer_matrices
        + 4 * pairs * shape.layers * shape.query
        + 2 * logits * shape.output_layer
    )


def step_flops(shape: Shape, work: Work, *, logits: bool) -> float:
    """FLOPs of a forward pass over the step's responses, with the logits of their tokens or not."""
    answered = work.trajectories * work.response if logits else 0
    return forward_flops(shape, work.tokens, context=work.sequence, logits=answered)
