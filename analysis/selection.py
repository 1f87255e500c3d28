"""Which trainings an exhibit can use, where they end, and what their seeds say together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from analysis import AnalysisError
from analysis.labels import groups
from analysis.sources import Source, ranges
from cvpo.metrics import Interval, paired_t_interval

Groups = dict[str, list[Source]]
"""Label -> its runs, by seed."""


@dataclass(frozen=True)
class Selection:
    """The trainings that hold what an exhibit shows, and what a reader has to know of them.

    Each that does not, and each that is not finished, has a sentence.
    """

    groups: Groups
    notes: tuple[str, ...]


def holding(
    sources: Sequence[Source], part: str, columns: Sequence[str] = (), *, remedy: str
) -> Selection:
    """The trainings, by label, whose logs hold a part and a value in each of these columns of it.

    Args:
        sources: logs of any kind.
        part: a part of the run log.
        columns: of the part.
        remedy: how one gets such a log, for the message when there is none.

    Raises:
        AnalysisError: no training holds them; or as `analysis.labels.groups`.
    """
    found: Groups = {}
    trained = groups(sources)
    notes = [] if trained else ["None of the logs says which method it is a training of."]
    without: dict[str, list[str]] = {}
    for label, runs in trained.items():
        for run in runs:
            why = _lacks(run, part, columns)
            if why is None:
                found.setdefault(label, []).append(run)
                notes += _unfinished(run)
            else:
                without.setdefault(why, []).append(run.name)
    for why, names in without.items():
        notes.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out: {why}.")
    if not found:
        raise AnalysisError(
            " ".join([f"no run has what this shows, {_name(part, columns)}: {remedy}.", *notes])
        )
    return Selection(found, tuple(notes))


def _lacks(run: Source, part: str, columns: Sequence[str]) -> str | None:
    for column in columns or (None,):
        why = run.lacks(part, column)
        if why is not None:
            return f"no {_name(part, [column] if column else [])} ({why})"
    return None


def _unfinished(run: Source) -> list[str]:
    if run.finished is not False or "metrics" not in run.contents:
        return []
    come = f"it has come to step {last_step(run)} of {run.total_steps}"
    return [f"{run.name} is not finished: {come} (still running, or stopped)."]


def _name(part: str, columns: Sequence[str]) -> str:
    return f"{', '.join(columns)} in {part}" if columns else part


def at_the_end(selection: Selection) -> Selection:
    """Without the runs that have not come as far as the others.

    A run that is compared at its end has to have got there: one that logged less than nine tenths
    of the steps of the longest, killed or still being written, is left out with a note.
    """
    last = {run.name: last_step(run) for runs in selection.groups.values() for run in runs}
    longest = max(last.values())
    kept = {
        label: [run for run in runs if last[run.name] >= 0.9 * longest]
        for label, runs in selection.groups.items()
    }
    silent = {
        run.name
        for runs in selection.groups.values()
        for run in runs
        if "metrics" not in run.contents
    }
    short = [
        f"{name} is left out: without metrics it is not known how far it has come."
        if name in silent
        else f"{name} is left out: it has come to step {step} only, of {longest}."
        for name, step in last.items()
        if step < 0.9 * longest
    ]
    return Selection(
        {label: runs for label, runs in kept.items() if runs}, (*selection.notes, *short)
    )


def headline(groups: Groups) -> str:
    """The label to show where there is room for one: CVPO's default, else a variant, else any."""
    return max(groups, key=lambda label: (label == "cvpo", label.split()[0] == "cvpo"))


def last_step(run: Source) -> int:
    """Last step that a run has metrics of; 0 without metrics."""
    if "metrics" not in run.contents:
        return 0
    return int(run.metrics([])["step"].max())


