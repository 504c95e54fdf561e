"""Spread each rank's items over its micro batches: neighbours in cost together, about equal cost in each."""

from __future__ import annotations

import numpy as np

from data_balance.plan import IntArray, Problem


def fill_slots(problem: Problem, assignment: IntArray) -> IntArray:
    """Slot [n] of every item on its rank.

    A rank's items, heaviest first, are cut into `num_slots` runs of about equal cost: neighbours in length
    share a micro batch, which keeps padding low, and peak memory is even. Every run has at least
    `min_per_slot` items while there are enough, and at most `capacity`. With fewer items than slots each has
    its own, and the last slots are idle.
    """
    num_ranks, num_slots = problem.num_ranks, problem.num_slots
    if num_slots == 1 or problem.num_items == 0:
        return np.zeros(problem.num_items, dtype=np.int64)
    order = np.lexsort((-problem.units, assignment))
    counts = np.bincount(assignment, minlength=num_ranks)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rank = assignment[order]
    position = np.arange(problem.num_items) - starts[rank]
    before = np.concatenate([[0], np.cumsum(problem.units[order])])
    # An item belongs to the run in which its middle falls when the rank's cost is cut into equal parts.
    total = before[starts[1:]] - before[starts[:-1]]
    middle = (before[:-1] - before[starts[rank]] + before[1:] - before[starts[rank]]) / 2
    wanted = np.minimum(middle * num_slots / np.maximum(total[rank], 1), num_slots - 1).astype(np.int64)
    slots = np.zeros(problem.num_items, dtype=np.int64)
    edge = np.zeros(num_ranks, dtype=np.int64)
    least, most = _run_lengths(problem, counts)
    for slot in range(1, num_slots):
        first = np.bincount(rank, weights=wanted < slot, minlength=num_ranks).astype(np.int64)
        later = num_slots - slot
        low = np.maximum(edge + least, counts - later * most)
        high = np.minimum(edge + most, counts - later * least)
        edge = np.clip(first, low, np.maximum(low, high))
        slots += position >= edge[rank]
    result = np.empty_like(slots)
    result[order] = slots
    return result


def _run_lengths(problem: Problem, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Fewest and most items [num_ranks] of a run."""
    even = counts // problem.num_slots
    too_few = counts < problem.min_per_slot * problem.num_slots
    least = np.where(too_few, even, problem.min_per_slot)
    most = np.full_like(counts, problem.num_items if problem.capacity is None else problem.capacity)
    return least, np.where(too_few, -(-counts // problem.num_slots), most)
