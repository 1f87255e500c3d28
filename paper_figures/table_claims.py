"""The paper's claims, one by one: what trainings and the simulator say, and what they cannot.

Decision: all differences of accuracy in this table are one family, over which Holm's p-values are
adjusted; other differences (of spread, of the tracker's error) are judged by their own p-value. The
simulator's verdicts are its studies' own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from statistics import NormalDist
from typing import Any, ParamSpec

import numpy as np
import pandas as pd
import torch

from analysis import AnalysisError
from analysis.compare import CLAIM_SEEDS, differences, verdict_on
from analysis.curves import COSTS, Collected, Curves, benchmark_of, collect
from analysis.exhibit import Exhibit
from analysis.labels import groups
from analysis.markdown import markdown
from analysis.selection import Selection, at_the_end, describe, holding, over_seeds, paragraph
from analysis.sources import Source, ranges
from analysis.spread import LAST_STEPS, OWN, read_spread
from analysis.statistics import MEAN, at_cost, base, covered, over_text, sizes_text
from analysis.studies import find_study, read_table, seeds
from cvpo import (
    BetaTracker,
    CurriculumConfig,
    DifficultyCurriculum,
    Interval,
    RoundReport,
    pass_at_k,
)
from cvpo.metrics import holm, p_value
from paper_figures.overhead import NEGLIGIBLE, shares_of

CLAIMS: dict[int, str] = {
    1: "eq. 13 bounds the gradient, and its Var(V) term governs the size of an update",
    2: "W_S makes correct answers converge and wrong ones explore",
    3: "W_S shifts the distribution of sigma to the right (figure 3)",
    4: "sigma carries information beyond a constant re-weighting of outcomes",
    5: "the tracker follows the drift of difficulty",
    6: "the trigger detects a bottleneck",
    7: "phase 2 moves weight to hard problems",
    8: "each mechanism alone beats VAPO",
    9: "both mechanisms together beat each alone",
    10: "a larger coefficient lifts easy benchmarks, and hard ones peak at .3 (figure 4)",
    11: "the overhead is negligible",
    12: "gains hold at equal device-hours, and for pass@32",
    13: "the lead of the first 100-200 steps comes from the early curriculum",
    14: "lambda_critic = .1 is a working choice",
}
"""The simulator's, word for word (`sim.claims`), which may not be imported here."""

STUDIES: dict[int, tuple[str, ...]] = {
    1: ("bound",),
    2: ("weights",),
    3: ("weights",),
    4: ("weights",),
    5: ("tracker",),
    6: ("trigger",),
    7: ("curriculum",),
    8: ("curriculum", "weights"),
    9: ("curriculum",),
    10: ("calibrate",),
    12: ("curriculum", "weights"),
    13: ("curriculum",),
}
"""Claim -> the simulator's studies that give a verdict on it."""

TRAININGS, SIMULATOR = "trainings", "simulator"
VAPO, CVPO, W_S, W_D = "vapo", "cvpo", "cvpo-stochasticity", "cvpo-curriculum"
ARMS = ("constant", "shuffled", "flipped")
FORGETTING = 0.8
"""Discount that the paper's tracker, which never forgets, is compared with."""
LAST_ROUNDS = 5
"""Rounds that stand for the end of a run."""
PAPER_K = 32
"""Of the paper's pass@k."""

_CANNOT_SAY = "cannot say: "
_END = {"final": "at step {step}", "area": "area to step {step}"}
_PHASE, _EXPLAINED = "curriculum/phase", "critic/explained_variance"
_POOLED = CurriculumConfig(detector="pooled")


# ------------------------------------------------------------------------------ what is found


@dataclass(frozen=True)
class Row:
    """One number on a claim, or one thing that cannot be said of it."""

    measure: str
    """Empty where there is no number."""
    value: float
    low: float = math.nan
    high: float = math.nan
    unit: str = ""
    n: str = ""
    verdict: str = ""
    source: str = TRAININGS
    seeds: int = 0
    """Pairs of a difference, on which a verdict is due; 0 where the number is none."""
    difference: float = math.nan
    """What is tested against 0: the value, or the logarithm of a ratio."""
    p: float = math.nan
    accuracy: bool = False
    """Whether it belongs to the family of accuracy differences."""


@dataclass(frozen=True)
class Note:
    """What a reader has to know of the logs: a run left out, a file that is damaged."""

    text: str


Finding = Row | Note
P = ParamSpec("P")


def _gap(why: str, source: str = TRAININGS) -> Row:
    """What cannot be said."""
    return Row("", math.nan, verdict=_CANNOT_SAY + why.rstrip("."), source=source)


