"""The plan of a run, put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from train import addition
from train.config import Config, benchmark_name
from train.plan.cost import ByPhase, Costs, Rollouts
from train.plan.layout import Assumptions, Device, Layout, check_layout, device_named, layout_of
from train.plan.memory import Moments, host_bytes, memory_of
from train.plan.remedy import Fitting
from train.plan.shape import shape_of
from train.plan.text import table
from train.plan.work import Models, Work, check_work, work_of
from train.run import require_warm_start
from train.sources import problems_from

ROW_BYTES = 50
"""A trajectory's numbers in the run log, compressed, in a step of 4096 (measured)."""
TOKEN_BYTES = 2
"""A response token's text and id there, compressed: 1.8 on real responses (measured)."""


@dataclass(frozen=True)
class Hours:
    """Of wall clock, over the whole run."""

    training: float
    pretraining: float
    """Of the critic."""
    evaluation: float
    saving: float

    @property
    def total(self) -> float:
        """From start to end."""
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class Disk:
    """Bytes that a run writes and keeps."""

    checkpoint: float
    """One: weights and optimisers of actor and critic."""
    checkpoints: float
    """Those kept, and the one that is being written before an old one goes."""
    log: float
    """The run log's trajectories; its other parts are small beside them."""


@dataclass(frozen=True)
class Plan:
    """What a run will need.

    Attributes:
        path: Of the model.
        models: Their sizes.
        layout: How they lie on the devices.
        device: One of these.
        work: What a step has to do.
        assume: What had to be assumed.
        memory: Of one device, bytes.
        host: Of a node's own memory, bytes.
        rollouts: How responses are decoded.
        flops: Of a step, on all devices.
        seconds: Of a step, by phase.
        step_seconds: Of a step; less than the sum where rollouts and updates go on together.
        hours: Of the run.
        disk: What it writes.
        complaints: What does not fit, and which key to change.
        notes: What the numbers leave out.
    """

    path: str
    models: Models
    layout: Layout
    device: Device
    work: Work
    assume: Assumptions
    memory: Moments
    host: float
    rollouts: Rollouts
    flops: ByPhase
    seconds: ByPhase
    step_seconds: float
    hours: Hours
    disk: Disk
    complaints: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there is nothing to complain about."""
        return not self.complaints

    @property
    def gpu_hours(self) -> float:
        """Device-hours of the whole run."""
        return self.hours.total * self.layout.devices

    def text(self) -> str:
        """The plan as a table to read."""
        return table(self)


def plan(
    config: Config,
    *,
    layout: Layout | None = None,
    device: Device | None = None,
    assume: Assumptions | None = None,
) -> Plan:
    """Predicts a run.

    Args:
        config: The run's.
        layout: How it lies on devices; as `layout_of` reads the configuration when None.
        device: What one device can do. None: this machine's CPU, measured, for the plain engine;
            an A800, the paper's, for any other.
        assume: What neither says; the defaults when None.

    Raises:
        ConfigError: A combination that cannot be carried out at all. (What does not fit is a
            complaint of the plan.)
        DataError: A benchmark's file cannot be read.
        ModelError: The model's configuration cannot be used.
    """
    assume, layout = assume or Assumptions(), layout or layout_of(config)
    check_layout(layout, assume)
    work = work_of(config, assume)
    models = _models(config, work)
    check_work(config, layout, work, models.actor)
    device = device or device_named("cpu" if layout.engine == "plain" else "A800")

    costs = Costs(layout, device, assume)
    memory = memory_of(models, layout, work, device, assume)
    rollouts = costs.rollouts(
        models.actor,
        kv_cache=memory.rollout.kv_cache,
        responses=work.trajectories,
        prompt=work.prompt,
        response=work.response,
        longest=work.longest_response,
    )
    seconds = costs.seconds(models, work, rollouts.seconds)
    step = seconds.total
    if work.lag and not layout.shared:
        step = max(seconds.rollout, seconds.total - seconds.rollout)
    disk = _disk(config, models, layout, work)
    return Plan(
        path=config.model.path,
        models=models,
        layout=layout,
        device=device,
        work=work,
        assume=assume,
        memory=memory,
        host=host_bytes(models, layout),
        rollouts=rollouts,
        flops=costs.flops(models, work),
        seconds=seconds,
        step_seconds=step,
        hours=Hours(
            training=config.steps * step / 3600,
            pretraining=_pretraining_hours(config, models, work, costs, seconds),
            evaluation=_evaluation_hours(config, models, work, costs, memory),
            saving=_saving_hours(config, disk, layout, assume),
        ),
        disk=disk,
        complaints=tuple(Fitting(config, models, work, device, assume).complaints(layout)),
        notes=tuple(_notes(config, models, layout, work, assume)),
    )


def _models(config: Config, work: Work) -> Models:
    require_warm_start(config)
    actor = shape_of(config.model.path)
    trunk = config.model.critic_path
    critic = (shape_of(trunk) if trunk else actor) if work.critic else None
    return Models(actor, critic, work.reference)


def _disk(config: Config, models: Models, layout: Layout, work: Work) -> Disk:
    # Master weights are saved where the weights themselves are narrower.
    one = sum(models.trained) * (layout.width + (12 if layout.dtype == "bfloat16" else 8))
    rows = config.steps // config.log.trajectories_every * work.trajectories
    text = config.log.text_share * work.response * TOKEN_BYTES
    return Disk(
        checkpoint=one,
        checkpoints=one * (config.checkpoints.keep + 1),
        log=rows * (ROW_BYTES + text),
    )


def _pretraining_hours(
    config: Config, models: Models, work: Work, costs: Costs, seconds: ByPhase
) -> float:
    if models.critic is None:
        return 0.0
    fitting = seconds.critic * config.pretraining.passes / work.critic_passes
    batch = seconds.rollout + costs.values_seconds(models.critic, work) + fitting
    return config.declared().value_pretraining_steps * batch / 3600


def _evaluation_hours(
    config: Config, models: Models, work: Work, costs: Costs, memory: Moments
) -> float:
    """Responses to the benchmarks, relative to their limit as long as those of training."""
    problems = evaluation_problems(config, costs.assume)[0]
    if problems == 0:
        return 0.0
    limit = config.evaluation.max_tokens
    decoded = costs.rollouts(
        models.actor,
        kv_cache=memory.rollout.kv_cache,
        responses=problems * config.evaluation.samples,
        prompt=work.prompt,
        response=limit * work.response / work.longest_response,
        longest=limit,
    )
    return _times(config.steps, config.evaluation.every) * decoded.seconds / 3600


def _saving_hours(config: Config, disk: Disk, layout: Layout, assume: Assumptions) -> float:
    each = disk.checkpoint / (assume.disk * layout.nodes)
    return _times(config.steps, config.checkpoints.every) * each / 3600


def evaluation_problems(config: Config, assume: Assumptions) -> tuple[int, list[str]]:
    """Problems of an evaluation, and the benchmarks of which nobody can say how many they have."""
    if assume.evaluation_problems is not None:
        return assume.evaluation_problems, []
    known, unknown = 0, []
    for benchmark in config.evaluation.benchmarks:
        if benchmark.source == addition.DATASET or Path(benchmark.source).exists():
            known += len(problems_from(benchmark))
        elif benchmark.limit is not None:
            known += benchmark.limit
        else:
            unknown.append(benchmark_name(benchmark))
    return known, unknown


def _times(steps: int, every: int) -> int:
    """Before the first step, every so many steps (0: not between), and after the last."""
    return 1 + (math.ceil(steps / every) if every else 1)


def _notes(
    config: Config, models: Models, layout: Layout, work: Work, assume: Assumptions
) -> Iterator[str]:
    lengths: Sequence[tuple[str, float | None]] = (
        ("--prompt-tokens", assume.prompt_tokens),
        ("--response-tokens", assume.response_tokens),
    )
    if missing := [option for option, mean in lengths if mean is None]:
        yield (
            "tokens, FLOPs, time and the log are upper bounds, with lengths at their limits; give "
            f"the means that you expect: {', '.join(missing)}"
        )
    room = models.positions - work.longest_response
    if 0 < room < work.longest_prompt:
        yield (
            f"beside responses of {work.longest_response} tokens the model has {room} positions "
            f"for a prompt; longer ones (data.max_prompt_tokens: {work.longest_prompt}) are refused"
        )
    if unknown := evaluation_problems(config, assume)[1]:
        yield (
            f"evaluation on {', '.join(unknown)} is not counted; give the number of problems of "
            "all benchmarks: --evaluation-problems"
        )
    if config.declared().dynamic_sampling:
        yield (
            "groups dropped by dynamic sampling are not counted; with them, rollouts cost up to "
            f"{1 + config.rollout.max_refills} times as much (rollout.max_refills)"
        )
    if work.lag and layout.shared:
        yield (
            "rollouts one step late still take turns with the updates; they would run beside them "
            "on devices of their own (--rollout-devices)"
        )
