"""What may be wrong with a run, in plain words: rules from a log's frames to a warning or nothing.

A rule looks at the last steps that logged its metric, so that what a training has got over is not
held against it. Its text names the metric, its value, the threshold, and what to do. A metric that
the log lacks says nothing.

Decision: the thresholds are rules of thumb of the field, not of the paper; they stand here as
constants, and every text states its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.ls import gaps
from analysis.sources import ranges

RECENT = 10
"""Logged steps that stand for the present, and for the beginning."""

EXPLAINED_VARIANCE = 0.1
"""Below it the critic is hardly better than a constant; value pretraining asks for as much."""
WEIGHT_VARIATION = 0.02
"""sd(W_S) / mean(W_S) within an outcome below which the weight is a constant."""
ENTROPY_LEFT = 0.2
LENGTH_LEFT = 0.5
"""Shares of the beginning's entropy and length, below which they have collapsed."""
CLIPPED = 0.2
TRUNCATED = 0.1
ANSWERED = 0.8
ALIKE = 0.8
"""Shares: of tokens clipped, responses cut off, responses with an answer, groups without contrast.
"""
ENGINE_GAP = 0.05
"""Nats per token between the rollout engine and the trainer: a ratio off by 5 %."""

_FINITE = ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm")
_SKIPPED = ("policy/skipped_updates", "critic/skipped_updates")


@dataclass(frozen=True)
class Frames:
    """What the rules look at.

    Attributes:
        metrics: a row per logged step, ascending: step and the scalars, NaN where not logged.
        events: step, kind, message; maybe empty.
    """

    metrics: pd.DataFrame
    events: pd.DataFrame


Rule = Callable[[Frames], str | None]


def warnings(frames: Frames) -> dict[str, str]:
    """The name of each rule that fires, and what it says; in the order of `RULES`."""
    found = {rule.__name__.replace("_", " "): rule(frames) for rule in RULES}
    return {name: text for name, text in found.items() if text is not None}


# --------------------------------------------------------------------------------------- rules


def critic_explains_little(frames: Frames) -> str | None:
    """The values tell next to nothing of the returns; W_S, made of them, is noise then."""
    name = _first_held(frames, "critic/explained_variance", "critic/vf_explained_var")
    recent = _recent(frames, name)
    if recent is None or recent.value >= EXPLAINED_VARIANCE:
        return None
    variation = [_recent(frames, f"weights/w_s_cv_{outcome}") for outcome in _OUTCOMES]
    varies = max((found.value for found in variation if found), default=0.0)
    consequence = (
        f" W_S still varies (sd / mean {varies:.3g}), so it follows the critic's noise."
        if varies >= WEIGHT_VARIATION
        else ""
    )
    return (
        f"{recent}; below {EXPLAINED_VARIANCE:g} the critic is hardly better than a constant."
        f"{consequence} Pretrain it for longer (pretraining.max_steps), raise critic.lr, or look "
        "for a reward that cannot be foreseen."
    )


def weight_is_a_constant(frames: Frames) -> str | None:
    """W_S hardly varies among answers of one outcome, and so ranks none of them.

    A weight that does not vary at all is meant so: its method or arm has none.
    """
    told = []
    for outcome in _OUTCOMES:
        cv = _recent(frames, f"weights/w_s_cv_{outcome}")
        mean = _recent(frames, f"weights/w_s_mean_{outcome}")
        if cv and 1e-6 < cv.value < WEIGHT_VARIATION:
            told.append(f"{cv} on a mean of {mean.value:.3g}" if mean else str(cv))
    if not told:
        return None
    return (
        f"{'; '.join(told)}: under {WEIGHT_VARIATION:g} the weight is a constant, and sigma "
        "ranks nothing. Raise stochasticity.lambda_p and lambda_n, set "
        "stochasticity.sharpness_unit=deviation_sd, and compare with the arm constant."
    )


def entropy_collapsed(frames: Frames) -> str | None:
    """The policy has stopped exploring."""
    fall = _fall(frames, "policy/entropy", ENTROPY_LEFT)
    return fall and (
        f"{fall}: little is left to explore. Raise algorithm.clip_high or "
        "algorithm.entropy_coefficient, or lower actor.lr."
    )


def length_collapsed(frames: Frames) -> str | None:
    """Responses have become short."""
    fall = _fall(frames, "length/mean", LENGTH_LEFT)
    return fall and (
        f"{fall}: read the responses below for steps of reasoning left out. Check lambda_policy "
        "(algorithm.length_adaptive_alpha) and what the reward gives for short answers."
    )


