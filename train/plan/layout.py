"""How a run lies on its devices, what a device can do, and what has to be assumed."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from train.config import Config, ConfigError, unknown

GB = 1e9

Dtype = Literal["bfloat16", "float32"]
Attention = Literal["flash", "packed", "sdpa", "eager"]


@dataclass(frozen=True)
class Device:
    """What one device can do."""

    name: str
    memory: float
    """Bytes."""
    tflops: float
    """Peak of dense bfloat16 matrix products, 10^12 FLOP/s."""
    float32_tflops: float
    """The same in float32, without tensor cores."""
    bandwidth: float
    """Of its memory, bytes/s."""
    link: float
    """To the other devices of its node, bytes/s in one direction."""

    def peak(self, dtype: Dtype) -> float:
        """FLOP/s at most."""
        return 1e12 * (self.tflops if dtype == "bfloat16" else self.float32_tflops)


DEVICES = {
    device.name: device
    for device in (
        Device("A100", 80 * GB, 312, 19.5, 2.0e12, 300e9),
        Device("A800", 80 * GB, 312, 19.5, 2.0e12, 200e9),
        Device("H100", 80 * GB, 989, 67, 3.35e12, 450e9),
        Device("H800", 80 * GB, 989, 67, 3.35e12, 200e9),
        Device("H200", 141 * GB, 989, 67, 4.8e12, 450e9),
        Device("L40S", 48 * GB, 362, 91.6, 0.864e12, 32e9),
        Device("RTX4090", 24 * GB, 165, 82.6, 1.0e12, 32e9),
    )
}
"""By name, from the vendors' data sheets: SXM boards where there are several, no sparsity."""


def device_named(
    name: str,
    *,
    memory: str | None = None,
    peak_tflops: float | None = None,
    bandwidth: float | None = None,
) -> Device:
    """A known device, with some of its numbers given instead.

    Args:
        name: A key of `DEVICES`, or ``cpu``: this machine, measured in a moment.
        memory: As `parse_memory` reads it.
        peak_tflops: Peak in the run's dtype, 10^12 FLOP/s.
        bandwidth: Of its memory, 10^12 bytes/s.

    Raises:
        ConfigError: Unknown name or impossible number.
    """
    if name != "cpu" and name not in DEVICES:
        raise ConfigError(f"--gpu: {unknown(name, [*DEVICES, 'cpu'])}")
    given: dict[str, float] = {}
    if memory is not None:
        given["memory"] = parse_memory(memory)
    if peak_tflops is not None:
        require(peak_tflops > 0, f"--peak-tflops: must be above 0, got {peak_tflops}")
        given |= {"tflops": peak_tflops, "float32_tflops": peak_tflops}
    if bandwidth is not None:
        require(bandwidth > 0, f"--bandwidth: must be above 0 (TB/s), got {bandwidth}")
        given["bandwidth"] = bandwidth * 1e12
    return replace(this_cpu() if name == "cpu" else DEVICES[name], **given)  # type: ignore[arg-type]


