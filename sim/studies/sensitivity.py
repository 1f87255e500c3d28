"""How much do CVPO's sixteen constants matter, alone and together?

The paper varies one coefficient and withholds or fixes the rest. Here every constant is moved to
both ends of its range with the others at their defaults, and then all are moved at once: Sobol's
indices divide the variance of the final accuracy between them. The first-order index of a constant
is the part that it explains alone, the total index the part that it has a hand in.

A constant that raises the mean weight makes the steps larger. So the indices are given twice: for
the accuracy, and for what a straight line in the mean weight leaves of it.

The paper claims nothing here, so there are no verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field, field_validator
from scipy.stats import bootstrap, qmc, sobol_indices

from cvpo import CurriculumConfig, Curve, StochasticityConfig
from cvpo.metrics import correlation, paired_t_interval
from sim.bandit import BanditConfig, ResponseModel
from sim.study import Desk, Row, Settings, Study
from sim.trace import Trace, compare
from sim.training import Budget, Setting

Array = np.ndarray[Any, np.dtype[Any]]

STEPS_PER_ROUND = 4
RESAMPLES = 999
CONFIDENCE = 0.95


class SensitivitySettings(Settings):
    """Keys of the sensitivity study."""

    points: int = Field(default=64, ge=2)
    """n of Sobol's design, a power of two; 18 n settings are trained for each seed. The intervals
    shrink like 1/sqrt(n)."""
    prompts: int = Field(default=64, ge=8)
    """Of the world; a round takes four steps."""
    rounds: int = Field(default=30, ge=4)
    """Passes over the prompts; the paper's 2000 steps are 29."""

    @field_validator("points")
    @classmethod
    def _power_of_two(cls, points: int) -> int:
        if points & (points - 1):
            raise ValueError("points must be a power of two")
        return points

    @field_validator("prompts")
    @classmethod
    def _whole_batches(cls, prompts: int) -> int:
        if prompts % STEPS_PER_ROUND:
            raise ValueError(f"prompts must be a multiple of {STEPS_PER_ROUND}")
        return prompts


# ------------------------------------------------------------------------------ the constants


@dataclass(frozen=True)
class Parameter:
    """A constant and the range it is moved in."""

    name: str
    """A field of `StochasticityConfig` or `CurriculumConfig`, or a curve's as ``early.k1``."""
    low: float
    high: float
    log: bool = False
    """Whether its logarithm is spread evenly, instead of itself."""

    def at(self, position: Float[Array, " n"]) -> Float[Array, " n"]:
        """Values at positions in [0, 1] of the range."""
        if not self.log:
            return self.low + (self.high - self.low) * position
        value: Array = self.low * (self.high / self.low) ** position
        return value


def _curve(phase: str, constants: Curve) -> tuple[Parameter, ...]:
    """Steepness within 50 %, centres within .3, that is a third of rho's range."""
    k1, c1, k2, c2 = constants
    return (
        Parameter(f"{phase}.k1", 0.5 * k1, 1.5 * k1),
        Parameter(f"{phase}.c1", c1 - 0.3, c1 + 0.3),
        Parameter(f"{phase}.k2", 0.5 * k2, 1.5 * k2),
        Parameter(f"{phase}.c2", c2 - 0.3, c2 + 0.3),
    )


_W_S, _W_D = StochasticityConfig(), CurriculumConfig()

DEFAULTS: dict[str, Any] = {
    **vars(_W_S),
    **vars(_W_D),
    **{f"early.{name}": value for name, value in _W_D.early._asdict().items()},
    **{f"bottleneck.{name}": value for name, value in _W_D.bottleneck._asdict().items()},
}
"""What a parameter is where nothing is changed, by its name."""

PARAMETERS = (
    Parameter("alpha_p", 0.0, 0.6),
    Parameter("alpha_n", 0.0, 0.6),
    Parameter("lambda_p", 12.5, 200.0, log=True),
    Parameter("lambda_n", 12.5, 200.0, log=True),
    *_curve("early", _W_D.early),
    *_curve("bottleneck", _W_D.bottleneck),
    Parameter("low", 0.15, 0.45),
    Parameter("high", 0.65, 0.95),
    Parameter("low_delta", 0.025, 0.1, log=True),
    Parameter("high_delta", 0.015, 0.06, log=True),
)
"""Ranges, none of them the paper's. Coefficients: from none to twice the headline .3. Sharpness: a
factor of 4 both ways, since lambda sigma is what counts and critics differ by more than that in
sigma (method, 4.1). Curves: see `_curve`. Sets: .15 both ways, where every low stays below every
high. Changes: a factor of 2 both ways."""


