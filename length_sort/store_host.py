"""A small process that hosts the TCPStore through which data workers agree on rounds.

The store must not live in a process that forks: with the forking training process as the host, one start in four
hung. This file is run as a script and imports nothing but torch, so the host starts in about two seconds.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

BEATS_KEY = "odb/beats"
"""Counter that every client's heartbeat raises; the host reads it to see whether anyone still needs it."""

_POLL_S = 1.0


class StoreHost:
    """Starts the host process and knows its port. One per set of ranks, on its first rank.

    The host outlives its parent only as long as some client's heart beats, so that the other ranks can finish their
    last round, or find out which rank died, and then leaves by itself.
    """

    def __init__(self, *, start_timeout_s: float = 120.0, linger_s: float = 10.0) -> None:
        """
        Args:
            start_timeout_s: How long the process may take to report its port.
            linger_s: Seconds without any heartbeat after which an orphaned host leaves.

        Raises:
            RuntimeError: the process did not report a port in time.
        """
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(os.getpid()), str(linger_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # torch looks up the name of every client for its log; a slow name server must not stall them all.
            env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
        )
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:  # select() takes no descriptor above 1023
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(start_timeout_s) else b""
        if not line.strip().isdigit():
            self.close()
            raise RuntimeError(
                f"The store host did not report its port within {start_timeout_s} s (it said {line!r}). Data workers "
                f"cannot agree without it. Check that {sys.executable} can import torch on this node."
            )
        self.port = int(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process at once; safe to call twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _serve(parent_pid: int, linger_s: float) -> None:
    from torch.distributed import TCPStore

    # An interrupt at the terminal reaches the whole process group; the ranks still need the store to wind up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    beats, last_change = -1, time.monotonic()
    while time.monotonic() - last_change < linger_s:
        now_beats = store.add(BEATS_KEY, 0)
        if now_beats != beats:
            beats, last_change = now_beats, time.monotonic()
        time.sleep(_POLL_S)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
