"""Small real WebDatasets and task encoders for tests of the whole Energon pipeline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from megatron.energon import (
    Batch,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SkipSample,
    WorkerConfig,
    basic_sample_keys,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from aiak_ext import ExtensionConfig, LengthAwareTaskEncoderMixin, LengthSortConfig


def write_dataset(path: Path, lengths: list[int], *, num_shards: int = 4, name: str = "s") -> Path:
    """A crude WebDataset of samples that are a number (their place) and a length, with Energon's metadata."""
    path.mkdir(parents=True)
    shards = [f"shard-{shard}.tar" for shard in range(num_shards)]
    for shard, indices in zip(shards, np.array_split(np.arange(len(lengths)), num_shards)):
        with wds.TarWriter(str(path / shard)) as writer:
            for index in indices:
                content = {"index": int(index), "length": int(lengths[index])}
                writer.write({"__key__": f"{name}{index:05d}", "json": json.dumps(content).encode()})
    WebdatasetPreparator.prepare_dataset(path, shards, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1)
    (path / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors:\n  kind: number\n"
    )
    return path


def lognormal_lengths(count: int, seed: int = 0) -> list[int]:
    return [int(length) for length in np.random.default_rng(seed).lognormal(4, 1, count) + 1]


@dataclass
class NumberSample(Sample):
    index: int
    total_len: int
    tokens: torch.Tensor
    cu_lengths: Any = None


@dataclass
class NumberBatch(Batch):
    indices: list[int]
    lengths: list[int]
    hooks: dict[str, int]


@stateless
def cook_number(sample: dict[str, Any]) -> NumberSample:
    length = sample["json"]["length"]
    return NumberSample(
        **basic_sample_keys(sample), index=sample["json"]["index"], total_len=length, tokens=torch.zeros(length)
    )


class NumberTaskEncoder(DefaultTaskEncoder):
    """Counts its hook calls; skips the samples `skip`, fails on `fail` and on batches that `fail_batch` picks."""

    cookers = [Cooker(cook_number)]

    def __init__(self, *, skip: set[int] = frozenset(), fail: set[int] = frozenset(), fail_batch: Any = None) -> None:
        super().__init__()
        self.skip, self.fail, self.fail_batch = skip, fail, fail_batch
        self.calls = {"encode_sample": 0, "batch": 0, "encode_batch": 0}

    @stateless
    def encode_sample(self, sample: NumberSample) -> NumberSample:
        self.calls["encode_sample"] += 1
        if sample.index in self.skip:
            raise SkipSample
        if sample.index in self.fail:
            raise RuntimeError(f"sample {sample.index} is broken")
        return sample

    @stateless
    def batch(self, samples: list[NumberSample]) -> NumberBatch:
        self.calls["batch"] += 1
        if self.fail_batch is not None and self.fail_batch(samples):
            raise RuntimeError("this batch is broken")
        return NumberBatch(
            **_batch_keys(samples),
            indices=[sample.index for sample in samples],
            lengths=[sample.total_len for sample in samples],
            hooks=dict(self.calls),
        )

    @stateless
    def encode_batch(self, batch: NumberBatch) -> NumberBatch:
        self.calls["encode_batch"] += 1
        return batch

    def select_samples_to_pack(self, samples: list[NumberSample]) -> list[list[NumberSample]]:
        return [samples[start : start + 3] for start in range(0, len(samples), 3)]

    @stateless
    def pack_selected_samples(self, samples: list[NumberSample]) -> NumberSample:
        bounds = np.cumsum([0, *(sample.total_len for sample in samples)]).tolist()
        return NumberSample.derive_from(
            samples[0],
            index=[sample.index for sample in samples],
            total_len=bounds[-1],
            tokens=torch.cat([sample.tokens for sample in samples]),
            cu_lengths=bounds,
        )


def _batch_keys(samples: list[NumberSample]) -> dict[str, Any]:
    return {
        "__key__": [sample.__key__ for sample in samples],
        "__restore_key__": [sample.__restore_key__ for sample in samples],
    }


class SortedNumberTaskEncoder(LengthAwareTaskEncoderMixin, NumberTaskEncoder):
    """The number task encoder with the levers."""


def sorted_pools(pool_size: int = 16, *, micro_batch_size: int = 1, **options: Any) -> ExtensionConfig:
    return ExtensionConfig(
        length_sort=LengthSortConfig(pool_size=pool_size, **options), micro_batch_size=micro_batch_size
    )


def train_dataset(
    path: Path,
    task_encoder: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    batch_size: int | None = 2,
    repeat: bool = True,
    virtual_epoch_length: int = 0,
    **options: Any,
) -> Any:
    """Energon's own builder with settings that leave nothing to chance."""
    return get_train_dataset(
        path,
        batch_size=batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        virtual_epoch_length=virtual_epoch_length,
        shuffle_over_epochs_multiplier=1,
        task_encoder=task_encoder,
        worker_config=WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers),
        repeat=repeat,
        **options,
    )
