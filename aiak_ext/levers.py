"""Puts the wrapper that the flags ask for into a training pipeline while Energon builds it."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.energon import TaskEncoder
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.worker import WorkerConfig
from megatron.energon.wrappers import BatchDataset, MapDataset, PackingDataset
from megatron.energon.wrappers.base import BaseWrapperDataset

from aiak_ext.config import ExtensionConfig
from aiak_ext.odb_batches import GroupBatcher, check_hooks, unchanged
from aiak_ext.packing_restore import mend_restore_with_postencode
from aiak_ext.startup import announce, first_pool_line, length_sort_line, odb_line
from aiak_ext.worker_counters import attach_counters
from length_sort import (
    LengthPoolSortDataset,
    LocalCoordinator,
    ODBGroupDataset,
    StoreCoordinator,
    store_coordinator,
)

BuildBatch = Callable[..., SavableDataset[Any]]

_levers_are_off: contextvars.ContextVar[bool] = contextvars.ContextVar("levers_are_off", default=False)


@contextmanager
def levers_off() -> Iterator[None]:
    """Pipelines built inside are plain Energon: for hosts that build validation sets as they build training sets."""
    token = _levers_are_off.set(True)
    try:
        yield
    finally:
        _levers_are_off.reset(token)


class Levers:
    """The levers of one task encoder."""

    def __init__(
        self,
        config: ExtensionConfig,
        *,
        length_fn: Callable[[Any], float],
        patches_fn: Callable[[Any], int],
        cost_fn: Callable[[Any], float] | None,
    ) -> None:
        """
        Args:
            config: Which levers, and how.
            length_fn: Length of a sample.
            patches_fn: Vision patches of a sample, for ``--odb-max-patches``.
            cost_fn: Compute cost of a sample, for ``--odb-max-cost`` and the order of ODB's groups.
        """
        self.config = config
        self._length_fn = length_fn
        self._patches_fn = patches_fn
        self._cost_fn = cost_fn

    def build_batch(
        self,
        task_encoder: TaskEncoder[Any, Any, Any, Any],
        inner: BuildBatch,
        dataset: SavableDataset[Any],
        *,
        batch_size: int | None,
        batch_drop_last: bool,
        packing_buffer_size: int | None,
        worker_config: WorkerConfig,
    ) -> SavableDataset[Any]:
        """`inner` (the task encoder's own ``build_batch``) with the active lever's wrapper in its place.

        After ``encode_sample``; between ``preencode_sample`` and ``postencode_sample`` where those exist, since the
        former's result is the light one; after the packer with Energon's packing on.
        """
        build = functools.partial(inner, batch_drop_last=batch_drop_last, worker_config=worker_config)
        if _levers_are_off.get():
            return build(dataset, batch_size=batch_size, packing_buffer_size=packing_buffer_size)
        announce(length_sort_line(self.config.length_sort), worker_config)
        announce(odb_line(self.config.odb), worker_config)
        if self.config.odb.active:
            return self._build_groups(task_encoder, build, dataset, packing_buffer_size, worker_config)
        if not self.config.length_sort.active:
            return build(dataset, batch_size=batch_size, packing_buffer_size=packing_buffer_size)
        if packing_buffer_size is None:
            wrapper = self._length_sort(dataset, worker_config)
            result = build(wrapper, batch_size=batch_size, packing_buffer_size=None)
        else:
            result = build(dataset, batch_size=batch_size, packing_buffer_size=packing_buffer_size)
            packer = _find(result, PackingDataset)
            mend_restore_with_postencode(packer)
            wrapper = self._length_sort(packer, worker_config)
            result = _replaced(result, packer, wrapper)
        _note_lost_samples(result, wrapper)
        return result

    def _length_sort(self, dataset: SavableDataset[Any], worker_config: WorkerConfig) -> LengthPoolSortDataset[Any]:
        config = self.config.length_sort
        wrapper: LengthPoolSortDataset[Any] = LengthPoolSortDataset(
            dataset,
            pool_size=config.pool_size,
            length_fn=self._length_fn,
            ascending=not config.descending,
            seed=config.seed,
            shuffle_block=config.shuffle_block,
            separate_packed=config.separate_packed,
            warmup_pools=config.warmup_pools,
            initial_pool_size=config.initial_pool_size,
            max_pool_bytes=config.max_pool_bytes,
            allow_inexact_resume=config.allow_inexact_resume,
            worker_config=worker_config,
        )
        wrapper.on_first_pool = lambda pool, seconds: announce(first_pool_line(pool, seconds), worker_config)
        return wrapper

    def _build_groups(
        self,
        task_encoder: TaskEncoder[Any, Any, Any, Any],
        build: BuildBatch,
        dataset: SavableDataset[Any],
        packing_buffer_size: int | None,
        worker_config: WorkerConfig,
    ) -> SavableDataset[Any]:
        packed = self.config.odb.policy == "packed"
        check_hooks(task_encoder, packed=packed)
        has_packer = packing_buffer_size is not None
        if has_packer:
            if packed:
                raise ValueError(
                    f"--odb-policy packed with Energon's packing on (packing_buffer_size {packing_buffer_size}): packs "
                    "would be packed again. Leave one of the two out."
                )
            dataset = build(dataset, batch_size=None, packing_buffer_size=packing_buffer_size)
            mend_restore_with_postencode(_find(dataset, PackingDataset))
        groups = self._odb(dataset, worker_config)
        # Energon's own stages, which hosts look for and saved states follow, over one group at a time. The hooks run
        # inside the batcher, so that a failure of any of them still leaves one batch for the group.
        result = build(groups, batch_size=1, packing_buffer_size=None)
        for stage in _chain(result, groups):
            if isinstance(stage, MapDataset) and stage.map_fn in (
                task_encoder.encode_batch,
                task_encoder.postencode_sample,
            ):
                stage.map_fn, stage.stateless_map_fn = unchanged, True
        batches = _find(result, BatchDataset)
        batcher = GroupBatcher(
            task_encoder,
            groups,
            packed=packed,
            postencode=task_encoder._is_overridden(task_encoder.postencode_sample) and not has_packer,
            failure_tolerance=batches.failure_tolerance,
            worker_config=worker_config,
        )
        batches.batcher, batches.batcher_stateless = batcher.batch_group, batcher.stateless
        return result

    def _odb(self, dataset: SavableDataset[Any], worker_config: WorkerConfig) -> ODBGroupDataset:
        config = self.config.odb
        rank, world_size = worker_config.rank, worker_config.world_size
        coordinator: LocalCoordinator | StoreCoordinator
        if config.sync == "none" or world_size == 1:
            coordinator = LocalCoordinator(rank=rank, world_size=world_size)
        else:
            coordinator = store_coordinator(worker_config.data_parallel_group, timeout_s=config.timeout_seconds)
        if config.max_cost is not None and self._cost_fn is None:
            raise ValueError(
                f"--odb-max-cost {config.max_cost}, but nothing measures a sample's cost: the limit would never hold. "
                "Give the task encoder cost_fn=, e.g. from data_balance.CostModel.for_transformer(...).cost."
            )
        return ODBGroupDataset(
            dataset,
            token_budget=config.token_budget,
            buffer_size=config.buffer_size,
            length_fn=self._length_fn,  # type: ignore[arg-type]  # checked per sample
            patches_fn=self._patches_fn if config.max_patches is not None else None,
            max_patches=config.max_patches,
            cost_fn=self._cost_fn,
            max_cost=config.max_cost,
            policy=config.policy,
            target=config.target,
            group_order=config.group_order,
            join=config.join_mode == "join",
            max_deferrals=config.max_deferrals,
            coordinator=coordinator,
            worker_config=worker_config,
        )


def _find(dataset: SavableDataset[Any], kind: type[Any]) -> Any:
    if isinstance(dataset, kind):
        return dataset
    assert isinstance(dataset, BaseWrapperDataset)
    return dataset._find_wrapped_dataset(kind)


def _chain(dataset: SavableDataset[Any], end: SavableDataset[Any]) -> Iterator[BaseWrapperDataset[Any, Any]]:
    """The wrappers from `dataset` down to `end`, without `end`."""
    while dataset is not end:
        assert isinstance(dataset, BaseWrapperDataset)
        yield dataset
        dataset = dataset.dataset


def _replaced(dataset: SavableDataset[Any], old: SavableDataset[Any], new: SavableDataset[Any]) -> SavableDataset[Any]:
    """`dataset` with `old` somewhere under it replaced by `new`."""
    if dataset is old:
        return new
    parent = list(_chain(dataset, old))[-1]
    parent.datasets = (new,)
    parent.reset_state_own()  # buffers that the parent may have made hold the dataset they read from
    return dataset


def _note_lost_samples(dataset: SavableDataset[Any], wrapper: LengthPoolSortDataset[Any]) -> None:
    """Lets the wrapper know of samples that a later hook skips or fails on, so that it can realign the ranks.

    The last hook's result, the batch, takes the wrapper's counters along.
    """
    batch_size = 1
    for stage in reversed(list(_chain(dataset, wrapper))):
        is_last = stage is dataset
        if isinstance(stage, BatchDataset):
            batch_size = stage.batch_size
            stage.batcher = _reporting(stage.batcher, wrapper, None, is_last)
        elif isinstance(stage, MapDataset):
            stage.map_fn = _reporting(stage.map_fn, wrapper, batch_size, is_last)


def _reporting(
    hook: Callable[[Any], Any], wrapper: LengthPoolSortDataset[Any], num_samples: int | None, is_last: bool
) -> Callable[[Any], Any]:
    """`hook`, reporting to `wrapper` the samples that an exception of it costs: `num_samples`, or its argument's.

    Generators may yield any number of batches for one argument, so they are left alone.
    """
    if inspect.isgeneratorfunction(hook):
        return hook

    @functools.wraps(hook)
    def reporting(argument: Any) -> Any:
        try:
            result = hook(argument)
        except Exception as error:
            wrapper.note_lost(num_samples or len(argument), f"{hook.__name__}: {type(error).__name__}")
            raise
        if is_last:
            attach_counters(result, _counters(wrapper))
        return result

    return reporting


def _counters(wrapper: LengthPoolSortDataset[Any]) -> dict[str, int]:
    return {
        "waiting_samples": wrapper.num_pooled,
        "waiting_bytes": wrapper.num_pooled_bytes,
        "reencoded_samples": wrapper.num_reencoded,
        "lost_samples": wrapper.num_lost_total,
    }
