"""Every link of (3)-(13) against plain loops, and worlds in which a link must fail."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.bound import (
    Links,
    absolute_advantage,
    episode_bound,
    exact_variance,
    expanded_variance,
    holding,
    links,
    outcome_variance,
    printed_bound,
    score_bound,
    score_energy_bound,
    score_times_advantage,
    second_moment,
    token_covariance,
    token_gradient,
    token_mean,
    token_variance,
    value_variance,
    worst_case_variance,
)

property_test = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)


class Drawn:
    """Tokens with anything in them: scores, advantages, values and visitations."""

    def __init__(self, seed: int, n: int, P: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.scores, self.q, self.v = normal(n, P), normal(n), normal(n)
        self.weight = torch.rand(n, generator=generator, dtype=torch.float64) + 0.01
        self.norms = self.scores.norm(dim=1)


tokens = st.builds(Drawn, seeds, st.integers(1, 12))


def loop_mean(x: Tensor, weight: Tensor) -> float:
    return sum(
        w * y for w, y in zip(weight.tolist(), x.tolist(), strict=True) if w > 0
    ) / math.fsum(weight.tolist())


def loop_covariance(x: Tensor, y: Tensor, weight: Tensor) -> float:
    mean_x, mean_y = loop_mean(x, weight), loop_mean(y, weight)
    return loop_mean(
        torch.tensor(
            [(a - mean_x) * (b - mean_y) for a, b in zip(x.tolist(), y.tolist(), strict=True)],
            dtype=torch.float64,
        ),
        weight,
    )


def close(a: Tensor | float, b: Tensor | float) -> bool:
    return math.isclose(float(a), float(b), rel_tol=1e-9, abs_tol=1e-12)


# ------------------------------------------------------------------------------------ single links


@property_test
@given(tokens)
def test_means_and_covariances_agree_with_plain_loops(drawn: Drawn) -> None:
    q, v, weight = drawn.q, drawn.v, drawn.weight
    assert close(token_mean(q, weight), loop_mean(q, weight))
    assert close(token_covariance(q, v, weight), loop_covariance(q, v, weight))
    assert close(token_variance(q, weight), loop_covariance(q, q, weight))


@property_test
@given(tokens)
def test_links_agree_with_plain_loops(drawn: Drawn) -> None:
    advantages, weight = drawn.q - drawn.v, drawn.weight
    share = [w / weight.sum().item() for w in weight.tolist()]
    rows = list(zip(share, drawn.norms.tolist(), advantages.tolist(), strict=True))
    gradient = [
        sum(w * g[i] * a for (w, _, a), g in zip(rows, drawn.scores.tolist(), strict=True))
        for i in range(3)
    ]
    found = token_gradient(drawn.scores, advantages, weight)
    assert all(close(a, b) for a, b in zip(found, gradient, strict=True))
    assert close(score_bound(drawn.norms, weight), max(g for _, g, _ in rows))
    assert close(
        score_times_advantage(drawn.norms, advantages, weight),
        sum(w * g * abs(a) for w, g, a in rows),
    )
    assert close(absolute_advantage(advantages, weight), sum(w * abs(a) for w, _, a in rows))
    assert close(second_moment(advantages, weight), sum(w * a * a for w, _, a in rows))


@pytest.mark.parametrize("of_weight", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("of_advantages", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_scores", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_is_as_exact_as_the_widest_of_its_factors(
    of_scores: torch.dtype, of_advantages: torch.dtype, of_weight: torch.dtype
) -> None:
    drawn = Drawn(0, 7)
    scores, advantages = drawn.scores.to(of_scores), drawn.q.to(of_advantages)
    weight = torch.tensor([1, 1, 0, 1, 1, 0, 1]).to(of_weight)
    found = token_gradient(scores, advantages, weight)
    exact = token_gradient(scores.double(), advantages.double(), weight.double())
    wide = torch.float64 if torch.float64 in (of_scores, of_advantages) else torch.float32
    assert found.dtype == wide
    tolerance = 1e-14 if wide == torch.float64 else 1e-6
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


@property_test
@given(tokens)
def test_expanding_the_variance_of_q_minus_v_is_an_identity(drawn: Drawn) -> None:
    q, v, weight = drawn.q, drawn.v, drawn.weight
    assert close(expanded_variance(q, v, weight), token_variance(q - v, weight))
    worst = worst_case_variance(token_variance(q, weight), token_variance(v, weight))
    assert token_variance(q - v, weight) <= worst + 1e-12


def test_the_worst_case_is_reached_by_values_that_contradict_the_returns() -> None:
    q, weight = torch.tensor([1.0, -1.0, 3.0]), torch.ones(3)
    v = -2 * q
    worst = worst_case_variance(token_variance(q, weight), token_variance(v, weight))
    assert float(worst) == pytest.approx(token_variance(q - v, weight).item())


@property_test
@given(tokens)
def test_with_the_mean_of_q_as_v_the_variances_subtract(drawn: Drawn) -> None:
    # Two tokens a state; V is the mean of Q over the actions of the state.
    q, weight = drawn.q.repeat(2), torch.cat([drawn.weight, drawn.weight.flip(0)])
    q[len(drawn.q) :] += drawn.v
    pairs, chance = q.view(2, -1), weight.view(2, -1)
    v = ((pairs * chance).sum(0) / chance.sum(0)).repeat(2)
    assert close(exact_variance(q, v, weight), token_variance(q - v, weight))
    assert close(token_covariance(q, v, weight), token_variance(v, weight))


def test_worked_example_of_the_printed_bound() -> None:
    low, high = (
        printed_bound(score_bound=1.0, variance_q=0.05**2, variance_v=variance_v)
        for variance_v in (0.0004, 0.0025)
    )
    assert low == pytest.approx(0.07, abs=1e-12)
    assert high == pytest.approx(0.10, abs=1e-12)
    assert high / low - 1 == pytest.approx(0.429, abs=5e-4)


# --------------------------------------------------------------------------------------- the chain


def chain_of(
    drawn: Drawn, advantages: Tensor, *, q: Tensor, v: Tensor, gradient: Any = None
) -> Links:
    if gradient is None:
        gradient = token_gradient(drawn.scores, advantages, drawn.weight).norm()
    return links(
        gradient_norm=gradient,
        score_norm=drawn.norms,
        advantages=advantages,
        q=q,
        v=v,
        weight=drawn.weight,
    )


@property_test
@given(tokens)
def test_every_link_holds_where_advantages_are_centred_and_are_q_minus_v(drawn: Drawn) -> None:
    q = drawn.q - token_mean(drawn.q - drawn.v, drawn.weight)
    found = chain_of(drawn, q - drawn.v, q=q, v=drawn.v)
    assert holding(found) == dict.fromkeys(Links._fields[1:], True)
    assert close(found.root_mean_square, found.deviation)
    assert close(found.deviation, found.expanded)


def broken(found: Links) -> list[str]:
    return [name for name, holds in holding(found).items() if not holds]


@property_test
@given(st.builds(Drawn, seeds, st.integers(2, 12)))
def test_each_link_fails_where_its_assumption_does(drawn: Drawn) -> None:
    q = drawn.q - token_mean(drawn.q - drawn.v, drawn.weight)
    A = q - drawn.v
    # A longer gradient than the token mean's: the episodic one of long responses.
    episodic = chain_of(drawn, A, q=q, v=drawn.v, gradient=1e3)
    assert broken(episodic) == ["score_times_advantage"]
    # Advantages that are not centred: (6).
    biased = chain_of(drawn, A + 1, q=q + 1, v=drawn.v)
    assert broken(biased) == ["deviation"]
    # Weighted advantages are no longer Q - V: (9).
    weighted = chain_of(drawn, 3 * A, q=q, v=drawn.v)
    assert "expanded" in broken(weighted)


def test_rounding_alone_breaks_no_link() -> None:
    weight, zero = torch.tensor([0.1, 0.2, 0.7]), torch.zeros(3)
    noise = torch.tensor([1e-17, -2e-17, 1e-17])
    found = links(
        gradient_norm=1e-16, score_norm=zero + 1, advantages=noise, q=noise, v=zero, weight=weight
    )
    assert not broken(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_floats_are_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1.0, 3.0], dtype=dtype).repeat(1000)
    mean = token_mean(x, torch.ones(3000, dtype=torch.bool))
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(5 / 3, rel=1e-6)
    generator = torch.Generator().manual_seed(0)
    q, v, g = (torch.rand(40, generator=generator).to(dtype) for _ in range(3))

    def of(q: Tensor, v: Tensor, g: Tensor) -> Links:
        ones = torch.ones(40)
        return links(gradient_norm=0.0, score_norm=g, advantages=q, q=q, v=v, weight=ones)

    torch.testing.assert_close(of(q, v, g), of(q.float(), v.float(), g.float()))


def test_a_response_mask_is_a_weight_and_masked_slots_may_hold_anything() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    generator = torch.Generator().manual_seed(0)
    q, v, g = (torch.rand(2, 3, generator=generator) for _ in range(3))

    def of(*tensors: Tensor) -> Links:
        q, v, g, weight = tensors
        return links(gradient_norm=0.0, score_norm=g, advantages=q - v, q=q, v=v, weight=weight)

    dirty = [x.masked_fill(~mask, fill) for x, fill in ((q, math.nan), (v, math.inf), (g, 1e30))]
    torch.testing.assert_close(of(*dirty, mask), of(q[mask], v[mask], g[mask], torch.ones(3)))


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (torch.ones(2), "one entry for each token"),
        (torch.tensor([1.0, -0.5, 1.0]), "at least 0"),
        (torch.zeros(3), "positive for some token"),
        (torch.tensor([1.0, math.nan, 1.0]), "finite"),
        (torch.tensor([1.0, math.inf, 1.0]), "finite"),
    ],
)
def test_bad_weights_are_refused(weight: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        token_mean(torch.ones(3), weight)
    with pytest.raises(ValueError, match=match):
        score_bound(torch.ones(3), weight)


# -------------------------------------------------------------------------------- the sound bound


@property_test
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 1)), min_size=1, max_size=6))
def test_outcome_variance_is_the_variance_of_a_reward_of_plus_or_minus_one(
    prompts: list[tuple[float, float]],
) -> None:
    total = sum(q for _, q in prompts)
    expected = sum(
        q / total * (p * (1 - (2 * p - 1)) ** 2 + (1 - p) * (-1 - (2 * p - 1)) ** 2)
        for p, q in prompts
    )
    success, weight = torch.tensor(prompts, dtype=torch.float64).unbind(1)
    assert close(outcome_variance(success, weight), expected)


def test_episode_bound_of_the_long_chain() -> None:
    bound = episode_bound(score_bound=0.5, mean_length=401, outcome_variance=1.0)
    assert bound == pytest.approx(10.0125, abs=1e-4)


@property_test
@given(tokens, st.floats(1, 100), st.floats(0, 1))
def test_the_energy_of_the_scores_bounds_at_least_as_tightly_as_the_largest(
    drawn: Drawn, mean_length: float, outcome: float
) -> None:
    tight = score_energy_bound(
        drawn.norms, drawn.weight, mean_length=mean_length, outcome_variance=outcome
    )
    energy = mean_length * loop_mean(drawn.norms.square(), drawn.weight)
    assert close(tight, math.sqrt(energy * outcome))
    C = score_bound(drawn.norms, drawn.weight)
    loose = episode_bound(score_bound=C, mean_length=mean_length, outcome_variance=outcome)
    assert tight <= loose + 1e-9


# ------------------------------------------------------------------------------- parts of Var V


@property_test
@given(seeds, st.integers(1, 6), st.integers(1, 6))
def test_the_variance_of_values_splits_into_within_and_between(seed: int, B: int, T: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(B, T, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, T, generator=generator) < 0.6
    mask[0, 0] = True
    weight = torch.rand(B, generator=generator, dtype=torch.float64) + 0.1
    found = value_variance(values.masked_fill(~mask, math.nan), mask, weight)

    listed = [
        (w, [v for v, on in zip(row, slots, strict=True) if on])
        for w, row, slots in zip(weight.tolist(), values.tolist(), mask.tolist(), strict=True)
    ]
    listed = [(w, row) for w, row in listed if row]
    total = sum(w * len(row) for w, row in listed)
    mean = sum(w * v for w, row in listed for v in row) / total
    means = [sum(row) / len(row) for _, row in listed]
    within = sum(w * (v - m) ** 2 for (w, row), m in zip(listed, means, strict=True) for v in row)
    between = sum(w * len(row) * (m - mean) ** 2 for (w, row), m in zip(listed, means, strict=True))
    assert close(found.within, within / total)
    assert close(found.between, between / total)
    assert close(found.total, found.within + found.between)


def test_trajectories_count_by_their_length() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0], [0.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = value_variance(values, mask)
    assert found.within == 0
    assert found.between.item() == pytest.approx(3 / 16)  # not 1/4, as without the lengths


def test_no_response_token_has_no_variance() -> None:
    with pytest.raises(ValueError, match="positive for some token"):
        value_variance(torch.ones(2, 3), torch.zeros(2, 3))
