"""How long a pool or round boundary keeps the trainer waiting: read-ahead against collecting, then emitting."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.gc_dataset import GC_DEFAULT_EVERY_N_ITER, GcDataset
from tqdm import tqdm

from benchmarks.common import (
    SyntheticSample,
    SyntheticStream,
    active_worker,
    deal_streams,
    format_table,
    load_lengths,
    output_option,
    single_worker,
    write_json,
)
from length_sort import LengthPoolSortDataset, ODBGroupDataset
from length_sort.pool_order import order_pool, pool_seed

# The clock counts this thread's processor time, so that other programs on the machine do not show as stalls.
clock = time.thread_time

TOKEN_BUDGET = 8192


class CollectThenEmit(BaseWrapperDataset[SyntheticSample, SyntheticSample]):
    """The plain algorithm: reads a whole pool, then emits it, in the same order as LengthPoolSortDataset."""

    def __init__(self, dataset: SavableDataset[SyntheticSample], *, pool_size: int, worker_config: WorkerConfig):
        super().__init__(dataset, worker_config=worker_config)
        self.pool_size = pool_size

    def reset_state_own(self) -> None:
        pass

    def __iter__(self) -> Iterator[SyntheticSample]:
        samples = iter(self.dataset)
        num_read = 0
        while pool := list(islice(samples, self.pool_size)):
            num_read += len(pool)
            seed = pool_seed(42, num_read - 1, 0)
            for index in order_pool([sample.total_len for sample in pool], seed=seed):
                yield pool[index]

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, object]:
        return {"type": type(self).__qualname__, "dataset": self.dataset.config(), "pool_size": self.pool_size}


def spin(seconds: float) -> None:
    """Compute for that long, as an encode does."""
    end = clock() + seconds
    while clock() < end:
        pass


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python from collecting by itself; collections that a dataset asks for still run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def emission_gaps(dataset: SavableDataset, num_samples: int) -> tuple[float, np.ndarray]:
    """Return seconds to the first sample, and the gaps between the first `num_samples` samples in seconds."""
    with collector_off(), active_worker(dataset.worker_config):
        times = [clock()]
        for _ in islice(dataset, num_samples):
            times.append(clock())
    gaps = np.diff(times)
    return float(gaps[0]), gaps[1:]


def measure(
    num_tokens: list[int], *, pool_size: int, encode_s: float, read_ahead: bool, collect_every: int
) -> dict[str, float]:
    """Return the stall of one setting, see `stall`; the last pool, with nothing left to encode beside it, is left out.

    Args:
        num_tokens: Length of every sample of the stream; at least two pools.
        pool_size: Samples per pool.
        encode_s: Processor time of an encode, in seconds.
        read_ahead: LengthPoolSortDataset, or the plain algorithm.
        collect_every: Emitted samples per garbage collection, as Energon's loader does it; 0 for none.
    """
    config = single_worker()
    stream = SyntheticStream(num_tokens, encode=lambda: spin(encode_s), worker_config=config)
    wrapper = LengthPoolSortDataset if read_ahead else CollectThenEmit
    dataset: SavableDataset = wrapper(stream, pool_size=pool_size, worker_config=config)
    return stall(dataset, len(num_tokens) - pool_size, collect_every)


def measure_groups(num_tokens: list[int], *, buffer_size: int, encode_s: float, collect_every: int) -> dict[str, float]:
    """Return the stall of ODBGroupDataset, between groups; arguments as of `measure`. The last round is left out."""
    config = single_worker()

    def groups(encode: Callable[[], None]) -> ODBGroupDataset:
        stream = SyntheticStream(num_tokens, encode=encode, worker_config=config)
        return ODBGroupDataset(stream, token_budget=TOKEN_BUDGET, buffer_size=buffer_size, worker_config=config)

    with active_worker(config):
        rounds = [group.info.round for group in groups(lambda: None)]
    num_groups = sum(index < rounds[-1] for index in rounds)
    return stall(groups(lambda: spin(encode_s)), num_groups, collect_every)


def stall(dataset: SavableDataset, num_emitted: int, collect_every: int) -> dict[str, float]:
    """Return the gaps between the first `num_emitted` elements of a dataset.

    Returns:
        first_ms: Milliseconds to the first element.
        median_ms, largest_ms: Gap between two of them.
        largest_over_median: Their ratio.
    """
    if collect_every:
        dataset = GcDataset(dataset, worker_config=dataset.worker_config, every_n_iter=collect_every)
    first, gaps = emission_gaps(dataset, num_emitted)
    return {
        "first_ms": first * 1e3,
        "median_ms": float(np.median(gaps)) * 1e3,
        "largest_ms": float(gaps.max()) * 1e3,
        "largest_over_median": float(gaps.max() / np.median(gaps)),
    }


def measure_algorithms(
    num_tokens: list[int], *, pool_size: int, encode_s: float, collect_every: int
) -> dict[str, dict[str, float]]:
    """Return the stall of every algorithm, by its name in the table."""
    settings = {"encode_s": encode_s, "collect_every": collect_every}
    return {
        "collect, then emit": measure(num_tokens, pool_size=pool_size, read_ahead=False, **settings),
        "read-ahead": measure(num_tokens, pool_size=pool_size, read_ahead=True, **settings),
        "ODB groups": measure_groups(num_tokens, buffer_size=pool_size, **settings),
    }


@click.command()
@click.option("--pool-size", type=int, default=1000, show_default=True)
@click.option("--num-pools", type=click.IntRange(min=2), default=3, show_default=True)
@click.option("--encode-ms", type=float, default=1.0, show_default=True, help="Processor time of an encode.")
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True)
@output_option("pool_stall")
def main(pool_size: int, num_pools: int, encode_ms: float, repeats: int, output: Path) -> None:
    """Claim: with read-ahead the largest gap between two emitted samples stays within 3 x the median, where
    collecting a pool before emitting it stops for a pool's worth of encodes. So does the largest gap between two
    groups of online dynamic batching, whose median is the encodes of a group.

    Runs all over the same stream with the garbage collector off, with Energon's default of a collection every
    10 batches, and with aiak_ext's of one per pool. Times are processor time of the one thread; of the repeats,
    the one with the median largest gap (of two, the larger) is shown.
    """
    data = load_lengths()
    click.echo(data.describe())
    num_tokens = deal_streams(data.num_tokens, 1, pool_size * num_pools)[0].tolist()
    rows: list[dict[str, Any]] = []
    for every in tqdm((0, GC_DEFAULT_EVERY_N_ITER, pool_size), desc="collector", leave=False):
        measured = [
            measure_algorithms(num_tokens, pool_size=pool_size, encode_s=encode_ms / 1e3, collect_every=every)
            for _ in range(repeats)
        ]
        for algorithm in measured[0]:
            results = sorted((result[algorithm] for result in measured), key=lambda result: result["largest_ms"])
            collector = f"every {every} batches" if every else "off"
            rows.append({"algorithm": algorithm, "collector": collector, **results[repeats // 2]})
    click.echo(format_table(rows))
    write_json(output, {"pool_size": pool_size, "encode_ms": encode_ms, "rows": rows})


if __name__ == "__main__":
    main()
