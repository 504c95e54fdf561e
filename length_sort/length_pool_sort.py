"""LengthPoolSortDataset: emit samples in pools sorted by length and shuffled alike on all ranks."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from megatron.energon.flavors.base_dataset import FlexState, SavableDataset
from megatron.energon.worker import WorkerConfig
from megatron.energon.wrappers.base import BaseWrapperDataset

from length_sort.pool_buffer import PoolBuffer, PooledSample, pooled_state, restored_pool
from length_sort.pool_order import PoolRule, read_ahead_count
from length_sort.sample_errors import SampleErrors
from length_sort.sample_length import is_packed, sample_length

T_sample = TypeVar("T_sample")
logger = logging.getLogger(__name__)

DEFAULT_MAX_POOL_BYTES = 4 * 1024**3
STATE_VERSION = 1


class LengthPoolSortDataset(BaseWrapperDataset[T_sample, T_sample], Generic[T_sample]):
    """Collects `pool_size` samples, sorts them by length, shuffles them with a seed shared by all ranks, emits them.

    At a given step every rank then trains a sample of about the same length, so none waits for the others (seed
    document: the length-pool-sort skill; the order itself is in :mod:`length_sort.pool_order`). While one pool is
    emitted the next is read, one sample for one, so memory stays at one pool and no boundary stalls.

    The saved state holds a restore key and a length per pooled sample. A restored pool is re-read sample by sample,
    each when its turn comes.
    """

    def __init__(
        self,
        dataset: SavableDataset[T_sample],
        *,
        pool_size: int,
        length_fn: Callable[[T_sample], float] = sample_length,
        ascending: bool = True,
        seed: int = 42,
        shuffle_block: int = 1,
        separate_packed: bool = False,
        warmup_pools: int = 0,
        initial_pool_size: int | None = None,
        max_pool_bytes: int = DEFAULT_MAX_POOL_BYTES,
        allow_inexact_resume: bool = False,
        failure_tolerance: int = 100,
        worker_config: WorkerConfig,
    ) -> None:
        """
        Args:
            dataset: Stream of encoded (or pre-encoded) samples.
            pool_size: Samples per pool, a multiple of `shuffle_block`. 0 emits what a restored state still pools,
                then passes the stream through.
            length_fn: Length of a sample, or any finite number to sort by, e.g. its compute cost; the same function
                on every rank.
            ascending: Sort short to long.
            seed: Base seed of the pools' shuffles; the same on every rank.
            shuffle_block: Samples that stay neighbours in length; the micro batch size keeps padding low.
            separate_packed: Order packed samples (more than two ``cu_lengths``) apart from the others.
            warmup_pools: Pools over which the size grows from `initial_pool_size` to `pool_size`.
            initial_pool_size: Size of the first warm-up pool (default: `shuffle_block`).
            max_pool_bytes: Bytes of samples kept per worker; beyond, samples are re-encoded when emitted.
            allow_inexact_resume: Accept an upstream that cannot restore samples; a resume then loses the pool.
            failure_tolerance: Consecutive samples without a usable length before the run is stopped (0: never),
                as in Energon's own wrappers.
            worker_config: The upstream's worker config.

        Raises:
            ValueError: a size is out of range, or the upstream cannot restore samples.
        """
        super().__init__(dataset, worker_config=worker_config)
        initial_pool_size = min(shuffle_block, pool_size) if initial_pool_size is None else initial_pool_size
        _check_sizes(pool_size, shuffle_block, warmup_pools, initial_pool_size, max_pool_bytes)
        self._exact = dataset.can_restore_sample()
        if not self._exact and not allow_inexact_resume:
            raise ValueError(
                f"Length sort needs an upstream that can restore samples, and {type(dataset).__name__} cannot: its "
                "pool would be lost on every resume. Mark encode_sample (and preencode_sample, cookers, "
                "pack_selected_samples where used) with @stateless, or accept the loss with "
                "--length-sort-allow-inexact-resume."
            )
        self.pool_size = pool_size
        self.length_fn = length_fn
        self.seed = seed
        self.max_pool_bytes = max_pool_bytes
        self._base_rule = PoolRule(
            pool_size=pool_size,
            seed=seed,
            ascending=ascending,
            shuffle_block=shuffle_block,
            separate_packed=separate_packed,
            warmup_pools=warmup_pools,
            initial_pool_size=initial_pool_size,
        )
        self._replays: Sequence[int] | None = None
        #: Called once per process, with this wrapper and the seconds that filling its first pool took.
        self.on_first_pool: Callable[[LengthPoolSortDataset[Any], float], None] | None = None
        self._length_errors = SampleErrors(
            f"LengthPoolSortDataset.{getattr(length_fn, '__qualname__', length_fn)}",
            worker_config,
            tolerance=failure_tolerance,
        )
        self.reset_state_own()

    # -- state -------------------------------------------------------------------------------------------------

    def reset_state_own(self) -> None:
        self._buffer = PoolBuffer(self.dataset.restore_sample, max_bytes=self.max_pool_bytes if self._exact else None)
        # The pool being emitted, in emission order, and the pool being read, in the order read.
        self._emitting: deque[PooledSample] = deque()
        self._reading: list[PooledSample] = []
        # Samples emitted over the whole run, fillers not counted: the worker stream's index of the next one.
        self._num_emitted = 0
        self._num_pools = 0
        # The rule and size of the pool being read, fixed when its reading starts; None before.
        self._reading_rule: PoolRule | None = None
        self._reading_size = 0
        # Rules by the number of emitted samples after which they hold; None until a worker starts.
        self._schedule: list[tuple[int, PoolRule]] | None = None
        # The upstream's epoch has ended; what is pooled goes out before the next one is read.
        self._draining = False
        # Batches of this rank that failed left it this many samples ahead of the others; and whether samples that
        # make up for it are being emitted.
        self._num_lost = 0
        self._filling = False
        self.num_lost_total = 0

    def save_state(self) -> FlexState:
        state = super().save_state()
        pooled = [*self._emitting, *self._reading]
        state.update(
            version=STATE_VERSION,
            seed=self.seed,
            global_worker=self._global_worker(),
            num_emitted=self._num_emitted,
            num_pools=self._num_pools,
            emitting=pooled_state(self._emitting) if self._exact else [],
            reading=pooled_state(self._reading) if self._exact else [],
            num_unsaved=0 if self._exact else len(pooled),
            reading_rule=None if self._reading_rule is None else dataclasses.asdict(self._reading_rule),
            reading_size=self._reading_size,
            schedule=[(after, dataclasses.asdict(rule)) for after, rule in self._current_schedule()],
            draining=self._draining,
            num_lost=self._num_lost,
            filling=self._filling,
        )
        return state

    def restore_state(self, state: FlexState) -> None:
        """Restores a state of this wrapper, or adopts one that was saved without it (with an empty pool).

        Raises:
            ValueError: the state belongs to another worker, seed or lever; the message says what differs.
        """
        num_replayed = self._take_replay()
        self.reset_state_own()
        if state["__class__"] != type(self).__name__:
            self._refuse_other_lever(state["__class__"])
            self.dataset.restore_state(state)
            self._start_after_replay(-num_replayed, num_replayed)
            return
        self.check_state(state, self.worker_config.rank_worker_id())
        self.dataset.restore_state(state["datasets"][0])
        self._num_pools = state["num_pools"]
        self._draining = state["draining"]
        num_pooled = len(state["emitting"]) + len(state["reading"])
        if state["num_unsaved"] or (num_pooled and not self._exact):
            logger.warning(
                "length sort: %d pooled samples of worker %s are lost on this resume, since they cannot be restored",
                state["num_unsaved"] or num_pooled,
                self._global_worker(),
            )
            self._start_after_replay(state["num_emitted"], num_replayed)
            return
        self._num_emitted = state["num_emitted"]
        self._emitting = deque(restored_pool(state["emitting"]))
        self._reading = restored_pool(state["reading"])
        self._reading_rule = None if state["reading_rule"] is None else PoolRule(**state["reading_rule"])
        self._reading_size = state["reading_size"]
        self._num_lost = state["num_lost"]
        self._filling = state["filling"]
        self._schedule = [(after, PoolRule(**rule)) for after, rule in state["schedule"]]
        if self._schedule[-1][1] != self._rule():
            # A changed setting must not touch the samples that the loader replays (they are skipped by count), and
            # has to take effect at the same pool on all ranks, though each restored from its own snapshot.
            self._schedule.append((self._num_emitted + num_replayed, self._rule()))

    def expect_replay(self, num_samples: Sequence[int]) -> None:
        """Tells, before a restore, how many samples each worker slot will emit again to reach the saved position.

        The loader knows it (a checkpoint is a worker's snapshot plus batches to replay), the state does not.
        """
        self._replays = list(num_samples)

    def _take_replay(self) -> int:
        replays, self._replays = self._replays, None
        return 0 if replays is None else replays[self.worker_config.rank_worker_id()]

    def _start_after_replay(self, num_emitted: int, num_replayed: int) -> None:
        """An empty pool: pass the replayed samples through as they were, then start pools, on all ranks alike."""
        self._num_emitted = num_emitted
        pass_through = dataclasses.replace(self._rule(), pool_size=0)
        self._schedule = [(num_emitted - 1, pass_through), (num_emitted + num_replayed - 1, self._rule())]

    def _refuse_other_lever(self, class_name: str) -> None:
        if class_name == "ODBGroupDataset":
            raise ValueError(
                "The saved state belongs to ODBGroupDataset and this run uses length sort: the buffered samples would "
                "be lost. Resume with the --odb-* flags it was saved under, or start the data over with --restart-data."
            )

    def check_state(self, state: FlexState, worker_slot: int) -> None:
        """Checks that a saved state of this wrapper belongs to the given worker slot of this rank.

        Raises:
            ValueError: naming what differs, the consequence and the remedy.
        """
        expected = {
            "version": STATE_VERSION,
            "seed": self.seed,
            "global_worker": self._global_worker(worker_slot),
        }
        differing = {name: (state[name], value) for name, value in expected.items() if state[name] != value}
        if differing:
            what = "; ".join(f"{name}: saved {saved}, now {now}" for name, (saved, now) in differing.items())
            raise ValueError(
                f"The saved pool state does not fit this worker ({what}). Restoring it would repeat or lose samples. "
                "Resume with the settings it was saved under (`energon checkpoint redist` changes the number of "
                "ranks), or start the data over with --restart-data."
            )

    @staticmethod
    def has_drained(state: FlexState) -> bool:
        """Whether a saved state of this wrapper pools nothing and will pool nothing: it passes the stream through."""
        pooled = state["emitting"] or state["reading"] or state["num_unsaved"] or state["draining"]
        return not pooled and state["schedule"][0][1]["pool_size"] == 0 and len(state["schedule"]) == 1

    def _global_worker(self, worker_slot: int | None = None) -> tuple[int, int]:
        """(global worker id, number of workers of all ranks): what `energon checkpoint redist` keeps."""
        num_workers = max(self.worker_config.num_workers, 1)
        slot = self.worker_config.rank_worker_id() if worker_slot is None else worker_slot
        return self.worker_config.rank * num_workers + slot, self.worker_config.world_size * num_workers

    def _rule(self) -> PoolRule:
        return dataclasses.replace(self._base_rule, worker_slot=self.worker_config.rank_worker_id())

    def _current_schedule(self) -> list[tuple[int, PoolRule]]:
        """The rules still in use: the one that holds now and those to come."""
        if self._schedule is None:
            self._schedule = [(-1, self._rule())]
        while len(self._schedule) > 1 and self._schedule[1][0] < self._num_emitted:
            del self._schedule[0]
        return self._schedule

    # -- iteration ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T_sample]:
        source: Iterator[T_sample] = iter(self.dataset)
        while self._emitting or self._next_pool(source):
            pooled = self._emitting.popleft()
            self._num_emitted += not self._filling
            self._read_ahead(source)
            sample = self._buffer.take(pooled)
            if sample is None:
                self.note_lost(1, f"sample {pooled.restore_key} could not be restored")
                continue
            yield sample
        self._draining = False
        self._reading_rule = None
        self._num_lost = 0

    def _next_pool(self, source: Iterator[T_sample]) -> bool:
        """Starts the next pool: all of the first one is read here, nothing of later ones. False at the epoch's end."""
        started = time.monotonic()
        self._start_reading()
        while self._left_to_read() > 0:
            self._read(source)
        if self.on_first_pool is not None:
            report, self.on_first_pool = self.on_first_pool, None
            report(self, time.monotonic() - started)
        if self._reading:
            self._form_pool()
        return len(self._emitting) > 0

    def _start_reading(self) -> PoolRule:
        """Fixes rule and size of the next pool when its first sample is about to be read."""
        if self._reading_rule is None:
            self._reading_rule = self._current_schedule()[0][1]
            self._reading_size = self._reading_rule.size_of_pool(self._num_pools) or 1
        return self._reading_rule

    def _left_to_read(self) -> int:
        return 0 if self._draining else self._reading_size + self._num_lost - len(self._reading)

    def _read_ahead(self, source: Iterator[T_sample]) -> None:
        """Reads the part of the next pool that falls to one emission of this one."""
        rule = self._reading_rule or self._start_reading()
        if rule.pool_size > 0:
            for _ in range(read_ahead_count(self._left_to_read(), len(self._emitting) + 1)):
                self._read(source)

    def _read(self, source: Iterator[T_sample]) -> None:
        """Reads one sample into the next pool, or notes that the upstream's epoch has ended."""
        if self._draining:
            return
        try:
            sample = next(source)
        except StopIteration:
            self._draining = True
            return
        try:
            length = self.length_fn(sample)
            if type(length) is not int:
                length = _plain_number(length)
            self._reading.append(self._buffer.put(sample, length, is_packed(sample)))
        except Exception as error:
            self._length_errors.handle(error, sample)
        else:
            self._length_errors.succeeded()

    def _form_pool(self) -> None:
        """Turns what was read into the pool to emit: first the fillers of lost samples, if any, then the pool."""
        num_fillers = min(self._num_lost, len(self._reading))
        self._filling = num_fillers > 0
        if self._filling:
            self._emitting.extend(self._reading[:num_fillers])
            del self._reading[:num_fillers]
            self._num_lost = 0
            return
        assert self._reading_rule is not None
        order = self._reading_rule.order(
            [pooled.length for pooled in self._reading],
            [pooled.packed for pooled in self._reading],
            first_index=self._num_emitted,
        )
        self._emitting.extend(self._reading[index] for index in order)
        self._num_pools += self._reading_rule.pool_size > 0
        self._reading = []
        self._reading_rule = None

    def note_lost(self, num_samples: int, reason: str) -> None:
        """Records that emitted samples reached no batch, which puts this rank ahead of the others.

        Until the pool ends its steps are misaligned; then as many samples of the next pool go out first, so that
        from the next pool's edge on all ranks emit the same positions again.
        """
        self._num_lost += num_samples
        self.num_lost_total += num_samples
        logger.warning(
            "length sort: %d sample(s) lost (%s); rank %d is out of step until the next pool, %d lost so far",
            num_samples,
            reason,
            self.worker_config.rank,
            self.num_lost_total,
        )

    # -- Energon's wrapper interface ---------------------------------------------------------------------------

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    @property
    def num_pooled(self) -> int:
        """Samples waiting in this worker."""
        return len(self._emitting) + len(self._reading)

    @property
    def num_pooled_bytes(self) -> int:
        """Bytes of the waiting samples that are held whole."""
        return self._buffer.num_bytes

    @property
    def num_reencoded(self) -> int:
        """Samples that were re-read from their key: after a restore, or beyond the byte cap."""
        return self._buffer.num_restored

    def config(self) -> dict[str, Any]:
        rule = dataclasses.asdict(self._base_rule)
        del rule["worker_slot"]
        return {
            "type": type(self).__qualname__,
            "dataset": self.dataset.config(),
            **rule,
            "length_fn": self._function_config(self.length_fn),
            "max_pool_bytes": self.max_pool_bytes,
            "worker_config": self.worker_config.config(),
        }

    def __str__(self) -> str:
        return f"LengthPoolSortDataset(pool_size={self.pool_size}, dataset={self.dataset})"


def _plain_number(length: Any) -> float:
    """`length` as a Python number, since states hold builtins only (no tensors, no numpy scalars)."""
    number = length.item() if hasattr(length, "item") else length
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(
            f"length_fn returned {length!r}: samples cannot be sorted by it. Return a finite int or float per sample."
        )
    return number


def _check_sizes(
    pool_size: int, shuffle_block: int, warmup_pools: int, initial_pool_size: int, max_pool_bytes: int
) -> None:
    if shuffle_block < 1:
        raise ValueError(f"shuffle_block is {shuffle_block}: a pool cannot be cut into such blocks. Give 1 or more.")
    if pool_size < 0 or pool_size % shuffle_block:
        raise ValueError(
            f"pool_size is {pool_size}: not a multiple of shuffle_block = {shuffle_block}, so every pool would end in "
            f"a cut block. Give {max(-(-pool_size // shuffle_block), 1) * shuffle_block}."
        )
    if warmup_pools < 0:
        raise ValueError(f"warmup_pools is {warmup_pools}: a number of pools cannot be negative. Give 0 or more.")
    if pool_size and not 1 <= initial_pool_size <= pool_size:
        raise ValueError(
            f"initial_pool_size is {initial_pool_size}: pools cannot grow from there to pool_size = {pool_size}. "
            f"Give a number from 1 to {pool_size}."
        )
    if max_pool_bytes < 0:
        raise ValueError(f"max_pool_bytes is {max_pool_bytes}: no sample could be pooled. Give 0 or more.")
