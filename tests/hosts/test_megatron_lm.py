"""Megatron-LM's way: its parser, its multimodal example's loader on some ranks, its loop's save and rerun."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.energon import (
    LimitDataset,
    RepeatDataset,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    get_val_datasets,
)
from megatron.energon import get_savable_loader as energons_get_savable_loader

import aiak_ext
from aiak_ext.loader_state import load_loader_state
from tests.energon_data import SortedNumberTaskEncoder, lognormal_lengths, write_dataset

from .host_iterator import HostDataIterator, stop_workers, wrapper_names

NUM_SAMPLES = 120
POOL_SIZE = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("numbers") / "data", lognormal_lengths(NUM_SAMPLES), num_shards=8)


@pytest.fixture(autouse=True)
def rerun_machine():
    """Megatron's default mode, in which the rerun state machine keeps a step's batches."""
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield
    destroy_rerun_state_machine()


# -- the host, restated ------------------------------------------------------------------------------------------------


def megatron_args(*words: str, extra_args_provider: Any) -> argparse.Namespace:
    """Parses as Megatron does: own groups first, the provider's flags next, then its checks of all arguments."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    training = parser.add_argument_group(title="training")
    training.add_argument("--micro-batch-size", type=int, default=None)
    training.add_argument("--train-iters", type=int, default=None)
    training.add_argument("--train-samples", type=int, default=None)
    training.add_argument("--calculate-per-token-loss", action="store_true")
    data_loading = parser.add_argument_group(title="data and dataloader")
    data_loading.add_argument("--data-path", nargs="*", default=None)
    data_loading.add_argument("--num-workers", type=int, default=2)
    checkpointing = parser.add_argument_group(title="checkpointing")
    checkpointing.add_argument("--load", type=str, default=None)
    args = extra_args_provider(parser).parse_args(words)
    args.rank, args.iteration = 0, 0
    args.variable_seq_lengths = False  # what Megatron's validate_args leaves for every model that is no MoE
    return args


def multimodal_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The example's own provider, which the user's provider calls before ours."""
    group = parser.add_argument_group(title="multimodal arguments")
    group.add_argument("--dataloader-save", type=str, default=None, help="Energon dataloader state save path")
    group.add_argument("--packing-buffer-size", type=int, default=None)
    return aiak_ext.add_extension_args(parser)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's coordinates, which Megatron's parallel_state would tell."""

    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def loads(self) -> bool:
        return self.tp_rank == 0 and self.pp_rank in (0, self.pp_size - 1)

    @property
    def saves(self) -> bool:
        return self.tp_rank == 0 and self.pp_rank == 0


def state_file(args: argparse.Namespace, place: Place) -> Path:
    stage = "_000" if place.pp_size > 1 else ""
    folder = Path(args.dataloader_save) / f"iter_{args.iteration:07d}" / f"mp_rank_00{stage}"
    return folder / f"train_dataloader_dprank{place.dp_rank:03d}.pt"


def worker_config_of(args: argparse.Namespace, place: Place) -> WorkerConfig:
    return WorkerConfig(
        rank=place.dp_rank, world_size=place.dp_size, num_workers=args.num_workers, data_parallel_group=None
    )


def train_iterator(
    args: argparse.Namespace,
    place: Place = Place(),
    *,
    get_savable_loader: Any = aiak_ext.get_savable_loader,
    virtual_epoch_length: int = 1000,
    shuffle_buffer_size: int | None = 100,
) -> RerunDataIterator | None:
    """The example's provider for training, and what Megatron wraps around its result."""
    if not place.loads:
        return None
    encoder = SortedNumberTaskEncoder(aiak_ext.ExtensionConfig.from_args(args))
    worker_config = worker_config_of(args, place)
    dataset = get_train_dataset(
        args.data_path[0],
        batch_size=args.micro_batch_size,
        task_encoder=encoder,
        virtual_epoch_length=virtual_epoch_length,
        max_samples_per_sequence=100,
        shuffle_buffer_size=shuffle_buffer_size,
        worker_config=worker_config,
        packing_buffer_size=args.packing_buffer_size,
        handler=print,
        image_decode="pil",
    )
    loader = get_savable_loader(dataset, worker_config=worker_config)
    if args.load is not None and args.dataloader_save:
        if get_savable_loader is aiak_ext.get_savable_loader:
            state = load_loader_state(state_file(args, place).parent, place.dp_rank)
        else:
            state = torch.load(state_file(args, place), map_location="cpu", weights_only=False)["dataloader_state_dict"]
        loader.restore_state_rank(state)
    return RerunDataIterator(HostDataIterator(loader))


def save_dataloader(args: argparse.Namespace, place: Place, iterator: RerunDataIterator | None) -> None:
    """The loop's saving of the loader, on the one stage that does it."""
    if iterator is None or not args.dataloader_save or not place.saves:
        return
    assert hasattr(iterator.iterable, "save_state"), "Megatron refuses to go on"
    path = state_file(args, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"dataloader_state_dict": iterator.iterable.save_state()}, path)


