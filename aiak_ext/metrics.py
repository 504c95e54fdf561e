"""Per-step figures of a training loop: waiting, cost balance, padding, emitted and deferred samples.

`StepRecorder` serves any loop. Every rank writes one JSON line per step; rank 0 also writes TensorBoard
scalars. The ranks' figures meet in one small all-gather per logging interval; nothing else is communicated.
Rank 0 warns when the order of the steps correlates with length (`aiak_ext.convergence`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from aiak_ext.convergence import OrderFigures, OrderGuard
from aiak_ext.step_timing import make_wait_timer


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank. Fields marked "over ranks" are None when the run broke off before the gather."""

    step: int
    rank: int
    step_time_s: float = 0.0
    data_time_s: float = 0.0
    """Time the rank waited for its loader."""
    grad_sync_wait_s: float = 0.0
    """Time the rank waited at the gradient all-reduce, the transfer itself included."""
    num_samples: int = 0
    num_tokens: int = 0
    """Tokens of samples, padding left out."""
    num_token_slots: int = 0
    """Tokens as batched, padding included."""
    cost: float = 0.0
    """Work of the rank's micro batches, in the unit that the loop chose (FLOPs, tokens)."""
    deferred_samples: int = 0
    """Samples that online dynamic batching put off to a later round."""
    max_deferral_age: int = 0
    """Rounds that the oldest of them has waited."""
    cost_mean: float | None = None
    """Over ranks."""
    cost_max: float | None = None
    """Over ranks."""
    emitted_samples: int | None = None
    """Over ranks, since the run began."""
    emitted_tokens: int | None = None
    """Over ranks, since the run began."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """What the loop adds: loss, learning rate, ..."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """What data workers sent beside the batch; the last value of the step counts."""

    @property
    def padding(self) -> float:
        """Share of the token slots that holds padding."""
        return 1 - self.num_tokens / self.num_token_slots if self.num_token_slots else 0.0

    @property
    def cost_max_over_mean(self) -> float | None:
        """1 when all ranks have the same work."""
        if self.cost_max is None or self.cost_mean is None:
            return None
        return self.cost_max / self.cost_mean if self.cost_mean else 1.0


_GATHERED = ("cost", "num_samples", "num_tokens")


class StepRecorder:
    """Measures the steps of a training loop.

    ```
    recorder = StepRecorder(directory, group=data_parallel_group)
    config.finalize_model_grads_func = recorder.timed_grad_sync(finalize_model_grads)
    for batch in loop:
        recorder.start_step()
        with recorder.data_wait(): batch = next(iterator)
        recorder.add_batch(num_samples=..., num_tokens=..., num_token_slots=..., cost=...)
        ...
        recorder.end_step({"loss": loss})
    ```

    Args:
        directory: Receives `steps_rank%05d.jsonl` of every rank, and TensorBoard files of rank 0.
        group: The ranks whose work is compared: the data-parallel group. None means the world, or this
            process alone without torch.distributed. All its ranks call `end_step` equally often.
        log_interval: Steps between two all-gathers and between two writes. JSON lines tell of every step,
            TensorBoard, whose writing costs the most, of the last one of each interval.
        device: Where the collective's tensor lives and which clock measures waiting.
        tensorboard: Whether rank 0 writes TensorBoard scalars.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        log_interval: int = 10,
        device: torch.device | str = "cpu",
        tensorboard: bool = True,
    ) -> None:
        if log_interval < 1:
            raise ValueError(
                f"log_interval is {log_interval}: nothing would ever be written. Give 1 (every step) or more."
            )
        self._group = group
        self._log_interval = log_interval
        self._device = torch.device(device)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._grad_sync_timer = make_wait_timer(self._device)
        self._order_guard = OrderGuard(warn=self._rank == 0)
        self._data_time_s = 0.0
        self._started_at: float | None = None
        self._current = StepRecord(step=0, rank=self._rank)
        self._pending: list[StepRecord] = []
        self._step = self._emitted_samples = self._emitted_tokens = 0
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / f"steps_rank{self._rank:05d}.jsonl").open("a", encoding="utf-8")
        self._tensorboard = _summary_writer(path) if tensorboard and self._rank == 0 else None

    def start_step(self) -> None:
        """Begin a step; called again within a step (Megatron's rerun), the batches are counted anew."""
        if self._started_at is None:
            self._started_at = time.perf_counter()
            self._data_time_s = 0.0
            self._grad_sync_timer.pop_seconds()
        self._current = StepRecord(step=self._step, rank=self._rank)

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Around `next(data_iterator)`."""
        started_at = time.perf_counter()
        try:
            yield
        finally:
            self._data_time_s += time.perf_counter() - started_at

    @contextmanager
    def grad_sync(self) -> Iterator[None]:
        """Around the gradient all-reduce."""
        with self._grad_sync_timer.measure():
            yield

    def timed_grad_sync(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` (Megatron's `finalize_model_grads`) with its waiting time measured."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.grad_sync():
                return function(*args, **kwargs)

        return timed

    def add_batch(
        self,
        *,
        num_samples: int,
        num_tokens: int,
        num_token_slots: int,
        cost: float,
        deferred_samples: int = 0,
        max_deferral_age: int = 0,
        counters: Mapping[str, float] | None = None,
    ) -> None:
        """Count one micro batch of the current step; the arguments are `StepRecord`'s fields."""
        now = self._current
        self._current = replace(
            now,
            num_samples=now.num_samples + num_samples,
            num_tokens=now.num_tokens + num_tokens,
            num_token_slots=now.num_token_slots + num_token_slots,
            cost=now.cost + cost,
            deferred_samples=deferred_samples,
            max_deferral_age=max(now.max_deferral_age, max_deferral_age),
            counters={**now.counters, **(counters or {})},
        )

    def end_step(self, scalars: Mapping[str, float] | None = None) -> None:
        """Finish the step; every `log_interval` steps a collective call over the group."""
        if self._started_at is None:
            raise ValueError("end_step() without start_step(): there is no step to time. Call start_step() first.")
        grad_sync_wait_s = self._grad_sync_timer.pop_seconds()  # first: on CUDA it waits for the stream
        record = replace(
            self._current,
            step_time_s=time.perf_counter() - self._started_at,
            data_time_s=self._data_time_s,
            grad_sync_wait_s=grad_sync_wait_s,
            scalars=dict(scalars or {}),
        )
        self._pending.append(record)
        self._started_at = None
        self._step += 1
        if len(self._pending) >= self._log_interval:
            self.flush()

    def flush(self) -> None:
        """Gather and write the steps that are not written yet. A collective call over the group."""
        if not self._pending:
            return
        cost, num_samples, num_tokens = self._gather_figures().unbind(-1)  # [ranks, steps] each
        emitted_samples = (self._emitted_samples + num_samples.sum(0).cumsum(0)).long().tolist()
        emitted_tokens = (self._emitted_tokens + num_tokens.sum(0).cumsum(0)).long().tolist()
        self._emitted_samples, self._emitted_tokens = emitted_samples[-1], emitted_tokens[-1]
        order = self._order_guard.observe(num_samples.sum(0).tolist(), num_tokens.sum(0).tolist())
        over_ranks = zip(cost.mean(0).tolist(), cost.amax(0).tolist(), emitted_samples, emitted_tokens)
        records = [
            replace(record, cost_mean=cost_mean, cost_max=cost_max, emitted_samples=samples, emitted_tokens=tokens)
            for record, (cost_mean, cost_max, samples, tokens) in zip(self._pending, over_ranks)
        ]
        self._pending = []
        self._write(records)
        self._file.flush()
        if self._tensorboard is not None:
            scalars = _tensorboard_scalars(records[-1]) | _convergence_scalars(order, num_samples.sum(0)[-1].item())
            for tag, value in scalars.items():
                self._tensorboard.add_scalar(tag, value, records[-1].step)

    def state_dict(self) -> dict[str, int]:
        """Counters that a resumed run continues from. Flushes: a collective call over the group."""
        self.flush()
        return {
            "step": self._step,
            "emitted_samples": self._emitted_samples,
            "emitted_tokens": self._emitted_tokens,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state_dict()` of an earlier run."""
        self._step = state["step"]
        self._emitted_samples = state["emitted_samples"]
        self._emitted_tokens = state["emitted_tokens"]

    def close(self) -> None:
        """Write what is left without communicating (a peer may be gone); at a regular end `flush` first."""
        self._write(self._pending)
        self._pending = []
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()
        self.close()

    def _gather_figures(self) -> torch.Tensor:
        """float64 [ranks, pending steps, len(_GATHERED)] on the host."""
        rows = [[float(getattr(record, name)) for name in _GATHERED] for record in self._pending]
        local = torch.tensor(rows, dtype=torch.float64, device=self._device)
        if not dist.is_initialized():
            return local[None].cpu()
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, local, group=self._group)
        return torch.stack(gathered).cpu()

    def _write(self, records: Sequence[StepRecord]) -> None:
        self._file.writelines(json.dumps(vars(record)) + "\n" for record in records)


def _tensorboard_scalars(record: StepRecord) -> dict[str, float]:
    """Tag -> value of one step; what is not known is left out."""
    scalars: dict[str, float | None] = {
        "time/step_s": record.step_time_s,
        "time/data_s": record.data_time_s,
        "time/grad_sync_wait_s": record.grad_sync_wait_s,
        "balance/local_cost": record.cost,
        "balance/cost_max_over_mean": record.cost_max_over_mean,
        "data/padding": record.padding,
        "data/emitted_samples": record.emitted_samples,
        "data/emitted_tokens": record.emitted_tokens,
        "data/deferred_samples": record.deferred_samples,
        "data/max_deferral_age": record.max_deferral_age,
        **{f"train/{name}": value for name, value in record.scalars.items()},
        **{f"worker/{name}": value for name, value in record.counters.items()},
    }
    return {tag: value for tag, value in scalars.items() if value is not None}


def _convergence_scalars(order: OrderFigures, samples_per_step: float) -> dict[str, float]:
    """Tag -> value; correlations only once there are steps enough."""
    figures = {"length_autocorrelation": order.autocorrelation, "length_trend": order.trend}
    scalars = {f"convergence/{name}": value for name, value in figures.items() if not math.isnan(value)}
    return {**scalars, "convergence/samples_per_step": samples_per_step}


def _summary_writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # here: importing it takes seconds
    except ImportError as error:
        raise ValueError(
            "TensorBoard scalars were asked for but tensorboard is not installed, so none would be written. "
            "Install `aiak-ext[metrics]` or pass tensorboard=False."
        ) from error
    return SummaryWriter(str(directory))
