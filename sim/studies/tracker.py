"""Does the tracker follow the drift of difficulty (claim 5), and what would follow it better?

Every tracker of `cvpo.trackers` watches the same rollouts. On synthetic drift its estimate is held
against the true rate, after the rollouts of the round have been observed, as the weight W_D uses
it. On a real run there is no truth, so it predicts each epoch's count from what it knew before
(section 5.6 of the method): beta-binomial log-likelihood, and squared error of rho. The first
rounds, in which every tracker still learns where the prompts are, are not scored.

Decisions:

- "Follows" means that forgetting would not have had a much smaller squared error. It is decided
  against all other discounts at once, each at its share of the 5 % error.
- On a real run the error of a prediction holds the binomial noise of the epoch's rate, which no
  tracker can avoid and which would hide the excess. An unbiased estimate of it is taken off first;
  with a single rollout there is none, and no verdict.
- A run whose mean success rate does not surely change, up or down, has no drift to follow, and
  decides nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from scipy.special import betainc
from scipy.stats import betabinom

from cvpo.metrics import Interval, paired_t_interval
from cvpo.trackers import TRACKERS, Tracker
from sim.differences import difference_row
from sim.drift import ROLLOUTS, ROUNDS, SHAPES, Drift, draw_counts, true_rates
from sim.replay import Replay, ReplaySettings, not_measured, rise, rise_row
from sim.study import Desk, Row, SimError, Study, Verdict

CLAIM = 5
MARGIN = 0.05
"""An excess of squared error up to here still counts as following."""
FEWEST_UNITS = 5
"""Seeds or prompts below which nothing is claimed."""
COVERAGE = 0.9
"""Nominal coverage of the credible intervals."""
JUMP_TO, ROUNDS_BEFORE, LONGEST = 0.9, 20, 1000
"""The jump of section 5.1: rounds of failures, then this rate; and when waiting ends."""
SMALLEST = 1e-300
"""Of a Beta distribution's parameters."""
SHARES = (0.5, 0.9)
"""Of a jump, to be covered."""

Discount = Annotated[float, Field(gt=0, le=1)]
Growth = Annotated[float, Field(gt=0, le=1)]


class TrackerSettings(ReplaySettings):
    """Keys of the tracker study."""

    num_prompts: int = Field(default=2000, ge=1)
    """Prompts of the synthetic worlds. Errors are means over prompts: more change little."""
    rounds: int = Field(default=ROUNDS, ge=2)
    """Rounds of the synthetic worlds."""
    growths: tuple[Growth, ...] = Field(default=(0.03, 0.1), min_length=1)
    """Mean growth of a logit in a round, slow to fast."""
    burn_in: int = Field(default=5, ge=1)
    """Rounds that are observed and not scored."""
    discounts: tuple[Discount, ...] = (0.98, 0.95, 0.9, 0.8, 0.75, 0.7, 0.5, 0.3)
    """Of the Beta tracker, beside the paper's 1."""
    dbb_discounts: tuple[Discount, ...] = (0.75, 0.5)
    """Of the DBB tracker; the two of its source."""
    windows: tuple[Annotated[int, Field(ge=1)], ...] = (1, 3, 5, 10)
    """Of the moving average."""

    @model_validator(mode="after")
    def _scores_something(self) -> TrackerSettings:
        if self.burn_in >= self.rounds:
            raise ValueError(f"burn_in must lie below rounds ({self.rounds}), got {self.burn_in}")
        return self


# ------------------------------------------------------------------------------- the trackers


@dataclass(frozen=True)
class Contender:
    """A tracker and its one constant."""

    kind: str
    """Name in `TRACKERS`."""
    constant: float | None = None
    """Discount, or window of a moving average; None: the source's own constants."""

    def __str__(self) -> str:
        return self.kind if self.constant is None else f"{self.kind} {self.constant:g}"

    def build(self, first: Float[np.ndarray, " N"]) -> Tracker:
        """A tracker that has observed nothing.

        Args:
            first: Success rates of the first round. Decision: they are what BOTS takes for its
                fixed difficulty, so that no tracker needs rollouts of its own.
        """
        constants: dict[str, float | torch.Tensor] = {}
        if self.kind == "bots":
            constants["difficulty"] = torch.from_numpy(1 - first)
        elif self.kind == "moving-average" and self.constant is not None:
            constants["window"] = int(self.constant)
        elif self.constant is not None:
            constants["discount"] = self.constant
        return TRACKERS[self.kind](len(first), **constants)


