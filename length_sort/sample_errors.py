"""Failing samples, handled as Energon handles them: the user's handler, then a limit on failures in a row.

Energon has a class of its own for this from 7.3 on; this one serves 7.2 as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.energon import SkipSample
from megatron.energon.errors import SYSTEM_EXCEPTIONS, FatalSampleError
from megatron.energon.worker import WorkerConfig

Handler = Callable[[Exception, Any, Any], None]


def _log(error: Exception, sample: Any, sources: Any) -> None:
    traceback.print_exception(error)
    print(f"The sample that failed: {getattr(sample, '__key__', None)!r}")


class SampleErrors:
    """What to do about samples that fail, for one place that processes them."""

    def __init__(self, name: str, worker_config: WorkerConfig, *, tolerance: int) -> None:
        """
        Args:
            name: The place, for the error that ends the run.
            worker_config: Its ``global_error_handler`` gets the errors (Energon 7.2 has none: they are printed).
            tolerance: Failures in a row that end the run; 0 for no limit.
        """
        self._name = name
        self._handler: Handler = getattr(worker_config, "global_error_handler", _log)
        self._tolerance = tolerance
        self._num_in_a_row = 0

    def succeeded(self) -> None:
        """A sample went through: failures are counted from zero again."""
        self._num_in_a_row = 0

    def handle(self, error: Exception, sample: Any) -> None:
        """Deals with the error of `sample`; returns where the run may go on without it.

        Raises:
            FatalSampleError: too many failures in a row, or an error that no other sample would avoid.
        """
        if isinstance(error, SkipSample):
            return
        if isinstance(error, SYSTEM_EXCEPTIONS):
            raise FatalSampleError.from_sample(sample, f"{self._name} failed: {error}") from error
        self._handler(error, sample, getattr(sample, "__sources__", None))
        self._num_in_a_row += 1
        if 0 < self._tolerance <= self._num_in_a_row:
            raise FatalSampleError.from_sample(
                sample, f"{self._name} failed {self._num_in_a_row} times in a row. Code or dataset are broken."
            ) from error


@contextmanager
def restore_errors(worker_config: WorkerConfig, sample: Any) -> Iterator[None]:
    """Around restoring `sample`: errors go to ``worker_config.restore_error_handler``, or out (Energon 7.2)."""
    try:
        yield
    except FatalSampleError:
        raise
    except Exception as error:
        handler: Handler | None = getattr(worker_config, "restore_error_handler", None)
        if handler is None:
            raise
        handler(error, sample, getattr(sample, "__sources__", None))
