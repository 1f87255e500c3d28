"""The gradient bound (eq. 3-13) in worlds that are solved exactly. Nothing here is sampled.

Random MDPs of eight kinds (tabular or shared parameters, deterministic or stochastic transitions,
fixed or random length) give the true gradient and every link of the chain; a chain of T binary
actions is the counter-example on the episodic objective; token trees show what becomes of
E[A|s] = 0, and which part of Var V lies within trajectories, where W_S measures.

Decisions:

- The token mean of a gradient is grad J / E[T], also where T is random.
- "Var V governs the size of an update" is asked at fixed Var Q, which training cannot choose:
  gradients and deviations are divided by sigma_Q, as if each world's rewards were scaled to
  Var Q = 1. It holds if the rank correlation of the two is surely positive (the divisor that they
  share favours that).
- Whitening is by the mean and deviation over all responses. Those of a batch differ by chance, and
  shift E[A|s] in every state; that shift is a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from cvpo.advantage import gae, terminal_rewards
from cvpo.bound import (
    Links,
    episode_bound,
    exact_variance,
    holding,
    links,
    score_bound,
    score_energy_bound,
    second_moment,
    token_mean,
    token_variance,
    value_variance,
)
from cvpo.metrics import Interval, bootstrap_interval, hierarchical_bootstrap, rank_correlation
from cvpo.stochasticity import stochasticity_weight
from sim.differences import FEWEST_SEEDS
from sim.mdp import (
    MDP,
    Policy,
    Shared,
    Tabular,
    policy_gradient,
    random_mdp,
    random_shared,
    random_tabular,
    reward_variance,
    solve,
    tokens,
)
from sim.study import Desk, Row, Settings, Study, Verdict
from sim.tree import (
    Trajectories,
    bigram_policy,
    chain,
    conditional_mean,
    sum_rule,
    token_tree,
    trajectories,
)

CLAIM = 1
ROUNDING = 1e-9
"""How far a bound may fall short of what it bounds, as a share of it."""
MOST_RESPONSES = 100_000
"""Of a token tree."""


class BoundSettings(Settings):
    """What worlds are drawn, and how many."""

    worlds: int = Field(default=40, ge=3, le=10_000)
    """Random MDPs of each of the eight kinds and each seed."""
    prompts: int = Field(default=3, ge=2, le=100)
    """Prompts of a world or tree."""
    states: int = Field(default=5, ge=2, le=100)
    """States of each later layer of a random MDP; with one alone no action would matter."""
    actions: int = Field(default=3, ge=2, le=20)
    """Actions of a random MDP."""
    horizon: int = Field(default=5, ge=1, le=50)
    """Tokens of a response of a random MDP, or of its longest."""
    parameters: int = Field(default=4, ge=1, le=100)
    """Parameters that all tokens share, where they do."""
    chains: tuple[Annotated[int, Field(ge=1, le=2001)], ...] = (5, 25, 101, 401)
    """Lengths T of the chain of binary actions; odd."""
    vocabulary: int = Field(default=4, ge=2, le=10)
    """Tokens of a tree; token 0 ends a response."""
    length: int = Field(default=5, ge=2, le=12)
    """Tokens of a tree's longest response."""
    batch: int = Field(default=64, ge=1)
    """Responses over which a batch is whitened."""
    critic_error: float = Field(default=0.2, ge=0, le=10)
    """Standard deviation of the critic's error on a state's value, in units of the reward."""
    lambdas: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (1.0, 0.95, 0.1)
    """GAE's lambda."""
    coefficient: float = Field(default=0.3, ge=0, lt=1)
    """alpha_P = alpha_N of W_S."""
    sharpness: float = Field(default=50.0, ge=0, allow_inf_nan=False)
    """lambda_P = lambda_N of W_S."""

    @field_validator("chains")
    @classmethod
    def _odd(cls, chains: tuple[int, ...]) -> tuple[int, ...]:
        if any(length % 2 == 0 for length in chains):
            raise ValueError("every length must be odd, so that no sum is 0")
        return chains

    @model_validator(mode="after")
    def _can_be_listed(self) -> Self:
        responses = self.prompts * self.vocabulary**self.length
        if responses > MOST_RESPONSES:
            raise ValueError(
                f"prompts * vocabulary^length = {responses} responses are too many to list "
                f"(at most {MOST_RESPONSES}): lower one of the three"
            )
        return self


