"""One update is the same for plain PyTorch and every ZeRO stage, on one process or two.

Real DeepSpeed on real gloo processes. Loss normalisation by rank or by micro-batch is the field's
most frequent silent error, so lengths are ragged and micro-batches small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train.models import load_critic
from train.rollout.batch import Batch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (the extra `cluster`)")
pytestmark = pytest.mark.slow

MakeBatch = Callable[..., Batch]
Launch = Callable[..., dict[str, Any]]

SETTINGS = [
    "method=vapo",
    "actor.lr=3e-3",
    "actor.warmup_steps=2",
    "actor.minibatches=2",
    "critic.lr=3e-3",
    "critic.minibatches=2",
    "engine.micro_batch_tokens=30",
    "engine.logit_rows=5",
]
TOLERANCE = 5e-4
"""Largest difference of a log-probability, an entropy or a value after three steps of two updates,
which themselves move them by more than .3. Adam divides by the gradient's own size, so rounding
shows most where that is smallest."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Launch:
    """Runs a job on so many processes and returns what rank 0 found."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(2)
    critic = load_critic(str(tiny_model), dtype="float32", device="cpu")
    nn.init.normal_(critic.head.weight, std=0.3)
    critic.save_pretrained(folder / "models" / "critic")
    (folder / "models" / "actor").symlink_to(tiny_model)
    counter = iter(range(1000))

    def start(
        batch: Path,
        *overrides: str,
        processes: int = 1,
        updates: int = 3,
        resume: Path | None = None,
        save: Path | None = None,
    ) -> dict[str, Any]:
        job = folder / f"job-{next(counter)}.json"
        result = job.with_suffix(".pt")
        job.write_text(
            json.dumps(
                {
                    "overrides": [f"model.path={tiny_model}", *SETTINGS, *overrides],
                    "models": str(folder / "models"),
                    "batch": str(batch),
                    "updates": updates,
                    "resume": str(resume) if resume else None,
                    "save": str(save) if save else None,
                    "result": str(result),
                }
            )
        )
        script = str(Path(__file__).with_name("ranks.py"))
        command = [sys.executable, script, str(job)]
        if processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            command[1:1] = [*torchrun, f"--nproc-per-node={processes}"]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = torch.load(result, weights_only=True)
        assert found["size"] == processes
        return found

    return start


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory, ragged_batch: MakeBatch) -> Path:
    """Nine trajectories of 1 to 12 tokens, an empty one among them; NaN in the masked slots."""
    batch = ragged_batch((7, 1, 12, 0, 4, 9, 3, 12, 2), (2, 9, 4, 4, 1, 6, 3, 5, 2))
    generator = torch.Generator().manual_seed(5)
    hole = ~batch.response_mask

    def noise(scale: float) -> torch.Tensor:
        return (scale * torch.randn(hole.shape, generator=generator)).masked_fill(hole, torch.nan)

    file = tmp_path_factory.mktemp("batch") / "batch.pt"
    given = {
        "batch": batch.state_dict(),
        "advantages": noise(1.0),
        "returns": noise(1.0),
        "drift": noise(0.3),
    }
    torch.save(given, file)
    return file


@pytest.fixture(scope="module")
def plain(launch: Launch, ragged: Path) -> dict[str, Any]:
    return launch(ragged)


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of a log-probability, an entropy or a value."""
    pairs = [
        (found["values"], expected["values"]),
        *zip(found["log_probs"], expected["log_probs"], strict=True),
    ]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_update_is_that_of_plain_pytorch(
    launch: Launch, ragged: Path, plain: dict[str, Any], stage: int, processes: int
) -> None:
    found = launch(ragged, "engine.kind=deepspeed", f"engine.stage={stage}", processes=processes)
    assert distance(found, plain) < TOLERANCE
    for mine, its in zip(found["metrics"], plain["metrics"], strict=True):
        assert mine == pytest.approx(its, rel=1e-3, abs=1e-6, nan_ok=True)
    assert found["weights"].keys() == plain["weights"].keys()


