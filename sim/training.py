"""Training in the prompt bandit: the trainer's algorithm, by the library's functions, many at once.

Every run of a call shares world, method and sampler's name; runs differ by seed and by the numbers
of their setting (coefficients, curves, thresholds). They are carried side by side as one large
batch, in which a row is ``run * prompts + prompt``: `cvpo`'s functions never see the difference.
Settings that are compared respond with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cvpo import (
    METHODS,
    SAMPLERS,
    BetaTracker,
    CurriculumConfig,
    Curve,
    Feedback,
    Method,
    Pool,
    RoundClock,
    RoundReport,
    Sampler,
    Stochasticity,
    StochasticityConfig,
    difficulty_weight,
    estimate_advantages,
    stochasticity,
    thompson_weight,
    trajectory_std,
    weighted_advantages,
)
from cvpo.curriculum import BottleneckDetector
from cvpo.samplers import Selective
from sim.bandit import Bandit, BanditConfig, Draws, Responses

RETRIES = 4
"""Times that dropped groups are replaced within a step."""

BLIND = ("shuffled-epochs", "uniform")
"""Samplers that learn nothing: one of them can choose for every run of a seed."""


@dataclass(frozen=True)
class Budget:
    """How much is rolled out and how often it is looked at."""

    batch: int = 32
    """Prompts of a step."""
    rollouts: int = 8
    """Responses to each."""
    steps: int = 200
    every: int = 10
    """Steps between two readings of the true rates; the first is before step 1."""

    def __post_init__(self) -> None:
        """Refuses what cannot be run.

        Raises:
            ValueError: Names the field.
        """
        for name in ("batch", "rollouts", "steps", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


PAPER_BUDGET = Budget(batch=256, rollouts=16, steps=2000, every=68)
"""The paper's run: 68 steps are a round of its 17 398 prompts."""


