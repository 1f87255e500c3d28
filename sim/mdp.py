"""Worlds small enough to be solved exactly: finite-horizon MDPs and softmax policies, in float64.

States come in layers. A response starts in a state of layer 0 (its prompt, drawn from q), each
token leads from layer t to layer t + 1, and it ends in the last layer or earlier, in a state that
ends; only there is a reward, and V of such a state is that reward. So with T the number of
tokens, T may be random. Everything is differentiable, so autograd can check what is derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

Layers = tuple[Tensor, ...]
"""One tensor for each layer; what it holds is said where it is used."""


@dataclass(frozen=True)
class MDP:
    """A world of H steps with states in layers 0..H."""

    start: Float[Tensor, " K"]
    """q, the probability of each prompt. The prompts are the states of layer 0, which never end."""
    transitions: Layers
    """H of them, from layer t to t + 1: probabilities [S, A, N], or successors [S, A] (integers)
    where transitions are deterministic. Rows of states that end have no effect."""
    ends: Layers
    """H + 1 of [S], Boolean: the states in which a response ends. All of layer H do."""
    reward: Layers
    """H + 1 of [S], any finite numbers; read only where the response ends."""

    def __post_init__(self) -> None:
        """Refuses what is no MDP.

        Raises:
            ValueError: Names the layer and what is wrong with it.
        """
        _check_probabilities("start", self.start[None])
        H = len(self.transitions)
        if H < 1 or len(self.ends) != H + 1 or len(self.reward) != H + 1:
            raise ValueError(
                f"MDP: {H} transitions (at least 1) need one more of ends and of reward, "
                f"got {len(self.ends)} and {len(self.reward)}"
            )
        if bool(self.ends[0].any()) or not bool(self.ends[H].all()):
            raise ValueError("MDP: ends must be False in all of layer 0 and True in all of layer H")
        sizes = [len(self.start), *(len(ends) for ends in self.ends[1:])]
        for t, (ends, reward) in enumerate(zip(self.ends, self.reward, strict=True)):
            if not ends.shape == reward.shape == (sizes[t],):
                raise ValueError(f"MDP: ends and reward of layer {t} must be [{sizes[t]}]")
            if not bool(reward[ends].isfinite().all()):
                raise ValueError(f"MDP: reward of layer {t} must be finite where responses end")
        for t, transition in enumerate(self.transitions):
            S, N = sizes[t], sizes[t + 1]
            dense = transition.ndim == 3 and transition.shape[2] == N
            if transition.shape[0] != S or not (dense or transition.ndim == 2):
                raise ValueError(
                    f"MDP: transition {t} must be [{S}, A, {N}] or successors [{S}, A], "
                    f"got {tuple(transition.shape)}"
                )
            if dense:
                _check_probabilities(f"transition {t}", transition)
            elif transition.is_floating_point() or bool(
                ((transition < 0) | (transition >= N)).any()
            ):
                raise ValueError(f"MDP: successors of transition {t} must be integers 0..{N - 1}")

    @property
    def horizon(self) -> int:
        """H, the largest number of tokens."""
        return len(self.transitions)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(states, actions) of each of the H layers that are acted in."""
        return [(transition.shape[0], transition.shape[1]) for transition in self.transitions]


def _check_probabilities(name: str, rows: Float[Tensor, "*rows N"]) -> None:
    if bool((rows < 0).any()) or not bool(((rows.sum(-1) - 1).abs() < 1e-9).all()):
        raise ValueError(f"MDP: {name} must hold probabilities that sum to 1")


# ---------------------------------------------------------------------------------------- policies


