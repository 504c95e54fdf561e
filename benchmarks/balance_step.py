"""Step time of the example's model on real ranks: data balance off, on, on with prefetch, and in the encoder."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from pathlib import Path

import click
import numpy as np

from benchmarks.common import MIX_CSV, format_table, load_lengths, output_option, write_json
from examples.llava_ov.launch import launch

#: A launch imports torch and Megatron on every rank at once.
START_SECONDS = 120


def draw_samples(number: int, scale: int) -> tuple[list[list[int]], str]:
    """(text tokens, patches) of `number` samples of the mix at 1/`scale` of their size, and where they come from."""
    if MIX_CSV.exists():
        with MIX_CSV.open(newline="", encoding="utf-8") as file:
            rows = [(int(row["text_tokens"]), int(row["vit_patches"])) for row in csv.DictReader(file)]
        source = MIX_CSV.name
    else:
        data = load_lengths()
        rows = [(int(n) // 2, 2 * int(n)) for n in data.num_tokens]
        source = f"{data.source}, half of each length as image tokens"
    chosen = np.random.default_rng(0).integers(0, len(rows), number)
    return [[max(rows[i][0] // scale, 2), rows[i][1] // scale // 4 * 4] for i in chosen], source


@click.command()
@click.option("--ranks", type=int, default=2, show_default=True)
@click.option("--steps", type=int, default=8, show_default=True, help="Timed steps of every mode.")
@click.option("--microbatches", type=int, default=8, show_default=True, help="Micro batches of one sample per step.")
@click.option("--scale", type=int, default=4, show_default=True, help="Divide the mix's lengths by this.")
@output_option("balance_step")
def main(ranks: int, steps: int, microbatches: int, scale: int, output: Path) -> None:
    """Claim: with the balance on, ranks wait less for each other and a step is shorter, and with prefetch the work
    of balancing runs behind the training.

    Trains the example's tiny model on the same samples in every mode, in one launch. A step is forward and backward of
    all micro batches and one gradient all-reduce; `wait` is the share of it spent in that all-reduce.
    """
    samples, source = draw_samples(ranks * microbatches * (steps + 1), scale)
    click.echo(f"samples: {source}, at 1/{scale} of their length")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"samples": samples, "microbatches": microbatches, "steps": steps}))
        arguments = [str(task), str(result)]
        # A sample of this size takes well below a second on one core, and ranks may share cores.
        timeout_s = START_SECONDS + 4 * len(samples) * ranks / max(os.cpu_count() or 1, 1)
        launch("benchmarks.balance_step_rank", arguments, num_ranks=ranks, timeout_s=timeout_s)
        rows = json.loads(result.read_text())
    click.echo(format_table(rows))
    write_json(output, {"samples": source, "scale": scale, "ranks": ranks, "rows": rows})


if __name__ == "__main__":
    main()