class Kind(NamedTuple):
    """What sort of random world."""

    policy: str
    dynamics: str
    length: str


KINDS = tuple(
    Kind(*kind)
    for kind in product(("tabular", "shared"), ("deterministic", "stochastic"), ("fixed", "random"))
)


# ---------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measured:
    """The exact numbers of one world and policy."""

    gradient: float
    """||grad J||, episodic."""
    mean_length: float
    """E[T]."""
    links: Links
    """The chain for the token mean, which begins with ||grad J|| / E[T]."""
    score_bound: float
    """C, measured."""
    variance_q: float
    variance_v: float
    variance_a: float
    identity_error: float
    """|Var A - (Var Q - Var V)|."""
    energy: float
    """E sum_t A_t^2."""
    outcome_variance: float
    """Mean variance of the reward within a prompt, E_q[4 p (1 - p)]."""
    episode_bound: float
    """C sqrt(E[T] E_q[4 p (1 - p)])."""
    score_energy_bound: float
    """sqrt(E sum_t ||g_t||^2) sqrt(E_q[4 p (1 - p)])."""


def measure(mdp: MDP, policy: Policy) -> Measured:
    """Solves a world and evaluates every link and bound in it."""
    solution = solve(mdp, policy.logits())
    world = tokens(policy, solution)
    gradient = policy_gradient(policy, solution).norm()
    length = solution.mean_length
    outcome = token_mean(reward_variance(mdp, solution.probs), mdp.start)
    C = score_bound(world.score_norm, world.weight)
    variance_a = token_variance(world.advantages, world.weight)
    found = links(
        gradient_norm=gradient / length,
        score_norm=world.score_norm,
        advantages=world.advantages,
        q=world.q,
        v=world.v,
        weight=world.weight,
    )
    return Measured(
        gradient=gradient.item(),
        mean_length=length.item(),
        links=found,
        score_bound=C.item(),
        variance_q=token_variance(world.q, world.weight).item(),
        variance_v=token_variance(world.v, world.weight).item(),
        variance_a=variance_a.item(),
        identity_error=abs((variance_a - exact_variance(world.q, world.v, world.weight)).item()),
        energy=(length * second_moment(world.advantages, world.weight)).item(),
        outcome_variance=outcome.item(),
        episode_bound=float(
            episode_bound(score_bound=C, mean_length=length, outcome_variance=outcome)
        ),
        score_energy_bound=float(
            score_energy_bound(
                world.score_norm, world.weight, mean_length=length, outcome_variance=outcome
            )
        ),
    )


def random_worlds(settings: BoundSettings, seed: int, kind: Kind) -> list[Measured]:
    """Measures ``settings.worlds`` random worlds of one kind.

    A world in which no prompt's reward varies has no gradient to bound, and is drawn again; with
    two states or more at least about a quarter are kept.
    """
    generator = torch.Generator().manual_seed(len(KINDS) * seed + KINDS.index(kind))
    found: list[Measured] = []
    while len(found) < settings.worlds:
        mdp = random_mdp(
            generator,
            prompts=settings.prompts,
            states=settings.states,
            actions=settings.actions,
            horizon=settings.horizon,
            stochastic=kind.dynamics == "stochastic",
            random_length=kind.length == "random",
        )
        policy: Policy = (
            random_tabular(mdp, generator)
            if kind.policy == "tabular"
            else random_shared(mdp, generator, parameters=settings.parameters)
        )
        world = measure(mdp, policy)
        if world.outcome_variance > ROUNDING:
            found.append(world)
    return found


def two_prompts(gap: float) -> tuple[MDP, Tabular]:
    """One token, two prompts with success rates .5 - gap and .5 + gap.

    Var Q = 1 whatever the gap, and Var V = 4 gap^2.
    """
    rates = torch.tensor([0.5 - gap, 0.5 + gap], dtype=torch.float64)
    mdp = MDP(
        start=torch.full((2,), 0.5, dtype=torch.float64),
        transitions=(torch.tensor([[0, 1], [0, 1]]),),
        ends=(torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)),
        reward=(torch.zeros(2).double(), torch.tensor([-1.0, 1.0]).double()),
    )
    return mdp, Tabular((torch.stack([1 - rates, rates], dim=1).log(),))


