"""Several samples into one: packing end to end, and padding side by side."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from examples.llava_ov.chat_template import IGNORE_INDEX
from examples.llava_ov.samples import LlavaBatch, LlavaSample


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of indices whose lengths sum to at most `capacity`, in few groups.

    The longest first, each into the fullest group that has room. A length above the capacity gets a group
    of its own.
    """
    groups: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space left, group), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        position = bisect.bisect_left(spaces, (lengths[index], 0))
        if position == len(spaces):
            space, group = capacity, len(groups)
            groups.append([])
        else:
            space, group = spaces.pop(position)
        groups[group].append(index)
        bisect.insort(spaces, (space - lengths[index], group))
    return groups


def pack_samples(samples: Sequence[LlavaSample]) -> LlavaSample:
    """One sample that holds the given ones end to end; `cu_lengths` keeps their bounds.

    Labels are shifted inside each sample already, so no target crosses a bound. Samples that are packed
    themselves contribute all their segments.
    """
    bounds = [torch.zeros(1, dtype=torch.int32)]
    offset = 0
    for sample in samples:
        inner = sample.cu_lengths if sample.cu_lengths is not None else torch.tensor([0, sample.total_len])
        bounds.append((inner[1:] + offset).to(torch.int32))
        offset += sample.total_len
    sources = tuple(source for sample in samples for source in sample.__sources__ or ())
    return LlavaSample(
        __key__=",".join(sample.__key__ for sample in samples),
        __restore_key__=(),  # Energon sets it, from the keys of the parts
        __subflavors__=samples[0].__subflavors__,
        __sources__=sources or None,
        tokens=torch.cat([sample.tokens for sample in samples]),
        labels=torch.cat([sample.labels for sample in samples]),
        pixel_values=torch.cat([sample.pixel_values for sample in samples]),
        image_grid_thw=torch.cat([sample.image_grid_thw for sample in samples]),
        total_len=offset,
        cu_lengths=torch.cat(bounds),
    )


def pad_samples(samples: Sequence[LlavaSample], pad_id: int, multiple: int = 1) -> LlavaBatch:
    """A micro batch of the given samples, right-padded to the longest, rounded up to a multiple of `multiple`.

    Sequence parallelism splits the sequence evenly over the tensor-parallel ranks, so that it needs the multiple.

    Raises:
        ValueError: A packed sample beside others; `cu_lengths` describes one row only.
    """
    if len(samples) > 1 and any(sample.cu_lengths is not None for sample in samples):
        raise ValueError(
            f"a micro batch of {len(samples)} holds packed samples, whose bounds describe one row; "
            "use micro batch size 1 with packing"
        )
    sources = tuple(source for sample in samples for source in sample.__sources__ or ())
    width = -(-max(sample.total_len for sample in samples) // multiple) * multiple
    return LlavaBatch(
        __key__=[sample.__key__ for sample in samples],
        __restore_key__=(),  # Energon sets it, from the keys of the samples
        __subflavors__=[sample.__subflavors__ for sample in samples],
        __sources__=sources or None,
        tokens=_pad([sample.tokens for sample in samples], width, pad_id),
        labels=_pad([sample.labels for sample in samples], width, IGNORE_INDEX),
        pixel_values=torch.cat([sample.pixel_values for sample in samples]),
        image_grid_thw=torch.cat([sample.image_grid_thw for sample in samples]),
        lengths=torch.tensor([sample.total_len for sample in samples]),
        num_images=torch.tensor([len(sample.image_grid_thw) for sample in samples]),
        cu_lengths=samples[0].cu_lengths,
    )


def _pad(rows: Sequence[torch.Tensor], width: int, value: int) -> torch.Tensor:
    """Rows of up to `width` entries as [rows, width]."""
    return torch.stack([pad(row, (0, width - len(row)), value=value) for row in rows])
