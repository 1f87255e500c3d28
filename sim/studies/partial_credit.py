"""Partial credit (4.4): what fractional rewards do to W_S, to the tracker and to a training.

A wrong response gets the share of its parts that are right, so E[R] = p + (1 - p) * credit, where p
is the true rate of full marks. W_S mixes its two branches; the tracker adds up R and so converges
to E[R]; W_D then takes a prompt for easier than it is. The paper grades with 0 and 1 and claims
nothing about this, so no row has a verdict.

The gap in A between correct and wrong responses is 2 (1 - credit), so fractional grading also makes
every step smaller. Each training is therefore repeated with steps larger by 1 / (1 - credit): what
then remains is not the step's size.

Decision: full marks are what the policy is trained for, so rates, accuracy and p count the correct
kinds of response alone. (With credit by parts a wrong response is right in all of them with
probability credit^parts, .4 % at a credit of .25; its R is then 1 too.)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from cvpo import StochasticityConfig, difficulty_weight, stochasticity_weight
from cvpo.curriculum import PHASES
from sim.bandit import Bandit, BanditConfig
from sim.differences import difference_row
from sim.studies.weights import AREA, END, UNIT, Scores, scores
from sim.study import Desk, Row, Settings, Study
from sim.trace import Array, compare
from sim.training import Budget, Setting

METHODS = ("vapo", "cvpo-stochasticity", "cvpo-curriculum", "cvpo")
"""Each factor alone, both and neither."""
SWITCH = "step of the switch"


class PartialCreditSettings(Settings):
    """Keys of the partial-credit study."""

    credits: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        default=(0.1, 0.25, 0.5), min_length=1
    )
    """Mean R of wrong responses, in worlds that are compared with strict grading."""
    parts: int = Field(default=4, ge=2, le=64)
    """In how many parts a response is graded."""
    coefficient: float = Field(default=0.3, ge=0, lt=1)
    """alpha_P = alpha_N of W_S."""
    sharpness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    """lambda_P = lambda_N of W_S."""
    prompts: int = Field(default=256, ge=3)
    """Of a bandit."""
    batch: int = Field(default=32, ge=1)
    """Prompts of a step."""
    rollouts: int = Field(default=8, ge=2)
    """Responses to each."""
    steps: int = Field(default=200, ge=1)
    """Of a bandit's training."""
    frozen_steps: int = Field(default=400, ge=1)
    """Of a policy that does not move, in which the tracker converges."""

    @model_validator(mode="after")
    def _fits(self) -> PartialCreditSettings:
        if self.batch > self.prompts:
            raise ValueError(f"batch must be at most prompts ({self.prompts}), got {self.batch}")
        if max(self.credits) > 1 - 1 / self.parts:
            raise ValueError(
                f"credits must be at most 1 - 1/parts: a wrong answer misses one of {self.parts}"
            )
        return self

    @property
    def weights(self) -> StochasticityConfig:
        """Of W_S."""
        c, sharpness = self.coefficient, self.sharpness
        return StochasticityConfig(alpha_p=c, alpha_n=c, lambda_p=sharpness, lambda_n=sharpness)

    def world(
        self, credit: float, *, frozen: bool = False, larger_steps: bool = False
    ) -> BanditConfig:
        """The bandit with a mean credit of wrong responses.

        Args:
            credit: The mean.
            frozen: Whether nothing is learned.
            larger_steps: Whether steps make up for the smaller gap in A.
        """
        world = BanditConfig(
            prompts=self.prompts,
            partial=credit,
            parts=self.parts,
            stops_after=0 if frozen else None,
        )
        scale = 1 / (1 - credit) if larger_steps else 1.0
        return replace(world, own_rate=scale * world.own_rate, skill_rate=scale * world.skill_rate)


def expected_credit(rates: Float[Tensor, "*shape"], credit: float) -> Float[Tensor, "*shape"]:
    """E[R] at true rates of full marks."""
    return rates + (1 - rates) * credit


# ---------------------------------------------------------------------------------------------- W_S


