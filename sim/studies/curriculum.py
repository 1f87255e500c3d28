"""Does the difficulty weight W_D help, and what of it does (claims 7, 8, 9 and 13)?

W_D is above 1 for most prompts, so it is a larger step as well as another allocation of the step.
``w_d=constant`` takes the allocation away: every prompt gets the step's mean of W_D. What
`cvpo-curriculum` has over that is the curriculum; what that has over `vapo` is a learning rate.

Rivals choose the prompts instead of weighing them. They are compared at equal optimiser steps and,
where a method discards rollouts, also at equal rollouts: the curve of true accuracy is read where
the rival has generated as many responses as plain VAPO. All differences are paired by seed: the
settings share their worlds and random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from cvpo import SAMPLERS, CurriculumConfig, StochasticityConfig, difficulty_weight
from cvpo.metrics import Interval, paired_t_interval
from sim.bandit import PAPER_WORLD, BanditConfig
from sim.differences import difference_row, difference_verdict
from sim.record import BANDS, bands
from sim.study import Desk, Row, Settings, Study, Verdict
from sim.trace import Trace, compare
from sim.training import PAPER_BUDGET, Budget, Setting

Array = np.ndarray[Any, np.dtype[Any]]

HALF = 0.5
"""An effect comes from a part of it, and weight was moved rather than removed, above this share."""
EARLY_SHARE = 0.1
"""The lead of claim 13 is that of the first 100-200 of the paper's 2000 steps."""
READINGS = 20
LOW, HIGH = 0.3, 0.8
"""The paper's hard and easy prompts: rho <= .3 and rho >= .8."""
GRID = 1001
"""Success rates, evenly spread over [0, 1], at which the curves are compared."""


class CurriculumSettings(Settings):
    """Keys of the curriculum study."""

    prompts: int = Field(default=256, ge=32)
    """Prompts that are trained on. As many again are held out and share their skills."""
    steps: int = Field(default=200, ge=READINGS)
    """Optimiser steps of 32 x 8 responses; at 256 prompts 200 of them are 25 rounds, the paper's
    2000 are 29."""
    low_delta: float = Field(default=0.1, ge=0)
    """Threshold of the printed detector in the runs that are to show phase 2. At the paper's .05
    the default world, whose rates rise fast, does not switch within its steps; at .1 half-way, as
    the paper's run does."""
    paper: bool = False
    """Also trains VAPO, W_D and W_D's scale at the paper's size (17 398 prompts, 2000 steps): off
    by default, since it takes some two core-minutes with five seeds."""


# ------------------------------------------------------------------------------ what is trained

VAPO = Setting("vapo", method="vapo")
W_D = Setting("cvpo-curriculum", method="cvpo-curriculum")
W_S = Setting("cvpo-stochasticity", method="cvpo-stochasticity")
CVPO = Setting("cvpo")
CONSTANT = replace(W_D, name="w_d=constant", difficulty="constant")
_CONSTANT_W_S = StochasticityConfig(arm="constant")

PAPER_METHODS = (VAPO, W_D, W_S, CVPO)
"""The methods of the paper's ablation; their runs are logged."""
CONTROLS = (
    CONSTANT,
    replace(W_D, name="w_d=oracle", difficulty="oracle"),
    replace(W_D, name="w_d=thompson", difficulty="thompson"),
    replace(CVPO, name="cvpo, w_s=constant", stochasticity=_CONSTANT_W_S),
    replace(CVPO, name="cvpo, w_d=constant", difficulty="constant"),
    replace(CVPO, name="cvpo, both constant", stochasticity=_CONSTANT_W_S, difficulty="constant"),
)
RIVALS = (
    *(
        replace(VAPO, name=f"sampler={name}", sampler=name)
        for name in SAMPLERS
        if name != VAPO.sampler
    ),
    Setting("grpo", method="grpo"),
    Setting("dapo", method="dapo"),
)


