"""Tensor-parallel ranks and pipeline stages of a replica plan alike: TP2, PP2 and VPP2 in four real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from data_balance import BalanceOptions, ExchangeError, balance_data_iterator
from tests.distributed.balance_model import mixed_batches
from tests.distributed.launch import run_ranks

WORLD = 4
STEPS, MICROBATCHES = 5, 2


def groups_of(members: list[list[int]], rank: int) -> dist.ProcessGroup:
    made = [dist.new_group(ranks) for ranks in members]
    return next(group for group, ranks in zip(made, members) if rank in ranks)


def trained(rank: int, replica: int, group: dist.ProcessGroup, is_first: bool, chunks: int = 1, **case: Any) -> list:
    """What this rank trains, step by step: keys per micro batch of every model chunk."""
    options = BalanceOptions(
        calculate_per_token_loss=True,
        threshold=0.0,
        timeout_s=15,
        balance_every_slot=True,
        is_first_stage=is_first,
        agree_across_stages=True,
        fit_steps=1,  # fitted to each stage's own times; all have to plan with global rank 0's
    )
    loader = mixed_batches(replica, STEPS * MICROBATCHES, seed=case.get("seed", 0))
    iterator = balance_data_iterator(
        loader if chunks == 1 else [loader] * chunks,
        num_microbatches=MICROBATCHES,
        sorting_algo_name="lpt",
        data_type="both",
        group=group,
        options=options,
    )
    iterators = iterator if chunks > 1 else [iterator]
    seen = []
    for _ in range(STEPS):
        for one in iterators:
            batches = [next(one) for _ in range(MICROBATCHES)]
            seen.append([batch["__key__"] for batch in batches])
            pixels = sum(len(batch.get("pixel_values", [])) for batch in batches)
            assert pixels == 0 or is_first, "a stage without the encoder skips pixels"
    iterators[0].close()
    return seen


def check(rank: int, members: list[list[int]], stage: int, chunks: int = 1) -> None:
    """`members` are the data-parallel groups; position in a group is the replica."""
    group = groups_of(members, rank)
    replica = dist.get_rank(group)
    seen = trained(rank, replica, group, is_first=stage == 0, chunks=chunks)
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, (replica, seen))
    for other_replica, other in everyone:
        assert (other == seen) == (other_replica == replica), "ranks of one replica train the same samples, others not"
    if chunks == 2:
        assert seen[0::2] == seen[1::2]


def check_disagreement(rank: int) -> None:
    """The second stage reads other data: it is stopped, with what to look for."""
    group = groups_of([[0, 1], [2, 3]], rank)
    stage, replica = rank // 2, rank % 2
    if stage == 0:
        trained(rank, replica, group, is_first=True)
    else:
        with pytest.raises(ExchangeError, match="plan of the stage whose first rank is 2 differs from global rank 0's"):
            trained(rank, replica, group, is_first=False, seed=1)


def stages(rank: int, world: int) -> str:
    check(rank, [[0, 2], [1, 3]], stage=0)  # TP2 x DP2: both tensor-parallel ranks read and hold the first stage
    dist.barrier()
    check(rank, [[0, 1], [2, 3]], stage=rank // 2)  # PP2 x DP2
    dist.barrier()
    check(rank, [[0, 1], [2, 3]], stage=rank // 2, chunks=2)  # VPP2 on top
    dist.barrier()
    check_disagreement(rank)
    return "done"


@pytest.mark.timeout(180)
def test_stages_of_a_replica_plan_alike() -> None:
    assert run_ranks(stages, WORLD, timeout_s=120) == ["done"] * WORLD
