"""The studies, by name, in the order in which `python -m sim all` runs them."""

from __future__ import annotations

import importlib

from sim.study import Study

_NAMES = (
    "bound",
    "tracker",
    "trigger",
    "weights",
    "curriculum",
    "sensitivity",
    "calibrate",
    "partial_credit",
)

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (importlib.import_module(f"sim.studies.{name}").STUDY for name in _NAMES)
}
