"""A late or killed rank is named within the timeout, and stages that plan differently are stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_balance import BalancedDataIterator, BalancedVisionEncoder, BalanceOptions, ExchangeError
from tests.distributed.balance_model import Vit, mixed_batches
from tests.distributed.launch import run_ranks

TIMEOUT_S = 3.0


def iterator_over(rank: int, **settings: Any) -> BalancedDataIterator:
    options = BalanceOptions(calculate_per_token_loss=True, threshold=0.0, timeout_s=TIMEOUT_S, **settings)
    return BalancedDataIterator(
        mixed_batches(rank, 8), num_microbatches=2, sorting_algo_name="lpt", options=options, prefetch=False
    )


def check_late_rank(rank: int) -> None:
    """Rank 2 comes after the timeout: the others name it."""
    iterator = iterator_over(rank)
    next(iterator), next(iterator)
    if rank == 2:
        time.sleep(2 * TIMEOUT_S)
        return
    started = time.monotonic()
    with pytest.raises(ExchangeError, match=r"data balance of step 1 failed after .* rank\(s\) \[2\]"):
        next(iterator)
    assert time.monotonic() - started < TIMEOUT_S + 10


def check_late_in_the_encoder(rank: int) -> None:
    encoder = BalancedVisionEncoder(Vit().double(), timeout_s=TIMEOUT_S)
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
        return
    with pytest.raises(ExchangeError, match=r"rank\(s\) \[1\]"):
        encoder(torch.zeros(4, 12, dtype=torch.float64), torch.tensor([[1, 2, 2]]))


def late_ranks(rank: int, world: int) -> str:
    check_late_rank(rank)
    dist.barrier()
    check_late_in_the_encoder(rank)
    return "done"


@pytest.mark.timeout(180)
def test_a_late_rank_is_named() -> None:
    assert run_ranks(late_ranks, 3, timeout_s=150) == ["done"] * 3


class Bomb:
    """Ends the process when it is packed for another rank: the plan is made, the exchange has begun."""

    def __reduce__(self) -> Any:
        os._exit(0)


def armed_batches(rank: int) -> Iterator[dict[str, Any]]:
    for number, batch in enumerate(mixed_batches(rank, 8)):
        bomb = rank == 2 and number >= 4
        batch["note"] = [Bomb() if bomb else "" for _ in batch["__key__"]]
        yield batch


def killed_rank(rank: int, world: int) -> None:
    options = BalanceOptions(calculate_per_token_loss=True, threshold=0.0, timeout_s=TIMEOUT_S)
    iterator = BalancedDataIterator(armed_batches(rank), num_microbatches=2, options=options, prefetch=True)
    for _ in range(6):
        next(iterator)


@pytest.mark.timeout(180)
def test_a_killed_rank_is_named_and_the_job_fails() -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(killed_rank, 3, timeout_s=150)
    report = str(failure.value)
    for survivor in (0, 1):
        assert f"rank {survivor}:" in report
    assert report.count("rank(s) [2] did not take part or have died") >= 2
    assert "ExchangeError" in report
