"""Balance one optimizer step: gather lengths, plan, send samples, merge micro batches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data_balance.agreement import StageAgreement
from data_balance.codec import BatchCodec, Sample, codec_for
from data_balance.cost import SampleCostModel
from data_balance.exchange import Record, exchange
from data_balance.fit import CostFitter, from_coefficients
from data_balance.groups import CollectiveWatch, group_ranks, own_gloo_group
from data_balance.metrics import BalanceMetrics
from data_balance.options import BalanceOptions
from data_balance.plan import BalancePlan
from data_balance.planners import planner_for
from data_balance.step_plan import (
    StepItems,
    cap_memory,
    moving_pays,
    plan_step,
    slot_costs,
    step_cost,
    step_imbalance,
)

_PLACE = "__data_balance_place__"


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What one call asks for; the meanings are those of `DataBalance.build_balanced_train_data_iterator`."""

    num_microbatches: int
    micro_batch_size: int | None
    max_batch_capacity: int | None
    data_type: str
    keep_pixels: bool


@dataclass(frozen=True)
class BalancedStep:
    """Micro batches of this rank, and what the move did."""

    batches: list[Any]
    metrics: BalanceMetrics


class StepBalancer:
    """Balances steps over the ranks of a group, on host memory, through a Gloo group of its own.

    Every rank of the group calls `balance` once per step, from one thread at a time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sorting_algo_name: str,
        cost_model: SampleCostModel,
        codec: BatchCodec | None,
        options: BalanceOptions,
    ) -> None:
        self.cost_model = cost_model
        self.is_fitted = False
        self._planner = planner_for(sorting_algo_name, options.tolerance)
        self._codec = codec
        self._options = options
        self._group = own_gloo_group(group, options.timeout_s)
        self._watch = CollectiveWatch(self._group, "step")
        self._rank, self._num_ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._nodes = np.array(group_ranks(group), dtype=np.int64) // options.ranks_per_node
        self._agreement = StageAgreement(self._group, group, options.timeout_s) if options.agree_across_stages else None
        self._fitter = CostFitter(options.fit_steps, self._group, group) if options.fit_steps else None
        self._template: Any = None
        self._spare: Sample | None = None
        self._num_skipped = 0

    def add_time(self, step: int, seconds: float) -> None:
        """Seconds that this rank computed in `step`; the cost model may be fitted to them."""
        if self._fitter is not None:
            self._fitter.add_time(step, seconds)

    def use_cost_model(self, cost_model: SampleCostModel) -> None:
        """Take a model that an earlier run has fitted; it is not fitted again."""
        self.cost_model, self.is_fitted, self._fitter = cost_model, True, None

    def balance(self, step: int, pulled: list[Any], spec: StepSpec) -> BalancedStep | None:
        """Balanced micro batches of a step; None when no rank has pulled any sample.

        `pulled` are this rank's batches, `num_microbatches` of them except at the end of its data. Then what
        is left on any rank is spread over all of them, and micro batches without a sample are idle.

        Raises:
            ExchangeError: a collective failed; names the missing ranks.
            ValueError: samples that cannot be split, placed or merged.
        """
        with self._watch.stage(f"data balance of step {step}"):
            return self._balance(step, pulled, spec)

    def _balance(self, step: int, pulled: list[Any], spec: StepSpec) -> BalancedStep | None:
        started = time.perf_counter()
        self._fit_if_due(step)
        if pulled:
            self._template = pulled[0]
        samples, slots = self._split(pulled)
        table = self._gather_lengths(samples, slots, len(pulled) == spec.num_microbatches, spec.data_type)
        if not len(table.sums):
            return None
        items = StepItems(
            costs=self.cost_model.cost(table.sums),
            language=self.cost_model.language_cost(table.sums),
            home=table.home,
            home_slot=np.minimum(table.home_slot, spec.num_microbatches - 1),
            sizes=table.num_bytes.astype(np.float64),
            memory=table.sums[:, [0, 2]],
            nodes=self._nodes,
            pads=table.pads,
        )
        self._keep_spare(samples, items)
        stay = BalancePlan(items.home, items.home_slot, self._num_ranks, spec.num_microbatches)
        plan, over_cap = self._plan(items, spec, stay, table.is_complete)
        if self._agreement is not None:
            self._agreement.same_plan(step, plan.digest())
        planned = time.perf_counter()
        if self._fitter is not None:
            mine = table.sums[plan.assignment == self._rank]
            self._fitter.add_work(step, np.append(mine.sum(axis=0), len(mine)))
        moves = plan is not stay
        batches = self._move(pulled, samples, items, plan, spec) if moves else self._as_loaded(pulled, spec)
        metrics = self._measure(step, items, stay, plan)
        metrics.over_cap = over_cap
        metrics.plan_s, metrics.exchange_s = planned - started, time.perf_counter() - planned
        return BalancedStep(batches, metrics)

    def _split(self, pulled: list[Any]) -> tuple[list[Sample], list[int]]:
        samples, slots = [], []
        for slot, batch in enumerate(pulled):
            parts = self._codec_of(batch).split(batch)
            samples += parts
            slots += [slot] * len(parts)
        return samples, slots

    def _codec_of(self, batch: Any) -> BatchCodec:
        return self._codec if self._codec is not None else codec_for(batch)

    def _gather_lengths(self, samples: list[Sample], slots: list[int], has_all: bool, data_type: str) -> _LengthTable:
        """Every rank's lengths."""
        codec = self._codec_of(self._template) if samples else None
        sizes = [codec.measure(sample, data_type) for sample in samples] if codec is not None else []
        rows = [
            [s.num_tokens, s.token_squares, s.num_patches, s.patch_squares, s.num_bytes, slot]
            for s, slot in zip(sizes, slots)
        ]
        pads = codec is not None and codec.pads(self._template)
        head = torch.tensor([len(rows), int(has_all), int(pads)])
        heads = [torch.empty_like(head) for _ in range(self._num_ranks)]
        dist.all_gather(heads, head, group=self._group)
        counts, have_all, pad = torch.stack(heads).T.tolist()
        mine = torch.zeros(max(*counts, 1), 6, dtype=torch.int64)
        if rows:
            mine[: len(rows)] = torch.tensor(rows)
        parts = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        dist.all_gather(parts, mine, group=self._group)
        table = torch.cat([part[:count] for part, count in zip(parts, counts)]).numpy()
        home = np.repeat(np.arange(self._num_ranks), counts)
        return _LengthTable(table[:, :4], table[:, 4], home, table[:, 5], all(have_all), any(pad))

    def _plan(self, items: StepItems, spec: StepSpec, stay: BalancePlan, is_complete: bool) -> tuple[BalancePlan, int]:
        """The plan and the number of micro batches above a memory cap; `stay` itself when moving does not pay."""
        every_slot = self._options.balance_every_slot
        capacity = spec.max_batch_capacity
        plan = plan_step(items, self._planner, spec.num_microbatches, capacity, every_slot)
        plan, over_cap = cap_memory(plan, items, (self._options.max_tokens, self._options.max_patches), capacity)
        before, after = (step_cost(slot_costs(items, p), every_slot) for p in (stay, plan))
        fits = capacity is None or stay.slot_counts().max() <= capacity
        if is_complete and fits and not moving_pays(before, after, self._options.threshold):
            self._num_skipped += 1
            return stay, 0
        return plan, over_cap

    def _move(
        self, pulled: list[Any], samples: list[Sample], items: StepItems, plan: BalancePlan, spec: StepSpec
    ) -> list[Any]:
        """Send samples and merge what arrives into this rank's micro batches."""
        outgoing: list[list[Record]] = [[] for _ in range(self._num_ranks)]
        codec = self._codec_of(self._template) if self._template is not None else None
        for index, sample in zip(np.flatnonzero(items.home == self._rank).tolist(), samples):
            assert codec is not None
            record = sample if spec.keep_pixels else codec.without_pixels(sample)
            outgoing[int(plan.assignment[index])].append({**record, _PLACE: (int(plan.slot[index]), index)})
        expected = np.bincount(items.home[plan.assignment == self._rank], minlength=self._num_ranks)
        arrived = exchange(outgoing, self._group, expected=expected.tolist())
        by_slot: list[list[Sample]] = [[] for _ in range(spec.num_microbatches)]
        for record in sorted((r for records in arrived for r in records), key=lambda r: r[_PLACE]):
            slot, _ = record.pop(_PLACE)
            by_slot[slot].append(record)
        templates = pulled + [self._template] * (spec.num_microbatches - len(pulled))
        return [self._merge(chosen, template, spec.keep_pixels) for chosen, template in zip(by_slot, templates)]

    def _merge(self, samples: list[Sample], template: Any, keep_pixels: bool) -> Any:
        if template is None:
            raise ValueError(
                "this rank's loader has yielded no batch at all, so the type of a batch is unknown here; "
                "give every rank data"
            )
        codec = self._codec_of(template)
        if not samples:
            assert self._spare is not None  # set together with the template
            spare = self._spare if keep_pixels else codec.without_pixels(self._spare)
            samples = [codec.idle(spare)]
        return codec.merge(samples, template)

    def _as_loaded(self, pulled: list[Any], spec: StepSpec) -> list[Any]:
        """The loader's own batches; rebuilt only where this stage must do without pixels."""
        if spec.keep_pixels:
            return pulled
        codec = self._codec_of(pulled[0])
        return [codec.merge([codec.without_pixels(s) for s in codec.split(batch)], batch) for batch in pulled]

    def _keep_spare(self, samples: list[Sample], items: StepItems) -> None:
        """Remember the cheapest sample of this rank: idle micro batches are made of it."""
        if samples:
            self._spare = samples[int(items.costs[items.home == self._rank].argmin())]

    def _measure(self, step: int, items: StepItems, stay: BalancePlan, plan: BalancePlan) -> BalanceMetrics:
        every_slot = self._options.balance_every_slot
        before, after = slot_costs(items, stay), slot_costs(items, plan)
        moved = items.home != plan.assignment
        total = items.sizes.sum()
        metrics = BalanceMetrics(
            step=step,
            imbalance_before=step_imbalance(before, every_slot),
            imbalance_after=step_imbalance(after, every_slot),
            bytes_moved=int(items.sizes[moved].sum()),
            moved_share=float(items.sizes[moved].sum() / total) if total else 0.0,
            moves_skipped=self._num_skipped,
            idle_microbatches=int((plan.slot_counts() == 0).sum()),
        )
        if self._options.verbose and self._rank == 0:
            print(
                f"data balance, step {step}: imbalance {metrics.imbalance_before:.3f} -> "
                f"{metrics.imbalance_after:.3f}, {metrics.bytes_moved} bytes moved; load per rank before "
                f"{_brief(before.sum(axis=1))}, after {_brief(after.sum(axis=1))}",
                flush=True,
            )
        return metrics

    def _fit_if_due(self, step: int) -> None:
        if self._fitter is None or not self._fitter.is_due(step):
            return
        coefficients = self._fitter.coefficients()
        if self._agreement is not None:
            coefficients = self._agreement.same_coefficients(step, coefficients)
        if np.isfinite(coefficients).all():
            self.use_cost_model(from_coefficients(coefficients))
            if self._rank == 0:
                print(f"data balance: cost model fitted at step {step}: {self.cost_model}", flush=True)
        self._fitter = None


@dataclass(frozen=True)
class _LengthTable:
    """Per sample of all ranks: sums [n, 4] (see `SampleCostModel.cost`), bytes, rank and micro batch as loaded.

    And whether every rank has all its micro batches, and whether any rank's codec pads.
    """

    sums: np.ndarray
    num_bytes: np.ndarray
    home: np.ndarray
    home_slot: np.ndarray
    is_complete: bool
    pads: bool


def _brief(loads: np.ndarray) -> str:
    return "[" + ", ".join(f"{load:.3g}" for load in loads) + "]"