def setting(name: str, values: Mapping[str, float]) -> Setting:
    """CVPO with some constants changed.

    Args:
        name: Of the setting.
        values: By the parameter's name.
    """
    changes: dict[str, dict[str, Any]] = {"early": {}, "bottleneck": {}, "W_S": {}, "W_D": {}}
    for key, value in values.items():
        owner, _, field = key.rpartition(".")
        changes[owner or ("W_S" if field in vars(_W_S) else "W_D")][field] = float(value)
    return Setting(
        name,
        stochasticity=replace(_W_S, **changes["W_S"]),
        curriculum=replace(
            _W_D,
            early=_W_D.early._replace(**changes["early"]),
            bottleneck=_W_D.bottleneck._replace(**changes["bottleneck"]),
            **changes["W_D"],
        ),
    )


# ------------------------------------------------------------------------------ what is measured


class Outcome(NamedTuple):
    """What a setting came to, one number for each seed."""

    accuracy: Float[Array, " R"]
    """Mean true success rate at the end."""
    gain: Float[Array, " R"]
    """What it is above that of the start: most of what worlds differ in is their start."""
    weight: Float[Array, " R"]
    """Mean of W_S over responses times mean of W_D over prompts, each also over time."""
    switched: Float[Array, " R"]
    """Step of the switch, NaN if none."""


def outcome(trace: Trace) -> Outcome:
    """Reads a trace of one setting."""
    mean = trace.rates.mean(axis=2, dtype=np.float64)
    correct = np.stack([1 - trace.accuracy, trace.accuracy], axis=2)
    w_s = np.where(correct > 0, correct * trace.w_s, 0.0).sum(axis=2).mean(axis=0)
    w_d = trace.weight.mean(axis=(0, 2), dtype=np.float64)
    return Outcome(mean[-1], mean[-1] - mean[0], w_s * w_d, trace.switched)


# ------------------------------------------------------------------------------ one at a time


class Side(NamedTuple):
    """One constant at one end of its range, all others at their defaults."""

    parameter: Parameter
    value: float
    difference: float
    """Of the final accuracy from that of the defaults, paired by seed."""
    low: float
    high: float


def sides(parameters: Sequence[Parameter]) -> list[tuple[Parameter, float]]:
    """Both ends of every range."""
    return [(p, value) for p in parameters for value in (p.low, p.high)]


def one_at_a_time(
    ends: Sequence[tuple[Parameter, float]],
    accuracy: Sequence[Float[Array, " R"]],
    base: Float[Array, " R"],
) -> list[Side]:
    """Differences from the defaults, the parameter of the largest one first.

    Args:
        ends: `sides`.
        accuracy: Of each, in the same order.
        base: Of the defaults.
    """
    found = []
    for (parameter, value), reached in zip(ends, accuracy, strict=True):
        interval = paired_t_interval(reached, base)
        found.append(Side(parameter, value, interval.estimate, interval.low, interval.high))
    size: dict[Parameter, float] = {}
    for side in found:
        size[side.parameter] = max(abs(side.difference), size.get(side.parameter, 0.0))
    return sorted(found, key=lambda side: -size[side.parameter])


def side_rows(found: Sequence[Side], noise: float, *, seeds: int) -> list[Row]:
    """One row for each end of a range, and one for the larger effect of the two.

    Args:
        found: `one_at_a_time`.
        noise: Standard deviation over seeds of what a run gains.
        seeds: How many.
    """
    rows = []
    for first, second in zip(found[::2], found[1::2], strict=True):
        usual = DEFAULTS[first.parameter.name]
        rows += [
            Row(
                "one at a time: change of final accuracy",
                f"{side.parameter.name} = {side.value:.4g} instead of {usual:g}",
                side.difference,
                side.low,
                side.high,
                n=seeds,
                unit="accuracy",
            )
            for side in (first, second)
        ]
        rows.append(
            Row(
                "one at a time: larger effect over the sd of a run's gain over seeds",
                first.parameter.name,
                max(abs(first.difference), abs(second.difference)) / (noise or math.nan),
                n=seeds,
                unit="sd",
            )
        )
    return rows


# -------------------------------------------------------------------------------- all at once


class Index(NamedTuple):
    """Sobol's indices of one constant, with bootstrap intervals over the design's points."""

    first: float
    first_low: float
    first_high: float
    total: float
    total_low: float
    total_high: float


