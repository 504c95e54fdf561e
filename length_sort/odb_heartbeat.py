"""Signs of life of a data worker: written by a background thread, read by the workers that wait for it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence

from torch.distributed import DistNetworkError, Store

from length_sort.store_client import StoreClient
from length_sort.store_host import BEATS_KEY


def beat_interval_s(timeout_s: float) -> float:
    """Seconds between two beats: often enough that a few may be late within the timeout."""
    return min(max(timeout_s / 10, 0.05), 5.0)


class Heartbeat:
    """Writes ``"<beats> <busy seconds>"`` under a key until stopped.

    Late is not dead: a worker that waits for its training process (evaluation, a checkpoint) or for its peers is at
    rest and beats with zero busy seconds. One that is producing a batch and has not read a sample for long says so,
    since its beats alone would hide that it is stuck.
    """

    def __init__(self, store: Store, key: str, *, timeout_s: float) -> None:
        self._store = store
        self._key = key
        self._interval_s = beat_interval_s(timeout_s)
        self._busy_since: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="odb-heartbeat", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """The worker is producing a batch and has just got on with it."""
        self._busy_since = time.monotonic()

    def rest(self) -> None:
        """The worker waits for somebody else from now on."""
        self._busy_since = None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2)  # it may be stuck in a store that does not answer

    @property
    def orphaned(self) -> bool:
        """Whether this is a data worker (or other multiprocessing child) whose parent is gone."""
        parent = multiprocessing.parent_process()
        return parent is not None and os.getppid() != parent.pid

    def _run(self) -> None:
        beats = 0
        while not self._stopped.is_set() and not self.orphaned:
            beats += 1
            busy_since = self._busy_since
            busy_s = 0.0 if busy_since is None else time.monotonic() - busy_since
            try:
                self._store.set(self._key, f"{beats} {busy_s:.3f}")
                self._store.add(BEATS_KEY, 1)
            except DistNetworkError:
                return  # the store is gone; whoever waits for a round says so
            self._stopped.wait(self._interval_s)


class HeartbeatWatch:
    """Judges, during one wait, which ranks have shown no life for the timeout.

    Ages are measured on this process's clock from changes it saw itself, so clocks need not agree.
    """

    def __init__(self, store: StoreClient, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._start = time.monotonic()
        self._seen: dict[str, tuple[bytes, float]] = {}

    def silent(self, keys: Sequence[str]) -> list[str]:
        """Reasons, one per key whose worker is dead or stuck, each naming how long; "" for the others."""
        return [self._reason(key) for key in keys]

    def _reason(self, key: str) -> str:
        now = time.monotonic()
        value = self._store.look(key) or b""
        if key not in self._seen:
            self._seen[key] = (value, self._start)
        elif self._seen[key][0] != value:
            self._seen[key] = (value, now)
        silent_s = now - self._seen[key][1]
        if silent_s >= self._timeout_s:
            return f"no heartbeat for {silent_s:.1f} s" if value else f"not started within {silent_s:.1f} s"
        busy_s = float(value.split()[1]) if value else 0.0
        return f"alive, but no sample read for {busy_s:.1f} s" if busy_s >= self._timeout_s else ""