@dataclass(frozen=True)
class Setting:
    """What is trained with. The method says which of the two weights are used."""

    name: str
    method: str = "cvpo"
    stochasticity: StochasticityConfig = field(default_factory=StochasticityConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    difficulty: Literal["tracked", "oracle", "constant", "thompson"] = "tracked"
    """What W_D is: its curve at the tracked rate, or at the true rate; the step's mean of the first
    for every prompt (what is left of it without allocation); or, without a curve, how likely MoPPS
    would select the prompt."""
    sampler: str = "shuffled-epochs"

    @property
    def shared(self) -> tuple[Any, ...]:
        """What settings of one call must have in common."""
        weights, curriculum = self.stochasticity, self.curriculum
        form = (weights.arm, weights.mu, weights.signal, weights.sharpness_unit)
        return (self.method, form, curriculum.discount, self.difficulty, self.sampler)


class Training:
    """R runs side by side, one step at a time."""

    def __init__(
        self,
        world: BanditConfig,
        budget: Budget,
        settings: Sequence[Setting],
        seeds: Sequence[int],
    ) -> None:
        """Draws the worlds: every setting in every seed's.

        Args:
            world: The bandit.
            budget: Batch and steps.
            settings: They differ in numbers only (`Setting.shared`).
            seeds: Runs are ordered by setting, then seed.

        Raises:
            ValueError: The settings differ in more, or a batch is larger than the world.
        """
        _check_settings(settings)
        if budget.batch > world.prompts:
            raise ValueError(
                f"batch: {budget.batch} prompts a step do not exist in a world of {world.prompts}"
            )
        self.world, self.budget = world, budget
        self.settings = [setting for setting in settings for _ in seeds]
        self.seeds = [seed for _ in settings for seed in seeds]
        first = settings[0]
        self.method = _without_decay(METHODS[first.method])
        self.bandit = Bandit(world, self.seeds)
        runs, prompts = len(self.seeds), world.prompts
        self.tracker = BetaTracker(runs * prompts, discount=first.curriculum.discount)
        self.detectors = [BottleneckDetector(setting.curriculum) for setting in self.settings]
        self.clocks = [RoundClock(prompts) for _ in self.seeds]
        self.observed = torch.zeros(runs, dtype=torch.int64)
        """Groups that each run has rolled out in this step."""
        self.round_trials = torch.zeros(runs, prompts, dtype=torch.float64)
        self.round_successes = torch.zeros(runs, prompts, dtype=torch.float64)
        self.curves = self._curves()
        self.difficulty = self._measured_difficulty()
        """What fixed curricula know of each run's prompts, [R, N]."""
        self.stochasticity = _side_by_side([s.stochasticity for s in self.settings])
        # Samplers that learn choose for each run; the others choose once for each seed.
        alone = first.sampler not in BLIND or self.method.dynamic_sampling
        streams = range(runs) if alone else range(len(seeds))
        self.stream = torch.arange(runs) if alone else torch.arange(runs) % len(seeds)
        self.samplers = [self._sampler(index) for index in streams]
        selective = isinstance(self.samplers[0], Selective)
        self._drops = self.method.dynamic_sampling or selective
        self.draws = [
            torch.Generator().manual_seed(_mixed(self.seeds[index], 1)) for index in streams
        ]
        self.shuffles = [torch.Generator().manual_seed(_mixed(s, 2)) for s in self.seeds]
        self.updates = 0
        self.rollouts = torch.zeros(runs, dtype=torch.int64)
        self.discarded = torch.zeros(runs, dtype=torch.int64)
        self.switched = torch.full((runs,), torch.nan)

    @property
    def prompts(self) -> int:
        """Prompts of one run that can be trained on."""
        return self.world.prompts

    def step(self) -> Step:
        """Rolls out, observes, weighs and updates every run (algorithms 1 and 2)."""
        responses, dropped = self._collect()
        groups, rollouts = responses.kind.shape
        run = self._run_of(responses.row)
        correct = responses.correct.flatten()  # R
        values = responses.values.flatten(0, 1)
        mask = torch.ones_like(values, dtype=torch.bool)
        reward = 2 * correct - 1
        group = responses.row.repeat_interleave(rollouts)  # a prompt drawn twice is one group
        raw = estimate_advantages(self.method, reward, group, mask, values=values).advantages
        ones = torch.ones(groups * rollouts)
        sigma = trajectory_std(values, mask)
        w_d = self._difficulty_weight(responses.row) if self.method.curriculum else ones[:groups]
        found = self._stochasticity(sigma, group, run, responses)
        w_s = found.weight if self.method.stochasticity else ones
        each = w_d.repeat_interleave(rollouts)
        advantage = weighted_advantages(raw, mask, w_s=w_s, w_d=each).mean(1)
        pushed = advantage + self._imitation(correct, run.repeat_interleave(rollouts))
        self.bandit.update(responses, pushed.view(groups, rollouts), batch=self.budget.batch)
        self.updates += 1
        self._tell_samplers(responses, dropped, raw)
        return Step(responses, run, sigma, found.mu, w_s, w_d, raw, self._end_rounds())

    def rates(self) -> Float[Tensor, "R N"]:
        """True success rates of the prompts that are trained."""
        return self.bandit.rates()[:, : self.prompts]

    def weights(self) -> Float[Tensor, "R N"]:
        """W_D of every prompt that is trained, as a step would use it now."""
        runs = len(self.seeds)
        if not self.method.curriculum:
            return torch.ones(runs, self.prompts)
        prompt = torch.arange(self.prompts)
        row = (torch.arange(runs)[:, None] * self.bandit.size + prompt).flatten()
        return self._difficulty_weight(row).view(runs, self.prompts)

    # -------------------------------------------------------------------------------- rollouts

    def _collect(self) -> tuple[Responses, Responses]:
        """What the step trains on, and what was dropped."""
        wanted = [self.budget.batch] * len(self.samplers)
        if not self._drops:
            responses = self._respond(wanted)
            self._observe(responses)
            return responses, responses.only(slice(0))
        kept, lost = [], []
        for _ in range(1 + RETRIES):
            responses = self._respond(wanted)
            self._observe(responses)
            keep = self._keep(responses)
            kept.append(responses.only(keep))
            lost.append(responses.only(~keep))
            dropped = torch.bincount(self._run_of(lost[-1].row), minlength=len(self.seeds))
            self.discarded += dropped * self.budget.rollouts
            wanted = dropped.tolist()
            if not any(wanted):
                break
        return Responses.joined(kept), Responses.joined(lost)

    def _respond(self, wanted: Sequence[int]) -> Responses:
        """Groups of each run, `wanted` of each sampler."""
        # A run that wants nothing is not asked: its sampler would draw, or count a call.
        nothing = torch.empty(0, dtype=torch.int64)
        chosen = [
            sampler.next(n) if n else nothing
            for sampler, n in zip(self.samplers, wanted, strict=True)
        ]
        sizes = (self.budget.rollouts, self.world.responses.tokens)
        drawn = [Draws.of(g, n, *sizes) for g, n in zip(self.draws, wanted, strict=True)]
        if len(self.samplers) == len(self.seeds):
            run = torch.arange(len(self.seeds)).repeat_interleave(torch.tensor(wanted))
            prompt, draws = torch.cat(chosen), Draws(*map(torch.cat, zip(*drawn, strict=True)))
        else:
            run = torch.arange(len(self.seeds)).repeat_interleave(wanted[0])
            prompt = torch.stack(chosen)[self.stream].flatten()
            draws = Draws(
                *(torch.stack(part)[self.stream].flatten(0, 1) for part in zip(*drawn, strict=True))
            )
        self.rollouts += torch.bincount(run, minlength=len(self.seeds)) * self.budget.rollouts
        return self.bandit.respond(run * self.bandit.size + prompt, draws)

    def _keep(self, responses: Responses) -> Bool[Tensor, " M"]:
        rollouts = self.budget.rollouts
        successes = responses.correct.sum(1)
        keep = torch.ones(len(successes), dtype=torch.bool)
        if self.method.dynamic_sampling:
            keep &= (successes > 0) & (successes < rollouts)
        prompt, run = self._prompt_of(responses.row), self._run_of(responses.row)
        for index, sampler in enumerate(self.samplers):
            if isinstance(sampler, Selective):
                mine = run == index
                trials = torch.full((int(mine.sum()),), rollouts)
                keep[mine] &= sampler.keep(prompt[mine], trials, successes[mine])
        return keep

    # --------------------------------------------------------------------------------- weights

    def _observe(self, responses: Responses) -> None:
        row = self._trained_row(responses.row)
        trials = torch.full((len(row),), float(self.budget.rollouts), dtype=torch.float64)
        successes = responses.correct.sum(1).double()
        self.tracker.observe(row, trials, successes)
        self.round_trials.view(-1).index_add_(0, row, trials)
        self.round_successes.view(-1).index_add_(0, row, successes)
        self.observed += torch.bincount(self._run_of(responses.row), minlength=len(self.seeds))

    def _difficulty_weight(self, row: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        """W_D of rows, each under its own run's phase and curve."""
        kind, run = self.settings[0].difficulty, self._run_of(row)
        if kind == "thompson":
            return self._thompson(row)
        if kind == "oracle":
            rho = self.bandit.rates_of(row)
        else:
            rho = self.tracker.rho[self._trained_row(row)].float()
        weight = self._curve(rho, run)
        if kind == "constant":
            count = torch.bincount(run, minlength=len(self.seeds))
            weight = (torch.bincount(run, weights=weight, minlength=len(count)) / count)[
                run
            ].float()
        return weight

    def _curve(self, rho: Float[Tensor, " M"], run: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        late = torch.tensor([d.phase == "bottleneck" for d in self.detectors])[run]
        early, bottleneck = (Curve(*constants[:, run]) for constants in self.curves)
        weight = difficulty_weight(rho, phase="early", constants=early)
        if not bool(late.any()):
            return weight
        return torch.where(
            late, difficulty_weight(rho, phase="bottleneck", constants=bottleneck), weight
        )

    def _thompson(self, row: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        shape = (len(self.seeds), self.prompts)
        alpha, beta = self.tracker.alpha.view(shape), self.tracker.beta.view(shape)
        weight = torch.stack(
            [thompson_weight(a, b, candidates=16) for a, b in zip(alpha, beta, strict=True)]
        )
        return weight.flatten()[self._trained_row(row)].float()

    def _stochasticity(
        self,
        sigma: Float[Tensor, " B"],
        group: Int[Tensor, " B"],
        run: Int[Tensor, " M"],
        responses: Responses,
    ) -> Stochasticity:
        correct, entropy = responses.correct.flatten(), responses.entropy.flatten()
        form = self.settings[0].stochasticity
        owner = run.repeat_interleave(self.budget.rollouts)
        if form.arm != "shuffled" and form.sharpness_unit == "absolute":
            config = _of_rows(self.stochasticity, owner) if len(self.settings) > 1 else form
            return stochasticity(sigma, group, correct, config=config, entropy=entropy)
        weight, signal, mu = torch.empty(3, len(sigma))  # these look at a run's whole batch
        for index, setting in enumerate(self.settings):
            mine = owner == index
            found = stochasticity(
                sigma[mine],
                group[mine],
                correct[mine],
                config=setting.stochasticity,
                entropy=entropy[mine],
                generator=self.shuffles[index],
            )
            weight[mine], signal[mine], mu[mine] = found.weight, found.signal, found.mu
        return Stochasticity(weight, signal, mu)

    def _imitation(self, correct: Float[Tensor, " B"], owner: Int[Tensor, " B"]) -> Tensor:
        """What the positive LM loss adds to a response's multiplier: mu R N / sum of R."""
        if not self.method.lm_coefficient:
            return torch.zeros(len(correct))
        runs = len(self.seeds)
        responses = torch.bincount(owner, minlength=runs)
        credit = torch.bincount(owner, weights=correct, minlength=runs)
        factor = torch.where(credit > 0, self.method.lm_coefficient * responses / credit, 0.0)
        return correct * factor[owner].float()

    # ---------------------------------------------------------------------------- end of a step

    def _tell_samplers(
        self, responses: Responses, dropped: Responses, raw: Float[Tensor, "B T"]
    ) -> None:
        """Once a step, of all its groups."""
        if self.settings[0].sampler in BLIND:
            return
        rollouts = self.budget.rollouts
        row = torch.cat([responses.row, dropped.row])
        run, prompt = self._run_of(row), self._prompt_of(row)
        successes = torch.cat([responses.correct.sum(1), dropped.correct.sum(1)]).double()
        # A dropped group is never valued. Against each other equal verdicts are worth 0; against a
        # critic, or if they differ, nobody knows.
        alike = (dropped.correct == dropped.correct[:, :1]).all(1)
        unknown = torch.where(alike & (not self.method.critic), 0.0, torch.nan)
        size = raw.abs().mean(1).view_as(responses.correct).mean(1)
        first = responses.values[:, 0, 0] if self.method.critic else None
        sizes = torch.cat([size, unknown])
        firsts = None if first is None else torch.cat([first, torch.full_like(unknown, torch.nan)])
        for index, sampler in enumerate(self.samplers):
            mine = run == index
            sampler.observe(
                Feedback(
                    prompt=prompt[mine],
                    trials=torch.full((int(mine.sum()),), float(rollouts)),
                    successes=successes[mine],
                    mean_abs_advantage=sizes[mine],
                    value_first=None if firsts is None else firsts[mine],
                )
            )

    def _end_rounds(self) -> dict[int, EndedRound]:
        """Runs the detector of every run whose round is over."""
        ended: dict[int, EndedRound] = {}
        counts = self.observed.tolist()
        self.observed.zero_()
        over = [run for run, count in enumerate(counts) if self.clocks[run].tick(count)]
        if not over:
            return ended
        shape, tracker = (len(self.seeds), self.prompts), self.tracker
        rho, delta, visits = (x.view(shape) for x in (tracker.rho, tracker.delta, tracker.visits))
        weights = self.weights()  # under the phase in which the round was
        for run in over:
            trials = self.round_trials[run].clone()
            successes = self.round_successes[run].clone()
            phase = self.detectors[run].phase
            report = self.detectors[run].end_round(
                trials=trials,
                successes=successes,
                rho=rho[run],
                delta=delta[run],
                visits=visits[run],
            )
            self.round_trials[run] = 0
            self.round_successes[run] = 0
            if report.switched:
                self.switched[run] = self.updates
            ended[run] = EndedRound(report, phase, trials, successes, weights[run])
        return ended

    def _curves(self) -> tuple[Float[Tensor, "4 R"], Float[Tensor, "4 R"]]:
        early = [setting.curriculum.early for setting in self.settings]
        bottleneck = [setting.curriculum.bottleneck for setting in self.settings]
        return torch.tensor(early).T, torch.tensor(bottleneck).T

    def _sampler(self, run: int) -> Sampler:
        bandit, first = self.bandit, run * self.bandit.size
        rows = torch.arange(first, first + self.prompts)

        def predict(prompt: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
            return bandit.first_values(first + prompt, bandit.rates_of(first + prompt))

        pool = Pool(
            num_prompts=self.prompts,
            seed=_mixed(self.seeds[run], 4),
            steps=self.budget.steps,
            rollouts=self.budget.rollouts,
            difficulty=self.difficulty[run],
            predict=predict,
            truth=lambda: bandit.rates_of(rows),
        )
        return SAMPLERS[self.settings[run].sampler](pool)

    def _measured_difficulty(self) -> Float[Tensor, "R N"]:
        """Failure rates of the starting policy, each seen through 16 rollouts."""
        rates = self.rates()
        sixteen = torch.full((self.prompts,), 16.0)
        seen = [
            torch.binomial(sixteen, rate, generator=torch.Generator().manual_seed(_mixed(seed, 3)))
            for rate, seed in zip(rates, self.seeds, strict=True)
        ]
        return 1 - torch.stack(seen) / 16

    def _run_of(self, row: Int[Tensor, " M"]) -> Int[Tensor, " M"]:
        return torch.div(row, self.bandit.size, rounding_mode="floor")

    def _prompt_of(self, row: Int[Tensor, " M"]) -> Int[Tensor, " M"]:
        return row % self.bandit.size

    def _trained_row(self, row: Int[Tensor, " M"]) -> Int[Tensor, " M"]:
        """The tracker's row: it knows no held-out prompts."""
        return self._run_of(row) * self.prompts + self._prompt_of(row)


class EndedRound(NamedTuple):
    """A round of one run: the detector's report, the phase it was in, what it counted, and W_D."""

    report: RoundReport
    phase: str
    trials: Float[Tensor, " N"]
    successes: Float[Tensor, " N"]
    w_d: Float[Tensor, " N"]


class Step(NamedTuple):
    """What a step did. M groups of G responses; run is that of each group."""

    responses: Responses
    run: Int[Tensor, " M"]
    sigma: Float[Tensor, " B"]
    mu: Float[Tensor, " B"]
    w_s: Float[Tensor, " B"]
    w_d: Float[Tensor, " M"]
    raw: Float[Tensor, "B T"]
    """A before the weights."""
    ended: dict[int, EndedRound]
    """Of the runs whose round is over."""


def _side_by_side(configs: Sequence[StochasticityConfig]) -> StochasticityConfig:
    """One configuration whose coefficients are those of every run, [R]."""
    return replace(
        configs[0],
        alpha_p=torch.tensor([config.alpha_p for config in configs]),
        alpha_n=torch.tensor([config.alpha_n for config in configs]),
        lambda_p=torch.tensor([config.lambda_p for config in configs]),
        lambda_n=torch.tensor([config.lambda_n for config in configs]),
    )


def _of_rows(config: StochasticityConfig, owner: Int[Tensor, " B"]) -> StochasticityConfig:
    """The same with each trajectory's own coefficients, [B]."""
    numbers = (config.alpha_p, config.alpha_n, config.lambda_p, config.lambda_n)
    a_p, a_n, l_p, l_n = (torch.as_tensor(number)[owner] for number in numbers)
    return replace(config, alpha_p=a_p, alpha_n=a_n, lambda_p=l_p, lambda_n=l_n)


def _without_decay(method: Method) -> Method:
    """Lambda 1: a bandit's few tokens stand for thousands, at which lambda_policy exceeds .99."""
    if not method.critic:
        return method
    return replace(method, length_adaptive_alpha=None, lambda_policy=1.0, lambda_critic=1.0)


def _mixed(seed: int, purpose: int) -> int:
    """A seed of its own for each purpose."""
    return int(np.random.SeedSequence([seed, purpose]).generate_state(1, np.uint64)[0] >> 1)


def _check_settings(settings: Sequence[Setting]) -> None:
    if not settings:
        raise ValueError("settings: give at least one")
    for setting in settings:
        if setting.shared != settings[0].shared:
            raise ValueError(
                f"settings {settings[0].name!r} and {setting.name!r} differ in more than numbers "
                "(method, arm, discount, difficulty or sampler): simulate them apart, or `compare`"
            )
        if METHODS[setting.method].lag:
            raise ValueError(
                f"{setting.name}: the bandit has no method with lag ({setting.method})"
            )
