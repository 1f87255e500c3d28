"""The prompt bandit: a policy over prompts whose success rates move as they are trained.

A response to prompt n is one of four kinds: correct or wrong, with values that settle late (their
spread sigma is low) or half-way (high). The policy is a softmax over the four logits ::

    logit(n, kind) = own[n, kind] + [kind is correct] * loading[n] . skill

so a gradient step on one prompt helps that prompt through ``own`` and every prompt that needs the
same skills through ``skill``. It carries the size of the paper's run, 17 398 prompts and 256 x 16
responses a step. `ResponseModel` makes the critic's values of a response from its kind. The true
success rates are known at every step.

Many policies (seeds and settings) are carried at once, as the first axis R of every array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

KINDS = 4
"""Wrong-low, wrong-high, correct-low, correct-high: kind // 2 is the outcome, kind % 2 sigma's."""
_CORRECT = torch.tensor([False, False, True, True])


@dataclass(frozen=True)
class ResponseModel:
    """How the critic's values V(s_0) .. V(s_{T-1}) of a response look, in units of the reward.

    V starts at the prompt's true value ``2p - 1`` plus the critic's error there, and makes one move
    towards the outcome, once it becomes foreseeable; the rest of the way is the terminal reward's.
    A move of height h at a share u of the response has a standard deviation of h sqrt(u (1 - u)):
    half-way it is largest, near the end it vanishes.
    """

    tokens: int = 16
    """T, 2 to 32 value tokens of one response."""
    spread: float = 0.2
    """Share of the way from V(s_0) to the outcome that the critic foresees, 0 to 1."""
    settles_low: float = 0.9
    """Share of the response after which V moves, for responses of low spread."""
    settles_high: float = 0.5
    """The same for responses of high spread."""
    jitter: float = 0.1
    """Both vary by up to this much from response to response, uniformly."""
    foresight: float = 1.0
    """Correlation of the move's direction with the outcome, -1 to 1."""
    noise: float = 0.02
    """Standard deviation of the critic's error at each token, independent."""
    bias: float = 0.05
    """Standard deviation over prompts of the critic's error on the prompt's own value."""
    entropy_gap: float = 0.05
    """By how many nats the mean token entropy of responses of high spread exceeds the others'."""
    entropy_jitter: float = 0.1
    """Mean token entropies vary by up to this much besides, uniformly, in nats."""

    def __post_init__(self) -> None:
        """Refuses a model that makes no sense.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        _check(
            self,
            tokens=(2, 32),
            spread=(0, 1),
            settles_low=(0, 1),
            settles_high=(0, 1),
            jitter=(0, 1),
            foresight=(-1, 1),
            noise=(0, math.inf),
            bias=(0, math.inf),
            entropy_gap=(-1, 1),
            entropy_jitter=(0, 1),
        )


@dataclass(frozen=True)
class BanditConfig:
    """The world. Defaults: small enough for many settings and seeds side by side."""

    prompts: int = 256
    """That can be trained on."""
    held_out: int = 0
    """Further prompts that are never trained and share the skills: what a benchmark measures."""
    difficulty_mean: float = -0.5
    """Mean over prompts of the starting policy's log-odds of success."""
    difficulty_sd: float = 2.0
    """Its standard deviation."""
    skills: int = 8
    """Abilities that prompts share. A prompt's loading is a unit vector over them."""
    interference: float = 0.1
    """Share of loadings that are negative: training the prompt hurts those that need the skill."""
    own_rate: float = 0.3
    """Step size on a prompt's own logits, for each visit."""
    skill_rate: float = 0.1
    """Step size on the skills, for each optimiser step."""
    unlearnable: float = 0.0
    """Share of prompts whose rate does not move, whatever is trained."""
    stops_after: int | None = None
    """Steps after which nothing is learned any more (a plateau); 0: a frozen policy."""
    high_share: float = 0.5
    """Share of responses of high spread at the start."""
    high_log_odds: float = 0.0
    """Log-odds by which high spread is likelier among correct responses than among wrong ones."""
    partial: float = 0.0
    """Mean credit of a wrong response: the share of `parts` that it gets right (4.4). It misses one
    at least, so this is at most 1 - 1/parts."""
    parts: int = 4
    """In how many parts a response is graded, at least 2."""
    responses: ResponseModel = field(default_factory=ResponseModel)

    def __post_init__(self) -> None:
        """Refuses an impossible world.

        Raises:
            ValueError: Names the field, its value and what is allowed.
        """
        _check(
            self,
            prompts=(1, 10**7),
            held_out=(0, 10**7),
            difficulty_mean=(-20, 20),
            difficulty_sd=(0, 20),
            skills=(1, 1024),
            interference=(0, 1),
            own_rate=(0, math.inf),
            skill_rate=(0, math.inf),
            unlearnable=(0, 1),
            stops_after=(0, math.inf),
            high_share=(0.01, 0.99),
            high_log_odds=(-10, 10),
            parts=(2, 64),
        )
        _check(self, partial=(0, 1 - 1 / self.parts))


