"""What a report shows of single problems and responses: the worst, the best, and a few to read.

Everything comes from the last logged step or round, so that of a long run only a few files are
read. Decision: among problems of equal success those come first that moved most in the same
direction, then those with more rollouts, then the earlier ones: no chance, same log, same choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.evaluations import read_evaluations
from analysis.selection import recent
from analysis.sources import Source

EACH = 5
"""Problems at either end."""

RESPONSES = 3
"""Responses of either outcome."""

_FACTS = {
    "reward": "reward",
    "length": "tokens",
    "truncated": "cut off",
    "answer": "answer",
    "w_s": "W_S",
    "w_d": "W_D",
    "sigma": "sigma",
    "value_first": "V of the prompt",
    "value_mean": "mean V",
    "entropy_mean": "entropy",
}
"""Column of a trajectory -> what the report calls it."""


@dataclass(frozen=True)
class Problem:
    """One problem: success in [0, 1], out of how many responses, and its change (NaN: unknown)."""

    name: str
    success: float
    of: int
    change: float
    text: str | None = None
    gold: str | None = None


@dataclass(frozen=True)
class Extremes:
    """The problems at both ends, and what their success is of."""

    title: str
    worst: tuple[Problem, ...]
    best: tuple[Problem, ...]


@dataclass(frozen=True)
class Response:
    """One response to read."""

    correct: float
    problem: str | None
    gold: str | None
    text: str
    facts: tuple[tuple[str, str], ...]


# ------------------------------------------------------------------------------------ problems


def extremes(source: Source) -> list[Extremes]:
    """The problems of lowest and highest success, at the last evaluation and in training.

    In training it is the last round of the tracker, or else the last logged step. What the log
    lacks is left out.

    Raises:
        AnalysisError: the log is damaged.
    """
    found = [_evaluated(source), _tracked(source) or _rolled_out(source)]
    return [both for both in found if both is not None]


def _evaluated(source: Source) -> Extremes | None:
    if "evals" not in source.contents:
        return None
    read = read_evaluations(source)
    last = read.samples[-1] > 0
    accuracy, names = read.accuracy[:, last], read.problems[last]
    frame = pd.DataFrame(
        {
            "name": [f"{benchmark}: {problem}" for benchmark, problem in names],
            "success": accuracy[-1],
            "of": read.samples[-1][last],
            "change": accuracy[-1] - accuracy[0] if len(read.steps) > 1 else math.nan,
        }
    )
    since = f"; change since step {read.steps[0]}" if len(read.steps) > 1 else ""
    return _both_ends(f"Evaluation at step {read.steps[-1]}{since}", frame)


def _tracked(source: Source) -> Extremes | None:
    columns = ["step", "round", "prompt_id", "trials", "successes", "rho", "delta"]
    if any(source.lacks("prompts", column) for column in columns[:-1]):
        return None
    (rows,) = recent(source, "prompts", columns, 1)
    rows = rows[rows["trials"] > 0]
    if rows.empty:
        return None
    step, number = rows["step"].iloc[0], rows["round"].iloc[0]
    frame = rows.assign(
        success=rows["successes"] / rows["trials"],
        of=rows["trials"],
        change=rows["rho"] - rows["rho"] / (1 + rows["delta"]),  # delta is relative to the last rho
    )
    title = f"Training prompts in round {number} (step {step}); change of the tracked rate"
    return _both_ends(title, _with_problem(source, frame))


def _rolled_out(source: Source) -> Extremes | None:
    columns = ["step", "prompt_id", "correct"]
    if any(source.lacks("trajectories", column) for column in columns):
        return None
    (rows,) = recent(source, "trajectories", columns, 1)
    if rows["correct"].isna().all():
        return None
    by_prompt = rows.dropna().groupby("prompt_id")["correct"].agg(success="mean", of="count")
    frame = by_prompt.reset_index().assign(change=math.nan)
    title = f"Training prompts at step {rows['step'].iloc[0]}"
    return _both_ends(title, _with_problem(source, frame))


def _both_ends(title: str, frame: pd.DataFrame) -> Extremes:
    """Not more than half of the problems at each end, so that none stands at both."""
    worst = frame.sort_values(
        ["success", "change", "of"], ascending=[True, True, False], kind="stable"
    )
    best = frame.sort_values(
        ["success", "change", "of"], ascending=[False, False, False], kind="stable"
    )
    each = min(EACH, math.ceil(len(frame) / 2))
    low = worst.head(each)
    high = best[~best.index.isin(low.index)].head(each)
    return Extremes(title, _problems(low), _problems(high))


def _problems(frame: pd.DataFrame) -> tuple[Problem, ...]:
    rows = frame.reindex(columns=["name", "success", "of", "change", "text", "gold"])
    return tuple(
        Problem(str(name), float(success), int(of), float(change), _text(text), _text(gold))
        for name, success, of, change, text, gold in rows.itertuples(index=False, name=None)
    )


def _with_problem(source: Source, frame: pd.DataFrame) -> pd.DataFrame:
    """With name, text and gold of each prompt, as far as the log has a problem table."""
    named = frame.assign(name=[f"prompt {prompt}" for prompt in frame["prompt_id"]])
    if "problems" not in source.contents:
        return named
    held = source.contents["problems"].columns
    columns = [name for name in ("text", "prompt", "gold") if name in held]
    table = source.read("problems", ["prompt_id", *columns])
    if "text" not in held and "prompt" in held:
        table = table.rename(columns={"prompt": "text"})
    return named.merge(table, on="prompt_id", how="left", validate="m:1")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# ----------------------------------------------------------------------------------- responses


def responses(source: Source) -> tuple[int, list[Response]] | None:
    """A few wrong and a few correct responses of the last logged step, each of another prompt.

    They are spread evenly over the prompts. Where the log does not say what is correct, a few are
    taken whatever they are.

    Returns:
        The step and the responses, wrong ones first; None if the log keeps no text.

    Raises:
        AnalysisError: the log is damaged.
    """
    needed = ("prompt_id", "response")
    if any(source.lacks("trajectories", column) for column in needed):
        return None
    facts = [name for name in _FACTS if name in source.contents["trajectories"].columns]
    known = ["correct"] if "correct" in source.contents["trajectories"].columns else []
    (rows,) = recent(source, "trajectories", ["step", *needed, *known, *facts], 1)
    rows = rows[rows["response"].notna()]
    if rows.empty:
        return None
    step = int(rows["step"].iloc[0])
    correct = rows.get("correct", pd.Series(math.nan, rows.index))
    outcomes = [correct < 0.5, correct >= 0.5, correct.isna()]
    chosen = pd.concat([_spread(rows[outcome]) for outcome in outcomes])
    named = _with_problem(source, chosen.assign(correct=correct.loc[chosen.index]))
    return step, [_response(row, facts) for _, row in named.iterrows()]


def _spread(rows: pd.DataFrame) -> pd.DataFrame:
    """The first response to each of a few prompts, evenly from all that have one."""
    first = rows.drop_duplicates("prompt_id").sort_values("prompt_id")
    places = np.linspace(0, len(first) - 1, min(RESPONSES, len(first))).round().astype(int)
    return first.iloc[places]


def _response(row: pd.Series, facts: Sequence[str]) -> Response:
    return Response(
        correct=float(row["correct"]),
        problem=_text(row.get("text")),
        gold=_text(row.get("gold")),
        text=str(row["response"]),
        facts=tuple((_FACTS[name], _fact(row[name])) for name in facts if pd.notna(row[name])),
    )


def _fact(value: object) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)
