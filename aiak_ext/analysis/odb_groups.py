"""Steps of token-budget groups, formed and aligned round by round as the data workers do it."""

from __future__ import annotations

import numpy as np

from aiak_ext.analysis.samples import IntArray, SampleTable
from aiak_ext.analysis.schedule import FloatArray, Schedule
from aiak_ext.analysis.streams import Streams
from length_sort.rounds import Candidate, RankRounds, RoundRules, decide_round

Groups = list[list[int]]


def odb_schedule(
    table: SampleTable,
    streams: Streams,
    sample_costs: FloatArray,
    *,
    num_ranks: int,
    num_workers: int,
    num_slots: int,
    num_steps: int,
    rules: RoundRules,
) -> Schedule:
    """Steps as a run trains them whose workers group by `rules`; every micro batch is one group.

    Args:
        table: The samples.
        streams: What each worker reads.
        sample_costs: Cost of each sample [n], by which groups are matched across ranks.
        num_ranks, num_workers: Of the run.
        num_slots: Micro batches per step and rank.
        num_steps: Most steps; fewer where a stream ends before.
        rules: The levers' settings.
    """
    per_worker = -(-num_steps * num_slots // num_workers)
    by_worker = [
        _groups_of_slot(table, streams, sample_costs, num_ranks, slot, per_worker, rules) for slot in range(num_workers)
    ]
    batches = min(len(groups) for ranks in by_worker for groups in ranks)
    num_steps = min(num_steps, batches * num_workers // num_slots)
    if num_steps == 0:
        raise ValueError(
            f"the workers form {batches} groups and a step takes {num_slots} of a rank, so there is no step to "
            "simulate; give more samples"
        )
    samples: list[IntArray] = []
    places: list[IntArray] = []
    for rank in range(num_ranks):
        for batch in range(num_steps * num_slots):
            # The loader takes its workers in turn.
            group = by_worker[batch % num_workers][rank][batch // num_workers]
            samples.append(np.array(group, dtype=np.int64))
            places.append(np.tile([rank, batch // num_slots, batch % num_slots], (len(group), 1)))
    rank_of, step, slot_of = np.concatenate(places).T
    return Schedule(
        sample=np.concatenate(samples),
        rank=rank_of,
        step=step,
        slot=slot_of,
        vision_rank=rank_of,
        num_ranks=num_ranks,
        num_steps=num_steps,
        num_slots=num_slots,
        padded=rules.padded,
    )


def _groups_of_slot(
    table: SampleTable,
    streams: Streams,
    sample_costs: FloatArray,
    num_ranks: int,
    slot: int,
    num_groups: int,
    rules: RoundRules,
) -> list[Groups]:
    """At least `num_groups` groups of every rank, [num_ranks], from one worker slot; fewer at the streams' end."""
    ranks = [RankRounds(rules, rank=rank, world_size=num_ranks, slot=slot) for rank in range(num_ranks)]
    groups: list[Groups] = [[] for _ in ranks]
    while len(groups[0]) < num_groups:
        for rank in ranks:
            rows = streams.take(rank.rank, slot, rules.buffer_size - len(rank.buffer))
            rank.buffer += [
                Candidate(
                    length=int(table.num_tokens[row]),
                    patches=int(table.num_patches[row]),
                    cost=float(sample_costs[row]),
                    payload=int(row),
                )
                for row in rows
            ]
        target, _ = decide_round([rank.propose() for rank in ranks], rules)
        if target == 0 or min(len(rank.buffer) for rank in ranks) == 0:
            break  # a dry rank: what follows would be idle groups, which say nothing about the setting
        for rank, own in zip(ranks, groups):
            rank.settle(target)
            rank.begin_emission([])
            while rank.groups:
                group, _ = rank.next_group()
                own.append([candidate.payload for candidate in group])
    return groups
