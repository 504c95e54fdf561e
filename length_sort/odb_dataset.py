"""ODBGroupDataset: token-budget groups formed where the true length is known, aligned across data-parallel ranks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.energon import Sample
from megatron.energon.flavors.base_dataset import FlexState, SavableDataset
from megatron.energon.worker import WorkerConfig
from megatron.energon.wrappers.base import BaseWrapperDataset, get_sample_restore_key

from length_sort.coordinator import Coordinator, LocalCoordinator
from length_sort.loss_scale import count_loss_tokens
from length_sort.odb_agreement import RoundAgreement
from length_sort.odb_counters import GroupCounters
from length_sort.odb_group import FIGURES, UNSYNCHRONIZED, GroupInfo, SampleGroup
from length_sort.odb_state import check_same, restore_rounds, save_rounds
from length_sort.pool_buffer import PoolBuffer
from length_sort.pool_order import read_ahead_count
from length_sort.rounds import Candidate, Group, RankRounds, RoundRules
from length_sort.sample_errors import SampleErrors
from length_sort.sample_length import sample_length
from length_sort.store_channel import ODBSyncError

logger = logging.getLogger(__name__)

DEFAULT_MAX_BUFFER_BYTES = 4 * 1024**3
STATE_VERSION = 1

_TYPICAL_HIDDEN_SIZE = 2560


def default_cost(length: int) -> float:
    """Relative cost of a sequence, ``6 * hidden_size * n + n**2``, at a hidden size of 2,560."""
    return float(6 * _TYPICAL_HIDDEN_SIZE * length + length * length)


class ODBGroupDataset(BaseWrapperDataset[Any, SampleGroup]):
    """Turns a stream of encoded samples into groups of bounded size, the same number of them on every rank.

    Round by round the worker fills its buffer, forms groups, agrees with the same worker slot of the other ranks on
    how many groups all of them emit, and emits those (source: the review of the Online Dynamic Batching paper; the
    rules are in :mod:`length_sort.grouping` and :mod:`length_sort.rounds`). While it emits, it reads about as many
    samples as it hands out, so no round starts with a full buffer to encode.

    The saved state holds a restore key and a few integers per waiting sample, and the outcomes of the last rounds,
    so ranks whose snapshots were taken in different rounds continue alike. Restored samples are re-read when their
    group is emitted.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        *,
        token_budget: int,
        buffer_size: int = 1024,
        length_fn: Callable[[Any], int] = sample_length,
        patches_fn: Callable[[Any], int] | None = None,
        max_patches: int | None = None,
        cost_fn: Callable[[Any], float] | None = None,
        max_cost: float | None = None,
        loss_tokens_fn: Callable[[Any], int] = count_loss_tokens,
        policy: str = "carry_over",
        target: str = "max",
        group_order: str = "aligned",
        join: bool = True,
        max_deferrals: int | None = 4,
        seed: int = 42,
        coordinator: Coordinator | None = None,
        max_buffer_bytes: int = DEFAULT_MAX_BUFFER_BYTES,
        failure_tolerance: int = 100,
        worker_config: WorkerConfig,
    ) -> None:
        """
        Args:
            dataset: Stream of encoded samples; it must be able to restore them.
            token_budget: Most tokens of a group, padding included unless `policy` is ``packed``.
            buffer_size: Samples looked at per round and worker.
            length_fn: Tokens of a sample.
            patches_fn: Vision patches of a sample; needed with `max_patches`.
            max_patches: Most vision patches of a group.
            cost_fn: Cost of a sample, by which groups are matched across ranks; by default from its length.
            max_cost: Most cost of a group, in the unit of `cost_fn`; needs `cost_fn`.
            loss_tokens_fn: Tokens of a sample that carry loss.
            policy: ``carry_over`` (the paper), ``tight`` or ``packed``, see `form_groups`.
            target: ``max`` (the paper), ``median`` or ``min`` of the ranks' group counts.
            group_order: Order within a round, see `emission_order`.
            join: Drain every rank of a finite stream, with idle groups where one has run dry. Otherwise all ranks
                stop when the first one runs dry, and what they have buffered is dropped, counted and logged.
            max_deferrals: Rounds after which a deferred sample goes first; None is the paper's rule.
            seed: Base seed of the shared permutations.
            coordinator: How the ranks agree; may be left out for one rank only.
            max_buffer_bytes: Bytes of samples kept per worker; beyond, samples are re-encoded when emitted.
            failure_tolerance: Consecutive samples without a usable length before the run is stopped (0: never).
            worker_config: The upstream's worker config.

        Raises:
            ValueError: a setting is out of range, the coordinator is missing or of another world size, or the
                upstream cannot restore samples.
        """
        super().__init__(dataset, worker_config=worker_config)
        self.rules = RoundRules(
            token_budget=token_budget,
            buffer_size=buffer_size,
            policy=policy,
            target=target,
            group_order=group_order,
            join=join,
            max_deferrals=max_deferrals,
            max_patches=max_patches,
            max_cost=max_cost,
            seed=seed,
        )
        for limit, function, name in ((max_patches, patches_fn, "patches"), (max_cost, cost_fn, "cost")):
            if limit is not None and function is None:
                raise ValueError(
                    f"max_{name} is {limit}, but nothing measures a sample's {name}: the limit would never hold. "
                    f"Pass {name}_fn=."
                )
        if not dataset.can_restore_sample():
            raise ValueError(
                f"ODB needs an upstream that can restore samples, and {type(dataset).__name__} cannot: its buffer "
                "would be lost on every resume, and the ranks would no longer match. Mark encode_sample (and "
                "preencode_sample, cookers where used) with @stateless."
            )
        self.coordinator = _checked_coordinator(coordinator, worker_config)
        self.length_fn = length_fn
        self.patches_fn = patches_fn
        self.cost_fn = cost_fn
        self.loss_tokens_fn = loss_tokens_fn
        self._buffer = PoolBuffer(self.dataset.restore_sample, max_bytes=max_buffer_bytes)
        self._errors = SampleErrors(
            f"ODBGroupDataset.{getattr(length_fn, '__qualname__', length_fn)}",
            worker_config,
            tolerance=failure_tolerance,
        )
        # Energon keeps prefetch x workers + 1 snapshots; a loader that keeps more says so in begin_loader.
        self._agreement = RoundAgreement(self.coordinator, num_snapshots=max(64, 4 * worker_config.num_workers + 1))
        self._prefetch_factor: int | None = None
        self._replays: Sequence[int] | None = None
        self.reset_state_own()

    # -- what the loader tells before its workers start --------------------------------------------------------

    def begin_loader(self, *, prefetch_factor: int, num_snapshots: int) -> None:
        """Called by each loader over this dataset, on every rank, before its workers start.

        Args:
            prefetch_factor: Batches prefetched per worker; unequal values would deadlock a save, so they are compared.
            num_snapshots: Snapshots that the loader keeps per worker (Energon's ``n_checkpoints``).
        """
        self._prefetch_factor = prefetch_factor
        self._agreement.num_snapshots = num_snapshots
        self.coordinator.begin_loader()

    def expect_replay(self, num_batches: Sequence[int]) -> None:
        """Tells, before a restore, how many batches each worker slot will emit again to reach the saved position.

        With it the ranks can compare positions: files of different steps are then refused.
        """
        self._replays = list(num_batches)

    # -- state -------------------------------------------------------------------------------------------------

    def reset_state_own(self) -> None:
        self._rounds = RankRounds(self.rules, rank=self.worker_config.rank, world_size=self.worker_config.world_size)
        self._agreement.reset(0)
        self._counters = GroupCounters()
        self._buffer.clear()
        # The upstream's epoch has ended; it is not read again before the buffers of all ranks are drained.
        self._exhausted = False
        # Groups emitted over the whole run: this worker slot's position, the same on all ranks at the same step.
        self._num_groups = 0
        # Batches of a state saved without ODB that the loader is going to skip: passed through one by one.
        self._num_pass_through = 0
        # Restore keys of the last real group, from which idle batches are made.
        self._template_keys: tuple[Any, ...] = ()
        self._template: list[Any] | None = None
        # Whether, and at which position, the loader was restored; None where the loader does not tell.
        self._restored = False
        self._start_position: int | None = None

    def save_state(self) -> FlexState:
        self._agreement.note_snapshot(self._rounds.round)
        state = super().save_state()
        state.update(
            settings=self._settings(self.worker_config.rank_worker_id()),
            rounds=save_rounds(self._rounds),
            outcomes=self._agreement.save_outcomes(),
            counters=dataclasses.asdict(self._counters),
            exhausted=self._exhausted,
            num_groups=self._num_groups,
            num_pass_through=self._num_pass_through,
            template_keys=self._template_keys,
        )
        return state

    def restore_state(self, state: FlexState) -> None:
        """Restores a state of this wrapper, or adopts one that was saved without it (with an empty buffer).

        Raises:
            ValueError: the state belongs to other settings, another worker or another lever.
        """
        replays, self._replays = self._replays, None
        num_replayed = 0 if replays is None else replays[self.worker_config.rank_worker_id()]
        self.reset_state_own()
        self.check_state(state, self.worker_config.rank_worker_id())
        if state["__class__"] != type(self).__name__:
            self.dataset.restore_state(state)
            self._num_pass_through = num_replayed
            self._num_groups = -num_replayed
        else:
            self.dataset.restore_state(state["datasets"][0])
            restore_rounds(self._rounds, state["rounds"])
            self._agreement.reset(self._rounds.round)
            self._agreement.restore_outcomes(state["outcomes"])
            self._counters = GroupCounters(**state["counters"])
            self._exhausted = state["exhausted"]
            self._num_groups = state["num_groups"]
            self._num_pass_through = state["num_pass_through"]
            self._template_keys = state["template_keys"]
        self._restored = True
        self._start_position = None if replays is None else self._num_groups + num_replayed

    def check_state(self, state: FlexState, slot: int) -> None:
        """Refuse a state that does not fit worker `slot` of this run; also of use before the workers start.

        Raises:
            ValueError: the message says what differs.
        """
        if state["__class__"] == "LengthPoolSortDataset":
            raise ValueError(
                "The saved state belongs to length sort and this run uses ODB: the pooled samples would be lost. "
                "Resume with the --length-sort-* flags it was saved under, or start the data over with --restart-data."
            )
        if state["__class__"] == type(self).__name__:
            check_same(state["settings"], self._settings(slot))

    def _settings(self, slot: int) -> dict[str, Any]:
        """What a state must have in common with the run that restores it."""
        return {
            "version": STATE_VERSION,
            "rank": self.worker_config.rank,
            "world_size": self.worker_config.world_size,
            "num_workers": self.worker_config.num_workers,
            "worker_slot": slot,
            "synchronized": self.coordinator.synchronized,
            **dataclasses.asdict(self.rules),
        }

    # -- iteration ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[SampleGroup]:
        self._rounds.slot = self.worker_config.rank_worker_id()
        self._agreement.connect(self._rounds.slot, self._shared_settings())
        source: Iterator[Any] = iter(self.dataset)
        while self._num_pass_through > 0 or self._rounds.groups or self._begin_round(source):
            self._agreement.progress()
            group = self._pass_through(source) if self._num_pass_through > 0 else self._next_group(source)
            self._agreement.rest()
            yield group
        self._agreement.rest()

    def _shared_settings(self) -> dict[str, Any]:
        """What all ranks must have in common: settings, and the position at which they were restored."""
        shared = {name: value for name, value in self._settings(self._rounds.slot).items() if name != "rank"}
        return {
            **shared,
            "prefetch_factor": self._prefetch_factor,
            "restored": self._restored,
            "restored_position": self._start_position,
        }

    def _begin_round(self, source: Iterator[Any]) -> bool:
        """Fill the buffer and agree. False at the end of the stream, after which the next epoch may start."""
        self._agreement.progress()
        self._read(source, self.rules.buffer_size - len(self._rounds.buffer))
        if not self._agreement.agree(self._rounds):
            self._end_epoch()
            return False
        self._counters.add_deferred(self._rounds.buffer)
        return True

    def _end_epoch(self) -> None:
        if not self.coordinator.synchronized:
            raise ODBSyncError(
                f"The stream of rank {self.worker_config.rank} has ended, and the ranks do not synchronise (--odb-sync "
                "none): the others would wait for it in the next all-reduce. Use an endless stream (repeat=True), or "
                "--odb-sync store."
            )
        left_over = self._rounds.end_stream()
        self._exhausted = False
        self._buffer.clear()
        if left_over:
            self._counters.dropped_samples += len(left_over)
            logger.warning(
                "ODB: rank %d, worker %d dropped %d buffered samples at the end of epoch %d, as another rank ran dry "
                "first (non-join); %d dropped so far",
                self.worker_config.rank,
                self._rounds.slot,
                len(left_over),
                self._rounds.epoch - 1,
                self._counters.dropped_samples,
            )

    def _read(self, source: Iterator[Any], num_samples: int) -> None:
        """Reads samples into the buffer, or notes that the upstream's epoch has ended."""
        buffer, progress = self._rounds.buffer, self._agreement.progress
        num_wanted = len(buffer) + num_samples
        while not self._exhausted and len(buffer) < num_wanted:
            try:
                sample = next(source)
            except StopIteration:
                self._exhausted = True
                return
            progress()
            try:
                buffer.append(self._candidate(sample))
            except Exception as error:
                self._errors.handle(error, sample)
            else:
                self._errors.succeeded()

    def _candidate(self, sample: Any) -> Candidate:
        length = operator.index(self.length_fn(sample))
        if length < 1:
            raise ValueError(f"length_fn returned {length}: such a sample cannot be grouped. Return a positive int.")
        loss_tokens = operator.index(self.loss_tokens_fn(sample))
        patches = 0 if self.patches_fn is None else operator.index(self.patches_fn(sample))
        cost = default_cost(length) if self.cost_fn is None else float(self.cost_fn(sample))
        return Candidate(length, loss_tokens, patches, cost, 0, self._buffer.put(sample, length))

    def _next_group(self, source: Iterator[Any]) -> SampleGroup:
        rounds = self._rounds
        left_to_read = self.rules.buffer_size - len(rounds.buffer)
        self._read(source, read_ahead_count(left_to_read, len(rounds.groups)))
        candidates, info = rounds.next_group()
        keys, samples = self._take(candidates)
        if samples:
            self._template_keys, self._template = keys, None
        elif not info.idle:  # none of its samples could be restored
            info = dataclasses.replace(info, local_samples=0, local_tokens=0, local_loss_tokens=0, idle=True)
        self._num_groups += 1
        self._counters.add_group(info)
        return self._sample_group(keys, samples, info)

    def _take(self, candidates: Group) -> tuple[tuple[Any, ...], list[Any]]:
        keys, samples = [], []
        for candidate in candidates:
            key, sample = candidate.payload.restore_key, self._buffer.take(candidate.payload)
            if sample is None:
                self._counters.lost_samples += 1
                logger.warning("ODB: sample %s could not be restored and is left out", key)
            else:
                keys.append(key)
                samples.append(sample)
        return tuple(keys), samples

    def _pass_through(self, source: Iterator[Any]) -> SampleGroup:
        sample = next(source, None)
        if sample is None:
            raise ValueError(
                f"The stream of worker {self._rounds.slot} ended while {self._num_pass_through} batches of a state "
                "saved without ODB were being replayed. Start the data over with --restart-data."
            )
        self._num_pass_through -= 1
        self._num_groups += 1
        unknown = UNSYNCHRONIZED
        info = GroupInfo(0, 0, 1, unknown, 0, unknown, 0, unknown)
        return self._sample_group((get_sample_restore_key(sample),), [sample], info)

    def _sample_group(self, keys: tuple[Any, ...], samples: list[Any], info: GroupInfo) -> SampleGroup:
        """The group as a sample, whose restore key holds all it takes to make it again."""
        if info.idle:
            keys = self._template_keys
            if self._template is None:
                # Read again the first time it is needed: a copy of every last group would cost memory all the time.
                self._template = [self.dataset.restore_sample(key) for key in keys]
        template = list(self._template or []) if info.idle else []
        return _make_group((type(self).__name__, *info.figures(), *keys), samples, info, template)

    # -- Energon's wrapper interface ---------------------------------------------------------------------------

    def restore_sample(self, restore_key: tuple[Any, ...]) -> SampleGroup:
        name, *rest = restore_key
        assert name == type(self).__name__
        num_figures = len(FIGURES)
        info = GroupInfo.from_figures(rest[:num_figures])
        samples = [self.dataset.restore_sample(key) for key in rest[num_figures:]]
        return _make_group(restore_key, [] if info.idle else samples, info, samples if info.idle else [])

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Samples of the worker: how many groups they make is known only after encoding."""
        return self.dataset.len_worker(worker_idx)

    @property
    def counters(self) -> GroupCounters:
        """What this worker has emitted, deferred and dropped so far."""
        return self._counters

    @property
    def num_waiting(self) -> int:
        """Samples read but not emitted."""
        return len(self._rounds.buffer) + sum(map(len, self._rounds.groups))

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of those held in memory."""
        return self._buffer.num_bytes

    @property
    def num_reencoded(self) -> int:
        """Samples that were re-read from their key: after a restore, or beyond the byte cap."""
        return self._buffer.num_restored

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "dataset": self.dataset.config(),
            **dataclasses.asdict(self.rules),
            "length_fn": self._function_config(self.length_fn),
            "worker_config": self.worker_config.config(),
        }

    def __str__(self) -> str:
        return f"ODBGroupDataset(token_budget={self.rules.token_budget}, dataset={self.dataset})"


