"""Planners: exact small cases, and what must hold for any input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_balance import SORTING_ALGORITHMS, imbalance, lower_bound, lpt, min_move, place_bins
from data_balance.plan import check_problem
from data_balance.planners import planner_for, post_global_balancing_greedy_without_pad
from data_balance.planners.min_move import move_few_bytes, moved_share

ALL = sorted(SORTING_ALGORITHMS)


@st.composite
def problems(draw: st.DrawFn) -> dict:
    num_ranks = draw(st.integers(1, 6))
    slots = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 200_000), max_size=40))
    needed = -(-len(lengths) // (num_ranks * slots))
    capacity = draw(st.one_of(st.none(), st.integers(max(needed, 1), max(needed, 1) + 3)))
    min_per_slot = draw(st.integers(0, 2 if capacity is None else min(2, capacity)))
    home = draw(
        st.one_of(st.none(), st.lists(st.integers(0, num_ranks - 1), min_size=len(lengths), max_size=len(lengths)))
    )
    return {
        "lengths": np.array(lengths, dtype=np.int32),
        "num_ranks": num_ranks,
        "slots": slots,
        "capacity": capacity,
        "min_per_slot": min_per_slot,
        "home": home,
    }


def solve(name: str, problem: dict, costs: np.ndarray, **extra: object):
    settings_ = {k: problem[k] for k in ("slots", "capacity", "min_per_slot", "home")}
    return SORTING_ALGORITHMS[name](costs, problem["num_ranks"], **settings_, **extra)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=120, deadline=None)
@given(problem=problems())
def test_every_item_once_within_counts_and_never_worse_than_the_input(name: str, problem: dict) -> None:
    costs = problem["lengths"].astype(np.float64) ** 2
    plan = solve(name, problem, costs)
    num_items, num_bins = len(costs), problem["num_ranks"] * problem["slots"]
    counts = plan.slot_counts()
    assert len(plan.assignment) == len(plan.slot) == num_items == counts.sum()
    if problem["capacity"] is not None:
        assert counts.max(initial=0) <= problem["capacity"]
    if num_items >= problem["min_per_slot"] * num_bins:
        assert counts.min() >= problem["min_per_slot"]
    loads = plan.loads(costs)
    assert loads.max() >= lower_bound(costs, problem["num_ranks"]) * (1 - 1e-9)
    if problem["home"] is not None and num_items:
        home = np.bincount(problem["home"], weights=costs, minlength=problem["num_ranks"])
        per_rank = np.bincount(problem["home"], minlength=problem["num_ranks"])
        least = min(problem["min_per_slot"] * problem["slots"], num_items // problem["num_ranks"])
        most = num_items if problem["capacity"] is None else problem["capacity"] * problem["slots"]
        if per_rank.min() >= least and per_rank.max() <= most:
            assert loads.max() <= home.max() * (1 + 1e-9)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_same_plan_again_and_for_every_integer_width(name: str, problem: dict) -> None:
    lengths = problem["lengths"]
    plans = [solve(name, problem, lengths.astype(dtype)) for dtype in (np.int32, np.int64, np.float64)]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].digest() == solve(name, problem, lengths).digest()


@settings(max_examples=120, deadline=None)
@given(costs=st.lists(st.integers(0, 10_000), min_size=1, max_size=40), num_ranks=st.integers(1, 6))
def test_greedy_keeps_grahams_bound(costs: list[int], num_ranks: int) -> None:
    bound = lower_bound(costs, num_ranks)
    for name in ("post_global_balancing_greedy_without_pad", "lpt"):
        heaviest = SORTING_ALGORITHMS[name](costs, num_ranks).loads(costs).max()
        # Graham 1969: LPT is within 4/3 - 1/(3R) of the optimum; at most mean + the lightest item on the heaviest rank.
        assert heaviest <= max(costs) + sum(costs) / num_ranks + 1e-6
        assert heaviest <= 2 * bound + 1e-6


def brute_force(costs: list[int], num_ranks: int) -> float:
    best = float("inf")
    for code in range(num_ranks ** len(costs)):
        loads = [0] * num_ranks
        for cost in costs:
            code, rank = divmod(code, num_ranks)
            loads[rank] += cost
        best = min(best, max(loads))
    return best


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=7), num_ranks=st.integers(1, 3))
def test_bound_is_below_the_optimum_and_lpt_within_a_third_of_it(costs: list[int], num_ranks: int) -> None:
    optimum = brute_force(costs, num_ranks)
    assert lower_bound(costs, num_ranks) <= optimum + 1e-9
    assert lpt(costs, num_ranks).loads(costs).max() <= optimum * (4 / 3 - 1 / (3 * num_ranks)) + 1e-6


def test_differencing_beats_greedy_on_the_textbook_case() -> None:
    costs = [8, 7, 6, 5, 4]  # greedy 17:13; differencing 16:14; optimum 15:15, which the swaps reach
    greedy = post_global_balancing_greedy_without_pad(costs, 2).loads(costs)
    differencing = SORTING_ALGORITHMS["karmarkar_karp"](costs, 2).loads(costs)
    assert sorted(greedy.tolist()) == [13, 17]
    assert sorted(differencing.tolist()) == [15, 15]


@pytest.mark.parametrize("name", ALL)
def test_capacity_one_per_micro_batch_does_not_pile_the_largest_on_rank_zero(name: str) -> None:
    rng = np.random.default_rng(1)
    costs = np.sort(rng.lognormal(8, 1, 64 * 8))[::-1] ** 2
    home = np.arange(512) % 64
    plan = SORTING_ALGORITHMS[name](costs, 64, slots=8, capacity=1, min_per_slot=1, home=home)
    assert (plan.slot_counts() == 1).all()
    bound = lower_bound(costs, 64)
    assert plan.loads(costs).max() <= 1.05 * bound


@pytest.mark.parametrize("name", ALL)
def test_too_few_items_leave_slots_idle(name: str) -> None:
    plan = SORTING_ALGORITHMS[name]([5, 4, 3], 2, slots=3, min_per_slot=1)
    counts = plan.slot_counts()
    assert counts.sum() == 3 and counts.max() == 1 and (counts == 0).sum() == 3
    assert sorted(plan.loads([5, 4, 3]).tolist()) == [5, 7]
    nothing = SORTING_ALGORITHMS[name]([], 4, slots=2, min_per_slot=1, home=[])
    assert len(nothing.assignment) == 0 and nothing.slot_counts().tolist() == [[0, 0]] * 4


@pytest.mark.parametrize("name", ALL)
def test_one_giant_item_is_alone_and_the_rest_is_even(name: str) -> None:
    costs = [1000.0] + [10.0] * 30
    plan = SORTING_ALGORITHMS[name](costs, 4, home=[0] * 31)
    loads = np.sort(plan.loads(costs))
    assert loads[-1] == 1000 if name != "min_move" else loads[-1] <= 1020
    assert loads[:3].max() <= 300


def test_carried_loads_count_and_end_even() -> None:
    carried = np.array([90.0, 0.0, 30.0])
    costs = np.full(12, 10.0)
    for name in ALL:
        plan = SORTING_ALGORITHMS[name](costs, 3, carried=carried, home=[0] * 12)
        assert (carried + plan.loads(costs)).max() <= 90, name


def test_min_move_moves_little() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6, 0.9, 64 * 32)
    costs = 6 * 2560 * lengths + lengths**2
    home = np.repeat(np.arange(64), 32)
    plan = min_move(costs, 64, home=home, sizes=lengths)
    assert plan.loads(costs).max() <= 1.02 * lower_bound(costs, 64) * (1 + 1e-9)
    assert moved_share(lengths, home, plan.assignment) <= 0.10
    tighter = planner_for("min_move", tolerance=0.001)(costs, 64, home=home, sizes=lengths)
    assert tighter.loads(costs).max() < plan.loads(costs).max()


def test_min_move_finds_a_swap_beyond_the_lightest_ranks() -> None:
    """16 ranks with one item of 100 are the lightest and can take nothing; a rank of 33.5s can swap with 34, 34, 35."""
    costs = np.array([100.0] * 16 + [34, 34, 35] + [33.5] * 9)
    home = np.array([*range(16), 16, 16, 16, *[17] * 3, *[18] * 3, *[19] * 3])
    problem = check_problem(costs, 20, home=home)
    loads = problem.loads(move_few_bytes(problem, home, tolerance=0.02))
    assert loads.max() <= 1.02 * problem.bound()


def test_min_move_leaves_an_even_placement_alone() -> None:
    home = np.array([0, 0, 1, 1, 2, 2])
    plan = min_move([5, 1, 4, 2, 3, 3], 3, home=home)
    assert plan.assignment.tolist() == home.tolist()


def test_slots_hold_neighbours_of_about_equal_cost() -> None:
    costs = np.array([8.0, 7, 6, 5, 4, 3, 2, 1])
    plan = lpt(costs, 1, slots=4, min_per_slot=1)
    assert plan.slot.tolist() == [0, 1, 2, 2, 3, 3, 3, 3]  # loads 8, 7, 11, 10
    assert np.bincount(lpt(costs, 1, slots=4, capacity=2).slot).tolist() == [2, 2, 2, 2]


def test_placement_keeps_bins_whole_and_bytes_at_home_then_in_the_node() -> None:
    bins, home = np.array([0, 0, 1, 1, 2, 3]), np.array([2, 2, 0, 3, 1, 0])
    sizes = np.array([10.0, 10, 5, 6, 1, 7])
    ranks = place_bins(bins, home, sizes, 4)
    assert sorted(ranks.tolist()) == [0, 1, 2, 3]
    assert ranks.tolist() == [2, 3, 1, 0]
    # Bin 0 comes from rank 1 and 0 in parts; with nodes {0,1}, {2,3} it must not leave the first node.
    nodes = np.array([0, 0, 1, 1])
    placed = place_bins(np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([5.0, 5, 9]), 4, nodes=nodes)
    assert nodes[placed[0]] == 0 and placed[1] == 2


def test_greedy_placement_at_scale_is_a_permutation_and_near_the_optimum() -> None:
    rng = np.random.default_rng(3)
    num_ranks = 600  # above the size that is solved exactly
    bins, home = rng.integers(0, num_ranks, 4000), rng.integers(0, num_ranks, 4000)
    sizes = rng.random(4000)
    for nodes in (None, np.arange(num_ranks) // 8):
        ranks = place_bins(bins, home, sizes, num_ranks, nodes=nodes)
        assert sorted(ranks.tolist()) == list(range(num_ranks))
        assert sizes[ranks[bins] == home].sum() > 2 * sizes[bins == home].sum()


@pytest.mark.parametrize(
    "costs, kwargs, words",
    [
        ([1, -1], {}, "negative"),
        ([1, float("nan")], {}, "non-finite"),
        ([1, 1, 1], {"capacity": 1}, "max_batch_capacity"),
        ([1, 1], {"home": [0, 2]}, "home must name"),
        ([1, 1], {"sizes": [1]}, "sizes"),
        ([1], {"slots": 0}, "slots"),
        ([1], {"min_per_slot": 2, "capacity": 1}, "capacity"),
        ([1], {"carried": [1.0]}, "carried"),
    ],
)
def test_bad_input_is_refused(costs: list, kwargs: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lpt(costs, 2, **kwargs)


def test_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match=r"'fastest' does not exist.*lpt"):
        planner_for("fastest")


def test_imbalance_of_nothing_is_one() -> None:
    assert imbalance([0.0, 0.0]) == 1.0 and imbalance([3.0, 1.0]) == 1.5
