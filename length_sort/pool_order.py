"""The order in which a pool of samples is emitted: pure functions over integers.

Source: the length-pool-sort skill (sort a pool by length, shuffle it with a seed that all ranks share).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

WORKER_SLOT_STRIDE = 1_000_003
PACKED_SEED_OFFSET = 500_000_009


def pool_seed(seed: int, last_index: int, worker_slot: int) -> int:
    """Seed of the pool whose last sample is number `last_index` (0-based) of its worker's stream.

    The rank never enters: equal seeds on all ranks are what keeps equal quantiles at equal steps. The worker
    slot does, so that the workers of a rank do not all emit their long samples at the same time.
    """
    return seed + last_index + WORKER_SLOT_STRIDE * worker_slot


def _sorted_and_block_shuffled(
    indices: Sequence[int], lengths: Sequence[float], *, seed: int, ascending: bool, shuffle_block: int
) -> list[int]:
    # Both halves are needed. Sorting puts the i-th quantile of every rank's pool at position i, so ranks that
    # draw from one distribution hold similar lengths there. The shuffle, the same permutation on every rank,
    # keeps that agreement and mixes short and long steps in time; without it a pool would train all its short
    # samples first, and with a seed per rank the agreement would be gone.
    in_order = sorted(indices, key=lengths.__getitem__, reverse=not ascending)
    if shuffle_block == 1:
        random.Random(seed).shuffle(in_order)  # the same permutation as for blocks of one, at half the time
        return in_order
    num_full = len(in_order) // shuffle_block
    blocks = [in_order[b * shuffle_block : (b + 1) * shuffle_block] for b in range(num_full)]
    random.Random(seed).shuffle(blocks)
    return [index for block in blocks for index in block] + in_order[num_full * shuffle_block :]


def _merged_by_share(unpacked: Sequence[int], packed: Sequence[int]) -> list[int]:
    """Both sequences in one, each spread evenly: always from the kind with the smaller share emitted so far."""
    merged: list[int] = []
    u = p = 0
    while u < len(unpacked) or p < len(packed):
        take_unpacked = p == len(packed) or (u < len(unpacked) and (u + 1) * len(packed) <= (p + 1) * len(unpacked))
        if take_unpacked:
            merged.append(unpacked[u])
            u += 1
        else:
            merged.append(packed[p])
            p += 1
    return merged


def order_pool(
    lengths: Sequence[float],
    *,
    seed: int,
    ascending: bool = True,
    shuffle_block: int = 1,
    packed: Sequence[bool] | None = None,
) -> list[int]:
    """Emission order of one pool, as indices into `lengths`.

    Args:
        lengths: Length of each sample, in the order read.
        seed: Seed of this pool, see :func:`pool_seed`.
        ascending: Sort short to long (the skill's rule) or long to short; equal lengths keep the order read.
        shuffle_block: The sorted pool is cut into consecutive blocks of this many samples, and the blocks are
            shuffled; a short last block stays last. 1 is the skill's rule. The micro batch size makes every micro
            batch hold neighbours in length.
        packed: For each sample whether it is packed. When given, the two kinds are ordered apart (they cost
            differently at equal length) and merged evenly.
    """
    if packed is None:
        return _sorted_and_block_shuffled(
            range(len(lengths)), lengths, seed=seed, ascending=ascending, shuffle_block=shuffle_block
        )
    kinds = [
        _sorted_and_block_shuffled(
            [index for index, is_packed in enumerate(packed) if is_packed == kind],
            lengths,
            seed=seed + PACKED_SEED_OFFSET * kind,
            ascending=ascending,
            shuffle_block=shuffle_block,
        )
        for kind in (False, True)
    ]
    return _merged_by_share(*kinds)


def pool_size_at(
    pool_index: int,
    *,
    pool_size: int,
    warmup_pools: int = 0,
    initial_pool_size: int = 1,
    shuffle_block: int = 1,
) -> int:
    """Number of samples in pool number `pool_index` (0-based): grows linearly over the warm-up pools.

    Rounded up to a multiple of the block, so that warm-up pools do not cut micro batches.
    """
    if pool_index >= warmup_pools:
        return pool_size
    size = initial_pool_size + (pool_size - initial_pool_size) * pool_index // warmup_pools
    return -(-size // shuffle_block) * shuffle_block


def read_ahead_count(left_to_read: int, left_to_emit: int) -> int:
    """Samples of the next pool to read before one of the current pool is emitted.

    ``ceil(left_to_read / left_to_emit)``: the next pool is complete just when the current one is used up, and no
    emission waits for more reads than its share (one, outside warm-up).
    """
    return -(-max(left_to_read, 0) // left_to_emit)


@dataclass(frozen=True, kw_only=True)
class PoolRule:
    """Everything that decides the pools of one worker's stream, apart from the samples."""

    pool_size: int
    """Samples per pool; 0 passes the stream through unchanged."""
    seed: int = 42
    ascending: bool = True
    shuffle_block: int = 1
    separate_packed: bool = False
    warmup_pools: int = 0
    initial_pool_size: int = 1
    worker_slot: int = 0

    def size_of_pool(self, pool_index: int) -> int:
        if self.pool_size == 0:
            return 0
        return pool_size_at(
            pool_index,
            pool_size=self.pool_size,
            warmup_pools=self.warmup_pools,
            initial_pool_size=self.initial_pool_size,
            shuffle_block=self.shuffle_block,
        )

    def order(self, lengths: Sequence[float], packed: Sequence[bool], *, first_index: int) -> list[int]:
        """Emission order of a pool whose first sample is number `first_index` of the worker's stream."""
        return order_pool(
            lengths,
            seed=pool_seed(self.seed, first_index + len(lengths) - 1, self.worker_slot),
            ascending=self.ascending,
            shuffle_block=self.shuffle_block,
            packed=packed if self.separate_packed else None,
        )
