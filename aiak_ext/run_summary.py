"""Figures of a whole run from the step records that `aiak_ext.metrics` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aiak_ext.metrics import StepRecord


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What one run achieved; ratios are shares between 0 and 1."""

    samples_per_s: float
    """All ranks together, warm-up steps left out."""
    wait_share: float
    """Share of the ranks' time spent waiting at the gradient all-reduce, warm-up steps left out."""
    step_efficiency: float
    """Sum over steps of the mean rank's cost / sum over steps of the slowest rank's cost."""
    padding: float
    """Share of the token slots that held padding."""
    num_samples: int
    num_steps: int


def read_records(directory: str | Path) -> list[StepRecord]:
    """All ranks' records, ordered by step and rank; of a step that was run twice (a resume) the later counts.

    Raises:
        ValueError: `directory` holds no records.
    """
    records: dict[tuple[int, int], StepRecord] = {}
    for path in sorted(Path(directory).glob("steps_rank*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = StepRecord(**json.loads(line))
            records[record.step, record.rank] = record
    if not records:
        raise ValueError(
            f"{directory} holds no steps_rank*.jsonl, so there is nothing to summarise. "
            "Give the directory that StepRecorder wrote to."
        )
    return [records[key] for key in sorted(records)]


def summarize(records: Iterable[StepRecord], *, warmup_steps: int = 1) -> RunSummary:
    """Sum up the records of one run, one rank per data-parallel replica.

    The first `warmup_steps` steps (worker start, first pool, allocations) are left out of the times but not
    of cost, padding and the counts.

    Raises:
        ValueError: no step is left after the warm-up.
    """
    by_step: dict[int, list[StepRecord]] = {}
    for record in records:
        by_step.setdefault(record.step, []).append(record)
    steps = [by_step[step] for step in sorted(by_step)]
    timed = steps[warmup_steps:]
    if not timed:
        raise ValueError(
            f"The run has {len(steps)} steps and {warmup_steps} of them are warm-up, so no time is left to "
            "measure. Train more steps or lower warmup_steps."
        )
    ranks = [record for step in timed for record in step]
    rank_time_s = sum(record.step_time_s for record in ranks)
    elapsed_s = sum(max(record.step_time_s for record in step) for step in timed)
    slowest_cost = sum(max(record.cost for record in step) for step in steps)
    mean_cost = sum(sum(record.cost for record in step) / len(step) for step in steps)
    everything = [record for step in steps for record in step]
    num_tokens = sum(record.num_tokens for record in everything)
    num_token_slots = sum(record.num_token_slots for record in everything)
    return RunSummary(
        samples_per_s=sum(record.num_samples for record in ranks) / elapsed_s,
        wait_share=sum(record.grad_sync_wait_s for record in ranks) / rank_time_s,
        step_efficiency=mean_cost / slowest_cost if slowest_cost else 1.0,
        padding=1 - num_tokens / num_token_slots if num_token_slots else 0.0,
        num_samples=sum(record.num_samples for record in everything),
        num_steps=len(steps),
    )
