"""The bandit's world, its responses and its gradient step, each against what the page says."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo import trajectory_std
from sim.bandit import (
    KINDS,
    Bandit,
    BanditConfig,
    Draws,
    ResponseModel,
    Responses,
    response_values,
)

property_test = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31)
SILENT = ResponseModel(noise=0.0, bias=0.0)
LARGEST_UNIFORM = 1 - 2**-24  # of float32


def drawn(seed: int, groups: int, rollouts: int, tokens: int) -> Draws:
    return Draws.of(torch.Generator().manual_seed(seed), groups, rollouts, tokens)


def respond(bandit: Bandit, rollouts: int, seed: int = 0) -> Responses:
    row = torch.arange(bandit.runs * bandit.size)
    return bandit.respond(row, drawn(seed, len(row), rollouts, bandit.config.responses.tokens))


# --------------------------------------------------------------------------------------- the world


def test_equal_seeds_are_equal_worlds_and_others_are_not() -> None:
    bandit = Bandit(BanditConfig(prompts=50), [3, 4, 3])
    first, second, third = bandit.rates()
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_a_world_does_not_depend_on_the_worlds_beside_it() -> None:
    config = BanditConfig(prompts=50, held_out=10, unlearnable=0.3)
    alone, beside = Bandit(config, [7]), Bandit(config, [1, 7, 2])
    assert torch.equal(alone.own, beside.own[60:120])
    assert torch.equal(alone.loading[0], beside.loading[beside.world[1]])
    assert torch.equal(alone.error[0], beside.error[beside.world[1]])


def test_starting_odds_have_the_mean_and_deviation_of_the_configuration() -> None:
    config = BanditConfig(prompts=40_000, difficulty_mean=-0.7, difficulty_sd=1.5)
    odds = torch.logit(Bandit(config, [0]).rates().double())
    assert odds.mean().item() == pytest.approx(-0.7, abs=5 * 1.5 / 200)
    assert odds.std().item() == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_high_spread_has_its_share_and_its_odds_ratio(share: float) -> None:
    config = BanditConfig(prompts=20, high_share=share, high_log_odds=1.2)
    probability = torch.softmax(Bandit(config, [0]).own, 1).double()
    odds = (probability[:, 1::2] / probability[:, 0::2]).log()  # of wrong, of correct responses
    ratio, middle = torch.full((20,), 1.2), torch.full((20,), math.log(share / (1 - share)))
    torch.testing.assert_close((odds[:, 1] - odds[:, 0]).float(), ratio, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(odds.mean(1).float(), middle, rtol=1e-4, atol=1e-5)


def test_loadings_are_unit_vectors_with_a_share_of_negative_entries() -> None:
    bandit = Bandit(BanditConfig(prompts=5000, interference=0.25), [0])
    torch.testing.assert_close(bandit.loading[0].norm(dim=1), torch.ones(5000))
    assert (bandit.loading < 0).double().mean().item() == pytest.approx(0.25, abs=0.01)


@property_test
@given(seed=seeds)
def test_rates_lie_between_0_and_1_whatever_the_logits(seed: int) -> None:
    # Two rounded probabilities may add up to more than 1.
    bandit = Bandit(BanditConfig(prompts=500), [0])
    generator = torch.Generator().manual_seed(seed)
    bandit.own = 30 * torch.randn(500, KINDS, generator=generator)
    bandit.own[:, :2] -= 20
    rates = bandit.rates()
    assert bool(((rates >= 0) & (rates <= 1)).all())
    rows = torch.arange(500)
    torch.testing.assert_close(bandit.rates_of(rows), rates[0])


def test_the_first_value_is_the_expected_reward_plus_the_critics_error() -> None:
    config = BanditConfig(prompts=4, partial=0.25, responses=ResponseModel(bias=0.3, noise=0.0))
    bandit = Bandit(config, [0])
    rate = bandit.rates()[0].double()
    expected = rate * 1 + (1 - rate) * (2 * 0.25 - 1) + bandit.error[0]
    rows = torch.arange(4)
    torch.testing.assert_close(bandit.first_values(rows, bandit.rates_of(rows)).double(), expected)
    late = replace(config, responses=replace(config.responses, settles_low=1.0, settles_high=1.0))
    values = respond(Bandit(late, [0]), 64).values[:, :, 0]
    torch.testing.assert_close(values.double(), expected[:, None].expand(-1, 64))


# ------------------------------------------------------------------------------------- responses


def test_kinds_come_as_often_as_their_probability_says() -> None:
    bandit = Bandit(BanditConfig(prompts=8, high_log_odds=1.0, responses=SILENT), [0])
    n = 40_000
    responses = respond(bandit, n)
    share = torch.nn.functional.one_hot(responses.kind, KINDS).double().mean(1)
    p = responses.probability.double()
    assert bool(((share - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-9).all())
    assert torch.equal(responses.correct, (responses.kind >= 2).float())


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_rate_of_exactly_0_or_1_is_certain(uniform: float) -> None:
    # Rounded probabilities may add up to less than 1, and the largest draw may exceed their sum.
    bandit = Bandit(BanditConfig(prompts=1000, responses=SILENT), [0])
    bandit.own = 3 * torch.randn(1000, KINDS, generator=torch.Generator().manual_seed(0))
    bandit.own[:500, 2:] -= 300
    bandit.own[500:, :2] -= 300
    draws = drawn(0, 1000, 1, 16)._replace(kind=torch.full((1000, 1), uniform))
    correct = bandit.respond(torch.arange(1000), draws).correct.flatten()
    assert torch.equal(correct, (torch.arange(1000) >= 500).float())
    torch.testing.assert_close(bandit.rates()[0], correct, rtol=0, atol=2e-7)
    assert bool((bandit.rates()[0, :500] == 0).all())


def test_partial_credit_is_a_share_of_the_parts_with_the_mean_of_the_configuration() -> None:
    config = BanditConfig(prompts=1, difficulty_mean=-20, difficulty_sd=0, partial=0.3, parts=5)
    credit = respond(Bandit(config, [0]), 40_000).correct
    parts = credit * 5
    torch.testing.assert_close(parts, parts.round())
    right = 0.3 * 5 / 4  # of four parts; the fifth is wrong, or the response would be correct
    variance = 4 * right * (1 - right) / 5**2
    assert parts.max().item() == 4
    assert credit.mean().item() == pytest.approx(0.3, abs=5 * math.sqrt(variance / 40_000))
    assert credit.double().var().item() == pytest.approx(variance, rel=0.05)
    solved = replace(config, difficulty_mean=20)
    assert bool((respond(Bandit(solved, [0]), 100).correct == 1).all())


@pytest.mark.parametrize("partial", [0.0, 0.75])
def test_partial_credit_at_its_limits(partial: float) -> None:
    config = BanditConfig(prompts=1, difficulty_mean=-20, difficulty_sd=0, partial=partial)
    assert bool((respond(Bandit(config, [0]), 1000).correct == partial).all())


def loop_values(
    model: ResponseModel, first: float, kind: int, reward: float, settles: float, foreseen: float
) -> list[float]:
    """A response without noise: flat, one move, flat."""
    when = model.settles_high if kind % 2 else model.settles_low
    when += model.jitter * (2 * settles - 1)
    towards = reward if foreseen < (1 + model.foresight) / 2 else -reward
    height = model.spread * (towards - first)
    return [
        first + (height if (t + 0.5) / model.tokens >= when else 0) for t in range(model.tokens)
    ]


models = st.builds(
    ResponseModel,
    tokens=st.integers(2, 32),
    spread=st.floats(0, 1),
    settles_low=st.floats(0, 1),
    settles_high=st.floats(0, 1),
    jitter=st.floats(0, 1),
    foresight=st.floats(-1, 1),
    noise=st.just(0.0),
)


@property_test
@given(model=models, seed=seeds)
def test_values_are_those_of_the_loop_and_sigma_that_of_the_formula(
    model: ResponseModel, seed: int
) -> None:
    draws = drawn(seed, 3, 5, model.tokens)
    generator = torch.Generator().manual_seed(seed + 1)
    first = 2 * torch.rand(3, generator=generator) - 1
    kind = torch.randint(0, KINDS, (3, 5), generator=generator)
    reward = 2 * (kind >= 2).float() - 1
    values = response_values(model, first, kind, reward, draws)
    sigma = trajectory_std(values.flatten(0, 1), torch.ones(15, model.tokens)).view(3, 5)
    for m in range(3):
        for g in range(5):
            loop = loop_values(
                model,
                first[m].item(),
                int(kind[m, g]),
                reward[m, g].item(),
                draws.settles[m, g].item(),
                draws.foreseen[m, g].item(),
            )
            height = max(abs(v - first[m].item()) for v in loop)
            share = sum(v != loop[0] or abs(v - first[m].item()) > 0 for v in loop) / len(loop)
            found = values[m, g].tolist()
            assert found == pytest.approx(loop, abs=1e-6)
            expected = height * math.sqrt(share * (1 - share))
            assert sigma[m, g].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", range(KINDS))
def test_a_move_half_way_has_the_largest_sigma(kind: int) -> None:
    model = replace(SILENT, jitter=0.0)
    kinds, reward = torch.tensor([[kind]]), torch.tensor([[1.0 if kind >= 2 else -1.0]])
    values = response_values(model, torch.zeros(1), kinds, reward, drawn(0, 1, 1, 16))
    sigma = trajectory_std(values[0], torch.ones(1, 16)).item()
    share = 0.5 if kind % 2 else 2 / 16  # tokens 14 and 15 lie at or beyond .9 of 16
    assert sigma == pytest.approx(0.2 * math.sqrt(share * (1 - share)))
    assert values[0, 0, 0].item() == 0
    assert values[0, 0, -1].item() == pytest.approx(0.2 * reward.item())


@pytest.mark.parametrize("foresight", [-1.0, -0.4, 0.0, 0.7, 1.0])
def test_the_move_goes_with_the_outcome_as_often_as_foresight_says(foresight: float) -> None:
    n = 20_000
    model = replace(SILENT, foresight=foresight, jitter=0.0)
    reward = torch.ones(1, n)
    reward[:, ::2] = -1
    kind = torch.ones(1, n, dtype=torch.int64) + 2 * (reward > 0)
    values = response_values(model, torch.zeros(1), kind, reward, drawn(5, 1, n, 16))
    direction = (values[0, :, -1] - values[0, :, 0]).sign()
    correlation = torch.corrcoef(torch.stack([direction, reward[0]]))[0, 1].item()
    assert correlation == pytest.approx(foresight, abs=5 / math.sqrt(n) * (1 - foresight**2))


def test_noise_is_independent_at_each_token_with_its_deviation() -> None:
    model = ResponseModel(spread=0.0, noise=0.1, tokens=32)
    kind = torch.zeros(1, 4000, dtype=torch.int64)
    values = response_values(
        model, torch.zeros(1), kind, -torch.ones(1, 4000), drawn(0, 1, 4000, 32)
    )
    assert values.std().item() == pytest.approx(0.1, rel=0.02)
    correlation = torch.corrcoef(values[0].T)
    assert (correlation - torch.eye(32)).abs().max().item() < 5 / math.sqrt(4000)


def test_entropies_differ_by_the_gap() -> None:
    model = ResponseModel(entropy_gap=0.2, entropy_jitter=0.1)
    responses = respond(Bandit(BanditConfig(prompts=10, responses=model), [0]), 2000)
    high = responses.kind % 2 == 1
    gap = responses.entropy[high].mean() - responses.entropy[~high].mean()
    assert gap.item() == pytest.approx(0.2, abs=0.005)
    assert responses.entropy.min() >= 0.45
    assert responses.entropy.max() <= 0.75


# ------------------------------------------------------------------------------ the gradient step


def expected_reward(own: Tensor, lift: Tensor) -> Tensor:
    """Of one prompt, differentiable; rewards are +1 and -1."""
    shifted = own + lift * torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=own.dtype)
    p = torch.softmax(shifted, 0)
    return p[2] + p[3] - p[0] - p[1]


def of_kinds(bandit: Bandit, counts: list[int]) -> Responses:
    """A group of prompt 0 in which every kind comes as often as `counts` says."""
    kind = torch.arange(KINDS).repeat_interleave(torch.tensor(counts))[None]
    responses = bandit.respond(torch.zeros(1, dtype=torch.int64), drawn(0, 1, kind.numel(), 16))
    return responses._replace(kind=kind, correct=(kind >= 2).float())


@property_test
@given(
    counts=st.lists(st.integers(1, 9), min_size=KINDS, max_size=KINDS),
    baseline=st.floats(-1, 1),
    seed=st.integers(0, 100),
)
def test_the_update_is_the_gradient_of_the_mean_reward(
    counts: list[int], baseline: float, seed: int
) -> None:
    # Kinds that come exactly as often as their probability says: the mean over the group is the
    # expectation, whatever the baseline.
    config = BanditConfig(prompts=3, own_rate=0.7, skill_rate=0.4, skills=5, responses=SILENT)
    bandit = Bandit(config, [seed])
    bandit.skill += torch.linspace(-0.5, 0.5, 5)
    lift = (bandit.loading[0, 0] @ bandit.skill[0]).item()
    logits = torch.tensor([math.log(count) for count in counts])
    bandit.own[0] = logits - lift * torch.tensor([0.0, 0.0, 1.0, 1.0])
    before, skill = bandit.own.clone(), bandit.skill.clone()
    responses = of_kinds(bandit, counts)
    bandit.update(responses, 2 * responses.correct - 1 - baseline, batch=4)

    own = before[0].double().requires_grad_()
    shared = skill[0].double().requires_grad_()
    expected_reward(own, bandit.loading[0, 0].double() @ shared).backward()
    assert own.grad is not None
    assert shared.grad is not None
    moved = (bandit.own[0] - before[0]).double()
    torch.testing.assert_close(moved, 0.7 * own.grad, rtol=1e-4, atol=1e-6)
    moved = (bandit.skill[0] - skill[0]).double()
    torch.testing.assert_close(moved, 0.4 / 4 * shared.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(bandit.own[1:], before[1:])


def test_two_visits_of_a_prompt_in_a_step_both_count() -> None:
    bandit = Bandit(BanditConfig(prompts=2, responses=SILENT), [0])
    before = bandit.own.clone()
    row = torch.tensor([1, 1])
    responses = bandit.respond(row, drawn(0, 2, 4, 16))
    advantage = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    bandit.update(responses, advantage, batch=2)
    both = bandit.own - before
    bandit.own = before.clone()
    apart = torch.zeros_like(before)
    for visit in range(2):
        bandit.own = before.clone()
        bandit.update(responses.only(slice(visit, visit + 1)), advantage[[visit]], batch=2)
        apart += bandit.own - before
    torch.testing.assert_close(both, apart)
    assert torch.equal(both[0], torch.zeros(KINDS))


def test_what_cannot_be_learned_moves_neither_itself_nor_the_skills() -> None:
    bandit = Bandit(BanditConfig(prompts=200, unlearnable=0.5, interference=0), [0])
    stuck = bandit.learnable[0] == 0
    assert 0.3 < stuck.double().mean().item() < 0.7
    before = bandit.rates()[0]
    responses = respond(bandit, 8)
    bandit.update(responses.only(stuck), responses.correct[stuck], batch=200)
    assert torch.equal(bandit.skill, torch.zeros_like(bandit.skill))
    for _ in range(5):
        responses = respond(bandit, 8)
        bandit.update(responses, responses.correct, batch=200)
    after = bandit.rates()[0]
    assert torch.equal(after[stuck], before[stuck])
    assert bool((after[~stuck] != before[~stuck]).all())


@pytest.mark.parametrize("stops_after", [0, 1, 3])
def test_a_policy_that_stops_is_frozen_from_then_on(stops_after: int) -> None:
    bandit = Bandit(BanditConfig(prompts=30, stops_after=stops_after), [0])
    rates = [bandit.rates()]
    for _ in range(5):
        responses = respond(bandit, 8)
        bandit.update(responses, responses.correct, batch=30)
        rates.append(bandit.rates())
    for step in range(5):
        assert torch.equal(rates[step], rates[step + 1]) == (step >= stops_after)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (ResponseModel, "tokens", 1),
        (ResponseModel, "tokens", 33),
        (ResponseModel, "spread", 1.1),
        (ResponseModel, "foresight", -1.1),
        (ResponseModel, "noise", -0.1),
        (ResponseModel, "noise", math.inf),
        (ResponseModel, "bias", math.nan),
        (BanditConfig, "prompts", 0),
        (BanditConfig, "held_out", -1),
        (BanditConfig, "skills", 0),
        (BanditConfig, "own_rate", -0.1),
        (BanditConfig, "own_rate", math.inf),
        (BanditConfig, "unlearnable", 1.5),
        (BanditConfig, "stops_after", -1),
        (BanditConfig, "high_share", 0.0),
        (BanditConfig, "partial", -0.1),
        (BanditConfig, "parts", 0),
    ],
)
def test_an_impossible_number_is_refused_by_name(
    make: type[ResponseModel] | type[BanditConfig], field: str, value: float
) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must .* got {value}"):
        make(**{field: value})  # type: ignore[arg-type]
