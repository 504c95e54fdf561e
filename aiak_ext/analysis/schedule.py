"""Which sample each rank trains at which step and micro batch, and what that costs: waiting, padding, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from aiak_ext.analysis.memory import MemoryModel
from aiak_ext.analysis.samples import IntArray, SampleTable
from data_balance import SampleCostModel
from data_balance.bounds import rank_loads

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Training steps of all ranks, one array entry per trained sample, int64 [k]."""

    sample: IntArray
    """Row of the sample table."""
    rank: IntArray
    step: IntArray
    slot: IntArray
    """Micro batch within the step."""
    vision_rank: IntArray
    """Rank that runs the vision encoder on the sample's images."""
    num_ranks: int
    num_steps: int
    num_slots: int
    padded: bool = True
    """Whether a micro batch is padded to its longest sample (packed otherwise)."""
    encoder_balanced: bool = False
    """Whether images move inside the forward, so that ranks meet in every micro batch."""

    @classmethod
    def from_order(cls, order: IntArray, num_slots: int, micro_batch_size: int) -> Schedule:
        """Fixed-size micro batches of the samples `order` [num_ranks, num_samples] in which each rank emits them.

        What does not fill a whole step is left out.
        """
        num_ranks, count = order.shape
        per_step = num_slots * micro_batch_size
        num_steps = count // per_step
        if num_steps == 0:
            raise ValueError(
                f"a rank has {count} samples and a step takes {per_step} ({num_slots} micro batches of "
                f"{micro_batch_size}), so there is no step to simulate; give more samples"
            )
        position = np.tile(np.arange(num_steps * per_step), num_ranks)
        rank = np.repeat(np.arange(num_ranks), num_steps * per_step)
        return cls(
            sample=order[:, : num_steps * per_step].reshape(-1),
            rank=rank,
            step=position // per_step,
            slot=position % per_step // micro_batch_size,
            vision_rank=rank,
            num_ranks=num_ranks,
            num_steps=num_steps,
            num_slots=num_slots,
            padded=micro_batch_size > 1,
        )

    def moved(self, rank: IntArray, slot: IntArray) -> Schedule:
        """The same steps with samples on other ranks and micro batches."""
        return replace(self, rank=rank, slot=slot, vision_rank=rank)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, ranks, micro batches."""
        return self.num_steps, self.num_ranks, self.num_slots

    def key(self, rank: IntArray) -> IntArray:
        """Flat index of each sample's micro batch, with the sample on `rank`."""
        return (self.step * self.num_ranks + rank) * self.num_slots + self.slot


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a schedule achieves; ratios are shares between 0 and 1."""

    num_steps: int
    efficiency: float
    """Sum over steps of the mean rank's cost / sum over steps of the step's length (its slowest rank's cost)."""
    waiting: float
    """Share of the ranks' time spent waiting for the slowest: 1 - efficiency."""
    padding: float
    """Share of the token slots that hold padding."""
    useful: float
    """Share of the ranks' time that goes into real tokens and patches: padding and waiting both lower it."""
    samples_per_step: float
    tokens_per_step: float
    """Real tokens of all ranks in a step."""
    step_cv: float
    """Standard deviation of the step's length over its mean: how much step times vary."""
    largest_micro_batch: int
    """Tokens with padding of the largest micro batch."""
    peak_bytes: float
    """Memory of the micro batch that takes most, with weights and optimizer."""


def measure(
    schedule: Schedule,
    table: SampleTable,
    costs: SampleCostModel,
    memory: MemoryModel,
    *,
    micro_batch_sync: bool = False,
) -> Figures:
    """Figures of a schedule.

    Args:
        schedule: Steps to measure.
        table: The samples that it refers to.
        costs: Cost of a sample. A padded micro batch costs the language model its longest sample every time.
        memory: Memory of a micro batch.
        micro_batch_sync: Ranks meet at every micro batch (expert parallelism, FSDP), not only at the step's end.
    """
    language, vision = micro_batch_costs(schedule, table, costs)
    length = _step_length(language, vision, micro_batch_sync or schedule.encoder_balanced, schedule.encoder_balanced)
    mean = (language + vision).sum(axis=2).mean(axis=1)
    real = costs.cost(table.sums)[schedule.sample].sum() / schedule.num_ranks
    tokens, patches = micro_batch_sizes(schedule, table)
    peak_bytes = float(memory.step_bytes(tokens, patches).max())
    efficiency = float(mean.sum() / length.sum())
    real_tokens = int(table.num_tokens[schedule.sample].sum())
    return Figures(
        num_steps=schedule.num_steps,
        efficiency=efficiency,
        waiting=1 - efficiency,
        padding=float(1 - real_tokens / tokens.sum()),
        useful=float(real / length.sum()),
        samples_per_step=len(schedule.sample) / schedule.num_steps,
        tokens_per_step=real_tokens / schedule.num_steps,
        step_cv=float(length.std() / length.mean()),
        largest_micro_batch=int(tokens.max()),
        peak_bytes=peak_bytes,
    )


def micro_batch_costs(schedule: Schedule, table: SampleTable, costs: SampleCostModel) -> tuple[FloatArray, FloatArray]:
    """Cost of every micro batch to the language model and to the vision encoder, [steps, ranks, micro batches]."""
    sums = table.sums[schedule.sample]
    language = costs.language_cost(sums)
    vision = costs.cost(sums) - language
    key, size = schedule.key(schedule.rank), int(np.prod(schedule.shape))
    if schedule.padded:
        longest = np.zeros(size, dtype=np.float64)
        np.maximum.at(longest, key, language)
        language_load = longest * np.bincount(key, minlength=size)
    else:
        language_load = rank_loads(language, key, size)
    vision_load = rank_loads(vision, schedule.key(schedule.vision_rank), size)
    return language_load.reshape(schedule.shape), vision_load.reshape(schedule.shape)


def micro_batch_sizes(schedule: Schedule, table: SampleTable) -> tuple[IntArray, IntArray]:
    """Tokens with padding and patches of every micro batch, [steps, ranks, micro batches]."""
    tokens, patches = table.num_tokens[schedule.sample], table.num_patches[schedule.sample]
    key, size = schedule.key(schedule.rank), int(np.prod(schedule.shape))
    if schedule.padded:
        longest = np.zeros(size, dtype=np.int64)
        np.maximum.at(longest, key, tokens)
        occupied = longest * np.bincount(key, minlength=size)
    else:
        occupied = np.bincount(key, weights=tokens, minlength=size)
    vision_key = schedule.key(schedule.vision_rank)
    num_patches = np.bincount(vision_key, weights=patches, minlength=size)
    return occupied.astype(np.int64).reshape(schedule.shape), num_patches.astype(np.int64).reshape(schedule.shape)


def _step_length(language: FloatArray, vision: FloatArray, every_slot: bool, encoder_balanced: bool) -> FloatArray:
    """Cost [steps] that a step lasts: its ranks go on together from one meeting point to the next."""
    if encoder_balanced:
        # Images are exchanged before and features after the encoder: both halves of a micro batch end together.
        return (vision.max(axis=1) + language.max(axis=1)).sum(axis=1)
    total = language + vision
    return total.max(axis=1).sum(axis=1) if every_slot else total.sum(axis=2).max(axis=1)
