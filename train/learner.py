"""One model with its optimiser: what differs between plain PyTorch and DeepSpeed.

An optimiser's state is saved whole, parameter by parameter under its name, whoever trains: a run
may go on with another kind of learner, another ZeRO stage or another number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from train.checkpoint import CheckpointError
from train.config import Config, ConfigError, Optimizer
from train.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, by PyTorch's names."""
_SHARD = 2**31
"""Bytes of one file of the optimiser's state, about."""


class Savable(Protocol):
    """A model that writes itself in transformers' form."""

    def save_pretrained(self, folder: Path, /, *, state_dict: Any = None) -> Any:
        """Writes configuration and weights: its own, or those given."""


class Learner(Protocol):
    """A model under training.

    Attributes:
        module: Called for forward passes.
    """

    module: nn.Module

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss, this process's share of a sum over all of them."""

    def step(self, lr: float) -> float:
        """Takes the optimiser step of the gradients added since the last one.

        Returns:
            Their global norm before clipping. Where it is not finite the step was skipped.
        """

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, one at a time; all processes go through them together."""

    def save(self, folder: Path, model: Savable, prefix: str) -> None:
        """Writes the model and the optimiser's state into a new folder.

        Args:
            folder: Of both.
            model: What is written, in the module or the module itself.
            prefix: What the module's names of parameters have before the model's.
        """

    def load(self, folder: Path) -> None:
        """Restores the optimiser's state; the model was built from the folder."""


class PlainLearner:
    """One process, plain PyTorch, AdamW."""

    def __init__(
        self, module: nn.Module, config: Config, settings: Optimizer, world: World
    ) -> None:
        """Takes over a model.

        Args:
            module: On its device.
            config: The run's; plain PyTorch needs nothing of it.
            settings: The optimiser's.
            world: Of one process.

        Raises:
            ConfigError: There are more.
        """
        del config
        if world.size > 1:
            raise ConfigError(
                f"engine.kind: plain is for one process, and {world.size} were launched; set it to "
                "deepspeed"
            )
        self.module = module
        self.settings = settings
        self.optimizer = adamw(module, settings)

    def backward(self, loss: Tensor) -> None:
        """As `Learner.backward`."""
        loss.backward()

    def step(self, lr: float) -> float:
        """As `Learner.step`."""
        limit = self.settings.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), limit).item()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As `Learner.parameters`."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path, model: Savable, prefix: str) -> None:
        """As `Learner.save`."""
        del prefix
        model.save_pretrained(folder)
        states = self.optimizer.state
        save_moments(
            folder,
            step=max((int(state["step"]) for state in states.values()), default=0),
            moments=(
                (f"{name}/{moment}", states[parameter][moment])
                for name, parameter in self.module.named_parameters()
                if parameter in states
                for moment in MOMENTS
            ),
        )

    def load(self, folder: Path) -> None:
        """As `Learner.load`."""
        step, held, read = open_moments(folder)
        for name, parameter in self.module.named_parameters():
            if f"{name}/{MOMENTS[0]}" in held:
                moments = {moment: read(f"{name}/{moment}") for moment in MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}


def adamw(module: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW over a model's parameters."""
    return torch.optim.AdamW(
        module.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )


def save_moments(folder: Path, *, step: int, moments: Iterable[tuple[str, Tensor]]) -> None:
    """Writes tensors, as they come, to files of a few gigabytes.

    Args:
        folder: Exists.
        step: Optimiser steps taken.
        moments: Name -> tensor; nothing holds more than one file's worth of them.
    """
    held: dict[str, Tensor] = {}
    size = number = 0

    def write() -> None:
        save_file(held, folder / f"optimizer-{number:05d}.safetensors", {"step": str(step)})

    for name, tensor in moments:
        held[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        if size >= _SHARD:
            write()
            held, size, number = {}, 0, number + 1
    if held or number == 0:
        write()


def open_moments(folder: Path) -> tuple[int, set[str], Callable[[str], Tensor]]:
    """What `save_moments` wrote.

    Returns:
        The steps taken, the names that are there, and what reads one tensor.

    Raises:
        CheckpointError: There is nothing.
    """
    files = sorted(folder.glob("optimizer-*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: holds no optimizer-*.safetensors; it is of another version of this "
            "trainer, start the run anew"
        )
    opened: list[Any] = [safe_open(file, framework="pt") for file in files]
    places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  (no mapping)

    def read(name: str) -> Tensor:
        tensor: Tensor = places[name].get_tensor(name)
        return tensor

    return int(opened[0].metadata()["step"]), set(places), read
