"""The recipe's three stages with the tiny model on two processes, each from the weights of the one before.

python -m examples.llava_ov.stages --output runs/stages
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from aiak_ext.run_summary import read_records
from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.launch import launch

NUM_RANKS = 2
STAGE_TIMEOUT_S = 600
# As in scripts/: alignment trains the adapter alone. The rates are those of a tiny model that starts from random
# weights, ten to a hundred times the recipe's.
COMMON = ("--model-name", "tiny", "--training-phase", "sft", "--min-lr", "1e-5", "--lr-warmup-fraction", "0.05")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage's name and what distinguishes it."""

    name: str
    flags: tuple[str, ...]


def demo_stages(num_steps: int) -> tuple[Stage, ...]:
    """Alignment, mid-training on online packs, instruction tuning on length-sorted pools; `num_steps` steps each."""
    steps = ("--train-iters", str(num_steps))
    batches_of_four = ("--micro-batch-size", "4")
    return (
        Stage(name="alignment", flags=("--trainable-modules", "adapter", "--lr", "3e-3", *batches_of_four, *steps)),
        Stage(
            name="mid_training",
            flags=("--lr", "2e-3", "--packing-buffer-size", "16", "--seq-length", "1100", *steps),
        ),
        Stage(name="instruct", flags=("--lr", "1e-3", "--length-sort-pool-size", "64", *batches_of_four, *steps)),
    )


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What the ranks of one stage wrote."""

    num_steps: int
    num_samples: int
    first_loss: float
    last_loss: float
    validation_loss: float
    """On the held-out split, after the stage."""


def collect(metrics: Path) -> StageResult:
    """Figures of a stage from its metrics directory."""
    first, *_, last = [record for record in read_records(metrics) if record.rank == 0]
    validation = json.loads((metrics / "validation.jsonl").read_text().splitlines()[-1])
    return StageResult(
        num_steps=last.step + 1,
        num_samples=validation["num_samples"],
        first_loss=first.scalars["loss"],
        last_loss=last.scalars["loss"],
        validation_loss=validation["loss"],
    )


def train_stage(stage: Stage, data: Path, directory: Path, previous: Path | None, num_steps: int) -> StageResult:
    """Train one stage into `directory`, from the weights of the stage in `previous`."""
    shutil.rmtree(directory, ignore_errors=True)  # metrics are appended
    start = () if previous is None else ("--pretrained-checkpoint", str(previous / "checkpoints"))
    arguments = [
        *("--data-path", str(data)),
        *("--save", str(directory / "checkpoints")),
        *("--metrics-dir", str(directory / "metrics")),
        *("--eval-interval", str(num_steps)),
        *("--run-name", stage.name),
        *COMMON,
        *start,
        *stage.flags,
    ]
    launch("examples.llava_ov.train", arguments, num_ranks=NUM_RANKS, timeout_s=STAGE_TIMEOUT_S)
    return collect(directory / "metrics")


def format_table(results: dict[str, StageResult]) -> str:
    """One line per stage."""
    lines = [f"{'stage':<14}{'steps':>7}{'samples':>9}{'first loss':>12}{'last loss':>11}{'validation':>12}"]
    for name, result in results.items():
        lines.append(
            f"{name:<14}{result.num_steps:>7}{result.num_samples:>9}{result.first_loss:>12.3f}"
            f"{result.last_loss:>11.3f}{result.validation_loss:>12.3f}"
        )
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/stages"), help="Receives all results.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="Data set.  [default: OUTPUT/data, built]")
@click.option("--num-steps", type=int, default=24, help="Steps of every stage.")
def main(output: Path, data: Path | None, num_steps: int) -> None:
    """Train the three stages, print a table of their losses and a few answers of the last one."""
    if data is None:
        data = output / "data"
        click.echo(f"== building the data set {data}")
        build(data, BuildConfig())
    results: dict[str, StageResult] = {}
    previous = None
    try:
        for stage in demo_stages(num_steps):
            click.echo(f"== {stage.name} on {NUM_RANKS} ranks")
            directory = output / stage.name
            results[stage.name] = train_stage(stage, data, directory, previous, num_steps)
            previous = directory
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    click.echo("\n" + format_table(results))
    click.echo("\n== answers after the last stage")
    command = [sys.executable, "-m", "examples.llava_ov.generate", "--load", str(previous / "checkpoints")]
    subprocess.run([*command, "--data-path", str(data)], check=True)


if __name__ == "__main__":
    main()
