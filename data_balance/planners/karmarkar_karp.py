"""Karmarkar-Karp differencing for any number of ranks (Karmarkar and Karp 1982; in tuples: Michiels et al. 2003)."""

from __future__ import annotations

import heapq

import numpy as np

from data_balance.plan import IntArray, Problem

#: Above this many (items x ranks) differencing one item at a time takes seconds; whole tuples of R items do
#: then.
MAX_SINGLE_ITEM_WORK = 4_000_000


def difference_tuples(problem: Problem) -> IntArray:
    """Rank [n] of every item by repeatedly merging the two partial solutions with the widest load ranges.

    A partial solution is a tuple of R loads, each with its items. Merging adds the heaviest of one to the
    lightest of the other. A start of one item per tuple is the set differencing method; a start of R items
    per tuple, neighbours in cost, is its balanced form: counts per rank end equal, and the work falls from n
    to n/R merges. Carried loads are one more tuple, whose positions are the ranks themselves.
    """
    num_ranks, num_items = problem.num_ranks, problem.num_items
    counts_matter = problem.min_per_rank > 0 or problem.max_per_rank < num_items
    whole_tuples = counts_matter or num_items * num_ranks > MAX_SINGLE_ITEM_WORK
    width = num_ranks if whole_tuples else 1
    order = np.argsort(-problem.units, kind="stable")
    # Merging keeps ascending loads; groups[k] is a number under which the items of load k hang together.
    parents = np.arange(num_items + num_ranks)
    heap: list[tuple[int, int, np.ndarray, np.ndarray]] = []
    for serial, first in enumerate(range(0, num_items, width)):
        members = order[first : first + width][::-1]
        loads = np.zeros(num_ranks, dtype=np.int64)
        groups = np.full(num_ranks, -1, dtype=np.int64)
        loads[num_ranks - len(members) :] = problem.units[members]
        groups[num_ranks - len(members) :] = members
        heapq.heappush(heap, (int(loads[0] - loads[-1]), serial, loads, groups))
    by_load = np.argsort(problem.carried_units, kind="stable")
    carried = problem.carried_units[by_load]
    heapq.heappush(heap, (int(carried[0] - carried[-1]), num_items, carried, num_items + by_load))
    serial = num_items + 1
    while len(heap) > 1:
        _, _, loads_a, groups_a = heapq.heappop(heap)
        _, _, loads_b, groups_b = heapq.heappop(heap)
        loads, groups = _merge(loads_a, groups_a, loads_b[::-1], groups_b[::-1], parents)
        heapq.heappush(heap, (int(loads[0] - loads[-1]), serial, loads, groups))
        serial += 1
    return _roots(parents)[:num_items] - num_items


def _merge(
    loads_a: IntArray, groups_a: IntArray, loads_b: IntArray, groups_b: IntArray, parents: IntArray
) -> tuple[IntArray, IntArray]:
    """Add b to a position by position; the joined groups hang under the larger number (a rank's, if there is one)."""
    both = (groups_a >= 0) & (groups_b >= 0)
    groups = np.maximum(groups_a, groups_b)
    parents[np.minimum(groups_a, groups_b)[both]] = groups[both]
    loads = loads_a + loads_b
    order = np.argsort(loads, kind="stable")
    return loads[order], groups[order]


def _roots(parents: IntArray) -> IntArray:
    """Follow every chain to its end by pointer doubling: log2(depth) passes."""
    while True:
        further = parents[parents]
        if np.array_equal(further, parents):
            return parents
        parents = further
