"""Estimates lengths from Energon's media metadata and the samples' texts, without decoding an image."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta

from aiak_ext.analysis.interrupt import stop_on_interrupt
from aiak_ext.analysis.samples import SampleTable

TEXT_SUFFIXES = (".json", ".txt", ".md", ".caption")
#: Energon's index of a dataset, and in it the table that `energon prepare-media` fills.
INDEX_FILE = Path(".nv-meta") / "index.sqlite"
#: Characters per token of English text with a vocabulary of 150,000, where no encoded sample says otherwise.
CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """How a task encoder turns a picture's size into patches (the resizing of Qwen2-VL).

    Raises:
        ValueError: the sizes leave no room for a picture.
    """

    patch_size: int = 14
    merge_size: int = 2
    """Patches per side that become one visual token."""
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 1344 * 1344
    max_video_frames: int = 32

    def __post_init__(self) -> None:
        side = self.patch_size * self.merge_size
        if min(self.patch_size, self.merge_size, self.max_video_frames) < 1 or self.max_pixels < side * side:
            raise ValueError(
                f"patch size {self.patch_size}, merge size {self.merge_size}, at most {self.max_pixels} pixels and "
                f"{self.max_video_frames} frames fit no picture; a visual token takes {side} x {side} pixels"
            )

    def patches(self, width: int, height: int) -> int:
        """Patches of one picture: sides rounded to whole visual tokens, area brought into the pixel bounds."""
        side = self.patch_size * self.merge_size
        tall, wide = max(side, round(height / side) * side), max(side, round(width / side) * side)
        if tall * wide > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(side, math.floor(n / scale / side) * side) for n in (height, width))
        elif tall * wide < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(n * scale / side) * side for n in (height, width))
        return tall * wide // self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class MediaSample:
    """What the index and the text parts say of a sample."""

    key: str
    shard: str
    num_chars: int
    num_patches: int
    patch_squares: int


@dataclass(frozen=True, kw_only=True)
class TextRule:
    """Tokens of a sample's text: ``per_char * characters + constant``."""

    per_char: float = 1 / CHARS_PER_TOKEN
    constant: float = 0.0
    median_error: float | None = None
    """Median relative error of a sample's length where the rule was fitted; None where it was assumed."""
    num_fitted: int = 0


def has_media_metadata(path: str | Path) -> bool:
    """Whether the dataset's index holds media metadata (`energon prepare-media`)."""
    index = Path(path) / INDEX_FILE
    if not index.is_file():
        return False
    with _open(index) as database:
        found = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'media_metadata'").fetchone()
        return found is not None and database.execute("SELECT 1 FROM media_metadata").fetchone() is not None


def num_media_samples(path: str | Path, *, split: str) -> int:
    """Samples of a split."""
    return sum(shard.count for shard in WebdatasetMeta.from_config(EPath(path), split_part=split).shards)


def media_samples(path: str | Path, rule: ImageRule, *, split: str, num_samples: int | None) -> Iterator[MediaSample]:
    """Samples of a split, evenly spaced over it.

    Args:
        path: A local WebDataset with media metadata.
        rule: Patches of a picture.
        split: Split part, e.g. ``train``.
        num_samples: Most samples; None for all.
    """
    root = Path(path)
    meta = WebdatasetMeta.from_config(EPath(path), split_part=split)
    shards = {index: name for index, name in enumerate(meta.info_shard_files) if name in set(meta.split_part_files)}
    with _open(root / INDEX_FILE) as database:
        marks = ",".join("?" * len(shards))
        places = database.execute(
            "SELECT tar_file_id, sample_index, sample_key FROM samples "
            f"WHERE tar_file_id IN ({marks}) ORDER BY tar_file_id, sample_index",
            list(shards),
        ).fetchall()
        count = len(places) if num_samples is None else min(num_samples, len(places))
        chosen = np.unique(np.linspace(0, len(places) - 1, count).astype(int))
        for tar_file, index, key in (places[i] for i in chosen):
            yield _media_sample(database, root, shards[tar_file], (tar_file, index, key), rule)


