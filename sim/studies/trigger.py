"""When does the switch to the bottleneck phase come, and does it tell anything (claim 6)?

A trigger detects a bottleneck if it fires once a policy has stopped improving and not before. So
each setting of `DifficultyCurriculum` meets policies that improve throughout, that stop at a known
round, and that never move, in synthetic drift of the paper's size; and one real improving run with
its control, in which every prompt keeps the mean rate of its history. A trigger that fires on both
alike is a clock.

How fast a policy improves decides what the printed rule can see, since it takes a low set that
rises by less than 5 % a round for stalled: hence two speeds, the slower one that of the real run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator

from cvpo import CurriculumConfig, DifficultyCurriculum
from cvpo.metrics import bootstrap_interval
from sim.differences import FEWEST_SEEDS
from sim.drift import (
    BATCH,
    PROMPTS,
    ROLLOUTS,
    ROUNDS,
    SHAPES,
    Drift,
    draw_counts,
    step_of_round,
    true_rates,
)
from sim.replay import Replay, ReplaySettings, not_measured, rise, rise_row
from sim.study import Desk, Row, SimError, Study, Verdict

Quantifier = Literal["mean", "all", "fraction"]
QUANTIFIERS: tuple[Quantifier, ...] = get_args(Quantifier)

CLAIM = 6
NEVER = math.nan
"""The round of a switch that does not come."""

PAPER_STEP, NEAR = 1000, 150
"""The paper reports its switch near this step; so many steps off still count as near."""
TELLS_APART = 0.5
"""Detections minus false alarms: 0 for a clock, 1 for a perfect trigger; half way decides."""
CONTROL_EPOCHS = 80
"""Of the real run's frozen control."""
SMOOTHING = 7
"""Epochs of the moving mean that stands for a prompt's rate in the real run."""


class TriggerSettings(ReplaySettings):
    """Keys of the trigger study."""

    num_prompts: int = Field(default=PROMPTS, ge=1)
    """Prompts of the synthetic worlds."""
    rounds: int = Field(default=ROUNDS, ge=2)
    """Rounds of the synthetic worlds; 30 are the paper's 2000 steps."""
    stops: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(10, 20), min_length=1)
    """Rounds from which a policy that stops has the same rates. Two, since a clock may ring shortly
    after one of them."""
    growths: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        default=(0.03, 0.1), min_length=1
    )
    """Mean growth of a logit in a round, slow to fast; the real run's low set fits the first."""
    discounts: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        default=(1.0, 0.9), min_length=1
    )
    """Of the tracker; 1 is the paper's."""
    control_seeds: int = Field(default=20, ge=1)
    """Draws of the real run's control, seeds from 0."""

    @model_validator(mode="after")
    def _stops_in_time(self) -> TriggerSettings:
        if max(self.stops) >= self.rounds:
            raise ValueError(f"stops must lie below rounds ({self.rounds}), got {self.stops}")
        return self


# -------------------------------------------------------------------------------- one switch


def switch_round(counts: Int[np.ndarray, "N E"], config: CurriculumConfig, *, trials: int) -> float:
    """The round, from 0, with whose end `DifficultyCurriculum` switches; `NEVER` if it does not.

    Args:
        counts: Successes of every prompt in every round.
        config: Tracker and detector.
        trials: Rollouts of a prompt in a round.
    """
    curriculum = DifficultyCurriculum(len(counts), config=config)
    prompt = torch.arange(len(counts))
    k = torch.full((len(counts),), trials)
    for round_, successes in enumerate(torch.from_numpy(np.ascontiguousarray(counts.T))):
        curriculum.observe(prompt, k, successes)
        if curriculum.end_round().switched:
            return float(round_)
    return NEVER


def describe(config: CurriculumConfig) -> str:
    """A setting in a few words."""
    if config.detector == "pooled":
        return f"pooled, margin {config.margin:g}, discount {config.discount:g}"
    return f"printed, {config.quantifier}, discount {config.discount:g}"


