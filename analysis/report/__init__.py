"""One page on some runs: what ran, what came of it, what may be wrong, and what to read.

The page is one file without any request to anything. It reads on a phone and on paper, and without
scripts it has its tables and static pictures. What a log says is data: it is escaped wherever it
stands, and the page's content security policy lets no other script run than the page's own two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from analysis.report import charts, examples, rules, runs
from analysis.report.headline import headline
from analysis.report.page import render
from analysis.sources import Source, open_sources

_TABLE_ROWS = 20


@dataclass(frozen=True)
class RunReport:
    """What the page says of one run."""

    look: charts.Look
    facts: runs.Facts
    settings: dict[str, str]
    warnings: dict[str, str] | None
    """Rule -> text; None where the log has no metrics to judge by."""
    phase: str | None
    extremes: list[examples.Extremes]
    responses: tuple[int, list[examples.Response]] | None
    tables: dict[str, pd.DataFrame]
    not_logged: dict[str, list[str]]
    notes: tuple[str, ...]

    @property
    def warning_count(self) -> int:
        """How many rules fired."""
        return len(self.warnings or ())

    @property
    def missing_parts(self) -> str:
        """In short, what the log was not given: whole parts only."""
        keys = (key for keys in self.not_logged.values() for key in keys)
        parts = ", ".join(key for key in keys if "." not in key)
        return f"not logged by {self.facts.kind}: {parts}" if parts else ""


def report(sources: Sequence[Source]) -> str:
    """The page as HTML.

    Args:
        sources: logs of any kind, of distinct names.

    Raises:
        AnalysisError: a log is damaged.
    """
    looks = charts.looks(sources)
    table = headline(sources)
    panels = charts.accuracy_panels(sources, table.shared if table else ())
    panels += charts.metric_panels(sources)
    reports = [_run_report(source, look) for source, look in zip(sources, looks, strict=True)]
    settings = {
        source.name: one.settings
        for source, one in zip(sources, reports, strict=True)
        if one.settings and "study" not in source.config  # a study is no training
    }
    data = {
        "runs": [look.name for look in looks],
        "config": charts.CONFIG,
        "encodings": {axis: charts.encoding(axis, looks) for axis in charts.AXES},
        "panels": [{"spec": panel.spec, "series": panel.series} for panel in panels],
    }
    return render(
        runs=reports,
        headline=table,
        differences=runs.differences(settings),
        differing_runs=list(settings),
        axes=_axes(panels),
        drawn={one["run"] for panel in panels for one in panel.series},
        panels=[(panel, Markup(charts.static_picture(panel, looks))) for panel in panels],
        data=data,
        library=charts.library(),
    )


def _run_report(source: Source, look: charts.Look) -> RunReport:
    frames = _frames(source)
    tables = [name for name in source.parts if name.startswith("tables/")]
    return RunReport(
        look=look,
        facts=runs.facts(source),
        settings=runs.settings(source),
        warnings=None if frames is None else rules.warnings(frames),
        phase=None if frames is None else rules.phase(frames, source.config),
        extremes=examples.extremes(source),
        responses=examples.responses(source),
        tables={name: next(source.scan(name)).head(_TABLE_ROWS) for name in tables},
        not_logged=runs.not_logged(source),
        notes=source.notes,
    )


def _frames(source: Source) -> rules.Frames | None:
    if "metrics" not in source.contents:
        return None
    empty = pd.DataFrame(columns=["step", "kind", "message"])
    events = source.read("events") if "events" in source.contents else empty
    return rules.Frames(source.metrics(), events)


def _axes(panels: Sequence[charts.Panel]) -> dict[str, str]:
    """The x axes that some run has values of, and what they are called."""
    return {
        axis: title["title"]
        for axis, title in charts.AXES.items()
        if any(x is not None for panel in panels for one in panel.series for x in one[axis])
    }


# ------------------------------------------------------------------------------------ command line


def add_command(commands: Any) -> None:
    """Add `report` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="one page on some runs: results, curves, warnings, responses to read",
        description="Writes one HTML file that needs no network; logs of any trainer.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a log's folder or file")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.html")
    parser.set_defaults(act=_act)


def _act(arguments: argparse.Namespace) -> None:
    page = report(open_sources(arguments.runs)).encode()
    file = Path(arguments.output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(page)
    print(f"wrote {file} ({len(page) / 1e6:.1f} MB)")