def _make_group(restore_key: Any, samples: list[Any], info: GroupInfo, template: list[Any]) -> SampleGroup:
    shown = [sample for sample in samples or template if _is_energons(type(sample))]  # type: ignore[arg-type]
    return SampleGroup(
        __key__=",".join([sample.__key__ for sample in shown]),
        __restore_key__=restore_key,
        __sources__=tuple([source for sample in shown for source in sample.__sources__ or ()]),
        samples=samples,
        info=info,
        template=template,
    )


@functools.cache
def _is_energons(kind: type[Any]) -> bool:
    """Looked up once per type: Sample is an abstract class, and asking for each sample is slow."""
    return issubclass(kind, Sample)


def _checked_coordinator(coordinator: Coordinator | None, worker_config: WorkerConfig) -> Coordinator:
    if coordinator is None:
        if worker_config.world_size > 1:
            raise ValueError(
                f"ODB has no coordinator, and there are {worker_config.world_size} ranks: they would emit different "
                "numbers of groups and hang in the gradient all-reduce. Pass store_coordinator(group), or "
                "LocalCoordinator(world_size=...) for endless streams."
            )
        return LocalCoordinator()
    if (coordinator.rank, coordinator.world_size) != (worker_config.rank, worker_config.world_size):
        raise ValueError(
            f"The coordinator is for rank {coordinator.rank} of {coordinator.world_size}, the data for rank "
            f"{worker_config.rank} of {worker_config.world_size}: the ranks would wait for the wrong peers. Make both "
            "from the same process group."
        )
    return coordinator
