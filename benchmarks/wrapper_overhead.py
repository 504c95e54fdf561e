"""What the length wrappers add to every sample, beside Energon's ShuffleBufferDataset of the same size."""

from __future__ import annotations

import gc
import operator
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers import BatchDataset, ShuffleBufferDataset
from tqdm import tqdm

from benchmarks.common import (
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

BARE = "bare stream"
SHUFFLE = "ShuffleBufferDataset"
POOL = "LengthPoolSortDataset"
ODB = "ODBGroupDataset"
SHUFFLE_BATCHES = "ShuffleBufferDataset, BatchDataset(10)"
ODB_BATCHES = "ODBGroupDataset, BatchDataset(1)"
PEERS = {POOL: SHUFFLE, ODB: SHUFFLE, ODB_BATCHES: SHUFFLE_BATCHES}

TOKEN_BUDGET = 8192
SAMPLES_A_GROUP = 10  # what a group of that budget holds on average


def dataset_makers(num_tokens: list[int], pool_size: int) -> dict[str, Callable[[], SavableDataset]]:
    """Return what is compared, by name; every call makes a fresh dataset over the same stream."""
    config = single_worker()

    def stream() -> SyntheticStream:
        return SyntheticStream(num_tokens, worker_config=config)

    def shuffled() -> SavableDataset:
        return ShuffleBufferDataset(stream(), pool_size, worker_config=config)

    def grouped() -> SavableDataset:
        return ODBGroupDataset(stream(), token_budget=TOKEN_BUDGET, buffer_size=pool_size, worker_config=config)

    def batched(dataset: SavableDataset, batch_size: int) -> SavableDataset:
        return BatchDataset(dataset, batch_size, operator.itemgetter(0), worker_config=config)

    return {
        BARE: stream,
        SHUFFLE: shuffled,
        POOL: lambda: LengthPoolSortDataset(stream(), pool_size=pool_size, worker_config=config),
        ODB: grouped,
        SHUFFLE_BATCHES: lambda: batched(shuffled(), SAMPLES_A_GROUP),
        ODB_BATCHES: lambda: batched(grouped(), 1),
    }


def seconds_to_drain(make: Callable[[], SavableDataset]) -> float:
    """Return the processor time that iterating a fresh dataset to its end takes, garbage collector off."""
    dataset = make()
    gc.collect()
    gc.disable()
    try:
        with active_worker(dataset.worker_config):
            start = time.thread_time()
            deque(dataset, maxlen=0)
            return time.thread_time() - start
    finally:
        gc.enable()


def measure(num_tokens: list[int], pool_size: int, repeats: int) -> dict[str, list[float]]:
    """Return microseconds per sample of every dataset, one value a repeat; the datasets take turns."""
    makers = dataset_makers(num_tokens, pool_size)
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in tqdm(range(repeats), desc="repeats", leave=False):
        for name, make in makers.items():
            times[name].append(seconds_to_drain(make) / len(num_tokens) * 1e6)
    return times


def overheads(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the median microseconds that each wrapper adds to the bare stream of the same repeat."""
    return {
        name: median(wrapped - bare for wrapped, bare in zip(values, times[BARE]))
        for name, values in times.items()
        if name != BARE
    }


@click.command()
@click.option("--pool-size", type=int, default=1000, show_default=True)
@click.option("--num-samples", type=int, default=20_000, show_default=True)
@click.option("--repeats", type=int, default=9, show_default=True)
@output_option("wrapper_overhead")
def main(pool_size: int, num_samples: int, repeats: int, output: Path) -> None:
    """Claim: the pool wrapper adds no more to a sample than Energon's shuffle buffer of the same size.

    Drains a stream of content-less samples bare and through each wrapper, in turn within one run, and prints the
    median processor time a sample takes, what the wrapper adds to it, and the ratio to the shuffle buffer's addition.
    Online dynamic batching stands beside them: it also counts loss tokens and forms the batches, which a shuffle
    buffer leaves to the BatchDataset behind it; so both are measured with theirs as well.
    """
    data = load_lengths()
    click.echo(data.describe())
    num_tokens = deal_streams(data.num_tokens, 1, num_samples)[0].tolist()
    times = measure(num_tokens, pool_size, repeats)
    added = overheads(times)
    rows = [
        {"dataset": name, "us_per_sample": median(values), "us_added": added.get(name)}
        for name, values in times.items()
    ]
    click.echo(format_table(rows))
    ratios = {name: added[name] / added[peer] for name, peer in PEERS.items()}
    for name, ratio in ratios.items():
        click.echo(f"{name} adds {ratio:.2f} x what {PEERS[name]} adds (size {pool_size})")
    write_json(output, {"pool_size": pool_size, "num_samples": num_samples, "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