def parse_memory(text: str) -> float:
    """Bytes of ``80GB`` (80 x 10^9), ``80GiB`` (80 x 2^30) or plain ``80``, which means GB.

    Raises:
        ConfigError: It is no positive size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(i?)B)?\s*", text, re.IGNORECASE)
    size = 0.0
    if found:
        number, prefix, binary = found.groups()
        power = "KMGT".index(prefix.upper()) + 1 if prefix else 3
        size = float(number) * (1024 if binary else 1000) ** power
    require(
        0 < size < math.inf,
        f"--memory: {text!r} is no size; write 80GB (80 x 10^9 bytes, as plain 80) or 80GiB "
        "(80 x 2^30)",
    )
    return size


def this_cpu() -> Device:
    """This machine: its memory, and how fast it multiplies float32 matrices and reads, measured."""
    matrix, long = torch.rand(512, 512), torch.rand(2**23)
    multiplying = _best_seconds(partial(torch.mm, matrix, matrix))
    reading = _best_seconds(long.sum)
    rate = 2 * 512**3 / multiplying / 1e12
    return Device(
        name="cpu",
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        tflops=rate,
        float32_tflops=rate,
        bandwidth=long.nbytes / reading,
        link=math.inf,  # it is alone
    )


def _best_seconds(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


@dataclass(frozen=True)
class Layout:
    """How a run lies on its devices. Defaults: a cluster on which training and vLLM take turns."""

    micro_batch_tokens: int
    """Tokens of one device's forward pass; a longer sequence stands alone."""
    devices: int = 1
    devices_per_node: int = 8
    rollout_devices: int = 0
    """Of them, those that only roll out. 0: every device trains and rolls out in turn."""
    engine: Literal["plain", "deepspeed"] = "deepspeed"
    zero_stage: int = 3
    offload_optimizer: bool = False
    """Optimiser and gradients live in the node's own memory."""
    offload_parameters: bool = False
    """Weights too (stage 3 only)."""
    checkpointing: bool = True
    """Activation checkpointing: of each layer only its input is kept."""
    dtype: Dtype = "bfloat16"
    """Of weights, gradients and activations; bfloat16 comes with float32 master weights."""
    logit_rows: int = 1024
    """Tokens whose logits are held at once."""
    attention: Attention = "flash"
    """flash and packed: no padding, FlashAttention's kernel or PyTorch's. sdpa: PyTorch's under a
    padding mask. eager: keeps every score."""
    backend: Literal["transformers", "vllm"] = "vllm"
    tensor_parallel: int = 1
    """Devices of one vLLM replica."""
    memory_share: float = 0.5
    """vLLM's share of a device's memory (gpu_memory_utilization), KV cache included."""
    sleep_level: int = 1
    """vLLM during updates on shared devices. 0: stays; 1: weights go to the host; 2: dropped."""
    max_model_len: int | None = None
    """vLLM's longest sequence; null: what the run's limits need."""
    max_sequences: int = 256
    """Responses that one replica decodes side by side, at most."""

    @property
    def training_devices(self) -> int:
        """Over which ZeRO splits."""
        return self.devices - self.rollout_devices

    @property
    def replicas(self) -> int:
        """Copies of the policy that roll out side by side."""
        return (self.rollout_devices or self.devices) // self.tensor_parallel

    @property
    def shared(self) -> bool:
        """Whether training and rollouts take turns on the same devices."""
        return self.rollout_devices == 0

    @property
    def sleeps(self) -> bool:
        """Whether vLLM's memory is free during updates."""
        return self.shared and self.backend == "vllm" and self.sleep_level > 0

    @property
    def nodes(self) -> int:
        """Machines."""
        return math.ceil(self.devices / self.devices_per_node)

    @property
    def width(self) -> int:
        """Bytes of a weight, a gradient or an activation."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def optimizer_width(self) -> int:
        """AdamW's bytes a parameter: two float32 moments and a master weight.

        From stage 1 on DeepSpeed copies the weights it updates even where they are float32 already.
        """
        return 12 if self.dtype == "bfloat16" or self.zero_stage >= 1 else 8


KEYS = {
    "devices": "--devices",
    "devices_per_node": "--devices-per-node",
    "rollout_devices": "--rollout-devices",
    "engine": "engine.kind",
    "zero_stage": "engine.stage",
    "offload_optimizer": "engine.offload_optimizer",
    "offload_parameters": "engine.offload_parameters",
    "checkpointing": "engine.checkpoint_activations",
    "micro_batch_tokens": "engine.micro_batch_tokens",
    "logit_rows": "engine.logit_rows",
    "tensor_parallel": "rollout.tensor_parallel",
    "memory_share": "rollout.memory_share",
    "sleep_level": "--sleep-level",
    "max_model_len": "rollout.max_model_len",
    "max_sequences": "rollout.batch_size",
}
"""A field of `Layout` -> what a user writes to change it."""


def layout_of(config: Config, **given: Any) -> Layout:
    """The layout that a configuration asks for, with some of its fields given instead.

    Args:
        config: The run's.
        **given: Fields of `Layout`: what a configuration does not say (how many devices there are),
            or what would be if it said otherwise.
    """
    engine, rollout = config.engine, config.rollout
    stated: dict[str, Any] = {
        "engine": engine.kind,
        "dtype": config.model.dtype,
        "micro_batch_tokens": engine.micro_batch_tokens,
        "logit_rows": engine.logit_rows,
        "checkpointing": engine.checkpoint_activations,
        "attention": "sdpa" if engine.packed is False else "packed",
        "zero_stage": 0,
        "backend": rollout.backend,
        "max_sequences": rollout.batch_size,
    }
    if engine.kind == "deepspeed":
        stated |= {
            "zero_stage": engine.stage,
            "offload_optimizer": engine.offload_optimizer,
            "offload_parameters": engine.offload_parameters,
        }
    if rollout.backend == "vllm":
        stated |= {
            "tensor_parallel": rollout.tensor_parallel,
            "memory_share": rollout.memory_share,
            "max_model_len": rollout.max_model_len,
        }
    return Layout(**(stated | given))


@dataclass(frozen=True)
class Assumptions:
    """What neither the configuration nor a data sheet says. Each is an option of the command."""

    prompt_tokens: float | None = None
    """Mean prompt; None: `data.max_prompt_tokens`."""
    response_tokens: float | None = None
    """Mean response; None: `rollout.max_tokens`."""
    evaluation_problems: int | None = None
    """Of all benchmarks; None: their limits, and a note about those without one."""
    mfu: float = 0.35
    """Share of the peak that training, scoring and prefill reach."""
    bandwidth_use: float = 0.6
    """Share of the memory's bandwidth that decoding and the optimiser reach."""
    network: float = 100e9
    """Between nodes, bytes/s of all cards of one node."""
    network_use: float = 0.8
    """Share of network and links that collectives reach."""
    host_link: float = 25e9
    """Between a device and its host, bytes/s (PCIe 4)."""
    host_bandwidth: float = 200e9
    """Of a node's own memory, bytes/s: the pace of an offloaded optimiser."""
    host_memory: float | None = None
    """Of a node itself, bytes; None: not checked."""
    disk: float = 1e9
    """Bytes/s at which a node writes checkpoints."""
    reserve: float = 3e9
    """Bytes of a device for its context, the collectives' own buffers and fragmentation."""


