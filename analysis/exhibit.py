"""An exhibit is a figure or table with its caption and the numbers behind it, saved the same way.

Figures share one style: legible in one column, Okabe and Ito's colours, units on axes. The files of
an exhibit are the same bytes each time it is made from the same logs: no file carries a date.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font

COLUMN, PAGE = 3.4, 7.0
"""Inches: one column of a two-column page, and both."""

FONT = "DejaVu Sans"
LETTER = 0.052
"""Inches that a letter of 7 pt takes on average."""

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
"""Line styles that tell runs of one colour apart."""

_STYLE: dict[Any, Any] = {
    "font.family": FONT,
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.3,
    "grid.alpha": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 2.5,
    "legend.frameon": False,
    "figure.dpi": 300,
    "text.parse_math": False,  # names are the runs' own: a $ in one is no formula
    "pdf.fonttype": 42,
    "svg.hashsalt": "cvpo",
}


@dataclass
class Exhibit:
    """What a script of `paper_figures` makes."""

    caption: str
    """What is shown, of how many runs, problems and samples, with which interval, and the gaps."""
    table: pd.DataFrame
    """The numbers behind it, one row for each thing that is drawn or printed."""
    figure: Figure | None = None
    text: str | None = None
    """A table as Markdown, where the exhibit is one."""


@contextmanager
def style() -> Iterator[None]:
    """The figures' common look, for as long as the block lasts."""
    with plt.rc_context(_STYLE):
        yield


def drawable(text: str) -> str:
    """Text with whatever the figures' font lacks, or cannot be printed at all, as its code."""
    return "".join(map(_drawable, text))


@cache
def _drawable(character: str) -> str:
    if character.isprintable() and _font().get_char_index(ord(character)):
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


@cache
def _font() -> Any:
    return FT2Font(findfont(FONT))


def fitted(name: str, inches: float) -> str:
    """A name of a log's own, drawable and in as many lines as a place of this width needs."""
    width = max(8, int(inches / LETTER))
    return "\n".join(textwrap.wrap(drawable(name), width, break_on_hyphens=False))


def save(exhibit: Exhibit, folder: Path, name: str) -> list[Path]:
    """Writes ``name``.csv, .caption.txt and, as there are, .png, .pdf and .md; closes the figure.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.csv", folder / f"{name}.caption.txt"]
    exhibit.table.to_csv(written[0], index=False, lineterminator="\n")
    written[1].write_text(exhibit.caption.rstrip() + "\n", encoding="utf-8")
    if exhibit.text is not None:
        written.append(folder / f"{name}.md")
        written[-1].write_text(exhibit.text.rstrip() + "\n", encoding="utf-8")
    if exhibit.figure is not None:
        png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
        with style():
            exhibit.figure.savefig(png, metadata={"Software": None})
            exhibit.figure.savefig(pdf, metadata={"CreationDate": None, "Producer": None})
        plt.close(exhibit.figure)
        written += [png, pdf]
    return written
