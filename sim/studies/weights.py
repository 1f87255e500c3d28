"""What W_S does, and whether sigma tells it anything: every arm of 4.2 in worlds with known truth.

Three worlds, from exact to large:

- One prompt whose responses come in kinds of fixed sigma. Expected updates are exact, and their
  direction is compared with the closed forms of 4.2 ::

      d/dt log(pi(correct, high) / pi(correct, low)) =  2 (1 - p) alpha_P dS
      d/dt log(pi(wrong, high)   / pi(wrong, low))   = -2 p alpha_N dS
      dE[sigma]/dt = 2 p (1 - p) (alpha_P - alpha_N) Cov(sigma, S)    sigma independent of outcome

- Token trees whose responses are all listed: exact expected updates under each arm, with mu_k the
  exact E[sigma | prompt], which is the group's mean for infinitely many rollouts.
- The prompt bandit: sampled trainings, among them worlds in which sigma goes with the outcome or
  with the size of the advantage, so that the verdict on claim 4 can turn either way.

Decisions:

- The closed forms are replicator dynamics, where a kind's logit moves by W A (the natural
  gradient). The gradient of a softmax moves it by ``pi (W A - E[W A])``: larger kinds grow faster
  whatever W_S is. So it is read as a difference from the arm ``none``.
- The prose of claim 2 is read as: of the correct responses those of high sigma lose mass, of the
  wrong ones those of low sigma do.
- ``shuffled`` in a tree is its expectation over permutations: E[W_S | prompt, outcome].
- ``matched`` is a constant with the mean W_S that ``literal`` had on each outcome. So the effect of
  ``literal`` is a sum of parts: the constant's (a larger step on correct and a smaller one on wrong
  responses), ``matched`` less ``constant`` (the rest of the step's size), ``shuffled`` less
  ``matched`` (where sigma goes with prompt and outcome), ``literal`` less ``shuffled`` (what the
  trajectory's own sigma tells).
- Trees ask for a pattern of tokens, another one for each prompt, under one policy that does not see
  the prompt. So prompts compete, and a weight decides which of them win.
- Advantages of trees have lambda_policy = 1, as the bandit's: the length-adaptive lambda of long
  responses exceeds .99.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from cvpo import (
    StochasticityConfig,
    gae,
    stochasticity,
    stochasticity_weight,
    terminal_rewards,
    trajectory_std,
)
from cvpo.metrics import coefficient_of_variation
from cvpo.stochasticity import ARMS, WEIGHT_ARMS
from sim.bandit import Bandit, BanditConfig, Draws, ResponseModel
from sim.differences import difference_row
from sim.mdp import Shared, success_rate
from sim.record import BANDS, bands
from sim.study import Desk, Row, Settings, Study
from sim.trace import Array, Trace, compare
from sim.training import Budget, Setting
from sim.tree import (
    TokenTree,
    Trajectories,
    bigram_policy,
    expected_update,
    pattern_rule,
    token_tree,
    trajectories,
    trajectory_scores,
)

CONTROLLED = (*ARMS, "outcome_group")
"""Every arm, and ``literal`` with mu over the trajectories of the same outcome."""
LOGGED = ("vapo", "literal", "none", "constant", "shuffled")
"""Arms whose bandit trainings leave run logs."""
PASSES = (8, 32)
"""k of pass@k."""
END, AREA, UNIT = "accuracy at the end", "mean accuracy over training", "accuracy"
ROUNDING = 1e-8
"""Rates of change below this are 0: they are central differences in float64."""


class WeightsSettings(Settings):
    """Keys of the weights study."""

    coefficient: float = Field(default=0.3, gt=0, le=0.5)
    """alpha_P = alpha_N; the constant with the same mean weights needs at most twice as much."""
    sharpness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    """lambda_P = lambda_N."""
    sharper: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 200.0
    """The same in a second run of the default bandit."""
    prompts: int = Field(default=256, ge=3)
    """Of a bandit."""
    batch: int = Field(default=32, ge=1)
    """Prompts of a step."""
    rollouts: int = Field(default=8, ge=2)
    """Responses to each."""
    steps: int = Field(default=200, ge=1)
    """Of a bandit's training."""
    log_odds: float = Field(default=1.5, ge=0, le=10)
    """By which high sigma is likelier among correct (then among wrong) responses."""
    spread: float = Field(default=0.8, ge=0, le=1)
    """Share of the way to the outcome that the critic foresees, in the world of wide spread."""
    kinds: int = Field(default=3, ge=2, le=100)
    """Levels of sigma of the prompts of fixed kinds."""
    draws: int = Field(default=200, ge=1)
    """Such prompts, for each seed."""
    tree_prompts: int = Field(default=3, ge=1, le=20)
    """Of a token tree."""
    vocabulary: int = Field(default=4, ge=2, le=10)
    """Tokens of a tree; token 0 ends a response."""
    length: int = Field(default=5, ge=2, le=10)
    """Tokens of a tree's longest response."""
    pattern: int = Field(default=3, ge=1, le=10)
    """Tokens of the pattern that a tree's prompt asks for."""
    tree_steps: int = Field(default=200, ge=1)
    """Exact gradient steps in a tree."""
    tree_rate: float = Field(default=0.5, gt=0)
    """Their size."""

    @model_validator(mode="after")
    def _fits(self) -> WeightsSettings:
        if self.batch > self.prompts:
            raise ValueError(f"batch must be at most prompts ({self.prompts}), got {self.batch}")
        if self.tree_prompts * self.vocabulary**self.length > 50_000:
            raise ValueError("tree_prompts * vocabulary^length must be at most 50 000")
        if self.pattern > self.length:
            raise ValueError(f"pattern must be at most length ({self.length}), got {self.pattern}")
        return self

    @property
    def budget(self) -> Budget:
        """Of a bandit's training."""
        return Budget(batch=self.batch, rollouts=self.rollouts, steps=self.steps)


