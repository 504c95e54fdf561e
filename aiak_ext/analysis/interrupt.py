"""Ctrl-C as a request to stop at the next sample and report what is there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the yielded function return True; the second one interrupts as usual.

    An interrupt in the middle of a sample would leave Energon's worker state half set.
    """
    if threading.current_thread() is not threading.main_thread():  # only there may signal handlers be set
        yield lambda: False
        return
    requested = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