class _AbsentError(AnalysisError):
    """No such run, or too little of it: a gap in what is said, and nothing wrong with a log."""


def _careful(find: Callable[P, Iterator[Finding]]) -> Callable[P, Iterator[Finding]]:
    """Ends a search at what is missing or damaged, and says so."""

    @wraps(find)
    def found(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        try:
            yield from find(*args, **kwargs)
        except AnalysisError as error:
            yield _gap(str(error))
            if not isinstance(error, _AbsentError):
                yield Note(str(error))

    return found


@dataclass(frozen=True)
class Given:
    """The logs, and what several claims read of them."""

    sources: Sequence[Source]

    @cached_property
    def collected(self) -> Collected:
        """The evaluations of all trainings."""
        return collect(self.sources)

    @cached_property
    def studies(self) -> dict[str, pd.DataFrame | AnalysisError]:
        """Name of every study among the logs -> its verdicts, or why they cannot be read."""
        names = dict.fromkeys(str(s.config["study"]) for s in self.sources if "study" in s.config)
        return {name: _verdicts(self.sources, name) for name in names}

    def pair(self, a: str, b: str) -> tuple[Curves, Curves]:
        """The evaluations of two labels, on the benchmarks that all labels have.

        Raises:
            AnalysisError: one of the labels, or such a benchmark, is not there.
        """
        curves, shared = self.collected.curves, self.collected.shared
        absent = [label for label in (a, b) if label not in curves]
        if absent:
            raise _AbsentError(f"no run of {' or '.join(absent)} that was evaluated in training")
        if not shared:
            raise AnalysisError("No benchmark is common to all runs, so there is no mean")
        return curves[a].of_benchmarks(shared), curves[b].of_benchmarks(shared)

    def ended(self, part: str, *columns: str) -> Selection:
        """The runs that hold these columns and have come as far as the others."""
        remedy = "give logs of python -m train"
        return at_the_end(holding(self.sources, part, columns, remedy=remedy))


# --------------------------------------------------------------------------------- the table


def make(sources: Sequence[Source]) -> Exhibit:
    """Every claim, with a row for each number on it and for each thing that cannot be said.

    Raises:
        AnalysisError: the logs say nothing of any claim.
    """
    given = Given(sources)
    found = [(number, finding) for number in CLAIMS for finding in _on_claim(number, given)]
    rows = list(dict.fromkeys((number, x) for number, x in found if isinstance(x, Row)))
    notes = list(dict.fromkeys(x.text for _, x in found if isinstance(x, Note)))
    if not any(row.measure for _, row in rows):
        raise AnalysisError(
            "no claim can be judged: give runs of cvpo and vapo, or logs of studies (python -m "
            f"sim NAME). {' '.join(notes)}"
        )
    table = _table(rows)
    caption = _caption(given, [row for _, row in rows], notes)
    sections = [_section(number, table[table["claim"] == number]) for number in CLAIMS]
    return Exhibit(caption, table, text="\n\n".join([_overview(table), *sections, caption]))


def _on_claim(number: int, given: Given) -> Iterator[Finding]:
    """What trainings say of a claim, then what the simulator says."""
    if number in BY_TRAININGS:
        trained = list(_careful(BY_TRAININGS[number])(given))
        yield from trained
        yield from _too_few_seeds({x.seeds for x in trained if isinstance(x, Row)} - {0})
    else:
        yield _gap("no training decides it: it takes a world whose truth is known")
    yield from _simulated(number, given)


def _too_few_seeds(counts: set[int]) -> Iterator[Row]:
    few = ranges(n for n in counts if n < CLAIM_SEEDS)
    if few:
        yield _gap(f"what other seeds would give: a claim takes {CLAIM_SEEDS} of them, here: {few}")


def _table(found: Sequence[tuple[int, Row]]) -> pd.DataFrame:
    """The rows, with verdicts on the differences; those of accuracy are one family."""
    rows = pd.DataFrame(
        [{"claim": number, "text": CLAIMS[number]} | vars(x) for number, x in found]
    )
    family, tested = rows["accuracy"], rows["seeds"] > 0
    rows.loc[family, "p"] = holm(rows.loc[family, "p"].to_numpy())
    tests = rows.loc[tested, ["seeds", "difference", "p"]].to_dict("list").values()
    rows.loc[tested, "verdict"] = list(map(verdict_on, *tests))
    rows["enough"] = [_enough(row) for row in rows.to_dict("records")]
    columns = ("claim", "text", "source", "measure", "value", "low", "high", "unit", "n")
    return rows[[*columns, "verdict", "enough"]]


def _enough(row: Mapping[Any, Any]) -> float:
    """Seeds that a difference of the size seen would take; NaN where that cannot be said.

    With so many it is found four times in five, two-sided at .05, if its standard error falls as
    one over the root of the seeds.
    """
    if row["seeds"] < 2:
        return math.nan
    effect, low, high = (
        math.log(x) if row["unit"] == "ratio" else x
        for x in (row["value"], row["low"], row["high"])
    )
    if not effect or not math.isfinite(low + high):
        return math.nan
    error = (high - low) / (2 * _Z[0])
    return float(max(CLAIM_SEEDS, math.ceil(row["seeds"] * (sum(_Z) * error / effect) ** 2)))


_Z = NormalDist().inv_cdf(0.975), NormalDist().inv_cdf(0.8)


# ----------------------------------------------------------------------------------- the text


def _overview(table: pd.DataFrame) -> str:
    """How many verdicts of each kind a claim has, from either source."""
    rows = []
    for number, text in CLAIMS.items():
        row: dict[str, Any] = {"#": number, "claim": text}
        for source in (TRAININGS, SIMULATOR):
            own = (table["claim"] == number) & (table["source"] == source)
            verdicts = table.loc[own & (table["measure"] != ""), "verdict"]
            tally = Counter(verdict.split(":")[0] or "no verdict" for verdict in verdicts)
            row[source] = ", ".join(f"{kind} ({count})" for kind, count in sorted(tally.items()))
        rows.append(row)
    return markdown(pd.DataFrame(rows))


def _section(number: int, table: pd.DataFrame) -> str:
    """A claim, its numbers, and what cannot be said."""
    said = table["measure"] != ""
    parts = [f"## {number}. {CLAIMS[number]}"]
    if said.any():
        shown = [
            {
                "source": row["source"],
                "measure": row["measure"],
                "value": _short(row["value"], row["unit"]),
                "95 %": _ends(row["low"], row["high"], row["unit"]),
                "unit": row["unit"],
                "n": row["n"],
                "verdict": row["verdict"],
                "seeds it would take": "" if math.isnan(row["enough"]) else f"{row['enough']:,.0f}",
            }
            for row in table[said].to_dict("records")
        ]
        parts.append(markdown(pd.DataFrame(shown)))
    if not said.all():
        why = table.loc[~said, "verdict"].str.removeprefix(_CANNOT_SAY)
        parts.append(f"{_CANNOT_SAY}{'; '.join(why)}.")
    return "\n\n".join(parts)


def _ends(low: float, high: float, unit: str) -> str:
    return "" if math.isnan(low) else f"[{_short(low, unit)}, {_short(high, unit)}]"


def _short(number: float, unit: str) -> str:
    """Points to one decimal, else three digits; a dash for what is not there."""
    if math.isnan(number):
        return "-"
    if unit == "points" or abs(number) >= 1000:
        return f"{round(number, 1) + 0.0:,.1f}"  # + 0: no minus before a zero
    return f"{number + 0.0:.3g}"


def _caption(given: Given, rows: Sequence[Row], notes: Sequence[str]) -> str:
    said = {row.source for row in rows if row.measure}
    return paragraph(
        "What is known here of each claim of the paper, with 95 % intervals. Seeds it would take: "
        "to find a difference of the size seen four times in five, two-sided at .05, if its "
        f"standard error falls as one over the root of the seeds; {CLAIM_SEEDS} at least.",
        *(_about_trainings(given, rows) if TRAININGS in said else ()),
        _about_studies(given) if SIMULATOR in said else None,
        *notes,
    )


def _about_trainings(given: Given, rows: Sequence[Row]) -> Iterator[str]:
    family = sum(row.accuracy for row in rows)
    yield (
        "Trainings: the verdict on a difference is whether it is higher or lower than 0 (a ratio: "
        f"than 1), from {CLAIM_SEEDS} seeds on. Differences of accuracy are in percentage points "
        "of the mean over benchmarks, paired by problem and seed; Holm's adjustment is over all "
        f"{family} of them here."
    )
    yield f"Runs: {describe(groups(given.sources))}."
    if family:
        yield sizes_text(given.collected)
        yield over_text(given.collected.curves.values())


def _about_studies(given: Given) -> str:
    studies = [
        f"{name} ({_many(len(seeds(find_study(given.sources, name))), 'seed')})"
        for name, read in given.studies.items()
        if not isinstance(read, AnalysisError) and len(read)
    ]
    return (
        "Simulator: the verdict is on the claim, in the study's own setting, whose truth is known "
        f"(python -m sim NAME): {', '.join(studies)}."
    )


# ---------------------------------------------------------------------------------- simulator


def _verdicts(sources: Sequence[Source], name: str) -> pd.DataFrame | AnalysisError:
    """The rows of a study that have a verdict."""
    words = ("quantity", "setting", "unit", "verdict")
    gaps = ("claim", "value", "low", "high")
    try:
        study = find_study(sources, name)
        rows = read_table(study, "study", words=words, numbers=("n",), gaps=gaps)
    except AnalysisError as error:
        return error
    return rows[rows["claim"].notna() & (rows["verdict"] != "")]


def _simulated(number: int, given: Given) -> Iterator[Finding]:
    """The verdicts of every study on a claim, as they stand, and which study is missing."""
    spoken = set()
    for name, rows in given.studies.items():
        if isinstance(rows, AnalysisError):
            yield Note(str(rows))
            continue
        for row in rows[rows["claim"] == number].to_dict("records"):
            spoken.add(name)
            yield Row(
                measure=f"{row['quantity']}: {row['setting']}",
                n=f"n = {row['n']:,.0f}",
                source=SIMULATOR,
                **{key: row[key] for key in ("value", "low", "high", "unit", "verdict")},
            )
    for name in STUDIES.get(number, ()):
        if name not in given.studies:
            yield _gap(f"no log of the study {name} (python -m sim {name})", SIMULATOR)
        elif isinstance(given.studies[name], AnalysisError):
            yield _gap(str(given.studies[name]), SIMULATOR)
        elif name not in spoken:
            yield _gap(f"the study {name}, as it was set, has no verdict on it", SIMULATOR)
    if number not in STUDIES:
        yield _gap("no study simulates it", SIMULATOR)


# ---------------------------------------------------------------------- differences of accuracy


def _difference(
    given: Given, pair: tuple[Curves, Curves], words: Mapping[str, str] = _END
) -> Iterator[Finding]:
    """The first label less the second, in the mean over benchmarks, as `analysis.compare` has it.

    Args:
        given: its notes on the evaluations are passed on.
        pair: on the same benchmarks.
        words: measure of `differences` -> what it is called; may hold {step}.
    """
    a, b = pair
    table, notes = differences(
        Collected({a.label: a, b.label: b}, a.benchmarks, ()), a.label, [b.label]
    )
    yield from map(Note, [*given.collected.notes, *notes])
    if table.empty:
        raise _AbsentError(" ".join(notes))
    for measure, text in words.items():
        chosen = (table["benchmark"] == MEAN) & (table["measure"] == measure)
        for row in table[chosen].to_dict("records"):
            yield Row(
                measure=f"{a.label} less {b.label}, {text.format(step=row['step'])}",
                value=100 * row["difference"],
                low=100 * row["low"],
                high=100 * row["high"],
                unit="points",
                n=f"{_many(row['seeds'], 'seed')}, {_many(row['problems'], 'problem')}",
                seeds=row["seeds"],
                difference=row["difference"],
                p=row["p"],
                accuracy=True,
            )


@_careful
def _less(given: Given, a: str, b: str) -> Iterator[Finding]:
    yield from _difference(given, given.pair(a, b))


def _arms(given: Given) -> Iterator[Finding]:
    for arm in ARMS:
        yield from _less(given, W_S, f"{W_S} ({arm})")


def _alone(given: Given) -> Iterator[Finding]:
    for half in (W_S, W_D):
        yield from _less(given, half, VAPO)


def _together(given: Given) -> Iterator[Finding]:
    for half in (W_S, W_D):
        yield from _less(given, CVPO, half)


def _coefficients(given: Given) -> Iterator[Finding]:
    """c = .3 less .1 and .5 less .3, on the easiest and on the hardest third of benchmarks."""
    easiest, hardest = _thirds(given.collected)
    low, high = f"{CVPO} c=.1", f"{CVPO} c=.5"
    for names, kind in ((easiest, "easiest"), (hardest, "hardest")):
        where = f"{kind} third ({', '.join(names)})"
        yield from _on(names, given, CVPO, low, f"{where}, claimed above 0")
        claimed = "above" if names is easiest else "below"
        yield from _on(names, given, high, CVPO, f"{where}, claimed {claimed} 0")


@_careful
def _on(names: Sequence[str], given: Given, a: str, b: str, where: str) -> Iterator[Finding]:
    mine, its = (curves.of_benchmarks(names) for curves in given.pair(a, b))
    yield from _difference(given, (mine, its), {"final": f"at step {{step}}, {where}"})


def _thirds(collected: Collected) -> tuple[list[str], list[str]]:
    """The easiest and the hardest third of the common benchmarks, by accuracy before training."""
    cells = base([mine for mine in collected.curves.values() if mine.steps[0] == 0])
    if cells is None:
        raise _AbsentError("which benchmarks are easy: no run was evaluated before training")
    if len(collected.shared) < 2:
        raise _AbsentError("easy against hard: fewer than two benchmarks are common to all runs")
    benchmark = benchmark_of(cells.problems)
    accuracy = {name: cells.values[:, benchmark == name].mean() for name in collected.shared}
    ordered = sorted(collected.shared, key=lambda name: -accuracy[name])
    third = max(1, round(len(ordered) / 3))
    return sorted(ordered[:third]), sorted(ordered[-third:])


def _costs(given: Given) -> Iterator[Finding]:
    for axis in COSTS:
        yield from _at_equal_cost(given, axis)
    yield from _by_pass_at_k(given)


@_careful
def _at_equal_cost(given: Given, axis: str) -> Iterator[Finding]:
    """At the largest cost that all runs of both have come to."""
    pair, name = given.pair(CVPO, VAPO), axis.replace("_", "-")
    start, budget = covered(pair, axis)
    if not start <= budget:  # NaN: not known
        raise AnalysisError(
            f"{CVPO} less {VAPO} at equal {name}: of one its cost is not logged at the steps it "
            "evaluated, or they have none in common"
        )
    spent = np.array([budget])
    mine, its = (
        # Evaluated once, as it were: at that cost.
        replace(x.at(x.steps[-1:]), steps=np.array([1]), accuracy=at_cost(x, axis, spent))
        for x in pair
    )
    yield from _difference(given, (mine, its), {"final": f"at equal {name} ({budget:,.0f})"})


@_careful
def _by_pass_at_k(given: Given) -> Iterator[Finding]:
    """At the last common step, for the largest k that every problem has samples for."""
    pair = given.pair(CVPO, VAPO)
    last = np.intersect1d(pair[0].steps, pair[1].steps)[-1:]
    if not len(last):
        raise _AbsentError(f"{CVPO} and {VAPO} have no evaluated step in common")
    mine, its = (x.at(last) for x in pair)
    k = min(*mine.sizes, *its.sizes)
    measured = (_with_pass_at_k(mine, k), _with_pass_at_k(its, k))
    yield from _difference(given, measured, {"final": f"pass@{k} at step {{step}}"})
    if k < PAPER_K:
        few = f"there are {k} samples of a problem, set evaluation.samples={PAPER_K}"
        yield _gap(f"pass@{PAPER_K}: {few}")


def _with_pass_at_k(mine: Curves, k: int) -> Curves:
    correct = mine.accuracy * mine.samples
    if not np.allclose(correct, np.round(correct), atol=1e-6):
        raise _AbsentError(f"pass@k: {mine.label} is graded with partial credit")
    return replace(mine, accuracy=np.asarray(pass_at_k(mine.samples, np.round(correct), k)))


def _early(given: Given) -> Iterator[Finding]:
    """The lead when a training is first evaluated, and what W_D was until then."""
    mine, its = given.pair(W_D, VAPO)
    steps = np.intersect1d(mine.steps, its.steps)
    first = steps[steps > 0][:1]
    if not len(first):
        raise _AbsentError(f"{W_D} and {VAPO} have no step after the start in common")
    words = {"final": "at step {step}, the first evaluation after the start"}
    yield from _difference(given, (mine.at(first), its.at(first)), words)
    yield from _until(mine.runs, int(first[0]))


def _until(runs: Sequence[Source], step: int) -> Iterator[Finding]:
    watched = [run for run in runs if len(_metric(run, _PHASE))]
    if watched:
        early = 100 * sum(_switch(run) >= step for run in watched) / len(watched)
        what = f"{W_D}: runs in phase early at step {step}"
        yield Row(what, early, unit="%", n=_many(len(watched), "run"))
    what = f"{W_D}: coefficient of variation of W_D, mean of steps 1-{step}"
    varies = [_metric(run, "weights/w_d_cv").loc[1:step].mean() for run in runs]
    yield from _level(what, runs, varies, "%", scale=100)


def _lambda_critic(given: Given) -> Iterator[Finding]:
    other = f"{VAPO} lambda_critic=.1"
    yield from _less(given, other, VAPO)
    selection = given.ended("metrics", _EXPLAINED)
    yield from map(Note, selection.notes)
    for label in (other, VAPO):
        runs = selection.groups.get(label, [])  # where there is none, the difference tells
        ends = [_metric(run, _EXPLAINED).tail(LAST_STEPS).mean() for run in runs]
        what = f"{label}: explained variance of the critic, mean of the last {LAST_STEPS} steps"
        if runs:
            yield from _level(what, runs, ends, "share")


# ----------------------------------------------------------------------------- sigma and seconds


def _spread(given: Given) -> Iterator[Finding]:
    yield from _spread_under(given, OWN, "each under its own critic")
    scored = Counter(
        part for run in given.sources for part in run.parts if part.startswith("scores/")
    )
    if not scored:
        raise AnalysisError(
            "whether a shift of sigma is the policy's or its critic's: no run has scores by one "
            "frozen critic (python -m train score)"
        )
    part = max(sorted(scored), key=lambda name: scored[name])
    yield from _spread_under(given, part, f"all under critic {part.removeprefix('scores/')}")


@_careful
def _spread_under(given: Given, part: str, critic: str) -> Iterator[Finding]:
    """Median variance of the values within a trajectory over VAPO's, paired by seed."""
    selection = given.ended(part, "sigma")
    yield from map(Note, selection.notes)
    medians = {
        label: {run.seed: _log_median(run, part) for run in selection.groups.get(label, [])}
        for label in (VAPO, W_S, CVPO)
    }
    for label in (W_S, CVPO):
        common = [seed for seed in medians[label] if seed in medians[VAPO]]
        found = over_seeds([medians[label][seed] - medians[VAPO][seed] for seed in common])
        if math.isnan(found.estimate):
            yield _gap(f"{label} over {VAPO}, {critic}: no seed of which both have a sigma")
            continue
        with np.errstate(over="ignore"):  # two seeds that disagree may leave no upper end
            value, low, high = map(float, np.exp([found.estimate, found.low, found.high]))
        what = f"median variance within a trajectory, {label} over {VAPO}, {critic}"
        n = _many(found.sizes[0], "seed")
        yield _tested(Row(what, value, low, high, "ratio", n), found)


def _log_median(run: Source, part: str) -> float:
    """NaN where no trajectory varies."""
    variance = read_spread(run, part).variance
    median = float(np.median(variance)) if len(variance) else 0.0
    return math.log(median) if median > 0 else math.nan


def _overhead(given: Given) -> Iterator[Finding]:
    """Percent of the training seconds, over the runs of CVPO and its halves."""
    selection = given.ended("metrics", "seconds/weights", "seconds/tracker")
    yield from map(Note, selection.notes)
    runs = [run for run in _flat(selection) if run.method in (CVPO, W_S, W_D)]
    shares = [found[0] for run in runs for found in [shares_of(run)] if found is not None]
    if not runs:
        raise _AbsentError(f"no run of {CVPO} or one of its halves")
    if not shares:
        raise AnalysisError(f"{', '.join(run.name for run in runs)}: no step's phases are timed")
    for part, name in (("weights", "W_S"), ("tracker", "tracker and W_D"), ("both", "both")):
        found = over_seeds([share[part] for share in shares])
        row = _row(f"{name}, of a step's training seconds", found, "%", _many(len(shares), "run"))
        yield replace(row, verdict=_negligible(found)) if part == "both" else row


def _negligible(found: Interval) -> str:
    if math.isnan(found.high):
        return "not claimed: 1 run"
    return f"{'below' if found.high < NEGLIGIBLE else 'not below'} {NEGLIGIBLE:g} %"


# --------------------------------------------------------------------------------- curriculum


def _tracker(given: Given) -> Iterator[Finding]:
    """The paper's tracker and one that forgets, replayed on the runs' own counts."""
    runs, notes = _counted(given)
    yield from notes
    rounds = [_rounds(run) for run in runs]
    ahead = []
    for discount, name in ((1.0, "no forgetting"), (FORGETTING, f"discount {FORGETTING:g}")):
        errors = [_errors(frame, discount) for frame in rounds]
        when = f"last {LAST_ROUNDS} rounds, {name}"
        sizes, lags = zip(
            *((x["after"].abs().mean(), x["after"].mean()) for x in errors), strict=True
        )
        yield from _level(f"|rho - rate of the round|, {when}", runs, sizes, "points", scale=100)
        yield from _level(f"rho - rate of the round, {when}", runs, lags, "points", scale=100)
        ahead.append([x["before"].abs().mean() for x in errors])
    excess = [a - b for a, b in zip(*ahead, strict=True)]
    what = f"|rho - rate of the next round|, no forgetting less discount {FORGETTING:g}"
    yield from _level(what, runs, excess, "points", scale=100, tested=True)


def _counted(given: Given) -> tuple[list[Source], list[Note]]:
    """The runs that tell what each round rolled out, whatever their method."""
    selection = given.ended("prompts", "trials", "successes")
    return _flat(selection), list(map(Note, selection.notes))


def _rounds(run: Source) -> pd.DataFrame:
    """Step, round, prompt_id, trials and successes of the prompts that each round rolled out.

    Raises:
        AnalysisError: an impossible count, or damage; names the file.
    """
    frame = run.read("prompts", ["step", "round", "prompt_id", "trials", "successes"])
    wrong = ~frame["successes"].between(0, frame["trials"])
    if wrong.any():
        row = frame[wrong].iloc[0]
        raise AnalysisError(
            f"{run.path}/prompts, round {row['round']:.0f}: prompt {row['prompt_id']:.0f} has "
            f"{row['successes']:g} successes in {row['trials']:g} trials; remove the file"
        )
    seen = frame[frame["trials"] > 0]
    if seen.empty:
        raise AnalysisError(f"{run.path}/prompts: no round rolled out a prompt; leave the run out")
    return seen


def _num_prompts(rounds: pd.DataFrame) -> int:
    return int(rounds["prompt_id"].max()) + 1


def _observations(seen: pd.DataFrame) -> list[torch.Tensor]:
    """A round's prompts, trials and successes, for a tracker."""
    return [torch.tensor(seen[name].to_numpy()) for name in ("prompt_id", "trials", "successes")]


def _errors(rounds: pd.DataFrame, discount: float) -> pd.DataFrame:
    """How far the tracked rate is from the success rate of each of the last rounds.

    Args:
        rounds: as `_rounds` gives them.
        discount: of the tracker, which here observes a prompt once a round.

    Returns:
        A row per round and prompt, of rho less the round's rate: after (rho with the round's
        rollouts) and before (without them; NaN where the prompt had not been seen).
    """
    tracker = BetaTracker(_num_prompts(rounds), discount=discount)
    found = []
    for _, seen in rounds.groupby("round"):
        prompt, trials, successes = _observations(seen)
        rate = successes / trials
        before = torch.where(tracker.visits[prompt] > 0, tracker.rho[prompt] - rate, math.nan)
        tracker.observe(prompt, trials, successes)
        after = tracker.rho[prompt] - rate
        found.append(pd.DataFrame({"after": after.numpy(), "before": before.numpy()}))
    return pd.concat(found[-LAST_ROUNDS:], ignore_index=True)


def _trigger(given: Given) -> Iterator[Finding]:
    """In how many runs the phase switched and when, and whether the low set still rose."""
    selection = given.ended("metrics", _PHASE)
    yield from map(Note, selection.notes)
    watched = [run for run in _flat(selection) if len(_metric(run, _PHASE))]
    switched = sum(_switch(run) < math.inf for run in watched)
    what = "runs whose phase switched"
    yield Row(what, switched, unit="runs", n=_many(len(watched), "run"))
    yield from _low_sets(given, {run.name for run in watched})


@_careful
def _low_sets(given: Given, watched: set[str]) -> Iterator[Finding]:
    """The hard prompts when the phase switched, and at the end of the runs where it did not."""
    counted, notes = _counted(given)
    yield from notes
    runs = [run for run in counted if run.name in watched]
    switched = [run for run in runs if _switch(run) < math.inf]
    rounds = [_report(run).round for run in switched]
    yield from _level("round of the switch", switched, rounds, "rounds")
    yield from _low_set(switched, "up to the switch")
    yield from _low_set([run for run in runs if run not in switched], "at the end, no switch")


def _low_set(runs: Sequence[Source], when: str) -> Iterator[Row]:
    """Whether its success rate still rose, as the noise-aware detector sees it."""
    reports = [_report(run) for run in runs]
    stopped = [report.low_stopped for report in reports if report.low_count]
    untold = len(runs) - len(stopped)
    if untold:
        yield _gap(f"the low set of {_many(untold, 'run')} {when}: too few rounds or prompts")
    if not stopped:
        return
    what = f"relative rise a round of the low set's success rate, {_POOLED.window} rounds {when}"
    yield from _level(what, runs, [report.low_delta for report in reports], "%", scale=100)
    what = f"runs whose low set had not surely stopped rising, {when}"
    yield Row(what, stopped.count(False), unit="runs", n=_many(len(stopped), "run"))


def _report(run: Source) -> RoundReport:
    """What the noise-aware detector says of the round of the switch, or of the last one."""
    rounds = _rounds(run)
    rounds = rounds[rounds["step"] <= _switch(run)]
    if rounds.empty:
        raise AnalysisError(f"{run.path}/prompts: no round ended before the phase switched")
    curriculum = DifficultyCurriculum(_num_prompts(rounds), config=_POOLED)
    for _, seen in rounds.groupby("round"):
        curriculum.observe(*_observations(seen))
        report = curriculum.end_round()
    return report


def _phases(given: Given) -> Iterator[Finding]:
    """The hardest third's share of W_D's weight in the rounds around the switch."""
    selection = given.ended("prompts", "w_d")
    yield from map(Note, selection.notes)
    found = [(run, _hard_shares(run)) for run in _flat(selection) if run.method in (CVPO, W_D)]
    runs = [run for run, shares in found if shares]
    if not runs:
        raise _AbsentError(f"what phase 2 does: no run of {CVPO} or {W_D} switched")
    before, after = zip(*(shares for _, shares in found if shares), strict=True)
    what = "share of W_D's weight on the hardest third of prompts"
    yield from _level(f"{what}, last round of phase 1", runs, before, "%", scale=100)
    yield from _level(f"{what}, first round of phase 2", runs, after, "%", scale=100)
    rise = [b - a for a, b in zip(before, after, strict=True)]
    yield from _level(f"{what}, rise at the switch", runs, rise, "points", scale=100, tested=True)


def _hard_shares(run: Source) -> tuple[float, float] | None:
    """Of the prompts that were hardest after the first round; None if the run did not switch."""
    frame = run.read("prompts", ["round", "prompt_id", "rho", "w_d", "phase"])
    first = frame[frame["round"] == frame["round"].min()]
    hardest = first.nsmallest(math.ceil(len(first) / 3), "rho")["prompt_id"]
    frame = frame.assign(hard=frame["w_d"].where(frame["prompt_id"].isin(hardest), 0.0))
    late = frame["phase"] == "bottleneck"
    if not late.any() or late.all():
        return None
    sums = frame.groupby("round")[["hard", "w_d"]].sum()
    around = [frame.loc[~late, "round"].max(), frame.loc[late, "round"].min()]
    before, after = (sums["hard"] / sums["w_d"])[around]
    return before, after


# -------------------------------------------------------------------------------- small parts


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _flat(selection: Selection) -> list[Source]:
    return [run for runs in selection.groups.values() for run in runs]


def _metric(run: Source, name: str) -> pd.Series:
    """A scalar by step, as far as it was logged."""
    if run.lacks("metrics", name):
        return pd.Series(dtype=np.float64)
    return run.metrics([name]).set_index("step")[name].dropna()


def _switch(run: Source) -> float:
    """The last step in phase early; infinite where the phase never switched."""
    phase = _metric(run, _PHASE)
    late = phase.index[phase == 1]
    return float(late[0]) - 1 if len(late) else math.inf


def _level(
    measure: str,
    runs: Sequence[Source],
    numbers: Sequence[float],
    unit: str,
    *,
    scale: float = 1.0,
    tested: bool = False,
) -> Iterator[Row]:
    """Mean of one number of each run, NaN where it has none, with an interval over seeds.

    The runs of one seed see the same prompts in the same order: their mean is one observation.
    """
    by_seed: dict[int | str, list[float]] = {}
    for run, number in zip(runs, numbers, strict=True):
        if not math.isnan(number):
            by_seed.setdefault(run.name if run.seed is None else run.seed, []).append(number)
    if not by_seed:
        yield _gap(f"{measure}: no run tells")
        return
    found = over_seeds([float(np.mean(own)) for own in by_seed.values()])
    count = sum(map(len, by_seed.values()))
    n = f"{_many(count, 'run')} of {_many(len(by_seed), 'seed')}"
    row = _row(measure, found, unit, n, scale)
    yield _tested(row, found) if tested else row


def _row(measure: str, found: Interval, unit: str, n: str, scale: float = 1.0) -> Row:
    value, low, high = (scale * x for x in (found.estimate, found.low, found.high))
    return Row(measure, value, low, high, unit, n)


def _tested(row: Row, found: Interval) -> Row:
    """As a difference between seeds' pairs, on which a verdict is due."""
    return replace(row, seeds=found.sizes[0], difference=found.estimate, p=p_value(found))


BY_TRAININGS: dict[int, Callable[[Given], Iterator[Finding]]] = {
    3: _spread,
    4: _arms,
    5: _tracker,
    6: _trigger,
    7: _phases,
    8: _alone,
    9: _together,
    10: _coefficients,
    11: _overhead,
    12: _costs,
    13: _early,
    14: _lambda_critic,
}
"""Claim -> what trainings say of it, a search that ends at what is missing."""
