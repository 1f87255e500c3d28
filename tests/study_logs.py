"""Small logs of studies, for tests of what is made from them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.sources import Source, open_source
from cvpo import RunLog
from sim.study import read_settings, run_study

SMALL_STUDIES = {
    "bound": ["worlds=3", "chains=[5, 25]", "length=3"],
    "tracker": ["num_prompts=20", "rounds=8", "discounts=[0.9]", "windows=[3]", "burn_in=2"],
    "trigger": ["num_prompts=60", "rounds=24", "stops=[5]", "growths=[0.1]", "control_seeds=2"],
    "sensitivity": ["points=2", "prompts=8", "rounds=4"],
    "weights": ["prompts=8", "batch=4", "steps=6", "draws=2", "tree_steps=4", "length=3"],
    "curriculum": ["prompts=32", "steps=20"],
}
"""The studies that exhibits are made of, each with settings that take seconds."""


def write_study(
    path: Path,
    name: str,
    rows: Sequence[Mapping[str, Any]] = (),
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    finished: bool = True,
    **config: Any,
) -> Source:
    """Write and open a study's log.

    Args:
        path: its folder.
        name: the study's.
        rows: of the table `study`; what a row does not say is NaN, or 1 for n.
        tables: its other tables.
        seeds: in its configuration.
        finished: whether the table `study` is there.
        config: what else is in its configuration.
    """
    log = RunLog.create(
        path,
        config={"study": name, "seeds": list(seeds), **config},
        seed=seeds[0],
        method=f"sim-{name}",
        verifier="exact",
        study=name,
    )
    for table, records in (tables or {}).items():
        log.table(table, pd.DataFrame(records))
    if finished:
        blank = {"quantity": "", "setting": "", "value": float("nan"), "low": float("nan")}
        blank |= {"high": float("nan"), "n": 1}
        log.table("study", pd.DataFrame([blank | dict(row) for row in rows or [{}]]))
    return open_source(path)


def run_small(name: str, folder: Path) -> Path:
    """Run one of the `SMALL_STUDIES` in a folder, and return its log's."""
    study = importlib.import_module(f"sim.studies.{name}").STUDY
    seeds = "[0]" if name == "curriculum" else "[0, 1]"
    settings = [f"output={folder}", "jobs=1", "backend=sequential", f"seeds={seeds}"]
    settings += SMALL_STUDIES[name]
    if name in ("tracker", "trigger"):
        settings += [f"replay={_history(folder / 'run.json')}", "replay_values=counts"]
    run_study(study, read_settings(study, settings))
    return folder / name


def _history(path: Path, prompts: int = 30, epochs: int = 30) -> Path:
    """A run whose hard prompts never and whose easy ones always succeed: the printed rule fires."""
    counts = np.where(np.arange(prompts)[:, None] % 2, 8, np.zeros(epochs, dtype=int))
    counts[:4] = np.random.default_rng(0).integers(0, 9, (4, epochs))
    path.write_text(json.dumps({f"p{i}": row for i, row in enumerate(counts.tolist())}))
    return path
