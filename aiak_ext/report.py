"""`aiak-ext report`: where the time of a finished run went, as one HTML file."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from aiak_ext.analysis.commands.options import user_errors
from aiak_ext.analysis.text_table import format_table
from aiak_ext.reporting.page import page
from aiak_ext.reporting.prediction import Comparison, compare, read_simulated
from aiak_ext.reporting.run_figures import RunFigures
from aiak_ext.reporting.tables import comparison_rows, summary_rows

_RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("run", type=_RUN)
@click.argument("other_run", type=_RUN, required=False)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="HTML file.  [default: RUN/report.html]"
)
@click.option("--label", multiple=True, help="Name of a run; repeat for the second.  [default: its folder's name]")
@click.option(
    "--predicted",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What `aiak-ext simulate --json` or `analyze --json` printed, to put beside the run. Of several settings the "
    "one counts whose lever is the run's label.",
)
@click.option("--warmup-steps", type=click.IntRange(min=0), default=1, show_default=True, help="Left out of times.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@user_errors
def report(
    run: Path,
    other_run: Path | None,
    output: Path | None,
    label: tuple[str, ...],
    predicted: Path | None,
    warmup_steps: int,
    as_json: bool,
) -> None:
    """Figures, plots and predictions of the finished run RUN, with OTHER_RUN beside it, as one HTML file.

    RUN is the folder of metrics that the training wrote (steps_rank*.jsonl). The page needs no network.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is not installed, so nothing can be drawn. Install `aiak-ext[cli]`.")
    directories = [run] if other_run is None else [run, other_run]
    runs = [
        RunFigures.read(directory, label=name, warmup_steps=warmup_steps)
        for directory, name in zip(directories, _labels(directories, label))
    ]
    comparisons = [compare(each, None if predicted is None else read_simulated(predicted, each)) for each in runs]
    output = output or run / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(runs, comparisons), encoding="utf-8")
    click.echo(_json(runs, comparisons, output) if as_json else _terminal(runs, comparisons, output))


def _labels(directories: list[Path], given: tuple[str, ...]) -> list[str]:
    """Names of the runs, each of its own.

    Raises:
        ValueError: more or fewer names than runs, or equal ones.
    """
    names = list(given) or [directory.resolve().name for directory in directories]
    if not given and len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    if len(names) != len(directories) or len(set(names)) < len(names):
        raise ValueError(
            f"the {len(directories)} runs would be named {', '.join(names)}, so they cannot be told apart. "
            "Give --label once per run, with different names."
        )
    return names


def _terminal(runs: list[RunFigures], comparisons: list[list[Comparison]], output: Path) -> str:
    parts = [format_table(summary_rows(runs))]
    for run, compared in zip(runs, comparisons):
        parts.append(f"{run.label}: prediction and reality\n{format_table(comparison_rows(compared))}")
        parts.append(f"{run.label}: {run.order.describe()}")
    return "\n\n".join([*parts, f"written: {output}"])


def _json(runs: list[RunFigures], comparisons: list[list[Comparison]], output: Path) -> str:
    rows: list[dict[str, Any]] = [
        {
            "label": run.label,
            "summary": asdict(run.summary),
            "step_time_cv": run.step_time_cv,
            "prediction": {one.name: asdict(one) for one in compared},
            "order": asdict(run.order),
            "max_deferral_age": run.max_deferral_age,
        }
        for run, compared in zip(runs, comparisons)
    ]
    return json.dumps({"output": str(output), "runs": rows}, indent=2)