def clipping_too_often(frames: Frames) -> str | None:
    """The policy moves so far within a step that much of the batch has no gradient."""
    low, high = (_recent(frames, f"policy/clip_{end}") for end in ("low", "high"))
    share = sum(found.value for found in (low, high) if found)
    both = None if low or high else _recent(frames, "actor/pg_clipfrac")
    if max(share, both.value if both else 0.0) <= CLIPPED:
        return None
    told = " and ".join(str(found) for found in (low, high, both) if found)
    return (
        f"{told}: over {CLIPPED:.0%} of the tokens have no gradient. Lower actor.lr, or take "
        "fewer actor.minibatches or actor.passes."
    )


def truncated_too_often(frames: Frames) -> str | None:
    """Responses run into the length limit and are graded as they stand."""
    recent = _recent(frames, "truncated/rate")
    if recent is None or recent.value <= TRUNCATED:
        return None
    return (
        f"{recent}, over {TRUNCATED:.0%}: what is cut off counts as wrong, however it would have "
        "ended. Raise rollout.max_tokens, or set algorithm.overlong_penalty."
    )


def answers_not_found(frames: Frames) -> str | None:
    """Responses end without an answer that the verifier can read."""
    recent = _recent(frames, "format/rate")
    if recent is None or recent.value >= ANSWERED:
        return None
    return (
        f"{recent}, under {ANSWERED:.0%}: the others have no answer to grade and count as wrong. "
        "Check the prompt template and the end-of-sequence token."
    )


def groups_without_contrast(frames: Frames) -> str | None:
    """Most groups are all right or all wrong, and a grouped advantage is 0 in them."""
    correct, wrong = (_recent(frames, f"groups/all_{outcome}") for outcome in ("correct", "wrong"))
    if correct is None or wrong is None or correct.value + wrong.value <= ALIKE:
        return None
    return (
        f"{correct}, {wrong}; together over {ALIKE:.0%}: few prompts tell good from bad. Take "
        "prompts of middling difficulty (rollout.sampler), or more samples of each."
    )


def updates_skipped(frames: Frames) -> str | None:
    """Updates whose gradient was not finite were left out."""
    counts = {name: float(frames.metrics.get(name, pd.Series([0.0])).sum()) for name in _SKIPPED}
    told = [f"{name} adds up to {count:g}" for name, count in counts.items() if count > 0]
    steps = frames.events.loc[frames.events["kind"] == "skipped_step", "step"]
    if len(steps):
        told.append(f"skipped_step events at step {ranges(map(int, steps))}")
    if not told:
        return None
    return (
        f"{', '.join(told)} (expected 0): the gradient was not finite. Lower the learning rate or "
        "max_grad_norm, and look at the steps before."
    )


def losses_not_finite(frames: Frames) -> str | None:
    """A loss or a gradient norm was logged at other steps, but is no number at these."""
    told = []
    for name in _FINITE:
        values = frames.metrics.get(name)
        if values is None or values.isna().all():
            continue
        first, last = values.first_valid_index(), frames.metrics.index[-1]
        within = frames.metrics.loc[first:last]
        lost = within.loc[~np.isfinite(within[name]), "step"]
        # one that is logged now and then only is no sign of anything
        if 0 < len(lost) < len(within) / 2:
            told.append(f"{name} at step {ranges(map(int, lost))}")
    if not told:
        return None
    return (
        f"No finite number (expected at every step): {', '.join(told)}. Look for overflow: "
        "precision, learning rate, log-probability ratios."
    )


def engines_disagree(frames: Frames) -> str | None:
    """The rollout engine and the trainer give the same tokens different probabilities."""
    recent = _recent(frames, "rollout/logprob_gap")
    if recent is None or recent.value <= ENGINE_GAP:
        return None
    return (
        f"{recent} nats per token, over {ENGINE_GAP:g}: the batch is more off-policy than it "
        "seems. Check that weights are synchronised, and the precision of the rollout engine."
    )


def steps_missing(frames: Frames) -> str | None:
    """The log passes over steps."""
    lost = gaps(frames.metrics["step"].astype(int).tolist())
    if not lost:
        return None
    return (
        f"No metrics of {len(lost)} steps (expected none missing): {ranges(lost)}. Curves are "
        "drawn across them; look for a crash or a lost file there."
    )


