"""What training loses by each lever: final loss with it and without, over several seeds; and a longer loss curve."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed

from matplotlib import pyplot

from benchmarks.common import PROJECT_ROOT, format_table, output_option, write_json
from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.demo_levers import MICRO_BATCH_SIZE, demo_rows
from examples.llava_ov.launch import launch

NUM_RANKS = 2
#: A launch imports torch and Megatron on every rank at once.
START_SECONDS = 120
#: No sample of the demo data takes longer than this on one core.
SECONDS_PER_SAMPLE = 2.0


def compare(losses: Mapping[str, Sequence[float]], baseline: str = "none") -> list[dict[str, Any]]:
    """A row per lever: mean and standard deviation (n - 1) over seeds, and how far the mean is from the baseline's.

    Args:
        losses: Final loss of every seed, in the same order of seeds, by lever.
        baseline: Name of the runs without a lever.
    """
    without = np.array(losses[baseline])
    spread = float(without.std(ddof=1))
    rows = []
    for lever, values in losses.items():
        difference = float(np.mean(values) - without.mean())
        rows.append(
            {
                "lever": lever,
                "seeds": len(values),
                "mean": float(np.mean(values)),
                "std": float(np.std(values, ddof=1)),
                "difference": difference,
                "in stds of without": difference / spread,
            }
        )
    return rows


def plot_curve(losses: Sequence[float], path: Path, *, smooth: int = 10) -> None:
    """Draw the loss of every step and its running mean over `smooth` steps."""
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(losses, color="0.75", label="every step")
    mean = np.convolve(losses, np.ones(smooth) / smooth, mode="valid")
    axis.plot(np.arange(smooth - 1, len(losses)), mean, label=f"mean of {smooth} steps")
    axis.set_xlabel("step")
    axis.set_ylabel("loss per answer token")
    axis.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


@click.command(context_settings={"show_default": True})
@click.option("--num-samples", type=int, default=480, help="Samples that every run trains, over all ranks.")
@click.option("--seeds", type=click.IntRange(min=0), default=5, help="Of weights and data order; 0: only the curve.")
@click.option("--rows", multiple=True, help="Only these rows of the demo.  [default: all]")
@click.option("--curve-steps", type=int, default=200, help="Steps of the run whose losses are drawn; 0: none.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    default=PROJECT_ROOT / "runs" / "benchmarks" / "loss.png",
    show_default="runs/benchmarks/loss.png",
    help="PNG for the curve.",
)
@output_option("final_loss")
def main(num_samples: int, seeds: int, rows: tuple[str, ...], curve_steps: int, plot: Path, output: Path) -> None:
    """Claim: a lever changes which samples meet in a step and who computes them, and not what is learned.

    Trains the demo's rows with equally many samples on two ranks, once per seed of weights and data order. The final
    loss is that of the held-out split.
    """
    if seeds == 1:
        raise click.UsageError("One seed has no spread to compare a difference with. Give 0 or at least 2.")
    try:
        levers = [row.name for row in demo_rows(num_samples, NUM_RANKS, only=rows)]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if seeds and "none" not in levers:
        raise click.UsageError(f"Rows {levers} have nothing to compare with. Add the row none.")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "losses.json"
        click.echo("== building the demo data")
        build(Path(folder) / "data", BuildConfig())
        arguments = ["--data-path", str(Path(folder) / "data"), "--output", folder, "--result", str(result)]
        arguments += ["--num-samples", str(num_samples), "--seeds", str(seeds), "--curve-steps", str(curve_steps)]
        for name in levers:
            arguments += ["--only", name]
        total = num_samples * len(levers) * seeds + curve_steps * NUM_RANKS * MICRO_BATCH_SIZE
        timeout_s = START_SECONDS + SECONDS_PER_SAMPLE * total * NUM_RANKS / (os.cpu_count() or 1)
        launch("benchmarks.final_loss_rank", arguments, num_ranks=NUM_RANKS, timeout_s=timeout_s)
        losses = json.loads(result.read_text())
    comparison = compare(losses["final"]) if seeds else []
    if comparison:
        click.echo(f"final loss on the held-out split after {num_samples} samples")
        click.echo(format_table(comparison))
    if curve_steps:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_curve(losses["curve"], plot)
        tenth = max(len(losses["curve"]) // 10, 1)
        first, last = np.mean(losses["curve"][:tenth]), np.mean(losses["curve"][-tenth:])
        click.echo(
            f"{len(losses['curve'])} steps: mean loss {first:.3f} over the first {tenth}, {last:.3f} over the last"
        )
        click.echo(f"written: {plot}")
    write_json(output, {"num_samples": num_samples, "ranks": NUM_RANKS, "rows": comparison, **losses})


if __name__ == "__main__":
    main()