def phase_settings(low_delta: float) -> tuple[Setting, Setting, Setting]:
    """W_D that switches, its scale alone, and W_D that never switches.

    Args:
        low_delta: Of the printed detector.
    """
    switching = CurriculumConfig(low_delta=low_delta)
    never = CurriculumConfig(high_delta=-math.inf)  # no change is that small
    return (
        replace(W_D, name="two phases", curriculum=switching),
        replace(CONSTANT, name="two phases, w_d=constant", curriculum=switching),
        replace(W_D, name="early phase only", curriculum=never),
    )


@dataclass(frozen=True)
class Effect:
    """A difference of two settings that says something."""

    what: str
    setting: str
    against: str
    claim: int | None = None
    paper: str = ""


EFFECTS = (
    Effect("W_D", "cvpo-curriculum", "vapo", 8, "beats VAPO"),
    Effect("W_D's scale", "w_d=constant", "vapo"),
    Effect("W_D's allocation", "cvpo-curriculum", "w_d=constant", 8, "beats VAPO"),
    Effect("W_D at the true rates", "w_d=oracle", "cvpo-curriculum"),
    Effect("both weights over W_D", "cvpo", "cvpo-curriculum", 9, "beat each alone"),
    Effect("both weights over W_S", "cvpo", "cvpo-stochasticity", 9, "beat each alone"),
    Effect("W_S's allocation beside W_D", "cvpo", "cvpo, w_s=constant", 9, "beat each alone"),
    Effect("W_D's allocation beside W_S", "cvpo", "cvpo, w_d=constant", 9, "beat each alone"),
    Effect("both weights' scale", "cvpo, both constant", "vapo"),
    Effect("swap: W_D samples instead of weighing", "sampler=w-d", "cvpo-curriculum"),
    Effect("swap: MoPPS weighs instead of sampling", "w_d=thompson", "sampler=mopps"),
)


# ---------------------------------------------------------------------------------- curves


def accuracy(trace: Trace, *, held_out: bool = False) -> Float[Array, "E R"]:
    """Mean true success rate of the prompts that are trained, or of those that are held out."""
    trained = trace.tracked.shape[2]
    rates = trace.rates[:, :, trained:] if held_out else trace.rates[:, :, :trained]
    mean: Array = rates.mean(axis=2, dtype=np.float64)
    return mean


def at_rollouts(trace: Trace, reference: Trace) -> Float[Array, "E R"]:
    """True accuracy of a trace where it has generated as many responses as the reference.

    Args:
        trace: Of a method that may discard rollouts, so that it generates at least as many in a
            step as the reference; linear between its readings.
        reference: Gives the E readings. Run r of both has the same seed.
    """
    curve = accuracy(trace)
    columns = [
        np.interp(reference.rollouts[:, run], trace.rollouts[:, run], curve[:, run])
        for run in range(curve.shape[1])
    ]
    return np.stack(columns, axis=1)


def area(curve: Float[Array, "E R"], at: Int[Array, " E"]) -> Float[Array, " R"]:
    """Mean height of a curve between its first and last reading, by trapezoids.

    Args:
        curve: Values at the readings.
        at: Where these are, rising.
    """
    mean: Array = np.trapezoid(curve, at, axis=0) / (at[-1] - at[0])
    return mean


def band_of(trace: Trace) -> Int[Array, "R N"]:
    """Index into `BANDS` of each trained prompt: thirds of its run's starting rates."""
    start = torch.from_numpy(trace.rates[0, :, : trace.tracked.shape[2]])
    return np.stack([bands(row).numpy() for row in start])


# ---------------------------------------------------------------------------------- weights


def shares(weight: Float[Array, "*shape N"]) -> Float[Array, "*shape N"]:
    """Each prompt's part of the total."""
    weight = np.asarray(weight, dtype=np.float64)
    part: Array = weight / weight.sum(axis=-1, keepdims=True)
    return part