def weight_curve(
    settings: PartialCreditSettings, *, points: int = 41, grades: int = 21
) -> dict[str, Float[Tensor, "points grades"]]:
    """W_S over sigma - mu in [-.1, .1] and R in [0, 1], in float64, with what it should be.

    Returns:
        ``deviation`` and ``R`` of each point, ``weight`` by the library, and the branches ``plus``
        and ``minus`` as (15)-(16) print them, written out again.
    """
    deviation, R = torch.meshgrid(
        torch.linspace(-0.1, 0.1, points, dtype=torch.float64),
        torch.linspace(0, 1, grades, dtype=torch.float64),
        indexing="ij",
    )
    mu = 0.1
    c, sharpness = settings.coefficient, settings.sharpness
    weight = stochasticity_weight(
        (mu + deviation).flatten(),
        torch.full_like(deviation, mu).flatten(),
        R.flatten(),
        alpha_p=c,
        alpha_n=c,
        lambda_p=sharpness,
        lambda_n=sharpness,
    )
    return {
        "deviation": deviation,
        "R": R,
        "weight": weight.view_as(R),
        "plus": 1 + c / (1 + torch.exp(-sharpness * deviation)),
        "minus": 1 - c / (1 + torch.exp(sharpness * deviation)),
    }


def weight_rows(curve: dict[str, Float[Tensor, "points grades"]]) -> list[Row]:
    """How near W_S comes to the mix of its branches, at the ends and between, and its range."""
    R, weight = curve["R"], curve["weight"]
    mix = R * curve["plus"] + (1 - R) * curve["minus"]
    error = (weight - mix).abs()
    ends = (R == 0) | (R == 1)
    where = "sigma - mu in [-.1, .1]"
    numbers = {
        "largest distance of W_S from (15)-(16), R in {0, 1}": error[ends].max(),
        "largest distance of W_S from the convex mix, R in (0, 1)": error[~ends].max(),
        "smallest W_S": weight.min(),
        "largest W_S": weight.max(),
        "smallest rise of W_S with R": weight.diff(dim=1).min(),
    }
    return [Row(quantity, where, value.item()) for quantity, value in numbers.items()]


# -------------------------------------------------------------------------------- tracker and W_D


def converge(
    desk: Desk, settings: PartialCreditSettings, credit: float
) -> tuple[Float[Array, "seeds N"], Float[Array, "seeds N"]]:
    """The tracker's rates after `frozen_steps` of a frozen policy, and the true ones."""
    steps = settings.frozen_steps
    budget = Budget(settings.batch, settings.rollouts, steps=steps, every=steps)
    frozen, vapo = settings.world(credit, frozen=True), [Setting("vapo", method="vapo")]
    trace = compare(desk, frozen, budget, vapo, desc=f"credit {credit:g}, frozen")["vapo"]
    return trace.tracked[-1], trace.rates[-1]


def tracker_rows(
    credit: float, tracked: Float[Array, "seeds N"], rates: Float[Array, "seeds N"]
) -> list[Row]:
    """To what the tracker's rates have converged.

    Args:
        credit: Of wrong responses.
        tracked: rho at the end.
        rates: True rates of full marks.
    """
    where = f"frozen policy, credit {credit:g}"
    rows = []
    for name, of in (
        ("E[R]", rates + (1 - rates) * credit),
        ("the rate of full marks", rates),
    ):
        error = np.sqrt(np.square(tracked - of).mean(1))
        rows += [
            difference_row(f"rho less {name}, mean", where, tracked.mean(1), of.mean(1)),
            difference_row(f"rho less {name}, root mean square", where, error, 0.0),
        ]
    return rows


def misallocation(
    seen: Float[Tensor, "seeds N"], true: Float[Tensor, "seeds N"], *, phase: str
) -> Float[Array, " seeds"]:
    """The share of W_D's sum that lies on other prompts than it would at the true rates.

    Args:
        seen: Rates that W_D is given.
        true: Rates that it should be given.
        phase: ``early`` or ``bottleneck``.
    """
    given, wanted = (difficulty_weight(rho.double(), phase=phase) for rho in (seen, true))
    shares = [w / w.sum(1, keepdim=True) for w in (given, wanted)]
    return (shares[0] - shares[1]).abs().sum(1).numpy() / 2


