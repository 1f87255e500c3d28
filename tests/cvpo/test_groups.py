"""Group statistics against plain loops."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cvpo.groups import group_index, group_mean, shuffle_within

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(0, 30)


def loop_group_mean(x: list[float], group: list[int], valid: list[bool]) -> list[float]:
    members = defaultdict(list)
    for a, k, v in zip(x, group, valid, strict=True):
        if v:
            members[k].append(a)
    return [math.fsum(members[k]) / len(members[k]) if members[k] else 0.0 for k in group]


def batch(seed: int, B: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scattered group names and a mask of those that count."""
    rng = np.random.default_rng(seed)
    return (
        torch.tensor(rng.normal(size=B)),
        torch.tensor(rng.choice(np.array([3, -8, 10**9, 0]), B)),
        torch.tensor(rng.random(B) < 0.7),
    )


@given(seeds, sizes)
def test_group_mean_agrees_with_its_loop(seed: int, B: int) -> None:
    x, group, valid = batch(seed, B)
    everyone = [True] * B
    expected = loop_group_mean(x.tolist(), group.tolist(), everyone)
    assert group_mean(x, group).tolist() == pytest.approx(expected)
    expected = loop_group_mean(x.tolist(), group.tolist(), valid.tolist())
    assert group_mean(x, group, valid=valid).tolist() == pytest.approx(expected)


@given(seeds, sizes)
def test_what_stands_in_invalid_entries_does_not_matter(seed: int, B: int) -> None:
    x, group, valid = batch(seed, B)
    for junk in (math.nan, math.inf, -math.inf):
        dirty = torch.where(valid, x, junk).requires_grad_()
        mean = group_mean(dirty, group, valid=valid)
        torch.testing.assert_close(mean.detach(), group_mean(x, group, valid=valid))
        mean.sum().backward()
        assert dirty.grad is not None
        assert dirty.grad[~valid].eq(0).all()
        assert dirty.grad.isfinite().all()


@given(seeds, sizes)
def test_group_mean_follows_a_permutation_and_ignores_what_groups_are_called(
    seed: int, B: int
) -> None:
    x, group, valid = batch(seed, B)
    plain = group_mean(x, group, valid=valid)
    order = torch.tensor(np.random.default_rng(seed).permutation(B), dtype=torch.long)
    permuted = group_mean(x[order], group[order], valid=valid[order])
    torch.testing.assert_close(permuted, plain[order])
    torch.testing.assert_close(group_mean(x, 17 - 5 * group, valid=valid), plain)


def test_a_group_without_a_valid_entry_has_mean_zero() -> None:
    mean = group_mean(
        torch.tensor([math.nan, 3.0, 5.0]),
        torch.tensor([7, 2, 2]),
        valid=torch.tensor([False, True, True]),
    )
    assert mean.tolist() == [0.0, 4.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_group_mean_computes_narrow_numbers_in_single(dtype: torch.dtype) -> None:
    x = torch.arange(1, 301).to(dtype)
    mean = group_mean(x, torch.zeros(300, dtype=torch.int32))
    assert mean.dtype == torch.float32
    assert mean[0].item() == pytest.approx(x.double().mean().item(), rel=1e-6)
    assert group_mean(x.double(), torch.zeros(300, dtype=torch.int32)).dtype == torch.float64


def test_group_mean_refuses_shapes_that_would_broadcast() -> None:
    x, group = torch.ones(4), torch.zeros(4, dtype=torch.long)
    for wrong in ((x[:1], group), (x[None], group[None]), (x, group[:1])):
        with pytest.raises(ValueError, match=r"\[B\]"):
            group_mean(*wrong)
    with pytest.raises(ValueError, match=r"\[B\]"):
        group_mean(x, group, valid=torch.tensor([True]))


@given(seeds, sizes)
def test_group_index_is_dense_and_tells_the_same_groups_apart(seed: int, B: int) -> None:
    _, group, _ = batch(seed, B)
    index, number = group_index(group)
    assert sorted(set(index.tolist())) == list(range(number))
    assert len(set(zip(group.tolist(), index.tolist(), strict=True))) == number


# ----------------------------------------------------------------------------------- the shuffle


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**31)


@given(seeds, sizes)
def test_a_shuffle_keeps_what_each_cell_holds(seed: int, B: int) -> None:
    x, group, outcome = batch(seed, B)
    shuffled = shuffle_within(x, group, outcome, generator=generator(seed))
    cells = list(zip(group.tolist(), outcome.tolist(), strict=True))
    before = Counter(zip(cells, x.tolist(), strict=True))
    assert Counter(zip(cells, shuffled.tolist(), strict=True)) == before


@given(seeds, sizes)
def test_a_shuffle_is_decided_by_its_generator(seed: int, B: int) -> None:
    x, group, outcome = batch(seed, B)
    once, again = (
        shuffle_within(x, group, outcome.long(), generator=generator(seed)) for _ in range(2)
    )
    assert torch.equal(once, again)
    source = generator(seed)
    shuffle_within(x, group, outcome, generator=source)
    fresh = generator(seed)
    if B:
        assert not torch.equal(source.get_state(), fresh.get_state())


def test_a_shuffle_draws_every_permutation_of_a_cell_about_equally_often() -> None:
    x = torch.tensor([0, 10, 1, 11, 2])
    group = torch.tensor([5, 5, 5, 5, 5])
    outcome = torch.tensor([False, True, False, True, False])
    source = torch.Generator().manual_seed(0)
    drawn = Counter(
        tuple(shuffle_within(x, group, outcome, generator=source).tolist()) for _ in range(6000)
    )
    # 3! orders of the first cell times 2! of the second, 500 each with a deviation of 21.
    assert len(drawn) == 12
    assert all(abs(count - 500) < 5 * 21.5 for count in drawn.values())


def test_a_shuffle_of_large_group_names_keeps_cells_apart() -> None:
    # Names near the end of the integers: a product of group and outcome would overflow.
    x = torch.arange(8)
    group = torch.tensor([2**62, 2**62, -(2**62), -(2**62)] * 2)
    outcome = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    found = set()
    for seed in range(30):
        shuffled = shuffle_within(x, group, outcome, generator=generator(seed))
        for cell in ([0, 1], [2, 3], [4, 5], [6, 7]):
            assert sorted(shuffled[cell].tolist()) == cell
        found.add(tuple(shuffled.tolist()))
    assert len(found) > 5
