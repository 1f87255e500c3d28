"""The token tree: responses over a small vocabulary, every one of them listed with its probability.

A state is the prompt and the tokens so far, so transitions are deterministic, as for a language
model. The tree is an `MDP`, solved exactly; beside it stands the list of all n whole responses. So
the distribution of sigma, and the expected update under any weight on trajectories, are sums, not
samples::

    update(W) = sum_i p_i W_i sum_t A_{i,t} g_{i,t}

Values follow the method's convention: ``values[:, t]`` is V of the state *before* token t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cvpo import gae, terminal_rewards, trajectory_std
from sim.mdp import MDP, Layers, Policy, Shared, Solution, softmax_pull, solve

Rule = Callable[[Int[Tensor, " n"], Int[Tensor, "n T"], Bool[Tensor, "n T"]], Bool[Tensor, " n"]]
"""What makes a response correct: (prompt, tokens, response mask) -> whether each is."""


# ----------------------------------------------------------------------------------------- the tree


@dataclass(frozen=True)
class TokenTree:
    """A token tree as an MDP, and all its n responses. T is the length of the longest."""

    mdp: MDP
    prompt: Int[Tensor, " n"]
    tokens: Int[Tensor, "n T"]
    """0 in masked slots."""
    mask: Bool[Tensor, "n T"]
    """True on response tokens, the end token included."""
    state: Int[Tensor, "n T"]
    """The state of layer t before token t; 0 in masked slots."""
    correct: Bool[Tensor, " n"]


def token_tree(
    rule: Rule, *, start: Float[Tensor, " K"], vocabulary: int, length: int, eos: bool = False
) -> TokenTree:
    """Builds the tree; a response is rewarded with +1 if the rule finds it correct, with -1 if not.

    Args:
        rule: For instance `sum_rule` or `pattern_rule`.
        start: q, how often each prompt is drawn, [K]; only proportions count.
        vocabulary: Tokens 0..vocabulary-1. There are up to ``K vocabulary^length`` responses.
        length: Tokens of a response, or of the longest one if there is an end token.
        eos: Token 0 ends a response.

    Raises:
        ValueError: A vocabulary below 2, a length below 1, or a negative entry of ``start``.
    """
    if vocabulary < 2 or length < 1:
        raise ValueError(
            f"token_tree: needs at least 2 tokens and length 1, got {vocabulary} and {length}"
        )
    K = len(start)
    prompt, tokens = torch.arange(K), torch.zeros(K, 0, dtype=torch.long)
    state = tokens  # the states passed on the way to each state of the layer
    ends = [torch.zeros(K, dtype=torch.bool)]
    transitions, correct, finished = [], [ends[0]], []
    for t in range(length):
        alive = (~ends[t]).nonzero().squeeze(1)
        successor = torch.zeros(len(ends[t]), vocabulary, dtype=torch.long)
        successor[alive] = torch.arange(len(alive) * vocabulary).view(-1, vocabulary)
        transitions.append(successor)
        parent = alive.repeat_interleave(vocabulary)
        token = torch.arange(vocabulary).repeat(len(alive))
        state = torch.cat([state[parent], parent[:, None]], dim=1)
        tokens = torch.cat([tokens[parent], token[:, None]], dim=1)
        prompt = prompt[parent]
        last = t + 1 == length
        ends.append(torch.full_like(token, last, dtype=torch.bool) | (eos & (token == 0)))
        correct.append(rule(prompt, tokens, torch.ones_like(tokens, dtype=torch.bool)))
        done = ends[-1]
        finished.append((prompt[done], _pad(tokens[done], length), _pad(state[done], length)))
    mdp = MDP(
        start=start.double() / start.double().sum(),
        transitions=tuple(transitions),
        ends=tuple(ends),
        reward=tuple(2.0 * x.double() - 1.0 for x in correct),
    )
    lengths = torch.cat([torch.full((len(p),), t + 1) for t, (p, _, _) in enumerate(finished)])
    return TokenTree(
        mdp=mdp,
        prompt=torch.cat([p for p, _, _ in finished]),
        tokens=torch.cat([x for _, x, _ in finished]),
        mask=torch.arange(length) < lengths[:, None],
        state=torch.cat([x for _, _, x in finished]),
        correct=torch.cat([x[done] for x, done in zip(correct, ends, strict=True)]),
    )


def _pad(x: Int[Tensor, "n t"], length: int) -> Int[Tensor, "n T"]:
    return torch.nn.functional.pad(x, (0, length - x.shape[1]))


def sum_rule(threshold: Int[Tensor, " K"]) -> Rule:
    """Correct if the tokens sum to at least the prompt's threshold: the higher, the harder."""
    return lambda prompt, tokens, mask: (tokens * mask).sum(1) >= threshold[prompt]


