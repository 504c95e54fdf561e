"""Lower the heaviest loads by moving or swapping items between pairs of ranks, many pairs at a time."""

from __future__ import annotations

import numpy as np

from data_balance.plan import FloatArray, IntArray, Problem

#: Loads this close to the lower bound are left alone: the measured noise of a step is larger.
TOLERANCE = 8e-4
#: Items of a rank that are looked at, its lightest ones: differences among those are the finest.
MAX_ITEMS = 40
MAX_ROUNDS = 60


def swap_towards_bound(problem: Problem, assignment: IntArray, tolerance: float = TOLERANCE) -> IntArray:
    """`assignment` with its heaviest loads lowered until `tolerance` above the bound; never a heavier maximum.

    A round pairs the ranks above the target, heaviest first, with the lightest ones. Each pair does the one
    exchange (an item against another, or against nothing) that comes closest to halving its difference.
    Without progress the next round pairs them shifted by one; after a full turn without any it ends.
    """
    if problem.num_ranks < 2 or problem.num_items < 2:
        return assignment
    assignment = assignment.copy()
    target = problem.bound() * (1 + tolerance)
    shift = 0
    for _ in range(MAX_ROUNDS):
        loads = problem.loads(assignment)
        order = np.argsort(loads, kind="stable")
        num_pairs = min(int((loads > target).sum()), problem.num_ranks // 2)
        if num_pairs == 0:
            break
        heavy = order[::-1][:num_pairs]
        # Pairs must not share a rank, so the partners come from the other half of the order.
        light = np.roll(order[: problem.num_ranks - num_pairs], -shift)[:num_pairs]
        if _exchange_once(problem, assignment, loads, heavy, light):
            shift = 0
        else:
            shift += max(num_pairs, 1)
            if shift >= problem.num_ranks - num_pairs:
                break
    return assignment


def _exchange_once(problem: Problem, assignment: IntArray, loads: FloatArray, heavy: IntArray, light: IntArray) -> bool:
    """Do the best exchange of every (heavy, light) pair in place; whether any pair improved."""
    counts = np.bincount(assignment, minlength=problem.num_ranks)
    table = _item_table(problem, assignment, counts)
    costs = np.append(problem.costs, 0.0)  # index -1 stands for "no item"
    giving, taking = table[heavy], table[light]
    give, take = costs[giving], costs[taking]
    gap = loads[heavy] - loads[light]
    difference = give[:, :, None] - take[:, None, :]
    left_over = np.abs(gap[:, None, None] - 2 * difference)  # the pair's difference afterwards
    allowed = (difference > 0) & (difference < gap[:, None, None]) & (giving >= 0)[:, :, None]
    # Without an item in return the counts change.
    may_move = (counts[heavy] > problem.min_per_rank) & (counts[light] < problem.max_per_rank)
    allowed &= (taking >= 0)[:, None, :] | may_move[:, None, None]
    left_over = np.where(allowed, left_over, np.inf).reshape(len(heavy), -1)
    best = left_over.argmin(axis=1)
    pairs = np.flatnonzero(left_over[np.arange(len(heavy)), best] < gap * (1 - 1e-9))
    give_index, take_index = np.divmod(best[pairs], taking.shape[1])
    given, taken = giving[pairs, give_index], taking[pairs, take_index]
    assignment[given] = light[pairs]
    swapped = taken >= 0
    assignment[taken[swapped]] = heavy[pairs][swapped]
    return len(pairs) > 0


def _item_table(problem: Problem, assignment: IntArray, counts: IntArray) -> IntArray:
    """[num_ranks, k] item numbers per rank, lightest first, then -1; the last column is always -1."""
    order = np.lexsort((problem.units, assignment))
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    position = np.arange(problem.num_items) - starts[assignment[order]]
    width = min(int(counts.max()), MAX_ITEMS)
    table = np.full((problem.num_ranks, width + 1), -1, dtype=np.int64)
    kept = position < width
    table[assignment[order][kept], position[kept]] = order[kept]
    return table
