"""The report's curves: their data, and how Vega-Lite draws them.

A panel is a picture of one number over the chosen x axis, a line for each run. The page holds its
data once, by column; the script on the page fills the panel's `spec` with the runs and the axis
that are chosen, and `static_picture` does the same here for readers without scripts.

Decision: Vega-Lite. Embedded it is .9 MB (Bokeh 1.3 MB, Plotly 4.8 MB), its charts are SVG, which
prints sharply and follows the page's colours, it draws with no `eval`, so that the page can forbid
scripts, and `vl-convert`, of the same authors, draws the same specification without a browser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import vl_convert

from analysis import method_color
from analysis.curves import Curves, collect
from analysis.labels import color, dash, label
from analysis.sources import Source
from analysis.statistics import curve

_POINTS = 200
_POINTS_OF_ALL = 2000
"""Points of one line, and of a panel, at most, so that the page stays small. A longer log is drawn
by means of consecutive steps."""

VEGA_LITE = "6.1"
"""Version 6.4 loses the run in the tooltip of the nearest point."""

AXES: dict[str, dict[str, Any]] = {
    "step": {"title": "training step", "format": "~s"},
    "tokens": {"title": "response tokens, rollouts and updates", "format": "~s"},
    "device_hours": {"title": "device-hours", "format": "~g"},
}

CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "titleFontWeight": "normal",
        "gridColor": "currentColor",
        "gridOpacity": 0.15,
        "domain": False,
        "ticks": False,
        "labelPadding": 6,
        "labelFontSize": 11,
        "titleFontSize": 11,
    },
}
"""How all panels look; text and grid take the page's colour, so that dark mode is theirs too."""


@dataclass(frozen=True)
class Look:
    """How a run is drawn and called."""

    name: str
    label: str
    color: str
    dash: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: what it shows, with the unit.
        about: what a reader may want to know below it.
        group: heading it stands under.
        series: one for each run that has the number: `run`, the columns of `AXES`, `value`, and
            `low` and `high` (an interval) or `smooth` (a running mean).
    """

    title: str
    about: str
    group: str
    series: tuple[dict[str, Any], ...]

    @property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite, without data, x axis and size."""
        return _spec(interval="low" in self.series[0])


def looks(sources: Sequence[Source]) -> list[Look]:
    """A colour for each method and label; runs of one look are told apart by their dashes."""
    found: list[Look] = []
    for source in sources:
        if source.method is None:
            name, shade, style = source.kind, method_color(""), "-"
        else:
            name = label(source)
            shade, style = color(name), dash(name)
        pattern = () if isinstance(style, str) else tuple(2.0 * float(on) for on in style[1])
        shade = "currentColor" if shade == "#000000" else shade  # black is no colour in dark mode
        found.append(Look(source.name, name, shade, pattern))
    return [
        replace(look, dash=_another(sum(_alike(look, other) for other in found[:index]), look.dash))
        for index, look in enumerate(found)
    ]


_MORE_DASHES: tuple[tuple[float, ...], ...] = ((), (8, 3), (2, 2), (9, 3, 2, 3), (4, 2), (12, 4))


def _alike(one: Look, other: Look) -> bool:
    return (one.color, one.dash) == (other.color, other.dash)


def _another(earlier: int, own: tuple[float, ...]) -> tuple[float, ...]:
    return own if earlier == 0 else _MORE_DASHES[earlier % len(_MORE_DASHES)]


# ------------------------------------------------------------------------------- accuracy curves


def accuracy_panels(sources: Sequence[Source], shared: Sequence[str]) -> list[Panel]:
    """Evaluations over time: the mean of the shared benchmarks, then each benchmark.

    Args:
        sources: logs; those without evaluations are passed over.
        shared: benchmarks that the mean is over.

    Raises:
        AnalysisError: a damaged evaluation.
    """
    curves = {source.name: _curves(source) for source in sources if "evals" in source.contents}
    points = _points(len(curves))
    names = sorted({name for mine in curves.values() for name in mine.benchmarks})
    wanted = {name: [name] for name in names}
    if len(shared) > 1:
        wanted = {f"mean of {len(shared)} benchmarks": list(shared)} | wanted
    panels = []
    for title, benchmarks in wanted.items():
        series = [
            _accuracy_series(run, mine, benchmarks, points)
            for run, mine in curves.items()
            if set(benchmarks) <= set(mine.benchmarks)
        ]
        if not series:
            continue
        sizes = sorted({k for mine in curves.values() for k in mine.sizes})
        k = "-".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
        problems = max(len(mine.of_benchmarks(benchmarks).problems) for mine in curves.values())
        about = f"{problems} problems, {k} samples each; band: 95 % interval over problems."
        panels.append(Panel(f"{title}, avg@{k} (%)", about, "Evaluation", tuple(series)))
    return panels


