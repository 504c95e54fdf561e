"""Planners: pure functions from costs to a `BalancePlan`, the same on every rank for the same numbers.

All share one signature. ``costs`` [n] weigh the items, ``num_ranks`` ranks have ``slots`` micro batches
each, every slot gets at least ``min_per_slot`` items while there are enough and at most ``capacity``;
``home`` [n] is the rank where an item is, ``sizes`` [n] its bytes (its cost without); ``carried``
[num_ranks] are loads that ranks have already. With ``home`` no plan is heavier than leaving items there
would be, and bins are placed so that few bytes move.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from data_balance.placement import place_bins
from data_balance.plan import BalancePlan, IntArray, Problem, check_problem
from data_balance.planners.greedy import lightest_rank_first
from data_balance.planners.karmarkar_karp import difference_tuples
from data_balance.planners.min_move import move_few_bytes
from data_balance.planners.refine import swap_towards_bound
from data_balance.planners.slots import fill_slots

#: How far above the bound `min_move` leaves a rank's load.
DEFAULT_TOLERANCE = 0.02


class Planner(Protocol):
    def __call__(
        self,
        costs: ArrayLike,
        num_ranks: int,
        *,
        slots: int = 1,
        min_per_slot: int = 0,
        capacity: int | None = None,
        home: ArrayLike | None = None,
        sizes: ArrayLike | None = None,
        carried: ArrayLike | None = None,
    ) -> BalancePlan: ...


def post_global_balancing_greedy_without_pad(
    costs: ArrayLike,
    num_ranks: int,
    *,
    slots: int = 1,
    min_per_slot: int = 0,
    capacity: int | None = None,
    home: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    carried: ArrayLike | None = None,
) -> BalancePlan:
    """Heaviest item first into the lightest rank that has room; the seed's default (with squared lengths as costs)."""
    problem = check_problem(
        costs, num_ranks, slots=slots, min_per_slot=min_per_slot, capacity=capacity, home=home, sizes=sizes,
        carried=carried,
    )  # fmt: skip
    return _finish(problem, lightest_rank_first)


def lpt(
    costs: ArrayLike,
    num_ranks: int,
    *,
    slots: int = 1,
    min_per_slot: int = 0,
    capacity: int | None = None,
    home: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    carried: ArrayLike | None = None,
) -> BalancePlan:
    """The greedy rule, then moves and swaps between heavy and light ranks until within 0.08% of the bound."""
    problem = check_problem(
        costs, num_ranks, slots=slots, min_per_slot=min_per_slot, capacity=capacity, home=home, sizes=sizes,
        carried=carried,
    )  # fmt: skip
    return _finish(problem, _lpt)


def karmarkar_karp(
    costs: ArrayLike,
    num_ranks: int,
    *,
    slots: int = 1,
    min_per_slot: int = 0,
    capacity: int | None = None,
    home: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    carried: ArrayLike | None = None,
) -> BalancePlan:
    """Karmarkar-Karp differencing, then the same moves and swaps: finest with few items a rank, slower."""
    problem = check_problem(
        costs, num_ranks, slots=slots, min_per_slot=min_per_slot, capacity=capacity, home=home, sizes=sizes,
        carried=carried,
    )  # fmt: skip
    return _finish(problem, lambda p: swap_towards_bound(p, difference_tuples(p)))


def min_move(
    costs: ArrayLike,
    num_ranks: int,
    *,
    slots: int = 1,
    min_per_slot: int = 0,
    capacity: int | None = None,
    home: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    carried: ArrayLike | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
) -> BalancePlan:
    """Move the fewest bytes that bring every rank within `tolerance` of the bound.

    Without ``home`` there is nothing to keep and the plan is `lpt`'s; so it is where few moves do not get
    there and `lpt` comes closer.
    """
    problem = check_problem(
        costs, num_ranks, slots=slots, min_per_slot=min_per_slot, capacity=capacity, home=home, sizes=sizes,
        carried=carried,
    )  # fmt: skip
    if problem.home is None or problem.num_items == 0:
        return _finish(problem, _lpt)
    assignment = swap_towards_bound(problem, move_few_bytes(problem, problem.home, tolerance), tolerance)
    heaviest = problem.loads(assignment).max()
    if heaviest > problem.bound() * (1 + tolerance) * (1 + 1e-9):
        other = _finish(problem, _lpt)
        if problem.loads(other.assignment).max() < heaviest:
            return other
    return BalancePlan(assignment, fill_slots(problem, assignment), problem.num_ranks, problem.num_slots)


#: Planner by the name that `sorting_algo_name` and `--data-balance-sorting-algo` take.
SORTING_ALGORITHMS: dict[str, Planner] = {
    "post_global_balancing_greedy_without_pad": post_global_balancing_greedy_without_pad,
    "lpt": lpt,
    "karmarkar_karp": karmarkar_karp,
    "min_move": min_move,
}


def planner_for(name: str, tolerance: float = DEFAULT_TOLERANCE) -> Planner:
    """The planner called `name`, with the tolerance of `min_move` bound.

    Raises:
        ValueError: no such planner.
    """
    if name not in SORTING_ALGORITHMS:
        raise ValueError(
            f"sorting algorithm {name!r} does not exist, so nothing can be planned; choose one of "
            f"{', '.join(SORTING_ALGORITHMS)}"
        )
    return partial(min_move, tolerance=tolerance) if name == "min_move" else SORTING_ALGORITHMS[name]


def _lpt(problem: Problem) -> IntArray:
    return swap_towards_bound(problem, lightest_rank_first(problem))


def _finish(problem: Problem, make_bins: Callable[[Problem], IntArray]) -> BalancePlan:
    """Bins to ranks near the items, fall back to the input placement unless that is heavier, fill the slots."""
    assignment = make_bins(problem) if problem.num_items else np.zeros(0, dtype=np.int64)
    if problem.home is not None and problem.num_items:
        before, after = problem.loads(problem.home).max(), problem.loads(assignment).max()
        if problem.keeps_counts(problem.home) and before <= after:
            assignment = problem.home.copy()
        else:
            assignment = _near_home(problem, assignment, float(after))[assignment]
    return BalancePlan(assignment, fill_slots(problem, assignment), problem.num_ranks, problem.num_slots)


def _near_home(problem: Problem, bins: IntArray, heaviest: float) -> IntArray:
    """Rank of every bin; where ranks carry unequal loads only pairs that stay at or below `heaviest` count."""
    assert problem.home is not None
    allowed = None
    if problem.carried.any():
        bin_loads = problem.loads(bins) - problem.carried
        allowed = bin_loads[:, None] + problem.carried[None, :] <= heaviest * (1 + 1e-12)
    return place_bins(bins, problem.home, problem.sizes, problem.num_ranks, allowed=allowed)
