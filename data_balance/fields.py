"""Kinds of batch fields: how each splits into samples and merges again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

TOKEN_FIELDS = ("tokens", "input_ids", "labels")
SEGMENT_FIELDS = ("cu_lengths", "cu_seqlens")
COUNT_FIELDS = ("lengths", "num_images", "num_videos")
RESTORE_KEY = "__restore_key__"
IGNORED_LABEL = -100

ROW, ROPE, SQUARE, ENTRY, SEGMENTS, SHARED = "row", "rope", "square", "entry", "segments", "shared"


def kind_of(name: str, value: Any, size: int, width: int) -> str:
    """How a field of a batch of `size` samples padded to `width` is laid out.

    Raises:
        ValueError: a tensor that has no place per sample.
    """
    if name in SEGMENT_FIELDS:
        return SEGMENTS
    if name == RESTORE_KEY:
        return ENTRY
    if isinstance(value, (list, tuple)):
        return ENTRY if len(value) == size else SHARED
    if not isinstance(value, torch.Tensor):
        return SHARED
    shape = tuple(value.shape)
    if len(shape) >= 3 and shape[-2:] == (width, width) and shape[0] in (1, size) and value.dtype == torch.bool:
        return SQUARE
    if len(shape) == 3 and name == "position_ids" and shape[1:] == (size, width):
        return ROPE
    if shape[:2] == (size, width):
        return ROW
    if shape[:1] == (size,):
        return ENTRY
    raise ValueError(
        f"field {name!r} has shape {shape} in a batch of {size} samples of length {width}, so its part of "
        "each sample is unknown; give it a leading batch dimension in encode_batch, or register a BatchCodec"
    )


def split_field(name: str, kind: str, value: Any, lengths: list[int]) -> list[Any]:
    """Part of each sample; rows are cut to the sample's length."""
    size = len(lengths)
    if name == RESTORE_KEY:
        return split_restore_key(value, size)
    if kind in (SHARED, SEGMENTS):
        return [value] * size
    if kind == ROPE:
        return [value[:, i, :n] for i, n in enumerate(lengths)]
    if kind == SQUARE:
        return [value[i if len(value) == size else 0][..., :n, :n] for i, n in enumerate(lengths)]
    if kind == ROW:
        return [value[i, :n] for i, n in enumerate(lengths)]
    return [value[i] for i in range(size)]


def merge_field(name: str, kind: str, values: list[Any], width: int, pad: int, packed: bool) -> Any:
    """One field of a micro batch of these samples, padded on the right to `width`; `packed` lays them end to end."""
    if kind == SEGMENTS:
        raise AssertionError("segments are merged with the lengths they describe")
    if kind == ROW:
        if packed:
            return _pad_last(torch.cat(values).movedim(0, -1), width, pad).movedim(-1, 0)[None]
        return torch.stack([_pad_last(v.movedim(0, -1), width, pad).movedim(-1, 0) for v in values])
    if kind == ROPE:
        if packed:
            return _pad_last(torch.cat(values, dim=1), width, pad)[:, None]
        return torch.stack([_pad_last(v, width, pad) for v in values], dim=1)
    if kind == SQUARE:
        if packed:
            raise ValueError(
                f"field {name!r} is a dense mask, and samples laid end to end need none; leave it out of packed batches"
            )
        # True is "masked" in Megatron's convention; nobody attends to padding.
        return torch.stack([F.pad(v, (0, width - v.shape[-1], 0, width - v.shape[-2]), value=True) for v in values])
    if kind == SHARED:
        return _merge_shared(name, values)
    if not isinstance(values[0], torch.Tensor):
        return ("DataBalance", *values) if name == RESTORE_KEY else list(values)
    if packed and name in COUNT_FIELDS:
        return torch.stack(values).sum(dim=0, keepdim=True)
    return torch.stack(values)


def merge_segments(all_segments: list[list[int]], width: int) -> torch.Tensor:
    """Ends of the attention segments [segments + 1] of samples laid end to end, int32; padding is a segment too."""
    segments = [n for segments in all_segments for n in segments]
    if sum(segments) < width:
        segments.append(width - sum(segments))
    return F.pad(torch.tensor(segments, dtype=torch.int64).cumsum(0), (1, 0)).to(torch.int32)


def split_restore_key(key: Any, size: int) -> list[Any]:
    """Restore key of each sample of a batch.

    Energon's batch key is ``(later wrappers..., "BatchDataset", index, *sample keys)`` and a sample's key is
    a tuple. A key of another form goes with every sample as (key, index).
    """
    if isinstance(key, tuple) and {"BatchDataset", "DataBalance"} & {part for part in key if isinstance(part, str)}:
        keys = key[-size:]
        if len(keys) == size and all(isinstance(part, tuple) for part in keys):
            return list(keys)
    return [(key, i) for i in range(size)]


def _pad_last(value: torch.Tensor, width: int, pad: int) -> torch.Tensor:
    return F.pad(value, (0, width - value.shape[-1]), value=pad)


def _merge_shared(name: str, values: list[Any]) -> Any:
    if any(value != values[0] for value in values[1:]):
        raise ValueError(
            f"field {name!r} differs between samples of one micro batch ({values}) and has no place per "
            "sample; give it one entry per sample, or register a BatchCodec"
        )
    return values[0]
