"""Fits a cost model to measured forward and backward times of a user's module on this device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from data_balance import CostModel

DEFAULT_LENGTHS = (128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured times and the model fitted to them."""

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    """Median forward and backward time of one sequence of each length."""
    model: CostModel
    """In seconds."""

    @property
    def relative_errors(self) -> list[float]:
        """(fitted - measured) / measured of each length."""
        fitted = self.model.cost(np.array(self.lengths))
        return [float(f / s - 1) for f, s in zip(fitted, self.seconds)]

    def rows(self) -> list[dict[str, Any]]:
        """One row per length."""
        fitted = self.model.cost(np.array(self.lengths))
        return [
            {"length": length, "measured_ms": 1e3 * s, "fitted_ms": 1e3 * float(f), "error": float(f / s - 1)}
            for length, s, f in zip(self.lengths, self.seconds, fitted)
        ]


def calibrate(
    step: Callable[[int], torch.Tensor],
    lengths: Sequence[int],
    *,
    repeats: int = 5,
    warmup: int = 1,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Calibration:
    """Time one sequence of each length, forward and backward, and fit linear, quadratic and constant cost.

    Args:
        step: Runs the forward of one sequence of a length in tokens (or patches) and returns its output. When the
            output requires a gradient, its sum is differentiated too.
        lengths: Lengths to time, at least three of them.
        repeats: Timed runs per length; their median counts.
        warmup: Untimed runs per length, for compilation and allocation.
        progress: Wraps the iterator over lengths, e.g. `tqdm`.

    Raises:
        ValueError: fewer than three different lengths, or a length or number of repeats below one.
    """
    if len(set(lengths)) < 3 or min(lengths) < 1 or repeats < 1:
        raise ValueError(
            f"lengths {list(lengths)} with {repeats} repeats do not determine a line and a square; give three "
            "different positive lengths or more and at least one repeat"
        )
    seconds = []
    for length in progress(lengths):
        for _ in range(warmup):
            seconds_of_step(step, length)
        seconds.append(median(seconds_of_step(step, length) for _ in range(repeats)))
    return Calibration(lengths=tuple(lengths), seconds=tuple(seconds), model=CostModel.fit(lengths, seconds))


def seconds_of_step(step: Callable[[int], torch.Tensor], length: int) -> float:
    """Wall time of one forward and backward, until the device has finished."""
    _synchronize()
    start = time.perf_counter()
    output = step(length)
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.float().sum().backward()
    _synchronize()
    return time.perf_counter() - start


def device_name() -> str:
    """What the times were measured on, for the cost file."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