def misallocated(
    weight: Float[Array, "*shape N"], ideal: Float[Array, "*shape N"]
) -> Float[Array, "*shape"]:
    """Total variation distance of the shares: the part of the total that sits on other prompts.

    Args:
        weight: Not negative, of a positive sum.
        ideal: Likewise.

    Returns:
        0 (the same shares) to 1 (no prompt in common).
    """
    distance: Array = np.abs(shares(weight) - shares(ideal)).sum(axis=-1) / 2
    return distance


def curve_weight(
    rho: Float[Array, "*shape"], phase: str, config: CurriculumConfig
) -> Float[Array, "*shape"]:
    """W_D of a configuration's curves (`difficulty_weight`), float64."""
    constants = config.early if phase == "early" else config.bottleneck
    rate = torch.from_numpy(np.asarray(rho, dtype=np.float64))
    weight: Array = difficulty_weight(rate, phase=phase, constants=constants).numpy()
    return weight


def moved(before: Float[Array, " N"], after: Float[Array, " N"], hard: Bool[Array, " N"]) -> float:
    """Of the weight that the other prompts lose, the part that the hard ones gain.

    1: all of it was moved to them. 0: the others were demoted, and that is all. Negative: the hard
    ones lost as well. NaN if the others lost nothing, or none is hard.
    """
    gain, rest = (after - before)[hard].sum(), (after - before)[~hard].sum()
    return float(gain / -rest) if rest < 0 and hard.any() else math.nan


# ---------------------------------------------------------------------------------- verdicts


def lead_verdict(lead: Float[Array, " R"], part: Float[Array, " R"]) -> Verdict:
    """On "the lead comes from this part": there is a lead, and the part is more than half of it.

    Args:
        lead: Difference of accuracy in each seed.
        part: What the part alone makes of it.
    """
    there_is = difference_verdict(paired_t_interval(lead, np.zeros_like(lead)))
    return difference_verdict(_beyond_half(lead, part)) if there_is == "holds" else there_is


def _beyond_half(lead: Float[Array, " R"], part: Float[Array, " R"]) -> Interval:
    return paired_t_interval(part, HALF * lead)


# ---------------------------------------------------------------------------- rows: differences


def accuracy_row(
    quantity: str,
    where: str,
    a: Float[Array, " R"],
    b: Float[Array, " R"],
    *,
    claim: int | None = None,
    paper: str = "",
) -> Row:
    """a - b of accuracies; a claim, where there is one, is that it is positive."""
    sign: Literal[1, 0] = 0 if claim is None else 1
    return difference_row(
        quantity, where, a, b, unit="accuracy", claim=claim, paper=paper, sign=sign
    )


def effect_rows(traces: Mapping[str, Trace], *, where: str = "") -> list[Row]:
    """`EFFECTS` on the final accuracy, as far as their settings were trained.

    Args:
        traces: By the setting's name.
        where: Added to the rows' setting.
    """
    known = [e for e in EFFECTS if e.setting in traces and e.against in traces]
    rows = []
    for effect in known:
        one, other = traces[effect.setting], traces[effect.against]
        for held_out in (False, True):
            if held_out and one.rates.shape[2] == one.tracked.shape[2]:
                continue
            place = "held-out prompts" if held_out else "trained prompts"
            rows.append(
                accuracy_row(
                    f"{effect.what}: final accuracy",
                    f"{effect.setting} - {effect.against}; {place}{where}",
                    accuracy(one, held_out=held_out)[-1],
                    accuracy(other, held_out=held_out)[-1],
                    claim=effect.claim,
                    paper=effect.paper,
                )
            )
    return rows