def pattern_rule(pattern: Int[Tensor, "K L"]) -> Rule:
    """Correct if the prompt's pattern stands somewhere in the response. L is at most its length."""

    def correct(
        prompt: Int[Tensor, " n"], tokens: Int[Tensor, "n T"], mask: Bool[Tensor, "n T"]
    ) -> Bool[Tensor, " n"]:
        L = pattern.shape[1]
        if tokens.shape[1] < L:
            return torch.zeros(len(prompt), dtype=torch.bool)
        windows = tokens.masked_fill(~mask, -1).unfold(1, L, 1)
        return (windows == pattern[prompt][:, None]).all(2).any(1)

    return correct


def bigram_policy(tree: TokenTree, logits: Float[Tensor, "A1 A"]) -> Shared:
    """A policy that sees the last token alone; all prompts and positions share its parameters.

    Args:
        tree: The tree.
        logits: Of each next token, in a row for each last token and a last row for the first token
            of a response, [A + 1, A].

    Raises:
        ValueError: The logits are not [A + 1, A].
    """
    A = tree.mdp.shapes[0][1]
    if logits.shape != (A + 1, A):
        raise ValueError(f"bigram_policy: logits must be [{A + 1}, {A}], got {logits.shape}")
    one_hot = torch.eye((A + 1) * A, dtype=torch.float64).view(A + 1, A, -1)
    features, last = [], torch.full((len(tree.mdp.start),), A)
    for ends in tree.mdp.ends[:-1]:
        features.append(one_hot[last])
        last = torch.arange(A).repeat(int((~ends).sum()))  # the states of the next layer, in order
    return Shared(theta=logits.double().flatten(), features=tuple(features))


# ------------------------------------------------------------------------------- whole trajectories


@dataclass(frozen=True)
class Trajectories:
    """All n responses of a tree under a policy. The probabilities sum to 1."""

    tree: TokenTree
    solution: Solution
    probability: Float[Tensor, " n"]
    values: Float[Tensor, "n T"]
    """V of the state before each token; 0 in masked slots."""
    advantages: Float[Tensor, "n T"]
    """Q(s_t, a_t) - V(s_t) = V(s_{t+1}) - V(s_t); 0 in masked slots."""
    sigma: Float[Tensor, " n"]
    """Population standard deviation of a response's values (section 4.1)."""


def trajectories(tree: TokenTree, policy: Policy) -> Trajectories:
    """Probabilities, values and spreads of all responses under a policy."""
    solution = solve(tree.mdp, policy.logits())
    T = tree.mask.shape[1]
    chosen = torch.stack(
        [solution.probs[t][tree.state[:, t], tree.tokens[:, t]] for t in range(T)], dim=1
    )
    values = torch.stack([solution.v[t][tree.state[:, t]] for t in range(T)], dim=1)
    values = values.masked_fill(~tree.mask, 0)
    rewards = terminal_rewards(2.0 * tree.correct.double() - 1.0, tree.mask)
    return Trajectories(
        tree=tree,
        solution=solution,
        probability=tree.mdp.start[tree.prompt] * chosen.masked_fill(~tree.mask, 1).prod(1),
        values=values,
        advantages=gae(rewards, values, tree.mask, gamma=1.0, lam=0.0)[0],
        sigma=trajectory_std(values, tree.mask),
    )


