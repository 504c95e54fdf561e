# ruff: noqa: E402 - the CPU shim has to be installed before Megatron core is imported
"""One rank of `benchmarks.final_loss`: trains every row of the demo with every seed (rank 0 writes the losses)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import torch.distributed as dist

from examples.llava_ov import cpu_shim

cpu_shim.install()

from aiak_ext.run_summary import read_records
from examples.llava_ov.arguments import parse_train_args
from examples.llava_ov.demo_levers import FINAL_LOSS_FILE, MICRO_BATCH_SIZE, Row, demo_rows
from examples.llava_ov.demo_ranks import train_row
from examples.llava_ov.distributed_setup import initialize_megatron, start_process_group


@click.command()
@click.option("--data-path", required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--result", type=click.Path(path_type=Path), required=True)
@click.option("--num-samples", type=int, required=True)
@click.option("--seeds", type=int, required=True)
@click.option("--curve-steps", type=int, required=True)
@click.option("--only", multiple=True, help="Names of the rows to run.")
def main(
    data_path: str, output: Path, result: Path, num_samples: int, seeds: int, curve_steps: int, only: tuple[str, ...]
) -> None:
    """Run `benchmarks.final_loss` on this rank."""
    setup = parse_train_args(["--data-path", data_path, "--sample-quota", str(num_samples)])
    device = start_process_group(setup.distributed_timeout_minutes)
    initialize_megatron(setup)
    num_ranks = dist.get_world_size()
    rows = demo_rows(num_samples, num_ranks, only)
    for seed in range(seeds):
        for row in rows:
            flags = (*row.flags, "--seed", str(seed), "--data-seed", str(seed))
            seeded = dataclasses.replace(row, name=f"{row.name}/{seed}", flags=flags)
            train_row(seeded, num_samples, data_path, output, device)
    if curve_steps:
        train_row(Row(name="curve"), curve_steps * num_ranks * MICRO_BATCH_SIZE, data_path, output, device)
    if dist.get_rank() == 0:
        records = [record for record in read_records(output / "curve") if record.rank == 0] if curve_steps else []
        final = {
            row.name: [
                json.loads((output / row.name / str(seed) / FINAL_LOSS_FILE).read_text()) for seed in range(seeds)
            ]
            for row in rows
        }
        result.write_text(json.dumps({"final": final, "curve": [record.scalars["loss"] for record in records]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