def train_step(iterator: RerunDataIterator, *, num_microbatches: int = 2, rerun: bool = False) -> list[list[Any]]:
    """One step; what each run of it was given.

    The iterator is told what Megatron's rerun state machine tells it (the machine itself wants CUDA and a process
    group; tests/distributed/test_example_training.py runs it).
    """
    iterator.advance()
    runs = [[next(iterator) for _ in range(num_microbatches)]]
    if rerun:
        iterator.rewind()
        runs.append([next(iterator) for _ in range(num_microbatches)])
    return runs


def train_steps(iterator: RerunDataIterator, count: int) -> list[tuple[int, ...]]:
    """Sample indices of every micro batch of `count` steps."""
    return [tuple(batch.indices) for _ in range(count) for batch in train_step(iterator)[0]]


def stop(*iterators: RerunDataIterator) -> None:
    for iterator in iterators:
        stop_workers(iterator.iterable.loader)


# -- tests -------------------------------------------------------------------------------------------------------------


def arguments(data: Path, *words: str) -> argparse.Namespace:
    return megatron_args(
        *("--data-path", str(data), "--micro-batch-size", "2", "--num-workers", "2", "--train-iters", "10"),
        *("--length-sort-pool-size", str(POOL_SIZE)),
        *words,
        extra_args_provider=multimodal_args,
    )


def test_flags_join_megatrons_parser_and_settings_survive_its_checks(data, tmp_path):
    args = arguments(data, "--dataloader-save", str(tmp_path), "--length-sort-desc")
    config = aiak_ext.ExtensionConfig.from_args(args)
    assert config == aiak_ext.ExtensionConfig(
        length_sort=aiak_ext.LengthSortConfig(pool_size=POOL_SIZE, descending=True, shuffle_block=2),
        dataloader_save=str(tmp_path),  # the example's own flag, adopted
        micro_batch_size=2,
    )
    aiak_ext.apply_to_megatron_args(args, config)
    assert args.variable_seq_lengths
    off = arguments(data, "--length-sort-pool-size", "0")
    aiak_ext.apply_to_megatron_args(off, aiak_ext.ExtensionConfig.from_args(off))
    assert not off.variable_seq_lengths


def test_first_and_last_stage_of_the_first_tensor_rank_load_and_the_first_saves(data, tmp_path):
    args = arguments(data, "--dataloader-save", str(tmp_path), "--num-workers", "0")
    stages = [Place(tp_rank=tp, pp_rank=pp, pp_size=3) for tp in range(2) for pp in range(3)]
    iterators = [train_iterator(args, place) for place in stages]
    assert [iterator is not None for iterator in iterators] == [True, False, True, False, False, False]
    assert train_steps(iterators[0], 5) == train_steps(iterators[2], 5)
    for place, iterator in zip(stages, iterators):
        save_dataloader(args, place, iterator)
    saved = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")]
    assert saved == ["iter_0000000/mp_rank_00_000/train_dataloader_dprank000.pt"]


def test_both_stages_resume_from_the_first_ones_file(data, tmp_path):
    args = arguments(data, "--dataloader-save", str(tmp_path), "--num-workers", "1")
    stages = [Place(dp_rank=1, dp_size=2, pp_rank=pp, pp_size=2) for pp in range(2)]
    first = train_iterator(args, stages[0])
    train_steps(first, 4)
    save_dataloader(args, stages[0], first)
    expected = train_steps(first, 12)
    args.load = "checkpoint"
    resumed = [train_iterator(args, place) for place in stages]
    assert [train_steps(iterator, 12) for iterator in resumed] == [expected, expected]
    stop(first, *resumed)


@pytest.mark.parametrize(
    ("get_savable_loader", "parts"),
    # A save one step after a restore is exact with our loader only (tests/unit/test_loader.py shows Energon's fault).
    [(aiak_ext.get_savable_loader, [4, 1, 25]), (energons_get_savable_loader, [4, 26])],
    ids=["ours", "energon's"],
)
def test_resume_is_exact_with_the_pool_on(data, tmp_path, get_savable_loader, parts):
    args = arguments(data, "--dataloader-save", str(tmp_path))
    place = Place()
    straight = train_iterator(args, get_savable_loader=get_savable_loader)
    expected = train_steps(straight, 30)
    stop(straight)
    resumed = []
    for count in parts:
        iterator = train_iterator(args, get_savable_loader=get_savable_loader)
        resumed += train_steps(iterator, count)
        args.iteration += count
        save_dataloader(args, place, iterator)
        args.load = "checkpoint"
        stop(iterator)
    assert resumed == expected
    assert len(list(tmp_path.rglob("train_dataloader_dprank000.pt"))) == len(parts)


