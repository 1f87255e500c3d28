"""Figure 2: accuracy over training steps, by method, in the mean and for each benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.summary import draw_curves, load_runs, summarize


def draw(runs: Sequence[Path], folder: Path) -> Path:
    """Draws the runs' evaluations into `folder`; returns the file."""
    loaded = load_runs(runs)
    file = folder / "figure2_accuracy.png"
    draw_curves(loaded, summarize(loaded).benchmarks, file)
    return file
