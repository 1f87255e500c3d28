"""One short script for each table or figure, each made from run logs alone.

A script has one function, ``make(sources) -> Exhibit``. `EXHIBITS` finds it by the script's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from analysis.exhibit import Exhibit
from analysis.sources import Source

_NAMES = (
    "table1",
    "figure1_words",
    "figure2_accuracy",
    "figure3_spread",
    "figure4_coefficient",
    "figure5_bins",
    "table_designs",
    "table_hyperparameters",
    "accuracy_cost",
    "overhead",
    "pass_at_k",
    "arms",
    "weight_flow",
    "circularity",
    "critic_calibration",
    "bound_tightness",
    "tracker_drift",
    "trigger_study",
    "curriculum_samplers",
    "sensitivity",
    "table_claims",
)

EXHIBITS: dict[str, Callable[[Sequence[Source]], Exhibit]] = {
    name: importlib.import_module(f"paper_figures.{name}").make for name in _NAMES
}