def _curves(source: Source) -> Curves:
    alone = replace(source, method=source.method or "unknown")
    return collect([alone], by="run").curves[source.name]


def _accuracy_series(
    run: str, mine: Curves, benchmarks: Sequence[str], points: int
) -> dict[str, Any]:
    found = curve(mine, benchmarks, points)
    rows = np.searchsorted(mine.steps, found["step"])
    spent = {name: mine.cost[name][0][rows] for name in ("tokens", "device_seconds")}
    return {"run": run} | _columns(
        {
            "step": found["step"],
            "tokens": spent["tokens"],
            "device_hours": spent["device_seconds"] / 3600,
            "value": 100 * found["accuracy"],
            "low": (100 * found["low"]).clip(0, 100),
            "high": (100 * found["high"]).clip(0, 100),
        }
    )


# --------------------------------------------------------------------------------- metric curves


@dataclass(frozen=True)
class _Shown:
    """A scalar to draw: the sum of some columns, times a unit."""

    title: str
    columns: tuple[str, ...]
    group: str
    about: str = ""
    scale: float = 1.0


_SHOWN = (
    _Shown("Reward", ("reward/mean",), "Training batch"),
    _Shown("Correct responses (%)", ("accuracy/mean",), "Training batch", scale=100),
    _Shown("Response length (tokens)", ("length/mean",), "Training batch"),
    _Shown("Truncated responses (%)", ("truncated/rate",), "Training batch", scale=100),
    _Shown(
        "Groups without contrast (%)",
        ("groups/all_correct", "groups/all_wrong"),
        "Training batch",
        "all responses correct, or all wrong",
        100,
    ),
    _Shown("Entropy (nats per token)", ("policy/entropy",), "Policy"),
    _Shown(
        "Clipped tokens (%)",
        ("policy/clip_low", "policy/clip_high"),
        "Policy",
        "at either bound of the ratio",
        100,
    ),
    _Shown("Clipped tokens (%), by verl", ("actor/pg_clipfrac",), "Policy", scale=100),
    _Shown("KL within the step (nats per token)", ("policy/update_kl",), "Policy"),
    _Shown("KL within the step (k1, nats per token), by verl", ("actor/ppo_kl",), "Policy"),
    _Shown("KL to the reference (nats per token)", ("policy/kl",), "Policy"),
    _Shown("Gradient norm of the actor", ("policy/grad_norm",), "Policy", "before clipping"),
    _Shown("Rollout engine against trainer (nats per token)", ("rollout/logprob_gap",), "Policy"),
    _Shown(
        "Explained variance",
        ("critic/explained_variance",),
        "Critic",
        "of Monte-Carlo returns; 1 is perfect, 0 no better than a constant",
    ),
    _Shown(
        "Explained variance, by verl",
        ("critic/vf_explained_var",),
        "Critic",
        "of lambda-returns: not comparable with that of Monte-Carlo returns",
    ),
    _Shown("Value loss (half squared error)", ("critic/loss",), "Critic"),
    _Shown("Gradient norm of the critic", ("critic/grad_norm",), "Critic", "before clipping"),
    _Shown("Standard deviation of values in a response", ("sigma/mean",), "Weights", "mean sigma"),
    _Shown("Correlation of sigma with token entropy", ("sigma/corr_entropy",), "Weights"),
    _Shown(
        "W_S on correct responses, sd / mean (%)",
        ("weights/w_s_cv_correct",),
        "Weights",
        "under 2 % it is a constant",
        100,
    ),
    _Shown(
        "W_S on incorrect responses, sd / mean (%)",
        ("weights/w_s_cv_incorrect",),
        "Weights",
        "under 2 % it is a constant",
        100,
    ),
    _Shown("W_D, mean", ("weights/w_d_mean",), "Weights"),
    _Shown("Sum of weighted over sum of plain advantages", ("weights/advantage_ratio",), "Weights"),
)

_VALIDATION = ("val-core/", "val/")
"""How the names of verl's validation scores begin; which verifier judged, they do not say."""


def metric_panels(sources: Sequence[Source]) -> list[Panel]:
    """The scalars over time, of every log that has metrics; those that none has are left out."""
    frames = {s.name: _with_axes(s.metrics()) for s in sources if "metrics" in s.contents}
    points = _points(len(frames))
    panels = []
    for shown in (*_validation(frames), *_SHOWN):
        series = [
            _metric_series(run, frame, shown, points)
            for run, frame in frames.items()
            if set(shown.columns) <= set(frame.columns)
        ]
        kept = tuple(one for one in series if one["value"])
        if kept:
            panels.append(Panel(shown.title, shown.about, shown.group, kept))
    return panels


