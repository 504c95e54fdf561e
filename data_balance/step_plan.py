"""The plan of one step from all ranks' lengths: totals or every slot, memory caps, and whether moving pays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_balance.bounds import imbalance
from data_balance.placement import place_bins
from data_balance.plan import BalancePlan, FloatArray, IntArray
from data_balance.planners import Planner

#: Bins this even need no sorting by load into slots, which would move whole bins.
EVEN_ENOUGH = 1.05
#: Halvings of the range in which the heaviest run's cost is sought: to a millionth of it.
BISECTIONS = 30


@dataclass(frozen=True)
class StepItems:
    """All samples of a step on all ranks, in the same order everywhere (by rank, then as loaded).

    ``language`` is the language model's part of ``costs``; ``memory`` [n, 2] are tokens and patches;
    ``nodes`` [num_ranks] the node of each rank; with ``pads`` a micro batch is padded to its longest sample.
    """

    costs: FloatArray
    language: FloatArray
    home: IntArray
    home_slot: IntArray
    sizes: FloatArray
    memory: IntArray
    nodes: IntArray
    pads: bool


def plan_step(
    items: StepItems, planner: Planner, num_slots: int, capacity: int | None, every_slot: bool
) -> BalancePlan:
    """Plan of the step's samples over ``len(items.nodes)`` ranks and `num_slots` micro batches each.

    Where micro batches are padded, runs of neighbours in length are tried too, and the quicker plan is taken.
    """
    plan = (_plan_every_slot if every_slot else _plan_totals)(items, planner, num_slots, capacity)
    if not items.pads or capacity == 1 or not len(items.costs):
        return plan
    runs = _plan_runs(items, planner, num_slots, capacity)
    costs = [step_cost(slot_costs(items, p), every_slot) for p in (plan, runs)]
    return runs if costs[1] < costs[0] else plan


def slot_costs(items: StepItems, plan: BalancePlan) -> FloatArray:
    """Cost [ranks, slots] of every micro batch; a padded one costs the language model its longest sample every time."""
    if not items.pads:
        return plan.slot_loads(items.costs)
    longest = np.zeros(plan.num_ranks * plan.num_slots)
    np.maximum.at(longest, plan.assignment * plan.num_slots + plan.slot, items.language)
    padded = longest.reshape(plan.num_ranks, plan.num_slots) * plan.slot_counts()
    return padded + plan.slot_loads(items.costs - items.language)


def _plan_totals(items: StepItems, planner: Planner, num_slots: int, capacity: int | None) -> BalancePlan:
    num_ranks = len(items.nodes)
    plan = planner(
        items.costs, num_ranks, slots=num_slots, min_per_slot=1, capacity=capacity, home=items.home, sizes=items.sizes
    )
    if len(np.unique(items.nodes)) in (1, num_ranks) or not len(items.costs):
        return plan
    ranks = place_bins(plan.assignment, items.home, items.sizes, num_ranks, nodes=items.nodes)
    return BalancePlan(ranks[plan.assignment], plan.slot, num_ranks, num_slots)


def _plan_runs(items: StepItems, planner: Planner, num_slots: int, capacity: int | None) -> BalancePlan:
    """Cut the samples, longest first, into one run of even padded cost per micro batch; spread the runs by planner."""
    num_ranks = len(items.nodes)
    order = np.argsort(-items.language, kind="stable")
    run = np.empty(len(order), dtype=np.int64)
    run[order] = even_runs(
        items.language[order], (items.costs - items.language)[order], num_ranks * num_slots, capacity
    )
    num_runs = int(run.max()) + 1
    single = BalancePlan(np.zeros_like(run), run, 1, num_runs)
    plan = planner(slot_costs(items, single)[0], num_ranks, slots=num_slots, min_per_slot=1, capacity=1)
    ranks = place_bins(plan.assignment[run], items.home, items.sizes, num_ranks, nodes=items.nodes)
    return BalancePlan(ranks[plan.assignment[run]], plan.slot[run], num_ranks, num_slots)


def even_runs(language: FloatArray, vision: FloatArray, num_runs: int, capacity: int | None) -> IntArray:
    """Run [n] of every sample, in at most `num_runs` runs with the least heaviest padded cost.

    Args:
        language: cost [n] of each sample to the language model, descending; a run pays its first one's for
            all.
        vision: cost [n] to the vision encoder, which is not padded.
        num_runs: runs at most.
        capacity: samples in a run at most.
    """
    most = capacity if capacity is not None else len(language)
    before = np.concatenate([[0.0], np.cumsum(vision)])

    def cut(limit: float) -> list[int]:
        """Starts of the runs when none may cost more than `limit` (but one sample always may)."""
        starts: list[int] = []
        first = 0
        while first < len(language) and len(starts) <= num_runs:
            starts.append(first)
            counts = np.arange(1, min(most, len(language) - first) + 1)
            costs = counts * language[first] + before[first + counts] - before[first]
            first += max(int(np.searchsorted(costs, limit, side="right")), 1)
        return starts

    low, high = 0.0, float(len(language) * language[0] + before[-1])
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= num_runs else (middle, high)
    starts = np.zeros(len(language), dtype=np.int64)
    starts[cut(high)[1:]] = 1
    return np.cumsum(starts)


def _plan_every_slot(items: StepItems, planner: Planner, num_slots: int, capacity: int | None) -> BalancePlan:
    """Even micro batches: as many bins as there are micro batches of all ranks, the heaviest bins in the same slot.

    A step then takes the sum over slots of its heaviest bin. Where an item is heavier than the mean bin, its
    bin and the next heaviest ones share a slot, so that only that slot is long. Even bins stay where the
    planner put them.
    """
    num_ranks = len(items.nodes)
    num_bins = num_ranks * num_slots
    flat_home = items.home * num_slots + items.home_slot
    flat = planner(items.costs, num_bins, min_per_slot=1, capacity=capacity, home=flat_home, sizes=items.sizes)
    loads = flat.loads(items.costs)
    if imbalance(loads) <= EVEN_ENOUGH:
        return BalancePlan(flat.assignment // num_slots, flat.assignment % num_slots, num_ranks, num_slots)
    by_load = np.argsort(-loads, kind="stable")
    rank_of, slot_of = np.empty(num_bins, dtype=np.int64), np.empty(num_bins, dtype=np.int64)
    for slot in range(num_slots):
        bins = by_load[slot * num_ranks : (slot + 1) * num_ranks]
        position = np.full(num_bins, -1)
        position[bins] = np.arange(num_ranks)
        inside = position[flat.assignment] >= 0
        rank_of[bins] = place_bins(
            position[flat.assignment[inside]], items.home[inside], items.sizes[inside], num_ranks, nodes=items.nodes
        )
        slot_of[bins] = slot
    return BalancePlan(rank_of[flat.assignment], slot_of[flat.assignment], num_ranks, num_slots)


def cap_memory(
    plan: BalancePlan, items: StepItems, caps: tuple[int | None, int | None], capacity: int | None
) -> tuple[BalancePlan, int]:
    """Move samples out of micro batches above a cap, cheapest first, into the lightest rank's slot with room.

    Returns:
        The plan, and how many micro batches of more than one sample are above a cap still, for want of room.
    """
    if all(cap is None for cap in caps):
        return plan, 0
    limits = np.array([np.inf if cap is None else cap for cap in caps])
    num_bins = plan.num_ranks * plan.num_slots
    flat = plan.assignment * plan.num_slots + plan.slot
    used = np.zeros((num_bins, 2))
    np.add.at(used, flat, items.memory)
    counts = np.bincount(flat, minlength=num_bins)
    loads = plan.loads(items.costs)
    over_cap = 0
    for crowded in np.flatnonzero((used > limits).any(axis=1)):
        for item in sorted(np.flatnonzero(flat == crowded), key=lambda i: (items.costs[i], i)):
            if counts[crowded] == 1 or (used[crowded] <= limits).all():
                break
            room = (used + items.memory[item] <= limits).all(axis=1) & (counts < (capacity or len(flat) + 1))
            room[crowded] = False
            if not room.any():
                continue
            target = int(np.where(room, loads.repeat(plan.num_slots), np.inf).argmin())
            for one_bin, sign in ((crowded, -1), (target, 1)):
                used[one_bin] += sign * items.memory[item]
                counts[one_bin] += sign
                loads[one_bin // plan.num_slots] += sign * items.costs[item]
            flat[item] = target
        over_cap += int(counts[crowded] > 1 and (used[crowded] > limits).any())
    return BalancePlan(flat // plan.num_slots, flat % plan.num_slots, plan.num_ranks, plan.num_slots), over_cap


def step_cost(slot_loads: FloatArray, every_slot: bool) -> float:
    """Time of a step with these loads [ranks, slots]: its heaviest rank's, or the sum of every slot's heaviest."""
    return float(slot_loads.max(axis=0).sum() if every_slot else slot_loads.sum(axis=1).max())


def step_imbalance(slot_loads: FloatArray, every_slot: bool) -> float:
    """`step_cost` over what even loads would take."""
    if not every_slot:
        return imbalance(slot_loads.sum(axis=1))
    even = float(slot_loads.mean(axis=0).sum())
    return step_cost(slot_loads, every_slot) / even if even > 0 else 1.0


def moving_pays(before: float, after: float, threshold: float) -> bool:
    """Whether a step's cost falls by more than `threshold` of it.

    This covers both reasons not to move: ranks that are even already, and one item heavier than the mean of
    all that sets the step's length wherever it is.
    """
    return before - after > threshold * before