class Bias(NamedTuple):
    """How far an estimate of A is from E[A|s] = 0, as a share of the root mean square of A."""

    conditional: float
    """Root mean square of E[A|s] over the visited states."""
    overall: float
    """E[A], over all tokens: (6) needs 0."""


class TreeMeasured(NamedTuple):
    """The exact numbers of one token tree."""

    bias: dict[str, Bias]
    """By estimator of the advantage."""
    batch_shift: float
    """Standard deviation of a batch's mean advantage, as a share of the root mean square of A."""
    within_share: float
    """The part of Var V that lies within trajectories."""
    split_error: float
    """|within + between - Var V|."""


def measure_tree(settings: BoundSettings, seed: int) -> TreeMeasured:
    """A tree with easy and hard prompts under a random bigram policy."""
    generator = torch.Generator().manual_seed(seed)
    A, T = settings.vocabulary, settings.length
    highest = (A - 1) * T
    threshold = torch.linspace(0.3 * highest, 0.7 * highest, settings.prompts).ceil().long()
    tree = token_tree(
        sum_rule(threshold), start=torch.ones(settings.prompts), vocabulary=A, length=T, eos=True
    )
    logits = torch.randn(A + 1, A, generator=generator, dtype=torch.float64)
    logits[:, 0] -= math.log(T)  # else most responses would end at once
    found = trajectories(tree, bigram_policy(tree, logits))
    error = [
        torch.randn(states, generator=generator, dtype=torch.float64)[tree.state[:, t]]
        for t, (states, _) in enumerate(tree.mdp.shapes)
    ]
    estimates = advantage_estimates(settings, found, torch.stack(error, dim=1))
    split = value_variance(found.values, tree.mask, found.probability)
    return TreeMeasured(
        bias={name: bias(found, advantages) for name, advantages in estimates.items()},
        batch_shift=batch_shift(found, estimates["exact V"], batch=settings.batch),
        within_share=(split.within / split.total).item(),
        split_error=abs((split.within + split.between - split.total).item()),
    )


def advantage_estimates(
    settings: BoundSettings, found: Trajectories, error: Float[Tensor, "n T"]
) -> dict[str, Float[Tensor, "n T"]]:
    """Advantages with the exact V, with the critic's errors, whitened, and weighted by W_S.

    Args:
        settings: The study's.
        found: All responses of a tree.
        error: The critic's error at each state, in units of ``settings.critic_error``.
    """
    tree = found.tree
    rewards = terminal_rewards(2.0 * tree.correct.double() - 1.0, tree.mask)

    def estimate(values: Float[Tensor, "n T"], lam: float) -> Float[Tensor, "n T"]:
        return gae(rewards, values, tree.mask, gamma=1.0, lam=lam)[0]

    exact = estimate(found.values, 1.0)
    estimates = {
        "exact V": exact,
        "exact V, whitened": whitened(found, exact),
        "exact V, W_S A": exact_stochasticity_weight(settings, found)[:, None] * exact,
    }
    for lam in settings.lambdas:
        biased = estimate(found.values + settings.critic_error * error, lam)
        estimates[f"V with error, lambda {lam:g}"] = biased
        estimates[f"V with error, lambda {lam:g}, whitened"] = whitened(found, biased)
    return estimates


def token_weight(found: Trajectories) -> Float[Tensor, "n T"]:
    """Visitation of every token: its response's probability."""
    return found.tree.mask * found.probability[:, None]


def whitened(found: Trajectories, x: Float[Tensor, "n T"]) -> Float[Tensor, "n T"]:
    """Less its mean over all tokens, divided by their standard deviation."""
    weight = token_weight(found)
    return (x - token_mean(x, weight)) / token_variance(x, weight).sqrt()


def bias(found: Trajectories, advantages: Float[Tensor, "n T"]) -> Bias:
    """What is left of E[A|s] = 0 and of E[A] = 0."""
    weight = token_weight(found)
    size = second_moment(advantages, weight).sqrt()
    conditional = second_moment(conditional_mean(found, advantages), weight).sqrt()
    return Bias(
        conditional=(conditional / size).item(),
        overall=(token_mean(advantages, weight) / size).item(),
    )