def _validation(frames: Mapping[str, pd.DataFrame]) -> list[_Shown]:
    names = {str(name) for frame in frames.values() for name in frame.columns}
    found = sorted(name for name in names if name.startswith(_VALIDATION))
    return [_Shown(name, (name,), "Evaluation", "as the log calls it") for name in found[:12]]


def _with_axes(metrics: pd.DataFrame) -> pd.DataFrame:
    missing = {name: math.nan for name in ("tokens", "device_seconds") if name not in metrics}
    frame = metrics.assign(**missing)
    return frame.assign(device_hours=frame["device_seconds"] / 3600)


def _metric_series(run: str, frame: pd.DataFrame, shown: _Shown, points: int) -> dict[str, Any]:
    """A run's line: faint as logged, bold as a running mean over a twentieth of its steps."""
    value = shown.scale * frame[list(shown.columns)].sum(axis=1, skipna=False)
    rows = frame[list(AXES)].assign(value=value)[np.isfinite(value)]
    window = max(1, len(rows) // 20)
    rows["smooth"] = rows["value"].rolling(window, center=True, min_periods=1).mean()
    if len(rows) > points:
        rows = rows.groupby(np.arange(len(rows)) * points // len(rows)).mean()
    return {"run": run} | _columns(rows)


def _points(runs: int) -> int:
    return min(_POINTS, _POINTS_OF_ALL // max(runs, 1))


def _columns(rows: Mapping[Any, Any] | pd.DataFrame) -> dict[str, list[float | None]]:
    """Columns of plain numbers, of six digits; what is none is null."""
    return {
        str(name): [float(f"{x:.6g}") if math.isfinite(x) else None for x in column]
        for name, column in rows.items()
    }


# ------------------------------------------------------------------------------------ Vega-Lite


def encoding(axis: str, runs: Sequence[Look]) -> dict[str, Any]:
    """The channels that all layers of all panels share, for one of `AXES`."""
    names = [run.name for run in runs]
    ranges = {"color": [run.color for run in runs], "strokeDash": [list(run.dash) for run in runs]}
    title = AXES[axis]["title"]
    return {
        "x": {
            "field": axis,
            "type": "quantitative",
            "title": title,
            "scale": {"zero": False, "nice": False},
            "axis": {"format": AXES[axis]["format"], "tickCount": 5, "grid": False},
        },
        "tooltip": [
            {"field": "run", "type": "nominal"},
            {"field": axis, "type": "quantitative", "title": title, "format": ",.4~r"},
            {"field": "value", "type": "quantitative", "format": ",.4~r"},
        ],
    } | {
        channel: {
            "field": "run",
            "type": "nominal",
            "legend": None,
            "scale": {"domain": names, "range": values},
        }
        for channel, values in ranges.items()
    }


def static_picture(panel: Panel, runs: Sequence[Look]) -> str:
    """The panel over steps as SVG, for readers without scripts; nothing of it asks for anything."""
    *drawn, _ = panel.spec["layer"]  # the last answers the pointer
    full = panel.spec | {
        "layer": drawn,
        "width": 330,
        "data": {"values": list(panel.series)},
        "encoding": encoding("step", runs),
    }
    return vl_convert.vegalite_to_svg(full, vl_version=VEGA_LITE, config=CONFIG)


@lru_cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)


def _spec(interval: bool) -> dict[str, Any]:
    def y(name: str) -> dict[str, Any]:
        scale, axis = {"zero": False}, {"tickCount": 5}
        quantity = {"type": "quantitative", "title": None}
        return {"field": name, **quantity, "scale": scale, "axis": axis}

    bold = {"type": "line", "strokeWidth": 2, "strokeJoin": "round"}
    faint = {"type": "line", "strokeWidth": 1, "opacity": 0.28}
    if interval:
        band = {"y": y("low"), "y2": {"field": "high"}, "strokeDash": None}
        lines = [
            {"mark": {"type": "area", "opacity": 0.12}, "encoding": band},
            {"mark": bold | {"point": {"size": 22}}, "encoding": {"y": y("value")}},
        ]
    else:
        lines = [
            {"mark": faint, "encoding": {"y": y("value")}},
            {"mark": bold, "encoding": {"y": y("smooth")}},
        ]
    # a point is known by its run and step: all points of a line come from one row of the data
    near = {"type": "point", "fields": ["run", "step"], "nearest": True}
    near |= {"on": "pointerover", "clear": "pointerout"}
    shown_near = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    points = {
        "params": [{"name": "near", "select": near}],
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {"y": y("value"), "opacity": shown_near},
    }
    columns = [*AXES, "value", *(("low", "high") if interval else ("smooth",))]
    return {
        "height": 170,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "transform": [{"flatten": columns}],
        "layer": [*lines, points],
    }
