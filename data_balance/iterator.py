"""BalancedDataIterator: the data balance as a drop-in iterator for Megatron's training loop."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist

from data_balance.balance import DataBalance, NumMicrobatches, StepRequest, unwrap_iterator
from data_balance.codec import BatchCodec
from data_balance.cost import CostModel, SampleCostModel
from data_balance.metrics import BalanceMetrics
from data_balance.options import BalanceOptions

DEFAULT_SORTING_ALGORITHM = "post_global_balancing_greedy_without_pad"


class BalancedDataIterator:
    """Pulls `num_microbatches` batches per optimizer step, balances them, and hands them out one by one.

    Megatron's rerun mode wants its own iterator outermost:
    ``RerunDataIterator(BalancedDataIterator(loader))``, which `balance_data_iterator` builds. It finds
    `save_state` through ``.iterable``.

    Args:
        train_data_iterator: this rank's loader or iterator; a `RerunDataIterator` is unwrapped.
        num_microbatches: micro batches of a step, or a callable from the step's index.
        micro_batch_size: see `DataBalance.build_balanced_train_data_iterator`, as the next three.
        max_batch_capacity: most samples in one micro batch.
        data_type: visual inputs that count as cost.
        is_vit_last_stage: this rank holds the last ViT stage.
        len_model: model chunks under virtual pipelining; `views` then has an iterator for each.
        sorting_algo_name: see `DataBalance`, as all others.
    """

    def __init__(
        self,
        train_data_iterator: Any,
        *,
        num_microbatches: NumMicrobatches,
        micro_batch_size: int | None = None,
        max_batch_capacity: int | None = None,
        data_type: str = "image",
        is_vit_last_stage: bool = False,
        len_model: int = 1,
        sorting_algo_name: str = DEFAULT_SORTING_ALGORITHM,
        model_config_path: str | None = None,
        group: dist.ProcessGroup | None = None,
        cost_model: CostModel | SampleCostModel | None = None,
        codec: BatchCodec | None = None,
        prefetch: bool = True,
        options: BalanceOptions | None = None,
    ) -> None:
        balance = DataBalance(
            len_model if len_model > 1 else None,
            model_config_path,
            sorting_algo_name,
            len_model,
            unwrap_iterator(train_data_iterator)[0],
            group=group,
            cost_model=cost_model,
            codec=codec,
            prefetch=prefetch,
            options=options,
        )
        request = StepRequest(is_vit_last_stage, max_batch_capacity, micro_batch_size, num_microbatches, data_type)
        self._feed = _Feed(balance, request, len_model)
        self._view = 0

    @property
    def views(self) -> list[BalancedDataIterator]:
        """One iterator per model chunk, over the same micro batches; the first is this one."""
        return [self, *(self._view_of(index) for index in range(1, self._feed.num_views))]

    def _view_of(self, index: int) -> BalancedDataIterator:
        view = object.__new__(BalancedDataIterator)
        view._feed, view._view = self._feed, index
        return view

    def __iter__(self) -> BalancedDataIterator:
        return self

    def __next__(self) -> Any:
        return self._feed.take(self._view)

    @property
    def last_metrics(self) -> BalanceMetrics | None:
        """Figures of the current step."""
        return self._feed.balance.last_metrics

    def report_step_time(self, seconds: float) -> None:
        """See `DataBalance.report_step_time`."""
        self._feed.balance.report_step_time(seconds)

    def save_state(self) -> Any:
        """See `DataBalance.save_state`."""
        return self._feed.balance.save_state()

    def restore_state(self, state: Any) -> None:
        """See `DataBalance.restore_state`."""
        self._feed.balance.restore_state(state)

    def close(self) -> None:
        """See `DataBalance.close`."""
        self._feed.balance.close()


class _Feed:
    """Steps that at least one view has not gone through yet, and every view's position in them."""

    def __init__(self, balance: DataBalance, request: StepRequest, num_views: int) -> None:
        self.balance = balance
        self.num_views = num_views
        self._request = request
        self._steps: deque[list[Any]] = deque()
        self._first = 0
        self._at = [(0, 0)] * num_views

    def take(self, view: int) -> Any:
        """The view's next micro batch; prepares a further step when it is the first to need it."""
        step, position = self._at[view]
        while step < self._first + len(self._steps) and position >= len(self._steps[step - self._first]):
            step, position = step + 1, 0
        if step >= self._first + len(self._steps):
            batches = self.balance.next_step(self._request)
            if batches is None:
                raise ValueError("this rank has no data iterator, so it has no micro batches; use None in its place")
            self._steps.append(batches)
            self.balance.count_with(self._consumed, len(batches))
        self._at[view] = (step, position + 1)
        batch = self._steps[step - self._first][position]
        while self._first < min(at[0] for at in self._at):
            self._steps.popleft()
            self._first += 1
        return batch

    def _consumed(self) -> int:
        """Micro batches of the newest step that all views have taken."""
        newest = self._first + len(self._steps) - 1
        return min(position if step == newest else 0 for step, position in self._at)


def balance_data_iterator(train_data_iterator: Any, **settings: Any) -> Any:
    """Balanced counterpart of what Megatron's loop holds: an iterator, a list of them (virtual pipelining), or None.

    A `RerunDataIterator` comes back as one around the balanced iterator. `settings` are those of
    `BalancedDataIterator` but `len_model`, which is the length of the list.
    """
    is_list = isinstance(train_data_iterator, (list, tuple))
    inner, rewrap = unwrap_iterator(train_data_iterator)
    if inner is None:
        return train_data_iterator
    balanced = BalancedDataIterator(inner, len_model=len(train_data_iterator) if is_list else 1, **settings)
    return [rewrap(view) for view in balanced.views] if is_list else rewrap(balanced)
