"""Makes the exhibits: `python -m paper_figures [NAME ...] [--runs RUN ...] [-o FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis import AnalysisError
from analysis.exhibit import save
from analysis.sources import open_sources
from cvpo.runlog import RunLogError
from paper_figures import EXHIBITS
from paper_figures.kept import kept_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes all exhibits, or those that are named; returns the exit status.

    One that the runs cannot show is passed over with the reason, unless it was named.
    """
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures", description="Tables and figures, from run logs alone."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXHIBITS)}")
    parser.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="logs' folders or files; default: the kept set (paper_figures/runs.tar.xz)",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("paper_figures/out"))
    options = parser.parse_args(arguments)
    try:
        unknown = [name for name in options.names if name not in EXHIBITS]
        if unknown:
            raise AnalysisError(f"no exhibit {unknown[0]!r}; there are {', '.join(EXHIBITS)}")
        sources = open_sources(options.runs or kept_runs())
        for name in options.names or EXHIBITS:
            try:
                exhibit = EXHIBITS[name](sources)
            except (AnalysisError, RunLogError) as error:
                if options.names:
                    raise
                print(f"{name}: not made: {error}", file=sys.stderr)
                continue
            for file in save(exhibit, options.output, name):
                print(file)
    except (AnalysisError, RunLogError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
