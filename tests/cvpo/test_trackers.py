"""Every tracker against a plain loop written from its formula, and its state."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.trackers import (
    TRACKERS,
    BetaTracker,
    BOTSTracker,
    DBBTracker,
    MovingAverageTracker,
    Tracker,
)
from tests.cvpo.states import assert_same_state, through_a_file

property_test = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
discounts = st.sampled_from([1.0, 0.9, 0.5])
names = pytest.mark.parametrize("name", sorted(TRACKERS))

Observation = tuple[Tensor, Tensor, Tensor]


def make(name: str, num_prompts: int, **constants: Any) -> Tracker:
    if name == "bots":
        constants.setdefault("difficulty", torch.linspace(0, 1, num_prompts))
    return TRACKERS[name](num_prompts, **constants)


def stream(seed: int, num_prompts: int, rounds: int) -> list[Observation]:
    """Rounds of observations: some prompts stay away, some come twice; successes are partial."""
    rng = np.random.default_rng(seed)
    rate = rng.choice([0.0, 0.1, 0.5, 0.95, 1.0], num_prompts)
    result = []
    for _ in range(rounds):
        ids = rng.permutation(
            np.repeat(np.arange(num_prompts), rng.choice([0, 1, 1, 2], num_prompts))
        )
        k = rng.choice([0, 8, 16], len(ids), p=[0.1, 0.4, 0.5])
        s = rng.binomial(k, rate[ids]) * 0.75
        result.append((torch.tensor(ids), torch.tensor(k), torch.tensor(s)))
    return result


def one(tracker: Tracker, trials: float, successes: float) -> None:
    tracker.observe(torch.tensor([0]), torch.tensor([trials]), torch.tensor([successes]))


def entries(rounds: list[Observation], prompt: int) -> list[tuple[float, float]]:
    """What a prompt was observed with, in order."""
    return [
        (k.item(), s.item())
        for ids, trials, successes in rounds
        for i, k, s in zip(ids, trials, successes, strict=True)
        if i == prompt and k > 0
    ]


# --------------------------------------------------------------------- the formulas, in plain loops


@property_test
@given(seeds, st.integers(1, 8), st.integers(0, 8), discounts)
def test_the_beta_tracker_agrees_with_its_loop(
    seed: int, num_prompts: int, rounds: int, discount: float
) -> None:
    told = stream(seed, num_prompts, rounds)
    tracker = BetaTracker(num_prompts, discount=discount)
    for observation in told:
        tracker.observe(*observation)
    for prompt in range(num_prompts):
        alpha = beta = 1.0
        delta = math.nan
        history = entries(told, prompt)
        for visit, (k, s) in enumerate(history):
            before = alpha / (alpha + beta)
            alpha = 1 + discount * (alpha - 1) + s
            beta = 1 + discount * (beta - 1) + k - s
            if visit >= 1:
                delta = (alpha / (alpha + beta) - before) / before
        assert tracker.alpha[prompt].item() == pytest.approx(alpha, rel=1e-12)
        assert tracker.beta[prompt].item() == pytest.approx(beta, rel=1e-12)
        assert tracker.rho[prompt].item() == pytest.approx(alpha / (alpha + beta), rel=1e-12)
        assert tracker.delta[prompt].item() == pytest.approx(delta, 1e-9, 1e-12, nan_ok=True)
        assert tracker.visits[prompt] == len(history)
    assert tracker.rho.gt(0).all()
    assert tracker.rho.lt(1).all()


@property_test
@given(seeds, st.integers(1, 6), st.integers(0, 8), discounts)
def test_dbb_agrees_with_its_loop(
    seed: int, num_prompts: int, rounds: int, discount: float
) -> None:
    told = stream(seed, num_prompts, rounds)
    tracker = DBBTracker(num_prompts, discount=discount)
    for observation in told:
        tracker.observe(*observation)
    for prompt in range(num_prompts):
        a = b = 1.0
        for n, s in entries(told, prompt):
            a, b = discount * a + s, discount * b + n - s
        assert tracker.alpha[prompt].item() == pytest.approx(a, rel=1e-12)
        assert tracker.beta[prompt].item() == pytest.approx(b, rel=1e-12)
        assert tracker.rho[prompt].item() == pytest.approx(a / (a + b), rel=1e-12)


@property_test
@given(seeds, st.integers(1, 6), st.integers(0, 8), st.floats(0, 0.99), st.floats(0, 1))
def test_bots_agrees_with_its_loop(
    seed: int, num_prompts: int, rounds: int, forgetting: float, share: float
) -> None:
    told = stream(seed, num_prompts, rounds)
    difficulty = torch.rand(num_prompts, generator=torch.Generator().manual_seed(seed))
    tracker = BOTSTracker(
        num_prompts, difficulty=difficulty, forgetting=forgetting, prior_share=share
    )
    for observation in told:
        tracker.observe(*observation)
    for prompt in range(num_prompts):
        a = b = 1.0
        solved = 1 - difficulty[prompt].double().item()
        for m, s in entries(told, prompt):
            a = (1 - forgetting) * a + forgetting + (1 - share) * s + share * m * solved
            b = (1 - forgetting) * b + forgetting
            b += (1 - share) * (m - s) + share * m * (1 - solved)
        assert tracker.alpha[prompt].item() == pytest.approx(a, rel=1e-9)
        assert tracker.beta[prompt].item() == pytest.approx(b, rel=1e-9)


@property_test
@given(seeds, st.integers(1, 6), st.integers(0, 12), st.integers(1, 4))
def test_the_moving_average_agrees_with_its_loop(
    seed: int, num_prompts: int, rounds: int, window: int
) -> None:
    told = stream(seed, num_prompts, rounds)
    tracker = MovingAverageTracker(num_prompts, window=window)
    for observation in told:
        tracker.observe(*observation)
    for prompt in range(num_prompts):
        last = entries(told, prompt)[-window:]
        n, s = sum(k for k, _ in last), sum(s for _, s in last)
        assert tracker.rho[prompt].item() == pytest.approx(s / n if last else 0.5, rel=1e-12)
        assert tracker.alpha[prompt].item() == pytest.approx(1 + s)
        assert tracker.beta[prompt].item() == pytest.approx(1 + n - s)


@property_test
@given(seeds, st.floats(0.1, 1))
def test_the_update_of_mopps_is_the_beta_tracker_s(seed: int, forgetting: float) -> None:
    told = stream(seed, 4, 6)
    tracker = BetaTracker(4, discount=forgetting)
    for observation in told:
        tracker.observe(*observation)
    for prompt in range(4):
        a = b = 1.0
        for n, s in entries(told, prompt):
            a = forgetting * a + (1 - forgetting) + s
            b = forgetting * b + (1 - forgetting) + (n - s)
        assert tracker.alpha[prompt].item() == pytest.approx(a, rel=1e-9)
        assert tracker.beta[prompt].item() == pytest.approx(b, rel=1e-9)


# ------------------------------------------------------------------------------- golden numbers


@pytest.mark.parametrize(
    ("visit", "expected"), [(5, -0.195122), (10, -0.098765), (19, -0.052288), (20, -0.049689)]
)
def test_delta_of_a_never_solved_prompt_shrinks_whatever_the_policy_does(
    visit: int, expected: float
) -> None:
    tracker = BetaTracker(1)
    for _ in range(visit):
        one(tracker, 16, 0)
    assert tracker.delta.item() == pytest.approx(expected, abs=5e-7)
    assert tracker.delta.item() == pytest.approx(-16 / (2 + 16 * visit))


@pytest.mark.parametrize(("discount", "needed"), [(1.0, 20), (0.9, 6), (0.75, 3), (0.5, 1)])
def test_forgetting_decides_how_long_a_prompt_that_became_easy_looks_hard(
    discount: float, needed: int
) -> None:
    tracker = BetaTracker(1, discount=discount)
    for _ in range(20):
        one(tracker, 16, 0)
    rounds = 0
    while tracker.rho.item() < 0.45:
        one(tracker, 16, 0.9 * 16)
        rounds += 1
    assert rounds == needed


def test_dbb_forgets_its_prior_and_the_beta_tracker_does_not() -> None:
    dbb, kept = DBBTracker(1), BetaTracker(1, discount=0.5)
    for _ in range(60):
        one(dbb, 16, 16)
        one(kept, 16, 16)
    assert dbb.rho.item() == pytest.approx(1, abs=1e-12)
    assert kept.rho.item() == pytest.approx(33 / 34)  # 1 + 16 / (1 - .5) successes, 1 failure
    for _ in range(2000):  # the failures that were never seen underflow to none
        one(dbb, 16, 16)
    assert dbb.rho.item() == 1


def test_bots_starts_half_way_to_what_the_difficulty_says() -> None:
    tracker = BOTSTracker(1, difficulty=torch.tensor([0.25]))
    one(tracker, 16, 0)
    # .8 + .2 + .2 * 16 * .75 successes, 1 + .8 * 16 + .2 * 16 * .25 failures.
    assert tracker.alpha.item() == pytest.approx(3.4)
    assert tracker.beta.item() == pytest.approx(14.6)


def test_the_moving_average_weighs_observations_by_their_rollouts() -> None:
    tracker = MovingAverageTracker(1, window=2)
    for trials, successes in ((16, 16), (4, 4), (12, 0)):
        one(tracker, trials, successes)
    assert tracker.rho.item() == 0.25


# ------------------------------------------------------------------------------ observations


@property_test
@given(st.data(), seeds, st.integers(1, 6))
def test_without_forgetting_neither_order_nor_grouping_of_observations_matters(
    data: st.DataObject, seed: int, num_prompts: int
) -> None:
    ids, k, s = (torch.cat(parts) for parts in zip(*stream(seed, num_prompts, 5), strict=True))
    order = torch.tensor(data.draw(st.permutations(range(len(ids)))), dtype=torch.long)
    one_call, one_by_one = BetaTracker(num_prompts), BetaTracker(num_prompts)
    one_call.observe(ids, k, s)
    for i in order:
        one_by_one.observe(ids[i : i + 1], k[i : i + 1], s[i : i + 1])
    assert torch.equal(one_call.rho, one_by_one.rho)
    assert torch.equal(one_call.visits, one_by_one.visits)
    for prompt in range(num_prompts):
        own = ids == prompt
        total, solved = k[own].sum().item(), s[own].sum().item()
        assert one_call.rho[prompt].item() == pytest.approx((1 + solved) / (2 + total))


@names
def test_a_prompt_that_stands_twice_in_one_call_is_observed_twice_in_order(name: str) -> None:
    twice, apart = make(name, 2), make(name, 2)
    twice.observe(torch.tensor([1, 0, 1]), torch.tensor([8, 4, 8]), torch.tensor([8, 1, 0]))
    for prompt, k, s in ((1, 8, 8), (0, 4, 1), (1, 8, 0)):
        apart.observe(torch.tensor([prompt]), torch.tensor([k]), torch.tensor([s]))
    assert torch.equal(twice.visits, torch.tensor([1, 2]))
    assert_same_state(twice.state_dict(), apart.state_dict())


@names
@property_test
@given(seed=seeds, prompt=st.lists(st.integers(0, 3), max_size=30))
def test_one_call_is_as_many_calls_of_one_entry(name: str, seed: int, prompt: list[int]) -> None:
    rng = np.random.default_rng(seed)
    ids, k = torch.tensor(prompt, dtype=torch.int64), torch.tensor(rng.integers(0, 9, len(prompt)))
    s = torch.tensor(rng.binomial(k, 0.4), dtype=torch.int64)
    together, apart = make(name, 4), make(name, 4)
    together.observe(ids, k, s)
    for i in range(len(prompt)):
        apart.observe(ids[i : i + 1], k[i : i + 1], s[i : i + 1])
    assert_same_state(together.state_dict(), apart.state_dict())


def test_delta_needs_two_observations_and_survives_a_round_without_any() -> None:
    tracker = BetaTracker(3)
    assert tracker.rho.tolist() == [0.5] * 3
    assert tracker.delta.isnan().all()
    tracker.observe(torch.tensor([0, 1]), torch.tensor([8, 8]), torch.tensor([4, 8]))
    assert tracker.delta.isnan().all()
    tracker.observe(torch.tensor([1]), torch.tensor([8]), torch.tensor([0]))
    # rho of prompt 1: 9/10, then 9/18.
    assert tracker.delta[1].item() == pytest.approx((0.5 - 0.9) / 0.9)
    tracker.observe(torch.tensor([0]), torch.tensor([8]), torch.tensor([4]))
    assert tracker.delta[1].item() == pytest.approx((0.5 - 0.9) / 0.9)
    assert tracker.delta[2].isnan()


@names
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_counts_of_any_dtype_and_empty_calls_are_read(name: str, dtype: torch.dtype) -> None:
    tracker, plain = make(name, 4), make(name, 4)
    tracker.observe(
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([16]).to(dtype),
        torch.tensor([4]).to(dtype),
    )
    tracker.observe(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    plain.observe(torch.tensor([2]), torch.tensor([16]), torch.tensor([4]))
    assert_same_state(tracker.state_dict(), plain.state_dict())
    assert tracker.rho[2] < 0.5
    assert tracker.rho[[0, 1, 3]].tolist() == [0.5] * 3


@names
@property_test
@given(seed=seeds)
def test_estimates_and_posteriors_stay_in_their_range(name: str, seed: int) -> None:
    tracker = make(name, 5)
    assert tracker.rho.tolist() == [0.5] * 5
    assert tracker.alpha.tolist() == tracker.beta.tolist() == [1.0] * 5
    for observation in stream(seed, 5, 8):
        tracker.observe(*observation)
        assert tracker.rho.ge(0).all()
        assert tracker.rho.le(1).all()
        assert tracker.alpha.gt(0).all()
        assert tracker.beta.gt(0).all()


@names
@pytest.mark.parametrize(
    ("prompt", "trials", "successes"),
    [
        ([4], [8], [1]),
        ([-1], [8], [1]),
        ([0.0], [8], [1]),
        ([0], [8], [9]),
        ([0], [8], [-1]),
        ([0], [-8], [-9]),
        ([0], [8], [math.nan]),
        ([0], [math.inf], [1]),
        ([0, 1], [8], [1]),
    ],
)
def test_impossible_observations_are_refused_and_change_nothing(
    name: str, prompt: list[float], trials: list[float], successes: list[float]
) -> None:
    tracker = make(name, 4)
    good = (torch.tensor([1]), torch.tensor([8]), torch.tensor([3]))
    tracker.observe(*good)
    before = copy.deepcopy(tracker.state_dict())
    bad = (torch.tensor(prompt), torch.tensor(trials), torch.tensor(successes))
    with pytest.raises(ValueError, match="observe"):
        tracker.observe(*bad)
    # A good entry beside the bad one is not taken either.
    with pytest.raises(ValueError, match="observe"):
        tracker.observe(*(torch.cat(pair) for pair in zip(good, bad, strict=True)))
    assert_same_state(tracker.state_dict(), before)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        *((lambda name=name: make(name, 0), "num_prompts") for name in sorted(TRACKERS)),
        *(
            (lambda kind=kind, d=d: kind(2, discount=d), "discount")
            for kind in (BetaTracker, DBBTracker)
            for d in (0.0, 1.1, math.nan)
        ),
        (lambda: make("bots", 2, forgetting=1.0), "forgetting"),
        (lambda: make("bots", 2, prior_share=1.1), "prior_share"),
        (lambda: make("bots", 2, difficulty=torch.tensor([0.1])), r"difficulty must be \[2\]"),
        (lambda: make("bots", 2, difficulty=torch.tensor([0.1, 1.5])), "prompt 1 has 1.5"),
        (lambda: make("bots", 2, difficulty=torch.tensor([math.nan, 0])), "prompt 0 has nan"),
        (lambda: MovingAverageTracker(2, window=0), "window"),
    ],
)
def test_impossible_constants_are_refused_by_name(build: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build()


# --------------------------------------------------------------------------- saving and loading


@names
@property_test
@given(seed=seeds, cut=st.integers(0, 6))
def test_a_restored_tracker_goes_on_exactly(name: str, seed: int, cut: int) -> None:
    told = stream(seed, 5, 8)
    kept, resumed = make(name, 5), make(name, 5)
    for observation in told[:cut]:
        kept.observe(*observation)
    resumed.observe(*told[0])  # what it saw before must not matter
    state = through_a_file(kept.state_dict())
    resumed.load_state_dict(state)
    frozen = copy.deepcopy(state)
    for observation in told[cut:]:
        kept.observe(*observation)
        resumed.observe(*observation)
    assert_same_state(resumed.state_dict(), kept.state_dict())
    assert torch.equal(resumed.rho, kept.rho)
    assert_same_state(state, frozen)  # a state is a copy


@names
def test_fields_that_are_missing_or_unknown_are_refused_by_name(name: str) -> None:
    state = make(name, 3).state_dict()
    for field in state:
        with pytest.raises(ValueError, match=field):
            make(name, 3).load_state_dict({key: x for key, x in state.items() if key != field})
    with pytest.raises(ValueError, match="gamma"):
        make(name, 3).load_state_dict({**state, "gamma": 1.0})


@names
def test_every_tensor_of_another_problem_set_is_refused_and_changes_nothing(name: str) -> None:
    source, target = make(name, 3), make(name, 3)
    one(source, 8, 3)
    before = copy.deepcopy(target.state_dict())
    for field, value in source.state_dict().items():
        if isinstance(value, Tensor):
            with pytest.raises(ValueError, match=field):
                target.load_state_dict({**source.state_dict(), field: torch.ones(4)})
            assert_same_state(target.state_dict(), before)


@pytest.mark.parametrize(
    ("name", "constant", "value"),
    [
        ("beta", "discount", 0.9),
        ("dbb", "discount", 0.75),
        ("bots", "forgetting", 0.5),
        ("bots", "prior_share", 0.5),
        ("bots", "difficulty", torch.tensor([0.5, 0.5, 0.5])),
        ("moving-average", "window", 2),
    ],
)
def test_the_state_of_another_constant_is_refused(name: str, constant: str, value: Any) -> None:
    named = "discount" if constant == "forgetting" else constant
    with pytest.raises(ValueError, match=named):
        make(name, 3, **{constant: value}).load_state_dict(make(name, 3).state_dict())


@pytest.mark.parametrize("other", sorted(TRACKERS))
@names
def test_the_state_of_another_tracker_is_refused(name: str, other: str) -> None:
    if other != name:
        with pytest.raises(ValueError, match=r"state (lacks|has)"):
            make(name, 3).load_state_dict(make(other, 3).state_dict())


def test_observing_tensors_with_gradients_keeps_the_state_free_of_them() -> None:
    counts = torch.tensor([4.0], requires_grad=True)
    for name in TRACKERS:
        tracker = make(name, 2)
        tracker.observe(torch.tensor([0]), counts, counts / 2)
        through_a_file(tracker.state_dict())
        assert not tracker.rho.requires_grad


@pytest.mark.parametrize("solved", [True, False])
@names
def test_a_prompt_that_is_always_alike_never_loses_the_other_count(name: str, solved: bool) -> None:
    # (tiny + 8) - 8 is 0: a Beta posterior with a parameter of 0 has no density.
    tracker = make(name, 1)
    one(tracker, 8, 0 if solved else 8)
    for _ in range(200):
        one(tracker, 8, 8 if solved else 0)
    assert 0 < tracker.alpha.item() < math.inf
    assert 0 < tracker.beta.item() < math.inf