def check_layout(layout: Layout, assume: Assumptions) -> None:
    """Refuses numbers that mean nothing, and devices that cannot be divided so.

    Raises:
        ConfigError: Names the key and the remedy.
    """
    at_least_one = (
        "devices",
        "devices_per_node",
        "micro_batch_tokens",
        "logit_rows",
        "tensor_parallel",
        "max_sequences",
    )
    for field in at_least_one:
        value = getattr(layout, field)
        require(value >= 1, f"{KEYS[field]}: must be at least 1, got {value}")
    share = layout.memory_share
    require(0 < share < 1, f"{KEYS['memory_share']}: must lie between 0 and 1, got {share}")
    for field, allowed in (("zero_stage", (0, 1, 2, 3)), ("sleep_level", (0, 1, 2))):
        value = getattr(layout, field)
        require(value in allowed, f"{KEYS[field]}: must be one of {allowed}, got {value}")
    for field in ("mfu", "bandwidth_use", "network_use"):
        value = getattr(assume, field)
        require(0 < value <= 1, f"{_option(field)}: must be above 0, at most 1, got {value}")
    for field in ("network", "host_link", "host_bandwidth", "disk"):
        value = getattr(assume, field)
        require(value > 0, f"{_option(field)}: must be above 0 bytes/s, got {value}")
    for field in ("reserve", "evaluation_problems"):
        value = getattr(assume, field) or 0
        require(value >= 0, f"{_option(field)}: must be at least 0, got {value}")
    _check_division(layout)


def _check_division(layout: Layout) -> None:
    devices, node, tensor = layout.devices, layout.devices_per_node, layout.tensor_parallel
    rolling = layout.rollout_devices or devices
    stage, spread = KEYS["zero_stage"], KEYS["tensor_parallel"]
    require(
        devices <= node or devices % node == 0,
        f"--devices: {devices} do not fill nodes of {node} (--devices-per-node); take "
        f"{devices // node * node}",
    )
    require(
        layout.engine == "deepspeed" or (devices == 1 and layout.zero_stage == 0),
        f"{KEYS['engine']}: the plain engine splits nothing over {devices} devices in ZeRO stage "
        f"{layout.zero_stage}; take --devices 1 and {stage}=0, or deepspeed",
    )
    require(
        0 <= layout.rollout_devices < devices,
        f"{KEYS['rollout_devices']}: {layout.rollout_devices} of {devices} devices leave none to "
        "train on; lower it (0: all devices do both)",
    )
    require(
        layout.backend == "vllm" or (tensor == 1 and layout.shared),
        f"{spread}, {KEYS['rollout_devices']}: only rollout.backend=vllm spreads over devices",
    )
    require(
        rolling % tensor == 0 and tensor <= node,
        f"{spread}: replicas of {tensor} devices do not divide the {rolling} that roll out, or do "
        f"not fit in a node of {node}; lower it",
    )
    require(
        not layout.offload_optimizer or layout.zero_stage >= 1,
        f"{KEYS['offload_optimizer']}: offloads what is split; set {stage} to 1 or more",
    )
    require(
        not layout.offload_parameters or layout.zero_stage == 3,
        f"{KEYS['offload_parameters']}: offloads what is split; set {stage}=3",
    )


def require(holds: bool, message: str) -> None:
    """Raises ConfigError with the message unless something holds."""
    if not holds:
        raise ConfigError(message)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
