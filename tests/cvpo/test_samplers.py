"""What every sampler promises, and each one's rule against a plain loop written from its source."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cvpo.curriculum import CurriculumConfig, difficulty_weight
from cvpo.runlog import METRICS
from cvpo.samplers import (
    E2H,
    PCL,
    SAMPLERS,
    SEC,
    VCRL,
    WD,
    AdaRFT,
    Feedback,
    Oracle,
    Pool,
    Sampler,
    Selective,
    ShuffledEpochs,
    Uniform,
    bots,
    dbb,
    mopps,
    moving_average,
    thompson_weight,
)
from cvpo.samplers.bins import bin_index, cosine_schedule, gaussian_schedule
from cvpo.samplers.vcrl import variance_share
from cvpo.trackers import BetaTracker
from tests.cvpo.states import assert_same_state, through_a_file

property_test = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)
counts = st.lists(st.integers(0, 25), max_size=12)
names = pytest.mark.parametrize("name", sorted(SAMPLERS))


def rates(num_prompts: int, seed: int) -> Tensor:
    """Success rates with ties among them, as measured ones have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (num_prompts,), generator=generator).double() / 8


def whole_pool(num_prompts: int, world: int = 0, **changes: Any) -> Pool:
    """A pool that lacks nothing; the seed is the world's unless another is given."""
    rate = rates(num_prompts, world)
    pool = Pool(
        num_prompts,
        world,
        steps=10,
        rollouts=8,
        difficulty=1 - rate,
        predict=lambda prompt: 2 * rate[prompt] - 1,
        truth=lambda: rate,
    )
    return replace(pool, **changes)


def make(name: str, num_prompts: int = 25, seed: int = 0) -> Sampler:
    return SAMPLERS[name](whole_pool(num_prompts, seed))


