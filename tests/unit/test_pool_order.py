"""The order of a pool: the golden orders, exact small cases and properties."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from length_sort.pool_order import PoolRule, order_pool, pool_seed, pool_size_at, read_ahead_count

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "length_pool_sort.json"

lengths_lists = st.lists(st.integers(1, 5000), max_size=60)


def _emitted(lengths, pool_size, **rule):
    order = []
    for start in range(0, len(lengths), pool_size):
        pool = lengths[start : start + pool_size]
        seed = pool_seed(42, start + len(pool) - 1, 0)
        order += [start + index for index in order_pool(pool, seed=seed, **rule)]
    return order


@pytest.mark.skipif(not GOLDEN.exists(), reason="the shared golden orders are not beside this checkout")
def test_golden_orders():
    golden = json.loads(GOLDEN.read_text())
    for case in golden["cases"]:
        rule = {name: case[name] for name in ("ascending", "shuffle_block") if name in case}
        assert _emitted(golden["lengths"], case["pool_size"], **rule) == case["emitted_indices"], case["name"]


def test_exact_small_cases():
    # random.Random(42 + 3) turns [0, 1, 2, 3] into [3, 0, 1, 2]; a change of the generator would break resumes.
    assert order_pool([30, 10, 40, 20], seed=pool_seed(42, 3, 0)) == _by_hand([30, 10, 40, 20], 45)
    assert order_pool([5, 5, 5], seed=7) == _by_hand([5, 5, 5], 7), "equal lengths keep the order read"
    assert order_pool([], seed=1) == []


def _by_hand(lengths, seed):
    import random

    order = [index for _, index in sorted(zip(lengths, range(len(lengths))))]
    random.Random(seed).shuffle(order)
    return order


@given(lengths_lists, st.integers(0, 10**9), st.booleans(), st.integers(1, 9), st.data())
def test_every_sample_once_and_blocks_of_neighbours(lengths, seed, ascending, block, data):
    packed = data.draw(st.none() | st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    order = order_pool(lengths, seed=seed, ascending=ascending, shuffle_block=block, packed=packed)
    assert sorted(order) == list(range(len(lengths)))
    if packed is None:
        in_order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=not ascending)
        blocks = [tuple(in_order[start : start + block]) for start in range(0, len(lengths), block)]
        emitted = [tuple(order[start : start + block]) for start in range(0, len(lengths), block)]
        assert sorted(emitted) == sorted(blocks)
        if len(lengths) % block:
            assert emitted[-1] == blocks[-1], "a short last block stays last"


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=60, unique=True), st.integers(0, 10**6))
def test_ranks_agree_on_quantiles(lengths, seed):
    """Another rank with other samples, read in another order, emits the same quantile at every position."""
    other = [length * 2 + 1 for length in reversed(lengths)]
    ranks = [sorted(lengths).index(lengths[index]) for index in order_pool(lengths, seed=seed)]
    other_ranks = [sorted(other).index(other[index]) for index in order_pool(other, seed=seed)]
    assert ranks == other_ranks


def test_pools_and_slots_have_different_permutations():
    lengths = list(range(100))
    orders = {
        tuple(order_pool(lengths, seed=pool_seed(42, last, slot))) for last in (99, 199, 299) for slot in range(4)
    }
    assert len(orders) == 12


@given(st.lists(st.booleans(), max_size=80), st.integers(0, 10**6))
def test_packed_samples_are_spread_evenly(packed, seed):
    order = order_pool([1 + index for index in range(len(packed))], seed=seed, packed=packed)
    total = {kind: packed.count(kind) for kind in (False, True)}
    emitted = {False: 0, True: 0}
    for index in order:
        emitted[packed[index]] += 1
        if all(total.values()):
            shares = [emitted[kind] / total[kind] for kind in (False, True)]
            assert abs(shares[0] - shares[1]) <= 1 / min(total.values()) + 1e-9


def test_packed_merge_exact():
    # Unpacked 0..3, packed 4, 5: shares (1/4, 1/2) -> 0; (2/4, 1/2) tie -> 1; (3/4, 1/2) -> packed; ...
    order = order_pool([1, 1, 1, 1, 1, 1], seed=0, packed=[False] * 4 + [True] * 2)
    assert [index >= 4 for index in order] == [False, False, True, False, False, True]
    unpacked = [index for index in order if index < 4]
    packed = [index - 4 for index in order if index >= 4]
    assert unpacked == _by_hand([1] * 4, 0) and packed == _by_hand([1] * 2, 500_000_009)


def test_warmup_sizes():
    rule = PoolRule(pool_size=100, shuffle_block=4, warmup_pools=4, initial_pool_size=10)
    # 10 + 90*j//4 = 10, 32, 55, 77, rounded up to multiples of 4.
    assert [rule.size_of_pool(pool) for pool in range(6)] == [12, 32, 56, 80, 100, 100]
    assert PoolRule(pool_size=0).size_of_pool(3) == 0


@given(st.integers(1, 20), st.integers(1, 50), st.integers(0, 10), st.integers(0, 12), st.data())
def test_warmup_never_exceeds_the_pool_and_keeps_blocks(block, num_blocks, warmup, pool_index, data):
    initial = data.draw(st.integers(1, block * num_blocks))
    size = pool_size_at(
        pool_index,
        pool_size=block * num_blocks,
        warmup_pools=warmup,
        initial_pool_size=initial,
        shuffle_block=block,
    )
    assert 1 <= size <= block * num_blocks and size % block == 0


@given(st.integers(0, 500), st.integers(1, 500))
def test_read_ahead_finishes_in_time_and_is_smooth(left_to_read, left_to_emit):
    most = read_ahead_count(left_to_read, left_to_emit)
    for emission in range(left_to_emit):
        count = read_ahead_count(left_to_read, left_to_emit - emission)
        assert count <= most
        left_to_read -= count
    assert left_to_read == 0
    assert read_ahead_count(100, 100) == 1
