"""Prepare the next step in a background thread while the current one trains."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Prefetched(Generic[T]):
    """A step, how long it took to prepare and how long the caller waited for it (seconds)."""

    value: T
    prepare_s: float
    wait_s: float


class PrefetchMicroBatchIterator(Generic[T]):
    """Iterates over prepared steps (each a list of micro batches); step k+1 is prepared while k trains.

    The first step is prepared on the calling thread: loader workers fork there, before any thread exists.
    Each later one has a thread of its own, started when the step before it is handed out, so that nothing
    idles and no lock is held while `prepare` talks to other ranks. What `prepare` raises surfaces in
    `next()`.

    Args:
        prepare: makes step k; raises StopIteration at the end.
        first_step: index of the first step.
        enabled: without it every step is prepared on the calling thread.
        timeout_s: how long to wait for a step's thread. Collectives inside have timeouts of their own; this
            one is for a loader that does not answer.
    """

    def __init__(
        self, prepare: Callable[[int], T], *, first_step: int = 0, enabled: bool = True, timeout_s: float = 600.0
    ) -> None:
        self._prepare = prepare
        self._next_step = first_step
        self._enabled = enabled
        self._timeout_s = timeout_s
        self._task: _Task[T] | None = None
        self._is_first = True
        # At interpreter exit a thread inside a collective would be torn down under it: wait for it, within
        # limits.
        self._holder: list[_Task[T]] = []
        self._finalizer = weakref.finalize(self, _join_all, self._holder, timeout_s)

    def __iter__(self) -> PrefetchMicroBatchIterator[T]:
        return self

    def __next__(self) -> Prefetched[T]:
        started = time.perf_counter()
        task = self._task if self._task is not None else _Task(self._prepare, self._next_step)
        if self._task is None:
            task.run()
        self._task = None
        self._holder.clear()
        task.join(self._timeout_s)
        value = task.result()
        waited = time.perf_counter() - started
        self._next_step += 1
        if self._enabled:
            self._task = _Task(self._prepare, self._next_step)
            self._holder.append(self._task)
            self._task.start()
        return Prefetched(value, task.seconds, waited)

    def wait(self) -> None:
        """Wait until the step in preparation is ready or has failed; the failure stays for `next()`."""
        if self._task is not None:
            self._task.join(self._timeout_s)

    def close(self) -> None:
        """Wait for the background thread and drop its step."""
        if self._task is not None:
            self._task.join(self._timeout_s)
        self._task = None
        self._holder.clear()


class _Task(Generic[T]):
    """One step's preparation: runs here or in a thread, keeps the result or the exception."""

    def __init__(self, prepare: Callable[[int], T], step: int) -> None:
        self.step = step
        self.seconds = 0.0
        self._prepare = prepare
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"data-balance-step-{self.step}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self._value = self._prepare(self.step)
        except BaseException as error:  # handed to the training thread by result()
            self._error = error
        self.seconds = time.perf_counter() - started

    def join(self, timeout_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"step {self.step} was not ready {timeout_s} s after the training asked for it; the loader "
                "does not answer: look at its workers, or raise timeout_s if encoding takes that long"
            )

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def _join_all(tasks: list[_Task[T]], timeout_s: float) -> None:
    for task in tasks:
        task.join(timeout_s)
