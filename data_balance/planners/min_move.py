"""Start from where the items are and move few bytes until every rank is within a tolerance of the bound."""

from __future__ import annotations

import numpy as np

from data_balance.plan import FloatArray, IntArray, Problem

#: Lightest ranks that the heaviest one tries to exchange with, before an exchange that stays above the limit.
MAX_PARTNERS = 16


class _State:
    """Loads and items per rank while items move."""

    def __init__(self, problem: Problem, home: IntArray) -> None:
        self.problem = problem
        self.assignment = home.copy()
        self.loads = problem.loads(home)
        order = np.argsort(home, kind="stable")
        counts = np.bincount(home, minlength=problem.num_ranks)
        self.items: list[list[int]] = [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]

    def move(self, item: int, source: int, target: int) -> None:
        self.items[source].remove(item)
        self.items[target].append(item)
        self.assignment[item] = target
        self.loads[source] -= self.problem.costs[item]
        self.loads[target] += self.problem.costs[item]


def move_few_bytes(problem: Problem, home: IntArray, tolerance: float) -> IntArray:
    """Rank [n] of every item: `home` changed by few moves and swaps so that no load exceeds the bound by `tolerance`.

    The heaviest rank gives to one of the lightest: of its items, and of its swaps with the other's, the one
    that takes away most of its excess per byte. Long items go first by themselves, since cost grows faster
    than bytes. Ends when the heaviest rank is within the tolerance, or when no exchange lowers its load.
    """
    state = _State(problem, home)
    _mend_counts(state)
    limit = problem.bound() * (1 + tolerance)
    num_partners = min(MAX_PARTNERS, problem.num_ranks - 1)
    for _ in range(2 * problem.num_items if num_partners else 0):
        heavy = int(state.loads.argmax())
        if state.loads[heavy] <= limit:
            break
        lightest = np.argpartition(state.loads, num_partners - 1)[:num_partners]
        lightest = lightest[np.lexsort((lightest, state.loads[lightest]))].tolist()
        exchange = _first_exchange(state, heavy, lightest, limit)
        if exchange is None:
            break
        light, given, taken = exchange
        state.move(given, heavy, light)
        if taken is not None:
            state.move(taken, light, heavy)
    return state.assignment


def _first_exchange(state: _State, heavy: int, lightest: list[int], limit: float) -> tuple[int, int, int | None] | None:
    """(partner, item given, item taken or None) that stays within the limit: with a light rank, else a swap with any.

    Where nothing does, whatever lowers the heavier of the two loads.
    """
    lightest = [light for light in lightest if light != heavy]
    for light in lightest:
        exchange = _best_exchange(state, heavy, light, limit, within_limit=True)
        if exchange is not None:
            return light, *exchange
    swap = _best_swap(state, heavy, limit)
    if swap is not None:
        return int(state.assignment[swap[1]]), *swap
    for light in lightest:
        exchange = _best_exchange(state, heavy, light, limit, within_limit=False)
        if exchange is not None:
            return light, *exchange
    return None


def _best_swap(state: _State, heavy: int, limit: float) -> tuple[int, int] | None:
    """(item given, item taken): the swap of `heavy` with any rank with the most excess removed per byte moved."""
    problem = state.problem
    room = (limit - state.loads)[state.assignment]
    excess = state.loads[heavy] - limit
    best, best_worth = None, 0.0
    for given in state.items[heavy]:
        difference = problem.costs[given] - problem.costs
        worth = np.minimum(difference, excess) / (problem.sizes[given] + problem.sizes + 1.0)
        worth[(difference <= 0) | (difference > room)] = 0.0
        taken = int(worth.argmax())
        if worth[taken] > best_worth:
            best, best_worth = (given, taken), float(worth[taken])
    return best


def _best_exchange(
    state: _State, heavy: int, light: int, limit: float, within_limit: bool
) -> tuple[int, int | None] | None:
    """The item `heavy` gives and the one it gets back (or None) with the most excess removed per byte moved.

    Without `within_limit`: the exchange that brings the two loads closest together.
    """
    problem = state.problem
    given, taken = np.array(state.items[heavy], dtype=np.int64), np.array(state.items[light], dtype=np.int64)
    if not len(given):
        return None
    difference = problem.costs[given][:, None] - np.append(problem.costs[taken], 0.0)
    gap = state.loads[heavy] - state.loads[light]
    if within_limit:
        allowed = (difference > 0) & (difference <= limit - state.loads[light])
        moved = problem.sizes[given][:, None] + np.append(problem.sizes[taken], 0.0)
        worth = np.minimum(difference, state.loads[heavy] - limit) / (moved + 1.0)
    else:
        allowed = (difference > 0) & (difference < gap * (1 - 1e-9))
        worth = -np.abs(gap - 2 * difference)
    if len(given) <= problem.min_per_rank or len(taken) >= problem.max_per_rank:
        allowed[:, -1] = False  # the last column gives without taking
    if not allowed.any():
        return None
    row, column = divmod(int(np.where(allowed, worth, -np.inf).argmax()), worth.shape[1])
    return int(given[row]), None if column == len(taken) else int(taken[column])


def _mend_counts(state: _State) -> None:
    """Bring every rank's item count into the allowed range, smallest items first."""
    problem = state.problem
    counts = np.array([len(items) for items in state.items])
    while counts.max() > problem.max_per_rank or counts.min() < problem.min_per_rank:
        # While a rank has too many it gives; else the heaviest of those that can spare an item does.
        if counts.max() > problem.max_per_rank:
            source = int(counts.argmax())
        else:
            source = int(np.where(counts > problem.min_per_rank, state.loads, -1.0).argmax())
        if counts.min() < problem.min_per_rank:
            target = int(counts.argmin())
        else:
            target = int(np.where(counts < problem.max_per_rank, state.loads, np.inf).argmin())
        item = min(state.items[source], key=lambda i: (problem.sizes[i], i))
        state.move(item, source, target)
        counts[source] -= 1
        counts[target] += 1


def moved_share(sizes: FloatArray, home: IntArray, assignment: IntArray) -> float:
    """Share of the bytes that change ranks."""
    total = float(sizes.sum())
    return float(sizes[home != assignment].sum()) / total if total > 0 else 0.0
