"""Megatron-Bridge's way: settings in Python, a loader on every model-parallel rank, samples that state no length."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.energon import Batch, DefaultTaskEncoder, WorkerConfig, get_train_dataset, stateless
from megatron.energon.errors import FatalSampleError

import aiak_ext
from tests.distributed.launch import run_ranks
from tests.energon_data import NumberSample, NumberTaskEncoder, lognormal_lengths, write_dataset

from .host_iterator import HostDataIterator, endless, stop_workers, wrapper_names

NUM_SAMPLES = 96
DP_SIZE, TP_SIZE = 2, 2
MICRO_BATCH_SIZE = 2
#: Micro batches of one data-parallel rank in an epoch.
EPOCH = NUM_SAMPLES // DP_SIZE // MICRO_BATCH_SIZE
CONFIG = aiak_ext.ExtensionConfig(
    length_sort=aiak_ext.LengthSortConfig(pool_size=NUM_SAMPLES // DP_SIZE), micro_batch_size=MICRO_BATCH_SIZE
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("numbers") / "data", lognormal_lengths(NUM_SAMPLES), num_shards=8)


# -- the host, restated ------------------------------------------------------------------------------------------------


@dataclass
class BridgeSample:
    """No Energon sample: neither tokens nor a length, and no place for a restore key; collation tokenizes."""

    __key__: str
    __subflavors__: dict[str, Any] | None
    example: dict[str, Any]


@dataclass
class BridgeBatch(Batch):
    __keys__: list[str] = dataclasses.field(default_factory=list)
    input_ids: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    indices: list[int] = dataclasses.field(default_factory=list)


class BridgeTaskEncoder(DefaultTaskEncoder):
    """A task encoder of the host's library: nothing in it is marked stateless."""

    cookers = NumberTaskEncoder.cookers

    def encode_sample(self, sample: NumberSample) -> BridgeSample:
        example = {"conversation": "x" * sample.total_len, "index": sample.index}
        return BridgeSample(__key__=sample.__key__, __subflavors__=sample.__subflavors__, example=example)

    def batch(self, samples: list[BridgeSample]) -> BridgeBatch:
        rows = [torch.ones(len(sample.example["conversation"]), dtype=torch.int64) for sample in samples]
        keys = [sample.__key__ for sample in samples]
        return BridgeBatch(
            __key__=keys,
            __restore_key__=(),
            __keys__=keys,
            input_ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            indices=[sample.example["index"] for sample in samples],
        )

    def encode_batch(self, batch: BridgeBatch) -> dict[str, Any]:
        return {name: getattr(batch, name) for name in ("input_ids", "indices")}


class BridgeDataModule:
    """Builds training and validation sets alike, through Energon's builder of training sets."""

    def __init__(
        self,
        path: Path,
        task_encoder: Any,
        *,
        validation_task_encoder: Any = None,
        worker_config: WorkerConfig,
    ) -> None:
        self.path = path
        self.task_encoder = task_encoder
        self.validation_task_encoder = validation_task_encoder or task_encoder
        self.worker_config = worker_config

    def dataset(self, split: str) -> Any:
        return get_train_dataset(
            self.path,
            split_part="train",  # the test's data has one part
            batch_size=MICRO_BATCH_SIZE,
            task_encoder=self.task_encoder if split == "train" else self.validation_task_encoder,
            worker_config=self.worker_config,
            packing_buffer_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
        )

    def train_dataloader(self) -> BridgeIterator:
        return BridgeIterator(aiak_ext.get_savable_loader(self.dataset("train"), worker_config=self.worker_config))


class BridgeIterator(HostDataIterator):
    """The iterator that the three hosts share, and Bridge's restore before the first batch."""

    def restore_state(self, state: Any) -> None:
        self.loader.restore_state_rank(state)
        self._batches = endless(self.loader)


# -- what a user writes ------------------------------------------------------------------------------------------------


def conversation_length(sample: BridgeSample) -> int:
    return len(sample.example["conversation"])


def restorable(task_encoder: BridgeTaskEncoder) -> BridgeTaskEncoder:
    """Gives the samples of an instance their restore keys, for an exact resume."""
    encode = task_encoder.encode_sample

    @stateless
    def encode_sample(sample: NumberSample) -> BridgeSample:
        encoded = encode(sample)
        encoded.__restore_key__ = sample.__restore_key__
        return encoded

    task_encoder.encode_sample = encode_sample
    return task_encoder


def sorted_encoder(config: aiak_ext.ExtensionConfig = CONFIG) -> BridgeTaskEncoder:
    return aiak_ext.register(restorable(BridgeTaskEncoder()), config, length_fn=conversation_length)


# -- tests -------------------------------------------------------------------------------------------------------------


def batches(iterator: BridgeIterator, count: int) -> list[tuple[int, ...]]:
    return [tuple(next(iterator)["indices"]) for _ in range(count)]


