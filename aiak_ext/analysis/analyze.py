"""Puts an analysis together: distribution, ranks compared, predicted levers, recommendations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from aiak_ext.analysis.balanced import BalanceSettings
from aiak_ext.analysis.distribution import cost_figures, length_figures, vision_figures
from aiak_ext.analysis.memory import MemoryModel
from aiak_ext.analysis.recommend import (
    Facts,
    Recommendation,
    recommend_block,
    recommend_budget,
    recommend_buffer,
    recommend_lever,
    recommend_order,
    recommend_patches,
    recommend_pool,
    recommend_scope,
    recommend_workers,
)
from aiak_ext.analysis.same_distribution import Comparison, compare_groups
from aiak_ext.analysis.samples import SampleTable
from aiak_ext.analysis.simulate import Result, Setting, simulate
from aiak_ext.analysis.text_table import percent
from data_balance import SampleCostModel
from length_sort.rounds import RoundRules

#: Share of waiting from which the ranks' meeting at each step is the bottleneck.
WAITING_MATTERS = 0.1


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Everything that the report says."""

    table: SampleTable
    present: Setting
    lengths: dict[str, Any]
    vision: dict[str, Any] | None
    cost: dict[str, float]
    comparisons: tuple[Comparison, ...]
    predicted: tuple[Result, ...]
    """The present setting first; empty where single lengths are unknown."""
    recommendations: tuple[Recommendation, ...]
    measured: dict[str, Any] | None
    """Of a finished run."""
    device_bytes: float

    def bottleneck(self) -> str:
        """Whether waiting across ranks is the bottleneck, in a sentence."""
        if self.measured is not None:
            wait, data = self.measured["wait_share"], self.measured["data_share"]
            verdict = "is" if wait >= max(WAITING_MATTERS, data) else "is not"
            return (
                f"Cross-rank waiting {verdict} the bottleneck: measured, ranks wait {percent(wait)} of their time at "
                f"the gradient all-reduce and {percent(data)} for data."
            )
        waiting, padding = self.predicted[0].figures.waiting, self.predicted[0].figures.padding
        verdict = "is" if waiting >= WAITING_MATTERS else "is not"
        return (
            f"Cross-rank waiting {verdict} the bottleneck: predicted, ranks wait {percent(waiting)} of their compute "
            f"time for the slowest, and {percent(padding)} of the tokens are padding."
        )

    def as_dict(self) -> dict[str, Any]:
        """The analysis as JSON values."""
        return {
            "source": self.table.source,
            "is_estimate": self.table.is_estimate,
            "notes": list(self.table.notes),
            "length_sort_pool_size": self.present.pool.pool_size if self.present.pool is not None else 0,
            "lengths": self.lengths,
            "vision": self.vision,
            "cost": self.cost,
            "bytes_per_sample": self.table.estimated_bytes_per_sample(),
            "encode_s": self.table.encode_s,
            "comparisons": [asdict(comparison) | {"same": comparison.same} for comparison in self.comparisons],
            "measured": self.measured,
            "predicted": [result.row() for result in self.predicted],
            "bottleneck": self.bottleneck(),
            "recommendations": [asdict(one) for one in self.recommendations],
        }


def analyze(
    table: SampleTable,
    present: Setting,
    costs: SampleCostModel,
    memory: MemoryModel,
    *,
    device_bytes: float,
    step_time_s: float | None = None,
    num_steps: int | None = None,
    as_read: bool = False,
    measured: dict[str, Any] | None = None,
    on_simulated: Callable[[Setting], None] = lambda setting: None,
) -> Analysis:
    """Analyze lengths under a present setting.

    Args:
        table: The samples.
        present: The run's geometry, with a pool where length sort is on.
        costs: Cost of a sample.
        memory: Memory of a step.
        device_bytes: Memory of a device.
        step_time_s: Seconds of a step, where known.
        num_steps: Steps to simulate; by default a number that depends on the setting.
        as_read: Simulate the streams as they were read, see `simulate`.
        measured: Figures of a finished run.
        on_simulated: Called with every setting after its simulation.
    """

    @functools.cache
    def run(setting: Setting) -> Result:
        result = simulate(table, setting, costs, memory, num_steps=num_steps, as_read=as_read)
        on_simulated(setting)
        return result

    plain = replace(present, pool=None, odb=None, balance=None)
    facts = Facts(
        table=table,
        present=plain,
        memory=memory,
        device_bytes=device_bytes,
        step_time_s=step_time_s,
        as_read=as_read,
    )
    cost = cost_figures(table, costs)
    budget = recommend_budget(facts)
    predicted: list[Result] = []
    advice: list[Recommendation] = []
    if measured is None or not table.is_estimate:
        predicted, advice = _predict(facts, present, cost, budget, run)
    return Analysis(
        table=table,
        present=present,
        lengths=length_figures(table, budget.value),
        vision=vision_figures(table),
        cost=cost,
        comparisons=tuple(_comparisons(table)),
        predicted=tuple(predicted),
        recommendations=tuple(advice),
        measured=measured,
        device_bytes=device_bytes,
    )


def _predict(
    facts: Facts, present: Setting, cost: dict[str, float], budget: Recommendation, run: Callable[[Setting], Result]
) -> tuple[list[Result], list[Recommendation]]:
    plain = facts.present
    now = run(present)
    pool, pooled = recommend_pool(facts, run)
    block = recommend_block(facts, pooled, run)
    patches = recommend_patches(facts, budget.value)
    rules = RoundRules(
        token_budget=budget.value,
        max_patches=None if patches is None else patches.value,
        policy="packed",
        target="min",
    )
    buffer = recommend_buffer(facts, rules, run)
    settings = [
        replace(plain, odb=replace(rules, policy=policy, buffer_size=buffer.value)) for policy in ("tight", "packed")
    ]
    settings += [
        replace(plain, balance=BalanceSettings()),
        replace(pooled.setting, balance=BalanceSettings()),
    ]
    if facts.table.has_images:
        # Samples of one length differ in cost there, so sorting by cost is another setting.
        by_cost = [replace(setting, order_by="cost") for setting in (pooled.setting, settings[1])]
        settings += [replace(plain, balance=BalanceSettings(scope="encoder")), *by_cost]
    results = [pooled, *(run(setting) for setting in settings)]
    scope = recommend_scope(now, results, cost["vision_share"])
    lever, workers = recommend_lever(facts, now, results), recommend_workers(facts)
    advice = [lever, pool, block, recommend_order(results), budget, patches, buffer, workers, scope]
    return [now, *results], [one for one in advice if one is not None]


def _comparisons(table: SampleTable) -> list[Comparison]:
    """Ranks, workers (of each rank) and shards compared, where they are known."""
    groups: list[tuple[str, Any]] = []
    if table.rank is not None:
        groups.append(("rank", table.rank))
    if table.rank is not None and table.worker is not None and table.worker.max() > 0:
        groups.append(("worker", [f"{rank}.{worker}" for rank, worker in zip(table.rank, table.worker)]))
    if table.shard is not None:
        groups.append(("shard", table.shard))
    compared = [compare_groups(kind, labels, table.num_tokens) for kind, labels in groups]
    return [comparison for comparison in compared if comparison is not None]
