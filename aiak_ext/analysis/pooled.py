"""Steps of fixed-size micro batches: in the order read, or in length-sorted pools."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aiak_ext.analysis.samples import IntArray, SampleTable
from aiak_ext.analysis.schedule import FloatArray, Schedule
from aiak_ext.analysis.streams import Streams
from length_sort.pool_order import PoolRule


def pooled_schedule(
    table: SampleTable,
    streams: Streams,
    *,
    num_ranks: int,
    num_workers: int,
    micro_batch_size: int,
    num_slots: int,
    num_steps: int,
    rule: PoolRule,
    sort_keys: FloatArray | IntArray,
) -> Schedule:
    """Steps as a run trains them whose workers order their pools by `rule`.

    A rank takes micro batches from its workers in turn. Of a pool that is longer than the steps asked for only the
    first emissions count: they are a random choice of its positions, the same one on all ranks.

    Args:
        table: The samples.
        streams: What each worker reads.
        num_ranks, num_workers: Of the run.
        micro_batch_size: Samples per micro batch.
        num_slots: Micro batches per step and rank.
        num_steps: Most steps; fewer where a stream ends before.
        rule: The pools' rule without worker slot; a pool size of 0 keeps the order read.
        sort_keys: What each sample [n] is sorted by: its length, or what a ``length_fn`` gives.
    """
    per_worker = -(-num_steps * num_slots // num_workers) * micro_batch_size
    emitted = [
        [_emitted(table, streams, rank, worker, per_worker, rule, sort_keys) for worker in range(num_workers)]
        for rank in range(num_ranks)
    ]
    batches = min(len(one) // micro_batch_size for workers in emitted for one in workers)
    order = np.stack(
        [
            # [batches, workers, micro batch]: the loader takes its workers in turn.
            np.stack([one[: batches * micro_batch_size].reshape(batches, -1) for one in workers], axis=1).reshape(-1)
            for workers in emitted
        ]
    )
    return Schedule.from_order(order[:, : num_steps * num_slots * micro_batch_size], num_slots, micro_batch_size)


def _emitted(
    table: SampleTable,
    streams: Streams,
    rank: int,
    worker: int,
    count: int,
    rule: PoolRule,
    sort_keys: FloatArray | IntArray,
) -> IntArray:
    """The first `count` samples that a worker emits; fewer where its stream ends."""
    if rule.pool_size == 0:
        return streams.take(rank, worker, count)
    pools: list[IntArray] = []
    num_read = pool_index = 0
    own_rule = replace(rule, worker_slot=worker)
    while num_read < count:
        pool = streams.take(rank, worker, own_rule.size_of_pool(pool_index))
        if not len(pool):
            break
        order = own_rule.order(sort_keys[pool].tolist(), table.packed[pool].tolist(), first_index=num_read)
        pools.append(pool[order])
        num_read += len(pool)
        pool_index += 1
    return np.concatenate(pools)[:count] if pools else np.zeros(0, dtype=np.int64)