def batch_shift(found: Trajectories, advantages: Float[Tensor, "n T"], *, batch: int) -> float:
    """What whitening by a batch takes from unbiased advantages: the deviation of the batch's mean.

    To first order in 1 / batch: sqrt(E[(sum_t A)^2] / batch) / E[T], as a share of the root mean
    square of A.
    """
    p, weight = found.probability, token_weight(found)
    sums = (advantages * found.tree.mask).sum(1)
    deviation = (p @ sums.square() / batch).sqrt() / weight.sum()
    return (deviation / second_moment(advantages, weight).sqrt()).item()


def exact_stochasticity_weight(settings: BoundSettings, found: Trajectories) -> Float[Tensor, " n"]:
    """W_S of every response, with mu the mean of sigma under the policy, by prompt."""
    prompt, p = found.tree.prompt, found.probability
    zeros = torch.zeros_like(found.tree.mdp.start)
    mass = zeros.index_add(0, prompt, p)
    mu = (zeros.index_add(0, prompt, p * found.sigma) / mass)[prompt]
    return stochasticity_weight(
        found.sigma,
        mu,
        found.tree.correct,
        alpha_p=settings.coefficient,
        alpha_n=settings.coefficient,
        lambda_p=settings.sharpness,
        lambda_n=settings.sharpness,
    )


# ----------------------------------------------------------------------------------------- verdicts


def bound_verdict(norms: Sequence[float], bounds: Sequence[float]) -> Verdict:
    """A bound holds if it holds in every world, and is undecided if there was none."""
    if not norms:
        return "undecided"
    pairs = zip(norms, bounds, strict=True)
    return "holds" if all(norm <= bound * (1 + ROUNDING) for norm, bound in pairs) else "fails"


def governs_verdict(low: float, high: float, *, seeds: int) -> Verdict:
    """Var V governs the gradient's size if their rank correlation, at fixed Var Q, is positive.

    Args:
        low: Lower end of the correlation's interval; NaN if there is none.
        high: Upper end.
        seeds: How many there are; fewer than `FEWEST_SEEDS` decide nothing.
    """
    if seeds < FEWEST_SEEDS:
        return "undecided"
    if low > 0:
        return "holds"
    return "fails" if high < 0 else "undecided"


# --------------------------------------------------------------------------------------------- rows

Worlds = dict[tuple[int, Kind], list[Measured]]
"""The random worlds, by seed and kind."""
Number = Callable[[Measured], float]
"""One number of a world."""


def run(settings: BoundSettings, desk: Desk) -> list[Row]:
    """Measures everything and says what holds."""
    cells = list(product(settings.seeds, KINDS))
    measured = desk.map(random_worlds, [(settings, *cell) for cell in cells], desc="worlds")
    worlds: Worlds = dict(zip(cells, measured, strict=True))
    trees = desk.map(measure_tree, [(settings, seed) for seed in settings.seeds], desc="trees")
    chains = {T: measure(*chain(T)) for T in settings.chains}
    desk.table("worlds", [_flat(*cell, world) for cell in cells for world in worlds[cell]])
    desk.table("links", link_table(worlds))
    desk.table(
        "advantages",
        [
            {"seed": seed, "estimator": name, **found._asdict()}
            for seed, tree in zip(settings.seeds, trees, strict=True)
            for name, found in tree.bias.items()
        ],
    )
    return [
        *bound_rows(worlds, chains),
        *governs_rows(worlds),
        *two_prompt_rows(),
        *chain_rows(chains),
        *link_rows(worlds),
        *identity_rows(worlds),
        *score_rows(settings, worlds),
        *tree_rows(trees, batch=settings.batch),
    ]


