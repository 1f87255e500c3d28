"""How a batch is cut into micro-batches, for one device or for many.

Every process computes the same cut from the lengths alone, so nothing has to be agreed on; and
every process gets the same number of micro-batches, since under ZeRO-3 each of them is a collective
operation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def partition(costs: Sequence[int], bins: int) -> list[list[int]]:
    """Splits items over bins of nearly equal cost: the largest first, each to the lightest bin.

    (Longest processing time first; Graham 1969: the heaviest bin is at most 4/3 - 1/(3 bins) of the
    best possible.)

    Args:
        costs: At least 0.
        bins: At least 1; with fewer items than bins, some stay empty.

    Returns:
        Indices into `costs`, ascending in each bin; the bins from the heaviest to the lightest.
    """
    heap = [(0, number) for number in range(bins)]
    found: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        weight, number = heap[0]
        heapq.heapreplace(heap, (weight + costs[item], number))
        found[number].append(item)
    weights = [sum(costs[item] for item in items) for items in found]
    heaviest_first = sorted(range(bins), key=lambda number: (-weights[number], number))
    return [sorted(found[number]) for number in heaviest_first]


def shares(costs: Sequence[int], *, ranks: int, budget: int) -> list[list[list[int]]]:
    """The micro-batches of every rank: as few as the budget allows, the same number for each.

    Micro-batch k has about the same cost on every rank, so that none waits for another.

    Args:
        costs: Tokens of each sequence.
        ranks: At least 1.
        budget: Tokens of a micro-batch; a longer sequence stands alone.

    Returns:
        [rank][micro-batch] -> indices into `costs`. A micro-batch is empty where there are fewer
        sequences than micro-batches.
    """
    most = max(budget, max(costs, default=0))
    each = max(1, math.ceil(sum(costs) / (ranks * most)))
    while True:
        bins = partition(costs, ranks * each)
        if sum(costs[item] for item in bins[0]) <= most:
            return [bins[rank::ranks] for rank in range(ranks)]
        each += 1
