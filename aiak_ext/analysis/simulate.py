"""Simulates training steps under a setting with the package's own ordering, grouping and planning code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from aiak_ext.analysis.balanced import BalanceSettings, balanced_schedule
from aiak_ext.analysis.memory import MemoryModel
from aiak_ext.analysis.odb_groups import odb_schedule
from aiak_ext.analysis.pooled import pooled_schedule
from aiak_ext.analysis.samples import SampleTable
from aiak_ext.analysis.schedule import Figures, Schedule, measure
from aiak_ext.analysis.streams import DealtStreams, ReadStreams, Streams
from aiak_ext.lever_configs import round_up
from data_balance import SampleCostModel
from length_sort.odb_dataset import default_cost
from length_sort.pool_order import PoolRule
from length_sort.rounds import RoundRules

# Rank-steps to simulate by default, and the fewest and most steps: enough for a steady figure in seconds, or a
# minute at thousands of ranks. Orders vary most and cost least; planned steps vary least and cost most.
_ORDERED = (262_144, 64, 4096)
_GROUPED = (32_768, 32, 512)
_PLANNED = (2_048, 4, 64)

ORDERS = ("length", "cost")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run's geometry and its levers.

    Raises:
        ValueError: a number is not positive, there are fewer than two ranks, or length sort is combined with ODB.
    """

    num_ranks: int
    num_workers: int = 1
    micro_batch_size: int = 1
    num_microbatches: int = 1
    """Micro batches per step and rank (accumulation)."""
    micro_batch_sync: bool = False
    """Ranks meet at every micro batch (expert parallelism, FSDP)."""
    pool: PoolRule | None = None
    odb: RoundRules | None = None
    balance: BalanceSettings | None = None
    order_by: str = "length"
    """What pools are sorted and ODB's groups matched by: ``length``, as the flags alone do, or ``cost``, as with a
    ``length_fn`` or ``cost_fn`` that gives the sample's compute cost."""

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"num_ranks is {self.num_ranks}: one rank waits for nobody; give 2 or more")
        for name in ("micro_batch_size", "num_microbatches", "num_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, which makes no step; give at least 1")
        if self.order_by not in ORDERS:
            raise ValueError(f"order_by {self.order_by!r} is unknown; choose one of {', '.join(ORDERS)}")
        if self.pool is not None and self.odb is not None:
            raise ValueError("length sort together with ODB: ODB undoes the pool's order; simulate one of the two")

    @property
    def lever(self) -> str:
        """The levers' names, joined with a plus."""
        names = [name for name, on in (("length_sort", self.pool), ("odb", self.odb)) if on is not None]
        if self.balance is not None:
            names.append(f"balance_{self.balance.scope}")
        return "+".join(names) or "none"

    @property
    def detail(self) -> str:
        """The levers' main numbers."""
        parts = []
        if self.pool is not None:
            parts.append(f"pool {self.pool.pool_size} block {self.pool.shuffle_block}")
        if self.odb is not None:
            rules = self.odb
            parts.append(f"{rules.policy}/{rules.target} budget {rules.token_budget} buffer {rules.buffer_size}")
        if self.balance is not None:
            parts.append(self.balance.algorithm)
        if self.order_by == "cost" and (self.pool is not None or self.odb is not None):
            parts.append("by cost")
        return ", ".join(parts)


def pool_rule(pool_size: int, shuffle_block: int, **options: Any) -> PoolRule:
    """The rule of pools of at least `pool_size` samples, rounded up to whole blocks as the flags are."""
    return PoolRule(pool_size=round_up(pool_size, shuffle_block), shuffle_block=shuffle_block, **options)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a simulated setting achieves."""

    setting: Setting
    figures: Figures
    moved_share: float | None
    """Share of the bytes that data balance moves; None without it."""

    def row(self) -> dict[str, Any]:
        """The figures as one flat row."""
        setting = self.setting
        return {
            "lever": setting.lever,
            "detail": setting.detail,
            "ranks": setting.num_ranks,
            "workers": setting.num_workers,
            "micro_batch": setting.micro_batch_size if setting.odb is None else None,
            "accumulation": setting.num_microbatches,
            **asdict(self.figures),
            "moved_share": self.moved_share,
        }


def simulate(
    table: SampleTable,
    setting: Setting,
    costs: SampleCostModel,
    memory: MemoryModel,
    *,
    num_steps: int | None = None,
    seed: int = 0,
    as_read: bool = False,
) -> Result:
    """Form the steps of a run and measure them.

    Args:
        table: The samples.
        setting: What to simulate.
        costs: Cost of a sample.
        memory: Memory of a micro batch.
        num_steps: Steps; by default `default_steps`. Fewer where streams that were read end before.
        seed: Of the dealing.
        as_read: Use the streams of ranks and workers that the table was read from, in the order read: with the
            loader's settings of a run the steps are that run's. Otherwise the samples are dealt out at random.

    Raises:
        ValueError: `as_read` for a table that was not read as the setting's ranks and workers.
    """
    steps = num_steps if num_steps is not None else default_steps(setting)
    schedule = _schedule(table, setting, costs, steps, _streams(table, setting, seed, as_read))
    moved = None
    if setting.balance is not None:
        schedule, moved = balanced_schedule(
            schedule, table, costs, setting.balance, micro_batch_sync=setting.micro_batch_sync
        )
    figures = measure(schedule, table, costs, memory, micro_batch_sync=setting.micro_batch_sync)
    return Result(setting=setting, figures=figures, moved_share=moved)


def default_steps(setting: Setting) -> int:
    """Steps that give a steady figure in seconds, or a minute at thousands of ranks."""
    rank_steps, fewest, most = _ORDERED if setting.odb is None else _GROUPED
    if setting.balance is not None:
        rank_steps, fewest, most = _PLANNED
    return min(most, max(fewest, rank_steps // setting.num_ranks))


def _streams(table: SampleTable, setting: Setting, seed: int, as_read: bool) -> Streams:
    if as_read:
        return ReadStreams(table, setting.num_ranks, setting.num_workers)
    return DealtStreams(table, seed)


def _schedule(
    table: SampleTable, setting: Setting, costs: SampleCostModel, num_steps: int, streams: Streams
) -> Schedule:
    by_cost, sample_costs = setting.order_by == "cost", costs.cost(table.sums)
    if setting.odb is not None:
        return odb_schedule(
            table,
            streams,
            sample_costs if by_cost else np.array([default_cost(n) for n in table.num_tokens.tolist()]),
            num_ranks=setting.num_ranks,
            num_workers=setting.num_workers,
            num_slots=setting.num_microbatches,
            num_steps=num_steps,
            rules=setting.odb,
        )
    return pooled_schedule(
        table,
        streams,
        num_ranks=setting.num_ranks,
        num_workers=setting.num_workers,
        micro_batch_size=setting.micro_batch_size,
        num_slots=setting.num_microbatches,
        num_steps=num_steps,
        rule=setting.pool if setting.pool is not None else PoolRule(pool_size=0),
        sort_keys=sample_costs if by_cost else table.num_tokens,
    )