RULES: tuple[Rule, ...] = (
    critic_explains_little,
    weight_is_a_constant,
    entropy_collapsed,
    length_collapsed,
    clipping_too_often,
    truncated_too_often,
    answers_not_found,
    groups_without_contrast,
    updates_skipped,
    losses_not_finite,
    engines_disagree,
    steps_missing,
)


# --------------------------------------------------------------------------------------- phase


def phase(frames: Frames, config: Mapping[str, Any]) -> str | None:
    """Where the difficulty tracker stands and why, as a sentence; None if nothing was tracked.

    Args:
        frames: the log's.
        config: the run's, for the thresholds and for whether W_D is used.
    """
    logged = frames.metrics.get("curriculum/phase")
    if logged is None or logged.isna().all():
        return None
    switches = frames.events.loc[frames.events["kind"] == "phase_switch"]
    if len(switches):
        said = f"Bottleneck since step {switches['step'].iloc[0]}: {switches['message'].iloc[0]}."
    elif logged.dropna().iloc[-1] > 0:
        said = "Bottleneck; the log has no event that says since when or why."
    else:
        said = f"Early, never switched. {_last_test(frames, config)}"
    declared = config.get("declared")
    used = declared.get("curriculum", True) if isinstance(declared, Mapping) else True
    return said if used else f"{said} The method has no W_D; its tracker only watches."


def _last_test(frames: Frames, config: Mapping[str, Any]) -> str:
    """What the detector saw at the end of the last round."""
    columns = [f"curriculum/{end}_{what}" for end in ("low", "high") for what in ("count", "delta")]
    if not set(columns) <= set(frames.metrics.columns):
        return "The log does not say what the detector saw."
    tests = frames.metrics.dropna(subset=[columns[0], columns[2]])
    if tests.empty:
        return "No round is over yet, so the detector has not looked."
    row = tests.iloc[-1]
    curriculum = config.get("curriculum")
    detector = curriculum.get("detector", "") if isinstance(curriculum, Mapping) else ""
    thresholds = _printed_thresholds(curriculum) if detector == "printed" else ("", "")
    sets = [
        f"the {end} set has {count:g} prompts"
        + (f" and a change of {delta:+.3f}{threshold}" if math.isfinite(delta) else "")
        for end, count, delta, threshold in (
            ("low", row[columns[0]], row[columns[1]], thresholds[0]),
            ("high", row[columns[2]], row[columns[3]], thresholds[1]),
        )
    ]
    asked = "Both have to stop at once for the phase to switch."
    return f"At the last test (step {int(row['step'])}) {' and '.join(sets)}. {asked}"


def _printed_thresholds(curriculum: Any) -> tuple[str, str]:
    low, high = curriculum.get("low_delta"), curriculum.get("high_delta")
    return f" (stalled within {low:g})", f" (slowed at {high:g} or less)"


# ------------------------------------------------------------------------------------- metrics

_OUTCOMES = ("correct", "incorrect")


@dataclass(frozen=True)
class _Mean:
    """The mean of a metric over the first or the last steps that logged it."""

    name: str
    value: float
    steps: tuple[int, int]

    def __str__(self) -> str:
        first, last = self.steps
        when = f"step {last}" if first == last else f"steps {first}-{last}"
        return f"{self.name} is {self.value:.3g} over {when}"


def _mean(name: str, rows: pd.DataFrame) -> _Mean | None:
    if rows.empty:
        return None
    steps = int(rows["step"].iloc[0]), int(rows["step"].iloc[-1])
    return _Mean(name, float(rows[name].mean()), steps)


def _logged(frames: Frames, name: str) -> pd.DataFrame:
    if name not in frames.metrics:
        return pd.DataFrame(columns=["step", name])
    rows: pd.DataFrame = frames.metrics.loc[np.isfinite(frames.metrics[name]), ["step", name]]
    return rows


def _recent(frames: Frames, name: str) -> _Mean | None:
    return _mean(name, _logged(frames, name).tail(RECENT))


def _fall(frames: Frames, name: str, left: float) -> str | None:
    """A metric that has come down to less than a share of its beginning, in words."""
    rows = _logged(frames, name)
    first, last = _mean(name, rows.head(RECENT)), _mean(name, rows.tail(RECENT))
    if len(rows) < 2 * RECENT or first is None or last is None:
        return None
    if last.value >= left * first.value:
        return None
    return f"{last}, less than {left:.0%} of the {first.value:.3g} it began with"


def _first_held(frames: Frames, *names: str) -> str:
    return next((name for name in names if name in frames.metrics), names[0])