def test_pools_and_their_state_reach_over_virtual_epochs(data, tmp_path):
    """The example's loader starts its dataset again after every virtual epoch; the pool goes on."""
    args = arguments(data, "--dataloader-save", str(tmp_path), "--num-workers", "0")
    short = {"virtual_epoch_length": 7, "shuffle_buffer_size": None}
    straight = train_iterator(args, virtual_epoch_length=1000, shuffle_buffer_size=None)
    first = train_iterator(args, **short)
    emitted = train_steps(first, 5)
    save_dataloader(args, Place(), first)
    args.load = "checkpoint"
    second = train_iterator(args, **short)
    assert emitted + train_steps(second, 15) == train_steps(straight, 20)


def test_a_rerun_step_replays_the_same_objects_unchanged(data, tmp_path):
    args = arguments(data, "--dataloader-save", str(tmp_path), "--num-workers", "0")
    straight, iterator = train_iterator(args), train_iterator(args)
    expected = train_steps(straight, 8)
    emitted = train_steps(iterator, 2)
    runs = train_step(iterator, rerun=True)
    assert len(runs) == 2
    assert all(replayed is batch for batch, replayed in zip(*runs))
    emitted += [tuple(batch.indices) for batch in runs[1]]
    save_dataloader(args, Place(), iterator)
    args.load = "checkpoint"
    resumed = train_iterator(args)
    assert emitted + train_steps(resumed, 5) == expected, "a replay takes nothing from the loader"


def test_data_parallel_ranks_see_like_lengths_and_share_no_sample(data):
    args = arguments(data, "--num-workers", "0", "--length-sort-pool-size", "60")
    steps = NUM_SAMPLES // 2 // 2 // 2  # one epoch: two ranks, two samples a micro batch, two micro batches a step
    batches = []
    for dp_rank in range(2):
        iterator = train_iterator(args, Place(dp_rank=dp_rank, dp_size=2), shuffle_buffer_size=None)
        batches.append([batch for _ in range(steps) for batch in train_step(iterator)[0]])
    indices = [index for rank in batches for batch in rank for index in batch.indices]
    assert sorted(indices) == list(range(NUM_SAMPLES))
    longest = torch.tensor([[float(max(batch.lengths)) for batch in rank] for rank in batches])
    assert torch.corrcoef(longest)[0, 1] > 0.9


def test_validation_sets_are_plain_energon(data):
    args = arguments(data, "--num-workers", "0")
    worker_config = worker_config_of(args, Place())
    found = get_val_datasets(
        args.data_path[0],
        split_part="train",
        batch_size=args.micro_batch_size,
        task_encoder=SortedNumberTaskEncoder(aiak_ext.ExtensionConfig.from_args(args)),
        worker_config=worker_config,
        packing_buffer_size=args.packing_buffer_size,
        handler=print,
        image_decode="pil",
    )
    for dataset, _ in found:
        assert "LengthPoolSortDataset" not in wrapper_names(dataset)
        repeated = RepeatDataset(dataset, worker_config=worker_config)
        limited = LimitDataset(repeated, length=70, worker_config=worker_config, reset_after_epoch=True)
        validation = HostDataIterator(get_loader(limited, worker_config=worker_config))
        indices = [index for batch in itertools.islice(validation, 60) for index in batch.indices]
        assert indices == list(range(NUM_SAMPLES)), "in the order of the shards"


def test_with_packing_the_pool_holds_packs_and_resumes(data, tmp_path):
    args = arguments(data, "--dataloader-save", str(tmp_path), "--num-workers", "0", "--packing-buffer-size", "9")
    args.micro_batch_size = 1
    straight, first = train_iterator(args), train_iterator(args)
    expected = [[pack for batch in train_step(straight)[0] for pack in batch.indices] for _ in range(6)]
    emitted = [[pack for batch in train_step(first)[0] for pack in batch.indices] for _ in range(2)]
    save_dataloader(args, Place(), first)
    args.load = "checkpoint"
    second = train_iterator(args)
    emitted += [[pack for batch in train_step(second)[0] for pack in batch.indices] for _ in range(4)]
    assert emitted == expected
    assert all(isinstance(pack, list) and len(pack) == 3 for step in emitted for pack in step)


def test_torchs_default_load_refuses_what_ours_reads(data, tmp_path):
    """Megatron's example loads without `weights_only=False`, prints the error and starts the data over in silence."""
    args = arguments(data, "--dataloader-save", str(tmp_path), "--num-workers", "0")
    iterator = train_iterator(args)
    train_steps(iterator, 2)
    save_dataloader(args, Place(), iterator)
    path = state_file(args, Place())
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(path, map_location="cpu")
    assert dataclasses.asdict(load_loader_state(path.parent, 0)) == dataclasses.asdict(iterator.iterable.save_state())
    with pytest.raises(ValueError, match=r"No loader state.*--restart-data"):
        load_loader_state(path.parent.parent, 0)
