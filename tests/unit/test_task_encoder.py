"""The mixin and register(): where the wrapper goes, and how it lives with the rest of an Energon pipeline."""

from collections import Counter

import pytest
from megatron.energon import DefaultTaskEncoder, MapDataset, get_val_dataset, stateless
from megatron.energon.wrappers import BatchDataset, PackingDataset

from aiak_ext import ExtensionConfig, build_train_loader, levers_off, register
from aiak_ext.loader import find_lever
from length_sort import LengthPoolSortDataset
from tests.energon_data import (
    NumberTaskEncoder,
    SortedNumberTaskEncoder,
    lognormal_lengths,
    sorted_pools,
    train_dataset,
    write_dataset,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("numbers") / "data", lognormal_lengths(60))


def _chain(dataset):
    names = []
    while hasattr(dataset, "datasets"):
        names.append(type(dataset).__name__)
        dataset = dataset.datasets[0]
    return names


def _epoch(dataset):
    return [batch.indices for batch in build_train_loader(dataset)]


def test_between_encode_and_batch(data):
    dataset = train_dataset(data, SortedNumberTaskEncoder(sorted_pools()), batch_size=2)
    assert _chain(dataset)[:4] == ["MapDataset", "BatchDataset", "LengthPoolSortDataset", "MapDataset"]
    assert "LengthPoolSortDataset" not in _chain(train_dataset(data, SortedNumberTaskEncoder()))
    assert "LengthPoolSortDataset" not in _chain(train_dataset(data, SortedNumberTaskEncoder(sorted_pools(0))))


def test_validation_and_levers_off_are_plain_energon(data):
    encoder = SortedNumberTaskEncoder(sorted_pools())
    worker_config = train_dataset(data, encoder).worker_config
    validation = get_val_dataset(
        data, split_part="train", batch_size=2, task_encoder=encoder, worker_config=worker_config
    )
    assert "LengthPoolSortDataset" not in _chain(validation)
    with levers_off():
        assert "LengthPoolSortDataset" not in _chain(train_dataset(data, encoder))
    assert "LengthPoolSortDataset" in _chain(train_dataset(data, encoder))


def test_register_does_the_same_to_an_instance(data):
    plain = NumberTaskEncoder()
    assert register(plain, sorted_pools(), length_fn=lambda sample: -sample.total_len) is plain
    dataset = train_dataset(data, plain, repeat=False, batch_size=1)
    mixed = train_dataset(
        data,
        SortedNumberTaskEncoder(sorted_pools(), length_fn=lambda sample: -sample.total_len),
        repeat=False,
        batch_size=1,
    )
    assert _epoch(dataset) == _epoch(mixed)
    worker_config = dataset.worker_config
    validation = get_val_dataset(
        data, split_part="train", batch_size=2, task_encoder=plain, worker_config=worker_config
    )
    assert "LengthPoolSortDataset" not in _chain(validation)
    with pytest.raises(ValueError, match="has levers already"):
        register(plain, sorted_pools())
    with pytest.raises(ValueError, match="has levers already"):
        register(SortedNumberTaskEncoder(), sorted_pools())


def test_every_option_reaches_the_wrapper(data):
    config = sorted_pools(
        20,
        micro_batch_size=4,
        descending=True,
        separate_packed=True,
        warmup_pools=3,
        initial_pool_size=8,
        seed=7,
        max_pool_bytes=12345,
    )
    wrapper = find_lever(train_dataset(data, SortedNumberTaskEncoder(config)), LengthPoolSortDataset)
    settings = wrapper.config()
    expected = {
        "pool_size": 20,
        "ascending": False,
        "separate_packed": True,
        "warmup_pools": 3,
        "initial_pool_size": 8,
        "seed": 7,
        "max_pool_bytes": 12345,
        "shuffle_block": 4,
    }
    assert {name: settings[name] for name in expected} == expected


class _SplitEncoder(DefaultTaskEncoder):
    """preencode_sample gives the light form, postencode_sample the heavy one."""

    cookers = NumberTaskEncoder.cookers
    batch = NumberTaskEncoder.batch
    select_samples_to_pack = NumberTaskEncoder.select_samples_to_pack
    pack_selected_samples = NumberTaskEncoder.pack_selected_samples

    def __init__(self):
        super().__init__()
        self.calls = Counter(batch=0)
        self.fail_batch = None
        self.fail_post = set()

    @stateless
    def preencode_sample(self, sample):
        self.calls["pre", sample.index] += 1
        return sample

    @stateless
    def postencode_sample(self, sample):
        self.calls["post", sample.index] += 1
        if sample.index in self.fail_post:
            raise RuntimeError("cannot post-encode")
        return sample


def test_between_preencode_and_postencode_and_no_hook_runs_twice(data):
    encoder = register(_SplitEncoder(), sorted_pools())
    dataset = train_dataset(data, encoder, repeat=False, batch_size=1)
    assert _chain(dataset)[1:5] == ["BatchDataset", "MapDataset", "LengthPoolSortDataset", "MapDataset"]
    epoch = _epoch(dataset)
    assert sorted(index for batch in epoch for index in batch) == list(range(60))
    assert all(encoder.calls[hook, index] == 1 for hook in ("pre", "post") for index in range(60))


