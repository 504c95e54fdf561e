# ruff: noqa: E402 - the CPU shim has to be installed before Megatron core is imported
"""One rank of `benchmarks.balance_step`: trains the tiny model in every mode and writes the rows (rank 0)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from examples.llava_ov import cpu_shim

cpu_shim.install()

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from data_balance import BalancedDataIterator, BalancedVisionEncoder, BalanceOptions
from examples.llava_ov.batch_cost import BatchCost
from examples.llava_ov.config import get_model_config
from examples.llava_ov.distributed_setup import start_process_group
from examples.llava_ov.forward_step import run_model
from examples.llava_ov.micro_batch import MicroBatch
from examples.llava_ov.model import LlavaOnevision, build_model
from examples.llava_ov.samples import LlavaBatch

PATCH_DIM = 3 * 14 * 14


def make_batch(text_tokens: int, patches: int, image_token: int, seed: int) -> LlavaBatch:
    """One sample with random content and at most one image, of two patches in height."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.full((patches // 4,), image_token)
    text = torch.randint(1, 2000, (text_tokens,), generator=generator)
    tokens = torch.cat([image, text])[None]
    labels = torch.cat([torch.full_like(image, -100), text])[None]
    grid = torch.tensor([[1, 2, patches // 2]]) if patches else torch.zeros(0, 3, dtype=torch.int64)
    return LlavaBatch(
        __key__=[str(seed)],
        __restore_key__=("BatchDataset", seed, ("Synthetic", seed)),
        tokens=tokens,
        labels=labels,
        pixel_values=torch.randn(patches, PATCH_DIM, generator=generator),
        image_grid_thw=grid,
        lengths=torch.tensor([tokens.shape[1]]),
        num_images=torch.tensor([len(grid)]),
    )


def run_mode(
    model: LlavaOnevision, batches: Iterator[LlavaBatch], metrics: Callable[[], Any], task: dict[str, Any]
) -> dict[str, float]:
    """Mean figures of the timed steps; the first step warms up."""
    step_s, wait_s, records = [], [], []
    for step in range(task["steps"] + 1):
        dist.barrier()
        started = time.perf_counter()
        model.zero_grad()
        for batch in itertools.islice(batches, task["microbatches"]):
            run_model(model, MicroBatch.from_batch(batch, torch.device("cpu"))).sum().backward()
        computed = time.perf_counter()
        gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        dist.all_reduce(gradients)
        if step > 0:
            step_s.append(time.perf_counter() - started)
            wait_s.append(time.perf_counter() - computed)
            records.append(metrics())
    figures = torch.tensor([sum(step_s), sum(wait_s)], dtype=torch.float64)
    dist.all_reduce(figures)
    row = {
        "step s": float(figures[0]) / len(step_s) / dist.get_world_size(),
        "wait": float(figures[1] / figures[0]),
    }
    fields = ("imbalance_before", "imbalance_after", "moved_share", "plan_s", "exchange_s", "wait_s", "hidden_share")
    known = [dataclasses.asdict(record) for record in records if record is not None]
    return row | {name: sum(r[name] for r in known) / len(known) if known else None for name in fields}


@click.command()
@click.argument("task_file", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
def main(task_file: Path, output: Path) -> None:
    """Run the modes of `benchmarks.balance_step` on this rank."""
    task = json.loads(task_file.read_text())
    start_process_group(timeout_minutes=5)
    parallel_state.initialize_model_parallel()
    cpu_shim.install_after_import()
    model_parallel_cuda_manual_seed(1)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = get_model_config("tiny")
    model = build_model(config)
    cost_model = BatchCost(config).sample_cost_model
    group = parallel_state.get_data_parallel_group()

    def loader() -> Iterator[LlavaBatch]:
        for number, (text_tokens, patches) in enumerate(task["samples"][rank::num_ranks]):
            yield make_batch(text_tokens, patches, config.image_token_id, number * num_ranks + rank)

    def balanced(prefetch: bool) -> BalancedDataIterator:
        return BalancedDataIterator(
            loader(),
            num_microbatches=task["microbatches"],
            max_batch_capacity=1,
            sorting_algo_name="lpt",
            group=group,
            cost_model=cost_model,
            prefetch=prefetch,
            options=BalanceOptions(calculate_per_token_loss=True),
        )

    rows = [{"mode": "off"} | run_mode(model, loader(), lambda: None, task)]
    for mode, prefetch in (("step", False), ("step, prefetch", True)):
        iterator = balanced(prefetch)
        rows.append({"mode": mode} | run_mode(model, iterator, lambda it=iterator: it.last_metrics, task))
        iterator.close()
    encoder = BalancedVisionEncoder(
        model.encode_images, group, cost_model=cost_model.vision, num_microbatches=task["microbatches"]
    )
    model.set_encoder(encoder)
    rows.append({"mode": "encoder"} | run_mode(model, loader(), lambda: encoder.last_metrics, task))
    if rank == 0:
        output.write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
