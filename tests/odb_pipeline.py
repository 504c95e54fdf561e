"""A small ODB pipeline over several ranks and workers, for tests with real processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.energon import Sample, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers import BatchDataset

from length_sort.coordinator import Coordinator
from length_sort.odb_dataset import ODBGroupDataset
from length_sort.odb_group import SampleGroup
from tests.streams import LengthSample, ListDataset


@dataclass
class GroupBatch(Sample):
    """What a test wants to know of a batch."""

    info: list[int]
    samples: list[str]
    template: list[str]


def to_batch(groups: list[SampleGroup]) -> GroupBatch:
    (group,) = groups
    return GroupBatch(
        __key__=group.__key__,
        __restore_key__=(),
        info=group.info.figures(),
        samples=[sample.__key__ for sample in group.samples],
        template=[sample.__key__ for sample in group.template],
    )


class WorkerLengths(ListDataset):
    """A stream of its own for every worker of every rank; some are much shorter than others."""

    def __init__(self, worker_config: WorkerConfig, *, num_samples: int, repeat: bool) -> None:
        super().__init__([0], worker_config=worker_config)
        self.num_samples = num_samples
        self.repeat = repeat

    def _lengths_of(self, worker: int) -> list[int]:
        rng = random.Random(worker)
        count = self.num_samples // 4 if worker % 4 == 3 else self.num_samples + worker
        return [min(int(rng.lognormvariate(3, 1)) + 1, 200) for _ in range(count)]

    def _sample_of(self, worker: int, index: int) -> LengthSample:
        length = self._lengths_of(worker)[index]
        return LengthSample(
            __key__=f"{worker}-{index}", __restore_key__=("WorkerLengths", worker, index), total_len=length
        )

    def __iter__(self) -> Iterator[LengthSample]:
        worker = self.worker_config.global_worker_id()
        count = len(self._lengths_of(worker))
        while True:
            while self._next < count:
                self._next += 1
                yield self._sample_of(worker, self._next - 1)
            self._next = 0
            if not self.repeat:
                return

    def restore_sample(self, restore_key: Any) -> LengthSample:
        assert WorkerConfig.active_worker_config is not None, "restored outside an active worker"
        return self._sample_of(*restore_key[1:])


def odb_batches(
    worker_config: WorkerConfig,
    coordinator: Coordinator,
    *,
    num_samples: int = 40,
    repeat: bool = False,
    **options: Any,
) -> SavableDataset[GroupBatch]:
    """Batches of one group each, as the glue builds them."""
    defaults = dict(token_budget=200, buffer_size=16, loss_tokens_fn=lambda sample: sample.total_len // 2)
    groups = ODBGroupDataset(
        WorkerLengths(worker_config, num_samples=num_samples, repeat=repeat),
        **{**defaults, **options},
        coordinator=coordinator,
        worker_config=worker_config,
    )
    return BatchDataset(groups, batch_size=1, batcher=to_batch, batcher_stateless=True, worker_config=worker_config)