@pytest.mark.parametrize("encoder_class", [NumberTaskEncoder, _SplitEncoder])
def test_after_energons_packer_with_exact_resume(data, encoder_class):
    def build():
        encoder = register(encoder_class(), sorted_pools(4, micro_batch_size=1))
        dataset = train_dataset(data, encoder, batch_size=1, packing_buffer_size=9)
        return build_train_loader(dataset)

    loader = build()
    names = _chain(loader.loader.dataset.dataset)
    assert names[names.index("LengthPoolSortDataset") + 1] == "PackingDataset"
    straight = [next(loader).indices for _ in range(30)]
    assert all(isinstance(pack, list) and len(pack[0]) == 3 for pack in straight)
    first = build()
    head = [next(first).indices for _ in range(7)]
    second = build()
    second.restore_state(first.save_state())
    # Energon's own packing buffers restore exactly while they are full; 20 packs stay inside the first epoch.
    assert head + [next(second).indices for _ in range(13)] == straight[:20]


def test_without_a_batch_size_the_wrapper_is_outermost(data):
    dataset = train_dataset(data, SortedNumberTaskEncoder(sorted_pools()), batch_size=None)
    assert isinstance(dataset, LengthPoolSortDataset)
    packed = train_dataset(data, SortedNumberTaskEncoder(sorted_pools()), batch_size=None, packing_buffer_size=9)
    assert isinstance(packed, LengthPoolSortDataset) and isinstance(packed.dataset, PackingDataset)


def test_blend_repeat_skip_and_failing_samples(data, tmp_path):
    other = write_dataset(tmp_path / "other", lognormal_lengths(30, seed=1), name="t")
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - {{weight: 2, path: {data}}}\n      - {{weight: 1, path: {other}}}\n"
    )
    encoder = SortedNumberTaskEncoder(sorted_pools(), skip={3, 4}, fail={5})

    def build():
        return build_train_loader(train_dataset(blend, encoder, batch_size=1))

    loader = build()
    straight = [next(loader).__key__[0] for _ in range(400)]
    counts = Counter(straight)
    assert not any(f"{name}{index:05d}" in counts for name in "st" for index in (3, 4, 5))
    assert len(counts) == 60 + 30 - 6 and max(counts.values()) > 3
    first = build()
    head = [next(first).__key__[0] for _ in range(33)]
    second = build()
    second.restore_state(first.save_state())
    assert head + [next(second).__key__[0] for _ in range(100)] == straight[:133]


@pytest.mark.parametrize("stage", ["batch", "postencode_sample"])
def test_a_failing_later_hook_realigns_at_the_next_pool(data, stage, capsys):
    def lengths(failing):
        if stage == "batch":
            encoder = NumberTaskEncoder(fail_batch=lambda samples: samples[0].index in failing)
        else:
            encoder = _SplitEncoder()
            encoder.fail_post = failing
        encoder = register(encoder, sorted_pools(20))
        dataset = train_dataset(data, encoder, batch_size=1)
        loader = build_train_loader(dataset)
        emitted = [next(loader).indices[0] for _ in range(60)]
        return emitted, find_lever(dataset, LengthPoolSortDataset)

    straight, _ = lengths(set())
    lost = {straight[2], straight[5]}
    shifted, wrapper = lengths(lost)
    assert wrapper.num_lost_total >= 2
    # Pool 0 gives 18 batches and 2 fillers; the second pool starts at batch 20 and has the same quantiles.
    assert shifted[:18] == [index for index in straight[:20] if index not in lost]
    for position in range(20, 40):
        ours = sorted(shifted[20:40], key=lognormal_lengths(60).__getitem__).index(shifted[position])
        theirs = sorted(straight[20:40], key=lognormal_lengths(60).__getitem__).index(straight[position])
        assert abs(ours - theirs) <= 2


def test_wrong_upstream_is_refused_and_the_opt_in_accepted(data):
    class NotStateless(NumberTaskEncoder):
        def encode_sample(self, sample):
            return sample

    with pytest.raises(ValueError, match="@stateless"):
        train_dataset(data, register(NotStateless(), sorted_pools()))
    train_dataset(data, register(NotStateless(), sorted_pools(allow_inexact_resume=True)))


def test_start_up_lines(data, capsys):
    def ours():
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("[aiak-ext] length sort")]

    loader = build_train_loader(train_dataset(data, SortedNumberTaskEncoder(sorted_pools(max_pool_bytes=2**30))))
    assert ours() == [
        "[aiak-ext] length sort: on, pools of 16 samples per worker (short to long, blocks of 1, seed 42), at most "
        "1.00 GiB of samples per worker held; the first batch waits for 16 encoded samples"
    ]
    next(loader)
    next(loader)
    (line,) = ours()
    assert line.startswith("[aiak-ext] length sort: first pool of 16 samples after ")
    train_dataset(data, SortedNumberTaskEncoder(sorted_pools()), rank=1, world_size=2)
    assert ours() == [], "one line, on rank 0"
    train_dataset(data, SortedNumberTaskEncoder(ExtensionConfig()))
    assert ours() == ["[aiak-ext] length sort: off (--length-sort-pool-size 0)"]


def test_stateless_marks_survive(data):
    dataset = train_dataset(data, SortedNumberTaskEncoder(sorted_pools()))
    assert dataset.can_restore_sample()
    assert isinstance(dataset, MapDataset) and isinstance(dataset.dataset, BatchDataset)
    loader = build_train_loader(dataset)
    batch = next(loader)
    again = loader.loader.restore_sample(batch.__restore_key__)
    assert again.indices == batch.indices
