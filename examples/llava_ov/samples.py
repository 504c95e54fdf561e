"""The dataclasses that travel through the pipeline: cooked chat, encoded sample, micro batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.energon import Batch, Sample
from megatron.energon.edataclass import edataclass


@dataclass(kw_only=True)
class Conversation:
    """Messages and the media that their `<image>` and `<video>` placeholders stand for, in order."""

    #: `{"role": "system" | "user" | "assistant", "content": str}` per turn.
    messages: list[dict[str, str]]
    #: Encoded image files; a video is a list of them, one per frame.
    media: list[bytes | list[bytes]]


@edataclass
class ChatSample(Sample):
    """A cooked sample: text and still-compressed pictures, a few kilobytes.

    `conversations` has one entry per sub-sequence: one for an ordinary sample, several for a sample
    that was packed offline.
    """

    conversations: list[Conversation]


@edataclass
class LlavaSample(Sample):
    """An encoded sample, of one sequence or of several packed ones."""

    #: int64 [n], visual tokens expanded.
    tokens: torch.Tensor
    #: int64 [n]; `labels[i]` is the token to predict at position i, -100 where there is no loss.
    labels: torch.Tensor
    #: float32 [num_patches, 3 * patch_size**2], all media one after the other.
    pixel_values: torch.Tensor
    #: int64 [num_images, 3]: frames, height and width of each image or video, in patches.
    image_grid_thw: torch.Tensor
    #: Tokens of the sample, n.
    total_len: int
    #: int32 [segments + 1], the bounds of the packed sequences; None when nothing is packed.
    cu_lengths: torch.Tensor | None = None


@edataclass
class LlavaBatch(Batch):
    """A micro batch of b samples, right-padded to the longest (s tokens).

    Causal attention never looks at the padding of its own row, so that no mask is needed.
    """

    #: int64 [b, s], padded with the tokenizer's pad id.
    tokens: torch.Tensor
    #: int64 [b, s], padded with -100.
    labels: torch.Tensor
    #: float32 [sum of patches, dim]; 0 rows when the batch has no image.
    pixel_values: torch.Tensor
    #: int64 [sum of images, 3].
    image_grid_thw: torch.Tensor
    #: int64 [b], tokens of each sample without padding.
    lengths: torch.Tensor
    #: int64 [b], images of each sample.
    num_images: torch.Tensor
    #: int32 [segments + 1] for a packed sample (then b is 1), else None.
    cu_lengths: torch.Tensor | None = None
    #: int64, what the token-budget grouping says about the batch; None without it.
    odb_info: torch.Tensor | None = None
    #: int64 [6], counters of the data worker that made the batch (`aiak_ext.worker_counters`); None without levers.
    worker_counters: torch.Tensor | None = None
