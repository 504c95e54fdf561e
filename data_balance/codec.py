"""How a batch splits into samples and samples merge into a micro batch: the protocol and its registry."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

Sample = dict[str, Any]

#: What `data_type` may be, and whether it counts images and videos.
DATA_TYPES: dict[str, tuple[bool, bool]] = {"image": (True, False), "video": (False, True), "both": (True, True)}


@dataclasses.dataclass(frozen=True)
class SampleSize:
    """What a sample's cost and its transport depend on."""

    num_tokens: int
    token_squares: int
    num_patches: int
    patch_squares: int
    num_bytes: int


class BatchCodec(Protocol):
    """Splits a batch of the loader into samples that can travel one by one, and merges samples into a batch.

    A sample is a dict of tensors and of small objects that can be pickled. Keys and restore keys go with it.
    """

    def split(self, batch: Any) -> list[Sample]:
        """Samples of a batch, in order."""

    def merge(self, samples: list[Sample], template: Any) -> Any:
        """One micro batch of the type and fields of `template`, a batch of this rank's loader."""

    def pads(self, template: Any) -> bool:
        """Whether `merge` pads samples to the longest one, as opposed to packing them or one sample per batch."""

    def measure(self, sample: Sample, data_type: str) -> SampleSize:
        """Tokens, patches of the kinds that `data_type` counts, sums of squared attention segments, and bytes."""

    def idle(self, sample: Sample) -> Sample:
        """The sample with no weight in the loss, for a micro batch that got none."""

    def without_pixels(self, sample: Sample) -> Sample:
        """The sample as a stage without the vision encoder needs it."""


_codecs: dict[type, BatchCodec] = {}


def register_codec(batch_type: type, codec: BatchCodec) -> None:
    """Use `codec` for batches of `batch_type` and its subclasses."""
    _codecs[batch_type] = codec


def codec_for(batch: Any) -> BatchCodec:
    """The codec registered for the nearest base of the batch's type.

    Raises:
        ValueError: there is none, and the batch is neither a dict nor a dataclass.
    """
    from data_balance.default_codec import DefaultCodec

    for base in type(batch).__mro__:
        if base in _codecs:
            return _codecs[base]
    if isinstance(batch, dict) or dataclasses.is_dataclass(batch):
        return DefaultCodec()
    raise ValueError(
        f"a batch of type {type(batch).__name__} cannot be split into samples; yield a dict or a dataclass, "
        "or call data_balance.register_codec with a BatchCodec for it"
    )


def sample_bytes(sample: Sample) -> int:
    """Bytes of the sample's tensors."""
    return sum(v.numel() * v.element_size() for v in sample.values() if isinstance(v, torch.Tensor))