def rival_rows(name: str, trace: Trace, vapo: Trace) -> list[Row]:
    """One setting against plain VAPO: final accuracy and area under the curve."""
    plain = accuracy(vapo)
    discards = bool(trace.discarded.any())
    curves = {"equal steps" if discards else "equal steps and rollouts": accuracy(trace)}
    if discards:
        curves["equal rollouts"] = at_rollouts(trace, vapo)
    rows = []
    for how, curve in curves.items():
        where = f"{name} - vapo; {how}"
        rows += [
            accuracy_row("final accuracy", where, curve[-1], plain[-1]),
            accuracy_row(
                "area under the accuracy curve",
                where,
                area(curve, vapo.steps),
                area(plain, vapo.steps),
            ),
        ]
    if discards:
        share = trace.discarded[-1] / trace.rollouts[-1]
        rows.append(_mean_row("share of rollouts that are discarded", name, share, unit="share"))
    return rows


def equal_rollouts_rows(traces: Mapping[str, Trace]) -> list[Row]:
    """W_D against every rival, and CVPO's gain, at the rollouts that VAPO has used at its end.

    Where CVPO generates as many in a step as VAPO, equal rollouts are equal steps, and its gain
    says nothing of claim 12.
    """
    vapo = traces[VAPO.name]
    final = {name: at_rollouts(trace, vapo)[-1] for name, trace in traces.items()}
    rows = [
        accuracy_row(
            "final accuracy",
            f"{W_D.name} - {rival.name}; equal rollouts",
            final[W_D.name],
            final[rival.name],
        )
        for rival in RIVALS
        if rival.name in final
    ]
    unlike = not np.array_equal(traces[CVPO.name].rollouts, vapo.rollouts)
    gain = accuracy_row(
        "final accuracy at equal rollouts; the weights' own cost left out",
        f"{CVPO.name} - {VAPO.name}",
        final[CVPO.name],
        final[VAPO.name],
        claim=12 if unlike else None,
        paper="gains at equal device-hours" if unlike else "",
    )
    return [*rows, gain]


# ------------------------------------------------------------------------------ rows: claim 13


def early_rows(traces: Mapping[str, Trace], *, share: float = EARLY_SHARE) -> list[Row]:
    """The lead after the first steps, and what it is made of.

    Args:
        traces: Of VAPO, W_D, W_D's scale, W_S and CVPO.
        share: Of all steps.
    """
    steps = traces[VAPO.name].steps
    reading = int(np.searchsorted(steps, share * steps[-1]))
    score = {name: accuracy(trace)[reading] for name, trace in traces.items()}
    where = f"step {steps[reading]} of {steps[-1]}"
    parts = {
        "all of it": (CVPO, VAPO),
        "W_S alone": (W_S, VAPO),
        "W_D alone": (W_D, VAPO),
        "W_D's scale": (CONSTANT, VAPO),
    }
    rows = [
        accuracy_row(
            f"early lead: {what}", f"{a.name} - {b.name}; {where}", score[a.name], score[b.name]
        )
        for what, (a, b) in parts.items()
    ]
    lead = score[CVPO.name] - score[VAPO.name]
    part = score[W_D.name] - score[CONSTANT.name]
    beyond = _beyond_half(lead, part)
    switched = traces[CVPO.name].switched <= steps[reading]
    varies = traces[W_D.name].weight[reading]
    return [
        *rows,
        accuracy_row(
            "early lead: W_D's allocation",
            f"{W_D.name} - {CONSTANT.name}; {where}",
            score[W_D.name],
            score[CONSTANT.name],
        ),
        _row(
            "W_D's allocation beyond half of the early lead",
            where,
            beyond,
            unit="accuracy",
            paper="the lead comes from the early curriculum",
            claim=13,
            verdict=lead_verdict(lead, part),
        ),
        Row(
            "W_D's allocation, part of the early lead",
            where,
            float(part.mean() / lead.mean()),
            n=len(lead),
            unit="share",
        ),
        Row(
            "runs that switched by then",
            where,
            float(switched.mean()),
            n=len(switched),
            unit="share",
        ),
        _mean_row(
            "sd(W_D) / mean(W_D) over prompts",
            where,
            varies.std(axis=1) / varies.mean(axis=1),
            unit="share",
        ),
    ]


