"""Puts the data balance that the flags ask for around a training loop's loader, or around its vision encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from aiak_ext.config import ExtensionConfig
from aiak_ext.loader import TrainLoader
from aiak_ext.startup import announce, balance_line
from data_balance import BalancedDataIterator, BalanceMetrics, BalanceOptions, BatchCodec, ModelConfig, SampleCostModel
from data_balance.vision import BalancedVisionEncoder

T = TypeVar("T")


def balance_options(config: ExtensionConfig, **options: Any) -> BalanceOptions:
    """The data balance's options as the flags set them; `options` are further fields of `BalanceOptions`."""
    settings = config.data_balance
    return BalanceOptions(
        calculate_per_token_loss=config.calculate_per_token_loss,
        threshold=settings.threshold,
        tolerance=settings.tolerance,
        fit_steps=settings.fit_steps,
        **options,
    )


class BalancedTrainLoader(TrainLoader[T]):
    """A :class:`TrainLoader` whose batches are balanced over the ranks, step by step; its state stays exact.

    Without a fitted cost model the state files are those of the loader alone, so the balance can be switched on and
    off between runs.
    """

    def __init__(self, loader: TrainLoader[T], balanced: BalancedDataIterator) -> None:
        super().__init__(loader.loader)
        self._unbalanced = loader
        self.balanced = balanced

    def __next__(self) -> T:
        return next(self.balanced)

    @property
    def last_metrics(self) -> BalanceMetrics | None:
        """What balancing the current step did; None before the first."""
        return self.balanced.last_metrics

    def save_state(self) -> Any:
        """State of this rank from before the first step that was not handed out (one may be prepared already)."""
        return self.balanced.save_state()

    def restore_state(self, state: Any) -> None:
        self.balanced.restore_state(state)

    def close(self) -> None:
        """Waits for the step in preparation and stops the worker processes."""
        self.balanced.close()
        self._unbalanced.close()


def balance_train_loader(
    loader: TrainLoader[T],
    config: ExtensionConfig,
    *,
    num_microbatches: int | Callable[[int], int],
    group: dist.ProcessGroup | None = None,
    cost_model: SampleCostModel | None = None,
    codec: BatchCodec | None = None,
    **options: Any,
) -> TrainLoader[T]:
    """`loader` with ``--use-data-balance --data-balance-scope step`` where the configuration says so, else unchanged.

    Args:
        loader: Of this rank.
        config: The flags.
        num_microbatches: Micro batches per optimizer step, or a callable of the step's index.
        group: The data-parallel ranks; None is the world.
        cost_model: Weighs samples; by default the model config file's sizes, or the algorithm's own rule.
        codec: Splits and merges batches; by default the one for tokens, labels and packed pixel rows.
        options: Further fields of `data_balance.BalanceOptions` (pipeline stages, memory caps, first step).

    Raises:
        ValueError: as the data balance does, e.g. without per-token loss.
    """
    settings = config.data_balance
    announce(balance_line(settings), loader.loader.worker_config)
    if not (settings.active and settings.scope == "step"):
        return loader
    balanced = BalancedDataIterator(
        loader,
        num_microbatches=num_microbatches,
        micro_batch_size=None if config.odb.active else config.micro_batch_size,
        data_type="both",
        sorting_algo_name=settings.sorting_algo,
        model_config_path=settings.model_config,
        group=group,
        cost_model=cost_model,
        codec=codec,
        options=balance_options(config, **options),
    )
    return BalancedTrainLoader(loader, balanced)


def balance_vision_encoder(
    encoder: Callable[..., Any],
    config: ExtensionConfig,
    *,
    num_microbatches: int,
    group: dist.ProcessGroup | None = None,
    cost_model: SampleCostModel | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`encoder` with ``--use-data-balance --data-balance-scope encoder`` where the configuration says so, else itself.

    Args:
        encoder: Maps (pixel rows [patches, dim], grids [images, 3]) to embeddings.
        config: The flags.
        num_microbatches: Micro batches per optimizer step.
        group: The data-parallel ranks; None is the world.
        cost_model: Its vision part weighs images; by default the model config file's sizes, or a ViT-L's.
        options: Further arguments of `BalancedVisionEncoder` (`split_frames`, `merge_size`, `timeout_s`).
    """
    settings = config.data_balance
    if not (settings.active and settings.scope == "encoder"):
        return encoder
    vision = None if cost_model is None else cost_model.vision
    if settings.model_config is not None:
        model = ModelConfig.from_json(settings.model_config)
        model.check_group(dist.get_world_size(group), dist.get_world_size())
        vision = vision or model.vision
    return BalancedVisionEncoder(
        encoder,
        group,
        sorting_algo_name=settings.sorting_algo,
        cost_model=vision,
        num_microbatches=num_microbatches,
        threshold=settings.threshold,
        tolerance=settings.tolerance,
        fit_steps=settings.fit_steps,
        **options,
    )
