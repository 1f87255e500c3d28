"""Which prompts the samplers choose, and that a restored one goes on as if nothing had happened."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cvpo.samplers import SAMPLERS, Feedback, ShuffledEpochs, Uniform

seeds = st.integers(0, 2**31 - 1)
counts = st.lists(st.integers(0, 25), max_size=12)


def feedback(prompt: torch.Tensor) -> Feedback:
    ones = torch.ones(len(prompt))
    return Feedback(prompt=prompt, trials=8 * ones, successes=3 * ones, mean_abs_advantage=ones)


@given(seeds, st.integers(1, 12), counts)
def test_shuffled_epochs_visit_each_prompt_once_an_epoch_however_the_batches_are_cut(
    seed: int, num_prompts: int, batches: list[int]
) -> None:
    sampler = ShuffledEpochs(num_prompts, seed=seed)
    drawn: list[int] = []
    for count in batches:
        batch = sampler.next(count)
        assert len(batch) == count
        assert batch.dtype == torch.int64
        drawn += batch.tolist()
    for start in range(0, len(drawn), num_prompts):
        epoch = drawn[start : start + num_prompts]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(num_prompts))
    one_by_one = ShuffledEpochs(num_prompts, seed=seed)
    assert [int(one_by_one.next(1)) for _ in drawn] == drawn


def test_a_batch_over_the_end_of_an_epoch_takes_the_rest_from_the_next() -> None:
    sampler = ShuffledEpochs(10, seed=0)
    first, crossing, rest = sampler.next(7), sampler.next(7), sampler.next(6)
    assert sorted([*first.tolist(), *crossing[:3].tolist()]) == list(range(10))
    assert sorted([*crossing[3:].tolist(), *rest.tolist()]) == list(range(10))
    assert sampler.metrics() == {"sampler/epoch": 2.0}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = []
    for seed in range(5):
        sampler = ShuffledEpochs(50, seed=seed)
        orders += [tuple(sampler.next(50).tolist()) for _ in range(5)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@given(seed=seeds, before=counts, after=counts)
def test_a_restored_sampler_goes_on_exactly(
    name: str, seed: int, before: list[int], after: list[int]
) -> None:
    sampler = SAMPLERS[name](25, seed=seed)
    for count in before:
        sampler.observe(feedback(sampler.next(count)))
    state = sampler.state_dict()
    expected = [sampler.next(count).tolist() for count in after]
    restored = SAMPLERS[name](25, seed=seed)
    restored.next(3)  # what it did before must not matter
    restored.load_state_dict(state)
    assert restored.metrics().keys() == sampler.metrics().keys()
    assert [restored.next(count).tolist() for count in after] == expected


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_what_the_rollouts_say_does_not_move_a_fixed_order(name: str) -> None:
    told, untold = SAMPLERS[name](9, seed=4), SAMPLERS[name](9, seed=4)
    for _ in range(5):
        batch = told.next(4)
        told.observe(feedback(batch))
        assert untold.next(4).tolist() == batch.tolist()


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_state_with_other_fields_is_refused_by_their_names(name: str) -> None:
    sampler = SAMPLERS[name](4, seed=0)
    state = sampler.state_dict()
    for field in state:
        with pytest.raises(ValueError, match=field):
            sampler.load_state_dict({key: x for key, x in state.items() if key != field})
    with pytest.raises(ValueError, match="alien"):
        sampler.load_state_dict({**state, "alien": 1})


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_the_state_of_another_problem_set_is_refused_and_changes_nothing(name: str) -> None:
    sampler = SAMPLERS[name](4, seed=0)
    sampler.next(2)
    untouched = SAMPLERS[name](4, seed=0)
    untouched.next(2)
    other = SAMPLERS[name](5, seed=0)
    other.next(4)
    with pytest.raises(ValueError, match=r"(num_prompts 5|5 prompts), this sampler 4"):
        sampler.load_state_dict(other.state_dict())
    assert sampler.next(2).tolist() == untouched.next(2).tolist()


def test_shuffled_epochs_refuse_the_state_of_another_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        ShuffledEpochs(4, seed=0).load_state_dict(ShuffledEpochs(4, seed=1).state_dict())


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_no_prompts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        SAMPLERS[name](0, seed=0)


@given(seeds, st.lists(st.integers(0, 12), max_size=8))
def test_uniform_repeats_no_prompt_within_a_step(seed: int, batches: list[int]) -> None:
    sampler = Uniform(12, seed=seed)
    for count in batches:
        batch = sampler.next(count).tolist()
        assert len(batch) == count == len(set(batch))
        assert set(batch) <= set(range(12))


def test_uniform_draws_every_prompt_about_equally_often_and_steps_are_independent() -> None:
    sampler = Uniform(5, seed=0)
    steps = [frozenset(sampler.next(2).tolist()) for _ in range(4000)]
    often = Counter(prompt for step in steps for prompt in step)
    # 4000 draws of 2 in 5: a count is binomial(4000, .4), so 1600 with a deviation of 31.
    assert all(abs(count - 1600) < 5 * 31 for count in often.values())
    # A pair follows itself with probability 1/10; sampling by epochs would never repeat one prompt.
    repeats = sum(a == b for a, b in pairwise(steps))
    assert abs(repeats - 400) < 5 * 19


def test_uniform_refuses_more_prompts_than_there_are() -> None:
    with pytest.raises(ValueError, match="6 distinct prompts asked of 5"):
        Uniform(5, seed=0).next(6)


def test_a_numpy_seed_is_the_same_seed() -> None:
    plain, numpy = ShuffledEpochs(9, seed=7), ShuffledEpochs(9, seed=np.int64(7))
    assert plain.next(20).tolist() == numpy.next(20).tolist()
