"""Table 1: methods by benchmarks, with intervals, differences, and the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.compare import CLAIM_SEEDS, MEASURES_TEXT, differences
from analysis.curves import Collected, collect
from analysis.exhibit import Exhibit
from analysis.markdown import markdown
from analysis.paper import (
    BENCHMARKS,
    BEST_BASELINE,
    DISAGREEMENT,
    OVERLAP,
    TABLE_1,
    paper_accuracy,
    paper_benchmark,
)
from analysis.selection import describe
from analysis.sources import Source
from analysis.statistics import MEAN, levels, over_text, sizes_text

_MEASURES = {"final": MEAN, "area": "area", "best": "best step"}
"""Measure -> heading of its number for the mean over benchmarks."""


def make(sources: Sequence[Source]) -> Exhibit:
    """Levels of every label, differences of CVPO from the others, and the paper's table."""
    collected = collect(sources)
    shown = levels(collected)
    shown["paper"] = [
        paper_accuracy(label, benchmark) if measure == "final" else None
        for label, benchmark, measure in shown[["label", "benchmark", "measure"]].to_numpy()
    ]
    first = reference(list(collected.curves))
    others = [label for label in collected.curves if label != first]
    compared, notes = differences(collected, first, others)
    blocks = [_level_block(shown)]
    if len(compared):
        blocks += [f"Differences, {first} minus:", _difference_block(compared)]
    if not _all_beside(shown):
        blocks += ["The paper's table 1 (avg@32, %), as far as it is known:", _paper_block()]
    table = pd.concat(
        [shown.assign(block="level"), compared.assign(block="difference")], ignore_index=True
    )
    caption = _caption(collected, shown, compared, notes)
    return Exhibit(caption, table, text="\n\n".join([*blocks, caption]))


def reference(labels: Sequence[str]) -> str:
    """The label that differences are taken of: cvpo as the method sets it, else the last."""
    return "cvpo" if "cvpo" in labels else labels[-1]


# -------------------------------------------------------------------------------------- blocks


def _level_block(shown: pd.DataFrame) -> str:
    headings = _headings(shown)
    rows = []
    for label, own in shown.groupby("label", sort=False):
        cells = {_heading(row): _level_cell(row) for row in own.to_dict("records")}
        first = own.iloc[0]
        rows.append(
            [str(label), first["seeds"], first["step"], *(cells.get(name, "") for name in headings)]
        )
    return _markdown(["accuracy (%)", "seeds", "step", *headings], rows)


def _difference_block(compared: pd.DataFrame) -> str:
    headings = _headings(compared)
    rows = []
    for label, own in compared.groupby("b", sort=False):
        cells = {_heading(row): _difference_cell(row) for row in own.to_dict("records")}
        seeds, step = own.iloc[0][["seeds", "step"]]
        few = seeds < CLAIM_SEEDS
        claim = own.iloc[0]["verdict"] if few else "claimed where starred"
        values = (cells.get(name, "") for name in headings)
        rows.append([str(label), seeds, step, *values, claim])
    return _markdown(["difference (points)", "seeds", "step", *headings, "claim"], rows)


def _paper_block() -> str:
    rows = [[label, *(f"{100 * x:.1f}" for x in values)] for label, values in TABLE_1.items()]
    rows.append(["best baseline, implied", *(f"{100 * x:.1f}" for x in BEST_BASELINE)])
    return _markdown(["accuracy (%)", *BENCHMARKS], rows)


def _headings(table: pd.DataFrame) -> list[str]:
    """Benchmarks, then what is said of the mean."""
    found = [_heading(row) for row in table.to_dict("records")]
    means = [name for name in _MEASURES.values() if name in found]
    return sorted(set(found) - set(means)) + means


def _heading(row: Mapping[Any, Any]) -> str:
    return str(row["benchmark"] if row["benchmark"] != MEAN else _MEASURES[row["measure"]])


def _level_cell(row: Mapping[Any, Any]) -> str:
    text = f"{100 * row['accuracy']:.1f} {_range(row, '')}"
    beside = row["paper"]
    return text if beside is None or math.isnan(beside) else f"{text} (paper {100 * beside:.1f})"


def _difference_cell(row: Mapping[Any, Any]) -> str:
    star = "*" if row["p_holm"] <= 0.05 and row["seeds"] >= CLAIM_SEEDS else ""
    return f"{100 * row['difference']:+.1f}{star} {_range(row, '+')}"


def _range(row: Mapping[Any, Any], sign: str) -> str:
    if math.isnan(row["low"]):
        return "[-]"
    return f"[{100 * row['low']:{sign}.1f}, {100 * row['high']:{sign}.1f}]"


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return markdown(pd.DataFrame(rows, columns=list(headings)))


# ------------------------------------------------------------------------------------- caption


def _all_beside(shown: pd.DataFrame) -> bool:
    """Whether every known number of the paper already stands beside one of ours."""
    beside = {
        (row["label"], paper_benchmark(row["benchmark"]))
        for row in shown.to_dict("records")
        if row["measure"] == "final"
    }
    return all((label, name) in beside for label in TABLE_1 for name in BENCHMARKS)


def _caption(
    collected: Collected, shown: pd.DataFrame, compared: pd.DataFrame, notes: Sequence[str]
) -> str:
    curves = collected.curves
    sentences = [
        "Accuracy (avg@k) of each method at its last step; benchmarks weigh the same in the mean.",
        MEASURES_TEXT,
        f"Runs: {describe({label: mine.runs for label, mine in curves.items()})}.",
        sizes_text(collected),
        over_text(curves.values()),
    ]
    if "before training" in set(shown["label"]):
        sentences.append(
            "Before training is step 0 of the runs, those of one seed averaged: they draw the same "
            "samples from the same model."
        )
    if len({int(mine.steps[-1]) for mine in curves.values()}) > 1:
        sentences.append("The methods end at different steps: see the column step.")
    if len(compared) and compared["p"].isna().all():
        sentences.append("The differences have no interval, so none of them can be judged.")
    elif len(compared):
        sentences.append(
            "Differences are paired by problem and by seed, at the last step of both. A star marks "
            f"a Holm-adjusted p of at most .05; the family is all {compared['p'].notna().sum()} "
            f"differences of the table. With fewer than {CLAIM_SEEDS} seeds none is claimed."
        )
    elif len(curves) == 1:
        sentences.append("There is one method only, so no difference.")
    sentences += [*collected.notes, *notes]
    if any(paper_benchmark(name) == "AMC23" for name in shown["benchmark"]):
        sentences.append(OVERLAP)
    sentences.append(
        "The paper's rows are avg@32 of Qwen2.5-7B; its rows of the base model and of GRPO "
        f"(one-step async) are not known. {DISAGREEMENT}"
    )
    return " ".join(dict.fromkeys(sentences))
