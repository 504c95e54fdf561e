"""The round protocol with many simulated ranks in one process: liveness, coverage, fairness, order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from length_sort.grouping import POLICIES, TARGETS
from length_sort.odb_group import UNSYNCHRONIZED, GroupInfo
from length_sort.odb_order import GROUP_ORDERS, emission_order
from length_sort.rounds import Candidate, RankRounds, RoundRules, decide_round, decide_totals


@dataclass
class Run:
    """What a simulated run emitted: groups[rank] lists (payloads, info) in order."""

    groups: list[list[tuple[list, GroupInfo]]]
    left_over: list[list]
    num_rounds: int = 0
    entered: dict = field(default_factory=dict)
    emitted: dict = field(default_factory=dict)


def simulate(lengths_per_rank: list[list[int]], rules: RoundRules) -> Run:
    """Run all ranks to the end of their streams; a payload is (rank, index)."""
    world_size = len(lengths_per_rank)
    ranks = [RankRounds(rules, rank=rank, world_size=world_size) for rank in range(world_size)]
    streams = [
        iter([Candidate(n, loss_tokens=n // 2, cost=n * n, payload=(rank, i)) for i, n in enumerate(lengths)])
        for rank, lengths in enumerate(lengths_per_rank)
    ]
    run = Run([[] for _ in ranks], [[] for _ in ranks])
    bound = 10 + sum(len(lengths) for lengths in lengths_per_rank)
    while True:
        run.num_rounds += 1
        assert run.num_rounds <= bound, "the protocol does not come to an end"
        for rank, stream in zip(ranks, streams):
            while len(rank.buffer) < rules.buffer_size and (sample := next(stream, None)):
                rank.buffer.append(sample)
                run.entered[sample.payload] = run.num_rounds
        num_groups, _ = decide_round([rank.propose() for rank in ranks], rules)
        if num_groups == 0:
            for rank, left_over, stream in zip(ranks, run.left_over, streams):
                left_over += [c.payload for c in rank.end_stream()] + [c.payload for c in stream]
            return run
        totals = decide_totals([rank.settle(num_groups) for rank in ranks])
        for rank, groups in zip(ranks, run.groups):
            rank.begin_emission(totals)
            while rank.groups:
                group, info = rank.next_group()
                groups.append(([c.payload for c in group], info))
                run.emitted |= {c.payload: run.num_rounds for c in group}


rules_strategy = st.builds(
    RoundRules,
    token_budget=st.integers(1, 500),
    buffer_size=st.integers(1, 12),
    policy=st.sampled_from(POLICIES),
    target=st.sampled_from(TARGETS),
    group_order=st.sampled_from(GROUP_ORDERS),
    join=st.booleans(),
    max_deferrals=st.none() | st.integers(0, 4),
)
streams_strategy = st.integers(1, 64).flatmap(
    lambda num_ranks: st.lists(
        st.lists(st.integers(1, 200), max_size=30 if num_ranks < 9 else 6), min_size=num_ranks, max_size=num_ranks
    )
)


@given(streams_strategy, rules_strategy)
@settings(max_examples=250, deadline=None)
def test_protocol_invariants(streams, rules):
    run = simulate(streams, rules)
    everything = {(rank, i) for rank, lengths in enumerate(streams) for i in range(len(lengths))}
    emitted = [payload for groups in run.groups for payloads, _ in groups for payload in payloads]
    left_over = [payload for payloads in run.left_over for payload in payloads]
    # Every rank yields the same number of groups, no sample twice, none lost without being counted.
    assert len({len(groups) for groups in run.groups}) == 1
    assert sorted(emitted + left_over) == sorted(everything)
    if rules.join:
        assert not left_over
    elif any(not lengths for lengths in streams):
        assert not emitted
    # A round emits at least one sample of every rank that is not dry, so rounds are bounded by the longest stream.
    assert run.num_rounds <= 1 + max(len(lengths) for lengths in streams)
    for payloads, info in (item for groups in run.groups for item in groups):
        assert info.idle == (not payloads) == (info.local_samples == 0)
    # Global figures are the sums over the ranks at the same position.
    for step in zip(*run.groups):
        infos = [info for _, info in step]
        assert len({(info.round, info.position, info.global_samples, info.global_tokens) for info in infos}) == 1
        assert infos[0].global_samples == sum(info.local_samples for info in infos) > 0
        assert infos[0].global_tokens == sum(info.local_tokens for info in infos)
        assert infos[0].global_loss_tokens == sum(info.local_loss_tokens for info in infos)


@given(
    st.integers(1, 16),
    st.integers(1, 20),
    st.integers(4, 12),
    st.sampled_from(POLICIES),
    st.sampled_from(TARGETS),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_even_ranks_need_few_rounds(num_ranks, per_rank, buffer_size, policy, target, rng):
    """ceil(N/W) + O(buffer) rounds for ranks that share the data evenly (N samples, W ranks)."""
    streams = [[rng.randint(1, 300) for _ in range(per_rank + rng.randint(0, 1))] for _ in range(num_ranks)]
    rules = RoundRules(token_budget=300, buffer_size=buffer_size, policy=policy, target=target)
    num_samples = sum(len(lengths) for lengths in streams)
    assert simulate(streams, rules).num_rounds <= -(-num_samples // num_ranks) + buffer_size + 1


@given(streams_strategy, rules_strategy.filter(lambda rules: rules.max_deferrals is not None))
@settings(max_examples=100, deadline=None)
def test_no_sample_waits_for_ever(streams, rules):
    run = simulate(streams, rules)
    for payload, left in run.emitted.items():
        assert left - run.entered[payload] <= rules.max_deferrals + rules.buffer_size


def test_long_samples_starve_only_under_the_papers_rule():
    """One group a round, kept by its number of samples: the long sample loses unless deferrals count."""
    streams = [[1] * 40, [90, *[1] * 39]]
    rules = dict(token_budget=100, buffer_size=4, target="min")
    waits = {
        limit: simulate(streams, RoundRules(**rules, max_deferrals=limit)).emitted[1, 0] - 1 for limit in (2, None)
    }
    assert waits == {2: 2, None: 10}


def test_join_drains_and_non_join_stops_at_the_first_dry_rank():
    streams = [[10] * 8, [10] * 2]
    joined = simulate(streams, RoundRules(token_budget=20, buffer_size=2))
    assert [len(groups) for groups in joined.groups] == [8, 8]
    assert [info.idle for _, info in joined.groups[1]] == [False, False, *[True] * 6]
    stopped = simulate(streams, RoundRules(token_budget=20, buffer_size=2, join=False))
    assert [len(groups) for groups in stopped.groups] == [2, 2]
    assert [len(left_over) for left_over in stopped.left_over] == [6, 0]


def test_unsynchronised_groups_carry_no_global_figures():
    rank = RankRounds(RoundRules(token_budget=20), rank=0, world_size=2)
    rank.buffer = [Candidate(10)]
    rank.settle(rank.propose()[0])
    rank.begin_emission([])
    _, info = rank.next_group()
    assert (info.local_tokens, info.global_tokens, info.synchronized) == (10, UNSYNCHRONIZED, False)


COSTS = [7.0, 1.0, 5.0, 3.0, 2.0, 9.0, 4.0, 8.0, 6.0, 0.0]


def order(mode: str, *, rank: int = 0, round_index: int = 0, epoch: int = 0, slot: int = 0, costs=COSTS) -> list[int]:
    place = dict(round_index=round_index, epoch=epoch, slot=slot, rank=rank, world_size=16)
    return emission_order(costs, mode, seed=42, **place)


def reversing_ranks(mode: str, **place: int) -> list[int]:
    return [rank for rank in range(16) if order(mode, rank=rank, **place) != order("aligned", **place)]


def test_aligned_order_is_shared_by_ranks_and_differs_between_rounds_and_slots():
    assert order("aligned", rank=0) == order("aligned", rank=5)
    assert order("aligned") != order("aligned", round_index=1)
    assert order("aligned") != order("aligned", slot=1)


def test_aligned_order_matches_the_cost_rank_of_groups_that_differ_between_ranks():
    costs = [[3.0, 1.0, 2.0], [20.0, 30.0, 10.0]]
    emitted = [[c[i] for i in order("aligned", rank=rank, costs=c)] for rank, c in enumerate(costs)]
    assert [10 * cost for cost in emitted[0]] == emitted[1]


def test_reversed_ranks_mirror_the_others_so_that_every_step_weighs_the_same():
    mode = "rank_window_balanced"
    reverse = reversing_ranks(mode)[0]
    forward = next(rank for rank in range(16) if rank not in reversing_ranks(mode))
    pairs = zip(order(mode, rank=forward), order(mode, rank=reverse))
    assert [COSTS[a] + COSTS[b] for a, b in pairs] == [9.0] * len(COSTS)


def test_which_ranks_reverse():
    assert len(reversing_ranks("rank_window_balanced")) == 8
    assert reversing_ranks("rank_window_balanced") != reversing_ranks("rank_window_balanced", round_index=1)
    for mode in ("rank_window_random", "rank_epoch_random"):
        assert 0 < len(reversing_ranks(mode)) < 16
    assert reversing_ranks("rank_window_random") != reversing_ranks("rank_window_random", round_index=3)
    assert reversing_ranks("rank_epoch_random") == reversing_ranks("rank_epoch_random", round_index=3)
    assert reversing_ranks("rank_epoch_random") != reversing_ranks("rank_epoch_random", epoch=1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(token_budget=0), "token_budget is 0"),
        (dict(buffer_size=0), "buffer_size is 0"),
        (dict(policy="best"), "policy 'best' is unknown"),
        (dict(target="mean"), "target 'mean' is unknown"),
        (dict(group_order="none"), "group_order 'none' is unknown"),
        (dict(max_deferrals=-1), "max_deferrals is -1"),
        (dict(max_cost=0.0), "max_cost is 0.0"),
    ],
)
def test_rules_refuse_what_cannot_work(change, match):
    with pytest.raises(ValueError, match=match):
        RoundRules(**{"token_budget": 100, **change})
