"""Differences between labels or runs, paired by problem and by seed: `python -m analysis compare`.

Decision: all differences of one table are one family, over which Holm's p-values are adjusted; and
a difference is claimed from five seeds on, below that it is shown and not claimed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import AnalysisError
from analysis.curves import Collected, Curves, collect
from analysis.sources import open_sources
from analysis.statistics import MEASURES, Cells, columns, ends, level, over_text, sizes_text
from cvpo.metrics import holm, p_value

CLAIM_SEEDS = 5
"""Seeds that a claim of a difference takes."""

MEASURES_TEXT = (
    "Area is the mean accuracy over the steps; best step is the accuracy at the step that one half "
    "of the problems chose, on the other half."
)


def differences(
    collected: Collected, first: str, others: Sequence[str]
) -> tuple[pd.DataFrame, list[str]]:
    """One label minus each of others, at the last step that both evaluated.

    Returns:
        Columns a, b, measure (of `MEASURES`; area and best for the mean only), step, benchmark (its
        name, or `mean`), seeds (pairs of runs), problems, difference (a - b), low, high,
        standard_error, p, p_holm (over all rows), verdict; and what is not compared, in sentences.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for other in others:
        pair, why = _pair(collected.curves[first], collected.curves[other])
        notes += why
        if pair is not None:
            rows += _rows(*pair, collected.shared)
    table = pd.DataFrame(rows)
    if len(table):
        table["p_holm"] = holm(table["p"].to_numpy())
        table["verdict"] = list(
            map(verdict_on, table["seeds"], table["difference"], table["p_holm"])
        )
    return table, notes


