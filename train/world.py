"""The processes of a run. Everybody holds the whole batch and the same state; they share the work.

A process alone needs no process group. Launched by torchrun or deepspeed there is one, and it is
made before anything else that might make its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

Found = TypeVar("Found")


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to look at."""


class WorldError(TrainingError):
    """The processes do not fit together."""


@dataclass(frozen=True)
class World:
    """This process among those of the run.

    Attributes:
        rank: From 0; rank 0 writes the log and the checkpoints.
        size: Processes.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, *, device: str = "cpu", alone: bool = True, minutes: float = 60.0) -> World:
        """This process's world, as the launcher's environment says.

        Args:
            device: Where the models are: gloo for the CPU, NCCL beside it for CUDA.
            alone: Whether a single process may go without a process group. DeepSpeed wants one.
            minutes: How long a collective operation waits for a lost process.

        Raises:
            WorldError: The group has another size than the launcher said.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 and alone and not distributed.is_initialized():
            return cls()
        if not distributed.is_initialized():
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
            own: dict[str, Any] = {"store": torch._C._distributed_c10d.HashStore()}
            own |= {"rank": 0, "world_size": 1}
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
                timeout=timedelta(minutes=minutes),
                **(own if size == 1 else {}),
            )
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        world = cls(distributed.get_rank(), distributed.get_world_size())
        world.check()
        return world

    def check(self) -> None:
        """Makes sure that a sum still goes over all processes.

        A library that makes its own group first leaves collectives that silently sum nothing.

        Raises:
            WorldError: It does not.
        """
        launched = int(os.environ.get("WORLD_SIZE", self.size))
        found = int(self.sum(torch.ones(1)).item())
        if not found == self.size == launched:
            raise WorldError(
                f"{launched} processes were launched, the process group counts {self.size} and a "
                f"sum reaches {found}; is another library making a process group of its own first?"
            )

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, on each of them; in place where there are several."""
        if self.size > 1:
            distributed.all_reduce(x)
        return x

    def gather(self, mine: Found) -> list[Found]:
        """What each process has, in order of ranks, on each of them."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, mine)
        return found

    def spread(
        self, items: Sequence[Any], work: Callable[[Sequence[Any]], list[Found]]
    ) -> list[Found]:
        """Does work on a contiguous share of the items in each process; returns all of it.

        An error in one process is raised in all of them: none waits for results that never come.

        Raises:
            WorldError: The work of another process failed; names its rank and says how.
        """
        if self.size == 1:
            return work(items)
        ends = [round(len(items) * rank / self.size) for rank in range(self.size + 1)]
        mine: list[Found] = []
        problem = None
        try:
            mine = work(items[ends[self.rank] : ends[self.rank + 1]])
        except Exception as error:  # noqa: BLE001  (told to the others, then raised)
            problem = error
        problems = self.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        for rank, other in enumerate(problems):
            if other is not None:
                raise WorldError(f"rank {rank} failed: {other}")
        return [entry for share in self.gather(mine) for entry in share]

    def barrier(self) -> None:
        """Waits for all processes."""
        if self.size > 1:
            distributed.barrier()


ALONE = World()
"""A process alone."""
