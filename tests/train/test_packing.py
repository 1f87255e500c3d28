"""How sequences are dealt out to micro-batches and processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.packing import partition, shares

costs = st.lists(st.integers(0, 60), max_size=40)


@given(costs, st.integers(1, 9))
def test_every_item_is_in_one_bin(lengths: list[int], bins: int) -> None:
    found = partition(lengths, bins)
    assert len(found) == bins
    assert sorted(item for items in found for item in items) == list(range(len(lengths)))


@given(costs, st.integers(1, 9))
def test_no_bin_is_heavier_than_grahams_bound(lengths: list[int], bins: int) -> None:
    weights = [sum(lengths[item] for item in items) for items in partition(lengths, bins)]
    assert weights == sorted(weights, reverse=True)
    # No partition is better than the mean, the longest item, or the two that must share a bin.
    by_size = sorted(lengths, reverse=True)
    shared = sum(by_size[bins - 1 : bins + 1]) if len(lengths) > bins else 0
    least = max(sum(lengths) / bins, max(lengths, default=0), shared)
    assert weights[0] <= (4 / 3 - 1 / (3 * bins)) * max(least, 1) + 1e-9 or weights[0] <= (
        sum(lengths) / bins + max(lengths) * (1 - 1 / bins) + 1e-9
    )


def test_the_largest_go_first_to_the_lightest() -> None:
    # 7 | 7 | 6, then 6 to the third, 5 to the first, 4 to the second twice, 4 to the first.
    sizes = [5, 4, 7, 4, 6, 4, 7, 6]
    found = partition(sizes, 3)
    assert found == [[0, 2, 5], [1, 3, 6], [4, 7]]
    assert [sum(sizes[item] for item in items) for items in found] == [16, 15, 12]


@given(costs, st.integers(1, 4), st.integers(1, 100))
def test_each_rank_gets_as_many_micro_batches(lengths: list[int], ranks: int, budget: int) -> None:
    found = shares(lengths, ranks=ranks, budget=budget)
    assert len(found) == ranks
    assert len({len(mine) for mine in found}) == 1
    dealt = [item for mine in found for part in mine for item in part]
    assert sorted(dealt) == list(range(len(lengths)))


@given(costs, st.integers(1, 4), st.integers(1, 100))
def test_a_micro_batch_keeps_to_the_budget_or_is_one_long_sequence(
    lengths: list[int], ranks: int, budget: int
) -> None:
    most = max(budget, max(lengths, default=0))
    for mine in shares(lengths, ranks=ranks, budget=budget):
        assert all(sum(lengths[item] for item in part) <= most for part in mine)


def test_one_rank_and_room_for_all_is_one_micro_batch() -> None:
    assert shares([3, 1, 2], ranks=1, budget=6) == [[[0, 1, 2]]]
    assert len(shares([3, 1, 2], ranks=1, budget=5)[0]) == 2


def test_ranks_work_on_like_amounts_at_the_same_time() -> None:
    found = shares([10, 10, 9, 9, 8, 8, 1, 1], ranks=2, budget=20)
    weights = [[sum([10, 10, 9, 9, 8, 8, 1, 1][i] for i in part) for part in r] for r in found]
    assert all(abs(a - b) <= 1 for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_fewer_sequences_than_ranks_leave_empty_micro_batches(ranks: int) -> None:
    found = shares([4], ranks=ranks, budget=10)
    assert sorted(found) == [[[]]] * (ranks - 1) + [[[0]]]
