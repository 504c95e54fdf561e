"""Longest item first into the lightest rank that has room (Graham's LPT rule): the seed document's default."""

from __future__ import annotations

import heapq

import numpy as np

from data_balance.plan import IntArray, Problem


def lightest_rank_first(problem: Problem) -> IntArray:
    """Rank [n] of every item: heaviest first, each into the lightest rank with room.

    The heap holds ``load * num_ranks + rank`` as one integer: ties go to the lowest rank, and comparing two
    integers is several times as quick as comparing two tuples.
    """
    num_ranks = problem.num_ranks
    order = np.argsort(-problem.units, kind="stable")
    steps = (problem.units[order] * num_ranks).tolist()
    heap = (problem.carried_units * num_ranks + np.arange(num_ranks)).tolist()
    heapq.heapify(heap)
    assignment = np.empty(problem.num_items, dtype=np.int64)
    if problem.max_per_rank >= problem.num_items and problem.min_per_rank == 0:
        assignment[order] = _without_counts(steps, heap, num_ranks)
    else:
        assignment[order] = _with_counts(steps, heap, num_ranks, problem.max_per_rank, problem.min_per_rank)
    return assignment


def _without_counts(steps: list[int], heap: list[int], num_ranks: int) -> IntArray:
    replace = heapq.heapreplace  # it answers the key it took out, the lightest rank's
    keys = [replace(heap, heap[0] + step) for step in steps]
    return np.array(keys, dtype=np.int64) % num_ranks


def _with_counts(steps: list[int], heap: list[int], num_ranks: int, most: int, least: int) -> list[int]:
    """The same with at most `most` items a rank, and the last items kept for ranks that have fewer than `least`."""
    counts = [0] * num_ranks
    missing = least * num_ranks
    ranks = []
    remaining = len(steps)
    for step in steps:
        if missing and remaining == missing:  # from here on every item is owed to a rank below its minimum
            heap = [key for key in heap if counts[key % num_ranks] < least]
            heapq.heapify(heap)
            most, missing = least, 0
        key = heap[0]
        rank = key % num_ranks
        ranks.append(rank)
        counts[rank] += 1
        if missing and counts[rank] <= least:
            missing -= 1
        remaining -= 1
        if counts[rank] >= most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, key + step)
    return ranks
