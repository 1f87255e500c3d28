"""The difficulty curriculum: a tracker of every prompt's success rate, and W_D (eq. 17-26).

Algorithm 2: each prompt starts at Beta(1, 1); a step's rollouts are observed *before* they are
weighted; once a round a detector asks whether the hard prompts have stalled while the easy ones
have slowed down, and if so the weight's curve changes for good from ``early`` to ``bottleneck``.

Decisions where the paper is silent are fields of `CurriculumConfig`; the defaults are the paper's.
The printed detector divides sampling noise by rho and, without forgetting, passes at about the 20th
visit of never-solved prompts whatever the policy does. ``detector="pooled"`` measures instead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from cvpo.trackers import BetaTracker, Restorable, check_constants, check_fields, check_prompts

Phase = Literal["early", "bottleneck"]
PHASES: tuple[Phase, ...] = ("early", "bottleneck")


class Curve(NamedTuple):
    """Constants of W_D's two sigmoids: ``sigmoid(k1 (rho - c1)) sigmoid(-k2 (rho - c2))``."""

    k1: float
    c1: float
    k2: float
    c2: float


EARLY = Curve(1.6, -0.2, 2.0, 1.2)
BOTTLENECK = Curve(4.1, -0.1, 2.0, 0.9)


def difficulty_weight(
    rho: Float[Tensor, "*shape"], *, phase: str, constants: Curve | None = None
) -> Float[Tensor, "*shape"]:
    """W_D (eq. 25-26): the weight of a prompt with success rate rho.

    ``early``: ``2 sigmoid(k1 (rho - c1)) sigmoid(-k2 (rho - c2))``, which varies by 8 % only.
    ``bottleneck``: the same with its own constants, times ``1 - rho^2``. It demotes easy prompts (0
    at rho = 1, which a Beta(1, 1) prior never reaches) and hardly promotes hard ones (1.03 at 0).

    Args:
        rho: Success rates in [0, 1], any shape.
        phase: ``early`` or ``bottleneck``.
        constants: The curve's (k1, c1, k2, c2); the paper's for that phase when None.

    Raises:
        ValueError: Unknown phase.
    """
    if phase not in PHASES:
        raise ValueError(f"difficulty_weight: phase must be one of {PHASES}, got {phase!r}")
    default = EARLY if phase == "early" else BOTTLENECK
    k1, c1, k2, c2 = default if constants is None else constants
    rho = rho.to(torch.promote_types(rho.dtype, torch.float32))
    weight = 2 * torch.sigmoid(k1 * (rho - c1)) * torch.sigmoid(-k2 * (rho - c2))
    return weight if phase == "early" else weight * (1 - rho.square())


