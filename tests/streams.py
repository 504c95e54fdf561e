"""In-memory Energon datasets for tests: a finite savable stream, and driving a wrapper as Energon's loader does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import FlexState, Sample, SavableDataset
from megatron.energon.wrappers.base import BaseWrapperDataset


@dataclass
class LengthSample(Sample):
    """A sample that is only its length, and optionally a payload or packed sub-sequence boundaries."""

    total_len: Any = 0
    cu_lengths: Any = None
    payload: Any = None


class ListDataset(SavableDataset[LengthSample]):
    """Yields one sample per entry of `lengths`, epoch after epoch; restores any of them from its key.

    As Energon's own core datasets: the position is saved, the state at the end of an epoch is its end.
    """

    _savable_fields = ("_next",)

    def __init__(
        self,
        lengths: Sequence[Any],
        *,
        worker_config: WorkerConfig | None = None,
        make: Callable[[int, Any], dict[str, Any]] | None = None,
        restorable: bool = True,
    ) -> None:
        super().__init__(worker_config or single_worker())
        self.lengths = list(lengths)
        self.make = make or (lambda index, length: {"total_len": length})
        self.restorable = restorable
        self.num_encoded = 0
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._next = 0

    def _sample(self, index: int) -> LengthSample:
        self.num_encoded += 1
        return LengthSample(
            __key__=f"sample-{index:05d}",
            __restore_key__=("ListDataset", index),
            **self.make(index, self.lengths[index]),
        )

    def __iter__(self) -> Iterator[LengthSample]:
        while self._next < len(self.lengths):
            self._next += 1
            yield self._sample(self._next - 1)
        self._next = 0

    def restore_sample(self, restore_key: Any) -> LengthSample:
        assert self.restorable and restore_key[0] == "ListDataset"
        assert WorkerConfig.active_worker_config is not None, "restored outside an active worker"
        return self._sample(restore_key[1])

    def can_restore_sample(self) -> bool:
        return self.restorable

    def len_worker(self, worker_idx: int | None = None) -> int:
        return len(self.lengths)

    def worker_has_samples(self) -> bool:
        return len(self.lengths) > 0

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "num_samples": len(self.lengths)}


def single_worker(rank: int = 0, world_size: int = 1) -> WorkerConfig:
    return WorkerConfig(rank=rank, world_size=world_size, num_workers=0)


@contextmanager
def active(worker_config: WorkerConfig) -> Iterator[None]:
    """Energon's bookkeeping around each `next()` of a worker's stream."""
    worker_config.worker_activate(0)
    try:
        yield
    finally:
        worker_config.worker_deactivate()


def take(iterator: Iterator[Any], count: int, worker_config: WorkerConfig) -> list[Any]:
    """The next `count` elements, fewer at the end of the stream."""
    taken = []
    for _ in range(count):
        with active(worker_config):
            try:
                taken.append(next(iterator))
            except StopIteration:
                break
    return taken


def drain(dataset: SavableDataset[Any]) -> list[Any]:
    """One epoch of the dataset, to its end."""
    return take(iter(dataset), 10**9, dataset.worker_config)


def stored(state: FlexState) -> FlexState:
    """The state as it comes back from a file; refuses anything but plain builtins and Energon's state class."""
    _check_plain(state)
    return pickle.loads(pickle.dumps(state))


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            assert type(key) is str, f"key {key!r}"
            _check_plain(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check_plain(entry)
    else:
        assert value is None or type(value) in (str, int, float, bool, bytes), f"{type(value)} in a saved state"
        assert not isinstance(value, torch.Tensor)


def check_resume_everywhere(
    build: Callable[[], BaseWrapperDataset[Any, Any]],
    identify: Callable[[Any], Any],
    *,
    num_epochs: int = 1,
    num_resumes: int = 1,
    every: int = 1,
) -> list[Any]:
    """The one resume checker: a run saved and restored at any position continues as the straight run does.

    For every `every`-th position of `num_epochs` epochs: emit up to there, save, restore into a fresh wrapper,
    restore-then-save must give the same state, and the rest must equal the straight run's, epoch ends included.
    With `num_resumes` > 1 the position is reached through that many resumes of one run.

    Returns the straight run: one list of `identify(sample)` per epoch.
    """
    reference = build()
    straight = [[identify(sample) for sample in drain(reference)] for _ in range(num_epochs)]
    flat = [(epoch, element) for epoch, elements in enumerate(straight) for element in [*elements, None]]
    for position in range(0, len(flat), every):
        stops = [position * (resume + 1) // num_resumes for resume in range(num_resumes)]
        seen: list[Any] = []
        dataset = build()
        iterator = iter(dataset)
        for stop in stops:
            iterator = _advance(dataset, iterator, seen, stop, identify)
            state = stored(dataset.save_state())
            dataset = build()
            dataset.restore_state(stored(state))
            assert stored(dataset.save_state()) == state, f"restore then save at position {stop} changed the state"
            iterator = iter(dataset)
        _advance(dataset, iterator, seen, len(flat), identify)
        assert seen == [element for _, element in flat], f"resumed at {stops}"
    return straight


def _advance(
    dataset: BaseWrapperDataset[Any, Any],
    iterator: Iterator[Any],
    seen: list[Any],
    until: int,
    identify: Callable[[Any], Any],
) -> Iterator[Any]:
    """Goes on until `until` events (samples, and None for the end of an epoch) have been seen."""
    while len(seen) < until:
        got = take(iterator, 1, dataset.worker_config)
        if got:
            seen.append(identify(got[0]))
        else:
            seen.append(None)
            iterator = iter(dataset)
    return iterator
