"""What each lever gains: trains the example on real pictures with and without it, and compares.

python -m examples.llava_ov.demo --output runs/demo
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from aiak_ext.run_summary import RunSummary, read_records, summarize
from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.demo_lengths import format_report
from examples.llava_ov.demo_levers import FINAL_LOSS_FILE, demo_rows
from examples.llava_ov.demo_plot import plot_runs
from examples.llava_ov.launch import launch

NUM_RANKS = 2
LAUNCH_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class RunResult(RunSummary):
    """A row of the table."""

    final_loss: float
    """On the held-out split, the same for every row."""


def collect(directory: Path) -> RunResult:
    """The figures of one row from what its ranks wrote."""
    final_loss = json.loads((directory / FINAL_LOSS_FILE).read_text())
    return RunResult(**asdict(summarize(read_records(directory))), final_loss=final_loss)


def format_table(results: dict[str, RunResult]) -> str:
    """One line per row; the speed also against the first row."""
    lines = [
        f"{'run':<26}{'samples/s':>10}{'speed':>8}{'waiting':>9}{'step eff.':>11}{'padding':>9}{'loss':>8}"
        f"{'samples':>9}{'steps':>7}"
    ]
    base = next(iter(results.values())).samples_per_s
    for name, result in results.items():
        lines.append(
            f"{name:<26}{result.samples_per_s:>10.2f}{result.samples_per_s / base:>7.2f}x{result.wait_share:>9.1%}"
            f"{result.step_efficiency:>11.3f}{result.padding:>9.1%}{result.final_loss:>8.3f}"
            f"{result.num_samples:>9}{result.num_steps:>7}"
        )
    lines += [
        "",
        "waiting: share of the ranks' time spent waiting at the gradient all-reduce",
        "step eff.: work of the mean rank / work of the slowest rank, summed over steps (1 = no rank waits)",
        "loss: on held-out samples after the run; the first step, which starts workers, does not count for times",
    ]
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/demo"), help="Receives all results.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="Data set.  [default: OUTPUT/data, built]")
@click.option("--num-samples", type=int, default=160, help="Samples that every run trains, over all ranks.")
@click.option("--rows", multiple=True, help="Only these rows.  [default: all]")
def main(output: Path, data: Path | None, num_samples: int, rows: tuple[str, ...]) -> None:
    """Trains the example once per lever on two ranks; prints a table, writes summary.json and demo.png."""
    try:
        names = [row.name for row in demo_rows(num_samples, NUM_RANKS, only=rows)]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    output.mkdir(parents=True, exist_ok=True)
    if data is None:
        data = output / "data"
        click.echo(f"== building the data set {data}")
        click.echo(format_report(build(data, BuildConfig())))
    metrics = output / "metrics"
    shutil.rmtree(metrics, ignore_errors=True)  # records are appended
    click.echo(f"== training on {NUM_RANKS} ranks")
    arguments = ["--data-path", str(data), "--output", str(metrics), "--num-samples", str(num_samples)]
    for row in rows:
        arguments += ["--only", row]
    try:
        launch("examples.llava_ov.demo_ranks", arguments, num_ranks=NUM_RANKS, timeout_s=LAUNCH_TIMEOUT_S)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error

    results = {name: collect(metrics / name) for name in names}
    summary = {"runs": {name: asdict(result) for name, result in results.items()}}
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_runs({name: read_records(metrics / name) for name in names}, output / "demo.png")
    click.echo("\n" + format_table(results))
    click.echo(f"\nwritten: {output / 'summary.json'}, {output / 'demo.png'}, TensorBoard and JSONL under {metrics}")


if __name__ == "__main__":
    main()