@dataclass(frozen=True)
class CurriculumConfig:
    """Tracker, detector and curve. Defaults: the paper's thresholds, the printed detector."""

    discount: float = 1.0
    """Of the tracker, in (0, 1]. The paper never forgets (1); .8-.9 follow real drift better."""
    detector: Literal["printed", "pooled"] = "printed"
    quantifier: Literal["mean", "all", "fraction"] = "mean"
    """How many prompts of a set the printed test asks: their mean, all, or `fraction` of them."""
    fraction: float = 0.9
    min_prompts: int = 1
    """A set with fewer prompts never counts as stopped. At least 1: empty sets decide nothing."""
    low: float = 0.3
    """The low set: rho <= low."""
    high: float = 0.8
    """The high set: rho >= high."""
    low_delta: float = 0.05
    """Printed test: the low set has stalled if ``|Delta| <= low_delta``."""
    high_delta: float = 0.03
    """Printed test: the high set has slowed if ``Delta <= high_delta``."""
    window: int = 8
    """Pooled test: rounds it looks back, even; window + 3 rounds must be complete. Its sets hold
    prompts that had been observed at least twice when they were fixed."""
    margin: float = 0.01
    """Pooled test: stopped if the rise a round is surely below ``margin`` of the rate."""
    z: float = 1.645
    """Pooled test: normal quantile of the one-sided bound (1.645: 95 %)."""
    early: Curve = EARLY
    bottleneck: Curve = BOTTLENECK

    def __post_init__(self) -> None:
        """Refuses what the curriculum could not carry out.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        rules = {
            "discount": (0 < self.discount <= 1, "in (0, 1]"),
            "detector": (self.detector in ("printed", "pooled"), "printed or pooled"),
            "quantifier": (self.quantifier in ("mean", "all", "fraction"), "mean, all, fraction"),
            "fraction": (0 < self.fraction <= 1, "in (0, 1]"),
            "min_prompts": (self.min_prompts >= 1, "at least 1"),
            "low": (0 <= self.low < self.high, "at least 0 and below high"),
            "high": (self.high <= 1, "at most 1"),
            "low_delta": (self.low_delta >= 0, "at least 0"),
            "high_delta": (not math.isnan(self.high_delta), "a number"),
            "window": (self.window >= 2 and self.window % 2 == 0, "even and at least 2"),
            "margin": (self.margin >= 0, "at least 0"),
            "z": (self.z >= 0, "at least 0"),
            "early": (_is_curve(self.early), "four finite numbers (k1, c1, k2, c2)"),
            "bottleneck": (_is_curve(self.bottleneck), "four finite numbers (k1, c1, k2, c2)"),
        }
        for field, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)!r}")


@dataclass(frozen=True)
class RoundReport:
    """What the detector saw at the end of a round, and why the phase did or did not change."""

    round: int
    """Rounds completed, this one included."""
    phase: Phase
    """The phase from the next step on."""
    switched: bool
    reason: str
    low_count: int
    high_count: int
    low_delta: float
    """Printed: mean |Delta| of the low set. Pooled: its rise a round, relative to its rate."""
    high_delta: float
    """Printed: mean Delta of the high set. Pooled: its rise a round, relative to its rate."""
    low_stopped: bool
    high_stopped: bool


class BottleneckDetector:
    """Asks once a round whether hard prompts have stalled while easy ones slowed down (5.3, 5.5).

    It keeps the phase, which changes once and for good, and the rounds that its test looks back on.
    """

    def __init__(self, config: CurriculumConfig | None = None) -> None:
        """Starts in the early phase, before the first round.

        Args:
            config: `CurriculumConfig`; the paper's when None.
        """
        self.config = config or CurriculumConfig()
        self.phase: Phase = "early"
        self.rounds = 0
        # The last rounds, as the pooled test reads them: what was counted in each round, and who
        # was in the low and in the high set at its end. The set fixed `window` rounds ago stands
        # in the entry before the window, hence window + 1 entries.
        self._history: deque[_Round] = deque(maxlen=self.config.window + 1)

    @torch.no_grad()
    def end_round(
        self,
        *,
        trials: Float[Tensor, " N"],
        successes: Float[Tensor, " N"],
        rho: Float[Tensor, " N"],
        delta: Float[Tensor, " N"],
        visits: Int[Tensor, " N"],
    ) -> RoundReport:
        """Runs the test on the round that ends here.

        Args:
            trials: Rollouts of each prompt in this round, [N].
            successes: Their summed correctness, [N].
            rho: The tracker's success rates after the round, [N].
            delta: Its relative changes, NaN where there is none, [N].
            visits: Observations so far, [N].
        """
        self.rounds += 1
        twice = visits >= 2
        self._history.append(
            _Round(
                trials=trials,
                successes=successes,
                low=twice & (rho <= self.config.low),
                high=twice & (rho >= self.config.high),
            )
        )
        low, high = self._printed(delta) if self.config.detector == "printed" else self._pooled()
        switched = self.phase == "early" and low.stopped and high.stopped
        if switched:
            self.phase = "bottleneck"
        return RoundReport(
            round=self.rounds,
            phase=self.phase,
            switched=switched,
            reason=f"{self.config.detector} detector: {low.reason}; {high.reason}",
            low_count=low.count,
            high_count=high.count,
            low_delta=low.change,
            high_delta=high.change,
            low_stopped=low.stopped,
            high_stopped=high.stopped,
        )

    def _printed(self, delta: Float[Tensor, " N"]) -> tuple[_Verdict, _Verdict]:
        """The printed test on the prompts observed in this round (and at least twice in all)."""
        config, now = self.config, self._history[-1]
        seen = now.trials > 0
        return (
            self._printed_set("low", delta[now.low & seen].abs(), config.low_delta),
            self._printed_set("high", delta[now.high & seen], config.high_delta),
        )

    def _printed_set(self, name: str, change: Float[Tensor, " M"], limit: float) -> _Verdict:
        count = len(change)
        if count < self.config.min_prompts:
            return _Verdict(False, count, math.nan, _too_few(name, count, self.config))
        mean, share = change.mean().item(), (change <= limit).double().mean().item()
        stopped = {
            "mean": mean <= limit,
            "all": share == 1.0,
            "fraction": share >= self.config.fraction,
        }[self.config.quantifier]
        reason = (
            f"{name} set of {count} {'stopped' if stopped else 'moves'} (mean change {mean:.4f}, "
            f"{share:.1%} within {limit}, quantifier {self.config.quantifier})"
        )
        return _Verdict(stopped, count, mean, reason)

    def _pooled(self) -> tuple[_Verdict, _Verdict]:
        """The noise-aware test: pooled raw counts of sets that were fixed before the window."""
        first_test = self.config.window + 2  # counted from 0: the sets are fixed on three rounds
        if self.rounds <= first_test:
            missing = f"no test before {first_test + 1} rounds are complete"
            verdict = _Verdict(False, 0, math.nan, missing)
            return verdict, verdict
        fixed, *window = self._history
        half = self.config.window // 2
        return (
            self._pooled_set("low", fixed.low, window[:half], window[half:]),
            self._pooled_set("high", fixed.high, window[:half], window[half:]),
        )

    def _pooled_set(
        self, name: str, members: Bool[Tensor, " N"], first: list[_Round], second: list[_Round]
    ) -> _Verdict:
        config, count = self.config, int(members.sum())
        if count < config.min_prompts:
            return _Verdict(False, count, math.nan, _too_few(name, count, config))
        n1, n2 = (sum(r.trials[members].sum().item() for r in half) for half in (first, second))
        s1, s2 = (sum(r.successes[members].sum().item() for r in half) for half in (first, second))
        if n1 == 0 or n2 == 0:
            reason = f"{name} set of {count} has half a window without rollouts"
            return _Verdict(False, count, math.nan, reason)
        rounds = config.window / 2
        p1, p2 = s1 / n1, s2 / n2
        rise = (p2 - p1) / rounds
        scale = p1
        if s1 + s2 in (0, n1 + n2):
            # Decision: with all failed or all solved the binomial error is 0 however little was
            # seen, and a rate of 0 sets no scale. Then the bound is the exact one of no event in n
            # trials at the level of z, and the scale at least the low set's threshold.
            tail = 0.5 * math.erfc(config.z / math.sqrt(2))
            bound = rise + (1 - tail ** (1 / min(n1, n2))) / rounds
            scale = max(p1, config.low)
        else:
            error = math.sqrt(p1 * (1 - p1) / n1 + p2 * (1 - p2) / n2) / rounds
            bound = rise + config.z * error
        stopped = bound <= config.margin * scale
        reason = (
            f"{name} set of {count} {'stopped' if stopped else 'moves'} (rate {p1:.4f} to "
            f"{p2:.4f}, rise a round at most {bound:.5f} against {config.margin * scale:.5f})"
        )
        return _Verdict(stopped, count, rise / p1 if p1 > 0 else math.nan, reason)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: configuration, phase, rounds and the test's window."""
        return {
            "config": self._declared(),
            "phase": self.phase,
            "rounds": self.rounds,
            "history": [entry._asdict() for entry in self._history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`.

        Decision: the whole configuration must be the state's. Its thresholds have fixed the sets
        of the history, and a switch that two rules had decided would be neither's.

        Raises:
            ValueError: A field is missing or unknown, does not fit this detector, or is of another
                configuration; names it.
        """
        check_fields("BottleneckDetector", state, self.state_dict())
        check_fields("BottleneckDetector: config", state["config"], self._declared())
        check_constants("BottleneckDetector", state["config"], self._declared())
        if state["phase"] not in PHASES:
            raise ValueError(f"BottleneckDetector: phase must be one of {PHASES}")
        kept = min(state["rounds"], self.config.window + 1)
        if len(state["history"]) != kept:
            raise ValueError(
                f"BottleneckDetector: the state keeps {len(state['history'])} of "
                f"{state['rounds']} rounds, window {self.config.window} needs {kept}"
            )
        for entry in state["history"]:
            check_fields("BottleneckDetector: history", entry, dict.fromkeys(_Round._fields))
        self.phase, self.rounds = state["phase"], state["rounds"]
        self._history.clear()
        self._history.extend(_Round(**entry) for entry in state["history"])

    def _declared(self) -> dict[str, Any]:
        """The configuration as plain values, which any loader of files reads."""
        config = self.config
        curves = {"early": tuple(config.early), "bottleneck": tuple(config.bottleneck)}
        return {**vars(config), **curves}


class DifficultyCurriculum:
    """Tracker, detector and curve together (algorithm 2).

    A step calls ``observe`` with its rollouts, then ``weight``; the end of a round calls
    ``end_round``. A switch acts from the next step on, and stays.
    """

    def __init__(self, num_prompts: int, *, config: CurriculumConfig | None = None) -> None:
        """Starts in the early phase with nothing observed.

        Args:
            num_prompts: N; prompts are 0..N-1.
            config: `CurriculumConfig`; the paper's when None.
        """
        self.config = config or CurriculumConfig()
        self.tracker = BetaTracker(num_prompts, discount=self.config.discount)
        self.detector = BottleneckDetector(self.config)
        self.round_trials = torch.zeros(num_prompts, dtype=torch.float64)
        self.round_successes = torch.zeros(num_prompts, dtype=torch.float64)

    @property
    def phase(self) -> Phase:
        """``early`` or ``bottleneck``."""
        return self.detector.phase

    @property
    def rounds(self) -> int:
        """Rounds that have ended."""
        return self.detector.rounds

    @torch.no_grad()
    def observe(
        self,
        prompt: Int[Tensor, " M"],
        trials: Shaped[Tensor, " M"],
        successes: Shaped[Tensor, " M"],
    ) -> None:
        """As `BetaTracker.observe`; also counts what the round has seen."""
        self.tracker.observe(prompt, trials, successes)
        index = torch.as_tensor(prompt).cpu().long()
        self.round_trials.index_add_(0, index, torch.as_tensor(trials).cpu().double())
        self.round_successes.index_add_(0, index, torch.as_tensor(successes).cpu().double())

    def weight(self, prompt: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        """W_D of these prompts, float32 on their device, from what has been observed so far.

        Raises:
            ValueError: An unknown prompt.
        """
        curve = self.config.early if self.phase == "early" else self.config.bottleneck
        rho, ids = self.tracker.rho, prompt.cpu().long()
        if not bool(((ids >= 0) & (ids < len(rho))).all()):
            raise ValueError(f"weight: prompts must lie in 0..{len(rho) - 1}, got {ids.tolist()}")
        rho = rho[ids]
        weight = difficulty_weight(rho, phase=self.phase, constants=curve)
        return weight.to(prompt.device, torch.float32)

    def end_round(self) -> RoundReport:
        """Runs the detector on the round that ends here, and begins the next one."""
        tracker = self.tracker
        report = self.detector.end_round(
            trials=self.round_trials,
            successes=self.round_successes,
            rho=tracker.rho,
            delta=tracker.delta,
            visits=tracker.visits,
        )
        self.round_trials = torch.zeros_like(self.round_trials)
        self.round_successes = torch.zeros_like(self.round_successes)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: tracker, detector and what the round has counted."""
        return {
            "tracker": self.tracker.state_dict(),
            "detector": self.detector.state_dict(),
            "round_trials": self.round_trials.clone(),
            "round_successes": self.round_successes.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: A field is missing or unknown, or does not fit this curriculum.
        """
        check_fields("DifficultyCurriculum", state, self.state_dict())
        counts = {name: state[name] for name in ("round_trials", "round_successes")}
        check_prompts("DifficultyCurriculum", counts, self.round_trials)
        detector = BottleneckDetector(self.config)
        detector.load_state_dict(state["detector"])
        for entry in state["detector"]["history"]:
            check_prompts("DifficultyCurriculum: history", entry, self.round_trials)
        self.tracker.load_state_dict(state["tracker"])
        self.detector = detector
        self.round_trials = state["round_trials"].clone()
        self.round_successes = state["round_successes"].clone()


class RoundClock(Restorable):
    """Says when a round is over: one pass over the prompts, or every `round_steps` steps.

    Fractional passes carry over to the step in which they complete; a step that completes several
    passes ends one round.
    """

    fixed = ("num_prompts", "round_steps")
    moving = ("elapsed",)

    def __init__(self, num_prompts: int, *, round_steps: int | None = None) -> None:
        """Starts at the beginning of a round.

        Args:
            num_prompts: Prompts of one pass.
            round_steps: Steps of one round instead, at least 1.

        Raises:
            ValueError: A number below 1.
        """
        self.num_prompts, self.round_steps = num_prompts, round_steps
        self.length = num_prompts if round_steps is None else round_steps
        if self.length < 1:
            raise ValueError(f"RoundClock: a round must be at least 1 long, got {self.length}")
        self.elapsed = 0

    def tick(self, prompts: int) -> bool:
        """Counts one step that rolled out this many prompts; True if a round ends with it."""
        self.elapsed += prompts if self.round_steps is None else 1
        over = self.elapsed >= self.length
        self.elapsed %= self.length
        return over


class _Round(NamedTuple):
    trials: Float[Tensor, " N"]
    successes: Float[Tensor, " N"]
    low: Bool[Tensor, " N"]
    high: Bool[Tensor, " N"]


@dataclass(frozen=True)
class _Verdict:
    stopped: bool
    count: int
    change: float
    reason: str


def _too_few(name: str, count: int, config: CurriculumConfig) -> str:
    return f"{name} set of {count} is too small (min_prompts {config.min_prompts})"


def _is_curve(curve: Curve) -> bool:
    return len(curve) == 4 and all(math.isfinite(number) for number in curve)
