"""A run's step records as arrays over ranks and steps, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aiak_ext.convergence import OrderFigures, order_figures
from aiak_ext.metrics import StepRecord
from aiak_ext.run_summary import RunSummary, read_records, summarize

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFigures:
    """One run. Arrays are float64 [ranks, steps], NaN where a rank has no record of a step (it broke off)."""

    label: str
    source: str
    warmup_steps: int
    """First steps left out of times: they start workers and fill the first pool."""
    summary: RunSummary
    records: tuple[StepRecord, ...]

    @classmethod
    def read(cls, directory: str | Path, *, label: str, warmup_steps: int = 1) -> RunFigures:
        """Read what `StepRecorder` wrote.

        Raises:
            ValueError: there are no records, or not more steps than the warm-up.
        """
        records = read_records(directory)
        return cls(
            label=label,
            source=str(directory),
            warmup_steps=warmup_steps,
            summary=summarize(records, warmup_steps=warmup_steps),
            records=tuple(records),
        )

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """Steps' numbers [steps]."""
        return np.array(sorted({record.step for record in self.records}), dtype=np.int64)

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """Ranks' numbers [ranks]."""
        return np.array(sorted({record.rank for record in self.records}), dtype=np.int64)

    def field(self, name: str) -> FloatArray:
        """A field of `StepRecord` [ranks, steps]."""
        return self._array([getattr(record, name) for record in self.records])

    def scalar(self, name: str) -> FloatArray | None:
        """What the loop added to its records under `name` [ranks, steps]; None when it never did."""
        values = self._array([record.scalars.get(name, np.nan) for record in self.records])
        return None if np.isnan(values).all() else values

    def _array(self, values: list[float]) -> FloatArray:
        result = np.full((len(self.ranks), len(self.steps)), np.nan)
        rank = np.searchsorted(self.ranks, [record.rank for record in self.records])
        step = np.searchsorted(self.steps, [record.step for record in self.records])
        result[rank, step] = values
        return result

    @cached_property
    def timed(self) -> NDArray[np.bool_]:
        """Whether a step's time counts [steps]."""
        return np.arange(len(self.steps)) >= self.warmup_steps

    @cached_property
    def step_time_s(self) -> FloatArray:
        """Of the slowest rank [steps]; NaN in the warm-up."""
        return np.where(self.timed, np.nanmax(self.field("step_time_s"), axis=0), np.nan)

    @property
    def step_time_cv(self) -> float:
        """Standard deviation of the step time over its mean, warm-up left out."""
        return float(np.nanstd(self.step_time_s) / np.nanmean(self.step_time_s))

    @cached_property
    def cost(self) -> FloatArray:
        """Cost of what each rank trained [ranks, steps]."""
        return self.field("cost")

    @cached_property
    def cost_max_over_mean(self) -> FloatArray:
        """Heaviest rank's cost over the mean rank's [steps]; NaN where nothing was trained."""
        mean = np.nanmean(self.cost, axis=0)
        return np.divide(np.nanmax(self.cost, axis=0), mean, out=np.full(len(mean), np.nan), where=mean > 0)

    @cached_property
    def wait_share(self) -> FloatArray:
        """Share of the ranks' time at the gradient all-reduce [steps]; NaN in the warm-up."""
        return self._time_share("grad_sync_wait_s")

    @cached_property
    def data_share(self) -> FloatArray:
        """Share of the ranks' time spent waiting for the loader [steps]; NaN in the warm-up."""
        return self._time_share("data_time_s")

    def _time_share(self, name: str) -> FloatArray:
        share = np.nansum(self.field(name), axis=0) / np.nansum(self.field("step_time_s"), axis=0)
        return np.where(self.timed, share, np.nan)

    @property
    def total_data_share(self) -> float:
        """Share of the ranks' time spent waiting for the loader, warm-up left out."""
        data, total = (self.field(name)[:, self.timed] for name in ("data_time_s", "step_time_s"))
        return float(np.nansum(data) / np.nansum(total))

    @property
    def clock_efficiency(self) -> float:
        """Step efficiency with measured computing time in the place of cost, warm-up left out.

        Computing is what is left of a rank's step without waiting for the all-reduce and for data.
        """
        busy = self.field("step_time_s") - self.field("grad_sync_wait_s") - self.field("data_time_s")
        busy = busy[:, self.timed]
        return float(np.nanmean(busy, axis=0).sum() / np.nanmax(busy, axis=0).sum())

    @cached_property
    def samples_per_step(self) -> FloatArray:
        """Over all ranks [steps]."""
        return np.nansum(self.field("num_samples"), axis=0)

    @cached_property
    def padding(self) -> FloatArray:
        """Share of all ranks' token slots that holds padding [steps]; NaN where nothing was trained."""
        tokens, slots = (np.nansum(self.field(name), axis=0) for name in ("num_tokens", "num_token_slots"))
        return 1 - np.divide(tokens, slots, out=np.full(len(slots), np.nan), where=slots > 0)

    @cached_property
    def mean_length(self) -> FloatArray:
        """Tokens per sample over all ranks [steps]; NaN where nothing was trained."""
        tokens, samples = np.nansum(self.field("num_tokens"), axis=0), self.samples_per_step
        return np.divide(tokens, samples, out=np.full(len(samples), np.nan), where=samples > 0)

    @cached_property
    def order(self) -> OrderFigures:
        """Whether the order of the steps correlates with length."""
        return order_figures(self.mean_length)

    @property
    def max_deferral_age(self) -> int:
        """Rounds that the oldest deferred sample waited, over ranks and steps."""
        return max(record.max_deferral_age for record in self.records)

    @property
    def has_deferrals(self) -> bool:
        """Whether online dynamic batching ever put samples off."""
        return any(record.deferred_samples for record in self.records)

    @property
    def has_single_samples(self) -> bool:
        """Whether no rank ever trained more than one sample in a step, so that steps' tokens are samples' lengths."""
        return all(record.num_samples <= 1 for record in self.records)