def fit_text_rule(samples: Iterable[MediaSample], encoded_tokens: Mapping[str, int], rule: ImageRule) -> TextRule:
    """Fit tokens per character to samples that were encoded.

    Args:
        samples: What the metadata says.
        encoded_tokens: Length of encoded samples by key, visual tokens included.
        rule: Patches of a picture.

    Raises:
        ValueError: none of the samples was encoded.
    """
    pairs = [(one, encoded_tokens[one.key]) for one in samples if one.key in encoded_tokens]
    if not pairs:
        raise ValueError("no encoded sample is among those with metadata, so the text length cannot be fitted")
    chars = np.array([one.num_chars for one, _ in pairs], dtype=np.float64)
    visual = np.array([one.num_patches // rule.merge_size**2 for one, _ in pairs], dtype=np.float64)
    total = np.array([tokens for _, tokens in pairs], dtype=np.float64)
    columns = np.stack([chars, np.ones_like(chars)], axis=1)
    per_char, constant = np.linalg.lstsq(columns, total - visual, rcond=None)[0]
    error = np.abs(visual + per_char * chars + constant - total) / total
    return TextRule(
        per_char=float(per_char),
        constant=float(constant),
        median_error=float(np.median(error)),
        num_fitted=len(pairs),
    )


def read_media_metadata(
    path: str | Path,
    rule: ImageRule,
    text_rule: TextRule,
    *,
    split: str = "train",
    num_samples: int = 10_000,
    num_ranks: int = 1,
    num_workers: int = 1,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> SampleTable:
    """Lengths estimated from picture sizes and characters of text.

    Energon gives every worker of every rank a stretch of the split, in order: a sample's place in the split says
    which one reads it.

    An interrupt (Ctrl-C) ends the reading early; what was read so far is returned.
    """
    samples: list[MediaSample] = []
    with stop_on_interrupt() as is_interrupted:
        for sample in progress(media_samples(path, rule, split=split, num_samples=num_samples)):
            samples.append(sample)
            if is_interrupted():
                break
    visual = np.array([one.num_patches // rule.merge_size**2 for one in samples], dtype=np.int64)
    chars = np.array([one.num_chars for one in samples], dtype=np.float64)
    text = np.rint(text_rule.per_char * chars + text_rule.constant).astype(np.int64)
    stream = np.arange(len(samples)) * num_ranks * num_workers // max(len(samples), 1)
    notes = [_describe(text_rule)]
    if is_interrupted():
        notes.append(f"Reading was interrupted after {len(samples)} samples.")
    return SampleTable(
        source=f"{path} (media metadata)",
        num_tokens=np.maximum(visual + text, 1),
        num_patches=np.array([one.num_patches for one in samples], dtype=np.int64),
        patch_squares=np.array([one.patch_squares for one in samples], dtype=np.int64),
        # An interrupted reading has seen the first streams only.
        population=num_media_samples(path, split=split),
        rank=None if is_interrupted() else stream // num_workers,
        worker=None if is_interrupted() else stream % num_workers,
        shard=np.array([one.shard for one in samples], dtype=np.str_),
        is_estimate=True,
        notes=tuple(notes),
    )


def with_measured_costs(table: SampleTable, encoded: SampleTable) -> SampleTable:
    """The estimated lengths with the bytes and encode time of the samples that were encoded."""
    return replace(table, bytes_per_sample=encoded.bytes_per_sample, encode_s=encoded.encode_s)


def _describe(rule: TextRule) -> str:
    start = "Lengths are estimates: pictures by the sizes in Energon's media metadata, texts by their characters"
    if rule.median_error is None:
        return f"{start} ({1 / rule.per_char:.1f} per token, assumed; --task-encoder lets encoded samples tell)."
    return (
        f"{start} ({1 / rule.per_char:.2f} per token plus {rule.constant:.0f} tokens, fitted to {rule.num_fitted} "
        f"encoded samples with a median error of {100 * rule.median_error:.1f}%)."
    )


def _media_sample(
    database: sqlite3.Connection, root: Path, shard: str, place: tuple[int, int, str], rule: ImageRule
) -> MediaSample:
    tar_file, index, key = place
    parts = database.execute(
        "SELECT part_name, content_byte_offset, content_byte_size FROM sample_parts "
        "WHERE tar_file_id = ? AND sample_index = ?",
        (tar_file, index),
    ).fetchall()
    figures: dict[str, int] = defaultdict(int)
    for name, offset, size in parts:
        if f".{name}".lower().endswith(TEXT_SUFFIXES):
            with (root / shard).open("rb") as file:
                file.seek(offset)
                figures["chars"] += _num_chars(name, file.read(size).decode("utf-8", errors="replace"))
            continue
        frames, per_frame = _frames(database, f"{key}.{name}", rule)
        figures["patches"] += frames * per_frame
        figures["squares"] += frames * per_frame**2
    return MediaSample(
        key=key,
        shard=shard,
        num_chars=figures["chars"],
        num_patches=figures["patches"],
        patch_squares=figures["squares"],
    )


def _frames(database: sqlite3.Connection, entry_key: str, rule: ImageRule) -> tuple[int, int]:
    """Frames of a picture or video and patches of each; zero for other parts."""
    row = database.execute(
        "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?", (entry_key,)
    ).fetchone()
    if row is None:
        return 0, 0
    # The table's own JSON, since older versions of Energon have no class for it.
    kind, media = row[0], json.loads(row[1])
    if kind == "image":
        return 1, rule.patches(media["width"], media["height"])
    if media.get("video_width") and media.get("video_height"):
        frames = min(media.get("video_num_frames") or 1, rule.max_video_frames)
        return frames, rule.patches(media["video_width"], media["video_height"])
    return 0, 0


def _num_chars(name: str, text: str) -> int:
    """Characters of a text part; of JSON those of all strings in it."""
    if not name.lower().endswith("json"):
        return len(text)
    try:
        return _string_chars(json.loads(text))
    except json.JSONDecodeError:
        return len(text)


def _string_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_string_chars(each) for each in value.values())
    if isinstance(value, list):
        return sum(_string_chars(each) for each in value)
    return 0


def _open(index: Path) -> closing[sqlite3.Connection]:
    """A read-only connection that the with statement closes."""
    return closing(sqlite3.connect(f"{index.resolve().as_uri()}?mode=ro", uri=True))