# ------------------------------------------------------------------------------- rows: claim 7


def curve_rows(config: CurriculumConfig) -> list[Row]:
    """Exact: what the switch does to W_D at every success rate."""
    rho = np.linspace(0, 1, GRID)
    early, late = (curve_weight(rho, phase, config) for phase in ("early", "bottleneck"))
    change = late / early - 1
    low, easy = rho <= LOW, rho >= HIGH
    taken = moved(early, late, low)
    claimed = "phase 2 moves weight to hard problems"
    return [
        Row(
            "early W_D: half its range over its middle",
            "0 <= rho <= 1",
            float(np.ptp(early) / (early.max() + early.min())),
            unit="share",
        ),
        Row("change of W_D at the switch", "rho = 0", float(change[0]), unit="share"),
        Row(
            "largest change of W_D at the switch",
            f"rho <= {LOW:g}",
            float(change[low].max()),
            unit="share",
            paper=claimed,
        ),
        Row(
            "mean change of W_D at the switch",
            f"rho >= {HIGH:g}",
            float(change[easy].mean()),
            unit="share",
        ),
        Row(
            "of the weight the others lose, the part the hard gain",
            f"the curves, rho even over [0, 1], hard: rho <= {LOW:g}",
            taken,
            unit="share",
            paper=claimed,
            claim=7,
            verdict="undecided" if math.isnan(taken) else "holds" if taken > HALF else "fails",
        ),
    ]


def switch_rows(trace: Trace, config: CurriculumConfig) -> list[Row]:
    """What the switch did to the weight of hard prompts, in the runs that switched.

    Both curves are read at the tracked rates of the first reading after the switch, so that the
    switch alone makes the difference. Hard is the third of the lowest starting rates, or, as the
    paper has it, what has a low tracked rate at the switch.

    Args:
        trace: Of a setting that uses W_D.
        config: Its curriculum.
    """
    name, seeds = trace.settings[0], len(trace.seeds)
    runs = np.flatnonzero(~np.isnan(trace.switched))
    rows = [Row("runs that switch", name, len(runs) / seeds, n=seeds, unit="share")]
    if not len(runs):
        return rows
    rows.append(_mean_row("step of the switch", name, trace.switched, unit="step"))
    readings = np.searchsorted(trace.steps, trace.switched[runs])
    tracked, true = trace.tracked[readings, runs], trace.rates[readings, runs]
    third = band_of(trace)[runs] == BANDS.index("hard")
    for hard, who in (
        (third, "hard third by starting rate"),
        (tracked <= LOW, f"rho <= {LOW:g} at the switch"),
    ):
        rows += _moved_rows(f"{name}: {who}", tracked, true[:, : tracked.shape[1]], hard, config)
    return rows


def _moved_rows(
    where: str,
    tracked: Float[Array, "R N"],
    true: Float[Array, "R N"],
    hard: Bool[Array, "R N"],
    config: CurriculumConfig,
) -> list[Row]:
    before, after = (curve_weight(tracked, phase, config) for phase in ("early", "bottleneck"))
    first, second, information = (
        (shares(weight) * hard).sum(axis=1) for weight in (before, after, true * (1 - true))
    )
    rise = paired_t_interval(second, first)
    part = np.array([moved(*run) for run in zip(before, after, hard, strict=True)])
    claimed = "phase 2 moves weight to hard problems"
    rows = [
        _mean_row("share of the weight before the switch", where, first, unit="share"),
        _mean_row("share of the weight after the switch", where, second, unit="share"),
        _mean_row("share of the information p (1 - p)", where, information, unit="share"),
        _row(
            "rise of their share of the weight at the switch",
            where,
            rise,
            unit="share",
            paper=claimed,
            claim=7,
            verdict=difference_verdict(rise),
        ),
    ]
    if np.isnan(part).all():
        return rows
    return [
        *rows,
        _row(
            "of the weight the others lose, the part they gain",
            where,
            _interval(part),
            unit="share",
            paper=claimed,
            claim=7,
            verdict=difference_verdict(_interval(part - HALF)),
        ),
    ]


