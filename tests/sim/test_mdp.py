"""Exact worlds against sums over all their paths, and their gradients against autograd."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.bound import (
    episode_bound,
    exact_variance,
    holding,
    links,
    outcome_variance,
    score_bound,
    score_energy_bound,
    second_moment,
    token_gradient,
    token_mean,
    token_variance,
)
from sim.mdp import (
    MDP,
    Policy,
    Shared,
    Solution,
    Tabular,
    evaluate,
    policy_gradient,
    random_mdp,
    random_shared,
    random_tabular,
    reward_variance,
    solve,
    success_rate,
    tokens,
)

property_test = settings(max_examples=30, deadline=None)


def drawn_world(
    seed: int, horizon: int, stochastic: bool, random_length: bool, shared: bool, signs: bool
) -> tuple[MDP, Policy]:
    generator = torch.Generator().manual_seed(seed)
    mdp = random_mdp(
        generator,
        prompts=2,
        states=3,
        actions=2,
        horizon=horizon,
        stochastic=stochastic,
        random_length=random_length,
    )
    if not signs:
        reward = [torch.randn(len(r), generator=generator, dtype=torch.float64) for r in mdp.reward]
        mdp = replace(mdp, reward=tuple(reward))
    policy: Policy = (
        random_shared(mdp, generator, parameters=3) if shared else random_tabular(mdp, generator)
    )
    return mdp, policy


def worlds(**fixed: bool) -> st.SearchStrategy[tuple[MDP, Policy]]:
    flags = ("stochastic", "random_length", "shared", "signs")
    chosen = {name: st.just(fixed[name]) if name in fixed else st.booleans() for name in flags}
    return st.builds(drawn_world, st.integers(0, 2**32 - 1), st.integers(1, 4), **chosen)


# --------------------------------------------------------------------------------- sums over paths


def successors(mdp: MDP, t: int, state: int, action: int) -> list[tuple[int, float]]:
    row = mdp.transitions[t][state, action]
    if row.ndim == 0:
        return [(int(row), 1.0)]
    return [(s, float(p)) for s, p in enumerate(row) if p > 0]


Path = tuple[float, list[tuple[int, int, int]], float]


def paths_from(mdp: MDP, probs: tuple[Tensor, ...], t: int, state: int) -> Iterator[Path]:
    """(probability, [(t, state, action)...], reward) of every way to go on."""
    if mdp.ends[t][state]:
        yield 1.0, [], float(mdp.reward[t][state])
        return
    for action in range(probs[t].shape[1]):
        for successor, chance in successors(mdp, t, state, action):
            for p, rest, reward in paths_from(mdp, probs, t + 1, successor):
                taken = float(probs[t][state, action]) * chance * p
                yield taken, [(t, state, action), *rest], reward


def all_paths(mdp: MDP, solution: Solution) -> list[Path]:
    return [
        (q * p, steps, reward)
        for prompt, q in enumerate(mdp.start.tolist())
        for p, steps, reward in paths_from(mdp, solution.probs, 0, prompt)
    ]


@property_test
@given(worlds())
def test_dynamic_programming_agrees_with_the_sum_over_all_paths(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    solution = solve(mdp, policy.logits())
    paths = all_paths(mdp, solution)
    assert sum(p for p, _, _ in paths) == pytest.approx(1)
    assert solution.objective.item() == pytest.approx(sum(p * r for p, _, r in paths), abs=1e-12)
    length = sum(p * len(steps) for p, steps, _ in paths)
    assert solution.mean_length.item() == pytest.approx(length)
    visits = [torch.zeros_like(pi) for pi in solution.probs]
    for p, steps, _ in paths:
        for t, state, action in steps:
            visits[t][state, action] += p
    for t, (d, pi) in enumerate(zip(solution.visits, solution.probs, strict=True)):
        torch.testing.assert_close(d[:, None] * pi, visits[t])
        for state in range(len(d)):
            on = list(paths_from(mdp, solution.probs, t, state))
            value = sum(p * r for p, _, r in on)
            assert solution.v[t][state].item() == pytest.approx(value, abs=1e-12)
            for action in range(pi.shape[1]) if not mdp.ends[t][state] else ():
                q = sum(p * r for p, steps, r in on if steps[0][2] == action)
                q /= float(pi[state, action])
                assert solution.q[t][state, action].item() == pytest.approx(q, abs=1e-9)


@property_test
@given(worlds())
def test_success_and_reward_variance_agree_with_the_sum_over_all_paths(
    world: tuple[MDP, Policy],
) -> None:
    mdp, policy = world
    probs = solve(mdp, policy.logits()).probs
    success, variance = success_rate(mdp, probs), reward_variance(mdp, probs)
    for prompt in range(len(mdp.start)):
        paths = list(paths_from(mdp, probs, 0, prompt))
        mean = sum(p * r for p, _, r in paths)
        assert success[prompt].item() == pytest.approx(sum(p for p, _, r in paths if r > 0))
        spread = sum(p * (r - mean) ** 2 for p, _, r in paths)
        assert variance[prompt].item() == pytest.approx(spread, abs=1e-12)


@property_test
@given(worlds(signs=True))
def test_a_reward_of_plus_or_minus_one_varies_by_4p_1_minus_p(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    probs = solve(mdp, policy.logits()).probs
    mean = evaluate(mdp, probs, mdp.reward)[1][0]
    torch.testing.assert_close(success_rate(mdp, probs), (1 + mean) / 2)
    torch.testing.assert_close(
        token_mean(reward_variance(mdp, probs), mdp.start),
        outcome_variance(success_rate(mdp, probs), mdp.start),
    )


@property_test
@given(worlds(stochastic=False))
def test_successors_are_transitions_of_probability_one(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    dense = tuple(
        torch.nn.functional.one_hot(successor, len(ends)).double()
        for successor, ends in zip(mdp.transitions, mdp.ends[1:], strict=True)
    )
    a, b = (solve(w, policy.logits()) for w in (mdp, replace(mdp, transitions=dense)))
    for name in ("q", "v", "visits"):
        for x, y in zip(getattr(a, name), getattr(b, name), strict=True):
            torch.testing.assert_close(x, y)


# -------------------------------------------------------------------------------------- gradients


def with_parameters(policy: Policy, theta: Tensor) -> Policy:
    """The same policy at other parameters, in the order of `Policy.gradient`."""
    if isinstance(policy, Shared):
        return replace(policy, theta=theta)
    assert isinstance(policy, Tabular)
    sizes = [table.numel() for table in policy.table]
    parts = zip(theta.split(sizes), policy.table, strict=True)
    return Tabular(tuple(part.view_as(table) for part, table in parts))


def parameters(policy: Policy) -> Tensor:
    if isinstance(policy, Shared):
        return policy.theta
    assert isinstance(policy, Tabular)
    return torch.cat([table.flatten() for table in policy.table])


def objective(mdp: MDP, policy: Policy, theta: Tensor) -> Tensor:
    return solve(mdp, with_parameters(policy, theta).logits()).objective


@property_test
@given(worlds())
def test_the_policy_gradient_theorem_agrees_with_autograd_and_with_differences(
    world: tuple[MDP, Policy],
) -> None:
    mdp, policy = world
    theta = parameters(policy)
    found = policy_gradient(policy, solve(mdp, policy.logits()))
    exact = torch.autograd.functional.jacobian(lambda x: objective(mdp, policy, x), theta)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    step = torch.ones_like(theta) * 1e-5
    difference = objective(mdp, policy, theta + step) - objective(mdp, policy, theta - step)
    torch.testing.assert_close(found @ (2 * step), difference, rtol=1e-4, atol=1e-12)


@property_test
@given(worlds())
def test_scores_are_the_gradients_of_log_pi(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    theta = parameters(policy)
    norms = policy.score_norms(solve(mdp, policy.logits()).probs)
    for t, (S, A) in enumerate(mdp.shapes):

        def log_pi(x: Tensor, t: int = t) -> Tensor:
            return with_parameters(policy, x).logits()[t].log_softmax(-1).flatten()

        exact = torch.autograd.functional.jacobian(log_pi, theta)
        state, action = torch.arange(S).repeat_interleave(A), torch.arange(A).repeat(S)
        torch.testing.assert_close(policy.token_scores(t, state, action), exact)
        torch.testing.assert_close(norms[t].flatten(), exact.norm(dim=1))


@property_test
@given(worlds())
def test_the_token_mean_is_the_gradient_over_the_mean_length(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    solution = solve(mdp, policy.logits())
    scores = [
        policy.token_scores(t, torch.arange(S).repeat_interleave(A), torch.arange(A).repeat(S))
        for t, (S, A) in enumerate(mdp.shapes)
    ]
    found = tokens(policy, solution)
    mean = token_gradient(torch.cat(scores), found.advantages, found.weight)
    torch.testing.assert_close(mean * solution.mean_length, policy_gradient(policy, solution))
    torch.testing.assert_close(found.weight.sum(), solution.mean_length)


@property_test
@given(worlds())
def test_a_baseline_does_not_move_the_gradient_and_q_alone_gives_it(
    world: tuple[MDP, Policy],
) -> None:
    mdp, policy = world
    solution = solve(mdp, policy.logits())
    torch.testing.assert_close(
        policy_gradient(policy, solution, solution.q), policy_gradient(policy, solution)
    )


# --------------------------------------------------------------------- what section 3 says of them


@property_test
@given(worlds())
def test_with_the_exact_values_the_variances_subtract(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    found = tokens(policy, solve(mdp, policy.logits()))
    difference = exact_variance(found.q, found.v, found.weight)
    assert abs(token_variance(found.advantages, found.weight) - difference) < 1e-10
    assert abs(token_mean(found.advantages, found.weight)) < 1e-12


@property_test
@given(worlds())
def test_every_link_holds_for_the_token_mean(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    solution = solve(mdp, policy.logits())
    found = tokens(policy, solution)
    chain = links(
        gradient_norm=policy_gradient(policy, solution).norm() / solution.mean_length,
        score_norm=found.score_norm,
        advantages=found.advantages,
        q=found.q,
        v=found.v,
        weight=found.weight,
    )
    assert all(holding(chain, tolerance=1e-10).values()), chain


@property_test
@given(worlds())
def test_the_sum_of_squared_advantages_is_the_outcome_variance_or_less(
    world: tuple[MDP, Policy],
) -> None:
    mdp, policy = world
    solution = solve(mdp, policy.logits())
    found = tokens(policy, solution)
    energy = solution.mean_length * second_moment(found.advantages, found.weight)
    outcome = token_mean(reward_variance(mdp, solution.probs), mdp.start)
    assert energy <= outcome + 1e-10
    if mdp.transitions[0].ndim == 2:
        torch.testing.assert_close(energy, outcome, rtol=0, atol=1e-10)


@property_test
@given(worlds())
def test_the_sound_bounds_hold_for_the_episodic_gradient(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    solution = solve(mdp, policy.logits())
    found = tokens(policy, solution)
    size = {
        "mean_length": solution.mean_length,
        "outcome_variance": token_mean(reward_variance(mdp, solution.probs), mdp.start),
    }
    C = score_bound(found.score_norm, found.weight)
    tight = score_energy_bound(found.score_norm, found.weight, **size)
    assert policy_gradient(policy, solution).norm() <= tight + 1e-10
    assert tight <= episode_bound(score_bound=C, **size) + 1e-10


@property_test
@given(worlds(stochastic=False))
def test_an_advantage_is_the_change_of_value_where_transitions_are_deterministic(
    world: tuple[MDP, Policy],
) -> None:
    mdp, policy = world
    solution = solve(mdp, policy.logits())
    for t, advantages in enumerate(solution.advantages):
        change = solution.v[t + 1][mdp.transitions[t]] - solution.v[t][:, None]
        torch.testing.assert_close(advantages, change)


@property_test
@given(worlds(shared=False))
def test_scores_of_logits_are_at_most_the_square_root_of_two(world: tuple[MDP, Policy]) -> None:
    mdp, policy = world
    assert isinstance(policy, Tabular)
    sharp = Tabular(tuple(50 * table for table in policy.table))
    for norms in sharp.score_norms(solve(mdp, sharp.logits()).probs):
        assert norms.max() <= 2**0.5 + 1e-12


# ------------------------------------------------------------------------------------ the edges


def test_random_worlds_have_the_lengths_asked_for() -> None:
    def world(random_length: bool) -> MDP:
        return random_mdp(
            torch.Generator().manual_seed(3),
            prompts=4,
            states=6,
            actions=3,
            horizon=5,
            stochastic=True,
            random_length=random_length,
        )

    uniform = [torch.zeros(shape) for shape in world(False).shapes]
    assert solve(world(False), uniform).mean_length.item() == pytest.approx(5)
    assert 1 < solve(world(True), uniform).mean_length.item() < 4.5


def small() -> MDP:
    return MDP(
        start=torch.tensor([0.5, 0.5]).double(),
        transitions=(torch.tensor([[0, 1], [1, 0]]), torch.full((2, 2, 2), 0.5).double()),
        ends=(torch.zeros(2).bool(), torch.tensor([False, True]), torch.ones(2).bool()),
        reward=tuple(torch.zeros(2).double() for _ in range(3)),
    )


def test_what_stands_in_the_rows_of_states_that_end_does_not_matter() -> None:
    reward = (*small().reward[:2], torch.tensor([1.0, 5.0]).double())
    mdp = replace(small(), reward=reward)
    other = mdp.transitions[1].clone()
    other[1] = torch.tensor([0.9, 0.1], dtype=torch.float64)
    policy = random_tabular(mdp, torch.Generator().manual_seed(0))
    a, b = (
        solve(world, policy.logits())
        for world in (mdp, replace(mdp, transitions=(mdp.transitions[0], other)))
    )
    assert torch.equal(a.objective, b.objective)
    assert torch.equal(policy_gradient(policy, a), policy_gradient(policy, b))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("start", torch.tensor([0.5, 0.4]).double(), "start"),
        ("start", torch.tensor([1.5, -0.5]).double(), "start"),
        ("transitions", (), "at least 1"),
        (
            "transitions",
            (torch.tensor([[0, 2], [1, 0]]), small().transitions[1]),
            r"transition 0 .* 0\.\.1",
        ),
        ("transitions", (torch.zeros(2, 2), small().transitions[1]), "integers"),
        ("transitions", (small().transitions[0], torch.full((2, 2, 2), 0.4)), "transition 1"),
        ("transitions", (small().transitions[0], torch.full((2, 2, 3), 1 / 3)), "transition 1"),
        ("transitions", (torch.zeros(3, 2).long(), small().transitions[1]), "transition 0"),
        ("ends", small().ends[:2], "one more"),
        ("ends", (torch.ones(2).bool(), *small().ends[1:]), "layer 0"),
        ("ends", (*small().ends[:2], torch.zeros(2).bool()), "layer H"),
        ("reward", (*small().reward[:2], torch.tensor([0.0, float("nan")])), "layer 2"),
        ("reward", (*small().reward[:2], torch.zeros(3)), "layer 2"),
    ],
)
def test_what_is_no_mdp_is_refused_by_name(field: str, value: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(small(), **{field: value})
