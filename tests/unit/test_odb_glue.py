"""ODB through the mixin: one batch per group whatever the hooks do, its figures beside it, exact resume."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.energon import SkipSample, stateless
from megatron.energon.wrappers import BatchDataset, PackingDataset

from aiak_ext import ExtensionConfig, LengthAwareTaskEncoderMixin, LengthSortConfig, ODBConfig, build_train_loader
from aiak_ext.loader import find_lever
from aiak_ext.worker_counters import read_counters
from length_sort import GroupInfo, LengthPoolSortDataset, ODBGroupDataset
from tests.energon_data import (
    NumberBatch,
    NumberTaskEncoder,
    SortedNumberTaskEncoder,
    _batch_keys,
    lognormal_lengths,
    sorted_pools,
    train_dataset,
    write_dataset,
)

LENGTHS = lognormal_lengths(60)
BUDGET = 400


@dataclass
class GroupBatch(NumberBatch):
    labels: torch.Tensor
    odb_info: torch.Tensor | None = None
    worker_counters: torch.Tensor | None = None

    @property
    def info(self) -> GroupInfo:
        return GroupInfo.from_tensor(self.odb_info)


class GroupTaskEncoder(LengthAwareTaskEncoderMixin, NumberTaskEncoder):
    @stateless
    def batch(self, samples: list[Any]) -> GroupBatch:
        self.calls["batch"] += 1
        if self.fail_batch is not None and self.fail_batch(samples):
            raise RuntimeError("this batch is broken")
        longest = max(sample.total_len for sample in samples)
        return GroupBatch(
            **_batch_keys(samples),
            indices=[sample.index for sample in samples],
            lengths=[sample.total_len for sample in samples],
            hooks={},
            labels=torch.ones(len(samples), longest),
        )

    @stateless
    def encode_batch(self, batch: GroupBatch) -> GroupBatch:
        return batch


def groups(budget=BUDGET, **options):
    options.setdefault("buffer_size", 16)
    return ExtensionConfig(odb=ODBConfig(token_budget=budget, **options), calculate_per_token_loss=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("numbers") / "data", LENGTHS)


def _loader(data, encoder=None, config=None, num_workers=0, **options):
    encoder = encoder or GroupTaskEncoder(config or groups())
    return build_train_loader(train_dataset(data, encoder, num_workers=num_workers, **options))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_groups_within_the_budget_cover_every_sample_once(data, num_workers):
    loader = _loader(data, num_workers=num_workers, repeat=False)
    for _ in range(2):
        epoch = list(loader)
        assert sorted(index for batch in epoch for index in batch.indices) == list(range(60))
        for batch in epoch:
            padded = max(batch.lengths) * len(batch.lengths)
            assert padded <= BUDGET or len(batch.lengths) == 1
            info = batch.info
            assert info.local_samples == info.global_samples == len(batch.indices) and not info.idle
            assert info.local_tokens == sum(batch.lengths)
    loader.close()


def test_energons_batch_dataset_is_there_for_hosts_that_look(data):
    dataset = train_dataset(data, GroupTaskEncoder(groups()))
    assert isinstance(dataset.dataset, BatchDataset) and isinstance(dataset.dataset.dataset, ODBGroupDataset)
    assert dataset.can_restore_sample()
    loader = build_train_loader(dataset)
    batch = next(loader)
    again = loader.loader.restore_sample(batch.__restore_key__)
    assert again.indices == batch.indices and torch.equal(again.odb_info, batch.odb_info)


@pytest.mark.parametrize("options", [{}, {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 1}])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_three_resumes_in_one_run(data, num_workers, options, tmp_path):
    def build():
        dataset = train_dataset(data, GroupTaskEncoder(groups()), num_workers=num_workers)
        return build_train_loader(dataset, **options)

    straight = build()
    expected = [next(straight).indices for _ in range(40)]
    straight.close()
    emitted = []
    for part, count in enumerate([7, 1, 2, 30]):
        loader = build()
        if part:
            loader.load_checkpoint(tmp_path)
        emitted += [next(loader).indices for _ in range(count)]
        loader.save_checkpoint(tmp_path)
        loader.close()
    assert emitted == expected


def test_packed_groups_become_one_sample(data):
    loader = _loader(data, config=groups(policy="packed", target="min"), repeat=False)
    seen = []
    for batch in loader:
        (packed,), (length,) = batch.indices, batch.lengths
        assert length <= BUDGET or len(packed) == 1
        assert length == batch.info.local_tokens
        seen += packed
    assert sorted(seen) == list(range(60))


def test_after_energons_packer(data):
    dataset = train_dataset(data, GroupTaskEncoder(groups(2000)), packing_buffer_size=9)
    groups_of_packs = find_lever(dataset, ODBGroupDataset)
    assert isinstance(groups_of_packs.dataset, PackingDataset)
    batch = next(build_train_loader(dataset))
    assert all(len(pack) == 3 for pack in batch.indices)
    with pytest.raises(ValueError, match="packs would be packed again"):
        train_dataset(data, GroupTaskEncoder(groups(policy="packed")), packing_buffer_size=9)


@pytest.mark.parametrize("error", [RuntimeError("broken"), SkipSample()], ids=["fails", "skips"])
@pytest.mark.parametrize("hook", ["batch", "encode_batch"])
def test_a_failing_hook_leaves_an_idle_batch(data, hook, error):
    calls = []

    class Failing(GroupTaskEncoder):
        def fail_now(self, name):
            if name == hook:
                calls.append(name)
                if len(calls) == 3:
                    raise error

        @stateless
        def batch(self, samples: list[Any]) -> GroupBatch:
            self.fail_now("batch")
            return super().batch(samples)

        @stateless
        def encode_batch(self, batch: GroupBatch) -> GroupBatch:
            self.fail_now("encode_batch")
            return batch

    straight = [batch.indices for batch in _loader(data, repeat=False)]
    batches = list(_loader(data, encoder=Failing(groups()), repeat=False))
    assert len(batches) == len(straight), "as many steps as the other ranks take"
    assert [batch.indices for batch in batches[:2] + batches[3:]] == straight[:2] + straight[3:]
    idle = batches[2]
    assert idle.info.idle and idle.info.local_samples == 0 and idle.info.global_samples == len(straight[2])
    assert idle.indices == straight[1] and (idle.labels == -100).all(), "the last real batch, without loss"
    assert not any(batch.info.idle for batch in batches[:2] + batches[3:])


def test_a_custom_idle_batch(data):
    class Custom(GroupTaskEncoder):
        def idle_batch(self, batch, info):
            batch.labels = torch.full_like(batch.labels, -7)
            return batch

    bad = set([batch.indices for batch in _loader(data, repeat=False)][1])
    encoder = Custom(groups(), fail_batch=lambda samples: {sample.index for sample in samples} == bad)
    batches = list(_loader(data, encoder=encoder, repeat=False))
    assert (batches[1].labels == -7).all() and batches[1].info.idle


def test_counters_travel_beside_the_batch(data):
    *_, last = _loader(data, config=groups(target="min"), repeat=False)
    assert set(read_counters(last)) >= {"deferred_samples", "oldest_deferral"}

    class Sorted(GroupTaskEncoder):
        pass

    loader = _loader(data, encoder=Sorted(sorted_pools(16)), batch_size=2)
    counters = read_counters(next(loader))
    assert counters["waiting_samples"] == 16 and counters["lost_samples"] == 0
    assert counters["waiting_bytes"] > 0 and counters["reencoded_samples"] == 0
    assert read_counters(next(_loader(data, encoder=SortedNumberTaskEncoder(sorted_pools(16))))) == {}


def test_hooks_that_cannot_make_one_batch_are_refused(data):
    class Generates(GroupTaskEncoder):
        def encode_batch(self, batch):
            yield batch

    class GroupsItself(GroupTaskEncoder):
        def batch_group_criterion(self, sample):
            return sample.total_len > 10, 2

    for encoder, message in [(Generates, "is a generator"), (GroupsItself, "batch_group_criterion")]:
        with pytest.raises(ValueError, match=message):
            train_dataset(data, encoder(groups()))
    with pytest.raises(ValueError, match="NumberBatch has no field 'odb_info'"):
        train_dataset(data, SortedNumberTaskEncoder(groups()))
    with pytest.raises(ValueError, match="nothing measures a sample's cost"):
        train_dataset(data, GroupTaskEncoder(groups(max_cost=10.0)))
    with pytest.raises(ValueError, match=r"torch\.distributed, which is not initialised"):
        train_dataset(data, GroupTaskEncoder(groups()), rank=0, world_size=2)


def test_patches_and_cost_limits_reach_the_groups(data):
    config = groups(10_000, max_patches=3)
    loader = _loader(data, encoder=GroupTaskEncoder(config, patches_fn=lambda sample: 1), repeat=False)
    assert max(len(batch.indices) for batch in loader) == 3
    config = groups(10_000, max_cost=2.0)
    loader = _loader(data, encoder=GroupTaskEncoder(config, cost_fn=lambda sample: 1.0), repeat=False)
    assert max(len(batch.indices) for batch in loader) == 2


def test_switching_between_levers(data):
    plain = _loader(data, config=ExtensionConfig(), batch_size=2, repeat=False)
    first = [next(plain).indices for _ in range(4)]
    # Without workers Energon compares micro batch sizes, and a group counts as one.
    plain_of_one = _loader(data, config=ExtensionConfig(), batch_size=1, repeat=False)
    head = [next(plain_of_one).indices for _ in range(8)]
    assert [index for batch in first for index in batch] == [index for batch in head for index in batch]
    adopted = _loader(data, repeat=False)
    adopted.restore_state(plain_of_one.save_state())
    rest = [batch.indices for batch in adopted]
    assert sorted(index for batch in head + rest for index in batch) == list(range(60))
    odb = _loader(data)
    next(odb)
    state = odb.save_state()
    with pytest.raises(ValueError, match="belongs to ODB and this run has --odb-token-budget 0"):
        _loader(data, config=ExtensionConfig(), batch_size=1).restore_state(state)
    sort = _loader(data, config=sorted_pools(16), batch_size=1)
    with pytest.raises(ValueError, match="belongs to ODB"):
        sort.restore_state(state)
    next(sort)
    with pytest.raises(ValueError, match="belongs to length sort"):
        _loader(data).restore_state(sort.save_state())
    assert find_lever(sort.loader.dataset.dataset, LengthPoolSortDataset) is not None
    assert LengthSortConfig().active is False
