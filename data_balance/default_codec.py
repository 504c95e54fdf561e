"""The codec for dict and dataclass batches with the usual field names of vision-language training."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from data_balance.codec import DATA_TYPES, Sample, SampleSize, sample_bytes
from data_balance.cost import grid_sums
from data_balance.fields import (
    IGNORED_LABEL,
    SEGMENT_FIELDS,
    SEGMENTS,
    TOKEN_FIELDS,
    kind_of,
    merge_field,
    merge_segments,
    split_field,
)

#: Entry of a sample that holds the kind of each of its fields.
KINDS = "__kinds__"
VISUAL = "visual"
#: Belongs to the batch as the loader made it, and is wrong once samples have moved.
STALE_FIELDS = ("odb_info",)
#: Belongs to this rank's loader, not to samples: stays on the rank.
LOADER_FIELDS = ("worker_counters",)


@dataclasses.dataclass(frozen=True)
class VisualFields:
    """Names under which one kind of visual input is known: packed rows, grids [num, 3], and numbers per sample [b]."""

    rows: tuple[str, ...]
    grid: str
    count: str
    per_item: tuple[str, ...] = ()


IMAGES = VisualFields(("pixel_values", "imgs", "images"), "image_grid_thw", "num_images")
VIDEOS = VisualFields(("pixel_values_videos", "videos"), "video_grid_thw", "num_videos", ("second_per_grid_ts",))
VISUALS = (IMAGES, VIDEOS)
COUNT_OF_VISUALS = tuple(visual.count for visual in VISUALS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DefaultCodec:
    """Dict or dataclass batches with `tokens`/`input_ids`, `labels`, masks, `pixel_values` + `image_grid_thw`, videos.

    Tensors [b, s, ...] are cut to each sample's true length (`lengths` [b], else the 2-D `attention_mask`,
    else the whole row) and padded again on the right; a packed batch (`cu_lengths`) is one sample. Other
    tensors [b, ...] and lists of b entries go by sample. What all samples share (a scalar, a string) has to
    be equal where they meet.

    Attributes:
        pad_token_id: what pads token fields. Under causal attention its value has no effect.
        pad_to_multiple: round the padded length up, e.g. to the tensor-parallel size for sequence
            parallelism.
        image_token_id: with `merge_size`, finds each sample's images by its tokens where the batch has no
            `num_images`.
        video_token_id: the same for videos.
        merge_size: patches per side that the model merges into one token.
        pack_samples: merge samples end to end into one packed row with `cu_lengths`, without padding, also
            where the loader pads. For models with block-diagonal attention, and batches that have that field.
    """

    pad_token_id: int = 0
    pad_to_multiple: int = 1
    image_token_id: int | None = None
    video_token_id: int | None = None
    merge_size: int = 2
    pack_samples: bool = False

    def split(self, batch: Any) -> list[Sample]:
        fields = _fields_of(batch)
        tokens = next((fields[name] for name in TOKEN_FIELDS if fields.get(name) is not None), None)
        if tokens is None or tokens.ndim != 2:
            raise ValueError(
                f"the batch has fields {sorted(fields)}, but no tokens, input_ids or labels of shape [batch, "
                "length], so it cannot be split into samples; register a BatchCodec for it"
            )
        size, width = tokens.shape
        samples: list[Sample] = [{} for _ in range(size)]
        kinds: dict[str, str] = {}
        for visual, token_id in ((IMAGES, self.image_token_id), (VIDEOS, self.video_token_id)):
            kinds.update(dict.fromkeys(self._split_visual(fields, visual, token_id, tokens, samples), VISUAL))
        lengths = _true_lengths(fields, size, width)
        for name, value in fields.items():
            if value is None or name in STALE_FIELDS + LOADER_FIELDS:
                continue
            kinds[name] = kind_of(name, value, size, width)
            for sample, part in zip(samples, split_field(name, kinds[name], value, lengths)):
                sample[name] = part
        for sample in samples:
            sample[KINDS] = kinds
        return samples

    def _split_visual(
        self, fields: Sample, visual: VisualFields, token_id: int | None, tokens: torch.Tensor, samples: list[Sample]
    ) -> list[str]:
        """Move the visual fields out of `fields` into the samples that own them; their names."""
        names = [n for n in (*visual.rows, visual.grid, *visual.per_item) if isinstance(fields.get(n), torch.Tensor)]
        grid = fields.get(visual.grid)
        if grid is None:
            if any(name in visual.rows for name in names):
                raise ValueError(
                    f"the batch has {names} but no {visual.grid} [num, 3], so it is unknown which rows "
                    "belong to which sample; add it in encode_batch, or register a BatchCodec"
                )
            return []
        counts = self._counts(fields, visual, token_id, grid, tokens)
        patches = [int(part.prod(dim=1).sum()) for part in grid.split(counts)]
        for name in names:
            value = fields.pop(name)
            parts = value.split(patches if name in visual.rows else counts)
            for sample, part in zip(samples, parts):
                sample[name] = part
        return names

    def _counts(
        self, fields: Sample, visual: VisualFields, token_id: int | None, grid: torch.Tensor, tokens: torch.Tensor
    ) -> list[int]:
        """Images (or videos) of each sample."""
        size = len(tokens)
        counts = fields.get(visual.count)
        if counts is not None:
            numbers = [int(n) for n in counts]
        elif len(grid) == 0:
            numbers = [0] * size
        elif size == 1:
            numbers = [len(grid)]
        elif token_id is not None:
            visual_tokens = (tokens == token_id).sum(dim=1).cumsum(dim=0)
            ends = torch.searchsorted((grid.prod(dim=1) // self.merge_size**2).cumsum(dim=0), visual_tokens, right=True)
            numbers = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        else:
            raise ValueError(
                f"{len(grid)} rows of {visual.grid} for {size} samples, and nothing says which belong "
                f"together; add {visual.count} [batch] in encode_batch, or give DefaultCodec the visual "
                "token's id"
            )
        if len(numbers) != size or sum(numbers) != len(grid):
            raise ValueError(
                f"{visual.count} is {numbers} for {size} samples and {len(grid)} rows of {visual.grid}; "
                "features would end up beside another sample's text: mend the batch"
            )
        return numbers

    def merge(self, samples: list[Sample], template: Any) -> Any:
        kinds = {name: kind for sample in samples for name, kind in sample[KINDS].items()}
        segments = [_segments(sample) for sample in samples]
        if self.pack_samples and len(samples) > 1:
            kinds.setdefault(
                next((n for n in SEGMENT_FIELDS if n in _fields_of(template)), SEGMENT_FIELDS[0]), SEGMENTS
            )
        packed = SEGMENTS in kinds.values()
        lengths = [_row_length(sample) for sample in samples]
        width = sum(lengths) if packed else max(lengths)
        width = -(-width // self.pad_to_multiple) * self.pad_to_multiple
        merged: dict[str, Any] = {}
        for name, kind in kinds.items():
            values = [sample[name] for sample in samples if name in sample]
            if name in COUNT_OF_VISUALS:  # a text-only batch may leave out the number with the images
                values = [sample.get(name, torch.zeros_like(values[0])) for sample in samples]
            if kind == SEGMENTS:
                merged[name] = merge_segments(segments, width)
            elif kind == VISUAL:
                merged[name] = torch.cat(values)
            elif len(values) == len(samples):
                merged[name] = merge_field(name, kind, values, width, self._padding(name), packed)
            else:
                raise ValueError(
                    f"field {name!r} is missing in {len(samples) - len(values)} of {len(samples)} samples of "
                    "one micro batch; give it to all samples, or register a BatchCodec"
                )
        return _like(template, merged)

    def _padding(self, name: str) -> int:
        if name == "labels":
            return IGNORED_LABEL
        return self.pad_token_id if name in TOKEN_FIELDS else 0

    def pads(self, template: Any) -> bool:
        fields = _fields_of(template)
        return not self.pack_samples and all(fields.get(name) is None for name in SEGMENT_FIELDS)

    def measure(self, sample: Sample, data_type: str) -> SampleSize:
        segments = _segments(sample)
        counted = [v.grid for v, counts in zip(VISUALS, DATA_TYPES[data_type]) if counts and v.grid in sample]
        sums = [grid_sums(sample[name].cpu()) for name in counted]
        return SampleSize(
            num_tokens=sum(segments),
            token_squares=sum(n * n for n in segments),
            num_patches=sum(s[0] for s in sums),
            patch_squares=sum(s[1] for s in sums),
            num_bytes=sample_bytes(sample),
        )

    def idle(self, sample: Sample) -> Sample:
        weights = {"labels": IGNORED_LABEL, "loss_mask": 0}
        weightless = {name: torch.full_like(sample[name], fill) for name, fill in weights.items() if name in sample}
        if not weightless:
            raise ValueError(
                f"a rank has fewer samples than micro batches, and a batch with fields {sorted(sample)} has "
                "neither labels nor loss_mask to take an idle micro batch out of the loss; add one, or "
                "register a BatchCodec"
            )
        return {**sample, **weightless}

    def without_pixels(self, sample: Sample) -> Sample:
        """Rows of pixels become zero rows; grids and numbers stay, since positions depend on them."""
        rows = [name for visual in VISUALS for name in visual.rows if name in sample]
        return {**sample, **{name: sample[name][:0] for name in rows}}


def _fields_of(batch: Any) -> Sample:
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dict(batch)


def _like(template: Any, merged: Sample) -> Any:
    """A batch of the template's type; its fields that no sample has become None (dataclass) or are left out (dict)."""
    own = _fields_of(template)
    merged.update({name: own[name] for name in LOADER_FIELDS if name in own})
    if not dataclasses.is_dataclass(template):
        return merged
    names = [field.name for field in dataclasses.fields(template)]
    if lost := set(merged) - set(names):
        raise ValueError(
            f"{type(template).__name__} has no field {sorted(lost)} for what the samples bring; add it, or "
            "register a BatchCodec"
        )
    return dataclasses.replace(template, **{name: merged.get(name) for name in names})  # type: ignore[type-var]


def _true_lengths(fields: Sample, size: int, width: int) -> list[int]:
    """Length of each row without its padding on the right."""
    for name in SEGMENT_FIELDS:
        if fields.get(name) is not None:
            if size != 1:
                raise ValueError(
                    f"{name} comes with {size} rows; whose segments they are is unknown: a packed batch has one row"
                )
            # The row may leave out visual tokens that the segments count.
            return [min(width, int(fields[name].reshape(-1)[-1]))]
    if fields.get("lengths") is not None:
        return [min(width, int(n)) for n in fields["lengths"]]
    mask = fields.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == (size, width):
        positions = torch.arange(1, width + 1, device=mask.device)
        return [int(n) for n in (mask.bool() * positions).amax(dim=1)]
    return [width] * size


def _row_length(sample: Sample) -> int:
    return len(next(sample[name] for name in TOKEN_FIELDS if name in sample))


def _segments(sample: Sample) -> list[int]:
    """Lengths of the sample's attention segments in the language model."""
    for name in SEGMENT_FIELDS:
        if name in sample:
            return [n for n in torch.diff(sample[name].reshape(-1)).tolist() if n > 0]
    return [int(sample["lengths"]) if "lengths" in sample else _row_length(sample)]
