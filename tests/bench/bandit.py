"""What a simulated training costs: the paper's size, more prompts, more steps, many at once."""

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch

from sim.bandit import PAPER_WORLD, BanditConfig
from sim.trace import simulate
from sim.training import PAPER_BUDGET, Budget, Setting
from tests.bench.memory import peak_megabytes
from tests.bench.table import Row, fastest

PAPER_SECONDS, PAPER_MEGABYTES = 10, 1000
STUDIES_MINUTES, STUDIES_CORES, STUDIES_SEEDS = 10, 2, 5
CVPO = Setting("cvpo")
SIZES = (4350, 8700, 17_398)
"""A quarter, a half and all of the paper's prompts."""
LENGTHS = (68, 136, 272)
"""One, two and four of its rounds."""
MANY = [replace(CVPO, name=f"{index}") for index in range(10)]
LINEAR = 1.25
"""What a unit of work may cost more where there is several times as much of it."""


def paper_run() -> None:
    """The paper's run with both weights on one core; prints what it took, for another process."""
    torch.set_num_threads(1)
    start, busy = time.perf_counter(), time.process_time()
    simulate(PAPER_WORLD, PAPER_BUDGET, [CVPO], [0])
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    print(json.dumps({"seconds": seconds, "busy": busy, "megabytes": peak_megabytes()}))


def show_paper_run() -> None:
    """Prints seconds and peak memory of `paper_run`, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.bandit"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    budget = PAPER_BUDGET
    print(
        f"the bandit at the paper's size, {PAPER_WORLD.prompts} prompts, {budget.batch} x "
        f"{budget.rollouts}, {budget.steps} steps, W_S and W_D, one core ({found['busy']:.1f} s of "
        "it busy with this):"
    )
    for name, unit, target in (
        ("seconds", "s", PAPER_SECONDS),
        ("megabytes", "MB", PAPER_MEGABYTES),
    ):
        verdict = "passes" if found[name] <= target else "MISSES"
        print(f"  {found[name]:8.1f} {unit:3} {verdict} (target at most {target})")


def cost_rows(*, repeats: int = 3) -> list[Row]:
    """Seconds of a pass over the prompts by their number, and of a run by its steps."""
    passes = {
        f"{size}": partial(_simulate, size, steps=math.ceil(size / PAPER_BUDGET.batch))
        for size in SIZES
    }
    runs = {f"{steps}": partial(_simulate, SIZES[0], steps=steps) for steps in LENGTHS}
    return [
        *_linear_rows("a pass over", "prompts", fastest(passes, repeats=repeats)),
        *_linear_rows("a run of", "steps", fastest(runs, repeats=repeats)),
    ]


def side_by_side_rows(*, repeats: int = 3) -> list[Row]:
    """Many settings of a small world at once, against one at a time."""
    world, budget, seeds = BanditConfig(), Budget(steps=60, every=60), [0, 1]

    def together() -> object:
        return simulate(world, budget, MANY, seeds)

    def apart() -> object:
        return [simulate(world, budget, [form], [seed]) for form in MANY for seed in seeds]

    seconds = fastest({"together": together, "apart": apart}, repeats=repeats)
    what = f"{len(MANY) * len(seeds)} runs of {world.prompts} prompts side by side"
    ratio = seconds["apart"] / seconds["together"]
    return [Row(what, "one at a time", seconds["together"], ratio, faster=True, target=2.0)]


def show_studies() -> None:
    """Prints how long `python -m sim all` takes on two cores with five seeds."""
    seeds = list(range(STUDIES_SEEDS))
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"jobs={STUDIES_CORES}", f"seeds={seeds}", f"output={folder}"]
        start = time.perf_counter()
        command = [sys.executable, "-m", "sim", "all", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        minutes = (time.perf_counter() - start) / 60
    verdict = "passes" if minutes <= STUDIES_MINUTES else "MISSES"
    print(
        f"every study, {STUDIES_CORES} cores, {STUDIES_SEEDS} seeds: {minutes:.1f} minutes, "
        f"{verdict} (target at most {STUDIES_MINUTES})"
    )


def _simulate(prompts: int, *, steps: int) -> object:
    world, budget = replace(PAPER_WORLD, prompts=prompts), replace(PAPER_BUDGET, steps=steps)
    return simulate(world, budget, [CVPO], [0])


def _linear_rows(what: str, unit: str, seconds: dict[str, float]) -> list[Row]:
    """Cost of one unit where there are more of them, against where there are fewest."""
    first, *others = seconds
    per_unit = {amount: spent / int(amount) for amount, spent in seconds.items()}
    return [
        Row(
            f"{what} {amount} {unit}, per {unit[:-1]}",
            f"{first} {unit}",
            seconds[amount],
            per_unit[amount] / per_unit[first],
            faster=False,
            target=LINEAR,
        )
        for amount in others
    ]


if __name__ == "__main__":
    paper_run()
