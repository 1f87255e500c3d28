"""What does not fit, and the cheapest change after which it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from train.config import Config, ConfigError
from train.plan.layout import GB, KEYS, Assumptions, Device, Layout, check_layout
from train.plan.memory import Moments, host_bytes, kv_bytes_per_token, memory_of
from train.plan.work import Models, Work, check_work

MOMENTS = {
    "layers": "an update, in the backward pass of a layer,",
    "head": "an update, at the output layer,",
    "step": "an update, in the optimiser's step,",
    "rollout": "a rollout",
}

Changes = dict[str, Any]
"""Fields of `Layout` and their new values."""


@dataclass(frozen=True)
class Fitting:
    """A run whose layout may change."""

    config: Config
    models: Models
    work: Work
    device: Device
    assume: Assumptions

    def complaints(self, layout: Layout) -> Iterator[str]:
        """A sentence on everything that does not fit, and which key to change."""
        missing = self.missing(layout)
        remedy = self._remedy(layout) if missing else ""
        for name, size in missing.items():
            yield f"{self._describe(name, size)}; {remedy}"
        positions, longest = self.models.positions, self.work.longest_response
        if longest >= positions:
            yield (
                f"responses of {longest} tokens do not fit the model's {positions} positions; "
                "lower rollout.max_tokens"
            )

    def missing(self, layout: Layout) -> dict[str, float]:
        """Bytes that lack, by what they lack for; nothing where all fits."""
        memory = memory_of(self.models, layout, self.work, self.device, self.assume)
        lacking = {
            field.name: getattr(memory, field.name).total - self.device.memory
            for field in fields(Moments)
        }
        cached = kv_bytes_per_token(
            self.models.actor, width=layout.width, tensor_parallel=layout.tensor_parallel
        )
        lacking["sequence"] = self.work.longest * cached - memory.rollout.kv_cache
        if self.assume.host_memory is not None:
            lacking["host"] = host_bytes(self.models, layout) - self.assume.host_memory
        return {name: size for name, size in lacking.items() if size > 0}

    def _describe(self, name: str, size: float) -> str:
        if name == "sequence":
            return (
                f"the KV cache lacks {size / GB:.1f} GB for one sequence of {self.work.longest} "
                "tokens"
            )
        memory, whose = self.device.memory, "device"
        if name == "host":
            memory, whose = self.assume.host_memory or 0.0, "node"
        what = MOMENTS.get(name, "what is offloaded")
        needed = (size + memory) / GB
        return f"{what} needs {needed:.1f} GB of a {whose}'s {memory / GB:.1f} GB"

    def _remedy(self, layout: Layout) -> str:
        """One key where one is enough, the cheapest first; else as few as are found to be."""
        choices = _choices(layout, self.work)
        for field, values in choices:
            for value in values:
                if self._lack(layout, {field: value}) == 0:
                    return _advice({field: value})
        changes: Changes = {}
        for field, values in choices:
            trials = [changes, *({**changes, field: value} for value in values)]
            changes = min(trials, key=lambda trial: self._lack(layout, trial))
        if self._lack(layout, changes) > 0:
            return _beyond(layout)
        return _advice(self._mildest(layout, changes, dict(choices)))

    def _mildest(self, layout: Layout, changes: Changes, choices: dict[str, list[Any]]) -> Changes:
        """Changes that are enough, without those that are not needed, the others no stronger."""
        for field, strong in list(changes.items()):
            without = {name: value for name, value in changes.items() if name != field}
            weaker = ({**without, field: value} for value in choices[field])
            for trial in (without, *weaker):
                if trial.get(field) == strong:
                    break
                if self._lack(layout, trial) == 0:
                    changes = trial
                    break
        return changes

    def _lack(self, layout: Layout, changes: Changes) -> float:
        """Missing bytes after a change; infinite where it cannot be made."""
        changed = replace(layout, **changes)
        try:
            check_layout(changed, self.assume)
            check_work(self.config, changed, self.work, self.models.actor)
        except ConfigError:
            return math.inf
        return sum(self.missing(changed).values())


def _choices(layout: Layout, work: Work) -> list[tuple[str, list[Any]]]:
    """What may be changed, the cheapest in time first, and to which values."""
    powers = [2**power for power in range(20, -1, -1)]
    budgets = [size for size in powers if work.longest < size < layout.micro_batch_tokens]
    if work.longest < layout.micro_batch_tokens:
        budgets.append(work.longest)
    rows = [size for size in powers if 256 <= size < layout.logit_rows]
    fewer = [size for size in powers if size < layout.max_sequences]
    if layout.engine == "plain":
        return [
            ("logit_rows", rows),
            ("micro_batch_tokens", budgets),
            ("max_sequences", fewer),
        ]
    shares = [share / 20 for share in range(2, 19)]
    shares.sort(key=lambda share: abs(share - layout.memory_share))
    return [
        ("checkpointing", [True]),
        ("sleep_level", [1]),
        ("zero_stage", list(range(layout.zero_stage + 1, 4))),
        ("memory_share", shares),
        ("logit_rows", rows),
        ("micro_batch_tokens", budgets),
        ("max_sequences", fewer),
        ("tensor_parallel", [size for size in (2, 4, 8) if size > layout.tensor_parallel]),
        ("offload_optimizer", [True]),
        ("offload_parameters", [True]),
    ]


def _advice(changes: Changes) -> str:
    return "set " + " and ".join(f"{KEYS[name]}={_yaml(value)}" for name, value in changes.items())


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _beyond(layout: Layout) -> str:
    if layout.engine == "plain":
        return (
            f"the plain engine splits nothing: take {KEYS['engine']}=deepspeed and more --devices, "
            "or a smaller model.path"
        )
    return "no key is enough: take more --devices, or a smaller model.path"
