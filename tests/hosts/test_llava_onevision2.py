"""LLaVA-OneVision-2's way: its own flags, generator encoders, a task encoder that builds the data sets itself."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_train_dataset, get_val_dataset, stateless
from megatron.energon import get_savable_loader as energons_get_savable_loader
from megatron.energon.wrappers import BlendDataset, EpochizeDataset, RepeatDataset, ShuffleBufferDataset

import aiak_ext
from tests.energon_data import NumberBatch, NumberSample, NumberTaskEncoder, lognormal_lengths, write_dataset

from .host_iterator import HostDataIterator, stop_workers, wrapper_names

NUM_SAMPLES = 96


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("numbers") / "data", lognormal_lengths(NUM_SAMPLES), num_shards=8)


# -- the host, restated ------------------------------------------------------------------------------------------------


def host_parser() -> argparse.ArgumentParser:
    """The host's parser with its own pool flags and their defaults; what Megatron's part of it matters here."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--packing-batch-size", type=int, default=None)
    parser.add_argument("--dataloader-save", type=str, default=None)
    group = parser.add_argument_group(title="extra-sft")
    group.add_argument("--length-sort-pool-size", type=int, default=0)
    group.add_argument("--length-sort-desc", action="store_true")
    group.add_argument("--length-sort-separate-packed", action="store_true")
    group.add_argument("--length-sort-warmup-steps", type=int, default=50)
    group.add_argument("--length-sort-initial-pool-size", type=int, default=2)
    return parser


class HostTaskEncoder(DefaultTaskEncoder):
    """Encodes with generators and its own random draws, and builds training and validation sets in one method."""

    cookers = NumberTaskEncoder.cookers

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: NumberSample) -> Iterator[NumberSample]:
        sample.tokens = random.random()  # stands for an augmentation
        yield sample

    def batch(self, samples: list[NumberSample]) -> NumberBatch:
        return NumberBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=[sample.__restore_key__ for sample in samples],
            indices=[sample.index for sample in samples],
            lengths=[sample.total_len for sample in samples],
            hooks={sample.index: sample.tokens for sample in samples},
        )

    def build_train_datasets(
        self,
        *,
        datasets: list[Any],
        worker_config: WorkerConfig,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: int | None = None,
        blend_mode: Any = None,
        repeat: bool = True,
    ) -> Any:
        """Energon's whole method over again; the host did so to put its own pool in front of ``build_batch``."""
        sources = [self._load_dataset(dataset, 0, worker_config) for dataset in datasets]
        if repeat:
            sources = [RepeatDataset(source, worker_config=worker_config) for source in sources]
        dataset = sources[0]
        if len(sources) > 1:
            dataset = BlendDataset(*[(source, 1.0) for source in sources], worker_config=worker_config)
        if shuffle_buffer_size is not None and shuffle_buffer_size > 1:
            dataset = ShuffleBufferDataset(dataset, size=shuffle_buffer_size, worker_config=worker_config)
        dataset = self.build_encode_sample(dataset, worker_config=worker_config)
        dataset = self.build_batch(
            dataset,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            packing_buffer_size=packing_buffer_size,
            worker_config=worker_config,
        )
        if virtual_epoch_length > 0:
            dataset = EpochizeDataset(dataset, length=virtual_epoch_length, worker_config=worker_config)
        return dataset

    def build_val_datasets(self, *, limit: int | None = None, **options: Any) -> Any:
        return self.build_train_datasets(repeat=False, **options)


class SortedTaskEncoder(aiak_ext.LengthAwareTaskEncoderMixin, HostTaskEncoder):
    """What a user writes."""


def train_dataset(data: Path, task_encoder: Any, args: argparse.Namespace, **options: Any) -> Any:
    return get_train_dataset(
        data,
        batch_size=args.micro_batch_size,
        task_encoder=task_encoder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=args.num_workers),
        max_samples_per_sequence=None,
        shuffle_buffer_size=None,
        packing_buffer_size=args.packing_batch_size,
        **options,
    )


# -- tests -------------------------------------------------------------------------------------------------------------


def arguments(*words: str) -> argparse.Namespace:
    return aiak_ext.add_extension_args(host_parser()).parse_args(words)


def sorted_encoder(args: argparse.Namespace) -> SortedTaskEncoder:
    return SortedTaskEncoder(aiak_ext.ExtensionConfig.from_args(args), args)


def emitted(batch: NumberBatch) -> dict[int, float]:
    """Index and random draw of each sample of a batch, in order."""
    return dict(batch.hooks)


