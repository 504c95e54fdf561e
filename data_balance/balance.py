"""DataBalance: takes a step's micro batches from the loader and hands them out balanced over data-parallel ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from data_balance.codec import DATA_TYPES, BatchCodec
from data_balance.cost import CostModel, SampleCostModel
from data_balance.groups import REPORT_GRACE_S
from data_balance.metrics import BalanceMetrics
from data_balance.options import BalanceOptions, ModelConfig, choose_cost_model
from data_balance.prefetch import PrefetchMicroBatchIterator
from data_balance.state import BalanceState, can_save, restore_loader, save_loader
from data_balance.step import BalancedStep, StepBalancer, StepSpec

logger = logging.getLogger(__name__)

NumMicrobatches = int | Callable[[int], int]


@dataclass(frozen=True)
class StepRequest:
    """Arguments of `build_balanced_train_data_iterator`; the step in preparation was made with the last call's."""

    is_vit_last_stage: bool
    max_batch_capacity: int | None
    micro_batch_size: int | None
    num_microbatches: NumMicrobatches
    data_type: str

    def spec(self, step: int, is_first_stage: bool) -> StepSpec:
        number = self.num_microbatches(step) if callable(self.num_microbatches) else self.num_microbatches
        if number < 1:
            raise ValueError(f"step {step} has {number} micro batches; give at least one")
        return StepSpec(
            num_microbatches=number,
            micro_batch_size=self.micro_batch_size,
            max_batch_capacity=self.max_batch_capacity,
            data_type=self.data_type,
            keep_pixels=is_first_stage or self.is_vit_last_stage,
        )