def difficulty_rows(credit: float, rates: Float[Tensor, "seeds N"]) -> list[Row]:
    """What E[R] in the place of the rate of full marks does to W_D, at given rates."""
    seen, rows = expected_credit(rates, credit), []
    hard = rates <= rates.quantile(1 / 3, dim=1, keepdim=True)
    for phase in PHASES:
        where = f"starting policy, credit {credit:g}, {phase} W_D"
        given, wanted = (
            (torch.where(hard, difficulty_weight(rho, phase=phase), 0).sum(1) / hard.sum(1)).numpy()
            for rho in (seen, rates)
        )
        moved = misallocation(seen, rates, phase=phase)
        rows += [
            difference_row("share of W_D on the wrong prompts", where, moved, 0.0, unit="share"),
            difference_row("W_D of the hard third, less that at full marks", where, given, wanted),
        ]
    return rows


# ------------------------------------------------------------------------------------- trainings


def train(
    desk: Desk, settings: PartialCreditSettings, credit: float, *, larger_steps: bool = False
) -> dict[str, Scores]:
    """Trains every method under one grading; scores, and the step of the phase's switch or NaN."""
    budget = Budget(batch=settings.batch, rollouts=settings.rollouts, steps=settings.steps)
    chosen = [Setting(method, method=method, stochasticity=settings.weights) for method in METHODS]
    world = settings.world(credit, larger_steps=larger_steps)
    traces = compare(desk, world, budget, chosen, desc=f"credit {credit:g}")
    return {m: scores(trace) | {SWITCH: trace.switched} for m, trace in traces.items()}


def switch_rows(grading: str, found: dict[str, Scores]) -> list[Row]:
    """How often W_D went over to the bottleneck phase.

    A credit above .3 lifts every E[R] out of the low set, without which nothing switches; a smaller
    one slows the relative changes that the printed detector reads.
    """
    return [
        Row(
            quantity="seeds in which the phase switched",
            setting=f"{method}; {grading}",
            value=float(np.isfinite(found[method][SWITCH]).mean()),
            n=len(found[method][SWITCH]),
            unit="share",
        )
        for method in ("cvpo-curriculum", "cvpo")
    ]


def training_rows(
    grading: str, fractional: dict[str, Scores], strict: dict[str, Scores]
) -> list[Row]:
    """True rates of full marks under fractional grading, less those under strict grading."""
    rows = [
        difference_row(
            measure,
            f"{method}; {grading}; less strict grading",
            fractional[method][measure],
            strict[method][measure],
            unit=UNIT,
        )
        for measure, method in product((END, AREA), METHODS)
    ]
    for method in METHODS[1:]:
        gains = [found[method][AREA] - found["vapo"][AREA] for found in (fractional, strict)]
        setting = f"{method}; {grading}; less strict grading"
        rows.append(difference_row(f"gain over vapo in {AREA}", setting, *gains, unit=UNIT))
    return rows


# --------------------------------------------------------------------------------------- the study


def run(settings: PartialCreditSettings, desk: Desk) -> list[Row]:
    """Formula, tracker, W_D and trainings, for each credit."""
    curve = weight_curve(settings)
    desk.table("weight", pd.DataFrame({name: x.flatten().numpy() for name, x in curve.items()}))
    rows = weight_rows(curve)
    strict = train(desk, settings, 0.0)
    rows += switch_rows("strict grading", strict)
    trainings = _flat("strict", strict, settings.seeds)
    for credit in settings.credits:
        rows += tracker_rows(credit, *converge(desk, settings, credit))
        start = Bandit(settings.world(credit), settings.seeds).rates()
        rows += difficulty_rows(credit, start)
        for larger_steps in (False, True):
            grading = f"credit {credit:g}" + (", larger steps" if larger_steps else "")
            fractional = train(desk, settings, credit, larger_steps=larger_steps)
            rows += training_rows(grading, fractional, strict)
            rows += switch_rows(grading, fractional)
            trainings += _flat(grading, fractional, settings.seeds)
    desk.table("trainings", trainings)
    return rows


def _flat(grading: str, found: dict[str, Scores], seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Scores as rows, one for each method and seed."""
    return [
        {"grading": grading, "method": method, "seed": seed}
        | {measure: x[index] for measure, x in of.items()}
        for method, of in found.items()
        for index, seed in enumerate(seeds)
    ]


STUDY = Study(
    name="partial-credit",
    about="fractional rewards: W_S between its branches, the tracker's bias, and what is learned",
    settings=PartialCreditSettings,
    run=run,
)