PAPER = Contender("beta", 1.0)


def contenders(settings: TrackerSettings) -> list[Contender]:
    """The paper's tracker first, then its discounts, then the others."""
    return [
        PAPER,
        *(Contender("beta", discount) for discount in settings.discounts if discount != 1),
        *(Contender("dbb", discount) for discount in settings.dbb_discounts),
        Contender("bots"),
        *(Contender("moving-average", window) for window in settings.windows),
    ]


# -------------------------------------------------------------------------------------- scores


class Scores(NamedTuple):
    """What each prompt's tracker said in each round; NaN where the prompt has no such round."""

    log_likelihood: Float[np.ndarray, "N E"]
    """Of the round's count, from the posterior before it (nats)."""
    prediction_error: Float[np.ndarray, "N E"]
    """(rho before the round - rate of the round's rollouts)^2."""
    truth_error: Float[np.ndarray, "N E"]
    """(rho after the round - true rate)^2; NaN without a truth."""
    covered: Float[np.ndarray, "N E"]
    """1 if the credible interval after the round holds the true rate, 0 if not."""


def follow(
    tracker: Tracker,
    counts: Int[np.ndarray, "N E"],
    *,
    trials: int,
    mask: Bool[np.ndarray, "N E"] | None = None,
    rates: Float[np.ndarray, "N E"] | None = None,
) -> Scores:
    """Lets a tracker observe round after round, and scores it.

    The central interval of a Beta posterior holds p exactly if the distribution function at p lies
    between its two tail probabilities, which costs no quantile.

    Args:
        tracker: Of N prompts; it is changed.
        counts: Successes.
        trials: Rollouts of a prompt in a round.
        mask: True where a prompt has that round; all when None.
        rates: True success rates, where they are known.
    """
    scores = Scores(*(np.full(counts.shape, math.nan) for _ in Scores._fields))
    tail = (1 - COVERAGE) / 2
    for round_ in range(counts.shape[1]):
        there = np.arange(len(counts)) if mask is None else np.flatnonzero(mask[:, round_])
        at = (there, round_)
        s = counts[at]
        alpha, beta, rho = _posterior(tracker, there)
        scores.log_likelihood[at] = betabinom.logpmf(s, trials, alpha, beta)
        scores.prediction_error[at] = (rho - s / trials) ** 2
        prompt = torch.from_numpy(there)
        tracker.observe(prompt, torch.full((len(there),), trials), torch.from_numpy(s))
        if rates is not None:
            p = rates[at]
            alpha, beta, rho = _posterior(tracker, there)
            below = betainc(alpha, beta, p)
            scores.truth_error[at] = (rho - p) ** 2
            scores.covered[at] = (below >= tail) & (below <= 1 - tail)
    return scores