class DataBalance:
    """Spreads every optimizer step's samples evenly over the data-parallel ranks, before the forward.

    Args:
        virtual_pipeline_model_parallel_size: number of virtual stages, None without; `len_model` iterators
            then share a step.
        model_config_path: JSON with the image encoder's parallel sizes (`ModelConfig.from_json`), or None.
        sorting_algo_name: a key of `SORTING_ALGORITHMS`.
        len_model: model chunks on this rank (1 without virtual pipelining).
        train_data_iterator: yields this rank's micro batches; a list of them (virtual pipelining) counts as
            its first; a `RerunDataIterator` is unwrapped, and what is built is wrapped again. None where a
            rank holds no data.
        group: ranks to balance, usually the data-parallel group; None is the world.
        cost_model: weighs samples; a plain `CostModel` weighs their patches only. Without it the model
            config's sizes count, or squared lengths for the seed's algorithm and `DEFAULT_COST_MODEL` for
            the others.
        codec: splits and merges batches; without it the one registered for the batch's type.
        prefetch: prepare the next step while the current one trains.
        options: everything else.

    Raises:
        ValueError: an unknown algorithm, a model config that does not fit the group, unequal chunk numbers,
            or a loss that is not per token.
    """

    def __init__(
        self,
        virtual_pipeline_model_parallel_size: int | None,
        model_config_path: str | None,
        sorting_algo_name: str,
        len_model: int,
        train_data_iterator: Any,
        *,
        group: dist.ProcessGroup | None = None,
        cost_model: CostModel | SampleCostModel | None = None,
        codec: BatchCodec | None = None,
        prefetch: bool = True,
        options: BalanceOptions | None = None,
    ) -> None:
        if len_model < 1 or (len_model > 1 and virtual_pipeline_model_parallel_size is None):
            raise ValueError(
                f"len_model is {len_model} with virtual_pipeline_model_parallel_size "
                f"{virtual_pipeline_model_parallel_size}; several model chunks need virtual pipelining: give "
                "both or neither"
            )
        self.options = options if options is not None else BalanceOptions()
        if self.options.calculate_per_token_loss is None:
            logger.warning(
                "data balance moves samples between ranks, which is exact only with "
                "calculate_per_token_loss; set BalanceOptions(calculate_per_token_loss=True) to confirm it"
            )
        self.num_chunks = len_model
        self._prefetch = prefetch
        self._is_list = virtual_pipeline_model_parallel_size is not None
        self._loader, self._rewrap = unwrap_iterator(train_data_iterator)
        config = ModelConfig.from_json(model_config_path) if model_config_path is not None else None
        if config is not None:
            config.check_group(dist.get_world_size(group), dist.get_world_size())
        self.last_metrics: BalanceMetrics | None = None
        self._iterator: Iterator[Any] | None = None
        self._has_ended = False
        self._request: StepRequest | None = None
        self._restored = BalanceState(None)
        self._snapshots: dict[int, Any] = {}
        self._first_step = self.options.first_step
        self._step = self._first_step - 1
        self._step_length = 0
        self._consumed: Callable[[], int] = lambda: 0
        self._clock: float | None = None
        self._reported_s: float | None = None
        self._balancer: StepBalancer | None = None
        if self._loader is not None:
            model = choose_cost_model(cost_model, config, sorting_algo_name)
            self._balancer = StepBalancer(group, sorting_algo_name, model, codec, self.options)
            self._steps = PrefetchMicroBatchIterator(
                self._prepare,
                first_step=self._first_step,
                enabled=prefetch,
                # A collective that fails says more than a wait that is given up: it has to be the first to do so.
                timeout_s=2 * (self.options.timeout_s + REPORT_GRACE_S),
            )

    @property
    def cost_model(self) -> SampleCostModel | None:
        """The cost model in use, fitted or not; None on a rank without data."""
        return None if self._balancer is None else self._balancer.cost_model

    def build_balanced_train_data_iterator(
        self,
        is_vit_last_stage: bool = False,
        max_batch_capacity: int | None = None,
        micro_batch_size: int | None = None,
        num_microbatches: NumMicrobatches | None = None,
        data_type: str = "image",
    ) -> Any:
        """Iterator over the next optimizer step's balanced micro batches; `len_model` of them under virtual pipelining.

        With prefetch the next call has to come with the same arguments; for a number of micro batches that
        changes give a callable of the step's index.

        Args:
            is_vit_last_stage: this rank holds the last ViT stage; it gets pixels, as the first pipeline
                stage does.
            max_batch_capacity: most samples that one micro batch may hold; None sets no limit.
            micro_batch_size: samples per micro batch as the loader yields them; checked against
                `max_batch_capacity`.
            num_microbatches: micro batches of the step, or a callable from the step's index.
            data_type: visual inputs whose patches count as cost: "image", "video" or "both".

        Raises:
            ValueError: bad arguments.
            StopIteration: no rank has any data left.
        """
        request = StepRequest(is_vit_last_stage, max_batch_capacity, micro_batch_size, num_microbatches or 1, data_type)
        batches = self.next_step(request)
        if batches is None:
            return [None] * self.num_chunks if self._is_list else None
        views = [_StepView(batches) for _ in range(self.num_chunks)]
        self.count_with(lambda: min(view.position for view in views), len(batches))
        wrapped = [self._rewrap(view) for view in views]
        return wrapped if self._is_list else wrapped[0]

    def next_step(self, request: StepRequest) -> list[Any] | None:
        """Balanced micro batches of the next step; None on a rank without data."""
        if self._balancer is None:
            return None
        self._check(request)
        self._record_time()
        self._request = request
        prepared = next(self._steps)
        self._step += 1
        for old in [step for step in self._snapshots if step < self._step]:
            del self._snapshots[old]
        metrics = prepared.value.metrics
        metrics.wait_s = prepared.wait_s
        if prepared.prepare_s > 0:
            metrics.hidden_share = max(0.0, 1.0 - prepared.wait_s / prepared.prepare_s)
        self.last_metrics = metrics
        self._clock = time.thread_time()
        batches = prepared.value.batches
        if self._step == self._first_step and self._restored.consumed:
            batches = batches[self._restored.consumed :]
        return batches

    def count_with(self, consumed: Callable[[], int], step_length: int) -> None:
        """Ask `consumed` how many of the current step's `step_length` micro batches are gone, when a state is saved."""
        self._consumed, self._step_length = consumed, step_length

    def report_step_time(self, seconds: float) -> None:
        """Seconds that this rank computed in the current step, without waiting, for fitting the cost model.

        Without reports the CPU time of the training thread counts, which on a GPU is no measure of the work.
        """
        self._reported_s = seconds

    def save_state(self) -> Any:
        """State from which the stream goes on exactly: the loader's from before the first step not handed out."""
        if self._balancer is None:
            raise ValueError("this rank holds no data iterator, so it has no position to save; save on data ranks only")
        fitted = self._balancer.cost_model if self._balancer.is_fitted else None
        if self._step < self._first_step:
            # Nothing is pulled yet, so the loader stands where it was built or restored.
            return replace(self._restored, loader=save_loader(self._loader), cost_model=fitted).to_builtins()
        consumed = self._consumed()
        if consumed < self._step_length:
            skipped = self._restored.consumed if self._step == self._first_step else 0
            return BalanceState(self._snapshots[self._step], consumed + skipped, fitted).to_builtins()
        self._steps.wait()
        following = self._step + 1
        snapshot = self._snapshots[following] if following in self._snapshots else save_loader(self._loader)
        return BalanceState(snapshot, 0, fitted).to_builtins()

    def restore_state(self, state: Any) -> None:
        """Go on from a state of `save_state`, or from the state of a loader without the balance.

        Raises:
            ValueError: steps have been handed out already.
        """
        if self._step >= self._first_step:
            raise ValueError(
                f"{self._step + 1 - self._first_step} steps have been handed out, so a state cannot be "
                "restored any more; restore before training"
            )
        self._restored = BalanceState.from_builtins(state)
        if self._balancer is not None:
            restore_loader(self._loader, self._restored.loader)
            if self._restored.cost_model is not None:
                self._balancer.use_cost_model(self._restored.cost_model)

    def close(self) -> None:
        """Wait for the background thread; the loader is the caller's to close."""
        if self._balancer is not None:
            self._steps.close()

    def _prepare(self, step: int) -> BalancedStep:
        """Pull, balance: runs in the background for every step but the first."""
        assert self._request is not None and self._balancer is not None
        if step == self._first_step:
            # Energon's loader hangs when it is asked between iter() and the first next().
            self._snapshots[step] = self._restored.loader
        elif can_save(self._loader):
            self._snapshots[step] = save_loader(self._loader)
        spec = self._request.spec(step, self.options.is_first_stage)
        balanced = self._balancer.balance(step, self._pull(spec.num_microbatches), spec)
        if balanced is None:
            self._has_ended, self._iterator = False, None  # asked again, a loader may have a further epoch
            raise StopIteration
        return balanced

    def _pull(self, number: int) -> list[Any]:
        """The loader's next batches; fewer at its end, and then none until all ranks have come to theirs."""
        if self._iterator is None:
            # A loader that is an iterator must not be asked for a new one: it would start over.
            self._iterator = self._loader if hasattr(self._loader, "__next__") else iter(self._loader)
        pulled: list[Any] = []
        while len(pulled) < number and not self._has_ended:
            try:
                pulled.append(next(self._iterator))
            except StopIteration:
                self._has_ended = True
        return pulled

    def _check(self, request: StepRequest) -> None:
        if request.data_type not in DATA_TYPES:
            raise ValueError(
                f"data_type is {request.data_type!r}; it says what counts as cost: give one of {[*DATA_TYPES]}"
            )
        capacity, size = request.max_batch_capacity, request.micro_batch_size
        if capacity is not None and size is not None and capacity < size:
            raise ValueError(
                f"max_batch_capacity {capacity} is below micro_batch_size {size}, so the loader's own "
                "batches would not fit; raise the capacity"
            )
        if self._prefetch and self._request is not None and request != self._request:
            raise ValueError(
                f"the arguments changed from {self._request} to {request}, but the step was prepared with "
                "the former; give the same ones at every call, and a callable for a changing num_microbatches"
            )

    def _record_time(self) -> None:
        """Hand the time of the step that just ended to the balancer."""
        assert self._balancer is not None
        if self._clock is None:
            return
        if self._reported_s is None and not torch.cuda.is_available():
            self._reported_s = time.thread_time() - self._clock
        if self._reported_s is not None:
            self._balancer.add_time(self._step, self._reported_s)
        self._reported_s = None


class _StepView:
    """Iterator over one step's micro batches that knows its position."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position >= len(self._batches):
            raise StopIteration
        self.position += 1
        return self._batches[self.position - 1]


def unwrap_iterator(iterator: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The loader's iterator, and what wraps a built iterator as the given one was."""
    if isinstance(iterator, (list, tuple)):
        iterator = next((one for one in iterator if one is not None), None)
    if iterator is not None and hasattr(iterator, "iterable") and hasattr(iterator, "rewind"):
        return iterator.iterable, type(iterator)
    return iterator, lambda view: view