class Policy(Protocol):
    """A softmax policy: how logits depend on the P parameters.

    ``layers`` arguments hold one tensor [S, A] for each of the H layers that are acted in.
    """

    def logits(self) -> Layers:
        """Logits [S, A] of each layer."""

    def score_norms(self, probs: Layers) -> Layers:
        """``||grad log pi(a|s)||`` [S, A] of each layer, at action probabilities ``probs``."""

    def token_scores(
        self, step: int, state: Int[Tensor, " n"], action: Int[Tensor, " n"]
    ) -> Float[Tensor, "n P"]:
        """``grad log pi(a|s)`` of n tokens, all of one step."""

    def gradient(self, pull: Layers) -> Float[Tensor, " P"]:
        """The gradient in the parameters of what has the gradient ``pull`` in the logits."""


@dataclass(frozen=True)
class Tabular:
    """One logit for each state and action."""

    table: Layers
    """H of [S, A]."""

    def logits(self) -> Layers:
        """The table itself."""
        return self.table

    def score_norms(self, probs: Layers) -> Layers:
        """``sqrt(1 - 2 pi(a|s) + sum_b pi(b|s)^2)``: at most sqrt(2)."""
        return tuple(
            (1 - 2 * pi + pi.square().sum(-1, keepdim=True)).clamp(min=0).sqrt() for pi in probs
        )

    def token_scores(
        self, step: int, state: Int[Tensor, " n"], action: Int[Tensor, " n"]
    ) -> Float[Tensor, "n P"]:
        """Zero but for the A logits of the token's state."""
        A = self.table[step].shape[1]
        first = sum(table.numel() for table in self.table[:step])
        pi = self.table[step].softmax(-1)
        scores = pi.new_zeros(len(state), sum(table.numel() for table in self.table))
        columns = first + A * state[:, None] + torch.arange(A)
        scores[torch.arange(len(state))[:, None], columns] = torch.eye(A).to(pi)[action] - pi[state]
        return scores

    def gradient(self, pull: Layers) -> Float[Tensor, " P"]:
        """The pulls one after the other."""
        return torch.cat([x.flatten() for x in pull])


@dataclass(frozen=True)
class Shared:
    """Logits ``features . theta``: every token moves the same few parameters."""

    theta: Float[Tensor, " P"]
    features: Layers
    """H of [S, A, P]."""

    def logits(self) -> Layers:
        """``features . theta``."""
        return tuple(features @ self.theta for features in self.features)

    def score_norms(self, probs: Layers) -> Layers:
        """Norms of the features less their mean under pi: as large as the features."""
        return tuple(
            torch.linalg.vector_norm(_centred(features, pi), dim=-1)
            for features, pi in zip(self.features, probs, strict=True)
        )

    def token_scores(
        self, step: int, state: Int[Tensor, " n"], action: Int[Tensor, " n"]
    ) -> Float[Tensor, "n P"]:
        """Features of the action less their mean under pi."""
        features = self.features[step]
        return _centred(features, (features @ self.theta).softmax(-1))[state, action]

    def gradient(self, pull: Layers) -> Float[Tensor, " P"]:
        """The features, weighted by the pulls."""
        parts = zip(pull, self.features, strict=True)
        return torch.stack([torch.einsum("sa,sap->p", x, phi) for x, phi in parts]).sum(0)


def _centred(features: Float[Tensor, "S A P"], pi: Float[Tensor, "S A"]) -> Float[Tensor, "S A P"]:
    return features - torch.einsum("sa,sap->sp", pi, features)[:, None]


# ---------------------------------------------------------------------------- dynamic programming


@dataclass(frozen=True)
class Solution:
    """An MDP under a policy, exactly."""

    start: Float[Tensor, " K"]
    probs: Layers
    """pi(a|s), H of [S, A]."""
    q: Layers
    """Q(s, a), H of [S, A]."""
    v: Layers
    """V(s), H + 1 of [S]; the reward where the response ends."""
    visits: Layers
    """d_t(s), H of [S]: the probability that step t acts in s. They sum to P(T > t)."""

    @property
    def objective(self) -> Float[Tensor, ""]:
        """J, the expected reward of a response."""
        return self.start @ self.v[0]

    @property
    def mean_length(self) -> Float[Tensor, ""]:
        """E[T], tokens."""
        return torch.stack([visits.sum() for visits in self.visits]).sum()

    @property
    def advantages(self) -> Layers:
        """A(s, a) = Q(s, a) - V(s), H of [S, A]."""
        return tuple(q - v[:, None] for q, v in zip(self.q, self.v, strict=False))


