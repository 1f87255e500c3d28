"""The token tree against plain loops over all responses, and the chain of section 3.1."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.bound import links, outcome_variance, value_variance
from sim.mdp import Policy, Tabular, policy_gradient, random_tabular, solve, success_rate, tokens
from sim.tree import (
    TokenTree,
    Trajectories,
    bigram_policy,
    chain,
    conditional_mean,
    expected_update,
    pattern_rule,
    sigma_distribution,
    sum_rule,
    token_tree,
    trajectories,
    trajectory_scores,
)

property_test = settings(max_examples=20, deadline=None)
THRESHOLD = (1, 3)
A, T = 3, 3


def grown(seed: int, eos: bool, shared: bool) -> tuple[TokenTree, Policy, Trajectories]:
    """Two prompts, three tokens, responses of three tokens (or up to three)."""
    generator = torch.Generator().manual_seed(seed)
    tree = token_tree(
        sum_rule(torch.tensor(THRESHOLD)),
        start=torch.tensor([1.0, 3.0]),
        vocabulary=A,
        length=T,
        eos=eos,
    )
    policy: Policy = random_tabular(tree.mdp, generator)
    if shared:
        policy = bigram_policy(tree, torch.randn(A + 1, A, generator=generator).double())
    return tree, policy, trajectories(tree, policy)


trees = st.builds(grown, st.integers(0, 2**32 - 1), st.booleans(), st.booleans())


def responses(eos: bool) -> list[tuple[int, ...]]:
    """Every response, from the definition: all tuples, cut behind the first end token."""
    found = itertools.product(range(A), repeat=T)
    return sorted({x[: x.index(0) + 1] if eos and 0 in x else x for x in found})


def listed(tree: TokenTree) -> list[tuple[int, tuple[int, ...]]]:
    """(prompt, response) of every trajectory."""
    rows = zip(tree.prompt.tolist(), tree.tokens, tree.mask, strict=True)
    return [(prompt, tuple(row[on].tolist())) for prompt, row, on in rows]


@pytest.mark.parametrize("eos", [False, True])
def test_every_response_stands_in_the_list_once_with_its_outcome(eos: bool) -> None:
    tree, _, _ = grown(0, eos, shared=True)
    expected = [(prompt, x) for prompt in range(2) for x in responses(eos)]
    assert sorted(listed(tree)) == expected
    for (prompt, x), correct in zip(listed(tree), tree.correct.tolist(), strict=True):
        assert correct == (sum(x) >= THRESHOLD[prompt])
    assert bool(((tree.tokens == 0) & (tree.state == 0))[~tree.mask].all())


@property_test
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_probabilities_values_and_spreads_agree_with_loops_over_responses(
    seed: int, eos: bool
) -> None:
    tree, policy, found = grown(seed, eos, shared=True)
    table = policy.theta.view(A + 1, A).softmax(-1)

    def chance(x: tuple[int, ...]) -> float:
        """Of a response under the bigram policy."""
        return math.prod(float(table[last, token]) for last, token in zip((A, *x), x, strict=False))

    def value(prompt: int, prefix: tuple[int, ...]) -> float:
        on = [x for x in responses(eos) if x[: len(prefix)] == prefix]
        rewards = [1.0 if sum(x) >= THRESHOLD[prompt] else -1.0 for x in on]
        weight = [chance(x) for x in on]
        return sum(w * r for w, r in zip(weight, rewards, strict=True)) / sum(weight)

    assert found.probability.sum().item() == pytest.approx(1)
    for i, (prompt, x) in enumerate(listed(tree)):
        assert found.probability[i].item() == pytest.approx((0.25, 0.75)[prompt] * chance(x))
        values = [value(prompt, x[:t]) for t in range(len(x))]
        assert found.values[i][: len(x)].tolist() == pytest.approx(values, abs=1e-12)
        assert found.sigma[i].item() == pytest.approx(statistics.pstdev(values), abs=1e-12)
        reward = 1.0 if tree.correct[i] else -1.0
        change = [b - a for a, b in itertools.pairwise([*values, reward])]
        assert found.advantages[i][: len(x)].tolist() == pytest.approx(change, abs=1e-12)
        assert not found.values[i][len(x) :].any()
        assert not found.advantages[i][len(x) :].any()
    by_prompt = [
        sum(chance(x) for x in responses(eos) if sum(x) >= threshold) for threshold in THRESHOLD
    ]
    assert success_rate(tree.mdp, found.solution.probs).tolist() == pytest.approx(by_prompt)


@property_test
@given(trees)
def test_the_list_and_the_mdp_agree(drawn: tuple[TokenTree, Policy, Trajectories]) -> None:
    tree, policy, found = drawn
    length = tree.mask.sum(1).double()
    torch.testing.assert_close(found.probability @ length, found.solution.mean_length)
    energy = found.probability @ found.advantages.square().sum(1)
    success = success_rate(tree.mdp, found.solution.probs)
    torch.testing.assert_close(energy, outcome_variance(success, tree.mdp.start))
    world = tokens(policy, found.solution)
    split = value_variance(found.values, tree.mask, found.probability)
    mean = world.weight @ world.v / world.weight.sum()
    total = world.weight @ (world.v - mean).square() / world.weight.sum()
    torch.testing.assert_close(split.total, total)
    torch.testing.assert_close(split.within + split.between, total)


# --------------------------------------------------------------------------------- expected updates


@property_test
@given(trees)
def test_the_unweighted_update_is_the_gradient(
    drawn: tuple[TokenTree, Policy, Trajectories],
) -> None:
    tree, policy, found = drawn
    ones = torch.ones(len(tree.prompt)).double()
    gradient = policy_gradient(policy, found.solution)
    torch.testing.assert_close(expected_update(policy, found, ones), gradient)
    # The whole reward on every token has the same mean.
    reward = (2.0 * tree.correct.double() - 1)[:, None].expand_as(found.values)
    torch.testing.assert_close(expected_update(policy, found, ones, reward), gradient)
    scores = trajectory_scores(policy, found)
    torch.testing.assert_close((found.probability * reward[:, 0]) @ scores, gradient)


@property_test
@given(trees, st.integers(0, 2**32 - 1))
def test_a_weighted_update_is_the_sum_over_tokens(
    drawn: tuple[TokenTree, Policy, Trajectories], seed: int
) -> None:
    tree, policy, found = drawn
    weight = torch.rand(
        len(tree.prompt), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    total = torch.zeros_like(policy_gradient(policy, found.solution))
    for i in range(len(tree.prompt)):
        for t in range(int(tree.mask[i].sum())):
            g = policy.token_scores(t, tree.state[i : i + 1, t], tree.tokens[i : i + 1, t])[0]
            total += found.probability[i] * weight[i] * found.advantages[i, t] * g
    dirty = found.advantages.masked_fill(~tree.mask, math.nan)
    torch.testing.assert_close(expected_update(policy, found, weight, dirty), total)


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_trajectory_scores_are_the_gradients_of_log_probability(eos: bool, shared: bool) -> None:
    tree, policy, found = grown(5, eos, shared)

    def log_probability(theta: Tensor) -> Tensor:
        if isinstance(policy, Tabular):
            sizes = [table.numel() for table in policy.table]
            parts = zip(theta.split(sizes), policy.table, strict=True)
            moved: Policy = Tabular(tuple(x.view_as(table) for x, table in parts))
        else:
            moved = replace(policy, theta=theta)
        return trajectories(tree, moved).probability.log()

    theta = (
        torch.cat([table.flatten() for table in policy.table])
        if isinstance(policy, Tabular)
        else policy.theta
    )
    exact = torch.autograd.functional.jacobian(log_probability, theta)
    torch.testing.assert_close(trajectory_scores(policy, found), exact)


@property_test
@given(trees)
def test_conditional_means_agree_with_a_loop_over_states(
    drawn: tuple[TokenTree, Policy, Trajectories],
) -> None:
    tree, _, found = drawn
    x = torch.randn(tree.mask.shape, generator=torch.Generator().manual_seed(0)).double()
    mean = conditional_mean(found, x.masked_fill(~tree.mask, math.nan))
    rows = listed(tree)
    for i, (prompt, response) in enumerate(rows):
        for t in range(len(response)):
            same = [
                j
                for j, (other, y) in enumerate(rows)
                if other == prompt and len(y) > t and y[:t] == response[:t]
            ]
            p = found.probability[same]
            assert mean[i, t].item() == pytest.approx((p @ x[same, t] / p.sum()).item())
    assert not mean[~tree.mask].any()
    assert conditional_mean(found, found.advantages).abs().max() < 1e-12


@property_test
@given(trees, st.booleans())
def test_the_distribution_of_sigma_has_the_moments_of_the_chosen_responses(
    drawn: tuple[TokenTree, Policy, Trajectories], correct: bool
) -> None:
    tree, _, found = drawn
    chosen = tree.correct == correct
    sigma, share = sigma_distribution(found, chosen)
    assert bool((sigma.diff() > 0).all())
    assert share.sum().item() == pytest.approx(1)
    p = found.probability[chosen] / found.probability[chosen].sum()
    for power in (1, 2, 3):
        torch.testing.assert_close(share @ sigma**power, p @ found.sigma[chosen] ** power)
    with pytest.raises(ValueError, match="probability 0"):
        sigma_distribution(found, torch.zeros_like(chosen))


# ----------------------------------------------------------------------------- rules and policies


def test_a_pattern_counts_anywhere_but_not_across_the_end() -> None:
    rule = pattern_rule(torch.tensor([[1, 2], [0, 0]]))
    rows = torch.tensor([[0, 1, 2], [1, 0, 2], [1, 2, 0], [1, 0, 0], [1, 0, 0]])
    prompt = torch.tensor([0, 0, 0, 1, 1])
    mask = torch.tensor([[1, 1, 1]] * 4 + [[1, 1, 0]]).bool()
    assert rule(prompt, rows, mask).tolist() == [True, False, True, True, False]
    assert rule(prompt, rows[:, :1], mask[:, :1]).tolist() == [False] * 5


def test_a_pattern_can_be_the_task_of_a_tree() -> None:
    tree = token_tree(
        pattern_rule(torch.tensor([[1, 2]])), start=torch.ones(1), vocabulary=3, length=3
    )
    found = [x for (_, x), correct in zip(listed(tree), tree.correct, strict=True) if correct]
    assert found == [x for x in itertools.product(range(3), repeat=3) if (1, 2) in pairs(x)]


def pairs(x: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(x))


def test_a_bigram_policy_sees_the_last_token_alone() -> None:
    tree, _, _ = grown(0, eos=True, shared=True)
    table = torch.arange(12.0).view(4, 3).square()
    logits = bigram_policy(tree, table).logits()
    for t in range(T):
        for (_, x), state in zip(listed(tree), tree.state[:, t].tolist(), strict=True):
            if t < len(x):
                expected = table[x[t - 1] if t else A].double()
                torch.testing.assert_close(logits[t][state], expected)
    with pytest.raises(ValueError, match=r"\[4, 3\]"):
        bigram_policy(tree, torch.zeros(3, 3))


@pytest.mark.parametrize(("vocabulary", "length"), [(1, 3), (2, 0)])
def test_a_tree_without_choices_is_refused(vocabulary: int, length: int) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens and length 1"):
        token_tree(
            sum_rule(torch.tensor([1])), start=torch.ones(1), vocabulary=vocabulary, length=length
        )


# --------------------------------------------------------------------------------------- the chain


@pytest.mark.parametrize(
    ("length", "gradient", "printed"),
    [(5, 0.9375, 0.625), (25, 2.015, 0.608), (101, 4.019, 0.604), (401, 7.994, 0.603)],
)
def test_the_printed_bound_is_false_for_the_episodic_gradient_of_the_chain(
    length: int, gradient: float, printed: float
) -> None:
    mdp, policy = chain(length)
    solution = solve(mdp, policy.logits())
    world = tokens(policy, solution)
    found = links(
        gradient_norm=policy_gradient(policy, solution).norm(),
        score_norm=world.score_norm,
        advantages=world.advantages,
        q=world.q,
        v=world.v,
        weight=world.weight,
    )
    assert found.gradient.item() == pytest.approx(gradient, abs=5.1e-4)
    assert found.printed.item() == pytest.approx(printed, abs=5.1e-4)
    # Every token's g A pulls the same way: divided by T, the first link is an equality.
    torch.testing.assert_close(found.gradient / length, found.score_times_advantage)
    # E sum A^2 = 4p(1-p) = 1, so the token mean of A^2 is 1/T, and C = 1/2.
    assert found.root_mean_square.item() == pytest.approx(0.5 / math.sqrt(length))


@property_test
@given(st.sampled_from([1, 3, 5]), st.floats(-2, 2))
def test_the_chain_is_the_tree_of_two_tokens(length: int, theta: float) -> None:
    mdp, policy = chain(length, theta=theta)
    tree = token_tree(
        sum_rule(torch.tensor([(length + 1) // 2])),
        start=torch.ones(1),
        vocabulary=2,
        length=length,
    )
    table = torch.tensor([[0.0, theta]], dtype=torch.float64).repeat(3, 1)
    same = bigram_policy(tree, table)
    a, b = solve(mdp, policy.logits()), solve(tree.mdp, same.logits())
    torch.testing.assert_close(a.objective, b.objective)
    by_theta = policy_gradient(same, b).view(3, 2)[:, 1].sum()
    torch.testing.assert_close(policy_gradient(policy, a)[0], by_theta)


@pytest.mark.parametrize("length", [0, 2, -1])
def test_a_chain_whose_sum_may_be_zero_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="odd and positive"):
        chain(length)
