"""What ran: a run's facts, how the configurations differ, and what a log does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.evaluations import cost
from analysis.labels import label
from analysis.ls import logged_steps
from analysis.sources import Source
from cvpo.runlog import read_run

_IN_FACTS = ("method", "seed", "run_dir", "declared.name", "declared.source")
"""Keys that the table of facts has already, or that differ by their nature."""

_VERSIONS = ("code_version", "packages", "devices")


@dataclass(frozen=True)
class Facts:
    """What a report says of a run before any result; a dash where the log does not say it."""

    name: str
    label: str
    kind: str
    seed: str
    steps: str
    state: str
    started: str
    device_hours: str
    tokens: str


def facts(source: Source) -> Facts:
    """A run's facts.

    Raises:
        AnalysisError: the log is damaged.
    """
    entries = _entries(source)
    # a table's steps are those of whatever it is about, as in the log of a study
    has_steps = any(not part.startswith("tables/") for part in source.parts)
    steps = logged_steps(source) if has_steps else []
    spent = cost(source)
    hours, tokens = (_last(spent[name]) for name in ("device_seconds", "tokens"))
    return Facts(
        name=source.name,
        label=f"unknown ({source.kind})" if source.method is None else label(source),
        kind=source.kind,
        seed="-" if source.seed is None else str(source.seed),
        steps=_steps(source, steps),
        state={None: "not known", True: "finished", False: "unfinished"}[source.finished],
        started=str(entries.get("start", "-")).replace("T", " ")[:16],
        device_hours="-" if hours is None else f"{hours / 3600:.3g}",
        tokens="-" if tokens is None else f"{tokens:,.0f}",
    )


def _last(values: Any) -> float | None:
    known = values[np.isfinite(values)]
    return None if known.empty else float(known.iloc[-1])


def _steps(source: Source, steps: Sequence[int]) -> str:
    if not steps:
        return "-"
    of = "" if source.total_steps is None or source.finished else f" of {source.total_steps}"
    span = str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    return f"{span}{of}"


def _entries(source: Source) -> Mapping[str, Any]:
    return read_run(source.path) if source.kind == "cvpo" else {}


def settings(source: Source) -> dict[str, str]:
    """A run's configuration, versions and devices by key; nested keys are joined by dots."""
    entries = _entries(source)
    versions = {name: entries[name] for name in _VERSIONS if name in entries}
    return dict(_flat(source.config)) | dict(_flat(versions))


def differences(all_settings: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Key -> each run's value, of the keys that not all runs agree on; absent ones are a dash.

    Args:
        all_settings: run -> `settings`.
    """
    keys = dict.fromkeys(key for found in all_settings.values() for key in found)
    values = {key: [found.get(key, "-") for found in all_settings.values()] for key in keys}
    return {
        key: found for key, found in values.items() if len(set(found)) > 1 and key not in _IN_FACTS
    }


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def not_logged(source: Source) -> dict[str, list[str]]:
    """Reason -> the parts and columns that the log lacks for it."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in source.missing.items():
        by_reason.setdefault(reason, []).append(key)
    return by_reason
