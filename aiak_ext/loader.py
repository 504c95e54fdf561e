"""Energon's savable loader with an exact save right after a restore, and levers switched on or off in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron.energon import SavableDataLoader, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetWrapper,
)
from megatron.energon.wrappers.base import BaseWrapperDataset
from megatron.energon.wrappers.gc_dataset import GC_DEFAULT_EVERY_N_ITER

from aiak_ext.loader_state import load_loader_state, save_loader_state
from aiak_ext.startup import announce
from aiak_ext.state_tree import DatasetState, states_beside_datasets, worker_dataset_states
from data_balance import loader_state
from length_sort import LengthPoolSortDataset, ODBGroupDataset, sample_length

T = TypeVar("T")
Lever = TypeVar("Lever", LengthPoolSortDataset, ODBGroupDataset)

# A pooled sample may take this long to read and encode before the watchdog speaks up about the first batch.
FIRST_POOL_SECONDS_PER_SAMPLE = 1.0


class LengthAwareDataLoader(SavableDataLoader[T], Generic[T]):
    """SavableDataLoader that resumes exactly, also when it is saved a few batches after a restore."""

    _has_workers: bool
    _iterator: Any  # torch's iterator over the worker processes, None until they start

    def __init__(
        self, dataset: SavableDataset[T], *, length_fn: Callable[[Any], float] = sample_length, **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self._length_fn = length_fn
        self._closed = False
        # Per worker slot: the batch count and the state that this loader starts from.
        self._start_counters = list(self._worker_sample_counters)
        self._start_states = [SavableDatasetCheckpoint(state=None, offset=0) for _ in self._worker_sample_counters]
        odb = find_lever(self.dataset, ODBGroupDataset)
        if odb is not None and isinstance(self.dataset, SavableDatasetWrapper):
            odb.begin_loader(prefetch_factor=self.prefetch_factor, num_snapshots=self.dataset.n_checkpoints)

    def __iter__(self) -> Iterator[T]:
        if self._closed:
            raise RuntimeError("The loader was closed: new workers would start the data over. Build a new loader.")
        return super().__iter__()

    def save_state_rank(self) -> SavableDataLoaderState | None:
        # iter() alone starts no worker, yet Energon then waits for an answer from the workers.
        has_workers, self._has_workers = self._has_workers, self._has_workers and self._iterator is not None
        try:
            state = super().save_state_rank()
        finally:
            self._has_workers = has_workers
        if state is not None and isinstance(self.dataset, SavableDatasetWrapper):
            self._keep_start_states(state)
        return state

    def _keep_start_states(self, state: SavableDataLoaderState) -> None:
        # A worker that is still starting may answer before it has restored its state (Energon starts the thread that
        # answers first). Until it has emitted a batch its position is the one that the loader started from.
        for slot, (count, start) in enumerate(zip(self._worker_sample_counters, self._start_counters)):
            if count == start:
                state.worker_states[slot] = self._start_states[slot]

    def restore_state_rank(self, state: SavableDataLoaderState | None) -> None:
        """Restores this rank's state, before the first batch.

        A state that was saved with length sort also restores into a pipeline without it: what is pooled goes out
        first. A state saved without a lever restores into a pipeline with it.

        Raises:
            ValueError: the state belongs to another number of workers, rank, seed or lever.
        """
        if state is not None:
            self._check_num_workers(state)
            for slot, worker_state in worker_dataset_states(state).items():
                self._match_levers(worker_state, slot)
        super().restore_state_rank(state)
        if state is not None and isinstance(self.dataset, SavableDatasetWrapper):
            self._count_replayed_batches(state)

    def _check_num_workers(self, state: SavableDataLoaderState) -> None:
        saved, now = len(state.worker_states), max(self.num_workers, 1)
        if saved != now:
            raise ValueError(
                f"The saved loader state has {saved} workers and this run {now} per rank: samples would be lost or "
                "repeated. Resume with the same --num-workers, use `energon checkpoint redist`, or start the data over "
                "with --restart-data."
            )

    def _match_levers(self, worker_state: DatasetState, slot: int) -> None:
        """Makes wrapper and state agree on whether there is a pool, and refuses a state of another worker or lever."""
        for parent, dataset, parent_state, state in states_beside_datasets(self.dataset, worker_state):
            if isinstance(dataset, ODBGroupDataset):
                dataset.check_state(state, slot)
                return
            if state["__class__"] == ODBGroupDataset.__name__:
                raise ValueError(
                    "The saved state belongs to ODB and this run has --odb-token-budget 0: the samples in its buffers "
                    "would be lost. Resume with the --odb-* flags it was saved under, or start the data over with "
                    "--restart-data."
                )
            if state["__class__"] == LengthPoolSortDataset.__name__:
                self._match_length_sort(parent, dataset, parent_state, state, slot)
                return

    def _match_length_sort(
        self, parent: Any, dataset: Any, parent_state: DatasetState, state: DatasetState, slot: int
    ) -> None:
        if isinstance(dataset, LengthPoolSortDataset):
            dataset.check_state(state, slot)
        elif LengthPoolSortDataset.has_drained(state):
            parent_state["datasets"] = [state["datasets"][0]]
        else:
            # Length sort was switched off: emit what is pooled, then pass the stream through.
            draining: LengthPoolSortDataset[Any] = LengthPoolSortDataset(
                dataset,
                pool_size=0,
                seed=state["seed"],
                length_fn=self._length_fn,
                allow_inexact_resume=True,
                worker_config=self.worker_config,
            )
            draining.check_state(state, slot)
            parent.datasets = (draining,)

    def _count_replayed_batches(self, state: SavableDataLoaderState) -> None:
        # A checkpoint is a worker's snapshot and the number of batches to replay from there. Energon sets its count
        # of emitted batches to the snapshot's; a save before a worker's next batch would then repeat the replayed.
        for slot, worker_state in enumerate(state.worker_states):
            if worker_state.state is not None:
                self._worker_sample_counters[slot] += worker_state.offset
        self._start_counters = list(self._worker_sample_counters)
        self._start_states = [
            SavableDatasetCheckpoint(state=worker_state.state, offset=worker_state.offset)
            for worker_state in state.worker_states
        ]
        num_replayed = [worker_state.offset for worker_state in state.worker_states]
        length_sort = find_lever(self.dataset, LengthPoolSortDataset)
        if length_sort is not None:
            batch_size = self._get_batch_size() or 1
            length_sort.expect_replay([num_batches * batch_size for num_batches in num_replayed])
        odb = find_lever(self.dataset, ODBGroupDataset)
        if odb is not None:
            odb.expect_replay(num_replayed)

    def close(self) -> None:
        """Stops the worker processes now (Energon alone takes about 5 s per worker at exit)."""
        self._closed = True
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None
        self._epoch_iterator = None


def find_lever(dataset: Any, kind: type[Lever]) -> Lever | None:
    """The wrapper of one lever in a dataset, or in the dataset inside a loader."""
    inner = dataset.dataset if isinstance(dataset, SavableDatasetWrapper) else dataset
    if isinstance(inner, kind):
        return inner
    found = inner._find_wrapped_dataset(kind) if isinstance(inner, BaseWrapperDataset) else None
    assert found is None or isinstance(found, kind)
    return found


def get_savable_loader(
    dataset: SavableDataset[T],
    *,
    worker_config: WorkerConfig | None = None,
    gc_collect_every_n_steps: int | None = None,
    length_fn: Callable[[Any], float] = sample_length,
    **options: Any,
) -> LengthAwareDataLoader[T]:
    """Energon's function of this name with the loader that resumes exactly; takes all of its options.

    Args:
        dataset: The dataset, as built by Energon.
        worker_config: The dataset's own, where given (Energon deprecates it).
        gc_collect_every_n_steps: Batches between garbage collections in a worker; a collection walks the whole pool,
            so the default is once per pool, and Energon's own where there is none.
        length_fn: Used only to drain a pool after length sort was switched off.
        options: ``checkpoint_every_sec``, ``prefetch_factor``, ``watchdog_timeout_seconds`` ... of Energon's function.

    Raises:
        ValueError: `worker_config` is not the dataset's.
    """
    if worker_config is not None and worker_config != dataset.worker_config:
        raise ValueError(
            f"worker_config (rank {worker_config.rank} of {worker_config.world_size}, {worker_config.num_workers} "
            "workers) differs from the dataset's: it would have no effect. Build the dataset with it."
        )
    if gc_collect_every_n_steps is None:
        length_sort = find_lever(dataset, LengthPoolSortDataset)
        pool_size = 0 if length_sort is None else length_sort.pool_size
        gc_collect_every_n_steps = max(GC_DEFAULT_EVERY_N_ITER, pool_size)
    return LengthAwareDataLoader(
        dataset, gc_collect_every_n_steps=gc_collect_every_n_steps, length_fn=length_fn, **options
    )


class TrainLoader(Generic[T]):
    """A training loop's own loader: batches by `next()`, state by value or as a file per data-parallel rank.

    Also what Megatron's loop expects of an external data iterator (``save_state()``). Iterating again after the end
    of an epoch goes on with the next one.
    """

    def __init__(self, loader: LengthAwareDataLoader[T]) -> None:
        self.loader = loader
        self._iterator: Iterator[T] | None = None

    def __iter__(self) -> TrainLoader[T]:
        return self

    def __next__(self) -> T:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise

    @property
    def dp_rank(self) -> int:
        return self.loader.worker_config.rank

    def save_state(self) -> SavableDataLoaderState | None:
        """State of this rank: what has been taken from the loader so far, and nothing that waits in queues."""
        return self.loader.save_state_rank()

    def restore_state(self, state: Any) -> None:
        """Restores this rank's state, also one saved under the data balance; before the first batch."""
        self.loader.restore_state_rank(loader_state(state))

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Writes ``train_dataloader_dprank%03d.pt`` of this rank into `directory`."""
        return save_loader_state(self.save_state(), directory, self.dp_rank)

    def load_checkpoint(self, directory: str | Path, *, restart_data: bool = False) -> None:
        """Restores what `save_checkpoint` wrote; with `restart_data` (``--restart-data``) starts the data over instead.

        Raises:
            ValueError: the file is missing, unreadable, or of another setting.
        """
        if restart_data:
            announce(f"data: started over (--restart-data), {directory} ignored", self.loader.worker_config)
            return
        self.restore_state(load_loader_state(directory, self.dp_rank))

    def close(self) -> None:
        """Stops the worker processes."""
        self._iterator = None
        self.loader.close()


def build_train_loader(
    dataset: SavableDataset[T],
    *,
    watchdog_timeout_seconds: float | None = 60,
    watchdog_initial_timeout_seconds: float | None = None,
    **options: Any,
) -> TrainLoader[T]:
    """A :class:`TrainLoader` over `dataset`, with a watchdog that allows for filling the first pool.

    Args:
        dataset: The training dataset, as built by Energon.
        watchdog_timeout_seconds: Longest wait for a later batch before the watchdog reports; None for none.
        watchdog_initial_timeout_seconds: The same for the first batch (default: by the pool size).
        options: Of :func:`get_savable_loader`.
    """
    length_sort = find_lever(dataset, LengthPoolSortDataset)
    if watchdog_timeout_seconds is not None and watchdog_initial_timeout_seconds is None and length_sort is not None:
        watchdog_initial_timeout_seconds = (
            watchdog_timeout_seconds + FIRST_POOL_SECONDS_PER_SAMPLE * length_sort.pool_size
        )
    return TrainLoader(
        get_savable_loader(
            dataset,
            watchdog_timeout_seconds=watchdog_timeout_seconds,
            watchdog_initial_timeout_seconds=watchdog_initial_timeout_seconds,
            **options,
        )
    )
