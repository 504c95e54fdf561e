"""What several data workers per rank do to the alignment that length-sorted pools give."""

from __future__ import annotations

import math
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import (
    deal_streams,
    format_table,
    load_lengths,
    output_option,
    pooled_order,
    step_efficiency,
    token_cost,
    write_json,
)


def rank_streams(worker_streams: NDArray[np.int64], pool_size: int, *, shared_seed: bool = False) -> NDArray[np.int64]:
    """Order every worker's stream in pools and take samples from a rank's workers in turn, as its loader does.

    Args:
        worker_streams: Lengths in the order read, int64 [num_ranks, num_workers, stream_length].
        pool_size: Samples per worker's pool; 0 for the order read.
        shared_seed: Leave the worker slot out of the seed, so that all workers shuffle alike.

    Returns:
        Lengths in the order a rank trains them, int64 [num_ranks, num_workers * stream_length].
    """
    num_ranks, num_workers, stream_length = worker_streams.shape
    emitted = np.empty((num_ranks, stream_length, num_workers), dtype=np.int64)
    for rank in range(num_ranks):
        for slot in range(num_workers):
            emitted[rank, :, slot] = pooled_order(
                worker_streams[rank, slot], pool_size=pool_size, worker_slot=0 if shared_seed else slot
            )
    return emitted.reshape(num_ranks, num_workers * stream_length)


def correlation(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Return the Pearson correlation of two sequences of lengths."""
    return float(np.corrcoef(first, second)[0, 1])


def measure(worker_streams: NDArray[np.int64], pool_size: int) -> dict[str, float]:
    """Return alignment between the first two ranks, step efficiency over all, and how neighbouring steps agree."""
    ranks = rank_streams(worker_streams, pool_size)
    alike = rank_streams(worker_streams, pool_size, shared_seed=True)
    return {
        "rank_correlation": correlation(ranks[0], ranks[1]),
        "efficiency": step_efficiency(token_cost(ranks)),
        "next_step": correlation(ranks[0, :-1], ranks[0, 1:]),
        "next_step_shared_seed": correlation(alike[0, :-1], alike[0, 1:]),
    }


@click.command()
@click.option("--workers", multiple=True, type=int, default=(1, 4, 16), show_default=True)
@click.option("--pool-size", type=int, default=1000, show_default=True)
@click.option("--pools-per-worker", type=int, default=8, show_default=True, help="Pools that every worker emits.")
@output_option("worker_dilution")
def main(workers: tuple[int, ...], pool_size: int, pools_per_worker: int, output: Path) -> None:
    """Claim: more data workers do not dilute the alignment of two ranks, as long as every worker keeps its pool.

    Simulates two ranks whose loaders take samples from their workers in turn: unsorted, with a pool of
    --pool-size in every worker, and with one pool's worth of samples divided among the workers. Prints the
    correlation of the two ranks' lengths at the same step, step efficiency, and the correlation of neighbouring
    steps of one rank, with the wrapper's seeds and with one seed for all workers.
    """
    data = load_lengths()
    click.echo(data.describe())
    rows = []
    for num_workers in workers:
        stream_length = pool_size * pools_per_worker
        streams = deal_streams(data.num_tokens, 2 * num_workers, stream_length)
        streams = streams.reshape(2, num_workers, stream_length)
        for pool_per_worker in dict.fromkeys((0, math.ceil(pool_size / num_workers), pool_size)):
            row = {"workers": num_workers, "pool_per_worker": pool_per_worker}
            rows.append(row | measure(streams, pool_per_worker))
    click.echo(format_table(rows))
    write_json(output, {"lengths": data.describe(), "rows": rows})


if __name__ == "__main__":
    main()