# ------------------------------------------------------------------------------------ differences


def arm_config(arm: str, *, coefficient: float, sharpness: float) -> StochasticityConfig:
    """The configuration of one of `CONTROLLED`."""
    config = StochasticityConfig(
        alpha_p=coefficient, alpha_n=coefficient, lambda_p=sharpness, lambda_n=sharpness
    )
    if arm == "outcome_group":
        return replace(config, mu="outcome_group")
    return replace(config, arm=arm)  # type: ignore[arg-type]


# ------------------------------------------------------------------------- prompts of fixed kinds


class Kinds(NamedTuple):
    """One prompt whose responses come in K kinds of fixed outcome and sigma. Float64."""

    probability: Float[Tensor, " K"]
    correct: Bool[Tensor, " K"]
    sigma: Float[Tensor, " K"]

    @property
    def success(self) -> Float[Tensor, ""]:
        """p."""
        return self.probability[self.correct].sum()

    def mean(self, x: Float[Tensor, " K"]) -> Float[Tensor, ""]:
        """E[x]."""
        return (self.probability * x).sum()


class Motion(NamedTuple):
    """What an expected update does to a prompt of fixed kinds, per unit of time."""

    sigma: float
    """dE[sigma]/dt."""
    correct: float
    """d/dt log(pi(correct, highest sigma) / pi(correct, lowest))."""
    wrong: float
    """The same among wrong responses."""


def draw_kinds(generator: torch.Generator, levels: int) -> Kinds:
    """Random success rate, sigmas up to .2 and shares, sigma independent of the outcome.

    Kinds are ordered by outcome, wrong first, then by sigma.
    """
    p = 0.05 + 0.9 * torch.rand(1, generator=generator, dtype=torch.float64)
    share = torch.rand(levels, generator=generator, dtype=torch.float64) + 0.1
    share = share / share.sum()
    sigma = (0.2 * torch.rand(levels, generator=generator, dtype=torch.float64)).sort().values
    return Kinds(
        probability=torch.cat([(1 - p) * share, p * share]),
        correct=torch.arange(2 * levels) >= levels,
        sigma=sigma.repeat(2),
    )


def weighted_force(kinds: Kinds, config: StochasticityConfig) -> Float[Tensor, " K"]:
    """W_S A of each kind, with A = r - V_0 and mu = E[sigma]."""
    return (
        _weight(config, kinds.sigma, kinds.mean(kinds.sigma), kinds.correct)
        * 2
        * (kinds.correct.double() - kinds.success)
    )