def test_the_updates_moved_the_policy(launch: Launch, ragged: Path, plain: dict[str, Any]) -> None:
    start = launch(ragged, updates=0)
    assert distance(plain, start) > 0.3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("deepspeed", 3, 2), ("deepspeed", 3, 2)),
        (("deepspeed", 3, 2), ("deepspeed", 2, 1)),
        (("deepspeed", 1, 1), ("deepspeed", 3, 2)),
        (("deepspeed", 2, 2), ("plain", 0, 1)),
        (("plain", 0, 1), ("deepspeed", 1, 2)),
        (("deepspeed", 0, 2), ("deepspeed", 0, 2)),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_under_another_stage_and_number_of_processes(
    launch: Launch,
    ragged: Path,
    plain: dict[str, Any],
    before: tuple[str, int, int],
    after: tuple[str, int, int],
    tmp_path: Path,
) -> None:
    def asked(how: tuple[str, int, int]) -> tuple[list[str], int]:
        kind, stage, processes = how
        return [f"engine.kind={kind}", f"engine.stage={stage}"], processes

    overrides, processes = asked(before)
    first = launch(ragged, *overrides, processes=processes, updates=1, save=tmp_path / "saved")
    overrides, processes = asked(after)
    second = launch(ragged, *overrides, processes=processes, updates=2, resume=tmp_path / "saved")
    assert distance(second, plain) < TOLERANCE
    metrics = [*first["metrics"], *second["metrics"]]
    for mine, its in zip(metrics, plain["metrics"], strict=True):
        assert mine == pytest.approx(its, rel=1e-3, abs=1e-6, nan_ok=True)


def test_resuming_on_the_same_processes_is_exact(
    launch: Launch, ragged: Path, tmp_path: Path
) -> None:
    how = ["engine.kind=deepspeed", "engine.stage=3"]
    whole = launch(ragged, *how, processes=2)
    launch(ragged, *how, processes=2, updates=1, save=tmp_path / "saved")
    rest = launch(ragged, *how, processes=2, updates=2, resume=tmp_path / "saved")
    assert rest["metrics"] == whole["metrics"][1:]
    for name, tensor in rest["weights"].items():
        assert torch.equal(tensor, whole["weights"][name]), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_precision_keeps_small_updates_in_its_master_weights(
    launch: Launch, ragged: Path, stage: int, tmp_path: Path
) -> None:
    # A rate of 1e-5 changes no bfloat16 weight in one step; ten steps of it must add up.
    how = [
        "engine.kind=deepspeed",
        f"engine.stage={stage}",
        "model.dtype=bfloat16",
        "actor.lr=1e-5",
        "critic.lr=1e-5",
    ]
    launch(ragged, *how, processes=2, updates=5, save=tmp_path / "saved")
    rest = launch(ragged, *how, processes=2, updates=5, resume=tmp_path / "saved")
    whole = launch(ragged, *how, processes=2, updates=10)
    for name, tensor in rest["weights"].items():
        assert torch.equal(tensor, whole["weights"][name]), name
    start = launch(ragged, *how, processes=2, updates=0)
    moved = [not torch.equal(whole["weights"][n], start["weights"][n]) for n in start["weights"]]
    assert any(moved)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_is_skipped_on_every_rank(
    launch: Launch, ragged: Path, stage: int, tmp_path: Path
) -> None:
    given = torch.load(ragged, weights_only=True)
    given["advantages"][2, 0] = torch.inf
    bad = tmp_path / "bad.pt"
    torch.save(given, bad)
    how = ["engine.kind=deepspeed", f"engine.stage={stage}", "actor.minibatches=1"]
    found = launch(bad, *how, processes=2, updates=2)
    assert [step["policy/skipped_updates"] for step in found["metrics"]] == [1.0, 1.0]
    start = launch(bad, *how, processes=2, updates=0)
    for name, tensor in found["weights"].items():
        assert torch.equal(tensor, start["weights"][name]), name
