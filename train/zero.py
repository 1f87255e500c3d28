"""A model sharded over the processes by DeepSpeed's ZeRO, stages 0 to 3."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train.config import Config, Optimizer
from train.learner import MOMENTS, Savable, adamw, open_moments, save_moments
from train.world import World

_MASTER = "master"
"""A parameter's float32 copy, saved beside its moments where the model is in half precision."""


class ZeroLearner:
    """A model under DeepSpeed: gradients are summed over the processes, state is sharded."""

    def __init__(
        self, module: nn.Module, config: Config, settings: Optimizer, world: World
    ) -> None:
        """Takes over a model that every process has whole.

        Args:
            module: On its device.
            config: `engine` and `model` count.
            settings: The optimiser's.
            world: The processes; their group is there.
        """
        if config.model.device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed import utils

        self.world = world
        self._stage = config.engine.stage
        self._kept = (*MOMENTS, _MASTER) if config.model.dtype != "float32" else MOMENTS
        self._tools: Any = utils
        self._gathered: Any = deepspeed.zero.GatheredParameters
        self._adam: Any = (
            _Clipped(settings, module) if self._stage == 0 else adamw(module, settings)
        )
        engine, self._zero, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._adam,
            config=_settings(config, settings),
            dist_init_required=False,
        )
        self.module: Any = engine
        self._named = dict(engine.module.named_parameters())

    def backward(self, loss: Tensor) -> None:
        """As `Learner.backward`."""
        self.module.backward(loss * self.world.size)  # DeepSpeed takes the mean over processes

    def step(self, lr: float) -> float:
        """As `Learner.step`."""
        for group in self._zero.param_groups:
            group["lr"] = lr
        skipped = self.module.skipped_steps
        self.module.step()
        if self._stage == 0:
            return float(self._adam.norm)
        if self.module.skipped_steps > skipped:
            return math.inf
        return float(self.module.get_global_grad_norm())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As `Learner.parameters`."""
        for name, parameter in self._named.items():
            if self._stage < 3:
                yield name, parameter.detach()
            else:
                with self._gathered([parameter]):
                    yield name, parameter.detach()

    def save(self, folder: Path, model: Savable, prefix: str) -> None:
        """As `Learner.save`; rank 0 writes."""
        whole = {}
        for name, tensor in self.parameters():
            if self.world.rank == 0:
                whole[name.removeprefix(prefix)] = tensor.to("cpu", copy=True)
        moments = self._whole_moments()
        if self.world.rank == 0:
            model.save_pretrained(folder, state_dict=whole)
            del whole
            save_moments(folder, step=self._steps(), moments=moments)
        else:
            for _ in moments:
                pass
        self.world.barrier()

    def load(self, folder: Path) -> None:
        """As `Learner.load`."""
        step, held, read = open_moments(folder)
        if step == 0:
            return
        for flat in self._flat():
            self._states()[flat] = {
                "step": torch.tensor(float(step)),
                **{moment: torch.zeros_like(flat) for moment in MOMENTS},
            }
        if self._stage in (1, 2):
            self._zero._lazy_init_hp_params_optimizer_state()
        for name, parameter in self._named.items():
            for kind in self._kept:
                if f"{name}/{kind}" in held:
                    self._set(parameter, kind, read(f"{name}/{kind}"))

    def _flat(self) -> list[Tensor]:
        """What the optimiser steps: parameters, or this process's share of many in one tensor."""
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        adam = self._zero.optimizer if self._stage else self._adam
        return [flat for group in adam.param_groups for flat in group["params"]]

    def _states(self) -> Any:
        return self._zero.optimizer.state if self._stage else self._adam.state

    def _steps(self) -> int:
        return max((int(state["step"]) for state in self._states().values() if state), default=0)

    def _whole_moments(self) -> Iterator[tuple[str, Tensor]]:
        if self._steps() == 0:
            return
        for name, parameter in self._named.items():
            for kind in self._kept:
                yield f"{name}/{kind}", self._get(parameter, kind)

    def _get(self, parameter: Tensor, kind: str) -> Any:
        if self._stage == 0:
            return self._adam.state[parameter][kind]
        if kind == _MASTER:
            return self._tools.safe_get_full_fp32_param(parameter)
        return self._tools.safe_get_full_optimizer_state(parameter, kind)

    def _set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        if self._stage == 0:
            self._adam.state[parameter][kind].copy_(value)
        elif self._stage == 3:
            self._set_share(parameter, kind, value)
        elif kind == _MASTER:
            self._tools.safe_set_full_fp32_param(parameter, value)
        else:
            self._tools.safe_set_full_optimizer_state(parameter, value, kind)

    def _set_share(self, parameter: Any, kind: str, value: Tensor) -> None:
        """This process's part of a value, of which the last part is padded."""
        size = parameter.ds_tensor.numel()
        flat = value.flatten()
        flat = torch.nn.functional.pad(flat, (0, size * self.world.size - flat.numel()))
        mine = flat.narrow(0, size * self.world.rank, size)
        if kind == _MASTER:
            self._tools.safe_set_local_fp32_param(parameter, mine)
        else:
            self._tools.safe_set_local_optimizer_state(parameter, mine, kind)


class _Clipped(torch.optim.AdamW):
    """AdamW that clips and skips as ZeRO's own optimisers do: stage 0 has none."""

    def __init__(self, settings: Optimizer, module: nn.Module) -> None:
        super().__init__(
            module.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self._limit = settings.max_grad_norm
        self.norm = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As AdamW's, where the gradients are finite."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.norm = nn.utils.clip_grad_norm_(parameters, self._limit).item()
        if math.isfinite(self.norm):
            super().step(closure)


def _settings(config: Config, settings: Optimizer) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    engine = config.engine
    zero: dict[str, Any] = {
        "stage": engine.stage,
        "overlap_comm": False,  # the only choice where the caller says when gradients are complete
        "contiguous_gradients": True,
    }
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if engine.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Micro-batches are as many as the token budget asks for; `step` says when they are all in.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm if engine.stage else 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