def motion(
    kinds: Kinds, force: Float[Tensor, " K"], *, natural: bool, step: float = 1e-5
) -> Motion:
    """Measures the motion under an expected update, as a central difference of softmax policies.

    Args:
        kinds: The prompt.
        force: W A of each kind.
        natural: Whether a logit moves by its force (replicator dynamics), or by the gradient
            ``pi (force - E[force])``.
        step: Half the difference in time.
    """
    pi = kinds.probability
    velocity = force if natural else pi * (force - kinds.mean(force))
    after, before = ((pi.log() + t * velocity).log_softmax(0) for t in (step, -step))
    speed = (after - before) / (2 * step)
    half = len(pi) // 2
    return Motion(
        sigma=(kinds.sigma @ (after.exp() - before.exp())).item() / (2 * step),
        correct=(speed[-1] - speed[half]).item(),
        wrong=(speed[half - 1] - speed[0]).item(),
    )


def closed_form(kinds: Kinds, *, alpha_p: float, alpha_n: float, sharpness: float) -> Motion:
    """The replicator lines of section 4.2."""
    p, sigma = kinds.success, kinds.sigma
    S = torch.sigmoid(sharpness * (sigma - kinds.mean(sigma)))
    covariance = kinds.mean(sigma * S) - kinds.mean(sigma) * kinds.mean(S)
    rise = S[-1] - S[0]
    return Motion(
        sigma=(2 * p * (1 - p) * (alpha_p - alpha_n) * covariance).item(),
        correct=(2 * (1 - p) * alpha_p * rise).item(),
        wrong=(-2 * p * alpha_n * rise).item(),
    )


class KindsMeasured(NamedTuple):
    """Means over the drawn prompts of one seed."""

    natural: Motion
    """Literal, replicator dynamics."""
    gradient: Motion
    """Literal less none, softmax gradient."""
    error: Motion
    """Largest distance of the measured motion from the closed form, alphas equal or not."""
    unequal: tuple[float, float]
    """dE[sigma]/dt for alpha_N = 0 and for alpha_P = 0, replicator dynamics."""


def measure_kinds(settings: WeightsSettings, seed: int, *, arm: str = "literal") -> KindsMeasured:
    """Draws prompts of fixed kinds and measures how an arm moves them."""
    generator = torch.Generator().manual_seed(seed)
    c, sharpness = settings.coefficient, settings.sharpness
    config = arm_config(arm, coefficient=c, sharpness=sharpness)
    none = replace(config, arm="none")
    natural, gradient, errors, unequal = [], [], [], []
    for _ in range(settings.draws):
        kinds = draw_kinds(generator, settings.kinds)
        force = weighted_force(kinds, config)
        natural.append(motion(kinds, force, natural=True))
        with_weight = motion(kinds, force, natural=False)
        without = motion(kinds, weighted_force(kinds, none), natural=False)
        gradient.append(np.subtract(with_weight, without))
        one_sided = []
        for alpha_p, alpha_n in ((c, c), (c, 0.0), (0.0, c)):
            sided = replace(config, alpha_p=alpha_p, alpha_n=alpha_n)
            found = motion(kinds, weighted_force(kinds, sided), natural=True)
            printed = closed_form(kinds, alpha_p=alpha_p, alpha_n=alpha_n, sharpness=sharpness)
            errors.append(np.abs(np.subtract(found, printed)))
            one_sided.append(found.sigma)
        unequal.append(one_sided[1:])
    positive, negative = np.mean(unequal, axis=0)
    return KindsMeasured(
        natural=Motion(*np.mean(natural, axis=0)),
        gradient=Motion(*np.mean(gradient, axis=0)),
        error=Motion(*np.max(errors, axis=0)),
        unequal=(float(positive), float(negative)),
    )