class Responses(NamedTuple):
    """M groups of G responses."""

    row: Int[Tensor, " M"]
    """Run times `Bandit.size` plus prompt."""
    kind: Int[Tensor, "M G"]
    correct: Float[Tensor, "M G"]
    """R: 1 for a correct response; for a wrong one 0, or its partial credit."""
    values: Float[Tensor, "M G T"]
    """What the critic says, V of the state before each token."""
    entropy: Float[Tensor, "M G"]
    """Mean token entropy, nats."""
    probability: Float[Tensor, "M kinds"]
    """Of each kind, under the policy that responded."""

    def only(self, chosen: Bool[Tensor, " M"] | slice) -> Responses:
        """Some of the groups."""
        return Responses(*(part[chosen] for part in self))

    @classmethod
    def joined(cls, parts: Sequence[Responses]) -> Responses:
        """All groups of several."""
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))


class Draws(NamedTuple):
    """The random numbers of M groups; the same for every setting that is compared."""

    kind: Float[Tensor, "M G"]
    """Uniform, like the next four."""
    settles: Float[Tensor, "M G"]
    foreseen: Float[Tensor, "M G"]
    entropy: Float[Tensor, "M G"]
    credit: Float[Tensor, "M G"]
    noise: Float[Tensor, "M G T"]
    """Standard normal."""

    @classmethod
    def of(cls, generator: torch.Generator, groups: int, rollouts: int, tokens: int) -> Draws:
        """Draws for groups of a number of rollouts."""
        uniform = torch.rand(5, groups, rollouts, generator=generator)
        noise = torch.randn(groups, rollouts, tokens, generator=generator)
        kind, settles, foreseen, entropy, credit = uniform
        return cls(kind, settles, foreseen, entropy, credit, noise)


