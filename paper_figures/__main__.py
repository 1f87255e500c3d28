"""Draws the figures that stand in this folder: `python -m paper_figures RUN... [-o FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analysis import AnalysisError
from cvpo.runlog import RunLogError
from paper_figures import figure2_accuracy

FIGURES = {"figure2_accuracy": figure2_accuracy.draw}


def main() -> int:
    """Draws every figure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("-o", "--output", type=Path, default=Path("paper_figures/out"))
    parser.add_argument("--only", choices=sorted(FIGURES), action="append", help="a figure's name")
    options = parser.parse_args()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for name in options.only or FIGURES:
            print(FIGURES[name](options.runs, options.output))
    except (AnalysisError, RunLogError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