def phase_rows(traces: Mapping[str, Trace], settings: Sequence[Setting]) -> list[Row]:
    """What phase 2 does to the final accuracy, of all prompts and of the hard third.

    Args:
        traces: By the setting's name.
        settings: `phase_settings`.
    """
    both, scale, never = settings
    rows = []
    for what, one, other in (
        ("phase 2", both, never),
        ("W_D's allocation in both phases", both, scale),
    ):
        where = f"{one.name} - {other.name}"
        first, second = (_final_by_band(traces[setting.name]) for setting in (one, other))
        rows += [
            accuracy_row(f"{what}: final accuracy", f"{where}; {band}", first[band], second[band])
            for band in ("all", "hard")
        ]
    return rows


def _final_by_band(trace: Trace) -> dict[str, Float[Array, " R"]]:
    final = trace.rates[-1, :, : trace.tracked.shape[2]].astype(np.float64)
    band = band_of(trace)
    parts = {
        name: np.array([row[mine == index].mean() for row, mine in zip(final, band, strict=True)])
        for index, name in enumerate(BANDS)
    }
    return {"all": final.mean(axis=1), **parts}


# -------------------------------------------------------------------------- misallocated weight


def misallocation(trace: Trace, config: CurriculumConfig) -> dict[str, Float[Array, "E R"]]:
    """How far the weight's shares are from others, at every reading (`misallocated`).

    Args:
        trace: Of a setting that uses W_D.
        config: Its curriculum.

    Returns:
        ``tracked_true``: of W_D at the tracked rates from W_D at the true ones, in the same phase.
        ``tracked_information``, ``true_information``, ``equal_information``: of those two, and of
        equal weights, from shares in proportion to p (1 - p).
    """
    true = trace.rates[:, :, : trace.tracked.shape[2]].astype(np.float64)
    late = (trace.steps[:, None] >= trace.switched)[:, :, None]
    oracle = np.where(
        late, curve_weight(true, "bottleneck", config), curve_weight(true, "early", config)
    )
    information = true * (1 - true)
    return {
        "tracked_true": misallocated(trace.weight, oracle),
        "tracked_information": misallocated(trace.weight, information),
        "true_information": misallocated(oracle, information),
        "equal_information": misallocated(np.ones_like(true), information),
    }


def misallocation_rows(name: str, found: Mapping[str, Float[Array, "E R"]]) -> list[Row]:
    """Means over all readings but the first, before which the tracker has seen nothing."""
    said = {
        "tracked_true": "W_D at the tracked rates, from W_D at the true ones",
        "tracked_information": "W_D at the tracked rates, from p (1 - p)",
        "true_information": "W_D at the true rates, from p (1 - p)",
        "equal_information": "equal weights, from p (1 - p)",
    }
    return [
        _mean_row(
            "misallocated weight", f"{name}: {text}", found[key][1:].mean(axis=0), unit="share"
        )
        for key, text in said.items()
    ]


# -------------------------------------------------------------------------------------- tables