def kinds_rows(settings: WeightsSettings, found: Sequence[KindsMeasured]) -> list[Row]:
    """The direction in which W_S moves mass, and how near the closed forms come."""
    rows = []
    for dynamics, motions in (
        ("replicator", [seed.natural for seed in found]),
        ("softmax gradient, less that of none", [seed.gradient for seed in found]),
    ):
        rows += [
            difference_row(
                f"d/dt log(high / low sigma) among {outcome} responses",
                f"prompts of fixed kinds; {dynamics}",
                np.array([getattr(m, outcome) for m in motions]),
                0.0,
                paper=paper,
                claim=2,
                sign=sign,
            )
            for outcome, paper, sign in PROSE
        ]
        drift = np.array([m.sigma for m in motions])
        rows.append(
            difference_row(
                "dE[sigma]/dt",
                f"prompts of fixed kinds; {dynamics}",
                np.where(np.abs(drift) < ROUNDING, 0.0, drift),
                0.0,
                paper="rises (figure 3)",
                claim=3,
                sign=1,
            )
        )
    for index, side in enumerate(("alpha_N = 0", "alpha_P = 0")):
        rows.append(
            difference_row(
                "dE[sigma]/dt",
                f"prompts of fixed kinds; replicator, {side}",
                np.array([seed.unequal[index] for seed in found]),
                0.0,
            )
        )
    rows += [
        Row(
            quantity=f"largest distance from the closed form of 4.2, {name}",
            setting="prompts of fixed kinds; replicator, alpha_P and alpha_N equal or not",
            value=max(getattr(seed.error, field) for seed in found),
            n=len(found) * settings.draws,
        )
        for name, field in (
            ("dE[sigma]/dt", "sigma"),
            ("correct responses", "correct"),
            ("wrong responses", "wrong"),
        )
    ]
    return rows


PROSE: tuple[tuple[str, str, Literal[1, -1]], ...] = (
    ("correct", "falls: correct answers converge", -1),
    ("wrong", "rises: wrong answers explore", 1),
)
"""Claim 2: of which responses, what the paper says of high against low sigma, with which sign."""


# ------------------------------------------------------------------------------------ token trees


class TreeRun(NamedTuple):
    """One tree under one arm, before each of S steps and after the last."""

    accuracy: Float[Array, " S1"]
    """Mean success rate."""
    passes: Float[Array, "S1 k"]
    """pass@k of `PASSES`."""
    sigma: Float[Array, " S1"]
    """E[sigma]."""
    mass_drift: float
    """dE[sigma]/dt at the start from the mass that moves, at the sigmas as they are."""
    drift: float
    """The same with the sigmas moving too, as the exact critic follows the policy."""
    variation: tuple[float, float]
    """sd(W_S) / mean(W_S) at the start, among wrong and among correct responses."""


def random_tree(settings: WeightsSettings, seed: int) -> tuple[TokenTree, Shared]:
    """A random pattern for each prompt, and a random bigram policy that all of them share."""
    generator = torch.Generator().manual_seed(seed)
    A, K = settings.vocabulary, settings.tree_prompts
    # Token 0 ends a response, so no pattern holds it.
    rule = pattern_rule(torch.randint(1, A, (K, settings.pattern), generator=generator))
    tree = token_tree(rule, start=torch.ones(K), vocabulary=A, length=settings.length, eos=True)
    logits = torch.randn(A + 1, A, generator=generator, dtype=torch.float64)
    logits[:, 0] -= math.log(settings.length)  # else most responses would end at once
    return tree, bigram_policy(tree, logits)


def train_tree(settings: WeightsSettings, seed: int, arm: str) -> TreeRun:
    """Exact gradient steps in a tree under an arm of W_S."""
    tree, policy = random_tree(settings, seed)
    config = arm_config(arm, coefficient=settings.coefficient, sharpness=settings.sharpness)
    readings: list[list[float]] = []
    for _ in range(settings.tree_steps):
        found = trajectories(tree, policy)
        weight = tree_weight(found, config)
        update = tree_update(policy, found, weight)
        if not readings:
            drift = sigma_drift(tree, policy, found, update)
            variation = weight_variation(found, weight)
        readings.append(_tree_reading(found))
        policy = _moved(policy, settings.tree_rate * update)
    readings.append(_tree_reading(trajectories(tree, policy)))
    accuracy, sigma, *passes = np.array(readings).T
    return TreeRun(accuracy, np.array(passes).T, sigma, *drift, variation)


def tree_weight(found: Trajectories, config: StochasticityConfig) -> Float[Tensor, " n"]:
    """W_S of every response, with mu_k = E[sigma | prompt] exactly."""
    tree = found.tree
    signal = mean_token_entropy(found) if config.arm == "entropy" else found.sigma
    outcome = 2 * tree.prompt + tree.correct.long()
    group = tree.prompt if config.mu == "group" else outcome
    mu = _mean_of_group(signal, group, found.probability)
    weight = _weight(config, signal, mu, tree.correct)
    if config.arm == "shuffled":
        return _mean_of_group(weight, outcome, found.probability)
    return weight


