"""What agreeing on a round costs: time over a real store, and idle steps or dropped samples at the end of a stream."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import deal_streams, format_table, load_lengths, output_option, write_json
from length_sort.coordinator import StoreCoordinator
from length_sort.odb_dataset import default_cost
from length_sort.rounds import Candidate, RankRounds, RoundRules, decide_round, decide_totals
from length_sort.store_host import StoreHost

NUM_WARMUP_ROUNDS = 5

# Clients are forked, as a loader's workers are: 64 fresh interpreters would each import torch.
context = multiprocessing.get_context("fork")


def _client(rank: int, num_clients: int, port: int, num_rounds: int, num_groups: int, times: Any) -> None:
    coordinator = StoreCoordinator(
        "127.0.0.1", port, rank=rank, world_size=num_clients, name=f"{num_clients}", timeout_s=60
    )
    rules = RoundRules(token_budget=8192, target="min")
    channel = coordinator.open(0, 1)
    channel.start({})
    figures = [9, 8190, 5310] * num_groups
    spent = []
    for k in range(num_rounds + NUM_WARMUP_ROUNDS):
        start = time.perf_counter()
        channel.agree(f"{k}", [num_groups + rank, 1024, k], lambda reports: decide_round(reports, rules))
        channel.agree(f"{k} totals", figures, decide_totals)
        spent.append(time.perf_counter() - start)
    times.put(spent[NUM_WARMUP_ROUNDS:])
    channel.close()


def round_times(port: int, num_clients: int, *, num_rounds: int, num_groups: int) -> list[float]:
    """Seconds of every round of every client; a round is both agreements, of the target and of the totals."""
    times = context.Queue()
    clients = [
        context.Process(target=_client, args=(rank, num_clients, port, num_rounds, num_groups, times))
        for rank in range(num_clients)
    ]
    for client in clients:
        client.start()
    try:
        return [seconds for _ in clients for seconds in times.get(timeout=300)]
    finally:
        for client in clients:
            client.join(10)
            if client.is_alive():
                client.kill()


def drain(streams: NDArray[np.int64], rules: RoundRules) -> dict[str, Any]:
    """Emit finite streams to their end and count steps, idle groups and what was left."""
    num_ranks = len(streams)
    ranks = [RankRounds(rules, rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    waiting = [[Candidate(n, cost=default_cost(n)) for n in reversed(stream.tolist())] for stream in streams]
    num_steps = num_idle = num_rounds = 0
    while True:
        for rank, stream in zip(ranks, waiting):
            while stream and len(rank.buffer) < rules.buffer_size:
                rank.buffer.append(stream.pop())
        num_groups, _ = decide_round([rank.propose() for rank in ranks], rules)
        if num_groups == 0:
            break
        totals = decide_totals([rank.settle(num_groups) for rank in ranks])
        num_rounds, num_steps = num_rounds + 1, num_steps + num_groups
        for rank in ranks:
            rank.begin_emission(totals)
            while rank.groups:
                _, info = rank.next_group()
                num_idle += info.idle
    left = sum(len(rank.end_stream()) for rank in ranks) + sum(map(len, waiting))
    return {
        "mode": "join" if rules.join else "non-join",
        "rule": f"{rules.policy}, {rules.target}",
        "rounds": num_rounds,
        "steps": num_steps,
        "idle_share": num_idle / (num_steps * num_ranks),
        "left_share": left / streams.size,
    }


@click.command()
@click.option("--clients", multiple=True, default=(2, 8, 16, 64), show_default=True, help="Workers of one slot.")
@click.option("--rounds", default=30, show_default=True, help="Rounds measured.")
@click.option("--groups", default=80, show_default=True, help="Groups of a round.")
@click.option("--step-ms", default=200.0, show_default=True, help="Step to compare with.")
@click.option("--ranks", default=64, show_default=True, help="Simulated ranks of the comparison of join modes.")
@click.option("--samples", default=4000, show_default=True, help="Samples of each of those ranks.")
@output_option("odb_round")
def main(
    clients: tuple[int, ...], rounds: int, groups: int, step_ms: float, ranks: int, samples: int, output: Path
) -> None:
    """Claim: the agreement of 64 workers takes less than 20 ms, once per round of about 80 groups, which is below
    0.5% of a 200 ms step; and draining every rank (join) costs few idle groups where the ranks have equal shares.
    """
    host = StoreHost()
    rows: list[dict[str, Any]] = []
    try:
        for num_clients in clients:
            times = np.array(round_times(host.port, num_clients, num_rounds=rounds, num_groups=groups)) * 1e3
            rows.append(
                {
                    "clients": num_clients,
                    "round_ms": float(np.median(times)),
                    "p95_ms": float(np.percentile(times, 95)),
                    "per_step_ms": float(np.median(times) / groups),
                    "share_of_step": float(np.median(times) / groups / step_ms),
                }
            )
    finally:
        host.close()
    click.echo(format_table([{**row, "share_of_step": f"{row['share_of_step']:.4%}"} for row in rows]) + "\n")

    data = load_lengths()
    click.echo(data.describe())
    streams = deal_streams(data.num_tokens, ranks, samples)
    drained = []
    for policy, target in (("carry_over", "max"), ("packed", "min")):
        for join in (True, False):
            rules = RoundRules(token_budget=8192, policy=policy, target=target, join=join)
            drained.append(drain(streams, rules))
    click.echo(format_table(drained) + "\n")
    write_json(output, {"rows": rows, "drained": drained})


if __name__ == "__main__":
    main()
