"""Samples and tokens per second and the share of time spent waiting, over all ranks, of every training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from aiak_ext.step_timing import make_wait_timer


class StepRates:
    """Measures from `start` to `finish`; `timed_grad_sync` marks where ranks wait for each other.

    Args:
        device: Of the model: which clock measures waiting, and where the collective's tensor lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wait_timer = make_wait_timer(device)
        self._started_at = 0.0

    def timed_grad_sync(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` (Megatron's `finalize_model_grads`) with its waiting time measured."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._wait_timer.measure():
                return function(*args, **kwargs)

        return timed

    def start(self) -> None:
        """Begin a step."""
        self._wait_timer.pop_seconds()
        self._started_at = time.perf_counter()

    def finish(self, num_samples: int, num_tokens: int, speaks_for_replica: bool) -> dict[str, float]:
        """Rates of the step; a collective call over all ranks, after the optimizer's step.

        Args:
            num_samples: Over all ranks.
            num_tokens: Of this rank's micro batches, without padding.
            speaks_for_replica: Whether this rank's tokens count; one rank of each model replica says yes.
        """
        waited_s = self._wait_timer.pop_seconds()
        step_time_s = time.perf_counter() - self._started_at
        sums = torch.tensor(
            [num_tokens if speaks_for_replica else 0, waited_s, step_time_s], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(sums)
        all_tokens, all_waited_s, all_time_s = sums.tolist()
        seconds = all_time_s / dist.get_world_size()
        return {
            "samples_per_s": num_samples / seconds,
            "tokens_per_s": all_tokens / seconds,
            "wait_share": all_waited_s / all_time_s,
        }