def mean_token_entropy(found: Trajectories) -> Float[Tensor, " n"]:
    """Mean over a response's tokens of the entropy of pi(.|s_t), nats."""
    tree, mask = found.tree, found.tree.mask
    per_state = [torch.special.entr(pi).sum(1) for pi in found.solution.probs]
    entropy = torch.stack([h[tree.state[:, t]] for t, h in enumerate(per_state)], dim=1)
    return entropy.masked_fill(~mask, 0).sum(1) / mask.sum(1)


def tree_update(
    policy: Shared, found: Trajectories, weight: Float[Tensor, " n"]
) -> Float[Tensor, " P"]:
    """The expected update with advantages of lambda_policy = 1: r - V(s_t)."""
    rewards = terminal_rewards(2.0 * found.tree.correct.double() - 1.0, found.tree.mask)
    advantages, _ = gae(rewards, found.values, found.tree.mask, gamma=1.0, lam=1.0)
    return expected_update(policy, found, weight, advantages)


def sigma_drift(
    tree: TokenTree,
    policy: Shared,
    found: Trajectories,
    direction: Float[Tensor, " P"],
    *,
    step: float = 1e-5,
) -> tuple[float, float]:
    """dE[sigma]/dt along a direction in the parameters: from moving mass alone, and altogether."""
    speed = trajectory_scores(policy, found) @ direction
    ends = [trajectories(tree, _moved(policy, t * direction)) for t in (step, -step)]
    after, before = ((end.probability * end.sigma).sum().item() for end in ends)
    return (found.probability * speed * found.sigma).sum().item(), (after - before) / (2 * step)


def weight_variation(found: Trajectories, weight: Float[Tensor, " n"]) -> tuple[float, float]:
    """sd / mean of W_S among wrong and among correct responses, by their probabilities."""
    variation = []
    for outcome in (False, True):
        mine = found.tree.correct == outcome
        p, w = found.probability[mine], weight[mine]
        mean = (p * w).sum() / p.sum()
        variation.append((((p * (w - mean).square()).sum() / p.sum()).sqrt() / mean).item())
    return variation[0], variation[1]


def at_accuracy(run: TreeRun, accuracy: float) -> float:
    """E[sigma] when a run first reaches an accuracy."""
    # The running maximum rises, as interpolation needs; ties are read at their first step.
    best, first = np.unique(np.maximum.accumulate(run.accuracy), return_index=True)
    return float(np.interp(accuracy, best, run.sigma[first]))


def tree_rows(runs: Mapping[str, Sequence[TreeRun]]) -> list[Row]:
    """Arms against each other in the token trees."""
    end = {
        arm: {
            END: np.array([run.accuracy[-1] for run in of]),
            AREA: np.array([run.accuracy.mean() for run in of]),
            **{
                f"pass@{k} at the end": np.array([run.passes[-1, i] for run in of])
                for i, k in enumerate(PASSES)
            },
        }
        for arm, of in runs.items()
    }
    where = "token trees; {} less {}"
    rows = list(_performance_rows(end, where))
    literal, none = runs["literal"], runs["none"]
    shared = [min(a.accuracy.max(), b.accuracy.max()) for a, b in zip(literal, none, strict=True)]
    for quantity, of in (
        ("E[sigma] at the end", lambda run, _: run.sigma[-1]),
        ("E[sigma] at the best accuracy that both reach", at_accuracy),
        ("dE[sigma]/dt at the start, mass alone", lambda run, _: run.mass_drift),
        ("dE[sigma]/dt at the start, values following", lambda run, _: run.drift),
    ):
        a, b = (
            np.array([of(run, accuracy) for run, accuracy in zip(arm, shared, strict=True)])
            for arm in (literal, none)
        )
        rows.append(
            difference_row(
                quantity, where.format("literal", "none"), a, b, paper="rises", claim=3, sign=1
            )
        )
    return rows


