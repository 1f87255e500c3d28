"""What W_S and the tracker cost in a training step, read from the log of a short real run."""

import tempfile
from pathlib import Path

from cvpo import read_metrics
from train.config import load_config
from train.loop import train
from train.timing import TRAINING
from train.warmstart import warm_start

STEPS = 5
ADDED = {"weights": "W_S", "tracker": "tracker and W_D"}


def show_shares(*, threads: int) -> None:
    """Trains the laptop configuration for a few steps in a temporary folder; prints percentages.

    The model is warm-started for a moment only: what a step costs does not depend on what it knows.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            None,
            [
                f"steps={STEPS}",
                f"run_dir={folder}/run",
                f"model.path={folder}/model",
                f"warmstart.output={folder}/model",
                "warmstart.steps=60",
                f"engine.threads={threads}",
                "pretraining.max_steps=1",
                "evaluation.benchmarks=[]",
                "log.tensorboard=false",
            ],
        )
        warm_start(config)
        train(config)
        metrics = read_metrics(Path(folder) / "run")
    steps = metrics[metrics["step"] >= 1]
    seconds = {phase: float(steps[f"seconds/{phase}"].sum()) for phase in TRAINING}
    total = sum(seconds.values())
    rollout = config.rollout
    print(
        f"a step of the laptop run, {rollout.prompts} x {rollout.samples}, mean of {len(steps)}: "
        f"{total / len(steps):.2f} s"
    )
    for phase, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        note = f"  {ADDED[phase]}: what CVPO adds" if phase in ADDED else ""
        print(f"  {phase:8}  {spent / total:8.3%}{note}")
