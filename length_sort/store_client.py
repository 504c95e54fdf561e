"""A client of the store whose every request ends: with an answer, or with an error after the timeout."""

from __future__ import annotations

import concurrent.futures
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore

_ABSENT = "-"
"""No value of ours: those are JSON, counts and lines."""
_RETRY_S = 0.2

_Job = tuple[Callable[[], Any], "concurrent.futures.Future[Any]"]


class StoreClient:
    """The requests of torch's ``TCPStore`` that rounds need, made by a thread on the caller's behalf.

    torch's client notices a host that is gone, but waits for the answer of one that is frozen (stopped, swapping, its
    node hanging) for ever, connecting included. A thread can be given up on; it never outlives the process.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        """
        Raises:
            DistNetworkError, DistStoreError: the store cannot be reached, or does not answer.
        """
        self._timeout_s = timeout_s
        self._asked_at: float | None = None
        _await_port(host, port, timeout_s)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="odb-store-client", daemon=True)
        self._thread.start()
        # Some of torch's requests have a timeout of their own, whose errors name nobody: ours comes first.
        later = timedelta(seconds=2 * timeout_s)
        self.store: TCPStore = self.run(
            lambda: self._ask(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=later)
        )
        """torch's client, for threads that may block."""

    def run(self, job: Callable[[], Any]) -> Any:
        """The result of `job`, which makes requests; all requests are made within one, as changing threads costs time.

        Raises:
            DistNetworkError: one of its requests has no answer within the timeout.
        """
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._jobs.put((job, result))
        while True:
            try:
                return result.result(min(self._timeout_s / 5, 1.0))
            except concurrent.futures.TimeoutError:
                asked_at = self._asked_at
                if asked_at is not None and time.monotonic() - asked_at > self._timeout_s:
                    raise DistNetworkError(f"it has not answered for {self._timeout_s} s") from None

    def look(self, key: str) -> bytes | None:
        """The value of a key, None where there is none."""
        # One request that never waits: torch's own `get` blocks on a missing key, and makes two.
        value = self._ask(self.store.compare_set, key, _ABSENT, _ABSENT)
        return None if value == _ABSENT.encode() else value

    def set(self, key: str, value: str) -> None:
        self._ask(self.store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        return self._ask(self.store.add, key, amount)

    def append(self, key: str, value: str) -> None:
        self._ask(self.store.append, key, value)  # type: ignore[attr-defined]  # not in the stubs

    def delete(self, key: str) -> None:
        self._ask(self.store.delete_key, key)

    def close(self) -> None:
        self._jobs.put(None)
        if self._asked_at is None:  # otherwise it may be stuck
            self._thread.join(timeout=2)

    def _ask(self, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._asked_at = time.monotonic()
        try:
            return request(*args, **kwargs)
        finally:
            self._asked_at = None


def _await_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens there.

    torch's client tries that too, but for ever where we give up on it: its thread would still try when the interpreter
    ends, and torch aborts the process where its code is left at that moment.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise DistNetworkError(f"{error}, for {timeout_s} s") from None
            time.sleep(_RETRY_S)


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (item := jobs.get()) is not None:
        job, result = item
        try:
            result.set_result(job())
        except Exception as error:  # belongs to the caller, who raises it
            result.set_exception(error)