def bound_rows(worlds: Worlds, chains: dict[int, Measured]) -> list[Row]:
    """(13) against the episodic gradient and against the token mean."""
    every = [*_all(worlds), *chains.values()]
    printed = [float(world.links.printed) for world in every]
    rows = []
    for objective, norms in (
        ("episodic J", [world.gradient for world in every]),
        ("token mean, grad J / E[T]", [_gradient(world) for world in every]),
    ):
        ratios = [norm / bound for norm, bound in zip(norms, printed, strict=True)]
        rows.append(
            Row(
                quantity="largest gradient / printed bound (13)",
                setting=f"{objective}; random worlds and chains",
                value=max(ratios),
                n=len(every),
                unit="ratio",
                paper="at most 1",
                claim=CLAIM,
                verdict=bound_verdict(norms, printed),
            )
        )
    random = _all(worlds)
    broken = [
        bound_verdict([world.gradient], [float(world.links.printed)]) == "fails" for world in random
    ]
    rows.append(
        Row(
            quantity="share of worlds that break (13)",
            setting="episodic J; random worlds alone",
            value=float(np.mean(broken)),
            n=len(random),
            unit="share",
            paper="0",
        )
    )
    return rows


def governs_rows(worlds: Worlds) -> list[Row]:
    """What goes with the size of the gradient, from world to world of a kind."""

    def row(name: str, x: Number, y: Number) -> Row:
        return _row(
            correlation_interval(worlds, x, y),
            quantity=f"rank correlation of the gradient's norm with {name}",
            setting="token mean; random worlds, within a kind",
            n=len(_all(worlds)),
        )

    fixed = row(
        "sd(V), at fixed Var Q",
        lambda world: _gradient(world) / math.sqrt(world.variance_q),
        lambda world: math.sqrt(world.variance_v / world.variance_q),
    )
    return [
        replace(
            fixed,
            paper="positive: Var V governs the size of an update",
            claim=CLAIM,
            verdict=governs_verdict(fixed.low, fixed.high, seeds=len({seed for seed, _ in worlds})),
        ),
        row("sd(V)", _gradient, lambda world: math.sqrt(world.variance_v)),
        row("sd(A)", _gradient, lambda world: math.sqrt(world.variance_a)),
        row("the printed bound (13)", _gradient, lambda world: float(world.links.printed)),
    ]


def two_prompt_rows() -> list[Row]:
    """The gradient falls as Var V rises at Var Q = 1, and the printed bound rises."""
    rows = []
    for gap in (0.0, 0.2, 0.4):
        world = measure(*two_prompts(gap))
        for quantity, value in (
            ("||grad J||", world.gradient),
            ("sigma_Q + sqrt(Var V)", float(world.links.printed) / world.score_bound),
        ):
            rows.append(
                Row(
                    quantity=quantity,
                    setting=f"two prompts, p = {0.5 - gap:g}, {0.5 + gap:g}: Var Q = 1, "
                    f"Var V = {4 * gap**2:.2g}",
                    value=value,
                )
            )
    return rows


def correlation_interval(worlds: Worlds, x: Number, y: Number) -> Interval:
    """Mean over seeds and kinds of the rank correlation of two numbers; NaN where none exists."""
    seeds = sorted({seed for seed, _ in worlds})
    kinds = [kind for kind in KINDS if (seeds[0], kind) in worlds]
    cells = np.array(
        [
            [
                rank_correlation(
                    np.array([x(world) for world in worlds[seed, kind]]),
                    np.array([y(world) for world in worlds[seed, kind]]),
                )
                for kind in kinds
            ]
            for seed in seeds
        ]
    )
    if np.isnan(cells).all():  # one value of V in every world, say
        return Interval(math.nan, math.nan, math.nan, math.nan, 0.95, (), ())
    return hierarchical_bootstrap(cells)


def chain_rows(chains: dict[int, Measured]) -> list[Row]:
    """The counter-example by length: the episodic gradient, the printed bound and the sound one."""
    rows = []
    for T, world in chains.items():
        printed = float(world.links.printed)
        for quantity, value, bounded in (
            ("||grad J||", world.gradient, True),
            ("||grad J|| / T", _gradient(world), True),
            ("printed bound (13)", printed, False),
            ("C sqrt(E[T] E_q[4p(1-p)])", world.episode_bound, False),
        ):
            rows.append(
                Row(
                    quantity=quantity,
                    setting=f"chain of T = {T} binary actions",
                    value=value,
                    paper="at most (13)" if bounded else "",
                    verdict=bound_verdict([value], [printed]) if bounded else "",
                )
            )
    return rows


