"""What the processes of a distributed test do: `torchrun tests/train/ranks.py JOB`.

A job is a JSON file: overrides of the laptop configuration, the folder of the models and of the
batch, how many updates to make, where to resume from and to save to. Rank 0 leaves what it found in
`result`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from train.config import load_config
from train.engine import Engine
from train.models import load_actor, load_critic
from train.rollout.batch import Batch
from train.world import World


def run(job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = load_config(None, job["overrides"])
    world = World.join(device=config.model.device, alone=config.engine.kind == "plain")
    start = Path(job["resume"] or job["models"])
    placement = {"dtype": config.model.dtype, "device": "cpu"}
    engine = Engine(
        config,
        config.declared(),
        actor=load_actor(str(start / "actor"), **placement),
        critic=load_critic(str(start / "critic"), **placement),
        world=world,
    )
    if job["resume"]:
        engine.load(start)
    given = torch.load(job["batch"], weights_only=True)
    batch = Batch.from_state(given["batch"])
    metrics = []
    for _ in range(job["updates"]):
        log_probs, _ = engine.log_probs(batch)
        values = engine.values(batch)
        found = engine.update_critic(batch, given["returns"], values, passes=1)
        old = log_probs + given["drift"]
        metrics.append(found | engine.update_actor(batch, given["advantages"], old))
    if job["save"]:
        folder = Path(job["save"])
        if world.rank == 0:
            folder.mkdir(parents=True)
        world.barrier()
        engine.save(folder)
    return {
        "metrics": metrics,
        "log_probs": engine.log_probs(batch),
        "values": engine.values(batch),
        "weights": {name: tensor.float().clone() for name, tensor in engine.weights()},
        "size": world.size,
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    result = run(job)
    if World.join(alone=True).rank == 0:
        torch.save(result, job["result"])
