"""Reads the encoded samples of an Energon dataset, stream by stream, as the ranks and workers of a run would."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.energon import TaskEncoder, WorkerConfig, get_train_dataset

from aiak_ext.analysis.interrupt import stop_on_interrupt
from aiak_ext.analysis.samples import SampleTable
from data_balance.cost import grid_sums
from length_sort import sample_length
from length_sort.sample_length import is_packed


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """Which samples of a dataset to read.

    With the loader's settings given as in the run, stream (rank, worker) holds the samples in the order in which
    that worker reads them; Energon then assigns a stream's samples by its global number alone.
    """

    num_ranks: int = 1
    num_workers: int = 1
    """Worker processes per rank; 0 counts as one."""
    num_samples: int = 1000
    """Samples over all streams together."""
    streams_read: int = 64
    """Most streams to read; of more, evenly spaced ones are read."""
    split: str = "train"
    shuffle_buffer_size: int | None = None
    max_samples_per_sequence: int | None = None
    repeat: bool = False
    """Go on after the end of the data, as a training loader does."""

    def streams(self) -> list[tuple[int, int]]:
        """(rank, worker) of the streams to read."""
        workers = max(self.num_workers, 1)
        total = self.num_ranks * workers
        chosen = np.unique(np.linspace(0, total - 1, min(total, self.streams_read)).astype(int)).tolist()
        return [(stream // workers, stream % workers) for stream in chosen]


@dataclass
class EncodedSample:
    """What is kept of an encoded sample."""

    key: str
    num_tokens: int
    token_squares: int
    num_patches: int
    patch_squares: int
    packed: bool
    num_bytes: int
    rank: int
    worker: int
    shard: str
    seconds: float


def read_dataset(
    path: str | Path,
    task_encoder: TaskEncoder[Any, Any, Any, Any],
    plan: ReadPlan,
    *,
    length_fn: Callable[[Any], float] = sample_length,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> SampleTable:
    """Lengths of a dataset's samples after ``encode_sample`` (``preencode_sample`` where there is one).

    An interrupt (Ctrl-C) ends the reading early; what was read so far is returned.

    Args:
        path: The dataset, or a metadataset.
        task_encoder: The training's task encoder. Its ``build_batch`` is not used, so levers and packing are not.
        plan: How much to read, and as which ranks and workers.
        length_fn: Length of an encoded sample.
        progress: Wraps the iterator over samples, e.g. `tqdm`.

    Raises:
        ValueError: a sample has no usable length, or there are no samples.
    """
    rows: list[EncodedSample] = []
    with stop_on_interrupt() as is_interrupted:
        for row in progress(encoded_samples(path, task_encoder, plan, length_fn)):
            rows.append(row)
            if is_interrupted():
                break
    # Any stream's share times the number of streams; a training loader that repeats has no length.
    streams = plan.num_ranks * max(plan.num_workers, 1)
    population = None if plan.repeat else streams * _encoded_dataset(path, task_encoder, plan, (0, 0)).len_worker(0)
    notes = (f"Reading was interrupted after {len(rows)} of {plan.num_samples} samples.",) if is_interrupted() else ()
    return replace(table_of(rows, str(path)), notes=notes, population=population)


def table_of(rows: Sequence[EncodedSample], source: str) -> SampleTable:
    """Encoded samples as a table."""
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in EncodedSample.__dataclass_fields__}
    return SampleTable(
        source=source,
        num_tokens=columns["num_tokens"].astype(np.int64),
        token_squares=columns["token_squares"].astype(np.int64),
        num_patches=columns["num_patches"].astype(np.int64),
        patch_squares=columns["patch_squares"].astype(np.int64),
        packed=columns["packed"].astype(bool),
        rank=columns["rank"].astype(np.int64),
        worker=columns["worker"].astype(np.int64),
        shard=columns["shard"].astype(np.str_),
        bytes_per_sample=float(columns["num_bytes"].mean()) if rows else None,
        encode_s=float(columns["seconds"].mean()) if rows else None,
    )


def encoded_samples(
    path: str | Path, task_encoder: Any, plan: ReadPlan, length_fn: Callable[[Any], float] = sample_length
) -> Iterator[EncodedSample]:
    """Samples from all streams in turn, so that an interrupt leaves every stream represented."""
    streams = plan.streams()
    iterators = {place: _stream(path, task_encoder, plan, place, length_fn) for place in streams}
    count = 0
    while iterators and count < plan.num_samples:
        for place in list(iterators):
            row = next(iterators[place], None)
            if row is None:
                del iterators[place]
                continue
            yield row
            count += 1
            if count == plan.num_samples:
                return


def _stream(
    path: str | Path, task_encoder: Any, plan: ReadPlan, place: tuple[int, int], length_fn: Callable[[Any], float]
) -> Iterator[EncodedSample]:
    rank, worker = place
    dataset = _encoded_dataset(path, task_encoder, plan, place)
    samples = iter(dataset)
    for index in range(plan.num_samples):
        started = time.perf_counter()
        # As Energon's loader does around every sample.
        dataset.worker_config.worker_activate(index)
        try:
            sample = next(samples, None)
        finally:
            dataset.worker_config.worker_deactivate()
        if sample is None:
            return
        seconds = time.perf_counter() - started
        yield _row_of(sample, rank, worker, seconds, length_fn)


def _encoded_dataset(path: str | Path, task_encoder: Any, plan: ReadPlan, place: tuple[int, int]) -> Any:
    """The pipeline up to where a lever's wrapper would sit."""
    rank, worker = place
    if plan.num_workers:
        # Energon splits the data by the global worker number, and seeds by it, whichever process it is.
        config = WorkerConfig(
            rank=rank * plan.num_workers + worker, world_size=plan.num_ranks * plan.num_workers, num_workers=1
        )
    else:
        config = WorkerConfig(rank=rank, world_size=plan.num_ranks, num_workers=0)
    without_batches = copy.copy(task_encoder)
    without_batches.build_batch = lambda dataset, **_: dataset
    # Some versions of Energon print the split of the data, which is no part of a command's output.
    with contextlib.redirect_stdout(sys.stderr):
        return get_train_dataset(
            path,
            split_part=plan.split,
            worker_config=config,
            batch_size=None,
            shuffle_buffer_size=plan.shuffle_buffer_size,
            max_samples_per_sequence=plan.max_samples_per_sequence,
            task_encoder=without_batches,
            repeat=plan.repeat,
        )