def _posterior(
    tracker: Tracker, prompt: Int[np.ndarray, " M"]
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """alpha, beta and rho of these prompts.

    A tracker that forgets its prior may reach alpha or beta = 0, where the distributions are not
    defined; `SMALLEST` is their limit.
    """
    alpha, beta, rho = (x.numpy()[prompt] for x in (tracker.alpha, tracker.beta, tracker.rho))
    return alpha.clip(min=SMALLEST), beta.clip(min=SMALLEST), rho


def lag(tracker: Tracker, share: float, *, trials: int = ROLLOUTS) -> float:
    """Rounds until rho has covered this share of a jump from 0 to `JUMP_TO`; NaN: never.

    20 rounds of failures, then the expected successes of a prompt with the new rate.

    Args:
        tracker: Of one prompt; it is changed.
        share: In (0, 1).
        trials: Rollouts of a round.
    """
    prompt, k = torch.tensor([0]), torch.tensor([trials])
    failures = torch.zeros(1)
    expected = torch.tensor([trials * JUMP_TO], dtype=torch.float64)
    for _ in range(ROUNDS_BEFORE):
        tracker.observe(prompt, k, failures)
    for round_ in range(1, LONGEST + 1):
        tracker.observe(prompt, k, expected)
        if tracker.rho.item() >= share * JUMP_TO - 1e-9:
            return float(round_)
    return math.nan


# ------------------------------------------------------------------------------------ verdicts


def ratio_interval(
    numerator: Float[np.ndarray, " n"],
    denominator: Float[np.ndarray, " n"],
    *,
    confidence: float = 0.95,
) -> Interval:
    """sum(numerator) / sum(denominator) over independent units, with its t interval.

    The ratio r varies as the mean of ``numerator - r denominator`` over that of the denominator
    (first order). It has no interval where the denominator may as well be 0.

    Args:
        numerator: One number for each unit: a seed or a prompt.
        denominator: The same; without a positive sum the ratio is NaN.
        confidence: Nominal coverage.
    """
    below = paired_t_interval(denominator, np.zeros_like(denominator), confidence=confidence)
    scale = below.estimate
    r = float(numerator.mean() / scale) if scale > 0 else math.nan
    if not below.low > 0:
        return replace(below, estimate=r, low=math.nan, high=math.nan, standard_error=math.nan)
    rest = paired_t_interval(numerator, r * denominator, confidence=confidence)
    return replace(
        rest,
        estimate=r,
        low=r + rest.low / scale,
        high=r + rest.high / scale,
        standard_error=rest.standard_error / scale,
    )


def excesses(
    paper: Float[np.ndarray, " n"], others: Mapping[Contender, Float[np.ndarray, " n"]]
) -> dict[Contender, Interval]:
    """How much larger the paper's error is than each other's, as a share of it.

    All intervals hold together at 95 % (Bonferroni).

    Args:
        paper: Summed squared error of the paper's tracker by unit (seed or prompt).
        others: The same of each tracker it is compared with, at least one.
    """
    confidence = 1 - 0.05 / len(others)
    found = {}
    for contender, error in others.items():
        ratio = ratio_interval(paper, error, confidence=confidence)
        found[contender] = replace(
            ratio, estimate=ratio.estimate - 1, low=ratio.low - 1, high=ratio.high - 1
        )
    return found


def tracking_verdict(excess: Sequence[Interval]) -> Verdict:
    """On "the tracker follows the drift": does no forgetting cost less than `MARGIN`?

    Args:
        excess: `excesses` of the paper's tracker over each discount.
    """
    if not excess or min(min(interval.sizes) for interval in excess) < FEWEST_UNITS:
        return "undecided"
    if any(interval.low > MARGIN for interval in excess):
        return "fails"
    return "holds" if all(interval.high <= MARGIN for interval in excess) else "undecided"


def _excess_row(where: str, errors: Mapping[Contender, Float[np.ndarray, " n"]]) -> Row:
    """The paper's squared error against the best discount's, with the verdict on all of them."""
    discounted = {c: error for c, error in errors.items() if c.kind == "beta" and c != PAPER}
    if not discounted:
        return Row("excess squared error of no forgetting", f"{where}; no discount", math.nan, n=0)
    found = excesses(errors[PAPER], discounted)
    best = min(discounted, key=lambda contender: float(discounted[contender].sum()))
    return Row(
        "excess squared error of no forgetting",
        f"{where}, against {best}",
        found[best].estimate,
        found[best].low,
        found[best].high,
        n=len(errors[PAPER]),
        unit="share",
        paper="follows the drift",
        claim=CLAIM,
        verdict=tracking_verdict(list(found.values())),
    )


def _unclaimed(row: Row) -> Row:
    return replace(row, claim=None, paper="", verdict="")


# ------------------------------------------------------------------------------ the real run


def on_replay(
    contender: Contender, replay: Replay, burn_in: int
) -> dict[str, Float[np.ndarray, " N"]]:
    """Sums over the scored epochs of each prompt.

    Returns:
        ``log_likelihood`` (nats), ``squared_error``, the part of that which is ``noise`` of the
        epochs' own rates, and the number of ``predictions``.
    """
    tracker = contender.build(replay.counts[:, 0] / replay.trials)
    scores = follow(tracker, replay.counts, trials=replay.trials, mask=replay.mask)
    scored = replay.mask[:, burn_in:]
    return {
        "log_likelihood": scores.log_likelihood[:, burn_in:].sum(axis=1, where=scored),
        "squared_error": scores.prediction_error[:, burn_in:].sum(axis=1, where=scored),
        "noise": rate_noise(replay.counts[:, burn_in:], replay.trials).sum(axis=1, where=scored),
        "predictions": scored.sum(axis=1).astype(np.float64),
    }


def rate_noise(counts: Int[np.ndarray, "*shape"], trials: int) -> Float[np.ndarray, "*shape"]:
    """Unbiased estimate of the variance p (1 - p) / k of s / k: s (k - s) / (k^2 (k - 1)).

    Args:
        counts: s, successes.
        trials: k; with one the noise cannot be told from the rate, and is NaN.
    """
    if trials == 1:
        return np.full(counts.shape, math.nan)
    rate = counts / trials
    noise: Float[np.ndarray, "*shape"] = rate * (1 - rate) / (trials - 1)
    return noise


def real_rows(
    found: Mapping[Contender, Mapping[str, Float[np.ndarray, " N"]]], replay: Replay
) -> list[Row]:
    """How well each tracker predicts the real run. Intervals are over prompts.

    Args:
        found: `on_replay` of each tracker.
        replay: The run.
    """
    predictions = found[PAPER]["predictions"]
    scored = predictions > 0
    rose = rise(replay)
    rows = [rise_row(rose)]
    for quantity, key, unit in (
        ("log-likelihood of a prediction", "log_likelihood", "nats"),
        ("squared error of rho", "squared_error", ""),
    ):
        for contender, sums in found.items():
            ratio = ratio_interval(sums[key][scored], predictions[scored])
            rows.append(
                Row(
                    quantity,
                    f"real run, {predictions.sum():.0f} predictions: {contender}",
                    ratio.estimate,
                    ratio.low,
                    ratio.high,
                    n=int(scored.sum()),
                    unit=unit,
                    paper="the paper's tracker" if contender == PAPER else "",
                    claim=CLAIM,
                )
            )
    errors = {contender: sums["squared_error"][scored] for contender, sums in found.items()}
    rows.append(_unclaimed(_excess_row("real run", errors)))
    if replay.trials == 1:
        return rows
    beyond = {
        contender: error - found[contender]["noise"][scored] for contender, error in errors.items()
    }
    excess = _excess_row("real run, less the rates' noise", beyond)
    drifts = rose.low > 0 or rose.high < 0
    return [*rows, excess if drifts else _unclaimed(excess)]


# -------------------------------------------------------------------------- synthetic drift


def worlds(settings: TrackerSettings) -> dict[str, Drift]:
    """Policies that improve in every shape and speed, one that stops half-way, and a frozen one."""
    size = Drift(num_prompts=settings.num_prompts, rounds=settings.rounds)
    moving = {
        f"{shape}, growth {growth:g}": replace(size, shape=shape, growth=growth)
        for growth, shape in itertools.product(settings.growths, SHAPES)
    }
    return {
        **moving,
        "plateau": replace(size, growth=settings.growths[-1], stop=settings.rounds // 2),
        "frozen": replace(size, stop=0),
    }


@dataclass(frozen=True)
class Means:
    """Means of the scores over prompts: of the scored rounds by seed, and of all by round."""

    by_seed: dict[str, Float[np.ndarray, " S"]]
    by_round: dict[str, Float[np.ndarray, " E"]]


def on_drift(contender: Contender, drift: Drift, seeds: Sequence[int], burn_in: int) -> Means:
    """Scores a tracker in all seeds of one world at once: S x N prompts side by side."""
    rates = true_rates(drift, seeds)
    counts = draw_counts(rates, seeds).reshape(-1, drift.rounds)
    tracker = contender.build(counts[:, 0] / ROLLOUTS)
    scores = follow(tracker, counts, trials=ROLLOUTS, rates=rates.reshape(counts.shape))
    return Means(
        by_seed={
            name: score[:, burn_in:].reshape(len(seeds), -1).mean(axis=1)
            for name, score in scores._asdict().items()
        },
        by_round={name: score.mean(axis=0) for name, score in scores._asdict().items()},
    )


def world_rows(world: str, found: Mapping[Contender, Means], *, improving: bool) -> list[Row]:
    """The paper's tracker and the best one in one world. Intervals are over seeds.

    Args:
        world: Its name.
        found: Every tracker's scores there.
        improving: Whether there is drift that a tracker has to follow.
    """
    errors = {contender: means.by_seed["truth_error"] for contender, means in found.items()}
    best = min(errors, key=lambda contender: float(errors[contender].mean()))
    excess = _excess_row(world, errors)
    rows = [excess if improving else _unclaimed(excess)]
    for contender in dict.fromkeys((PAPER, best)):
        where = f"{world}: {contender}{' (best of all)' if contender == best else ''}"
        rows += [
            difference_row("squared error of rho against the truth", where, errors[contender], 0.0),
            difference_row(
                f"coverage of the {COVERAGE:.0%} credible interval",
                where,
                found[contender].by_seed["covered"],
                0.0,
                unit="share",
            ),
        ]
    return rows


def lag_rows(chosen: Sequence[Contender]) -> list[Row]:
    """Rounds that each tracker needs for a half and for most of a jump."""
    rows = []
    for share, contender in itertools.product(SHARES, chosen):
        rounds = lag(contender.build(np.zeros(1)), share)
        where = f"{contender}{f'; not in {LONGEST}' if math.isnan(rounds) else ''}"
        quantity = f"rounds to {share:.0%} of a jump to {JUMP_TO:g}"
        rows.append(Row(quantity, where, rounds, unit="rounds"))
    return rows


# ------------------------------------------------------------------------------------ the run


def run(settings: TrackerSettings, desk: Desk) -> list[Row]:
    """Real run, synthetic drift, lags; the tables hold every tracker in every world and round."""
    chosen = contenders(settings)
    replay = settings.read_replay()
    real = [not_measured(CLAIM)] if replay is None else _real(replay, chosen, settings, desk)
    return real + _synthetic(chosen, settings, desk) + lag_rows(chosen)


def _real(
    replay: Replay, chosen: Sequence[Contender], settings: TrackerSettings, desk: Desk
) -> list[Row]:
    if replay.lengths.max() <= settings.burn_in:
        raise SimError(
            f"burn_in: no prompt of {settings.replay} has more than {settings.burn_in} epochs, so "
            "none would be scored; lower burn_in or set replay=null"
        )
    work = [(contender, replay, settings.burn_in) for contender in chosen]
    found = dict(zip(chosen, desk.map(on_replay, work, "real run"), strict=True))
    return real_rows(found, replay)


def _synthetic(chosen: Sequence[Contender], settings: TrackerSettings, desk: Desk) -> list[Row]:
    there = worlds(settings)
    work = [
        (contender, drift, settings.seeds, settings.burn_in)
        for drift in there.values()
        for contender in chosen
    ]
    means = iter(desk.map(on_drift, work, "synthetic drift"))
    found = {world: {contender: next(means) for contender in chosen} for world in there}
    units = {"log_likelihood": "nats"}
    desk.table("tracker_seeds", _records(found, "by_seed", settings.seeds, "seed"), units)
    desk.table(
        "tracker_rounds", _records(found, "by_round", range(settings.rounds), "round"), units
    )
    return [
        row
        for world, drift in there.items()
        for row in world_rows(world, found[world], improving=drift.stop is None)
    ]


def _records(
    found: Mapping[str, Mapping[Contender, Means]], part: str, labels: Sequence[int], name: str
) -> list[dict[str, Any]]:
    return [
        {"world": world, "tracker": str(contender), name: label}
        | {key: float(values[index]) for key, values in getattr(means, part).items()}
        for world, by_contender in found.items()
        for contender, means in by_contender.items()
        for index, label in enumerate(labels)
    ]


STUDY = Study(
    name="tracker",
    about="how well trackers follow the drift of difficulty, real and synthetic",
    settings=TrackerSettings,
    run=run,
)
