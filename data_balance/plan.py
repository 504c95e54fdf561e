"""What planners take and give: the checked problem and the plan."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_balance.bounds import lower_bound, rank_loads

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class BalancePlan:
    """Where every item goes: ``assignment[i]`` is item i's rank and ``slot[i]`` its micro batch there (int64 [n])."""

    assignment: IntArray
    slot: IntArray
    num_ranks: int
    num_slots: int = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BalancePlan) and self.digest() == other.digest()

    def loads(self, costs: ArrayLike) -> FloatArray:
        """Total cost [num_ranks] per rank."""
        return rank_loads(np.asarray(costs, dtype=np.float64), self.assignment, self.num_ranks)

    def slot_loads(self, costs: ArrayLike) -> FloatArray:
        """Cost [num_ranks, num_slots] per micro batch."""
        flat = self.assignment * self.num_slots + self.slot
        loads = rank_loads(np.asarray(costs, dtype=np.float64), flat, self.num_ranks * self.num_slots)
        return loads.reshape(self.num_ranks, self.num_slots)

    def slot_counts(self) -> IntArray:
        """Items [num_ranks, num_slots] per micro batch; a zero is an idle micro batch."""
        flat = self.assignment * self.num_slots + self.slot
        counts = np.bincount(flat, minlength=self.num_ranks * self.num_slots)
        return counts.reshape(self.num_ranks, self.num_slots).astype(np.int64)

    def digest(self) -> bytes:
        """16 bytes that are equal exactly when two plans are: stages of one replica compare them."""
        header = np.array([self.num_ranks, self.num_slots], dtype=np.int64)
        content = header.tobytes() + self.assignment.tobytes() + self.slot.tobytes()
        return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True)
class Problem:
    """A planner's checked input, with per-rank counts derived from the per-slot ones.

    ``units`` are the costs as positive integers (resolution 2**-44 of the total): comparing integers is
    exact, so every rank breaks every tie alike, and an item that costs nothing still counts as a little.
    """

    costs: FloatArray
    units: IntArray
    num_ranks: int
    num_slots: int
    min_per_slot: int
    capacity: int | None
    home: IntArray | None
    sizes: FloatArray
    carried: FloatArray
    carried_units: IntArray

    @property
    def num_items(self) -> int:
        return len(self.costs)

    @property
    def max_per_rank(self) -> int:
        """Most items a rank may hold."""
        return self.num_items if self.capacity is None else self.capacity * self.num_slots

    @property
    def min_per_rank(self) -> int:
        """Items every rank gets: what fills its slots, or an even share when there are too few for that."""
        return min(self.min_per_slot * self.num_slots, self.num_items // self.num_ranks)

    def loads(self, assignment: IntArray) -> FloatArray:
        """Load [R] per rank under `assignment`, with what the ranks carry already."""
        return self.carried + rank_loads(self.costs, assignment, self.num_ranks)

    def bound(self) -> float:
        """Least possible load of the heaviest rank."""
        return lower_bound(self.costs, self.num_ranks, self.carried)

    def keeps_counts(self, assignment: IntArray) -> bool:
        """Whether every rank holds an allowed number of items."""
        counts = np.bincount(assignment, minlength=self.num_ranks)
        return bool(counts.max() <= self.max_per_rank and counts.min() >= self.min_per_rank)


def check_problem(
    costs: ArrayLike,
    num_ranks: int,
    *,
    slots: int = 1,
    min_per_slot: int = 0,
    capacity: int | None = None,
    home: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    carried: ArrayLike | None = None,
) -> Problem:
    """Check a planner's arguments; their meaning is documented in `data_balance.planners`.

    Raises:
        ValueError: a cost, count, rank or size that cannot be planned with.
    """
    item_costs = _non_negative("costs", costs)
    num_items = len(item_costs)
    if num_ranks < 1 or slots < 1 or min_per_slot < 0:
        raise ValueError(
            f"num_ranks {num_ranks}, slots {slots}, min_per_slot {min_per_slot}: nothing can be placed; give "
            "at least one rank, one slot and a minimum of zero or more"
        )
    if capacity is not None and (capacity < max(min_per_slot, 1) or num_items > capacity * slots * num_ranks):
        raise ValueError(
            f"{num_items} items do not fit {num_ranks} ranks x {slots} slots x capacity {capacity} with at "
            f"least {min_per_slot} per slot; raise the capacity (max_batch_capacity) or the number of micro "
            "batches"
        )
    ranks = None if home is None else np.asarray(home, dtype=np.int64).reshape(-1)
    if ranks is not None and (len(ranks) != num_items or not ((ranks >= 0) & (ranks < num_ranks)).all()):
        raise ValueError(f"home must name a rank in 0..{num_ranks - 1} for each of {num_items} items; got {ranks}")
    item_sizes = item_costs if sizes is None else _non_negative("sizes", sizes)
    start = np.zeros(num_ranks) if carried is None else _non_negative("carried", carried)
    if len(item_sizes) != num_items or len(start) != num_ranks:
        raise ValueError(
            f"{len(item_sizes)} sizes for {num_items} items, {len(start)} carried loads for {num_ranks} "
            "ranks; give one each"
        )
    start = start - start.min()  # what all ranks carry alike does not matter, and would cost resolution
    total = item_costs.sum() + start.sum()
    scale = 2.0**44 / total if total > 0 else 0.0
    return Problem(
        costs=item_costs,
        units=np.maximum(np.rint(item_costs * scale), 1).astype(np.int64),
        num_ranks=int(num_ranks),
        num_slots=int(slots),
        min_per_slot=int(min_per_slot),
        capacity=None if capacity is None else int(capacity),
        home=ranks,
        sizes=item_sizes,
        carried=start,
        carried_units=np.rint(start * scale).astype(np.int64),
    )


def _non_negative(name: str, values: ArrayLike) -> FloatArray:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size and (not np.isfinite(array).all() or array.min() < 0):
        raise ValueError(f"{name} contain a negative or non-finite number; a planner cannot weigh it: mend the lengths")
    return array
