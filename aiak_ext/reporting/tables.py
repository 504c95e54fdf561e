"""The report's tables as rows of text, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiak_ext.analysis.text_table import format_cell, percent
from aiak_ext.reporting.prediction import Comparison
from aiak_ext.reporting.run_figures import RunFigures

Rows = list[dict[str, str]]


def summary_rows(runs: Sequence[RunFigures]) -> Rows:
    """A line per figure, a column per run; of two runs also the second against the first."""
    rows: Rows = []
    for name, values in _figures(runs).items():
        row = {"": name, **{run.label: text for run, (_, text) in zip(runs, values)}}
        if len(runs) == 2:
            (first, _), (second, _) = values
            row["ratio"] = f"{second / first:.2f}x" if first else "-"
        rows.append(row)
    return rows


def comparison_rows(comparisons: Sequence[Comparison]) -> Rows:
    """A line per figure; the last column is the simulation's distance from what the run recorded."""
    return [
        {
            "": one.name,
            "simulated": _share(one.simulated),
            "from the run's costs": _share(one.from_costs),
            "measured by the clock": _share(one.measured),
            "simulated - recorded": _points(one.simulated, one.from_costs),
        }
        for one in comparisons
    ]


def _figures(runs: Sequence[RunFigures]) -> dict[str, list[tuple[float, str]]]:
    """Name -> (value, text) of each run."""
    figures: dict[str, list[tuple[float, str]]] = {}
    for run in runs:
        summary, samples = run.summary, run.samples_per_step
        cells = {
            "samples per second": _number(summary.samples_per_s),
            "step efficiency (mean / heaviest rank's cost)": _number(summary.step_efficiency),
            "waiting at the gradient all-reduce": (summary.wait_share, percent(summary.wait_share)),
            "waiting for data": (run.total_data_share, percent(run.total_data_share)),
            "padding": (summary.padding, percent(summary.padding)),
            "seconds per step": _number(float(np.nanmean(run.step_time_s))),
            "step time, coefficient of variation": _number(run.step_time_cv),
            "samples per optimizer step": _number(float(samples.mean())),
            "samples per step, coefficient of variation": _number(float(samples.std() / samples.mean())),
            "oldest deferred sample, rounds": _number(run.max_deferral_age),
            "ranks": _number(len(run.ranks)),
            "steps": _number(summary.num_steps),
            "samples": _number(summary.num_samples),
        }
        for name, cell in cells.items():
            figures.setdefault(name, []).append(cell)
    return figures


def _number(value: float) -> tuple[float, str]:
    return value, format_cell(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _points(simulated: float | None, recorded: float | None) -> str:
    """A difference of shares in percentage points."""
    return "-" if simulated is None or recorded is None else f"{100 * (simulated - recorded):+.2f} points"
