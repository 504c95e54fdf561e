"""Switches the levers on in a user's task encoder: as a mixin of its class, or on an instance."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from megatron.energon import TaskEncoder
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.worker import WorkerConfig

from aiak_ext.config import ExtensionConfig
from aiak_ext.levers import Levers, levers_off
from length_sort.sample_length import sample_length, sample_num_patches


class LengthAwareTaskEncoderMixin:
    """Put before Energon's task encoder in the bases of one's own: ``class Mine(LengthAwareTaskEncoderMixin, ...)``.

    Training pipelines then contain the wrapper that the configuration asks for; validation pipelines stay as they
    are. No hook of the task encoder is changed.
    """

    def __init__(
        self,
        extension_config: ExtensionConfig | None = None,
        *args: Any,
        length_fn: Callable[[Any], float] = sample_length,
        patches_fn: Callable[[Any], int] = sample_num_patches,
        cost_fn: Callable[[Any], float] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            extension_config: Which levers, and how; None switches all off.
            length_fn: Length of an encoded (with ``preencode_sample``: pre-encoded) sample.
            patches_fn: Vision patches of a sample, for ``--odb-max-patches``.
            cost_fn: Compute cost of a sample, for ``--odb-max-cost``.
            args, kwargs: Of the next class in line.
        """
        super().__init__(*args, **kwargs)
        self._levers = Levers(
            extension_config or ExtensionConfig(), length_fn=length_fn, patches_fn=patches_fn, cost_fn=cost_fn
        )

    def build_batch(
        self,
        dataset: SavableDataset[Any],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset[Any]:
        """Energon's hook of this name, with the active lever's wrapper put in."""
        return self._levers.build_batch(
            self,
            super().build_batch,  # type: ignore[misc]
            dataset,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            worker_config=worker_config,
        )

    def build_val_datasets(self, **kwargs: Any) -> SavableDataset[Any]:
        """Energon's hook of this name; the levers are for training."""
        with levers_off():
            return super().build_val_datasets(**kwargs)  # type: ignore[misc]


def register(
    task_encoder: TaskEncoder[Any, Any, Any, Any],
    config: ExtensionConfig,
    *,
    length_fn: Callable[[Any], float] = sample_length,
    patches_fn: Callable[[Any], int] = sample_num_patches,
    cost_fn: Callable[[Any], float] | None = None,
) -> TaskEncoder[Any, Any, Any, Any]:
    """Does to an instance what the mixin does to a class, for task encoders whose class one does not own.

    Args:
        task_encoder: Changed in place.
        config: Which levers, and how.
        length_fn, patches_fn, cost_fn: As of the mixin.

    Returns:
        The same task encoder.

    Raises:
        ValueError: the task encoder has levers already.
    """
    if hasattr(task_encoder, "_levers"):
        raise ValueError(
            f"{type(task_encoder).__name__} has levers already (the mixin's, or of an earlier register): a second pool "
            "would sort the first one's output. Register once, or leave the mixin out."
        )
    build_batch, build_val_datasets = task_encoder.build_batch, task_encoder.build_val_datasets
    levers = Levers(config, length_fn=length_fn, patches_fn=patches_fn, cost_fn=cost_fn)

    def build_batch_with_levers(
        self: Any,
        dataset: SavableDataset[Any],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset[Any]:
        return levers.build_batch(
            self,
            build_batch,
            dataset,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            worker_config=worker_config,
        )

    def build_val_datasets_without(self: Any, **kwargs: Any) -> SavableDataset[Any]:
        with levers_off():
            return build_val_datasets(**kwargs)

    patched: Any = task_encoder
    patched._levers = levers
    patched.build_batch = MethodType(build_batch_with_levers, task_encoder)
    patched.build_val_datasets = MethodType(build_val_datasets_without, task_encoder)
    return task_encoder
