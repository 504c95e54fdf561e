"""A step's plan: memory caps, padded micro batches, every slot, and when moving pays."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_balance import lower_bound, lpt, min_move
from data_balance.plan import BalancePlan
from data_balance.step_plan import StepItems, cap_memory, even_runs, moving_pays, plan_step, slot_costs, step_cost


def step_items(lengths: list[int], num_ranks: int, num_slots: int, pads: bool = False, node_size: int = 1) -> StepItems:
    tokens = np.array(lengths, dtype=np.int64)
    costs = tokens.astype(np.float64) ** 2
    position = np.arange(len(tokens))
    return StepItems(
        costs=costs,
        language=costs,
        home=position % num_ranks,
        home_slot=(position // num_ranks) % num_slots,
        sizes=tokens.astype(np.float64),
        memory=np.stack([tokens, tokens * 0], axis=1),
        nodes=np.arange(num_ranks) // node_size,
        pads=pads,
    )


LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS, num_ranks=st.integers(1, 4), num_slots=st.integers(1, 3), every=st.booleans(), pads=st.booleans()
)
def test_plan_is_complete_and_idle_only_for_want_of_items(
    lengths: list[int], num_ranks: int, num_slots: int, every: bool, pads: bool
) -> None:
    items = step_items(lengths, num_ranks, num_slots, pads, node_size=2)
    plan = plan_step(items, lpt, num_slots, None, every)
    counts = plan.slot_counts()
    assert counts.shape == (num_ranks, num_slots) and counts.sum() == len(lengths)
    if not pads:
        assert (counts == 0).any() == (len(lengths) < num_ranks * num_slots)


def test_every_slot_puts_the_giants_into_one_slot() -> None:
    items = step_items([100, 100, 10, 10, 10, 10, 10, 10], 2, 2)
    plan = plan_step(items, lpt, 2, None, every_slot=True)
    loads = plan.slot_loads(items.costs)
    assert sorted(loads[:, 0].tolist()) == [10_000, 10_000]
    assert step_cost(loads, every_slot=True) <= 10_000 + 300


def test_every_slot_moves_little_with_min_move() -> None:
    rng = np.random.default_rng(0)
    items = step_items(rng.integers(50, 200, 4 * 4 * 16).tolist(), 4, 4)
    plan = plan_step(items, min_move, 4, None, every_slot=True)
    assert (plan.assignment != items.home).mean() < 0.2
    assert plan.slot_loads(items.costs).max() <= 1.03 * items.costs.sum() / 16


def test_padding_is_counted_and_neighbours_share_a_micro_batch() -> None:
    lengths = [1000, 20, 900, 10, 30, 15, 25, 950]
    items = step_items(lengths, 2, 1, pads=True)
    stay = BalancePlan(items.home, items.home_slot, 2, 1)
    assert slot_costs(items, stay)[0, 0] == 4 * 1000**2  # ranks 0: 1000, 900, 30, 25
    plan = plan_step(items, lpt, 1, None, every_slot=False)
    assert step_cost(slot_costs(items, plan), False) <= 0.75 * step_cost(slot_costs(items, stay), False)
    unpadded = plan_step(step_items(lengths, 2, 1), lpt, 1, None, every_slot=False)
    assert step_cost(slot_costs(items, unpadded), False) > step_cost(slot_costs(items, plan), False)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, num_runs=st.integers(1, 6), capacity=st.one_of(st.none(), st.integers(5, 10)))
def test_runs_are_contiguous_and_the_best_possible(lengths: list[int], num_runs: int, capacity: int | None) -> None:
    if capacity is not None and capacity * num_runs < len(lengths):
        return
    language = np.sort(np.array(lengths, dtype=np.float64))[::-1]
    runs = even_runs(language, np.zeros_like(language), num_runs, capacity)
    assert runs[0] == 0 and set(np.diff(runs).tolist()) <= {0, 1} and runs[-1] < num_runs
    heaviest = max(language[runs == r].max() * (runs == r).sum() for r in np.unique(runs))
    # Dynamic programming over the first run's length.
    best = np.full((num_runs + 1, len(language) + 1), np.inf)
    best[:, len(language)] = 0
    for left in range(1, num_runs + 1):
        for first in range(len(language)):
            most = min(capacity or len(language), len(language) - first)
            best[left, first] = min(max(k * language[first], best[left - 1, first + k]) for k in range(1, most + 1))
    assert heaviest <= best[num_runs, 0] * (1 + 1e-6)


def test_memory_caps_move_the_cheapest_out() -> None:
    items = step_items([100, 90, 10, 10], 2, 1)
    crowded = BalancePlan(np.array([0, 0, 0, 1]), np.zeros(4, dtype=np.int64), 2, 1)
    plan, over_cap = cap_memory(crowded, items, (195, None), None)
    assert plan.assignment.tolist() == [0, 0, 1, 1] and over_cap == 0
    plan, over_cap = cap_memory(crowded, items, (120, None), None)
    assert over_cap == 0 and plan.loads(items.memory[:, 0]).max() <= 120
    _, over_cap = cap_memory(crowded, items, (101, None), None)
    assert over_cap == 1  # 100 + 90 + 10 + 10 do not fit twice 101 with the 10s anywhere else
    same, over_cap = cap_memory(crowded, items, (None, None), None)
    assert same is crowded and over_cap == 0


def test_moving_pays_only_above_the_threshold() -> None:
    assert moving_pays(100, 90, 0.05)
    assert not moving_pays(100, 96, 0.05)
    # One item of 1000 on a rank with almost nothing else: the step stays as long wherever the rest goes.
    assert not moving_pays(1001, 1000, 0.02)
    assert not moving_pays(0, 0, 0.0)


def test_node_placement_keeps_the_quality() -> None:
    rng = np.random.default_rng(2)
    items = step_items(rng.integers(1, 300, 64).tolist(), 8, 1, node_size=4)
    plan = plan_step(items, lpt, 1, None, every_slot=False)
    assert plan.loads(items.costs).max() <= 1.01 * lower_bound(items.costs, 8)
