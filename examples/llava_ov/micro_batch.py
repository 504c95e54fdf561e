"""A micro batch on its way from the loader to the ranks of one model replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from examples.llava_ov.samples import LlavaBatch
from length_sort.odb_group import GroupInfo


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The tensors of a `LlavaBatch` (shapes as there) on the training device."""

    tokens: torch.Tensor
    labels: torch.Tensor
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor
    lengths: torch.Tensor
    num_images: torch.Tensor
    cu_lengths: torch.Tensor | None
    odb_info: torch.Tensor | None

    @classmethod
    def from_batch(cls, batch: LlavaBatch, device: torch.device) -> MicroBatch:
        """Move the tensors; `batch` itself stays as it is, because Megatron may replay it."""
        tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(cls)}
        return cls(
            **{
                name: tensor if tensor is None else tensor.to(device, non_blocking=True)
                for name, tensor in tensors.items()
            }
        )

    @property
    def num_samples(self) -> int:
        """Samples, counting those inside a pack; none in a batch that only keeps step with other ranks."""
        if self.odb_info is not None:
            return GroupInfo.from_tensor(self.odb_info).local_samples
        return len(self.lengths) if self.cu_lengths is None else len(self.cu_lengths) - 1

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
        return torch.full((rows,), width, dtype=torch.int64, device=self.tokens.device)


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
    layout = [None if batch is None else _layout(batch)]  # shapes differ from batch to batch
    dist.broadcast_object_list(layout, src=source, group=group, device=device)
    assert layout[0] is not None, "the group's first rank has no loader"
    tensors: dict[str, torch.Tensor | None] = {}
    for name, entry in layout[0].items():
        if entry is None:
            tensors[name] = None
            continue
        shape, dtype = entry
        own = None if batch is None else getattr(batch, name).contiguous()
        tensors[name] = torch.empty(shape, dtype=dtype, device=device) if own is None else own
        dist.broadcast(tensors[name], src=source, group=group)
    return MicroBatch(**tensors)


def _layout(batch: MicroBatch) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: None if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
