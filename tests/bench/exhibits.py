"""What all exhibits cost together, made from a training of the paper's size."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from analysis import AnalysisError
from analysis.accuracy_bins import read_bins
from analysis.evaluations import read_evaluations
from analysis.exhibit import save
from analysis.sources import open_source, open_sources
from analysis.weight_cells import read_cells
from cvpo import RunLog
from paper_figures import EXHIBITS
from tests.bench.memory import peak_megabytes
from tests.bench.table import Row, fastest
from tests.logs import PAPER, PAPER_STEPS, write_log

SECONDS, MEGABYTES = 60, 2000
LENGTHS = (PAPER_STEPS // 4, PAPER_STEPS // 2, PAPER_STEPS)
LINEAR = 1.25
"""What reading a step may cost more where there are several times as many."""

_BESIDE = replace(PAPER, every=100, trajectories_every=100)
"""Runs to compare with, of the same evaluations and prompts, but less often logged."""


def show_exhibits() -> list[Row]:
    """Prints seconds and peak memory of all exhibits; returns rows on reading by a run's length.

    The logs take a minute to write and 300 MB of the temporary folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        whole = write_log(
            Path(folder, "cvpo"), steps=PAPER_STEPS, size=PAPER, switch=PAPER_STEPS // 2
        )
        beside = [
            write_log(Path(folder, "vapo"), method="vapo", steps=PAPER_STEPS, size=_BESIDE),
            write_log(
                Path(folder, "weak"), alpha_p=0.1, alpha_n=0.1, steps=PAPER_STEPS, size=_BESIDE
            ),
        ]
        _show_cost([whole, *beside], written=time.perf_counter() - start)
        return _reading_rows(whole, Path(folder))


def _show_cost(runs: Sequence[Path], *, written: float) -> None:
    command = [sys.executable, "-m", "tests.bench.exhibits", *map(str, runs)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout) | {"seconds": time.perf_counter() - start}
    rows = PAPER_STEPS * PAPER.batch * PAPER.samples
    print(
        f"{found['made']} of {len(EXHIBITS)} exhibits (others need studies or arms) from "
        f"{rows / 1e6:.1f} million trajectories of {PAPER_STEPS} steps and two runs beside them; "
        f"{found['busy']:.1f} s of a core (the logs took {written:.0f} s to write):"
    )
    for name, unit, target in (("seconds", "s", SECONDS), ("megabytes", "MB", MEGABYTES)):
        verdict = "passes" if found[name] <= target else "MISSES"
        print(f"  {found[name]:8.1f} {unit:3} {verdict} (target at most {target})")


def make_all(runs: Sequence[str]) -> None:
    """Makes and saves every exhibit; prints what it took, for another process."""
    made = 0
    sources = open_sources(runs)
    with tempfile.TemporaryDirectory() as folder:
        for name, make in EXHIBITS.items():
            try:
                save(make(sources), Path(folder), name)
            except AnalysisError:
                continue
            made += 1
    found = {"made": made, "busy": time.process_time(), "megabytes": peak_megabytes()}
    print(json.dumps(found))


def _reading_rows(whole: Path, folder: Path) -> list[Row]:
    """Seconds a step of reading trajectories, prompts and evaluations, by the steps there are."""
    jobs = {steps: partial(_read, _first_steps(whole, folder, steps)) for steps in LENGTHS}
    seconds = fastest({f"{steps}": job for steps, job in jobs.items()}, repeats=3)
    per_step = {steps: seconds[f"{steps}"] / steps for steps in LENGTHS}
    return [
        Row(
            f"reading a log of {steps} steps, per step",
            f"{LENGTHS[0]} steps",
            seconds[f"{steps}"],
            per_step[steps] / per_step[LENGTHS[0]],
            faster=False,
            target=LINEAR,
        )
        for steps in LENGTHS[1:]
    ]


def _first_steps(whole: Path, folder: Path, steps: int) -> Path:
    """The same log as it was after some of its steps, made of links to the same files."""
    path = folder / f"first-{steps}"
    shutil.copytree(whole, path, copy_function=os.link)
    RunLog.open(path).rewind(steps)  # it takes files away and writes none in its place
    return path


def _read(path: Path) -> None:
    source = open_source(path)
    read_cells(source)
    read_bins(source)
    read_evaluations(source)


if __name__ == "__main__":
    make_all(sys.argv[1:])