def _row_of(sample: Any, rank: int, worker: int, seconds: float, length_fn: Callable[[Any], float]) -> EncodedSample:
    num_tokens = int(length_fn(sample))
    bounds = _field(sample, "cu_lengths")
    segments = np.diff(np.asarray(bounds, dtype=np.int64)) if bounds is not None and len(bounds) else [num_tokens]
    num_patches, patch_squares = _patches(sample)
    sources = _field(sample, "__sources__")
    return EncodedSample(
        key=sample.__key__,
        num_tokens=num_tokens,
        token_squares=int(np.square(np.asarray(segments, dtype=np.int64)).sum()),
        num_patches=num_patches,
        patch_squares=patch_squares,
        packed=is_packed(sample),
        num_bytes=_num_bytes(sample),
        rank=rank,
        worker=worker,
        shard=sources[0].shard_name if sources else "",
        seconds=seconds,
    )


def _patches(sample: Any) -> tuple[int, int]:
    """Patches and sum of squared vision segments, from the grids of images and videos."""
    patches = squares = 0
    for name in ("image_grid_thw", "video_grid_thw"):
        grid = _field(sample, name)
        if grid is not None:
            more_patches, more_squares = grid_sums(grid)
            patches, squares = patches + more_patches, squares + more_squares
    return patches, squares


def _field(sample: Any, name: str) -> Any:
    return sample.get(name) if isinstance(sample, dict) else getattr(sample, name, None)


def _num_bytes(value: Any, depth: int = 3) -> int:
    """Bytes of the tensors, arrays and byte strings in a sample, down to `depth` containers."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, (bytes, str)):
        return len(value)
    if depth == 0:
        return 0
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(_num_bytes(getattr(value, each.name), depth - 1) for each in dataclasses.fields(value))
    if isinstance(value, dict):
        return sum(_num_bytes(each, depth - 1) for each in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_num_bytes(each, depth - 1) for each in islice(value, 10_000))
    return 0