class Bandit:
    """R policies in worlds drawn from their seeds. Float32 on one core; float64 is not needed."""

    def __init__(self, config: BanditConfig, seeds: Sequence[int]) -> None:
        """Draws the worlds.

        Args:
            config: What they have in common.
            seeds: One for each policy, [R]; equal seeds are equal worlds.
        """
        self.config = config
        self.runs = len(seeds)
        self.size = config.prompts + config.held_out
        """Prompts of one world; those from `config.prompts` on are held out."""
        distinct = list(dict.fromkeys(seeds))
        worlds = [_draw_world(config, seed, self.size) for seed in distinct]
        world = torch.tensor([distinct.index(seed) for seed in seeds])
        start = torch.stack([w.logits for w in worlds])
        self.world = world
        self.loading = torch.stack([w.loading for w in worlds])
        self.error = torch.stack([w.error for w in worlds])
        self.learnable = torch.stack([w.learnable for w in worlds])
        self.own = start[world].flatten(0, 1).contiguous()
        """Own logits of every prompt, [R * size, kinds]."""
        self.skill = torch.zeros(self.runs, config.skills)
        self.credit = _binomial_edges(config.parts, config.partial)
        self.steps = 0

    def rates(self) -> Float[Tensor, "R size"]:
        """True success rates, held-out prompts included."""
        lift = (self.loading[self.world] @ self.skill[:, :, None]).flatten()
        return _success(_probability(self.own, lift)).view(self.runs, self.size)

    def rates_of(self, row: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        """True success rates of rows."""
        return _success(_probability(self.own[row], self._lift(row)))

    def first_values(
        self, row: Int[Tensor, " M"], rate: Float[Tensor, " M"]
    ) -> Float[Tensor, " M"]:
        """What the critic says of prompts with these success rates: V(s_0), without its noise."""
        run, prompt = self._split(row)
        credit = rate + (1 - rate) * self.config.partial
        return 2 * credit - 1 + self.error[self.world[run], prompt]

    def high_share(self) -> Float[Tensor, "R size"]:
        """True share of responses of high spread."""
        lift = (self.loading[self.world] @ self.skill[:, :, None]).flatten()
        probability = _probability(self.own, lift)
        return (probability[:, 1] + probability[:, 3]).view(self.runs, self.size)

    def high_log_odds(self) -> Float[Tensor, "R size 2"]:
        """log(pi(high) / pi(low)) among wrong and among correct responses; no skill moves it."""
        low, high = self.own[:, 0::2], self.own[:, 1::2]
        return (high - low).view(self.runs, self.size, 2)

    def respond(self, row: Int[Tensor, " M"], draws: Draws) -> Responses:
        """G responses to each of M prompts, with the critic's values."""
        probability = _probability(self.own[row], self._lift(row))
        cumulative = probability.cumsum(1)
        # Rounding keeps the sum from 1; in units of it, what has no probability is never drawn.
        drawn = draws.kind * cumulative[:, -1:]
        kind = torch.searchsorted(cumulative[:, : KINDS - 1].contiguous(), drawn, right=True)
        correct = (kind >= 2).float()
        if self.config.partial > 0:
            part = torch.searchsorted(self.credit, draws.credit) / self.config.parts
            correct = torch.maximum(correct, part)
        first = self.first_values(row, _success(probability))
        model = self.config.responses
        values = response_values(model, first, kind, 2 * correct - 1, draws)
        entropy = (
            0.5 + model.entropy_gap * (kind % 2) + model.entropy_jitter * (draws.entropy - 0.5)
        )
        return Responses(row, kind, correct, values, entropy, probability)

    def update(self, responses: Responses, advantage: Float[Tensor, "M G"], *, batch: int) -> None:
        """One gradient step: ``mean over the group of A' grad log pi`` for each prompt.

        Args:
            responses: What the current policy said.
            advantage: What each response's log-probability is multiplied by.
            batch: Prompts of an optimiser step, by which the skills' gradient is divided.
        """
        self.steps += 1
        config = self.config
        if config.stops_after is not None and self.steps > config.stops_after:
            return
        row, kind = responses.row, responses.kind
        rollouts = kind.shape[1]
        pushed = torch.zeros(len(row), KINDS).scatter_add_(1, kind, advantage) / rollouts
        gradient = pushed - responses.probability * advantage.mean(1, keepdim=True)
        run, prompt = self._split(row)
        world = self.world[run]
        gradient *= self.learnable[world, prompt][:, None]
        self.own.index_add_(0, row, config.own_rate * gradient)
        shared = gradient[:, 2:].sum(1, keepdim=True) * self.loading[world, prompt]
        self.skill.index_add_(0, run, (config.skill_rate / batch) * shared)

    def _split(self, row: Int[Tensor, " M"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
        run = torch.div(row, self.size, rounding_mode="floor")
        return run, row - run * self.size

    def _lift(self, row: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
        run, prompt = self._split(row)
        return (self.loading[self.world[run], prompt] * self.skill[run]).sum(1)


def response_values(
    model: ResponseModel,
    first: Float[Tensor, " M"],
    kind: Int[Tensor, "M G"],
    reward: Float[Tensor, "M G"],
    draws: Draws,
) -> Float[Tensor, "M G T"]:
    """The critic's values of responses (see `ResponseModel`).

    Args:
        model: The constants.
        first: The critic's value of each prompt.
        kind: Of each response.
        reward: Its terminal reward.
        draws: Its random numbers.
    """
    settles = torch.where(kind % 2 == 1, model.settles_high, model.settles_low)
    settles = settles + model.jitter * (2 * draws.settles - 1)
    if model.foresight < 1:
        seen = draws.foreseen < (1 + model.foresight) / 2
        reward = torch.where(seen, reward, -reward)
    height = model.spread * (reward - first[:, None])
    share = (torch.arange(model.tokens) + 0.5) / model.tokens
    moved = share >= settles[:, :, None]
    return torch.addcmul(
        first[:, None, None] + model.noise * draws.noise, moved, height[:, :, None]
    )


class _World(NamedTuple):
    logits: Float[Tensor, "size kinds"]
    loading: Float[Tensor, "size skills"]
    error: Float[Tensor, " size"]
    learnable: Float[Tensor, " size"]


def _draw_world(config: BanditConfig, seed: int, size: int) -> _World:
    generator = torch.Generator().manual_seed(seed)
    odds = config.difficulty_mean + config.difficulty_sd * torch.randn(size, generator=generator)
    loading = torch.randn(size, config.skills, generator=generator).abs()
    sign = torch.rand(size, config.skills, generator=generator) < config.interference
    loading = torch.where(sign, -loading, loading)
    loading = loading / loading.norm(dim=1, keepdim=True)
    error = config.responses.bias * torch.randn(size, generator=generator)
    learnable = torch.rand(size, generator=generator) >= config.unlearnable
    high = math.log(config.high_share / (1 - config.high_share))
    wrong_high, correct_high = high - config.high_log_odds / 2, high + config.high_log_odds / 2
    split = torch.tensor([-wrong_high, wrong_high, -correct_high, correct_high])
    split = torch.nn.functional.logsigmoid(split)
    outcome = torch.nn.functional.logsigmoid(torch.stack([-odds, -odds, odds, odds], dim=1))
    learnable[config.prompts :] = True  # held-out prompts move through the skills, or not at all
    # What cannot be learned is not learned through the skills either.
    return _World(outcome + split, loading * learnable[:, None], error, learnable.float())


def _binomial_edges(parts: int, share: float) -> Float[Tensor, " parts"]:
    """Cumulative probabilities of 0 .. parts - 2 parts right: a uniform number falls between.

    One part is wrong for certain, each of the others right with the probability that makes `share`
    the mean.
    """
    others = parts - 1
    right = min(1.0, share * parts / others)
    chance = [math.comb(others, n) * right**n * (1 - right) ** (others - n) for n in range(others)]
    return torch.tensor(chance, dtype=torch.float64).cumsum(0).float()


def _probability(own: Tensor, lift: Tensor) -> Float[Tensor, "M kinds"]:
    return torch.softmax(own + lift[:, None] * _CORRECT, dim=1)


def _success(probability: Float[Tensor, "M kinds"]) -> Float[Tensor, " M"]:
    return (probability[:, 2] + probability[:, 3]).clamp(max=1)  # rounding may exceed 1


def _check(config: object, **ranges: tuple[float, float]) -> None:
    for entry in fields(config):  # type: ignore[arg-type]
        if entry.name not in ranges:
            continue
        low, high = ranges[entry.name]
        value = getattr(config, entry.name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            allowed = f"lie in [{low}, {high}]" if math.isfinite(high) else f"be at least {low}"
            raise ValueError(f"{entry.name} must {allowed} and be finite, got {value!r}")


PAPER_WORLD = BanditConfig(prompts=17398, own_rate=0.1, skill_rate=0.01)
"""The paper's size, at rates under which mean success rises from .42 to .86 in its 2000 steps."""
