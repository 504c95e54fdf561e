"""Steps after data balance: samples or images on the ranks that the package's own planning puts them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from aiak_ext.analysis.samples import IntArray, SampleTable
from aiak_ext.analysis.schedule import Schedule
from data_balance import BalancePlan, SampleCostModel
from data_balance.planners import DEFAULT_TOLERANCE, Planner, planner_for
from data_balance.step_plan import StepItems, moving_pays, plan_step, slot_costs, step_cost


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """What decides a plan: the flags of the lever."""

    scope: str = "step"
    """``step`` moves samples, ``encoder`` moves images inside the forward."""
    algorithm: str = "lpt"
    threshold: float = 0.02
    tolerance: float = DEFAULT_TOLERANCE

    def __post_init__(self) -> None:
        if self.scope not in ("step", "encoder"):
            raise ValueError(f"scope {self.scope!r} is unknown; choose step or encoder")
        planner_for(self.algorithm)  # ValueError for an unknown one


def balanced_schedule(
    schedule: Schedule,
    table: SampleTable,
    costs: SampleCostModel,
    settings: BalanceSettings,
    *,
    micro_batch_sync: bool = False,
) -> tuple[Schedule, float]:
    """The schedule with its samples or images moved, and the share of the bytes that move.

    Args:
        schedule: Steps before the balance.
        table: The samples.
        costs: Cost of a sample.
        settings: The lever's settings.
        micro_batch_sync: Ranks meet at every micro batch, so every micro batch is balanced.
    """
    planner = planner_for(settings.algorithm, settings.tolerance)
    if settings.scope == "encoder":
        return _move_images(schedule, table, costs, planner, settings.threshold)
    return _move_samples(schedule, table, costs, planner, settings.threshold, micro_batch_sync)


def _move_samples(
    schedule: Schedule,
    table: SampleTable,
    costs: SampleCostModel,
    planner: Planner,
    threshold: float,
    every_slot: bool,
) -> tuple[Schedule, float]:
    sums = table.sums[schedule.sample]
    language, total = costs.language_cost(sums), costs.cost(sums)
    sizes = _sample_sizes(table)[schedule.sample]
    rank, slot = schedule.rank.copy(), schedule.slot.copy()
    for rows in _steps(schedule):
        items = StepItems(
            costs=total[rows],
            language=language[rows],
            home=schedule.rank[rows],
            home_slot=schedule.slot[rows],
            sizes=sizes[rows],
            memory=sums[rows][:, [0, 2]],
            nodes=np.arange(schedule.num_ranks),
            pads=schedule.padded,
        )
        stay = BalancePlan(items.home, items.home_slot, schedule.num_ranks, schedule.num_slots)
        plan = plan_step(items, planner, schedule.num_slots, None, every_slot)
        before, after = (step_cost(slot_costs(items, one), every_slot) for one in (stay, plan))
        if moving_pays(before, after, threshold):
            rank[rows], slot[rows] = plan.assignment, plan.slot
    moved = sizes[rank != schedule.rank].sum() / sizes.sum()
    return schedule.moved(rank, slot), float(moved)


def _move_images(
    schedule: Schedule, table: SampleTable, costs: SampleCostModel, planner: Planner, threshold: float
) -> tuple[Schedule, float]:
    """A sample's images move together; each micro batch is planned alone, with the step's costs so far in mind."""
    sums = table.sums[schedule.sample]
    vision = costs.vision.cost_of_sums(sums[:, 2], sums[:, 3])
    patches = sums[:, 2].astype(np.float64)
    vision_rank = schedule.rank.copy()
    for rows in _steps(schedule):
        carried = np.zeros(schedule.num_ranks)
        for slot in range(schedule.num_slots):
            chosen = rows[(schedule.slot[rows] == slot) & (patches[rows] > 0)]
            home = schedule.rank[chosen]
            plan = planner(vision[chosen], schedule.num_ranks, home=home, sizes=patches[chosen], carried=carried)
            before = carried + np.bincount(home, weights=vision[chosen], minlength=schedule.num_ranks)
            after = carried + plan.loads(vision[chosen])
            if moving_pays(float(before.max()), float(after.max()), threshold):
                vision_rank[chosen] = plan.assignment
                carried = after
            else:
                carried = before
    moved = patches[vision_rank != schedule.rank].sum() / max(patches.sum(), 1.0)
    return replace(schedule, vision_rank=vision_rank, encoder_balanced=True), float(moved)


def _sample_sizes(table: SampleTable) -> np.ndarray:
    """Bytes of each sample: float32 patches and int64 tokens and labels."""
    return 4.0 * 3 * 14 * 14 * table.num_patches + 16.0 * table.num_tokens


def _steps(schedule: Schedule) -> Iterator[IntArray]:
    """Rows of each step, by rank and micro batch, as the ranks' lengths are gathered."""
    order = np.lexsort((schedule.slot, schedule.rank, schedule.step))
    bounds = np.searchsorted(schedule.step[order], np.arange(schedule.num_steps + 1))
    for start, end in zip(bounds, bounds[1:]):
        yield order[start:end]
