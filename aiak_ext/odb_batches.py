"""From a group of samples to a batch: the user's hooks, guarded so that every group gives exactly one batch."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import torch
from megatron.energon import DefaultTaskEncoder, TaskEncoder
from megatron.energon.task_encoder.base import get_stateless
from megatron.energon.worker import WorkerConfig

from aiak_ext.worker_counters import attach_counters, has_field, set_field
from length_sort import GroupInfo, ODBGroupDataset, SampleGroup
from length_sort.loss_scale import IGNORED_LABEL
from length_sort.sample_errors import SampleErrors

INFO_FIELD = "odb_info"


def check_hooks(task_encoder: TaskEncoder[Any, Any, Any, Any], *, packed: bool) -> None:
    """Refuses hooks that cannot make one batch of one group.

    Raises:
        ValueError: naming the hook, the consequence and the remedy.
    """
    name = type(task_encoder).__name__
    for hook in ("batch", "encode_batch", "postencode_sample"):
        if inspect.isgeneratorfunction(getattr(task_encoder, hook)):
            raise ValueError(
                f"{name}.{hook} is a generator: one group could become several batches or none, and the ranks would no "
                "longer take equally many steps. Return one result."
            )
    if task_encoder._is_overridden(task_encoder.batch_group_criterion):
        raise ValueError(
            f"{name} overrides batch_group_criterion: it would split the groups that the ranks have agreed on. Leave "
            "it out under ODB."
        )
    if packed and not task_encoder._is_overridden(task_encoder.pack_selected_samples):
        raise ValueError(
            f"--odb-policy packed, but {name} has no pack_selected_samples: a group cannot become one packed sample. "
            "Define it, or use --odb-policy tight."
        )
    batch_type = _declared_batch_type(task_encoder)
    if batch_type is not None and INFO_FIELD not in {field.name for field in dataclasses.fields(batch_type)}:
        raise ValueError(_no_room(batch_type.__name__))


def _declared_batch_type(task_encoder: TaskEncoder[Any, Any, Any, Any]) -> type[Any] | None:
    """The dataclass that batches will be, where the task encoder says so by a type or a return annotation."""
    declared = getattr(task_encoder, "_batch_type", None)
    if declared is None:
        encode_batch = task_encoder.encode_batch
        is_own = task_encoder._is_overridden(encode_batch, bases=(TaskEncoder, DefaultTaskEncoder))
        hook = inspect.unwrap(encode_batch if is_own else task_encoder.batch)
        try:
            declared = typing.get_type_hints(hook).get("return")
        except NameError:  # annotated with a name that exists for type checkers only
            return None
    return declared if isinstance(declared, type) and dataclasses.is_dataclass(declared) else None


def _no_room(type_name: str) -> str:
    return (
        f"The batch type {type_name} has no field {INFO_FIELD!r}: the group's figures (loss weight, sample counts) "
        f"would be lost on the way to the training process. Add `{INFO_FIELD}: torch.Tensor | None = None`."
    )


class GroupBatcher:
    """Makes one batch of each group, whatever the user's hooks do.

    A hook that fails or skips goes to the user's error handler as always; an idle batch, without loss, takes the
    place of the lost one, since a missing batch would pair all later steps of this rank with other ranks' wrongly.
    """

    def __init__(
        self,
        task_encoder: TaskEncoder[Any, Any, Any, Any],
        groups: ODBGroupDataset,
        *,
        packed: bool,
        postencode: bool,
        failure_tolerance: int,
        worker_config: WorkerConfig,
    ) -> None:
        """
        Args:
            task_encoder: Whose hooks make the batch; its `idle_batch(batch, info)`, where it has one, makes idle ones.
            groups: Source of the groups, for its counters.
            packed: Pack each group into one sample first (``pack_selected_samples``).
            postencode: Post-encode each sample first (``postencode_sample``).
            failure_tolerance: Failures in a row that end the run; 0 for no limit.
            worker_config: The pipeline's.
        """
        self._task_encoder = task_encoder
        self._groups = groups
        self._packed = packed
        self._postencode = postencode
        self._errors = SampleErrors("batch of an ODB group", worker_config, tolerance=failure_tolerance)
        self._last_samples: list[Any] = []

    @property
    def stateless(self) -> bool:
        """Whether a batch can be made again from its group's restore key."""
        used = {"pack_selected_samples": self._packed, "postencode_sample": self._postencode}
        hooks = ["batch", "encode_batch", *(hook for hook, is_used in used.items() if is_used)]
        return all(get_stateless(getattr(self._task_encoder, hook)) for hook in hooks)

    def batch_group(self, groups: list[SampleGroup]) -> Any:
        """The batch of the one group that Energon's ``BatchDataset`` hands over."""
        (group,) = groups
        batch, info = None, group.info
        if group.samples:
            try:
                batch = self._encoded(group.samples)
            except Exception as error:
                self._errors.handle(error, group)
                info = dataclasses.replace(info, local_samples=0, local_tokens=0, local_loss_tokens=0, idle=True)
            else:
                self._errors.succeeded()
                self._last_samples = group.samples
        if batch is None:
            batch = self._idle(group.template or self._last_samples, info)
        if isinstance(batch, dict) or has_field(batch, INFO_FIELD):
            set_field(batch, INFO_FIELD, info.to_tensor())
        else:
            raise ValueError(_no_room(type(batch).__name__))
        counters = self._groups.counters
        attach_counters(
            batch,
            {
                "waiting_samples": self._groups.num_waiting,
                "waiting_bytes": self._groups.num_waiting_bytes,
                "reencoded_samples": self._groups.num_reencoded,
                "lost_samples": counters.lost_samples + counters.dropped_samples,
                "deferred_samples": counters.deferred_samples,
                "oldest_deferral": counters.oldest_deferral,
            },
        )
        return batch

    def _encoded(self, samples: list[Any]) -> Any:
        if self._postencode:
            samples = [self._task_encoder.postencode_sample(sample) for sample in samples]
        if self._packed:
            samples = [self._task_encoder.pack_selected_samples(samples)]
        return self._task_encoder.encode_batch(self._task_encoder.batch(samples))

    def _idle(self, template: list[Any], info: GroupInfo) -> Any:
        if not template:
            raise ValueError(
                "An idle batch is needed, and this worker has not made any batch yet to take its shape from: the first "
                "group failed. See the error before this one."
            )
        batch = self._encoded(template)
        hook = getattr(self._task_encoder, "idle_batch", without_loss)
        return hook(batch, info)


def unchanged(batch: Any) -> Any:
    """Takes the place of a hook that the batcher has run already."""
    return batch


def without_loss(batch: Any, info: GroupInfo) -> Any:
    """The default `idle_batch`: the same batch with all `labels` ignored and the `loss_mask` zero.

    Args:
        batch: A real batch, as ``encode_batch`` made it.
        info: Figures of the idle group.

    Raises:
        ValueError: the batch has neither field, so its loss cannot be switched off.
    """
    ignored = {"labels": IGNORED_LABEL, "loss_mask": 0}
    found = False
    for name, value in ignored.items():
        old = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(old, torch.Tensor):
            set_field(batch, name, torch.full_like(old, value))
            found = True
    if not found:
        raise ValueError(
            f"{type(batch).__name__} has neither labels nor loss_mask: an idle batch would be trained a second time. "
            "Define idle_batch(self, batch, info) on the task encoder and return a batch without loss."
        )
    return batch
