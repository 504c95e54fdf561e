"""The demo's picture: time per step and tokens per rank, run beside run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed

from matplotlib import pyplot

from aiak_ext.metrics import StepRecord


def plot_runs(runs: Mapping[str, Sequence[StepRecord]], path: Path) -> None:
    """Draw one column per run.

    Top: time of each step, split into computing and waiting of the rank that waits longest. Bottom: tokens that
    each rank computes at each step, padding included; ranks whose lines lie on each other do not wait.

    Args:
        runs: Records of all ranks, by name of the run.
        path: PNG to write.
    """
    figure, axes = pyplot.subplots(
        2, len(runs), figsize=(4 * len(runs), 6), sharey="row", squeeze=False, layout="constrained"
    )
    for column, (name, records) in zip(axes.T, runs.items()):
        _plot_step_times(column[0], records)
        _plot_lengths(column[1], records)
        column[0].set_title(name)
    axes[0, 0].set_ylabel("seconds per step")
    axes[1, 0].set_ylabel("tokens per rank and step")
    axes[0, 0].legend()
    axes[1, 0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_step_times(axis: pyplot.Axes, records: Sequence[StepRecord]) -> None:
    steps, times = _by_rank(records, "step_time_s")
    _, waits = _by_rank(records, "grad_sync_wait_s")
    timed = slice(1, None)  # the first step starts workers
    longest_wait = waits.max(axis=0)[timed]
    step_time = times.max(axis=0)[timed]
    axis.bar(steps[timed], step_time - longest_wait, width=1.0, label="computing")
    axis.bar(steps[timed], longest_wait, bottom=step_time - longest_wait, width=1.0, label="waiting")


def _plot_lengths(axis: pyplot.Axes, records: Sequence[StepRecord]) -> None:
    steps, slots = _by_rank(records, "num_token_slots")
    for rank, line in enumerate(slots):
        axis.plot(steps, line, marker=".", label=f"rank {rank}")
    axis.set_xlabel("step")


def _by_rank(records: Sequence[StepRecord], field: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n] and a field's values [ranks, n]."""
    ranks = sorted({record.rank for record in records})
    steps = sorted({record.step for record in records})
    values = {(record.rank, record.step): getattr(record, field) for record in records}
    return np.array(steps), np.array([[values[rank, step] for step in steps] for rank in ranks])