def design(dimensions: int, points: int, seed: int) -> Float[Array, "settings dimensions"]:
    """Saltelli's design in the unit cube: A, B, and A with each column of B in turn.

    Args:
        dimensions: d, at least 2.
        points: n, a power of two.
        seed: Of the scrambled Sobol sequence.

    Returns:
        [(d + 2) n, d], in blocks of n.
    """
    drawn = qmc.Sobol(2 * dimensions, rng=seed).random(points)
    a, b = drawn[:, :dimensions], drawn[:, dimensions:]
    mixed = np.repeat(a[None], dimensions, axis=0)
    for column in range(dimensions):
        mixed[column, :, column] = b[:, column]
    return np.concatenate([a, b, *mixed])


def indices(reached: Float[Array, " settings"], dimensions: int, *, seed: int) -> list[Index]:
    """First-order and total index of every dimension (`scipy.stats.sobol_indices`).

    Args:
        reached: What each row of `design` came to. If all is the same, every index is 0.
        dimensions: d of the design.
        seed: Of the bootstrap, whose 95 % intervals are plain percentiles: a dimension without any
            effect has no spread for a corrected one.
    """
    # Indices do not change under a shift, and equal numbers become zeros without rounding.
    blocks = (reached - reached[0]).reshape(dimensions + 2, -1)
    points = blocks.shape[1]

    def of(rows: Array) -> Array:
        f = blocks[:, rows]
        found = sobol_indices(
            func={"f_A": f[0][None], "f_B": f[1][None], "f_AB": f[2:, None]}, n=points
        )
        return np.stack([found.first_order, found.total_order])

    first, total = of(np.arange(points))
    spread = bootstrap(
        (np.arange(points),),
        of,
        vectorized=False,
        method="percentile",
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        rng=seed,
    ).confidence_interval
    columns = (first, spread.low[0], spread.high[0], total, spread.low[1], spread.high[1])
    return [Index(*map(float, row)) for row in zip(*columns, strict=True)]


def beyond(reached: Float[Array, " n"], weight: Float[Array, " n"]) -> Float[Array, " n"]:
    """What the best straight line in the mean weight leaves of the accuracy."""
    if np.ptp(weight) == 0:
        return reached
    slope, level = np.polyfit(weight, reached, 1)
    left: Array = reached - (slope * weight + level)
    return left


def index_rows(
    parameters: Sequence[Parameter], found: Sequence[Index], *, of: str, points: int
) -> list[Row]:
    """Rows of total and first-order indices, the largest total first, and what is no interaction.

    Args:
        parameters: In the order of the design's dimensions.
        found: `indices`.
        of: What the variance is of.
        points: n of the design.
    """
    rows = []
    for parameter, index in sorted(
        zip(parameters, found, strict=True), key=lambda pair: -pair[1].total
    ):
        where = f"{parameter.name} in [{parameter.low:.4g}, {parameter.high:.4g}]"
        rows += [
            Row(f"Sobol, {of}: {order} index", where, *numbers, n=points, unit="share")
            for order, numbers in (("total", index[3:]), ("first-order", index[:3]))
        ]
    alone = sum(index.first for index in found)
    quantity = f"Sobol, {of}: sum of first-order indices"
    return [*rows, Row(quantity, "all constants", alone, n=points, unit="share")]


# ------------------------------------------------------------------------------------- the run


def study_parameters(
    desk: Desk,
    world: BanditConfig,
    budget: Budget,
    parameters: Sequence[Parameter],
    *,
    points: int,
) -> list[Row]:
    """Both designs for any constants of CVPO.

    Tables ``one_at_a_time``, ``sobol`` and ``settings`` (every setting of the second design).

    Args:
        desk: The study's; its seeds are averaged over.
        world: The bandit.
        budget: Batch and steps.
        parameters: At least two.
        points: n of the second design.
    """
    ends = sides(parameters)
    cube = design(len(parameters), points, desk.settings.seeds[0])
    columns = {p.name: p.at(cube[:, i]) for i, p in enumerate(parameters)}
    drawn = [{name: column[i] for name, column in columns.items()} for i in range(len(cube))]
    changes = [{}, *({p.name: value} for p, value in ends), *drawn]
    wanted = [setting(str(i), change) for i, change in enumerate(changes)]
    traces = compare(desk, world, budget, wanted, desc="settings")
    base, *others = [outcome(trace) for trace in traces.values()]
    moved, together = others[: len(ends)], others[len(ends) :]
    return [
        *switch_rows(base, together),
        *_one_at_a_time(desk, ends, moved, base),
        *_all_at_once(desk, parameters, drawn, together),
    ]


