"""What the simulator's studies found, read from their run logs, and the plot most of it becomes.

A study (``python -m sim NAME``) leaves a log with the table ``study``, one row for each thing that
it says, and tables of its own. Rows are found by what was measured (`quantity`) and where
(`setting`, a sentence): the two are the study's words, so a script that names them is bound to
them, and finding none is an empty frame and no error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike

from analysis import AnalysisError
from analysis.sources import Source, ranges

FEWEST_SEEDS = 5
"""Below this no difference is claimed."""

INK, GREY = "#222222", "#8A8A8A"
SHADES = ("#222222", "#4477AA", "#EE6677", "#228833", "#AA3377")
"""Tol's bright colours, for what is no method; methods have their own."""


def has_study(sources: Sequence[Source], name: str) -> bool:
    """Whether a log of this study is among the sources."""
    return any(source.config.get("study") == name for source in sources)


def find_study(sources: Sequence[Source], name: str) -> Source:
    """The log of a study.

    Raises:
        AnalysisError: there is none, more than one, one that has not finished, or one with a table
            that has no row.
    """
    found = [source for source in sources if source.config.get("study") == name]
    if not found:
        raise AnalysisError(
            f"no log of the study {name!r} among the runs: make one with `python -m sim {name}` "
            "and give its folder"
        )
    if len(found) > 1:
        paths = " ".join(str(source.path) for source in found)
        raise AnalysisError(f"several logs of the study {name!r}: {paths}; give one")
    if "tables/study" not in found[0].contents:
        raise AnalysisError(
            f"{found[0].path}: the study has not finished, its table of rows is missing; wait, or "
            "run it again with overwrite=true"
        )
    for name, part in found[0].contents.items():
        if name.startswith("tables/") and not part.rows():
            raise AnalysisError(f"{found[0].path}: {name} has no row; run the study again")
    return found[0]


def read_table(
    study: Source,
    name: str,
    *,
    words: Sequence[str] = (),
    numbers: Sequence[str] = (),
    gaps: Sequence[str] = (),
    key: Sequence[str] = (),
) -> pd.DataFrame:
    """Columns of one of a study's tables, checked to be what can be reckoned with.

    Args:
        study: as `find_study` gives it.
        name: the table's.
        words: columns that have text in every row.
        numbers: columns that have a finite number in every row.
        gaps: columns of numbers of which some or all may be missing: those are NaN.
        key: columns whose entries together belong to one row alone.

    Raises:
        AnalysisError: there is no such table or column, or one is not so; the row is named.
    """
    where = f"{study.path}: tables/{name}"
    frame = study.read(f"tables/{name}", [*words, *numbers, *gaps])
    for column in words:
        is_text = frame[column].map(lambda entry: isinstance(entry, str))
        _check(frame, column, is_text, "text", where)
    for column in (*numbers, *gaps):
        if not pd.api.types.is_numeric_dtype(frame[column]):
            _check(frame, column, frame[column].isna(), "number", where)
            frame[column] = np.nan  # null throughout, a column has no type
        if column in numbers:
            _check(frame, column, np.isfinite(frame[column]), "finite number", where)
    again = frame.duplicated(list(key)) if key else pd.Series(False, index=frame.index)
    if again.any():
        row = int(again.to_numpy().argmax())
        which = ", ".join(str(frame[column].iloc[row]) for column in key)
        raise AnalysisError(f"{where}, row {row + 1}: {which} stands there twice; {_AGAIN}")
    return frame


_AGAIN = "run the study again with overwrite=true"


def _check(frame: pd.DataFrame, column: str, good: pd.Series, kind: str, where: str) -> None:
    if not good.all():
        row = int((~good).to_numpy().argmax())
        entry = frame[column].iloc[row]
        raise AnalysisError(f"{where}, row {row + 1}: {column!r} is {entry}, no {kind}; {_AGAIN}")


def rows_where(
    study: Source, quantity: str, setting: str = ".*", *, never: bool = False
) -> pd.DataFrame:
    """The study's rows of one quantity.

    Args:
        study: as `find_study` gives it.
        quantity: what was measured, exactly.
        setting: regular expression that the whole setting matches.
        never: whether a value may be NaN, because what it tells the time of never came.

    Returns:
        Columns setting, value, low, high (95 %; NaN: exact or unknown), n, and one of text for each
        named group of the expression. In the study's order.

    Raises:
        AnalysisError: a row is damaged, stands there twice or, unless `never`, has no value.
    """
    rows = read_table(
        study,
        "study",
        words=("quantity", "setting"),
        numbers=("n",),
        gaps=("value", "low", "high"),
        key=("quantity", "setting"),
    )
    mine = rows[(rows["quantity"] == quantity) & rows["setting"].str.fullmatch(setting)]
    lost = mine["setting"][~np.isfinite(mine["value"])]
    if len(lost) and not never:
        raise AnalysisError(
            f"{study.path}: tables/study has no number for the {quantity} of {lost.iloc[0]}; "
            f"{_AGAIN}"
        )
    frame = mine.drop(columns="quantity").reset_index(drop=True)
    if "(?P<" not in setting:
        return frame
    return frame.join(frame["setting"].str.extract(f"^(?:{setting})$"))


def seeds(study: Source) -> list[int]:
    """The worlds that it drew."""
    return [int(seed) for seed in study.config.get("seeds", [])]


def about(study: Source) -> str:
    """Where the numbers come from, and what its seeds allow, in a sentence or two."""
    drawn = seeds(study)
    name = study.config["study"]
    text = f"Simulated with known truth (`python -m sim {name}`), "
    if len(drawn) == 1:
        return f"{text}seed {drawn[0]} only: there is no interval over seeds, nothing is claimed."
    text += f"{len(drawn)} seeds ({ranges(drawn)})."
    few = f" Fewer than {FEWEST_SEEDS} seeds: no difference is claimed."
    return text + (few if len(drawn) < FEWEST_SEEDS else "")


def short(number: float) -> str:
    """A number as the paper writes it, without a leading zero."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{number:g}").replace("e-0", "e-")


def forest(
    panel: Any, heights: ArrayLike, frame: pd.DataFrame, *, scale: float = 1.0, **look: Any
) -> None:
    """Draws points with horizontal intervals.

    Args:
        panel: matplotlib's axes.
        heights: y of each row.
        frame: columns value, low and high; NaN is not drawn.
        scale: factor on all three (100: shares as percent).
        look: of the points: color, marker, label and the like.
    """
    panel.hlines(heights, scale * frame["low"], scale * frame["high"], look["color"], linewidth=0.8)
    panel.plot(scale * frame["value"], heights, linestyle="none", **look)


def plain_log(axis: Any) -> None:
    """A logarithmic axis with its numbers written out; the style parses no powers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