def _rows(a: Curves, b: Curves, shared: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    mean_over = [name for name in shared if name in a.benchmarks]
    for measure, name, benchmarks in columns(a.benchmarks, mean_over):
        mine, its = (MEASURES[measure](curves.of_benchmarks(benchmarks)) for curves in (a, b))
        if mine is None or its is None:
            continue
        interval = level(Cells(mine.values - its.values, mine.problems), benchmarks)
        rows.append(
            {
                "a": a.label,
                "b": b.label,
                "measure": measure,
                "step": int(a.steps[-1]),
                "benchmark": name,
                "seeds": len(a.runs),
                "problems": len(mine.problems),
            }
            | ends(interval, "difference")
            | {"p": p_value(interval)}
        )
    return rows


def _pair(a: Curves, b: Curves) -> tuple[tuple[Curves, Curves] | None, list[str]]:
    """Both labels with the seeds, steps and problems that they have in common, in one order."""
    names = f"{a.label} and {b.label}"
    if {run.verifier for run in a.runs} != {run.verifier for run in b.runs}:
        return None, [f"{names} are not compared: they are judged by different verifiers."]
    steps = np.intersect1d(a.steps, b.steps)
    problems = a.problems.intersection(b.problems).sort_values()
    if not len(steps) or not len(problems):
        what = "evaluated step" if len(problems) else "problem"
        return None, [f"{names} are not compared: they have no {what} in common."]
    if steps[-1] == 0:
        return None, [f"{names} are not compared: they have no step after the start in common."]
    notes = []
    for mine, its in ((a, b), (b, a)):
        if mine.steps[-1] > steps[-1]:
            notes.append(
                f"{names} are compared at step {steps[-1]}, the last that both evaluated, though "
                f"{mine.label} goes on to step {mine.steps[-1]}."
            )
        alone = sorted(set(mine.benchmarks) - set(its.benchmarks))
        if alone:
            notes.append(f"{names} are not compared on {', '.join(alone)}: {mine.label} only.")
    if a.sizes != b.sizes:
        notes.append(f"{names} have {_samples(a)} and {_samples(b)} samples of a problem.")
    rows, why = _paired_runs(a, b)
    mine, its = (
        curves.at(steps).on(problems).of_runs(own) for curves, own in zip((a, b), rows, strict=True)
    )
    return (mine, its), [*notes, *(f"{names} {reason}" for reason in why)]


def _paired_runs(a: Curves, b: Curves) -> tuple[tuple[list[int], list[int]], list[str]]:
    """Which runs of each are compared: those of common seeds, else the first of both."""
    common = [seed for seed in a.seeds if seed in b.seeds]
    pairs = len(common) or min(len(a.runs), len(b.runs))
    alone = "; of one pair of runs, an interval is over problems only" if pairs == 1 else ""
    if not common:
        first = list(range(pairs))
        first_ones = "the first run" if pairs == 1 else f"the first {pairs} runs"
        who = f"{first_ones} of each" if len(a.runs) != len(b.runs) else "the runs"
        why = f"have no seed in common: paired by problem alone, {who} in order of seed{alone}."
        return (first, first), [why]
    rows = [a.seeds.index(seed) for seed in common], [b.seeds.index(seed) for seed in common]
    if len(common) == len(a.runs) == len(b.runs):
        return rows, []
    return rows, [f"are compared on the seeds of both: {', '.join(map(str, common))}{alone}."]


def _samples(mine: Curves) -> str:
    return "-".join(map(str, sorted(set(mine.sizes))))


def verdict_on(seeds: int, difference: float, p_holm: float) -> str:
    """What is claimed of a difference, given its seeds and its adjusted p-value."""
    if seeds < CLAIM_SEEDS:
        return f"not claimed: {seeds} seed{'s' if seeds > 1 else ''}"
    if math.isnan(p_holm):
        return "no spread to judge it by"
    if p_holm <= 0.05:
        return "higher" if difference > 0 else "lower"
    return "no difference shown"


# ------------------------------------------------------------------------------- command line


def format_differences(table: pd.DataFrame, notes: Sequence[str]) -> str:
    """The table as plain text, differences in percentage points, with the notes below."""

    def points(value: float) -> str:
        return "-" if math.isnan(value) else f"{100 * value:+.1f}"

    def probability(value: float) -> str:
        return "-" if math.isnan(value) else "<.001" if value < 0.001 else f"{value:.3f}"

    rows = [
        {
            "a - b": f"{row['a']} - {row['b']}",
            "": row["measure"],
            "step": row["step"],
            "benchmark": row["benchmark"],
            "seeds": row["seeds"],
            "problems": row["problems"],
            "points": points(row["difference"]),
            "95 %": f"[{points(row['low'])}, {points(row['high'])}]",
            "p": probability(row["p"]),
            "p (Holm)": probability(row["p_holm"]),
            "verdict": row["verdict"],
        }
        for row in table.to_dict("records")
    ]
    text = pd.DataFrame(rows).to_string(index=False)
    return "\n".join([text, MEASURES_TEXT, *(f"note: {note}" for note in notes)])


def add_command(commands: Any) -> None:
    """Add `compare` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="differences between methods or runs, paired by problem and seed",
        description="Takes the others from the first: its label (or run) minus each other one. "
        "Prints the table and writes DIR/compare.csv.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="log of a run; the first is A")
    parser.add_argument(
        "--by",
        choices=("label", "run"),
        default="label",
        help="label: runs of one method and setting are its seeds (default); run: each for itself",
    )
    parser.add_argument(
        "-o", "--output", default="runs/compare", metavar="DIR", help="default: runs/compare"
    )
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> None:
    sources = open_sources(arguments.runs)
    collected = collect(sources, by=arguments.by)
    first = next(
        (
            mine.label
            for mine in collected.curves.values()
            if any(run.name == sources[0].name for run in mine.runs)
        ),
        None,
    )
    if first is None:
        raise AnalysisError(f"{sources[0].path} cannot be compared: {' '.join(collected.notes)}")
    others = [name for name in collected.curves if name != first]
    if not others:
        raise AnalysisError(f"all runs are {first}: there is nothing to compare; use --by run")
    table, notes = differences(collected, first, others)
    if table.empty:
        raise AnalysisError(f"nothing can be compared: {' '.join(notes)}")
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "compare.csv", index=False)
    every = [sizes_text(collected), over_text(collected.curves.values()), *collected.notes, *notes]
    print(format_differences(table, every))
    print(f"wrote {folder / 'compare.csv'}")
