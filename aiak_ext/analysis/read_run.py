"""Figures of a finished run from the step records that `aiak_ext.metrics` wrote."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from aiak_ext.analysis.samples import SampleTable
from aiak_ext.metrics import StepRecord
from aiak_ext.run_summary import read_records, summarize


def is_run(path: str | Path) -> bool:
    """Whether the folder holds a run's metrics."""
    return any(Path(path).glob("steps_rank*.jsonl"))


def read_run(path: str | Path, *, warmup_steps: int = 1) -> tuple[SampleTable, dict[str, Any]]:
    """Tokens of every rank's steps as a table, and what was measured.

    A record sums a rank's step up. Where every step of every rank held one sample the table's rows are samples;
    else they are steps, which `is_estimate` and a note say: the ranks can be compared, single lengths are unknown.

    Args:
        path: Folder of ``steps_rank*.jsonl``.
        warmup_steps: First steps left out of the times.

    Raises:
        ValueError: no records, or too few steps.
    """
    records = [record for record in read_records(path) if record.num_samples > 0]
    summary = summarize(records, warmup_steps=warmup_steps)
    single = all(record.num_samples == 1 for record in records)
    note = (
        "A run's metrics hold the tokens of a rank's step, not of single samples: lengths below are per step, and "
        "levers cannot be simulated from them. Give the dataset or a lengths file for that."
    )
    table = SampleTable(
        source=str(path),
        num_tokens=np.array([record.num_tokens for record in records], dtype=np.int64),
        rank=np.array([record.rank for record in records], dtype=np.int64),
        is_estimate=not single,
        notes=() if single else (note,),
    )
    return table, {**asdict(summary), **_times(records, warmup_steps)}


def _times(records: list[StepRecord], warmup_steps: int) -> dict[str, Any]:
    timed = [record for record in records if record.step >= warmup_steps]
    total_s = sum(record.step_time_s for record in timed)
    slowest = {step: 0.0 for step in sorted({record.step for record in timed})}
    for record in timed:
        slowest[record.step] = max(slowest[record.step], record.step_time_s)
    step_times = np.array(list(slowest.values()))
    return {
        "num_ranks": len({record.rank for record in records}),
        "step_time_s": float(step_times.mean()),
        "step_time_cv": float(step_times.std() / step_times.mean()),
        "data_share": sum(record.data_time_s for record in timed) / total_s,
    }
