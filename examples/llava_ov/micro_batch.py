"""A micro batch on its way from the loader to the ranks of one model replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from examples.llava_ov.samples import LlavaBatch
from length_sort.odb_group import GroupInfo

# What the model computes with. The rest describes it to the host, where reading it must not wait for the device.
_DEVICE_FIELDS = ("tokens", "labels", "pixel_values")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The tensors of a `LlavaBatch`, shapes as there: text and pixels on the training device, sizes on the host."""

    tokens: torch.Tensor
    labels: torch.Tensor
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor
    lengths: torch.Tensor
    num_images: torch.Tensor
    cu_lengths: torch.Tensor | None
    odb_info: torch.Tensor | None
    worker_counters: torch.Tensor | None

    @classmethod
    def from_batch(cls, batch: LlavaBatch, device: torch.device) -> MicroBatch:
        """Move what belongs on the device; `batch` itself stays as it is, because Megatron may replay it."""
        tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(cls)}
        tensors.update({name: tensors[name].to(device, non_blocking=True) for name in _DEVICE_FIELDS})
        return cls(**tensors)

    @property
    def num_samples(self) -> int:
        """Samples, counting those inside a pack; none in a batch that only keeps step with other ranks."""
        if self.odb_info is not None:
            return GroupInfo.from_tensor(self.odb_info).local_samples
        if self.cu_lengths is None:
            return len(self.lengths)
        # A segment that begins behind the last token is padding.
        return int((self.cu_lengths[:-1].cpu() < self.lengths.sum().cpu()).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of these samples, without padding."""
        if self.odb_info is not None:
            return GroupInfo.from_tensor(self.odb_info).local_tokens
        return int(self.lengths.sum())

    @property
    def segment_lengths(self) -> torch.Tensor:
        """int64, the stretches of each row that attend to themselves only: packed samples, or padded rows."""
        if self.cu_lengths is not None:
            return self.cu_lengths.diff().to(torch.int64)
        rows, width = self.tokens.shape
        return torch.full((rows,), width, dtype=torch.int64)


def next_micro_batch(
    data_iterator: Iterator[LlavaBatch] | None, tensor_parallel_group: dist.ProcessGroup, device: torch.device
) -> MicroBatch:
    """Take a batch on the group's first rank, which has the loader, and hand it to the group's other ranks."""
    batch = None if data_iterator is None else MicroBatch.from_batch(next(data_iterator), device)
    if tensor_parallel_group.size() == 1:
        assert batch is not None, "a rank that trains alone must have a loader"
        return batch
    return _broadcast(batch, tensor_parallel_group, device)


def _broadcast(batch: MicroBatch | None, group: dist.ProcessGroup, device: torch.device) -> MicroBatch:
    source = dist.get_process_group_ranks(group)[0]
    header = [None if batch is None else _header(batch)]  # shapes differ from batch to batch
    dist.broadcast_object_list(header, src=source, group=group, device=device)
    assert header[0] is not None, "the group's first rank has no loader"
    tensors = dict(header[0])
    for name in _DEVICE_FIELDS:
        shape, dtype = tensors[name]
        own = None if batch is None else getattr(batch, name).contiguous()
        tensors[name] = torch.empty(shape, dtype=dtype, device=device) if own is None else own
        dist.broadcast(tensors[name], src=source, group=group)
    return MicroBatch(**tensors)


def _header(batch: MicroBatch) -> dict[str, Any]:
    """The small tensors themselves, and shape and dtype of those that follow."""
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {
        name: (tensor.shape, tensor.dtype) if name in _DEVICE_FIELDS else tensor for name, tensor in tensors.items()
    }
