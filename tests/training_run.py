"""The example's training loop on one rank within the test's own process."""

# ruff: noqa: E402 - the shim goes before megatron.core

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from examples.llava_ov import cpu_shim

cpu_shim.install()

from megatron.core import parallel_state
from megatron.core.rerun_state_machine import destroy_rerun_state_machine

from examples.llava_ov.arguments import parse_train_args
from examples.llava_ov.distributed_setup import initialize_megatron, start_process_group
from tests.demo_data import small_data_set

CPU = torch.device("cpu")


@contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's state for a world of one process; gone afterwards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        start_process_group(timeout_minutes=1)
        initialize_megatron(parse_train_args(["--data-path", "none", "--train-iters", "1"]))
        yield
    finally:
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def arguments(output: Path, *flags: str, data: Path | None = None) -> argparse.Namespace:
    """Two steps of one small sample without workers, on `data` or the small demo data set, and `flags`."""
    data = data or small_data_set()
    tokenizer = data / "tokenizer"
    return parse_train_args(
        [
            *("--data-path", str(data)),
            *("--tokenizer-path", str(tokenizer if tokenizer.is_dir() else small_data_set() / "tokenizer")),
            *("--metrics-dir", str(output / "metrics")),
            *("--num-workers", "0"),
            *("--train-iters", "2"),
            *("--max-pixels", "12544"),
            *flags,
        ]
    )
