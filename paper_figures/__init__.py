"""One short script for each table or figure, each made from run logs alone.

A script has one function, ``make(sources) -> Exhibit``. `EXHIBITS` finds it by the script's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from analysis.exhibit import Exhibit
from analysis.sources import Source

_NAMES = ("figure2_accuracy",)

EXHIBITS: dict[str, Callable[[Sequence[Source]], Exhibit]] = {
    name: importlib.import_module(f"paper_figures.{name}").make for name in _NAMES
}