def solve(mdp: MDP, logits: Sequence[Float[Tensor, "S A"]]) -> Solution:
    """V, Q and visitations of a softmax policy, by one pass back and one pass forth.

    Args:
        mdp: The world.
        logits: H of [S, A] (`Policy.logits`); the solution is differentiable in them.
    """
    probs = tuple(layer.softmax(-1) for layer in logits)
    q, v = evaluate(mdp, probs, mdp.reward)
    return Solution(start=mdp.start, probs=probs, q=q, v=v, visits=_visits(mdp, probs))


def evaluate(mdp: MDP, probs: Layers, payoff: Layers) -> tuple[Layers, Layers]:
    """Expected payoff from each state and action, and from each state (Q and V of that payoff).

    Args:
        mdp: The world.
        probs: pi(a|s), H of [S, A].
        payoff: What a response that ends in a state is paid, H + 1 of [S].
    """
    q: list[Tensor] = []
    v: list[Tensor] = [payoff[-1]]
    for t in reversed(range(mdp.horizon)):
        q.insert(0, _lookahead(mdp.transitions[t], v[0]))
        v.insert(0, torch.where(mdp.ends[t], payoff[t], (probs[t] * q[0]).sum(-1)))
    return tuple(q), tuple(v)


def success_rate(mdp: MDP, probs: Layers) -> Float[Tensor, " K"]:
    """p of each prompt, [K]: the probability that a response is correct.

    Decision: in these worlds a response is correct if its reward is positive, since nothing
    shapes the reward and no verifier stands beside it.
    """
    rate = evaluate(mdp, probs, tuple((reward > 0).double() for reward in mdp.reward))[1][0]
    return rate.clamp(max=1)  # what rounding may add


def reward_variance(mdp: MDP, probs: Layers) -> Float[Tensor, " K"]:
    """Variance of the terminal reward within each prompt, [K]: 4 p (1 - p) for rewards +1, -1."""
    mean = evaluate(mdp, probs, mdp.reward)[1][0]
    square = evaluate(mdp, probs, tuple(reward.square() for reward in mdp.reward))[1][0]
    return (square - mean.square()).clamp(min=0)  # what rounding may take away


def policy_gradient(
    policy: Policy, solution: Solution, signal: Layers | None = None
) -> Float[Tensor, " P"]:
    """E sum_t g_t A_t, which is grad J (policy-gradient theorem). Divide by E[T] for a token mean.

    Args:
        policy: The policy that was solved.
        solution: From `solve`.
        signal: H of [S, A] in the place of the exact advantages.
    """
    signal = solution.advantages if signal is None else signal
    parts = zip(solution.visits, solution.probs, signal, strict=True)
    return policy.gradient(tuple(softmax_pull(d[:, None] * pi * x, pi) for d, pi, x in parts))


def softmax_pull(flow: Float[Tensor, "S A"], probs: Float[Tensor, "S A"]) -> Float[Tensor, "S A"]:
    """Gradient in the logits of ``sum_{s,a} flow(s, a) log pi(a|s)``, for a given flow."""
    return flow - probs * flow.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Tokens:
    """Every state and action in one row, as `cvpo.bound` takes them. n = sum of S A over layers."""

    weight: Float[Tensor, " n"]
    """d_t(s) pi(a|s); sums to E[T]."""
    score_norm: Float[Tensor, " n"]
    q: Float[Tensor, " n"]
    v: Float[Tensor, " n"]

    @property
    def advantages(self) -> Float[Tensor, " n"]:
        """A(s, a)."""
        return self.q - self.v