def recent(run: Source, part: str, columns: Sequence[str], count: int) -> list[pd.DataFrame]:
    """The frames of the last steps that a part was logged at, in order of steps.

    The steps are looked for from the end of the metrics backwards, so that of a long run only a few
    files are read.

    Args:
        run: holds the part.
        part: one with rows by step.
        columns: which to read.
        count: steps at most.

    Raises:
        AnalysisError: damage, with the file; or the part has no row at all.
    """
    steps = run.metrics([])["step"].tolist() if "metrics" in run.contents else []
    wide = count
    while wide < len(steps):
        # the part may have steps between those of the metrics
        window = range(steps[-wide], steps[-1] + 1)
        frames = deque(_filled(run, part, columns, window), maxlen=count)
        if len(frames) == count:
            return list(frames)
        wide *= 4
    frames = deque(_filled(run, part, columns), maxlen=count)
    if not frames:
        raise AnalysisError(f"{run.path}: {part} has no row; remove the part, or leave the run out")
    return list(frames)


def _filled(
    run: Source, part: str, columns: Sequence[str], steps: Collection[int] | None = None
) -> Iterator[pd.DataFrame]:
    return (frame for frame in run.scan(part, columns, steps) if len(frame))


def which_steps(steps: Collection[int]) -> str:
    """Steps in words: steps 31-40; every 5th step from 5 to 95, and step 98."""
    ordered = sorted(set(steps))
    listed = ranges(ordered)
    if listed.count(",") < 3:
        return f"step{'s' if len(ordered) > 1 else ''} {listed}"
    *before, last = ordered
    apart = set(np.diff(before).tolist())
    if len(apart) > 1 or last - before[-1] > max(apart):
        return f"{len(ordered)} steps between {ordered[0]} and {last}"
    every = f"every {_ordinal(max(apart))} step from {ordered[0]} to"
    if last - before[-1] in apart:
        return f"{every} {last}"
    return f"{every} {before[-1]}, and step {last}"  # which a thinned log keeps too


def steps_of(steps: Mapping[str, Collection[int]]) -> str:
    """Which steps each run's numbers are of, in words; the runs are named where they differ.

    Args:
        steps: run -> its steps.
    """
    runs: dict[str, list[str]] = {}
    for run, own in steps.items():
        runs.setdefault(which_steps(own), []).append(run)
    if len(runs) == 1:
        return next(iter(runs))
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in runs.items())


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean of one number of each seed with its 95 % t interval; ends are NaN for one seed.

    NaN where all are NaN.
    """
    x = np.asarray(values, dtype=np.float64)
    if np.isnan(x).all():
        nothing = math.nan
        return Interval(nothing, nothing, nothing, nothing, 0.95, (), (0,), dropped=x.size)
    return paired_t_interval(x, np.zeros_like(x))


def paragraph(*sentences: str | None) -> str:
    """A caption of those of its sentences that there are."""
    return " ".join(sentence for sentence in sentences if sentence)


def describe(selected: Mapping[str, Sequence[Source]]) -> str:
    """The runs in words: cvpo (seeds 1-3), vapo (seed 1)."""
    return ", ".join(f"{label} ({_seeds(runs)})" for label, runs in selected.items())


def _seeds(runs: Sequence[Source]) -> str:
    known = sorted(run.seed for run in runs if run.seed is not None)
    if len(known) < len(runs):
        return f"{len(runs)} runs"
    if len(known) == 1:
        return f"seed {known[0]}"
    if len(known) > 2 and all(b - a == 1 for a, b in pairwise(known)):
        return f"seeds {known[0]}-{known[-1]}"
    return "seeds " + ", ".join(map(str, known))


def about_seeds(selected: Mapping[str, Sequence[Source]]) -> str:
    """What intervals over seeds are worth here, as a sentence."""
    single = [label for label, runs in selected.items() if len(runs) == 1]
    if len(single) == len(selected):
        return "Each label has one seed, so nothing is said about other seeds."
    if single:
        have = "has one seed" if len(single) == 1 else "have one seed each"
        return (
            f"Intervals are 95 % t intervals over seeds; {', '.join(single)} {have} and no "
            "interval."
        )
    return "Intervals are 95 % t intervals over seeds."
