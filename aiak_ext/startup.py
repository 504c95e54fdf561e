"""What the levers say at the start of a run: one line each, on rank 0."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.energon.worker import WorkerConfig

from aiak_ext.config import DataBalanceConfig, LengthSortConfig, ODBConfig
from length_sort import LengthPoolSortDataset


def announce(line: str, worker_config: WorkerConfig) -> None:
    """Prints on the first rank, in a data worker on its first one.

    Where every model-parallel rank loads, several are data-parallel rank 0, and one of them is enough to hear from.
    """
    is_first_process = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if is_first_process and worker_config.rank == 0 and worker_config.rank_worker_id() == 0:
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


def odb_line(config: ODBConfig) -> str:
    """Whether token-budget groups are on, and with what settings."""
    if not config.active:
        return "odb: off (--odb-token-budget 0)"
    sync = f"ranks agree over a store, {config.join_mode}" if config.sync == "store" else "ranks do not agree"
    return (
        f"odb: on, groups of at most {config.token_budget} tokens ({config.policy}, target {config.target}, order "
        f"{config.group_order}), {sync}; a round looks at {config.buffer_size} samples per worker, and the first batch "
        "waits for as many to be encoded"
    )


def balance_line(config: DataBalanceConfig) -> str:
    """Whether the data balance is on, and with what settings."""
    if not config.active:
        return "data balance: off (--use-data-balance)"
    what = "samples move before the forward" if config.scope == "step" else "images move inside the forward"
    fitted = f", cost model fitted in the first {config.fit_steps} steps" if config.fit_steps else ""
    return (
        f"data balance: on, scope {config.scope} ({what}), {config.sorting_algo}, moves when that saves more than "
        f"{config.threshold:.0%} of the heaviest rank's cost{fitted}"
    )


def first_pool_line(pool: LengthPoolSortDataset[Any], seconds: float) -> str:
    """What the first pool really took."""
    return (
        f"length sort: first pool of {pool.num_pooled} samples after {seconds:.1f} s, "
        f"{gibibytes(pool.num_pooled_bytes)} held in this worker"
    )


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"