def tokens(policy: Policy, solution: Solution) -> Tokens:
    """The world's tokens with the visitation of each."""

    def flat(layers: Sequence[Tensor]) -> Tensor:
        return torch.cat([layer.flatten() for layer in layers])

    pairs = list(zip(solution.visits, solution.probs, strict=True))
    return Tokens(
        weight=flat([d[:, None] * pi for d, pi in pairs]),
        score_norm=flat(policy.score_norms(solution.probs)),
        q=flat(solution.q),
        v=flat([v[:, None].expand_as(q) for v, q in zip(solution.v, solution.q, strict=False)]),
    )


def _visits(mdp: MDP, probs: Layers) -> Layers:
    visits = [mdp.start]
    for t in range(mdp.horizon - 1):
        arriving = _arrivals(
            mdp.transitions[t], visits[t][:, None] * probs[t], len(mdp.ends[t + 1])
        )
        visits.append(torch.where(mdp.ends[t + 1], 0.0, arriving))
    return tuple(visits)


def _lookahead(
    transition: Shaped[Tensor, "S A *N"], v: Float[Tensor, " N"]
) -> Float[Tensor, "S A"]:
    """E[V(s') | s, a]."""
    return v[transition] if transition.ndim == 2 else transition @ v


def _arrivals(
    transition: Shaped[Tensor, "S A *N"], flow: Float[Tensor, "S A"], size: int
) -> Float[Tensor, " N"]:
    """The probability that arrives in each next state."""
    if transition.ndim == 2:
        return flow.new_zeros(size).index_add(0, transition.flatten(), flow.flatten())
    return torch.einsum("sa,san->n", flow, transition)


# ------------------------------------------------------------------------------------ random worlds


def random_mdp(
    generator: torch.Generator,
    *,
    prompts: int,
    states: int,
    actions: int,
    horizon: int,
    stochastic: bool,
    random_length: bool,
) -> MDP:
    """A world with everything drawn at random and rewards of +1 and -1.

    Args:
        generator: Source of everything.
        prompts: K, states of layer 0.
        states: Of every later layer.
        actions: In every state.
        horizon: H.
        stochastic: Transitions to all next states with random probabilities, or to one at random.
        random_length: Each state between the first and the last layer, but for one in each layer,
            ends the response with probability .3; otherwise T = H.
    """
    sizes = [prompts] + [states] * horizon
    ends, transitions = [torch.zeros(prompts, dtype=torch.bool)], []
    for t, size in enumerate(sizes[:-1]):
        if stochastic:
            transitions.append(_simplex(generator, size, actions, states))
        else:
            transitions.append(torch.randint(states, (size, actions), generator=generator))
        chance = 1.0 if t + 1 == horizon else 0.3 if random_length else 0.0
        stops = torch.rand(states, generator=generator) < chance
        if t + 1 < horizon:
            stops[0] = False
        ends.append(stops)
    sign = [torch.randint(2, (size,), generator=generator) for size in sizes]
    return MDP(
        start=_simplex(generator, prompts),
        transitions=tuple(transitions),
        ends=tuple(ends),
        reward=tuple(2.0 * x.double() - 1.0 for x in sign),
    )


def random_tabular(mdp: MDP, generator: torch.Generator, *, scale: float = 1.0) -> Tabular:
    """Normal logits of standard deviation ``scale``."""
    return Tabular(tuple(scale * _normal(generator, *shape) for shape in mdp.shapes))


def random_shared(
    mdp: MDP, generator: torch.Generator, *, parameters: int, scale: float = 1.0
) -> Shared:
    """Standard normal features, and parameters that give logits of about ``scale``.

    Args:
        mdp: The world.
        generator: Source of everything.
        parameters: P.
        scale: Standard deviation of the logits.
    """
    features = tuple(_normal(generator, *shape, parameters) for shape in mdp.shapes)
    theta = scale * _normal(generator, parameters) / parameters**0.5
    return Shared(theta=theta, features=features)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _simplex(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform on the simplex over the last axis: exponentials over their sum."""
    x = torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator)
    return x / x.sum(-1, keepdim=True)