def feedback(prompt: Tensor, seed: int = 0) -> Feedback:
    """Random verdicts of 8 rollouts; what one group in five is worth is unknown."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(len(prompt), generator=generator)
    unknown = torch.rand(len(prompt), generator=generator) < 0.2
    return Feedback(
        prompt=prompt,
        trials=torch.full((len(prompt),), 8.0),
        successes=torch.randint(0, 9, (len(prompt),), generator=generator).float(),
        mean_abs_advantage=size.masked_fill(unknown, math.nan),
    )


def told(prompt: list[int], successes: list[float], trials: float = 8, size: float = 0) -> Feedback:
    solved = torch.tensor(successes, dtype=torch.float32)
    return Feedback(
        torch.tensor(prompt),
        torch.full_like(solved, trials),
        solved,
        torch.full_like(solved, size),
    )


def step(sampler: Sampler, count: int, seed: int) -> list[int]:
    """One step as the trainer does it, with one refill; returns what was rolled out."""
    first = sampler.next(count)
    said = feedback(first, seed)
    if isinstance(sampler, Selective):
        kept = sampler.keep(said.prompt, said.trials, said.successes)
        assert kept.shape == first.shape
        assert kept.dtype == torch.bool
        again = sampler.next(int((~kept).sum()))
        more = feedback(again, seed + 1)
        sampler.keep(more.prompt, more.trials, more.successes)
        pairs = ((getattr(said, key), getattr(more, key)) for key in list(vars(said))[:4])
        said = Feedback(*map(torch.cat, pairs))
    sampler.observe(said)
    return said.prompt.tolist()


# ------------------------------------------------------------------------- what all of them promise


@names
@property_test
@given(seed=seeds, num_prompts=st.integers(1, 30), batches=counts)
def test_so_many_prompts_come_as_were_asked_for_and_none_twice_without_need(
    name: str, seed: int, num_prompts: int, batches: list[int]
) -> None:
    sampler = make(name, num_prompts, seed)
    for number, count in enumerate([*batches, 3 * num_prompts + 1]):
        chosen = sampler.next(count)
        assert chosen.shape == (count,)
        assert chosen.dtype == torch.int64
        often = Counter(chosen.tolist())
        assert often.keys() <= set(range(num_prompts))
        if name != "shuffled-epochs":  # its batches may cross the end of an epoch
            assert max(often.values(), default=0) <= math.ceil(count / num_prompts)
        said = feedback(chosen, seed + number)
        if isinstance(sampler, Selective):
            sampler.keep(said.prompt, said.trials, said.successes)
        sampler.observe(said)


@names
@property_test
@given(seed=seeds, before=counts, after=counts)
def test_a_restored_sampler_goes_on_exactly(
    name: str, seed: int, before: list[int], after: list[int]
) -> None:
    sampler, restored = make(name, 25, seed), make(name, 25, seed)
    for number, count in enumerate(before):
        step(sampler, count, number)
    waiting = sampler.next(4)  # in the middle of a step
    step(restored, 3, seed)  # what it did before must not matter
    restored.load_state_dict(through_a_file(sampler.state_dict()))
    runs = []
    for one in (sampler, restored):
        said = feedback(waiting, seed)
        if isinstance(one, Selective):
            one.keep(said.prompt, said.trials, said.successes)
        one.observe(said)
        runs.append([step(one, count, number) for number, count in enumerate(after)])
    assert runs[0] == runs[1]
    assert sampler.metrics() == pytest.approx(restored.metrics(), rel=0, abs=0, nan_ok=True)
    assert_same_state(sampler.state_dict(), restored.state_dict())


@names
def test_a_state_is_a_copy_on_both_ways(name: str) -> None:
    source, target = make(name), make(name)
    step(source, 6, 0)
    state = source.state_dict()
    before = through_a_file(copy.deepcopy(state))
    target.load_state_dict(state)
    for sampler in (source, target):
        step(sampler, 6, 1)
    twin = make(name)
    twin.load_state_dict(state)
    other = make(name)
    other.load_state_dict(before)
    assert step(twin, 6, 2) == step(other, 6, 2)


@names
def test_the_seed_decides(name: str) -> None:
    def run(seed: int) -> list[list[int]]:
        sampler = SAMPLERS[name](whole_pool(60, 3, seed=seed))
        return [step(sampler, 6, number) for number in range(5)]

    assert run(0) == run(0)
    assert len({str(run(seed)) for seed in range(5)}) == 5


@names
def test_every_scalar_is_described_and_none_is_missing_after_a_step(name: str) -> None:
    sampler = make(name)
    step(sampler, 6, 0)
    metrics = sampler.metrics()
    assert metrics.keys() <= METRICS.keys()
    assert all(key.startswith("sampler/") for key in metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics or name == "uniform"


@names
def test_a_state_with_other_fields_is_refused_by_their_names(name: str) -> None:
    sampler = make(name)
    state = sampler.state_dict()
    for field in state:
        with pytest.raises(ValueError, match=field):
            sampler.load_state_dict({key: x for key, x in state.items() if key != field})
    with pytest.raises(ValueError, match="alien"):
        sampler.load_state_dict({**state, "alien": 1})


@names
def test_the_state_of_another_problem_set_is_refused_and_changes_nothing(name: str) -> None:
    sampler, untouched, other = make(name, 4), make(name, 4), make(name, 5)
    for one in (sampler, untouched, other):
        step(one, 2, 0)
    with pytest.raises(ValueError, match="num_prompts 5, here it is 4"):
        sampler.load_state_dict(other.state_dict())
    for count in (2, 3):
        assert step(sampler, count, 1) == step(untouched, count, 1)


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ("mopps", "dbb"),
        ("bots", "mopps"),
        ("dbb", "moving-average"),
        ("e2h-cosine", "e2h-gaussian"),
        ("sec", "e2h-cosine"),
        ("vcrl", "uniform"),
        ("pcl", "oracle"),
        ("adarft", "pcl"),
        ("shuffled-epochs", "uniform"),
        ("uniform", "w-d"),
    ],
)
def test_the_state_of_another_sampler_is_refused(saved: str, here: str) -> None:
    with pytest.raises(ValueError, match=r"state (has|lacks)"):
        make(here).load_state_dict(make(saved).state_dict())


@pytest.mark.parametrize(
    ("name", "build", "named"),
    [
        ("mopps", lambda pool: mopps(pool, discount=0.9), "discount 0.5, here it is 0.9"),
        ("mopps", lambda pool: mopps(pool, candidates=8), "candidates 16, here it is 8"),
        ("bots", lambda pool: bots(pool, prior_share=0.5), "prior_share"),
        ("bots", lambda pool: bots(replace(pool, difficulty=torch.ones(8))), "another difficulty"),
        ("dbb", lambda pool: dbb(pool, discount=0.75), "discount"),
        ("moving-average", lambda pool: moving_average(pool, window=3), "window"),
        ("sec", lambda pool: SEC(pool, rate=0.2), "rate"),
        ("sec", lambda pool: SEC(pool, bins=3), "bins"),
        ("sec", lambda pool: SEC(replace(pool, difficulty=torch.ones(8))), "another difficulty"),
        ("adarft", lambda pool: AdaRFT(pool, goal=0.7), "goal"),
        ("vcrl", lambda pool: VCRL(pool, kappa_late=0.7), "kappa_late"),
        ("pcl", lambda pool: PCL(pool, candidates=2), "candidates"),
        ("w-d", lambda pool: WD(pool, config=CurriculumConfig(discount=0.9)), "discount"),
        ("w-d", lambda pool: WD(pool, config=CurriculumConfig(low=0.2)), "low 0.3, here it is 0.2"),
        ("w-d", lambda pool: WD(pool, round_steps=2), "round_steps None, here it is 2"),
    ],
)
def test_the_state_of_another_constant_is_refused(
    name: str, build: Callable[[Pool], Sampler], named: str
) -> None:
    pool = whole_pool(8)
    with pytest.raises(ValueError, match=named):
        build(pool).load_state_dict(SAMPLERS[name](pool).state_dict())


# ------------------------------------------------------------------------------------- the feedback

faults = st.sampled_from(
    [
        ("prompt", -1),
        ("prompt", 25),
        ("trials", -8),
        ("trials", math.nan),
        ("trials", math.inf),
        ("successes", -1),
        ("successes", 8.5),
        ("successes", math.nan),
        ("successes", math.inf),
        ("mean_abs_advantage", -0.1),
        ("mean_abs_advantage", math.inf),
        ("mean_abs_advantage", -math.inf),
        ("value_first", math.inf),
        ("value_first", -math.inf),
    ]
)


def heard(prompt: list[int], seed: int) -> Feedback:
    """As `feedback`, from a run with a critic."""
    return replace(feedback(torch.tensor(prompt), seed), value_first=torch.zeros(len(prompt)))


@names
@property_test
@given(
    seed=seeds,
    prompt=st.lists(st.integers(0, 24), min_size=1, max_size=6),
    fault=faults,
    data=st.data(),
)
def test_impossible_feedback_is_refused_by_its_entry_and_teaches_nothing(
    name: str, seed: int, prompt: list[int], fault: tuple[str, float], data: st.DataObject
) -> None:
    sampler, (field, value) = make(name, 25, seed), fault
    step(sampler, 6, seed)
    before = copy.deepcopy(sampler.state_dict())
    at = data.draw(st.integers(0, len(prompt) - 1))
    said = heard(prompt, seed)
    getattr(said, field)[at] = value
    with pytest.raises(ValueError, match=rf"entry {at}\b"):
        sampler.observe(said)
    assert_same_state(sampler.state_dict(), before)
    if isinstance(sampler, Selective) and field in ("prompt", "trials", "successes"):
        with pytest.raises(ValueError, match=rf"entry {at}\b"):
            sampler.keep(said.prompt, said.trials, said.successes)
        assert_same_state(sampler.state_dict(), before)


@names
@pytest.mark.parametrize("field", list(vars(told([], []))))
def test_feedback_with_an_entry_too_many_is_refused_and_teaches_nothing(
    name: str, field: str
) -> None:
    sampler = make(name)
    before = copy.deepcopy(sampler.state_dict())
    said = heard([3, 4, 3], 0)
    longer = torch.cat([getattr(said, field), getattr(said, field)[:1]])
    with pytest.raises(ValueError, match=r"must (all )?be \["):
        sampler.observe(replace(said, **{field: longer}))
    assert_same_state(sampler.state_dict(), before)


def test_checked_feedback_is_the_same_in_wide_numbers_without_gradients() -> None:
    worth = torch.tensor([0.5, math.nan], requires_grad=True)
    said = Feedback(torch.tensor([1, 0]), torch.tensor([8, 0]), torch.tensor([3, 0]), worth, worth)
    checked = said.checked(2)
    for field, narrow in vars(said).items():
        wide = getattr(checked, field)
        assert wide.dtype == (torch.int64 if field == "prompt" else torch.float64)
        assert not wide.requires_grad
        torch.testing.assert_close(wide, narrow.detach().to(wide.dtype), equal_nan=True)
    assert replace(said, value_first=None).checked(2).value_first is None


# ----------------------------------------------------------------------------------------- the pool


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("e2h-cosine", "difficulty"),
        ("e2h-cosine", "steps"),
        ("e2h-gaussian", "difficulty"),
        ("e2h-gaussian", "steps"),
        ("adarft", "difficulty"),
        ("sec", "difficulty"),
        ("bots", "difficulty"),
        ("pcl", "predict"),
        ("oracle", "truth"),
    ],
)
def test_a_sampler_says_what_it_lacks(name: str, lacking: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} needs `{lacking}`, which this run lacks; "):
        SAMPLERS[name](whole_pool(5, **{lacking: None}))


@names
def test_what_a_sampler_does_not_need_may_be_missing(name: str) -> None:
    needs = {
        "e2h-cosine": {"difficulty", "steps"},
        "e2h-gaussian": {"difficulty", "steps"},
        "adarft": {"difficulty"},
        "sec": {"difficulty"},
        "bots": {"difficulty"},
        "pcl": {"predict"},
        "oracle": {"truth"},
    }.get(name, set())
    others = {"steps", "rollouts", "difficulty", "predict", "truth"} - needs
    sampler = SAMPLERS[name](whole_pool(5, **dict.fromkeys(others)))
    assert len(step(sampler, 3, 0)) >= 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_prompts": 0, "difficulty": None}, "at least one prompt"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"rollouts": 0}, "rollouts must be at least 1"),
        ({"difficulty": torch.zeros(4)}, r"difficulty must be \[5\]"),
        ({"difficulty": torch.tensor([0, 0.5, 1, 40, 0])}, "prompt 3 has 40"),
        ({"difficulty": torch.tensor([0, math.nan, 1, 0, 0])}, "prompt 1 has nan"),
    ],
)
def test_an_impossible_pool_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(whole_pool(5), **changes)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda pool: mopps(pool, candidates=0), "candidates"),
        (lambda pool: PCL(pool, candidates=0), "candidates"),
        (lambda pool: mopps(pool, candidates=1.5), "whole"),
        (lambda pool: mopps(pool, candidates=math.inf), "whole"),
        (lambda pool: PCL(pool, candidates=math.nan), "whole"),
        (lambda pool: SEC(pool, bins=0), "bins"),
        (lambda pool: SEC(pool, rate=0), "rate"),
        (lambda pool: SEC(pool, temperature=0), "temperature"),
        (lambda pool: E2H(pool, schedule="linear"), "schedule"),
        (lambda pool: AdaRFT(pool, start=101), "start"),
        (lambda pool: AdaRFT(pool, rate=math.nan), "rate"),
        (lambda pool: AdaRFT(pool, rate=-1), "rate"),
        (lambda pool: AdaRFT(pool, sharpness=math.inf), "sharpness"),
        (lambda pool: AdaRFT(pool, goal=math.nan), "goal"),
        (lambda pool: AdaRFT(pool, goal=50), "goal"),
        (lambda pool: VCRL(pool, max_replays=-1), "max_replays"),
        (lambda pool: VCRL(pool, early_steps=-1), "early_steps"),
        (lambda pool: VCRL(pool, kappa_early=1.1), "kappa_early"),
        (lambda pool: VCRL(pool, momentum=-0.1), "momentum"),
        *(
            (lambda pool, name=name: SAMPLERS[name](pool).next(-3), "-3 prompts")
            for name in sorted(SAMPLERS)
        ),
        (lambda pool: PCL(replace(pool, predict=lambda p: p[:1] * 0.0)).next(2), "predict"),
        (lambda pool: PCL(replace(pool, predict=lambda p: p * math.nan)).next(2), "finite"),
        (lambda pool: Oracle(replace(pool, truth=lambda: torch.ones(4))).next(2), r"\[5\]"),
        (
            lambda pool: Oracle(
                replace(pool, truth=lambda: torch.tensor([0, 1, math.nan, 0, 0]))
            ).next(2),
            "prompt 2 has nan",
        ),
    ],
)
def test_impossible_arguments_are_refused_by_name(build: Callable[[Pool], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(whole_pool(5))


# ----------------------------------------------------------------------------------- plain samplers


@given(seeds, st.integers(1, 12), counts)
def test_shuffled_epochs_visit_each_prompt_once_an_epoch_however_the_batches_are_cut(
    seed: int, num_prompts: int, batches: list[int]
) -> None:
    sampler = ShuffledEpochs(Pool(num_prompts, seed))
    drawn: list[int] = []
    for count in batches:
        drawn += sampler.next(count).tolist()
    assert len(drawn) == sum(batches)
    for start in range(0, len(drawn), num_prompts):
        epoch = drawn[start : start + num_prompts]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(num_prompts))
    one_by_one = ShuffledEpochs(Pool(num_prompts, seed))
    assert [int(one_by_one.next(1)) for _ in drawn] == drawn


def test_a_batch_over_the_end_of_an_epoch_takes_the_rest_from_the_next() -> None:
    sampler = ShuffledEpochs(Pool(10, 0))
    first, crossing, rest = sampler.next(7), sampler.next(7), sampler.next(6)
    assert sorted([*first.tolist(), *crossing[:3].tolist()]) == list(range(10))
    assert sorted([*crossing[3:].tolist(), *rest.tolist()]) == list(range(10))
    assert sampler.metrics() == {"sampler/epoch": 2.0}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = []
    for seed in range(5):
        sampler = ShuffledEpochs(Pool(50, seed))
        orders += [tuple(sampler.next(50).tolist()) for _ in range(5)]
    assert len(set(orders)) == len(orders)


def test_shuffled_epochs_refuse_the_state_of_another_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        ShuffledEpochs(Pool(4, 0)).load_state_dict(ShuffledEpochs(Pool(4, 1)).state_dict())


@pytest.mark.parametrize("name", ["shuffled-epochs", "uniform"])
def test_what_the_rollouts_say_does_not_move_a_fixed_order(name: str) -> None:
    hears, deaf = make(name, 9), make(name, 9)
    for _ in range(5):
        batch = hears.next(4)
        hears.observe(feedback(batch))
        assert deaf.next(4).tolist() == batch.tolist()


def test_uniform_draws_every_prompt_about_equally_often_and_steps_are_independent() -> None:
    sampler = Uniform(Pool(5, 0))
    steps = [frozenset(sampler.next(2).tolist()) for _ in range(4000)]
    often = Counter(prompt for step in steps for prompt in step)
    # 4000 draws of 2 in 5: a count is binomial(4000, .4), so 1600 with a deviation of 31.
    assert all(abs(count - 1600) < 5 * 31 for count in often.values())
    # A pair follows itself with probability 1/10; sampling by epochs would never repeat one prompt.
    repeats = sum(a == b for a, b in pairwise(steps))
    assert abs(repeats - 400) < 5 * 19


@names
def test_a_numpy_seed_is_the_same_seed(name: str) -> None:
    plain = SAMPLERS[name](whole_pool(30, 7))
    numpy = SAMPLERS[name](whole_pool(30, 7, seed=np.int64(7)))
    assert plain.next(20).tolist() == numpy.next(20).tolist()


# ------------------------------------------------------------------------- mopps, and its posterior


@property_test
@given(seeds, st.integers(1, 40), st.integers(1, 8), st.integers(1, 5))
def test_thompson_takes_the_candidates_whose_draws_are_nearest_to_one_half(
    seed: int, num_prompts: int, count: int, candidates: int
) -> None:
    count = min(count, num_prompts)
    sampler = mopps(Pool(num_prompts, seed), candidates=candidates)
    sampler.observe(feedback(torch.arange(num_prompts), seed))
    generator = torch.Generator()
    generator.set_state(sampler.generator.get_state())
    drawn = torch.randperm(num_prompts, generator=generator)[: candidates * count]
    x, y = (
        torch._standard_gamma(parameter[drawn], generator)
        for parameter in (sampler.tracker.alpha, sampler.tracker.beta)
    )
    scored = []
    for prompt, solved, failed in zip(drawn.tolist(), x.tolist(), y.tolist(), strict=True):
        g = solved / (solved + failed)
        scored.append(((g - 0.5) ** 2, prompt))
    scored.sort(key=lambda pair: pair[0])
    assert sampler.next(count).tolist() == [prompt for _, prompt in scored[:count]]
    mean = sum(math.sqrt(square) for square, _ in scored[:count]) / count
    assert sampler.metrics()["sampler/distance"] == pytest.approx(mean)


def test_the_draws_are_from_the_beta_posterior() -> None:
    sampler = mopps(Pool(1, 0))
    for alpha, beta, expected in ((1.0, 1.0, 0.25), (2.0, 1.0, 0.25), (5.0, 5.0, 63 / 512)):
        sampler.tracker = BetaTracker(1)
        sampler.tracker.alpha[:], sampler.tracker.beta[:] = alpha, beta
        distances = []
        for _ in range(4000):
            sampler.next(1)
            distances.append(sampler.distance)
        # |g - 1/2| has a deviation of at most .15: the mean of 4000 is within .01 at 4 deviations.
        assert sum(distances) / 4000 == pytest.approx(expected, abs=0.01)


def test_mopps_comes_to_prefer_what_is_solved_half_of_the_time() -> None:
    solved = torch.linspace(0, 16, 101)
    for build in (mopps, dbb, moving_average):
        sampler = build(Pool(101, 0), candidates=8)
        for _ in range(4):
            sampler.observe(
                Feedback(torch.arange(101), torch.full((101,), 16.0), solved, torch.zeros(101))
            )
        chosen = torch.cat([sampler.next(10) for _ in range(50)])
        assert (solved[chosen] / 16 - 0.5).abs().mean() < 0.12  # of all prompts it is .25
    uninformed = mopps(Pool(101, 0))
    chosen = torch.cat([uninformed.next(10) for _ in range(50)])
    assert (solved[chosen] / 16 - 0.5).abs().mean() > 0.2


@property_test
@given(seeds, st.integers(1, 12), st.floats(1, 40))
def test_thompson_weight_agrees_with_its_loop(seed: int, num_prompts: int, c: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    alpha, beta = 1 + 32 * torch.rand(2, num_prompts, generator=generator, dtype=torch.float64)
    normals = []
    for a, b in zip(alpha.tolist(), beta.tolist(), strict=True):
        variance = a * b / ((a + b) ** 2 * (a + b + 1))
        normals.append(NormalDist(a / (a + b), math.sqrt(variance)))

    def chances(tau: float) -> list[float]:
        return [normal.cdf(0.5 + tau) - normal.cdf(0.5 - tau) for normal in normals]

    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(chances(middle)) / num_prompts < 1 / c:
            low = middle
        else:
            high = middle
    expected = [c * chance for chance in chances(high)]
    found = thompson_weight(alpha, beta, candidates=c)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert found.mean().item() == pytest.approx(1)


def test_thompson_weight_is_the_rate_at_which_mopps_takes_a_prompt() -> None:
    num_prompts, rounds, count = 400, 3000, 25
    sampler = mopps(Pool(num_prompts, 0), candidates=16, discount=1.0)
    solved = 16 * torch.linspace(0, 1, num_prompts)
    sampler.observe(
        Feedback(torch.arange(num_prompts), torch.full_like(solved, 16), solved, solved)
    )
    often = torch.zeros(num_prompts, dtype=torch.float64)
    for _ in range(rounds):
        often[sampler.next(count)] += 1
    often /= often.mean()
    weight = thompson_weight(sampler.tracker.alpha, sampler.tracker.beta, candidates=16)
    # A count of about 190 w has a deviation of 14 sqrt(w); averaged over 40 neighbours, .012 in w.
    # What is left is the normal approximation: a Beta posterior is skewed.
    blocks = (often - weight).view(10, 40).mean(1)
    assert blocks.abs().max() < 0.15
    assert weight.max() > 2
    assert weight[0] < 0.01


def test_thompson_weight_of_equal_prompts_is_one_and_sides_do_not_matter() -> None:
    assert thompson_weight(torch.full((5,), 3.0), torch.full((5,), 9.0)).tolist() == [1.0] * 5
    alpha, beta = torch.tensor([1.0, 3.0, 40.0]), torch.tensor([9.0, 3.0, 2.0])
    torch.testing.assert_close(thompson_weight(alpha, beta), thompson_weight(beta, alpha))
    assert thompson_weight(alpha, beta, candidates=1).tolist() == pytest.approx([1.0] * 3)
    certain = thompson_weight(torch.tensor([32.0, 8.0]), torch.tensor([0.0, 8.0]))
    assert certain.tolist() == pytest.approx([0.0, 2.0])


def test_thompson_weight_of_ever_more_candidates_is_the_density_at_one_half() -> None:
    alpha, beta = torch.tensor([3.0, 40, 5, 9]), torch.tensor([9.0, 38, 5, 2])
    variance = alpha * beta / ((alpha + beta).square() * (alpha + beta + 1))
    normal = torch.distributions.Normal(alpha / (alpha + beta), variance.sqrt())
    density = normal.log_prob(torch.tensor(0.5)).exp()
    found = thompson_weight(alpha, beta, candidates=1_000_000)
    assert found.tolist() == pytest.approx((density / density.mean()).tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"candidates": 0.5}, "candidates"),
        ({"candidates": math.nan}, "candidates"),
        ({"candidates": math.inf}, "candidates"),
        ({"beta": torch.ones(2)}, r"\[N\]"),
        ({"alpha": torch.tensor([1.0, -1, 1])}, "prompt 1 has -1, 2"),
        ({"beta": torch.tensor([1.0, 1, -2])}, "prompt 2 has 1, -2"),
        ({"alpha": torch.tensor([math.nan, 1, 1])}, "prompt 0 has nan"),
        ({"beta": torch.tensor([1.0, math.inf, 1])}, "prompt 1 has 1, inf"),
        ({"alpha": torch.zeros(3), "beta": torch.tensor([1.0, 0, 1])}, "prompt 1 has 0, 0"),
    ],
)
def test_thompson_weight_refuses_what_is_no_posterior(bad: dict[str, Any], said: str) -> None:
    good = {"alpha": torch.ones(3), "beta": torch.full((3,), 2.0)}
    with pytest.raises(ValueError, match=f"thompson_weight: .*{said}"):
        thompson_weight(**(good | bad))


# --------------------------------------------------------------------------------------------- bins


@property_test
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40), st.integers(1, 7))
def test_bins_hold_equally_many_prompts_by_difficulty_then_id(
    difficulty: list[float], bins: int
) -> None:
    order = sorted(range(len(difficulty)), key=lambda prompt: (difficulty[prompt], prompt))
    expected = [0] * len(difficulty)
    for rank, prompt in enumerate(order):
        expected[prompt] = rank * bins // len(difficulty)
    found = bin_index(torch.tensor(difficulty), bins)
    assert found.tolist() == expected
    sizes = found.bincount(minlength=bins)
    assert len(sizes) == bins
    assert sizes.max() - sizes.min() <= 1


@property_test
@given(st.floats(0, 1), st.integers(1, 9))
def test_the_schedules_agree_with_their_loops(progress: float, bins: int) -> None:
    z = bins * (bins + 1) / 2
    w = (1 + math.cos(math.pi * progress)) / 2
    cosine = [w * (bins - i) / z + (1 - w) * (i + 1) / z for i in range(bins)]
    assert min(cosine) >= 1 / z - 1e-12  # the floor never binds
    assert cosine_schedule(progress, bins).tolist() == pytest.approx(cosine)
    mu, p_min = progress**0.5 * (bins - 1), 2 / (bins * (bins + 1))
    q = [math.exp(-((i - mu) ** 2) / (2 * 0.5**2)) for i in range(bins)]
    gaussian = [p_min + (1 - bins * p_min) * x / sum(q) for x in q]
    assert gaussian_schedule(progress, bins).tolist() == pytest.approx(gaussian)
    for p in (cosine, gaussian):
        assert sum(p) == pytest.approx(1)


def test_schedules_begin_easy_and_end_hard() -> None:
    assert cosine_schedule(0.0, 4).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert cosine_schedule(0.5, 4).tolist() == pytest.approx([0.25] * 4)
    assert cosine_schedule(1.0, 4).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # q ~ 1, e^-2, e^-8, e^-18; p_min = .1.
    golden = [0.628322, 0.171501, 0.100177, 0.1]
    assert gaussian_schedule(0.0, 4).tolist() == pytest.approx(golden, abs=1e-6)
    assert gaussian_schedule(1.0, 4).tolist() == pytest.approx(golden[::-1], abs=1e-6)
    assert gaussian_schedule(0.25, 5)[2] == gaussian_schedule(0.25, 5).max()  # mu = 2


@pytest.mark.parametrize("schedule", ["cosine", "gaussian"])
def test_e2h_draws_bins_at_the_rate_of_its_schedule(schedule: Any) -> None:
    sampler = E2H(whole_pool(500, steps=10), schedule=schedule, bins=5)
    for calls in (0, 3, 10, 25):
        seen = torch.zeros(5)
        for _ in range(300):
            sampler.calls = calls
            seen += sampler.bin_of[sampler.next(20)].bincount(minlength=5)
        sampler.calls = calls
        assert sampler.metrics()["sampler/progress"] == min(1, calls / 10)
        # 6000 draws: a share has a deviation of at most .0065.
        p = {"cosine": cosine_schedule, "gaussian": gaussian_schedule}[schedule](
            min(1, calls / 10), 5
        )
        assert (seen / 6000 - p).abs().max() < 0.03
        assert sampler.metrics()["sampler/bin"] == pytest.approx((p * torch.arange(5)).sum())


def test_every_call_moves_the_schedule_of_e2h() -> None:
    sampler = E2H(whole_pool(9, steps=4), schedule="cosine")
    progress = []
    for count in (1, 0, 12, 3, 2, 1):
        progress.append(sampler.progress)
        sampler.next(count)
    assert progress == [0, 0.25, 0.25, 0.5, 0.75, 1]


def test_prompts_of_a_bin_are_drawn_alike() -> None:
    sampler = SEC(whole_pool(20), bins=2)
    often = torch.zeros(20)
    for _ in range(4000):
        often[sampler.next(4)] += 1
    # Binomial(4000, .2): 800 with a deviation of 25.
    assert (often - 800).abs().max() < 5 * 25


def test_a_bin_that_is_too_small_gives_all_it_has() -> None:
    sampler = SEC(whole_pool(10), bins=5)  # two prompts a bin
    sampler.q = torch.tensor([40.0, 0, 0, 0, -5000]).double()  # the last is never drawn but last
    for count in range(11):
        chosen = sampler.next(count)
        assert len(set(chosen.tolist())) == count
        taken = sampler.bin_of[chosen].bincount(minlength=5).tolist()
        assert taken[0] == min(2, count)
        assert taken[4] == max(0, count - 8)


@property_test
@given(seeds, st.integers(1, 30), st.integers(1, 6), st.integers(1, 6))
def test_sec_agrees_with_its_loop(seed: int, num_prompts: int, bins: int, steps: int) -> None:
    sampler = SEC(whole_pool(num_prompts, seed), bins=bins, temperature=0.5)
    q = [0.0] * bins
    for number in range(steps):
        said = feedback(sampler.next(12), seed + number)
        sampler.observe(said)
        sizes: dict[int, list[float]] = {}
        for prompt, size in zip(
            said.prompt.tolist(), said.mean_abs_advantage.tolist(), strict=True
        ):
            if not math.isnan(size):
                sizes.setdefault(int(sampler.bin_of[prompt]), []).append(size)
        for index, seen in sizes.items():
            q[index] = 0.9 * q[index] + 0.1 * sum(seen) / len(seen)
    assert sampler.q.tolist() == pytest.approx(q, abs=1e-9)
    odds = [math.exp(x / 0.5) for x in q]
    assert sampler.probabilities().tolist() == pytest.approx([x / sum(odds) for x in odds])


# ------------------------------------------------------------------------------------------- adarft


@property_test
@given(seeds, st.integers(1, 30), st.integers(1, 12))
def test_adarft_takes_the_prompts_nearest_to_its_target(
    seed: int, num_prompts: int, count: int
) -> None:
    count = min(count, num_prompts)
    sampler = AdaRFT(whole_pool(num_prompts, seed), start=40)
    target = 40.0
    for number in range(4):
        chosen = sampler.next(count).tolist()
        distances = sorted(abs(100 * d - target) for d in (1 - rates(num_prompts, seed)).tolist())
        found = [abs(sampler.difficulty[prompt].item() - target) for prompt in chosen]
        assert found == pytest.approx(distances[:count])
        said = feedback(torch.tensor(chosen), seed + number)
        sampler.observe(said)
        accuracy = sum(said.successes.tolist()) / sum(said.trials.tolist())
        target = min(100.0, max(0.0, target + 50 * math.tanh(2 * (accuracy - 0.5))))
        assert sampler.metrics() == {"sampler/target": pytest.approx(target)}


def test_the_target_of_adarft_rises_with_accuracy_and_stays_in_its_range() -> None:
    sampler = AdaRFT(whole_pool(4))
    assert sampler.target == 0
    sampler.observe(told([0], [0]))
    assert sampler.target == 0
    sampler.observe(told([0, 1], [8, 8]))
    assert sampler.target == pytest.approx(38.0797, abs=1e-4)  # 50 tanh 1
    sampler.observe(told([0, 1], [8, 0]))
    assert sampler.target == pytest.approx(38.0797, abs=1e-4)
    sampler.observe(told([], []))
    assert sampler.target == pytest.approx(38.0797, abs=1e-4)
    for _ in range(3):
        sampler.observe(told([0], [8]))
    assert sampler.target == 100


def test_equally_difficult_prompts_all_have_their_turn() -> None:
    sampler = AdaRFT(whole_pool(40, difficulty=torch.full((40,), 0.5)))
    seen = {prompt for _ in range(40) for prompt in sampler.next(4).tolist()}
    assert len(seen) == 40


# --------------------------------------------------------------------------------------------- vcrl


@pytest.mark.parametrize("trials", [2, 3, 5, 8, 16])
def test_the_share_of_the_variance_agrees_with_its_definition(trials: int) -> None:
    variances = []
    for k in range(trials + 1):
        rewards = [1.0] * k + [0.0] * (trials - k)
        mean = sum(rewards) / trials
        variances.append(sum((r - mean) ** 2 for r in rewards) / (trials - 1))
    k = torch.arange(trials + 1)
    found = variance_share(torch.full_like(k, trials), k)
    assert found.tolist() == pytest.approx([v / max(variances) for v in variances])


def test_the_share_of_the_variance_at_its_ends() -> None:
    even = variance_share(torch.tensor([8, 8, 8]), torch.tensor([1, 2, 4]))
    assert even.tolist() == pytest.approx([7 / 16, 12 / 16, 1])
    # A group of one, partial credit between the halves of an odd group.
    assert variance_share(torch.tensor([1, 1]), torch.tensor([0, 1])).tolist() == [0, 0]
    assert variance_share(torch.tensor([3.0]), torch.tensor([1.5])).tolist() == [1]


def keep(sampler: VCRL, prompt: Tensor, successes: list[int], trials: int = 8) -> list[bool]:
    solved = torch.tensor(successes).float()
    return sampler.keep(prompt, torch.full_like(solved, trials), solved).tolist()


def test_kappa_is_stricter_after_the_first_twenty_steps() -> None:
    sampler = VCRL(Pool(100, 0))
    for number in range(22):
        kappa = 0.3 if number < 20 else 0.8
        assert sampler.metrics()["sampler/kappa"] == kappa
        prompt = sampler.next(5)
        # Shares 0, 7/16, 12/16, 15/16 and 1.
        expected = [False, True, True, True, True] if kappa == 0.3 else [False] * 3 + [True] * 2
        if number in (0, 19, 20):
            assert keep(sampler, prompt, [0, 1, 2, 3, 4]) == expected
            sampler.missing = 0
        sampler.observe(told([], []))


def test_what_was_dropped_is_made_up_from_the_bank_by_priority() -> None:
    sampler = VCRL(Pool(1000, 0), kappa_early=0.5)
    first = sampler.next(4)
    assert keep(sampler, first, [4, 2, 3, 4]) == [True] * 4
    assert sampler.metrics()["sampler/bank"] == 4
    sampler.observe(told([], []))

    second = sampler.next(3)  # nothing was dropped: nothing is replayed
    assert keep(sampler, second, [0, 8, 0]) == [False] * 3
    again = sampler.next(3)
    best = sorted((first[0].item(), first[3].item()))  # both have p = 1; ids break the tie
    assert again.tolist() == [*best, first[2].item()]
    # What came from the bank is kept whatever it says, and it says so to the bank.
    assert keep(sampler, again, [0, 4, 4]) == [True] * 3
    assert sampler.priority[again[0]] == pytest.approx(0.9)
    assert sampler.priority[again[1]] == pytest.approx(1.0)
    assert sampler.priority[again[2]] == pytest.approx(0.9 * 15 / 16 + 0.1)
    assert not set(sampler.next(5).tolist()) & set(again.tolist())


def test_an_entry_of_the_bank_is_replayed_twice_and_no_more_until_it_is_kept_afresh() -> None:
    sampler = VCRL(Pool(4, 0))
    (prompt,) = sampler.next(1).tolist()
    keep(sampler, torch.tensor([prompt]), [4])
    sampler.observe(told([], []))
    for replay in range(2):
        sampler.missing = 1
        assert sampler.next(1).tolist() == [prompt], replay
        assert keep(sampler, torch.tensor([prompt]), [0]) == [True]
        sampler.observe(told([], []))
    assert sampler.metrics()["sampler/bank"] == 0
    sampler.missing = 1
    chosen = sampler.next(4)
    assert sorted(chosen.tolist()) == [0, 1, 2, 3]
    # Drawn afresh it is tested, and may come back into the bank.
    solved = [4 if p == prompt else 0 for p in chosen.tolist()]
    assert keep(sampler, chosen, solved) == [x == 4 for x in solved]
    assert sampler.metrics()["sampler/bank"] == 1


@property_test
@given(seeds, st.integers(2, 25), st.integers(1, 8))
def test_the_bank_agrees_with_its_loop(seed: int, num_prompts: int, count: int) -> None:
    count = min(count, num_prompts)
    sampler = VCRL(Pool(num_prompts, seed), early_steps=6)
    priority: dict[int, float] = {}
    left: dict[int, int] = {}
    rng = np.random.default_rng(seed)
    rate = rng.random(num_prompts)
    for number in range(14):
        handed: set[int] = set()
        missing = count
        for refill in range(3):
            bank = [p for p in sorted(left) if left[p] > 0 and p not in handed]
            bank.sort(key=lambda p: -priority[p])
            expected = bank[:missing] if refill else []
            chosen = sampler.next(missing).tolist()
            assert chosen[: len(expected)] == expected
            fresh = chosen[len(expected) :]
            # Nothing comes twice in a step while there are others.
            others = num_prompts - len(handed | set(expected))
            assert len(set(fresh) - handed) == min(len(fresh), others)
            handed |= set(chosen)
            successes = rng.binomial(8, rate[chosen])
            kept = sampler.keep(
                torch.tensor(chosen), torch.full((len(chosen),), 8), torch.tensor(successes)
            ).tolist()
            missing = 0
            for prompt, k, found in zip(chosen, successes.tolist(), kept, strict=True):
                p = (k * (8 - k) / 56) / (8 / 28)
                passes = prompt in expected or p >= (0.3 if number < 6 else 0.8)
                assert found == passes
                if prompt in priority:
                    priority[prompt] = 0.9 * priority[prompt] + 0.1 * p
                elif passes:
                    priority[prompt] = p
                if prompt in expected:
                    left[prompt] -= 1
                elif passes:
                    left[prompt] = 2
                missing += not passes
            if not missing:
                break
        sampler.missing = 0  # the loop forgets what no refill made up for
        sampler.observe(told([], []))
        assert sampler.metrics()["sampler/bank"] == sum(x > 0 for x in left.values())


# ------------------------------------------------------------------------------ pcl, oracle and w-d


@property_test
@given(seeds, st.integers(1, 40), st.integers(1, 8))
def test_pcl_asks_the_critic_of_four_times_as_many_and_takes_the_nearest(
    seed: int, num_prompts: int, count: int
) -> None:
    count = min(count, num_prompts)
    asked: list[Tensor] = []
    value = torch.rand(num_prompts, generator=torch.Generator().manual_seed(seed)) * 2 - 1

    def predict(prompt: Tensor) -> Tensor:
        asked.append(prompt)
        return value[prompt]

    sampler = PCL(Pool(num_prompts, seed, predict=predict))
    chosen = sampler.next(count).tolist()
    (candidates,) = asked
    assert len(set(candidates.tolist())) == len(candidates) == min(4 * count, num_prompts)
    scored = [(abs((value[p].double().item() + 1) / 2 - 0.5), p) for p in candidates.tolist()]
    scored.sort(key=lambda pair: pair[0])
    assert chosen == [prompt for _, prompt in scored[:count]]
    mean = sum(distance for distance, _ in scored[:count]) / count
    assert sampler.metrics()["sampler/distance"] == pytest.approx(mean)


def test_pcl_follows_the_critic_as_it_stands() -> None:
    value = torch.tensor([0.0, 1.0, -1.0])
    sampler = PCL(Pool(3, 0, predict=lambda prompt: value[prompt]))
    assert sampler.next(1).tolist() == [0]
    value[:] = torch.tensor([1.0, 1.0, 0.1])
    assert sampler.next(1).tolist() == [2]


@property_test
@given(seeds, st.integers(1, 30), st.integers(1, 30))
def test_the_oracle_takes_the_prompts_whose_true_rate_is_nearest_to_one_half(
    seed: int, num_prompts: int, count: int
) -> None:
    count = min(count, num_prompts)
    rate = rates(num_prompts, seed)
    sampler = Oracle(Pool(num_prompts, seed, truth=lambda: rate))
    found = [abs(x - 0.5) for x in rate[sampler.next(count)].tolist()]
    assert found == sorted(abs(x - 0.5) for x in rate.tolist())[:count]


def test_w_d_draws_prompts_at_the_rate_of_their_weight() -> None:
    # Everything is stalled at its second round: the curve of the bottleneck spreads most.
    config = CurriculumConfig(low_delta=9, high_delta=9)
    sampler = WD(Pool(6, 0), config=config)
    for _ in range(2):
        assert sampler.metrics() == {"sampler/phase": 0.0}
        sampler.observe(told(list(range(6)), [0, 0, 40, 80, 100, 100], trials=100))
    assert sampler.metrics() == {"sampler/phase": 1.0}
    weight = difficulty_weight(sampler.curriculum.tracker.rho, phase="bottleneck")
    often = torch.zeros(6)
    for _ in range(6000):
        often[sampler.next(1)] += 1
    share = weight / weight.sum()
    assert share.max() > 50 * share.min()
    # A share of 6000 draws has a deviation of at most .0065.
    assert (often / 6000 - share).abs().max() < 0.03


def test_the_rounds_of_w_d_are_its_own() -> None:
    sampler = WD(Pool(6, 0))
    for number in range(9):
        sampler.observe(feedback(sampler.next(4), number))
    assert sampler.curriculum.rounds == 6
    by_steps = WD(Pool(6, 0), round_steps=2)
    for number in range(9):
        by_steps.observe(feedback(by_steps.next(4), number))
    assert by_steps.curriculum.rounds == 4


def test_a_state_that_is_refused_halfway_changes_nothing() -> None:
    sampler, other = WD(Pool(6, 0)), WD(Pool(6, 0))
    step(other, 4, 1)
    rho = sampler.curriculum.tracker.rho
    with pytest.raises(ValueError, match="RoundClock"):
        sampler.load_state_dict({**other.state_dict(), "clock": {}})
    assert torch.equal(sampler.curriculum.tracker.rho, rho)
