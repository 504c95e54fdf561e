"""The exchange over NCCL: what arrives on the devices is what was sent, uneven and empty parts included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from data_balance.exchange import DTYPES, exchange

from .launch import run_ranks

WORLD = 2


def record(source: int, destination: int, index: int) -> dict:
    """A record of several dtypes, shapes and layouts, the same wherever it is made."""
    generator = torch.Generator().manual_seed(100 * source + 10 * destination + index)
    rows = torch.randint(0, 100, (index + 3, 4), generator=generator)
    tensors = {str(dtype): rows.to(dtype) for dtype in DTYPES if dtype.itemsize > 1}
    return {**tensors, "transposed": rows.t(), "none": rows[:0], "key": f"{source} to {destination}"}


def on_devices(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    counts = [[1, 3], [0, 2]]  # from rank, to rank
    outgoing = [
        [
            {
                name: value.cuda() if isinstance(value, torch.Tensor) else value
                for name, value in record(rank, to, index).items()
            }
            for index in range(counts[rank][to])
        ]
        for to in range(world_size)
    ]
    arrived = exchange(outgoing, group, expected=[counts[source][rank] for source in range(world_size)])
    for source, records in enumerate(arrived):
        assert len(records) == counts[source][rank]
        for index, got in enumerate(records):
            for name, value in record(source, rank, index).items():
                if isinstance(value, torch.Tensor):
                    assert got[name].is_cuda and torch.equal(got[name].cpu(), value), name
                else:
                    assert got[name] == value


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason=f"NCCL needs a CUDA device per rank: {WORLD}")
def test_records_arrive_bit_identical_over_nccl() -> None:
    run_ranks(on_devices, WORLD)
