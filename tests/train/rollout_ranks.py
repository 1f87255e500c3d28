"""What the processes of a distributed rollout test do: `torchrun tests/train/rollout_ranks.py JOB`.

A job is a JSON file. Each process leaves what it found in `result` plus its rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from train.config import Sampling
from train.models import load_actor, load_tokenizer
from train.rollout.backend import BACKENDS
from train.world import ALONE, World


def run(job: dict[str, Any], world: World) -> dict[str, Any]:
    backend = BACKENDS[job["backend"]].open(
        job["model"], load_tokenizer(job["model"]), world=world, **job["settings"]
    )
    sampling = Sampling(max_tokens=12)
    before = backend.generate(job["prompts"], job["seeds"], sampling)
    model = load_actor(job["model"], dtype="float32", device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(job["factor"])
    backend.sync(model.named_parameters(), version=1)
    after = backend.generate(job["prompts"], job["seeds"], sampling)
    return {
        "before": [before.tokens, before.log_probs],
        "after": [after.tokens, after.log_probs],
        "scored": backend.log_probs_of(job["prompts"], after.tokens, temperature=1.0),
        "sum": int(world.sum(torch.ones(1)).item()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    world = World.join() if job["join"] else ALONE
    result = run(job, world)
    Path(f"{job['result']}-{world.rank}").write_text(json.dumps(result))
