"""What the levers say at the start of a run: one line each, on rank 0."""

from __future__ import annotations

from typing import Any

from megatron.energon.worker import WorkerConfig

from aiak_ext.config import LengthSortConfig
from length_sort import LengthPoolSortDataset


def announce(line: str, worker_config: WorkerConfig) -> None:
    """Prints on data-parallel rank 0 (in a data worker: on its first)."""
    if worker_config.rank == 0 and worker_config.rank_worker_id() == 0:
        print(f"[aiak-ext] {line}", flush=True)


def length_sort_line(config: LengthSortConfig) -> str:
    """Whether length sort is active, with what settings, and what the first batch waits for."""
    if not config.active:
        return "length sort: off (--length-sort-pool-size 0)"
    order = "long to short" if config.descending else "short to long"
    first = config.pool_size
    if config.warmup_pools:
        first = config.initial_pool_size or config.shuffle_block
    return (
        f"length sort: on, pools of {config.pool_size} samples per worker ({order}, blocks of {config.shuffle_block}, "
        f"seed {config.seed}), at most {gibibytes(config.max_pool_bytes)} of samples per worker held; "
        f"the first batch waits for {first} encoded samples"
    )


def first_pool_line(pool: LengthPoolSortDataset[Any], seconds: float) -> str:
    """What the first pool really took."""
    return (
        f"length sort: first pool of {pool.num_pooled} samples after {seconds:.1f} s, "
        f"{gibibytes(pool.num_pooled_bytes)} held in this worker"
    )


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"