def test_the_hosts_flags_are_adopted_with_its_defaults():
    parser = aiak_ext.add_extension_args(host_parser())
    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert len(flags) == len(set(flags))
    assert {"--length-sort-shuffle-block", "--length-sort-seed", "--length-sort-max-pool-bytes"} <= set(flags)
    args = parser.parse_args(["--length-sort-pool-size", "1000", "--micro-batch-size", "4"])
    config = aiak_ext.ExtensionConfig.from_args(args)
    assert config.length_sort == aiak_ext.LengthSortConfig(
        pool_size=1000, warmup_pools=50, initial_pool_size=2, shuffle_block=4
    )
    assert not aiak_ext.ExtensionConfig.from_args(parser.parse_args([])).length_sort.active


@pytest.mark.parametrize("way", ["mixin", "register"])
def test_every_flag_reaches_the_pool_of_a_host_that_builds_its_own_data_sets(data, way):
    args = arguments(
        *("--length-sort-pool-size", "16", "--length-sort-desc", "--length-sort-separate-packed"),
        *("--length-sort-warmup-steps", "3", "--length-sort-initial-pool-size", "4", "--micro-batch-size", "2"),
    )
    if way == "mixin":
        encoder = sorted_encoder(args)
    else:
        encoder = aiak_ext.register(HostTaskEncoder(args), aiak_ext.ExtensionConfig.from_args(args))
    dataset = train_dataset(data, encoder, args)
    names = wrapper_names(dataset)
    pool = names.index("LengthPoolSortDataset")
    assert (names[pool - 1], names[pool + 1]) == ("BatchDataset", "MapDataset")
    settings = dataset._find_wrapped_dataset(aiak_ext.LengthPoolSortDataset).config()
    expected = {
        "pool_size": 16,
        "ascending": False,
        "separate_packed": True,
        "warmup_pools": 3,
        "initial_pool_size": 4,
        "shuffle_block": 2,
    }
    assert {name: settings[name] for name in expected} == expected


def test_one_wrapper_in_the_hosts_method_does_the_same_as_the_mixin(data):
    """The host's own place for its pool, with our class: for those who keep the method."""

    class HostsPlace(HostTaskEncoder):
        def build_encode_sample(self, dataset: Any, *, worker_config: WorkerConfig) -> Any:
            encoded = super().build_encode_sample(dataset, worker_config=worker_config)
            return aiak_ext.LengthPoolSortDataset(encoded, pool_size=16, worker_config=worker_config)

    args = arguments("--length-sort-pool-size", "16", "--length-sort-warmup-steps", "0")
    loaders = [
        aiak_ext.get_savable_loader(train_dataset(data, encoder, args, repeat=False))
        for encoder in (HostsPlace(args), sorted_encoder(args))
    ]
    first, second = ([batch.indices for batch in loader] for loader in loaders)
    assert first == second
    assert sorted(index for batch in first for index in batch) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("get_loader", "num_workers"),
    [(aiak_ext.get_savable_loader, 0), (aiak_ext.get_savable_loader, 2), (energons_get_savable_loader, 2)],
    ids=["ours-0", "ours-2", "energon's-2"],
)
def test_resume_restores_samples_with_their_random_draws(data, get_loader, num_workers):
    args = arguments(
        *("--length-sort-pool-size", "16", "--micro-batch-size", "2", "--num-workers", str(num_workers)),
        *("--length-sort-warmup-steps", "3"),
    )

    def iterator() -> HostDataIterator:
        return HostDataIterator(get_loader(train_dataset(data, sorted_encoder(args), args)))

    first = iterator()
    head = [emitted(next(first)) for _ in range(9)]
    state = first.save_state()
    rest = [emitted(next(first)) for _ in range(30)]
    stop_workers(first.loader)
    second = iterator()
    second.loader.restore_state_rank(state)
    assert [emitted(next(second)) for _ in range(30)] == rest
    stop_workers(second.loader)
    draws = [draw for batch in head + rest for draw in batch.values()]
    assert len(set(draws)) == len(draws), "the draws differ, so that equal ones say something"


def test_validation_sets_that_the_host_builds_as_training_sets_are_plain(data):
    args = arguments("--length-sort-pool-size", "16", "--micro-batch-size", "2")
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    for encoder in (
        sorted_encoder(args),
        aiak_ext.register(HostTaskEncoder(args), aiak_ext.ExtensionConfig.from_args(args)),
    ):
        # Through Energon's validation hook, which the host forwards to its training method: nothing to do.
        validation = get_val_dataset(
            data, split_part="train", batch_size=2, task_encoder=encoder, worker_config=worker_config
        )
        assert "LengthPoolSortDataset" not in wrapper_names(validation)
        # Through Energon's builder of training sets: the caller says so.
        with aiak_ext.levers_off():
            validation = train_dataset(data, encoder, args, repeat=False)
        assert "LengthPoolSortDataset" not in wrapper_names(validation)
        indices = [index for batch in aiak_ext.get_savable_loader(validation) for index in batch.indices]
        assert sorted(indices) == list(range(NUM_SAMPLES))
        assert "LengthPoolSortDataset" in wrapper_names(train_dataset(data, encoder, args))