NAMES = {
    "score_times_advantage": "(5) E[||g|| |A|]",
    "absolute_advantage": "(5) C E|A|",
    "root_mean_square": "(7) C sqrt(E[A^2])",
    "deviation": "(8) C sqrt(Var A)",
    "expanded": "(9) C sqrt(Var Q + Var V - 2 Cov)",
    "printed": "(13) C (sigma_Q + sqrt(Var V))",
}
"""The links, as the paper numbers them."""


def link_rows(worlds: Worlds) -> list[Row]:
    """How loose each link is, and in how many worlds it is at least the one before it."""
    every, where = _all(worlds), "token mean; random worlds"
    rows = []
    for link, name in NAMES.items():
        held = [holding(world.links, tolerance=ROUNDING)[link] for world in every]
        rows += [
            _row(
                median_interval([_tightness(world, link) for world in every]),
                quantity=f"{name} / true gradient, median",
                setting=where,
                n=len(every),
                unit="ratio",
            ),
            Row(
                quantity=f"{name}, worlds in which it is at least the link before",
                setting=where,
                value=float(np.mean(held)),
                n=len(every),
                unit="share",
                paper="1",
                verdict="holds" if all(held) else "fails",
            ),
        ]
    return rows


def link_table(worlds: Worlds) -> list[dict[str, Any]]:
    """Tightness of every link (median and range) and share of worlds where it holds, by kind."""
    rows = []
    for kind in KINDS:
        chosen = [world for (_, of), found in worlds.items() if of == kind for world in found]
        for link, name in NAMES.items() if chosen else ():
            ratios = [_tightness(world, link) for world in chosen]
            held = [holding(world.links, tolerance=ROUNDING)[link] for world in chosen]
            rows.append(
                {
                    **kind._asdict(),
                    "link": name,
                    "ratio_median": float(np.median(ratios)),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                    "share_holding": float(np.mean(held)),
                    "worlds": len(chosen),
                }
            )
    return rows


def identity_rows(worlds: Worlds) -> list[Row]:
    """Var A = Var Q - Var V, E sum A^2 = E_q[4p(1-p)], and the sound bounds."""
    every = _all(worlds)
    steady = _all(worlds, dynamics="deterministic")
    noisy = _all(worlds, dynamics="stochastic")
    rows = [
        Row(
            quantity="largest |Var A - (Var Q - Var V)|",
            setting="random worlds",
            value=max(world.identity_error for world in every),
            n=len(every),
            paper="Var A grows with Var V (10)",
        ),
        Row(
            quantity="largest |E sum A^2 - E_q[4p(1-p)]|",
            setting="random worlds, deterministic transitions",
            value=max(abs(world.energy - world.outcome_variance) for world in steady),
            n=len(steady),
        ),
        Row(
            quantity="largest E sum A^2 / E_q[4p(1-p)]",
            setting="random worlds, stochastic transitions",
            value=max(world.energy / world.outcome_variance for world in noisy),
            n=len(noisy),
            unit="ratio",
        ),
    ]
    for name, field in (
        ("C sqrt(E[T] E_q[4p(1-p)])", "episode_bound"),
        ("sqrt(E sum ||g||^2) sqrt(E_q[4p(1-p)])", "score_energy_bound"),
    ):
        ratios = [getattr(world, field) / world.gradient for world in every]
        rows += [
            _row(
                median_interval(ratios),
                quantity=f"{name} / ||grad J||, median",
                setting="episodic J; random worlds",
                n=len(every),
                unit="ratio",
            ),
            Row(
                quantity=f"{name} / ||grad J||, smallest",
                setting="episodic J; random worlds",
                value=min(ratios),
                n=len(every),
                unit="ratio",
            ),
        ]
    return rows


