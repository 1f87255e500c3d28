"""A plan as a table to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from train.plan.layout import GB
from train.plan.memory import Memory

if TYPE_CHECKING:
    from train.plan.predict import Plan

_MOMENTS = {
    "layers": "update, layers",
    "head": "update, head",
    "step": "update, step",
    "rollout": "rollout",
}
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "gathered": "gathered weights",
    "buckets": "gradient buckets",
    "activations": "activations",
    "logits": "logits",
    "temporaries": "temporaries",
    "rollout_weights": "rollout weights",
    "kv_cache": "KV cache",
    "rollout_workspace": "rollout workspace",
    "reserve": "reserve",
}


def table(plan: Plan) -> str:
    """All of a plan; complaints come last."""
    blocks = (_run(plan), _memory(plan), _step(plan), _whole(plan), _verdict(plan))
    return "\n\n".join("\n".join(block) for block in blocks)


def _run(plan: Plan) -> Iterator[str]:
    models, layout, device, work = plan.models, plan.layout, plan.device, plan.work
    critic = f"critic {models.critic.critic:,}" if models.critic else "no critic"
    reference = ", and a frozen reference" if models.reference else ""
    yield f"model     {plan.path}"
    yield f"          {models.actor.parameters:,} parameters, {critic}{reference}"
    turns = "training and rollouts take turns"
    if not layout.shared:
        turns = f"{layout.training_devices} train, {layout.rollout_devices} roll out"
    yield (
        f"devices   {layout.devices} x {device.name}, {_gb(device.memory)} GB "
        f"({device.memory / 2**30:.1f} GiB), {device.peak(layout.dtype) / 1e12:.3g} TFLOP/s in "
        f"{layout.dtype}, {device.bandwidth / 1e12:.3g} TB/s; {turns}"
    )
    yield f"training  {', '.join(_training(plan))}"
    yield f"rollouts  {', '.join(_rollouts(plan))}"
    yield (
        f"step      {work.trajectories:,} responses of {work.response:,.0f} tokens (at most "
        f"{work.longest_response:,}) to prompts of {work.prompt:,.0f} (at most "
        f"{work.longest_prompt:,}): {work.tokens:,.0f} tokens"
    )


def _training(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    plain = layout.engine == "plain"
    yield "plain PyTorch" if plain else f"DeepSpeed ZeRO stage {layout.zero_stage}"
    if layout.offload_optimizer:
        yield "optimiser on the host"
    if layout.offload_parameters:
        yield "weights on the host"
    yield "activation checkpointing" if layout.checkpointing else "all activations kept"
    yield f"micro-batches of {layout.micro_batch_tokens:,} tokens"
    yield f"{layout.logit_rows:,} rows of logits"


def _rollouts(plan: Plan) -> Iterator[str]:
    layout, rollouts = plan.layout, plan.rollouts
    if layout.backend == "vllm":
        yield f"vLLM on {layout.replicas} x {layout.tensor_parallel} devices"
        yield f"{layout.memory_share:.0%} of each"
        if layout.shared:
            yield f"sleep level {layout.sleep_level} during updates"
    else:
        yield "transformers"
    yield f"{rollouts.at_once:,} responses side by side (the KV cache holds {rollouts.fit:,})"
    yield f"{rollouts.waves:,} after each other"


def _memory(plan: Plan) -> Iterator[str]:
    moments: dict[str, Memory] = {
        title: getattr(plan.memory, field) for field, title in _MOMENTS.items()
    }
    yield _line("GB of one device", *moments)
    for field, title in _PARTS.items():
        sizes = [getattr(memory, field) for memory in moments.values()]
        if any(sizes):
            yield _line(title, *map(_gb, sizes))
    totals = [memory.total for memory in moments.values()]
    yield _line("total", *map(_gb, totals))
    yield _line("share of the device", *(f"{total / plan.device.memory:.0%}" for total in totals))
    if plan.host:
        yield f"and {_gb(plan.host)} GB of a node's own memory"


def _step(plan: Plan) -> Iterator[str]:
    yield _line("a step", "PFLOP", "seconds")
    for field in fields(plan.seconds):
        amounts = (getattr(plan.flops, field.name) / 1e15, getattr(plan.seconds, field.name))
        yield _line(field.name, *map(_figures, amounts))
    yield _line("total", _figures(plan.flops.total / 1e15), _figures(plan.step_seconds))
    assume = plan.assume
    yield f"at {assume.mfu:.0%} of the peak and {assume.bandwidth_use:.0%} of the bandwidth"


def _whole(plan: Plan) -> Iterator[str]:
    yield _line("the run", "hours", "device-hours")
    for field in fields(plan.hours):
        hours = getattr(plan.hours, field.name)
        yield _line(field.name, _figures(hours), _figures(hours * plan.layout.devices))
    yield _line("total", _figures(plan.hours.total), _figures(plan.gpu_hours))
    disk = plan.disk
    yield (
        f"disk: {_gb(disk.checkpoints)} GB of checkpoints ({_gb(disk.checkpoint)} GB each), "
        f"{_gb(disk.log)} GB of run log"
    )


def _verdict(plan: Plan) -> Iterator[str]:
    for note in plan.notes:
        yield f"note: {note}"
    for complaint in plan.complaints:
        yield f"does not fit: {complaint}"
    if plan.fits:
        yield "it fits"


def _line(title: str, *cells: str) -> str:
    return f"{title:20}" + "".join(f"{cell:>16}" for cell in cells)


def _gb(size: float) -> str:
    return _figures(size / GB) if size < 0.05 * GB else f"{size / GB:,.1f}"


def _figures(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 or number == 0 else f"{number:.3g}"