# ---------------------------------------------------------------------------------- verdicts


def share_interval(events: int, runs: int, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    A bootstrap of runs that all end alike has no width; this has.

    Args:
        events: 0..runs.
        runs: At least 1.
        z: Normal quantile.
    """
    share = events / runs
    centre = (share + z**2 / (2 * runs)) / (1 + z**2 / runs)
    half = z / (1 + z**2 / runs) * math.sqrt(share * (1 - share) / runs + (z / (2 * runs)) ** 2)
    # At 0 and 1 one end is the share itself, but for rounding.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


@dataclass(frozen=True)
class Discrimination:
    """How well a trigger tells policies that stopped from policies that improve.

    Its intervals are over draws of these very policies: their shapes, speeds and stops are given,
    and seeds of one policy hardly vary. They say nothing about other policies.
    """

    alarms: int
    """Improving policies on which it fired."""
    improving: int
    detections: int
    """Stopped policies on which it fired after the stop."""
    stopped: int

    @property
    def estimate(self) -> float:
        """Detections minus false alarms, as shares (Youden's J); in [-1, 1]."""
        return self.detections / self.stopped - self.alarms / self.improving

    @property
    def interval(self) -> tuple[float, float]:
        """Newcombe's 95 % interval of the difference, from the two shares' own."""
        hit, alarm = self.detections / self.stopped, self.alarms / self.improving
        hit_low, hit_high = share_interval(self.detections, self.stopped)
        alarm_low, alarm_high = share_interval(self.alarms, self.improving)
        return (
            self.estimate - math.hypot(hit - hit_low, alarm_high - alarm),
            self.estimate + math.hypot(hit_high - hit, alarm - alarm_low),
        )


def trigger_verdict(found: Discrimination, *, seeds: int) -> Verdict:
    """On "the trigger detects a bottleneck": is it nearer to a perfect trigger or to a clock?"""
    low, high = found.interval
    if seeds < FEWEST_SEEDS or low <= TELLS_APART <= high:
        return "undecided"
    return "holds" if low > TELLS_APART else "fails"


def discriminate(
    improving: Sequence[float], stopped: Sequence[tuple[float, int]]
) -> Discrimination:
    """Counts alarms and detections.

    Args:
        improving: Round of the switch for each policy that improves throughout.
        stopped: The same for each policy that stops, with the round of its stop. A switch no later
            than the stop is no detection: the policy still improved in that round.
    """
    return Discrimination(
        alarms=sum(not math.isnan(switch) for switch in improving),
        improving=len(improving),
        detections=sum(switch > stop for switch, stop in stopped),
        stopped=len(stopped),
    )


# -------------------------------------------------------------------------- synthetic drift


@dataclass(frozen=True)
class Outcome:
    """One policy under one setting."""

    drift: Drift
    seed: int
    config: CurriculumConfig
    switch: float
    """Round of the switch, or `NEVER`."""


def outcomes(drift: Drift, seed: int, configs: Sequence[CurriculumConfig]) -> list[Outcome]:
    """Lets every setting watch the same rollouts of one policy."""
    counts = draw_counts(true_rates(drift, [seed]), [seed])[0]
    return [
        Outcome(drift, seed, config, switch_round(counts, config, trials=ROLLOUTS))
        for config in configs
    ]


def grid(discounts: Sequence[float]) -> list[CurriculumConfig]:
    """Every quantifier of the printed detector, and the pooled one, at each discount."""
    printed = [
        CurriculumConfig(quantifier=quantifier, discount=discount)
        for quantifier, discount in itertools.product(QUANTIFIERS, discounts)
    ]
    return printed + [CurriculumConfig(detector="pooled", discount=d) for d in discounts]


def policies(settings: TriggerSettings) -> list[Drift]:
    """Improving and stopping policies of every shape and speed, and the frozen one."""
    moving = [
        Drift(
            shape=shape,
            growth=growth,
            stop=stop,
            num_prompts=settings.num_prompts,
            rounds=settings.rounds,
        )
        for growth, shape, stop in itertools.product(
            settings.growths, SHAPES, (None, *settings.stops)
        )
    ]
    return [*moving, replace(moving[0], stop=0)]


def setting_rows(
    config: CurriculumConfig, growth: float, found: Sequence[Outcome], *, seeds: int
) -> list[Row]:
    """What one setting does at one speed.

    Args:
        config: The setting.
        growth: The speed.
        found: Its outcomes on all policies of that speed, and on the frozen one.
        seeds: How many there are, for the verdict.
    """
    where = f"{describe(config)}; growth {growth:g}, {found[0].drift.rounds} rounds"
    improving = [outcome.switch for outcome in found if outcome.drift.stop is None]
    stopped = [(o.switch, o.drift.stop) for o in found if o.drift.stop is not None]
    told = discriminate(improving, stopped)
    delays = [switch - stop for switch, stop in stopped if stop > 0 and switch > stop]
    rows = [
        _share_row("fires while the policy improves", where, told.alarms, told.improving),
        _share_row("fires after the policy stopped", where, told.detections, told.stopped),
    ]
    if told.alarms:
        step = _steps_row("step of the switch while the policy improves", where, improving)
        rows.append(replace(step, paper=f"near {PAPER_STEP}"))
    if delays:
        rows.append(_mean_row("delay after the policy stopped", where, delays, unit="rounds"))
    return [*rows, _verdict_row(where, told, claimed=_is_paper(config), seeds=seeds)]


def frozen_row(config: CurriculumConfig, found: Sequence[Outcome]) -> Row:
    """When one setting fires on the policy that never moves."""
    switches = [outcome.switch for outcome in found if outcome.drift.stop == 0]
    fires = sum(not math.isnan(switch) for switch in switches)
    where = f"{describe(config)}; fires on {fires} of {len(switches)}"
    return _steps_row("step of the switch, frozen policy", where, switches)


def timing_rows(found: Sequence[Outcome]) -> list[Row]:
    """Which settings switch where the paper does, and which never do."""
    steps: dict[str, list[float]] = {}
    for outcome in found:
        steps.setdefault(describe(outcome.config), []).append(step_of_round(outcome.switch))
    near = [
        name
        for name, values in steps.items()
        if any(abs(step - PAPER_STEP) <= NEAR for step in values)
    ]
    never = [name for name, values in steps.items() if np.isnan(values).all()]
    return [
        Row(
            f"settings that switch within {NEAR} steps of {PAPER_STEP} on some policy",
            "; ".join(near) or "none",
            len(near),
            n=len(steps),
            unit="settings",
            paper=f"switch near step {PAPER_STEP}",
        ),
        Row(
            "settings that never switch",
            "; ".join(never) or "none",
            len(never),
            n=len(steps),
            unit="settings",
        ),
    ]


def _is_paper(config: CurriculumConfig) -> bool:
    return config.detector == "printed" and config.discount == 1


# ------------------------------------------------------------------------------ the real run


def real_configs() -> list[CurriculumConfig]:
    """The settings whose epochs on the real run section 5 of the method lists."""
    return [
        *(CurriculumConfig(discount=discount) for discount in (1.0, 0.98, 0.95, 0.9, 0.8)),
        *(CurriculumConfig(quantifier=quantifier) for quantifier in ("all", "fraction")),
        *(
            CurriculumConfig(detector="pooled", discount=0.9, margin=margin)
            for margin in (0.005, 0.01, 0.02)
        ),
    ]


def frozen_counts(
    counts: Int[np.ndarray, "N E"], seed: int, *, trials: int, by_epoch: bool
) -> Int[np.ndarray, "N epochs"]:
    """The real run's control: `CONTROL_EPOCHS` in which every prompt keeps its mean rate.

    Args:
        counts: Successes of the real run.
        seed: Of the draw.
        trials: Rollouts of a prompt in an epoch.
        by_epoch: Whether the generator fills [epochs, prompts] or [prompts, epochs]. The two give
            different numbers, and the listed epochs hold for one of them.
    """
    rate = counts.mean(axis=1) / trials
    rng = np.random.default_rng(seed)
    if by_epoch:
        return rng.binomial(trials, rate, size=(CONTROL_EPOCHS, len(rate))).T
    return rng.binomial(trials, rate[:, None], size=(len(rate), CONTROL_EPOCHS))


def moving_mean(x: Float[np.ndarray, "N E"], window: int) -> Float[np.ndarray, "N E"]:
    """Mean over the ``window`` (odd) columns around each one, over those that exist at the ends."""
    column = np.arange(x.shape[1])
    near = abs(column[:, None] - column) <= window // 2
    return np.asarray(x @ (near / near.sum(axis=0)))


def redrawn_counts(
    counts: Int[np.ndarray, "N E"], seed: int, *, trials: int
) -> Int[np.ndarray, "N E"]:
    """The improving run with other rollouts: each prompt's rate is its moving mean.

    The run itself is a single draw, and a detector that looks at every epoch has many chances to be
    fooled by it.

    Args:
        counts: Successes of the real run.
        seed: Of the draw.
        trials: Rollouts of a prompt in an epoch.
    """
    rates = moving_mean(counts / trials, SMOOTHING).clip(0, 1)
    return np.random.default_rng([seed, 2]).binomial(trials, rates)


def control(
    counts: Int[np.ndarray, "N E"], config: CurriculumConfig, seed: int, trials: int
) -> tuple[float, float]:
    """Epochs of the switch on the improving run with other rollouts, and on its frozen control."""
    frozen = frozen_counts(counts, seed, trials=trials, by_epoch=_by_epoch(config))
    return (
        switch_round(redrawn_counts(counts, seed, trials=trials), config, trials=trials),
        switch_round(frozen, config, trials=trials),
    )


def _by_epoch(config: CurriculumConfig) -> bool:
    return config.detector == "printed"


def real_rows(
    config: CurriculumConfig,
    switch: float,
    controls: Sequence[tuple[float, float]],
    *,
    epochs: int,
    improves: bool,
) -> list[Row]:
    """What one setting does on the real run.

    Args:
        config: The setting.
        switch: Epoch of its switch on the run itself.
        controls: `control` for each seed.
        epochs: Of the real run; a later switch on the control is no detection, since the run itself
            had no time for it.
        improves: Whether the real run does; if not, it cannot raise a false alarm, and nothing is
            said of the claim.
    """
    where = f"real run: {describe(config)}"
    fired = [frozen for _, frozen in controls if not math.isnan(frozen)]
    order = "(epochs, prompts)" if _by_epoch(config) else "(prompts, epochs)"
    span = f", epochs {min(fired):.0f}-{max(fired):.0f}" if fired else ""
    drawn = f"fires on {len(fired)} of {len(controls)}{span}; draws of shape {order}"
    told = discriminate(
        [redrawn for redrawn, _ in controls],
        [(frozen if frozen < epochs else NEVER, -1) for _, frozen in controls],
    )
    claimed = _is_paper(config) and improves
    return [
        Row(
            "epoch of the switch",
            f"{where}{'; never' if math.isnan(switch) else ''}",
            switch,
            unit="epoch",
            paper=f"near visit {PAPER_STEP * BATCH / PROMPTS:.0f}" if _is_paper(config) else "",
        ),
        _mean_row("epoch of the switch, frozen control", f"{where}; {drawn}", fired, unit="epoch"),
        _verdict_row(where, told, claimed=claimed, seeds=len(controls)),
    ]


# -------------------------------------------------------------------------------------- rows


def _mean_row(quantity: str, where: str, values: Sequence[float], *, unit: str) -> Row:
    if not values:
        return Row(quantity, where, math.nan, n=0, unit=unit)
    found = bootstrap_interval(np.array(values))
    return Row(quantity, where, found.estimate, found.low, found.high, n=len(values), unit=unit)


def _steps_row(quantity: str, where: str, switches: Sequence[float]) -> Row:
    steps = [step_of_round(switch) for switch in switches if not math.isnan(switch)]
    return _mean_row(quantity, where, steps, unit="step")


def _share_row(quantity: str, where: str, events: int, runs: int) -> Row:
    low, high = share_interval(events, runs)
    return Row(quantity, where, events / runs, low, high, n=runs, unit="share")


def _verdict_row(where: str, told: Discrimination, *, claimed: bool, seeds: int) -> Row:
    low, high = told.interval
    return Row(
        "detections minus false alarms",
        where,
        told.estimate,
        low,
        high,
        n=told.improving + told.stopped,
        unit="share",
        paper="detects a bottleneck" if claimed else "",
        claim=CLAIM if claimed else None,
        verdict=trigger_verdict(told, seeds=seeds) if claimed else "",
    )


# ----------------------------------------------------------------------------------- the run


def run(settings: TriggerSettings, desk: Desk) -> list[Row]:
    """Real run first, then synthetic drift; every single switch goes to the table ``switches``."""
    replay = settings.read_replay()
    real = [not_measured(CLAIM)] if replay is None else _real(replay, settings, desk)
    return real + _synthetic(settings, desk)


def _real(replay: Replay, settings: TriggerSettings, desk: Desk) -> list[Row]:
    if replay.lengths.min() < 2:
        short = replay.source_ids[int(replay.lengths.argmin())]
        raise SimError(
            f"replay: prompt {short!r} of {settings.replay} has a single epoch, and only epochs of "
            "all prompts are used; drop the prompt, or set replay=null"
        )
    counts, configs, seeds = replay.common, real_configs(), range(settings.control_seeds)
    work = [(counts, config, seed, replay.trials) for config in configs for seed in seeds]
    controls = desk.map(control, work, "frozen control")
    rose = rise(replay)
    rows = [rise_row(rose)]
    for index, config in enumerate(configs):
        rows += real_rows(
            config,
            switch_round(counts, config, trials=replay.trials),
            controls[index * len(seeds) : (index + 1) * len(seeds)],
            epochs=counts.shape[1],
            improves=rose.low > 0,
        )
    return rows


def _synthetic(settings: TriggerSettings, desk: Desk) -> list[Row]:
    configs = grid(settings.discounts)
    work = [(drift, seed, configs) for drift in policies(settings) for seed in settings.seeds]
    found = list(itertools.chain.from_iterable(desk.map(outcomes, work, "synthetic drift")))
    desk.table("switches", [_record(outcome) for outcome in found], {"step": "steps"})
    rows = timing_rows(found)
    for config in configs:
        mine = [outcome for outcome in found if outcome.config == config]
        rows.append(frozen_row(config, mine))
        for growth in settings.growths:
            there = [o for o in mine if o.drift.growth == growth or o.drift.stop == 0]
            rows += setting_rows(config, growth, there, seeds=len(settings.seeds))
    return rows


def _record(outcome: Outcome) -> dict[str, str | int | float | None]:
    drift, config = outcome.drift, outcome.config
    return {
        "shape": drift.shape if drift.stop != 0 else "frozen",
        "growth": drift.growth if drift.stop != 0 else 0.0,
        "stop": math.nan if drift.stop is None else drift.stop,
        "seed": outcome.seed,
        "detector": config.detector,
        "quantifier": config.quantifier if config.detector == "printed" else "",
        "discount": config.discount,
        "round": outcome.switch,
        "step": step_of_round(outcome.switch),
    }


STUDY = Study(
    name="trigger",
    about="when the phase switches, and whether that tells stopped policies from improving ones",
    settings=TriggerSettings,
    run=run,
)
