"""`make bench`: speed as ratios that are measured side by side in one process.

A ratio against a plain loop or a copy of the same tensors, taken in turns, says the same on a fast
machine, a slow one and a busy one; seconds do not. Nothing here fails: it prints what it finds.
"""

import argparse
import os
import platform

import torch

from tests.bench import bandit, exhibits, functions, run
from tests.bench.table import Row, show


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--batch", type=int, default=4096, help="trajectories (default 4096)")
    parser.add_argument("--no-run", action="store_true", help="leave the training run out")
    parser.add_argument("--no-bandit", action="store_true", help="leave the simulator out")
    parser.add_argument("--no-exhibits", action="store_true", help="leave the exhibits out")
    parser.add_argument("--no-studies", action="store_true", help="leave `sim all` out (minutes)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__} on {platform.machine()}, {arguments.threads} thread(s) on "
        f"{os.cpu_count()} cores, float32; fastest of {arguments.repeats} turns (loops: a fifth)",
        flush=True,
    )
    rows: list[Row] = []
    for length in (2048, 6144):
        rows += functions.gae_rows(arguments.batch, length, repeats=arguments.repeats)
    rows += functions.weighting_rows(arguments.batch, 6144, repeats=arguments.repeats)
    show(rows)
    if not arguments.no_bandit:
        print()
        bandit.show_paper_run()
        show(bandit.cost_rows() + bandit.side_by_side_rows())
    if not arguments.no_run:
        print()
        run.show_shares(threads=arguments.threads)
    if not arguments.no_exhibits:
        print()
        show(exhibits.show_exhibits())
    if not arguments.no_studies:
        print()
        bandit.show_studies()


if __name__ == "__main__":
    main()
