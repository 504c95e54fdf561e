"""Puts the wrapper that the flags ask for into a training pipeline while Energon builds it."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.worker import WorkerConfig
from megatron.energon.wrappers import BatchDataset, MapDataset, PackingDataset
from megatron.energon.wrappers.base import BaseWrapperDataset

from aiak_ext.config import ExtensionConfig
from aiak_ext.packing_restore import mend_restore_with_postencode
from aiak_ext.startup import announce, first_pool_line, length_sort_line
from length_sort import LengthPoolSortDataset

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

    def __init__(self, config: ExtensionConfig, length_fn: Callable[[Any], float]) -> None:
        self.config = config
        self.length_fn = length_fn

    def build_batch(
        self,
        inner: BuildBatch,
        dataset: SavableDataset[Any],
        *,
        packing_buffer_size: int | None,
        worker_config: WorkerConfig,
        **options: Any,
    ) -> SavableDataset[Any]:
        """`inner` (Energon's ``build_batch``) with the active lever's wrapper in its place.

        After ``encode_sample``; between ``preencode_sample`` and ``postencode_sample`` where those exist, since the
        former's result is the light one; after the packer with Energon's packing on.
        """
        build = functools.partial(
            inner, packing_buffer_size=packing_buffer_size, worker_config=worker_config, **options
        )
        if _levers_are_off.get():
            return build(dataset)
        announce(length_sort_line(self.config.length_sort), worker_config)
        if not self.config.length_sort.active:
            return build(dataset)
        if packing_buffer_size is None:
            wrapper = self._length_sort(dataset, worker_config)
            result = build(wrapper)
        else:
            result = build(dataset)
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
            length_fn=self.length_fn,
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
    """Lets the wrapper know of samples that a later hook skips or fails on, so that it can realign the ranks."""
    batch_size = 1
    for stage in reversed(list(_chain(dataset, wrapper))):
        if isinstance(stage, BatchDataset):
            batch_size = stage.batch_size
            stage.batcher = _reporting(stage.batcher, wrapper, None)
        elif isinstance(stage, MapDataset):
            stage.map_fn = _reporting(stage.map_fn, wrapper, batch_size)


def _reporting(
    hook: Callable[[Any], Any], wrapper: LengthPoolSortDataset[Any], num_samples: int | None
) -> Callable[[Any], Any]:
    """`hook`, reporting to `wrapper` the samples that an exception of it costs: `num_samples`, or its argument's.

    Generators may yield any number of batches for one argument, so they are left alone.
    """
    if inspect.isgeneratorfunction(hook):
        return hook

    @functools.wraps(hook)
    def reporting(argument: Any) -> Any:
        try:
            return hook(argument)
        except Exception as error:
            wrapper.note_lost(num_samples or len(argument), f"{hook.__name__}: {type(error).__name__}")
            raise

    return reporting