def tree_table(runs: Mapping[str, Sequence[TreeRun]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Beginning and end of every tree under every arm."""
    return [
        {
            "arm": arm,
            "seed": seed,
            "accuracy_first": run.accuracy[0],
            "accuracy": run.accuracy[-1],
            "J": 2 * run.accuracy[-1] - 1,
            **{f"pass@{k}": run.passes[-1, i] for i, k in enumerate(PASSES)},
            "sigma_first": run.sigma[0],
            "sigma": run.sigma[-1],
            "mass_drift": run.mass_drift,
            "drift": run.drift,
        }
        for arm, of in runs.items()
        for seed, run in zip(seeds, of, strict=True)
    ]


def _weight(
    config: StochasticityConfig,
    signal: Float[Tensor, " n"],
    mu: Float[Tensor, "*n"],
    correct: Bool[Tensor, " n"],
) -> Float[Tensor, " n"]:
    return stochasticity_weight(
        signal,
        mu.expand_as(signal),
        correct,
        alpha_p=0.0 if config.arm == "negative_only" else config.alpha_p,
        alpha_n=0.0 if config.arm == "positive_only" else config.alpha_n,
        lambda_p=config.lambda_p,
        lambda_n=config.lambda_n,
        arm=config.arm if config.arm in WEIGHT_ARMS else "literal",
    )


def _mean_of_group(
    x: Float[Tensor, " n"], group: Int[Tensor, " n"], probability: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    size = int(group.max()) + 1
    total, mass = (
        torch.zeros(size, dtype=x.dtype).index_add(0, group, part)
        for part in (probability * x, probability)
    )
    return (total / mass)[group]


def _tree_reading(found: Trajectories) -> list[float]:
    mdp = found.tree.mdp
    rates = success_rate(mdp, found.solution.probs)
    passes = [(mdp.start @ (1 - (1 - rates) ** k)).item() for k in PASSES]
    sigma = (found.probability * found.sigma).sum().item()
    return [(mdp.start @ rates).item(), sigma, *passes]


def _moved(policy: Shared, step: Float[Tensor, " P"]) -> Shared:
    return replace(policy, theta=policy.theta + step)


# -------------------------------------------------------------------------------------- the bandit

DEFAULT = "bandit"
Scores = dict[str, Float[Array, " seeds"]]
"""One number of each seed, by what it is."""


def bandits(settings: WeightsSettings) -> dict[str, tuple[BanditConfig, float]]:
    """World and sharpness, by what is special about them."""
    plain = BanditConfig(prompts=settings.prompts)

    def responses(**changes: float) -> BanditConfig:
        return replace(plain, responses=ResponseModel(**changes))  # type: ignore[arg-type]

    odds, usual = settings.log_odds, settings.sharpness
    return {
        DEFAULT: (plain, usual),
        f"bandit, lambda {settings.sharper:g}": (plain, settings.sharper),
        "bandit, high sigma likelier if correct": (replace(plain, high_log_odds=odds), usual),
        "bandit, high sigma likelier if wrong": (replace(plain, high_log_odds=-odds), usual),
        "bandit, critic without foresight": (responses(foresight=0.0), usual),
        f"bandit, spread {settings.spread:g}": (responses(spread=settings.spread), usual),
    }


def train_bandit(desk: Desk, settings: WeightsSettings, name: str) -> dict[str, Trace]:
    """Trains every arm, and ``matched``, in one of `bandits`; in the first VAPO itself as well.

    Those of `LOGGED` leave run logs in the first bandit.
    """
    world, sharpness = bandits(settings)[name]
    chosen = [
        Setting(
            arm,
            method="cvpo-stochasticity",
            stochasticity=arm_config(arm, coefficient=settings.coefficient, sharpness=sharpness),
        )
        for arm in CONTROLLED
    ]
    logged: tuple[str, ...] = ()
    if name == DEFAULT:
        chosen.append(Setting("vapo", method="vapo"))
        logged = LOGGED
    traces: dict[str, Trace] = {}
    for keep in (True, False):
        part = [setting for setting in chosen if (setting.name in logged) == keep]
        traces |= compare(desk, world, settings.budget, part, desc=name, logged=keep)
    matched = Setting(
        "matched", method="cvpo-stochasticity", stochasticity=matched_constant(traces["literal"])
    )
    return traces | compare(desk, world, settings.budget, [matched], desc=f"{name}, matched")


def matched_constant(trace: Trace) -> StochasticityConfig:
    """The constant whose weights are the means, over a training, of those on either outcome.

    An outcome that never occurred has no weight to match: its alpha is 0.
    """
    wrong, correct = (
        1.0 if np.isnan(weight).all() else np.nanmean(weight)
        for weight in np.moveaxis(trace.w_s, -1, 0)
    )
    return StochasticityConfig(
        arm="constant", alpha_p=float(2 * (correct - 1)), alpha_n=float(2 * (1 - wrong))
    )


def scores(trace: Trace) -> Scores:
    """What a training came to: overall, and by third of the prompts' rates at the start."""
    first, last = trace.rates[0], trace.rates[-1].astype(np.float64)
    area = np.trapezoid(trace.rates, trace.steps, axis=0) / (trace.steps[-1] - trace.steps[0])
    per_prompt = {
        END: last,
        AREA: area,
        **{f"pass@{k} at the end": 1 - (1 - last) ** k for k in PASSES},
    }
    band = np.stack([bands(torch.from_numpy(row)).numpy() for row in first])
    found = {name: x.mean(1) for name, x in per_prompt.items()}
    for (name, x), (index, third) in product(per_prompt.items(), enumerate(BANDS)):
        found[f"{name}, {third} third"] = np.nanmean(np.where(band == index, x, np.nan), axis=1)
    tail = max(1, len(trace.sigma) // 10)
    return found | {
        "share of high sigma at the end": trace.high_share[-1],
        "mean sigma of the last tenth of the steps": trace.sigma[-tail:].mean(0),
        "log-odds of high sigma among wrong responses": trace.high_log_odds[-1, :, 0],
        "log-odds of high sigma among correct responses": trace.high_log_odds[-1, :, 1],
    }


def bandit_rows(found: Mapping[str, Mapping[str, Scores]]) -> list[Row]:
    """Arms against each other, in each bandit.

    Args:
        found: Scores by bandit and arm.
    """
    rows: list[Row] = []
    for world, arms in found.items():
        where = f"{world}; {{}} less {{}}"
        rows += _performance_rows(arms, where)
        rows += _mass_rows(arms, where.format("literal", "none"))
    default = found[DEFAULT]
    rows += _third_rows(default)
    rows.append(
        difference_row(
            END,
            f"{DEFAULT}; none less vapo",
            default["none"][END],
            default["vapo"][END],
            paper="the same method",
            unit=UNIT,
        )
    )
    return rows


def difference_table(found: Mapping[str, Mapping[str, Scores]]) -> list[dict[str, Any]]:
    """Every score of every arm, less that of none, of each constant, of shuffled and of literal."""
    rows = []
    for world, arms in found.items():
        for arm, other in product(arms, ("none", "constant", "matched", "shuffled", "literal")):
            for measure, a in arms[arm].items() if arm != other else ():
                row = difference_row(measure, world, a, arms[other][measure])
                rows.append(
                    {"world": world, "arm": arm, "less": other, "measure": measure}
                    | {"difference": row.value, "low": row.low, "high": row.high, "seeds": row.n}
                )
    return rows


COMPARISONS: tuple[tuple[str, str, str, int], ...] = (
    ("literal", "none", "W_S alone beats VAPO", 8),
    ("literal", "constant", "sigma tells more than a constant", 4),
    ("literal", "matched", "sigma tells more than a constant", 4),
    ("literal", "shuffled", "a trajectory's own sigma tells something", 4),
)
"""Arms whose difference in accuracy the paper claims to be positive, and the claim's number."""
PARTS = (("constant", "none"), ("matched", "constant"), ("shuffled", "matched"))
"""The parts of the effect of W_S that are not the trajectory's own sigma."""


def _performance_rows(arms: Mapping[str, Scores], where: str) -> Iterator[Row]:
    """What W_S is worth: against VAPO, beyond a constant, by part and by arm."""

    def row(measure: str, arm: str, other: str, paper: str = "", claim: int | None = None) -> Row:
        a, b = arms[arm][measure], arms[other][measure]
        setting = where.format(arm, other)
        sign: Literal[1, 0] = 0 if claim is None else 1
        return difference_row(
            measure, setting, a, b, paper=paper, claim=claim, sign=sign, unit=UNIT
        )

    for measure, (arm, other, paper, claim) in product((END, AREA), COMPARISONS):
        if other in arms:
            yield row(measure, arm, other, paper, claim)
    widest = f"pass@{max(PASSES)} at the end"
    yield row(widest, "literal", "none", "gains hold for pass@32", 12)
    for arm, k in product(("constant", "positive_only"), PASSES):
        yield row(f"pass@{k} at the end", arm, "none")
    for arm, other in PARTS:
        if arm in arms and other in arms:
            yield row(AREA, arm, other)
    for arm in CONTROLLED:
        if arm not in ("literal", "none", "constant"):
            yield row(AREA, arm, "none")


def _mass_rows(arms: Mapping[str, Scores], where: str) -> Iterator[Row]:
    """Claims 2 and 3: which responses gain mass over a training."""

    def row(measure: str, paper: str, claim: int, sign: Literal[1, -1]) -> Row:
        a, b = arms["literal"][measure], arms["none"][measure]
        return difference_row(measure, where, a, b, paper=paper, claim=claim, sign=sign)

    for outcome, paper, sign in PROSE:
        yield row(f"log-odds of high sigma among {outcome} responses", paper, 2, sign)
    yield row("share of high sigma at the end", "rises (figure 3)", 3, 1)
    yield row("mean sigma of the last tenth of the steps", "rises (figure 3)", 3, 1)


def _third_rows(arms: Mapping[str, Scores]) -> Iterator[Row]:
    """Where W_S acts: by difficulty, the constant's part and what sigma adds."""
    pairs = (("literal", "none"), ("constant", "none"), ("literal", "constant"))
    for third, (arm, other) in product(BANDS, pairs):
        name = f"{AREA}, {third} third"
        where = f"{DEFAULT}; {arm} less {other}"
        yield difference_row(name, where, arms[arm][name], arms[other][name], unit=UNIT)


# -------------------------------------------------------------------------- how constant W_S is


def bandit_variation(settings: WeightsSettings, sharpness: float, seed: int) -> tuple[float, float]:
    """sd(W_S) / mean(W_S) of wrong and of correct responses to all prompts at the start."""
    world = bandits(settings)[DEFAULT][0]
    bandit, generator = Bandit(world, [seed]), torch.Generator().manual_seed(seed)
    draws = Draws.of(generator, world.prompts, settings.rollouts, world.responses.tokens)
    responses = bandit.respond(torch.arange(world.prompts), draws)
    correct, values = responses.correct.flatten(), responses.values.flatten(0, 1)
    weight = stochasticity(
        trajectory_std(values, torch.ones_like(values, dtype=torch.bool)),
        torch.arange(world.prompts).repeat_interleave(settings.rollouts),
        correct,
        config=arm_config("literal", coefficient=settings.coefficient, sharpness=sharpness),
    ).weight
    wrong, right = (coefficient_of_variation(weight, mask=correct == R) for R in (0, 1))
    return wrong, right


def variation_rows(where: str, variation: Sequence[tuple[float, float]]) -> list[Row]:
    """sd(W_S) / mean(W_S) by outcome, over seeds."""
    return [
        difference_row(
            f"sd(W_S) / mean(W_S) of {outcome} responses at the start",
            where,
            np.array([seed[index] for seed in variation]),
            0.0,
            unit="ratio",
        )
        for index, outcome in enumerate(("wrong", "correct"))
    ]


# ---------------------------------------------------------------------------------------- the study


def run(settings: WeightsSettings, desk: Desk) -> list[Row]:
    """All arms in all worlds."""
    seeds = settings.seeds
    kinds = desk.map(measure_kinds, [(settings, seed) for seed in seeds], desc="kinds")
    cells = list(product(CONTROLLED, seeds))
    grown = desk.map(train_tree, [(settings, seed, arm) for arm, seed in cells], desc="trees")
    trees: dict[str, list[TreeRun]] = {arm: [] for arm in CONTROLLED}
    for (arm, _), tree_run in zip(cells, grown, strict=True):
        trees[arm].append(tree_run)
    found = {
        name: {arm: scores(trace) for arm, trace in train_bandit(desk, settings, name).items()}
        for name in bandits(settings)
    }
    desk.table("trees", tree_table(trees, seeds))
    desk.table("arms", difference_table(found))
    rows = kinds_rows(settings, kinds)
    rows += tree_rows(trees)
    rows += variation_rows(
        f"token trees, lambda {settings.sharpness:g}", [of.variation for of in trees["literal"]]
    )
    rows += bandit_rows(found)
    for sharpness in (settings.sharpness, settings.sharper):
        rows += variation_rows(
            f"{DEFAULT}, lambda {sharpness:g}",
            [bandit_variation(settings, sharpness, seed) for seed in seeds],
        )
    return rows


STUDY = Study(
    name="weights",
    about="every arm of W_S against none and a constant, in exact and in sampled worlds",
    settings=WeightsSettings,
    run=run,
)
