"""How long a rank waits inside one section of a training step, on the host or on a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HostWaitTimer:
    """Wall time minus this thread's own CPU time.

    Blocking collectives (gloo) sleep the calling thread until the slowest rank has arrived and the data has
    moved, so what the section does not spend computing it spends waiting.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        wall, busy = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            waited = (time.perf_counter() - wall) - (time.thread_time() - busy)
            self._seconds += max(waited, 0.0)

    def pop_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class CudaWaitTimer:
    """Time between two events on the current stream around the section.

    The host runs ahead of the device, so host clocks say nothing there. The stream stands still in a
    collective until the slowest rank has arrived. `pop_seconds` waits for the last event: call it where the
    step has synchronised anyway (after gradient clipping), so that it costs nothing.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        try:
            yield
        finally:
            end.record()
            self._spans.append((start, end))

    def pop_seconds(self) -> float:
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in spans) / 1000


def make_wait_timer(device: torch.device) -> HostWaitTimer | CudaWaitTimer:
    """The timer that fits `device`: events on CUDA, clocks elsewhere."""
    return CudaWaitTimer() if device.type == "cuda" else HostWaitTimer()