def sigma_distribution(
    found: Trajectories, chosen: Bool[Tensor, " n"]
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """The distribution of sigma among the chosen responses, say the correct ones of a prompt.

    Returns:
        Its distinct values in rising order, [m], and their probabilities, which sum to 1, [m].

    Raises:
        ValueError: The chosen responses have no probability.
    """
    total = found.probability[chosen].sum()
    if not bool(total > 0):
        raise ValueError("sigma_distribution: the chosen responses have probability 0")
    sigma, index = torch.unique(found.sigma[chosen], return_inverse=True)
    share = found.probability[chosen] / total
    return sigma, torch.zeros_like(sigma).index_add(0, index, share)


def conditional_mean(found: Trajectories, x: Float[Tensor, "n T"]) -> Float[Tensor, "n T"]:
    """E[x_t | s_t] at the state of every token; 0 in masked slots.

    Args:
        found: The trajectories.
        x: One number for each token, say an estimate of its advantage. Masked slots may hold
            anything.
    """
    mean = torch.zeros_like(x)
    for t, size in enumerate(s for s, _ in found.tree.mdp.shapes):
        on = found.tree.mask[:, t]
        state, p = found.tree.state[on, t], found.probability[on]
        mass = torch.zeros(size, dtype=p.dtype).index_add(0, state, p)
        total = torch.zeros_like(mass).index_add(0, state, p * x[on, t])
        mean[on, t] = torch.where(mass > 0, total / mass, 0)[state]
    return mean


def expected_update(
    policy: Policy,
    found: Trajectories,
    weight: Float[Tensor, " n"],
    advantages: Float[Tensor, "n T"] | None = None,
) -> Float[Tensor, " P"]:
    """``sum_i p_i W_i sum_t A_{i,t} g_{i,t}``: grad J where W = 1 and the advantages are exact.

    Args:
        policy: The policy of the trajectories.
        found: The trajectories.
        weight: W of each, [n].
        advantages: In the place of the exact ones, [n, T]. Masked slots may hold anything.
    """
    A = found.advantages if advantages is None else advantages
    pulls = []
    for t, pi in enumerate(found.solution.probs):
        on = found.tree.mask[:, t]
        flow = (found.probability * weight)[on] * A[on, t]
        at = (found.tree.state[on, t], found.tree.tokens[on, t])
        pulls.append(softmax_pull(torch.zeros_like(pi).index_put(at, flow, accumulate=True), pi))
    return policy.gradient(tuple(pulls))


def trajectory_scores(policy: Policy, found: Trajectories) -> Float[Tensor, "n P"]:
    """``sum_t g_{i,t}``, the gradient of each response's log-probability.

    So a step ``d`` in the parameters changes log p_i at the rate ``trajectory_scores @ d``.
    """
    tree = found.tree
    per_step = [
        policy.token_scores(t, tree.state[:, t], tree.tokens[:, t]) * tree.mask[:, t, None]
        for t in range(tree.mask.shape[1])
    ]
    return torch.stack(per_step).sum(0)


# ---------------------------------------------------------------------------------------- the chain


def chain(length: int, *, theta: float = 0.0) -> tuple[MDP, Shared]:
    """T binary actions -1 and +1 with one shared logit, and r the sign of their sum (3.1).

    The counter-example to (13) on the episodic objective: all T scores pull the one parameter the
    same way. A state is (t, number of +1 so far), so T = 401 costs little.

    Args:
        length: T, odd (so that the sum is never 0).
        theta: The logit of +1; that of -1 is 0.

    Raises:
        ValueError: The length is not odd and positive.
    """
    if length < 1 or length % 2 == 0:
        raise ValueError(f"chain: length must be odd and positive, got {length}")
    ups = [torch.arange(t + 1) for t in range(length + 1)]
    mdp = MDP(
        start=torch.ones(1, dtype=torch.float64),
        transitions=tuple(torch.stack([up, up + 1], dim=1) for up in ups[:-1]),
        ends=tuple(torch.full((t + 1,), t == length) for t in range(length + 1)),
        reward=tuple(torch.where(2 * up > length, 1.0, -1.0).double() for up in ups),
    )
    is_up = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    features: Layers = tuple(is_up.expand(t + 1, 2, 1) for t in range(length))
    return mdp, Shared(theta=torch.tensor([theta], dtype=torch.float64), features=features)