def _one_at_a_time(
    desk: Desk, ends: Sequence[tuple[Parameter, float]], moved: Sequence[Outcome], base: Outcome
) -> list[Row]:
    found = one_at_a_time(ends, [o.accuracy for o in moved], base.accuracy)
    seeds = len(base.gain)
    noise = float(np.std(base.gain, ddof=1)) if seeds > 1 else math.nan
    units = dict.fromkeys(("difference", "low", "high", "seed_noise"), "true success rate")
    desk.table("one_at_a_time", [_side_record(side, noise) for side in found], units)
    return side_rows(found, noise, seeds=seeds)


def _all_at_once(
    desk: Desk,
    parameters: Sequence[Parameter],
    drawn: Sequence[dict[str, float]],
    together: Sequence[Outcome],
) -> list[Row]:
    reached = np.array([o.accuracy.mean() for o in together])
    weight = np.array([o.weight.mean() for o in together])
    desk.table(
        "settings",
        [
            {**values, "accuracy": a, "mean_weight": w, "switched_share": _switched(o)}
            for values, a, w, o in zip(drawn, reached, weight, together, strict=True)
        ],
        {"accuracy": "true success rate"},
    )
    points = len(drawn) // (len(parameters) + 2)
    rows = [_weight_row(reached[: 2 * points], weight[: 2 * points])]
    records: list[dict[str, Any]] = []
    for of, numbers in (
        ("final accuracy", reached),
        ("final accuracy beyond the mean weight", beyond(reached, weight)),
    ):
        found = indices(numbers, len(parameters), seed=desk.settings.seeds[0])
        rows += index_rows(parameters, found, of=of, points=points)
        records += [
            {"outcome": of, "parameter": parameter.name, **index._asdict()}
            for parameter, index in zip(parameters, found, strict=True)
        ]
    desk.table("sobol", records, dict.fromkeys(Index._fields, "share of the variance"))
    return rows


def switch_rows(base: Outcome, together: Sequence[Outcome]) -> list[Row]:
    """Whether thresholds and the second curve had a chance to matter.

    Args:
        base: Of the defaults.
        together: Of the second design.
    """
    seeds, steps = len(base.switched), base.switched[~np.isnan(base.switched)]
    return [
        Row("runs that switch", "defaults", _switched(base), n=seeds, unit="share"),
        Row(
            "step of the switch",
            "defaults",
            float(steps.mean()) if len(steps) else math.nan,
            n=len(steps),
            unit="step",
        ),
        Row(
            "runs that switch",
            "Sobol's design",
            float(np.mean([_switched(o) for o in together])),
            n=len(together) * seeds,
            unit="share",
        ),
    ]


def _switched(found: Outcome) -> float:
    return float((~np.isnan(found.switched)).mean())


def _weight_row(reached: Float[Array, " n"], weight: Float[Array, " n"]) -> Row:
    return Row(
        "variance of final accuracy that goes with the mean weight (r^2)",
        "Sobol's design, A and B",
        correlation(reached, weight) ** 2,
        n=len(reached),
        unit="share",
    )


def _side_record(side: Side, noise: float) -> dict[str, Any]:
    return {
        **side._asdict(),
        "parameter": side.parameter.name,
        "default": DEFAULTS[side.parameter.name],
        "seed_noise": noise,
    }


def run(settings: SensitivitySettings, desk: Desk) -> list[Row]:
    """All constants in a small world.

    It learns at half the default's step sizes: slowly enough for the printed detector to switch in
    most runs, so that thresholds and the second curve can matter.
    """
    world = BanditConfig(
        prompts=settings.prompts,
        own_rate=0.15,
        skill_rate=0.05,
        responses=ResponseModel(tokens=8),  # half the default, for the sake of many settings
    )
    steps = settings.rounds * STEPS_PER_ROUND
    budget = Budget(batch=settings.prompts // STEPS_PER_ROUND, steps=steps, every=steps // 10)
    return study_parameters(desk, world, budget, PARAMETERS, points=settings.points)


STUDY = Study(
    name="sensitivity",
    about="which of CVPO's sixteen constants matter, one at a time and by Sobol's indices",
    settings=SensitivitySettings,
    run=run,
)
