"""Small logs of studies, for tests of what is made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.sources import Source, open_source
from cvpo import RunLog


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
