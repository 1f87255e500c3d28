"""Bytes on a device, by part, at the moments that can be the worst."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace

from train.plan.layout import Assumptions, Attention, Device, Layout
from train.plan.shape import Shape
from train.plan.work import Models, Work

BUCKET = 5e8
"""Elements of the buffer in which gradients travel: DeepSpeed's `reduce_bucket_size`."""
LIVE = 1e9
"""Elements of gathered weights, at most: DeepSpeed's `stage3_max_live_parameters`."""
BATCHED_TOKENS = 8192
"""Tokens of a prefill: vLLM's `max_num_batched_tokens`."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at one moment."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    gathered: float = 0
    """Weights of other devices, fetched for use (stage 3)."""
    buckets: float = 0
    """Gradients on their way to other devices."""
    activations: float = 0
    logits: float = 0
    temporaries: float = 0
    """Of an optimiser step."""
    rollout_weights: float = 0
    """The rollout engine's own copy of the policy."""
    kv_cache: float = 0
    rollout_workspace: float = 0
    reserve: float = 0

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return float(sum(astuple(self)))

    def __add__(self, other: Memory) -> Memory:
        """Part by part."""
        names = [field.name for field in fields(self)]
        return Memory(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Moments:
    """Memory of a device when it is fullest.

    Attributes:
        layers: An update, in the backward pass of a layer.
        head: An update, at the output layer.
        step: An update, in the optimiser's step.
        rollout: Decoding, with the KV cache full. On devices of its own where there are such.
    """

    layers: Memory
    head: Memory
    step: Memory
    rollout: Memory


def memory_of(
    models: Models, layout: Layout, work: Work, device: Device, assume: Assumptions
) -> Moments:
    """Memory of one device."""
    resident = model_states(models, layout) + Memory(reserve=assume.reserve)
    rolling = _rollout_engine(models.actor, layout, work, device)
    training = resident + _staying(rolling, layout) + _of_an_update(models, layout)
    kept, layers, head = _activations(models, layout, work)
    return Moments(
        layers=replace(training, activations=kept + layers),
        head=replace(training, activations=kept, logits=head),
        step=replace(training, gathered=0, temporaries=_step_bytes(models, layout)),
        rollout=rolling + (resident if layout.shared else Memory(reserve=assume.reserve)),
    )


def model_states(models: Models, layout: Layout) -> Memory:
    """What stays between updates: the weights and optimisers of all models.

    In stage 3 DeepSpeed also keeps each model's gradients and the bucket they travel in (measured).
    """
    n, stage = layout.training_devices, layout.zero_stage
    trained = sum(models.trained)
    weights = (trained + models.frozen) * layout.width / (n if stage >= 3 else 1)
    optimizer = trained * layout.optimizer_width / (n if stage >= 1 else 1)
    gradients = trained * layout.width / n if stage >= 3 else 0
    buckets = len(models.trained) * BUCKET * layout.width if stage >= 3 else 0
    return Memory(
        weights=0 if layout.offload_parameters else weights,
        gradients=0 if layout.offload_optimizer else gradients,
        optimizer=0 if layout.offload_optimizer else optimizer,
        buckets=buckets,
    )


def _of_an_update(models: Models, layout: Layout) -> Memory:
    """What comes on top while the larger model is trained, activations aside."""
    n, stage = layout.training_devices, layout.zero_stage
    largest = max(models.trained)
    if stage >= 3:
        return Memory(gathered=min(LIVE, largest) * layout.width if n > 1 else 0)
    gradients = largest * layout.width / (n if stage >= 2 else 1)
    travelling = BUCKET if stage >= 1 else min(BUCKET, largest) if n > 1 else 0
    return Memory(
        gradients=0 if layout.offload_optimizer else gradients,
        buckets=travelling * layout.width,
    )


def _step_bytes(models: Models, layout: Layout) -> float:
    """AdamW's denominator, and under ZeRO a float32 copy of the gradients; all on one device."""
    if layout.offload_optimizer:
        return 0.0
    if layout.zero_stage == 0:
        return 4.0 * max(models.trained)
    return 8.0 * max(models.trained) / layout.training_devices


def host_bytes(models: Models, layout: Layout) -> float:
    """Bytes of a node's own memory: what is offloaded, and a sleeping vLLM's weights.

    Gradients are kept in float32 there.
    """
    here = min(layout.devices_per_node, layout.training_devices)
    total = 0.0
    if layout.offload_optimizer:
        total += sum(models.trained) * (layout.optimizer_width + 4)
    if layout.offload_parameters:
        total += (sum(models.trained) + models.frozen) * layout.width
    total *= here / layout.training_devices
    if layout.sleeps and layout.sleep_level == 1:
        total += here * models.actor.parameters * layout.width / layout.tensor_parallel
    return total


def _staying(rolling: Memory, layout: Layout) -> Memory:
    """What the rollout engine keeps on a device during updates."""
    if not layout.shared or layout.sleeps:
        return Memory()
    if layout.backend == "transformers":  # its cache goes with each batch of responses
        return Memory(rollout_weights=rolling.rollout_weights)
    return rolling


def _rollout_engine(actor: Shape, layout: Layout, work: Work, device: Device) -> Memory:
    """Of the rollout engine alone. vLLM turns what is left of its share into KV cache."""
    weights = actor.parameters * layout.width / layout.tensor_parallel
    if layout.backend == "transformers":
        sequences = min(layout.max_sequences, work.trajectories)
        cached = kv_bytes_per_token(actor, width=layout.width)
        # Scores, their softmax and its running sum, these two in float64.
        chosen = 24 * sequences * actor.vocabulary
        return Memory(
            rollout_weights=weights,
            kv_cache=sequences * work.longest * cached,
            rollout_workspace=chosen,
        )
    wide = 4 * actor.hidden + 2 * actor.intermediate / layout.tensor_parallel
    sampled = 8 * layout.max_sequences * actor.vocabulary  # float32 logits, and sorted
    workspace = BATCHED_TOKENS * wide * layout.width + sampled
    left = layout.memory_share * device.memory - weights - workspace
    return Memory(rollout_weights=weights, kv_cache=max(0.0, left), rollout_workspace=workspace)


def _activations(models: Models, layout: Layout, work: Work) -> tuple[float, float, float]:
    """Kept for the backward pass; beside them at a layer; beside them at the output layer."""
    tokens = micro_batch_tokens(layout, work, updates=work.actor_updates)
    kept = max(kept_bytes(shape, tokens, layout, context=work.longest) for shape in models.trunks)
    layers = max(
        backward_bytes(shape, tokens, layout, context=work.longest) for shape in models.trunks
    )
    answered = math.ceil(tokens * work.longest_response / work.longest)
    return kept, layers, logit_bytes(models.actor, min(layout.logit_rows, answered), layout)


def micro_batch_tokens(layout: Layout, work: Work, *, updates: int) -> int:
    """Tokens of a full micro-batch: the budget or the longest sequence, but no more than all."""
    share = math.ceil(work.trajectories / updates / layout.training_devices) * work.longest
    return min(max(layout.micro_batch_tokens, work.longest), share)


def layer_bytes(shape: Shape, *, width: int, attention: Attention, context: int) -> int:
    """Bytes that one layer keeps of one token for its backward pass.

    With hidden size h, query width a, key width k, intermediate size f, n heads and w bytes a
    number, under FlashAttention::

        two norms      2 (4h + 2wh + 4)    input in float32, normalised, output; 1 / its norm
        attention      w (2a + 2k) + 4n    q, k (both rotated), v, output; log-sum of each head
        gated MLP      4wf                 gate, silu(gate), up, product

    To the byte what transformers' Qwen2 layer saves. ``packed`` adds a copy of the output and the
    index that packs it (and pads inside attention: sequences of very different lengths in one
    micro-batch keep more than this); ``sdpa`` under a padding mask repeats k and v for every query
    head and keeps the mask in numbers; ``eager`` keeps each head's probabilities, in float32 and in
    `width`.

    Args:
        shape: The model.
        width: w, 2 or 4.
        attention: As `Layout.attention`.
        context: Tokens of a sequence, where something is kept for each pair of them.
    """
    h, a, n = shape.hidden, shape.query, shape.heads
    k = shape.key if attention in ("flash", "packed") else a
    total = (
        2 * (4 * h + 2 * width * h + 4) + width * (2 * a + 2 * k) + 4 * width * shape.intermediate
    )
    if shape.qk_norm:
        total += (4 + width) * (a + shape.key) + 4 * (n + shape.kv_heads)
    probabilities = 4 if width == 4 else 4 + width
    return (
        total
        + {
            "flash": 4 * n,
            "packed": 4 * n + width * a + 9,
            "sdpa": 4 * n + width * context,
            "eager": n * probabilities * context,
        }[attention]
    )


def kept_bytes(shape: Shape, tokens: int, layout: Layout, *, context: int) -> int:
    """Bytes that a forward pass of the trunk leaves behind for the backward pass.

    Of every layer `layer_bytes`, or with checkpointing its input alone; then the last norm, the
    token ids and the rotary embedding's two tables.

    Args:
        shape: The model.
        tokens: Of the micro-batch.
        layout: Dtype, attention, checkpointing.
        context: Tokens of a sequence.
    """
    w, h = layout.width, shape.hidden
    whole = layer_bytes(shape, width=w, attention=layout.attention, context=context)
    layer = w * h if layout.checkpointing else whole
    ends = 4 * h + 2 * w * h + 4 + 8 + 2 * w * shape.head_dim
    return tokens * (shape.layers * layer + ends)


def backward_bytes(shape: Shape, tokens: int, layout: Layout, *, context: int) -> int:
    """Bytes beside the kept ones in the backward pass of a layer.

    The gradient where it is widest (intermediate size) and that of a weight matrix before it is
    added up, or the float32 copies of the last norm (measured); with checkpointing all that the
    layer computes again comes on top, and the norm is over by then.

    Args:
        shape: The model.
        tokens: Of the micro-batch.
        layout: Dtype, attention, checkpointing.
        context: Tokens of a sequence.
    """
    w = layout.width
    flowing = w * shape.intermediate * (tokens + shape.hidden)
    if not layout.checkpointing:
        return max(flowing, 18 * shape.hidden * tokens)
    again = layer_bytes(shape, width=w, attention=layout.attention, context=context)
    return flowing + tokens * again


def logit_bytes(shape: Shape, rows: int, layout: Layout) -> int:
    """Bytes at the output layer, with the logits of so many tokens at once.

    Five float32 numbers for each token and vocabulary entry in the backward pass of
    log-probability and entropy (measured), beside the gradient of the layer's own weight that the
    chunks before have added up; or that gradient twice, while a chunk's is added.
    """
    gradient = layout.width * shape.hidden
    return shape.vocabulary * max(20 * rows + gradient, 4 * rows + 2 * gradient)


def kv_bytes_per_token(shape: Shape, *, width: int, tensor_parallel: int = 1) -> int:
    """Bytes of one token in one device's KV cache: 2 x layers x heads here x head size x width."""
    here = max(shape.kv_heads // tensor_parallel, 1)
    return 2 * shape.layers * here * shape.head_dim * width
