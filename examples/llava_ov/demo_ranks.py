"""The demo's ranks: they train all rows of the table, one after the other, because a launch takes ten seconds.

The demo starts it: `torchrun --nproc-per-node 2 -m examples.llava_ov.demo_ranks --data-path DIR --output DIR`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
import torch.distributed as dist

from examples.llava_ov import cpu_shim

cpu_shim.install()  # before Megatron core is imported

from examples.llava_ov.arguments import parse_train_args
from examples.llava_ov.demo_levers import FINAL_LOSS_FILE, MICRO_BATCH_SIZE, Row, demo_rows
from examples.llava_ov.distributed_setup import initialize_megatron, start_process_group
from examples.llava_ov.training import Trainer


def train_row(row: Row, num_samples: int, data_path: str, output: Path, device: torch.device) -> None:
    """Train one row from the same initial weights as every other; writes its metrics under `output/row.name`."""
    directory = output / row.name
    args = parse_train_args(
        [
            *("--data-path", data_path),
            *("--micro-batch-size", str(MICRO_BATCH_SIZE)),
            *("--sample-quota", str(num_samples)),
            *("--num-workers", "1"),
            *("--metrics-dir", str(directory)),
            *("--run-name", row.name),
            *row.flags,
        ]
    )
    with Trainer(args, device) as trainer:
        trainer.train()
        final_loss = trainer.evaluate()
    if dist.get_rank() == 0:
        (directory / FINAL_LOSS_FILE).write_text(json.dumps(final_loss))


@click.command()
@click.option("--data-path", required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--num-samples", type=int, required=True)
@click.option("--only", multiple=True, help="Names of the rows to run; default: all.")
def main(data_path: str, output: Path, num_samples: int, only: tuple[str, ...]) -> None:
    """Train the rows on the ranks that torchrun started."""
    setup = parse_train_args(["--data-path", data_path, "--sample-quota", str(num_samples)])
    device = start_process_group(setup.distributed_timeout_minutes)
    initialize_megatron(setup)
    for row in demo_rows(num_samples, dist.get_world_size(), only):
        train_row(row, num_samples, data_path, output, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
