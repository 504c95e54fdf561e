"""Groups of one rank and their alignment: exact small cases and invariants over random lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from length_sort.grouping import (
    POLICIES,
    TARGETS,
    align_groups,
    form_groups,
    group_target,
    target_group_size,
)

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "odb.json"

lengths_and_budget = st.tuples(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 400))


def test_target_group_size():
    assert [target_group_size(n, 1000) for n in (100, 333, 334, 999, 1000, 1001)] == [10, 3, 2, 1, 1, 1]


def test_worked_example_of_the_paper():
    lengths = [100, 200, 500, 800]
    assert form_groups(lengths, 1000) == [[0, 1], [2], [3]]
    # The group of 500 may hold two samples by its own length; the paper's lag closed it at one.
    assert form_groups(lengths, 1000, policy="tight") == [[0], [1, 2], [3]]
    assert form_groups(lengths, 1000, policy="packed") == [[0, 2], [1, 3]]


def test_ties_keep_their_order_and_input_order_does_not_matter_otherwise():
    assert form_groups([5, 5, 5, 5], 10, policy="tight") == [[0, 1], [2, 3]]
    assert form_groups([800, 100, 500, 200], 1000) == [[1, 3], [2], [0]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[2000, 10, 10], [10, 2000, 10], [10, 10, 2000], [2000, 2000]])
def test_sample_above_the_budget_is_alone(policy, lengths):
    for group in form_groups(lengths, 1000, policy=policy):
        assert len(group) == 1 or 2000 not in [lengths[i] for i in group]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_samples_no_groups(policy):
    assert form_groups([], 100, policy=policy) == []


@given(lengths_and_budget, st.sampled_from(POLICIES), st.data())
def test_groups_partition_the_samples_within_every_limit(case, policy, data):
    lengths, budget = case
    per_sample = st.lists(st.integers(0, 50), min_size=len(lengths), max_size=len(lengths))
    patches, costs = data.draw(per_sample), data.draw(per_sample)
    max_patches, max_cost = data.draw(st.none() | st.integers(1, 100)), data.draw(st.none() | st.integers(1, 100))
    groups = form_groups(
        lengths,
        budget,
        policy=policy,
        patches=patches,
        max_patches=max_patches,
        costs=costs,
        max_cost=max_cost,
    )
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    longest = [lengths[group[-1]] for group in groups]
    assert longest == sorted(longest)
    for group in groups:
        ascending = [lengths[i] for i in group]
        assert ascending == sorted(ascending)
        if len(group) == 1:
            continue
        padded = policy != "packed"
        assert (max(ascending) * len(group) if padded else sum(ascending)) <= budget
        assert max_patches is None or sum(patches[i] for i in group) <= max_patches
        group_costs = [costs[i] for i in group]
        cost = max(group_costs) * len(group) if padded else sum(group_costs)
        assert max_cost is None or cost <= max_cost


@given(lengths_and_budget)
def test_packed_wastes_less_than_half_of_all_groups_but_one(case):
    """Best fit never leaves two groups that would fit into one."""
    lengths, budget = case
    sums = sorted(sum(lengths[i] for i in g) for g in form_groups(lengths, budget, policy="packed"))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=12))
def test_target_within_bounds(ranks):
    counts, capacities, samples = zip(*ranks)
    targets = {name: group_target(counts, capacities, samples, statistic=name) for name in TARGETS}
    assert 1 <= targets["min"] <= targets["median"] <= targets["max"] <= max(1, *counts)
    active = [r for r in ranks if r[0] > 0]
    for bounds in zip(*((r[1], r[2]) for r in active)):
        assert all(targets["max"] <= max(bound, 1) for bound in bounds if bound > 0)


def test_target_takes_the_lower_median_of_active_ranks():
    counts = [9, 2, 4, 0, 7]
    assert [group_target(counts, [0] * 5, [99] * 5, statistic=s) for s in TARGETS] == [9, 4, 2]


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=6), max_size=12), st.integers(1, 40))
def test_alignment_loses_nothing_and_reaches_the_target_when_it_can(groups, target):
    aligned, overflow = align_groups(groups, target)
    flat = [x for group in groups for x in group]
    assert sorted(x for group in aligned + overflow for x in group) == sorted(flat)
    assert len(aligned) == min(target, len(flat))
    assert all(aligned) and all(overflow)


def test_alignment_does_not_change_its_input():
    groups = [[1, 2, 3]]
    assert align_groups(groups, 2) == ([[1, 2], [3]], [])
    assert groups == [[1, 2, 3]]


def test_alignment_keeps_the_heaviest_groups_by_a_weight_of_ones_own():
    groups = [[1, 1, 1], [9], [5, 5]]
    assert align_groups(groups, 2) == ([[1, 1, 1], [5, 5]], [[9]])
    assert align_groups(groups, 2, weight=sum) == ([[9], [5, 5]], [[1, 1, 1]])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(lengths=[3, 0], token_budget=9), r"lengths\[1\] is 0"),
        (dict(lengths=[3], token_budget=0), "token_budget is 0"),
        (dict(lengths=[3], token_budget=9, policy="greedy"), "policy 'greedy' is unknown"),
        (dict(lengths=[3], token_budget=9, max_patches=4), "max_patches is 4, but no patches"),
        (dict(lengths=[3], token_budget=9, max_cost=4.0, costs=[1.0, 2.0]), "2 values of cost for 1 lengths"),
    ],
)
def test_mistakes_are_refused_with_what_was_seen(arguments, match):
    with pytest.raises(ValueError, match=match):
        form_groups(**arguments)


@pytest.mark.skipif(not GOLDEN.exists(), reason="the shared golden cases are not beside this checkout")
def test_golden_cases():
    golden = json.loads(GOLDEN.read_text())
    for case in golden["form_groups"]:
        assert form_groups(case["lengths"], case["token_budget"]) == case["groups"]
    for case in golden["group_target"]:
        counts = (case["group_counts"], case["capacities"], case["sample_counts"])
        assert group_target(*counts) == case["target"]
    for case in golden["align_groups"]:
        assert align_groups(case["groups"], case["target"]) == (case["aligned"], case["overflow"])