def on_every_rank(rank: int, world_size: int, data: Path) -> dict[str, Any]:
    """Two epochs of this rank, saved and restored after a third of the first."""
    # Megatron's order: tensor-parallel ranks are neighbours, so data-parallel groups take every TP_SIZE-th rank.
    groups = [dist.new_group(list(range(tp_rank, world_size, TP_SIZE))) for tp_rank in range(TP_SIZE)]
    group = groups[rank % TP_SIZE]
    worker_config = WorkerConfig.default_worker_config(1, data_parallel_group=group)

    def train_iterator() -> BridgeIterator:
        return BridgeDataModule(data, sorted_encoder(), worker_config=worker_config).train_dataloader()

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        first = train_iterator()
    emitted = batches(first, EPOCH // 3)
    state = first.save_state()
    straight = batches(first, 2 * EPOCH - len(emitted))
    stop_workers(first.loader)
    second = train_iterator()
    second.restore_state(state)
    resumed = batches(second, len(straight))
    stop_workers(second.loader)
    return {
        "dp_rank": worker_config.rank,
        "batches": emitted + straight,
        "resumed": emitted + resumed,
        "printed": printed.getvalue().splitlines(),
    }


@pytest.fixture(scope="module")
def ranks(data) -> list[dict[str, Any]]:
    return run_ranks(on_every_rank, DP_SIZE * TP_SIZE, data)


def test_model_parallel_ranks_load_equal_batches(ranks):
    assert [rank["dp_rank"] for rank in ranks] == [0, 0, 1, 1]
    assert ranks[0]["batches"] == ranks[1]["batches"]
    assert ranks[2]["batches"] == ranks[3]["batches"]


def test_data_parallel_ranks_load_other_samples_of_like_lengths(ranks):
    lengths = lognormal_lengths(NUM_SAMPLES)
    for epoch in (slice(0, EPOCH), slice(EPOCH, 2 * EPOCH)):
        own = [ranks[rank]["batches"][epoch] for rank in (0, 2)]
        assert sorted(index for rank in own for batch in rank for index in batch) == list(range(NUM_SAMPLES))
        longest = torch.tensor([[float(max(lengths[index] for index in batch)) for batch in rank] for rank in own])
        assert torch.corrcoef(longest)[0, 1] > 0.9


def test_every_model_parallel_rank_resumes_exactly(ranks):
    for rank in ranks:
        assert rank["resumed"] == rank["batches"]


def test_the_start_up_line_comes_from_one_rank_only(ranks):
    lines = [[line for line in rank["printed"] if line.startswith("[aiak-ext] length sort: ")] for rank in ranks]
    assert [len(own) for own in lines] == [1, 0, 0, 0]
    assert lines[0][0].startswith("[aiak-ext] length sort: on, pools of 48 samples")


def test_samples_without_a_length_need_length_fn(data):
    worker_config = WorkerConfig.default_worker_config(0)
    encoder = aiak_ext.register(restorable(BridgeTaskEncoder()), CONFIG)
    iterator = BridgeDataModule(data, encoder, worker_config=worker_config).train_dataloader()
    with pytest.raises(FatalSampleError) as caught:  # Energon's limit of failures in a row
        next(iterator)
    cause = str(caught.value.__cause__)
    assert re.search("none of total_len, cu_lengths, tokens in BridgeSample.*pass length_fn=", cause)


def test_validation_sets_built_as_training_sets_stay_plain(data):
    worker_config = WorkerConfig.default_worker_config(0)
    module = BridgeDataModule(data, sorted_encoder(), worker_config=worker_config)
    with aiak_ext.levers_off():
        assert "LengthPoolSortDataset" not in wrapper_names(module.dataset("val"))
    assert "LengthPoolSortDataset" in wrapper_names(module.dataset("train"))
    own_encoder = BridgeDataModule(
        data, sorted_encoder(), validation_task_encoder=BridgeTaskEncoder(), worker_config=worker_config
    )
    assert "LengthPoolSortDataset" not in wrapper_names(own_encoder.dataset("val"))


def test_the_hosts_own_samples_are_refused_or_resume_without_the_pool(data, caplog):
    """Without restore keys: the error names the remedy, and the opt-in costs what was pooled, once, and says so."""
    worker_config = WorkerConfig.default_worker_config(0)

    def train_iterator(**options: Any) -> BridgeIterator:
        length_sort = aiak_ext.LengthSortConfig(pool_size=12, **options)
        config = aiak_ext.ExtensionConfig(length_sort=length_sort, micro_batch_size=MICRO_BATCH_SIZE)
        encoder = aiak_ext.register(BridgeTaskEncoder(), config, length_fn=conversation_length)
        return BridgeDataModule(data, encoder, worker_config=worker_config).train_dataloader()

    with pytest.raises(ValueError, match=r"Mark encode_sample.*--length-sort-allow-inexact-resume"):
        train_iterator()
    first = train_iterator(allow_inexact_resume=True)
    emitted = batches(first, 5)
    second = train_iterator(allow_inexact_resume=True)
    second.restore_state(first.save_state())
    assert "12 pooled samples" in caplog.text
    # 10 emitted and 12 lost leave 74 of the epoch: six pools.
    emitted += batches(second, 6 * 12 // MICRO_BATCH_SIZE)
    indices = [index for batch in emitted for index in batch]
    assert len(indices) == len(set(indices)) == 82, "lost, not repeated"
