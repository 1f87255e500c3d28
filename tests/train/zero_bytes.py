"""What DeepSpeed keeps between updates: `torchrun tests/train/zero_bytes.py MODEL RESULT`.

For every ZeRO stage and dtype, rank 0 writes the bytes of all tensors that are left in this process
after an update of actor and critic. Models are sharded one after the other in the same processes.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from train.config import load_config
from train.engine import Engine
from train.models import load_actor, load_critic
from train.rollout.batch import ungraded
from train.world import World


def live_bytes() -> int:
    """Of all storages that a tensor of Python's owns; meta tensors own nothing."""
    gc.collect()
    found = {}
    for entry in gc.get_objects():
        if isinstance(entry, Tensor) and entry.device.type != "meta":
            for tensor in (entry, getattr(entry, "ds_tensor", None)):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def after_an_update(path: str, *, stage: int, dtype: str, world: World) -> int:
    """Bytes that stay in this process, of actor, critic and their optimisers."""
    overrides = [
        f"model.path={path}",
        f"model.dtype={dtype}",
        "engine.kind=deepspeed",
        f"engine.stage={stage}",
    ]
    config = load_config(None, overrides)
    before = live_bytes()
    engine = Engine(
        config,
        config.declared(),
        actor=load_actor(path, dtype=dtype, device="cpu"),
        critic=load_critic(path, dtype=dtype, device="cpu"),
        world=world,
    )
    batch = ungraded([[3] * 4] * 8, [[4] * 8] * 8, pad_id=0)
    zero = torch.zeros(batch.response_mask.shape)
    engine.update_critic(batch, zero + 1, zero, passes=1)
    engine.update_actor(batch, zero + 1, zero - 3)
    return live_bytes() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = World.join(device="cpu")
    found = {
        f"{stage} {dtype}": after_an_update(sys.argv[1], stage=stage, dtype=dtype, world=world)
        for stage, dtype in itertools.product((1, 2, 3), ("bfloat16", "float32"))
    }
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
