"""How much of the slowest rank's time is useful with length-sorted pools, over rank counts and pool sizes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of ordering the streams: pool 0 is the order read; a block of 1 is the per-sample shuffle."""

    num_ranks: int
    pool: int
    micro_batch: int
    block: int


def settings_for(num_ranks: int, pools: tuple[int, ...]) -> list[Setting]:
    """Return unsorted and sorted settings, at micro batch 1, and at 4 with per-sample and with block shuffle."""
    settings = []
    for micro_batch, blocks in ((1, (1,)), (4, (1, 4))):
        settings.append(Setting(num_ranks=num_ranks, pool=0, micro_batch=micro_batch, block=1))
        settings += [
            Setting(num_ranks=num_ranks, pool=pool, micro_batch=micro_batch, block=block)
            for pool in pools
            for block in blocks
        ]
    return settings


def order_streams(streams: NDArray[np.int64], pool: int, block: int) -> NDArray[np.int64]:
    """Order every rank's stream; int64 [num_ranks, stream_length]."""
    return np.stack([pooled_order(stream, pool_size=pool, shuffle_block=block) for stream in streams])


def measure(ordered: NDArray[np.int64], micro_batch: int) -> dict[str, float]:
    """Return efficiency and padding when every step is one micro batch per rank.

    A micro batch costs as much as its longest sample times its size, since it is padded.

    Args:
        ordered: Lengths in the order emitted, int64 [num_ranks, stream_length].
        micro_batch: Samples per micro batch; divides the stream length.

    Returns:
        efficiency: Mean rank's share of the slowest rank's time, over all steps.
        padding: Share of the padded tokens that are padding.
        useful: Share of the slowest rank's time that goes into real tokens; padding and waiting both lower it.
    """
    num_ranks, stream_length = ordered.shape
    batches = ordered.reshape(num_ranks, stream_length // micro_batch, micro_batch)
    longest = batches.max(axis=2)
    rank_costs = token_cost(longest) * micro_batch
    real_cost = token_cost(ordered).sum() / num_ranks
    return {
        "efficiency": step_efficiency(rank_costs),
        "padding": float(1 - ordered.sum() / (longest.sum() * micro_batch)),
        "useful": float(real_cost / rank_costs.max(axis=0).sum()),
    }


def pool_bound(streams: NDArray[np.int64], pool: int) -> float:
    """Return the most that any order within pools reaches: mean over max of the ranks' pool totals.

    Args:
        streams: Lengths in the order read, int64 [num_ranks, stream_length].
        pool: Samples per pool; divides the stream length.
    """
    num_ranks, stream_length = streams.shape
    totals = token_cost(streams).reshape(num_ranks, stream_length // pool, pool).sum(axis=2)
    return step_efficiency(totals)


def stream_length_for(num_ranks: int, pools: tuple[int, ...]) -> int:
    """Return samples per rank: whole pools and micro batches, more of them where there are few ranks."""
    return math.lcm(4, *pools) * max(1, min(16, 512 // num_ranks))


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(2, 8, 64, 1024), show_default=True)
@click.option("--pools", multiple=True, type=int, default=(100, 1000, 4000), show_default=True)
@output_option("step_efficiency")
def main(ranks: tuple[int, ...], pools: tuple[int, ...], output: Path) -> None:
    """Claim: pools that are sorted by length and shuffled alike on all ranks make the ranks' steps equally
    long, and shuffling blocks of the micro batch size also keeps padding away.

    Orders simulated ranks with the wrapper's own functions. Prints step efficiency (cost 6*2560*n + n*n of a
    sequence of n tokens), padding, the share of the slowest rank's time that goes into real tokens (useful),
    and what no order within the pools can pass (bound of useful).
    """
    data = load_lengths()
    click.echo(data.describe())
    rows = []
    settings = [setting for num_ranks in ranks for setting in settings_for(num_ranks, pools)]
    for setting in tqdm(settings, desc="settings", leave=False):
        streams = deal_streams(data.num_tokens, setting.num_ranks, stream_length_for(setting.num_ranks, pools))
        ordered = order_streams(streams, setting.pool, setting.block)
        rows.append(
            asdict(setting)
            | measure(ordered, setting.micro_batch)
            | {"bound": pool_bound(streams, setting.pool) if setting.pool else None}
        )
    click.echo(format_table(rows))
    write_json(output, {"lengths": data.describe(), "rows": rows})


if __name__ == "__main__":
    main()
