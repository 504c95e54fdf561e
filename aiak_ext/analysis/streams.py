"""The order in which each worker of each rank reads samples, before any lever."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aiak_ext.analysis.samples import IntArray, SampleTable


class Streams(Protocol):
    """Samples of (rank, worker) streams, as rows of a table."""

    def take(self, rank: int, worker: int, count: int) -> IntArray:
        """The next `count` samples of a stream; fewer at its end."""


class DealtStreams:
    """Shuffled passes over the samples, dealt out to the streams in turn: endless, and alike on all ranks.

    As an epoch's shuffled shards go to ranks and workers. Every stream draws from the same distribution.
    """

    def __init__(self, table: SampleTable, seed: int = 0) -> None:
        self._num_samples = len(table)
        self._rng = np.random.default_rng(seed)
        self._left = np.zeros(0, dtype=np.int64)

    def take(self, rank: int, worker: int, count: int) -> IntArray:
        while len(self._left) < count:
            self._left = np.concatenate([self._left, self._rng.permutation(self._num_samples)])
        taken, self._left = self._left[:count], self._left[count:]
        return taken


class ReadStreams:
    """The streams that a table was read from, in the order read.

    Raises:
        ValueError: the table does not hold a stream for each worker of each rank.
    """

    def __init__(self, table: SampleTable, num_ranks: int, num_workers: int) -> None:
        if not holds_streams(table, num_ranks, num_workers):
            raise ValueError(
                f"{table.source} was not read as {num_ranks} ranks x {num_workers} workers, so their streams are "
                "unknown; read it with these numbers, or deal the samples out"
            )
        self._rows = {
            place: np.flatnonzero(_place(table, num_workers) == place) for place in range(num_ranks * num_workers)
        }
        self._num_workers = num_workers
        self._position = dict.fromkeys(self._rows, 0)

    def take(self, rank: int, worker: int, count: int) -> IntArray:
        place = rank * self._num_workers + worker
        start = self._position[place]
        taken = self._rows[place][start : start + count]
        self._position[place] = start + len(taken)
        return taken

    def shortest(self) -> int:
        """Samples of the shortest stream."""
        return min(len(rows) for rows in self._rows.values())


def holds_streams(table: SampleTable, num_ranks: int, num_workers: int) -> bool:
    """Whether the table was read as exactly these ranks and workers."""
    if table.rank is None or table.worker is None or table.rank.max() >= num_ranks or table.worker.max() >= num_workers:
        return False
    return len(np.unique(_place(table, num_workers))) == num_ranks * num_workers


def _place(table: SampleTable, num_workers: int) -> IntArray:
    assert table.rank is not None and table.worker is not None
    return table.rank * num_workers + table.worker