def band_records(name: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """Rows of the table ``accuracy_by_band``, one for each seed, reading and band."""
    trained = trace.tracked.shape[2]
    band, everyone = band_of(trace), np.arange(trained)
    held_out = np.arange(trained, trace.rates.shape[2])
    for run, seed in enumerate(trace.seeds):
        groups = {"all": everyone, "held out": held_out} | {
            label: np.flatnonzero(band[run] == index) for index, label in enumerate(BANDS)
        }
        for label, members in groups.items():
            if not len(members):
                continue
            curve = trace.rates[:, run, members].mean(axis=1, dtype=np.float64)
            for reading, step in enumerate(trace.steps):
                yield {
                    "setting": name,
                    "seed": seed,
                    "band": label,
                    "step": int(step),
                    "rollouts": int(trace.rollouts[reading, run]),
                    "discarded": int(trace.discarded[reading, run]),
                    "accuracy": float(curve[reading]),
                }


def misallocation_records(
    name: str, trace: Trace, found: Mapping[str, Float[Array, "E R"]]
) -> Iterator[dict[str, Any]]:
    """Rows of the table ``misallocation``, one for each seed and reading."""
    for run, seed in enumerate(trace.seeds):
        for reading, step in enumerate(trace.steps):
            phase = "bottleneck" if step >= trace.switched[run] else "early"
            distances = {key: float(value[reading, run]) for key, value in found.items()}
            yield {
                "setting": name,
                "seed": seed,
                "step": int(step),
                "phase": phase,
                **distances,
            }


def _row(quantity: str, where: str, found: Interval, **more: Any) -> Row:
    return Row(quantity, where, found.estimate, found.low, found.high, n=found.sizes[0], **more)


def _mean_row(quantity: str, where: str, values: Float[Array, " R"], *, unit: str) -> Row:
    return _row(quantity, where, _interval(values), unit=unit)


def _interval(values: Float[Array, " R"]) -> Interval:
    return paired_t_interval(values, np.zeros(len(values)))


# ------------------------------------------------------------------------------------- the run


def run(settings: CurriculumSettings, desk: Desk) -> list[Row]:
    """Trains everything in the same worlds; tables ``accuracy_by_band`` and ``misallocation``."""
    world = BanditConfig(prompts=settings.prompts, held_out=settings.prompts)
    budget = Budget(steps=settings.steps, every=settings.steps // READINGS)
    phases = phase_settings(settings.low_delta)
    others = [*CONTROLS, *RIVALS, *phases]
    traces = compare(desk, world, budget, PAPER_METHODS, desc="methods", logged=True)
    traces |= compare(desk, world, budget, others, desc="controls and rivals")
    _write_bands(desk, traces)

    vapo = traces[VAPO.name]
    rows = effect_rows(traces)
    rows += early_rows(traces)
    rows += curve_rows(CurriculumConfig())
    rows += switch_rows(traces[phases[0].name], phases[0].curriculum)
    rows += phase_rows(traces, phases)
    rows += equal_rollouts_rows(traces)
    for setting in (*PAPER_METHODS[1:], *CONTROLS, *RIVALS):
        rows += rival_rows(setting.name, traces[setting.name], vapo)
    rows += _misallocation(desk, traces, (W_D, phases[0]))
    if settings.paper:
        size = (PAPER_WORLD, PAPER_BUDGET, (VAPO, W_D, CONSTANT))
        large = compare(desk, *size, desc="paper's size")
        rows += effect_rows(large, where="; the paper's size")
        rows += switch_rows(large[W_D.name], W_D.curriculum)
    return rows


def _write_bands(desk: Desk, traces: Mapping[str, Trace]) -> None:
    records = [record for name, trace in traces.items() for record in band_records(name, trace)]
    units = {"step": "steps", "rollouts": "responses", "discarded": "responses"}
    desk.table("accuracy_by_band", records, {**units, "accuracy": "true success rate"})


def _misallocation(
    desk: Desk, traces: Mapping[str, Trace], settings: Sequence[Setting]
) -> list[Row]:
    records: list[dict[str, Any]] = []
    rows: list[Row] = []
    for setting in settings:
        trace = traces[setting.name]
        found = misallocation(trace, setting.curriculum)
        rows += misallocation_rows(setting.name, found)
        records += misallocation_records(setting.name, trace, found)
    desk.table("misallocation", records, {"step": "steps"})
    return rows


STUDY = Study(
    name="curriculum",
    about="W_D against samplers, its controls and the truth; what its second phase does",
    settings=CurriculumSettings,
    run=run,
)