def score_rows(settings: BoundSettings, worlds: Worlds) -> list[Row]:
    """C (4) as measured: at most sqrt(2) for logits, as large as one likes for shared weights.

    The paper has PPO's clipping bound it, but that bounds the ratio of probabilities, and the
    same probabilities can come from scores of any size.
    """
    logits = [world.score_bound for world in _all(worlds, policy="tabular")]
    shared = rescaled_score_bounds(settings, factors=(1.0, 10.0, 100.0))
    return [
        Row(
            quantity="largest ||grad log pi||",
            setting="tabular logits; random worlds",
            value=max(logits),
            n=len(logits),
            paper="at most a constant C (4)",
            verdict=bound_verdict(logits, [math.sqrt(2)] * len(logits)),
        )
    ] + [
        Row(
            quantity="largest ||grad log pi||",
            setting=f"shared weights; the same policy from features x {factor:g}",
            value=C,
            # The first is the constant that the others are held against.
            paper="" if factor == 1 else "at most a constant C (4)",
            verdict="" if factor == 1 else bound_verdict([C], [shared[1.0]]),
        )
        for factor, C in shared.items()
    ]


def rescaled_score_bounds(
    settings: BoundSettings, *, factors: Sequence[float]
) -> dict[float, float]:
    """C of one policy in one world, from features of several sizes."""
    generator = torch.Generator().manual_seed(settings.seeds[0])
    mdp = random_mdp(
        generator,
        prompts=settings.prompts,
        states=settings.states,
        actions=settings.actions,
        horizon=settings.horizon,
        stochastic=False,
        random_length=False,
    )
    policy = random_shared(mdp, generator, parameters=settings.parameters)
    return {factor: measure(mdp, rescaled(policy, factor)).score_bound for factor in factors}


def rescaled(policy: Shared, factor: float) -> Shared:
    """The same action probabilities from features ``factor`` times as large."""
    return Shared(
        theta=policy.theta / factor,
        features=tuple(factor * features for features in policy.features),
    )


def tree_rows(trees: Sequence[TreeMeasured], *, batch: int) -> list[Row]:
    """E[A|s] by estimator, and the parts of Var V."""

    def row(quantity: str, setting: str, numbers: Sequence[float], paper: str) -> Row:
        return _row(
            bootstrap_interval(np.array(numbers)),
            quantity=quantity,
            setting=f"token trees; {setting}",
            n=len(trees),
            unit="share",
            paper=paper,
        )

    return [
        *(
            row(
                "rms of E[A|s] / rms of A",
                name,
                [tree.bias[name].conditional for tree in trees],
                "0 (6)",
            )
            for name in trees[0].bias
        ),
        row(
            "sd of the mean that whitening takes away / rms of A",
            f"exact V, batches of {batch} responses",
            [tree.batch_shift for tree in trees],
            "0 (6)",
        ),
        row(
            "part of Var V within trajectories",
            "all prompts",
            [tree.within_share for tree in trees],
            "W_S, which measures it, acts on Var V",
        ),
        Row(
            quantity="largest |within + between - Var V|",
            setting="token trees; all prompts",
            value=max(tree.split_error for tree in trees),
            n=len(trees),
        ),
    ]


def median_interval(x: Sequence[float]) -> Interval:
    """Median with its bootstrap interval over worlds."""
    return bootstrap_interval(
        np.array(x), statistic=lambda rows: np.median(rows, axis=1), num_resamples=2000
    )


def _row(interval: Interval, **what: Any) -> Row:
    return Row(value=interval.estimate, low=interval.low, high=interval.high, **what)


def _gradient(world: Measured) -> float:
    """||grad J|| / E[T], the token mean's."""
    return float(world.links.gradient)


def _tightness(world: Measured, link: str) -> float:
    return float(getattr(world.links, link)) / _gradient(world)


def _all(worlds: Worlds, **chosen: str) -> list[Measured]:
    """The worlds of the chosen kinds, say ``policy="tabular"``."""
    return [
        world
        for (_, kind), found in worlds.items()
        if chosen.items() <= kind._asdict().items()
        for world in found
    ]


def _flat(seed: int, kind: Kind, world: Measured) -> dict[str, Any]:
    """A world as a row of the table of worlds."""
    scalars = {name: value for name, value in vars(world).items() if name != "links"}
    chain_ = {f"link_{name}": float(value) for name, value in world.links._asdict().items()}
    return {"seed": seed, **kind._asdict(), **scalars, **chain_}


STUDY = Study(
    name="bound",
    about="the gradient bound, link by link, in worlds that are solved exactly",
    settings=BoundSettings,
    run=run,
)
