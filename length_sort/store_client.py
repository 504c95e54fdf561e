"""A client of the store whose every request ends: with an answer, or with an error after the timeout."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore

_Request = tuple[Callable[[], Any], "concurrent.futures.Future[Any]"]


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
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._requests,), name="odb-store-client", daemon=True).start()
        # Some of torch's requests have a timeout of their own, whose errors name nobody: ours comes first.
        later = timedelta(seconds=2 * timeout_s)
        self.store: TCPStore = self._answer(
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=later)
        )
        """torch's client, for threads that may block."""

    def get(self, key: str) -> bytes:
        return self._answer(lambda: self.store.get(key))

    def set(self, key: str, value: str) -> None:
        self._answer(lambda: self.store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        return self._answer(lambda: self.store.add(key, amount))

    def append(self, key: str, value: str) -> None:
        self._answer(lambda: self.store.append(key, value))  # type: ignore[attr-defined]  # not in the stubs

    def check(self, key: str) -> bool:
        """Whether the key is there."""
        return self._answer(lambda: self.store.check([key]))

    def delete(self, key: str) -> None:
        self._answer(lambda: self.store.delete_key(key))

    def close(self) -> None:
        self._requests.put(None)

    def _answer(self, request: Callable[[], Any]) -> Any:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._requests.put((request, answer))
        try:
            return answer.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            raise DistNetworkError(f"it has not answered for {self._timeout_s} s") from None


def _serve(requests: queue.SimpleQueue[_Request | None]) -> None:
    while (item := requests.get()) is not None:
        request, answer = item
        try:
            answer.set_result(request())
        except Exception as error:  # belongs to the caller, who raises it
            answer.set_exception(error)
