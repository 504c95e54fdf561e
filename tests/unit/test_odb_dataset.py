"""ODBGroupDataset on one rank: groups, pace, state, mistakes. Several ranks are in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from megatron.energon import WorkerConfig

from length_sort.coordinator import LocalCoordinator, StoreCoordinator
from length_sort.odb_counters import coverage
from length_sort.odb_dataset import ODBGroupDataset
from length_sort.odb_group import GroupInfo
from length_sort.store_channel import ODBSyncError
from tests.streams import ListDataset, active, check_resume_everywhere, drain, single_worker, stored, take

LENGTHS = [37, 5, 90, 61, 12, 12, 88, 44, 130, 7, 19, 53, 71, 3, 28, 66, 9, 40, 25, 99, 14, 33, 2]


def with_labels(index: int, length: int) -> dict:
    return {"total_len": length, "payload": str(index)}  # a string, so that it takes up bytes


def index_of(sample) -> int:
    return int(sample.payload)


def build(lengths=LENGTHS, *, source_options=None, **options) -> ODBGroupDataset:
    source = ListDataset(lengths, make=with_labels, **(source_options or {}))
    defaults = dict(token_budget=100, buffer_size=8, loss_tokens_fn=lambda sample: sample.total_len - 1)
    return ODBGroupDataset(source, **{**defaults, **options}, worker_config=source.worker_config)


def identify(group) -> tuple:
    return (group.info, [index_of(sample) for sample in group.samples], [index_of(s) for s in group.template])


@pytest.mark.parametrize("policy", ["carry_over", "tight", "packed"])
@pytest.mark.parametrize("target", ["max", "min"])
def test_every_sample_once_within_the_budget_with_exact_figures(policy, target):
    groups = drain(build(policy=policy, target=target))
    assert sorted(index_of(sample) for group in groups for sample in group.samples) == list(range(len(LENGTHS)))
    for group in groups:
        lengths = [sample.total_len for sample in group.samples]
        size = sum(lengths) if policy == "packed" else max(lengths) * len(lengths)
        assert size <= 100 or len(lengths) == 1
        info = group.info
        assert (info.local_samples, info.local_tokens) == (len(lengths), sum(lengths))
        assert info.local_loss_tokens == sum(lengths) - len(lengths)
        assert (info.global_samples, info.global_tokens) == (info.local_samples, info.local_tokens)
        assert not info.idle
    positions = [(group.info.round, group.info.position) for group in groups]
    assert positions == sorted(set(positions))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(policy="packed", target="min", max_deferrals=0),
        dict(policy="tight", buffer_size=1),
        dict(buffer_size=100, group_order="rank_window_balanced"),
        dict(max_buffer_bytes=0),
    ],
)
def test_resume_is_exact_at_every_position(options):
    epochs = check_resume_everywhere(lambda: build(**options), identify, num_epochs=2)
    assert len(epochs[0]) > 3 and epochs[0] != epochs[1], "epochs must differ in rounds and order"


def test_three_resumes_of_one_run():
    check_resume_everywhere(lambda: build(policy="packed"), identify, num_resumes=3, every=3)


def test_restore_encodes_only_what_is_emitted_and_read_ahead():
    lengths = [10] * 400
    dataset = build(lengths, buffer_size=200, token_budget=50)
    iterator = iter(dataset)
    take(iterator, 10, dataset.worker_config)
    state = stored(dataset.save_state())
    restored = build(lengths, buffer_size=200, token_budget=50)
    restored.restore_state(state)
    source = restored.dataset
    take(iter(restored), 1, restored.worker_config)
    assert source.num_encoded <= 2 * 5 + 2, "a restored buffer must not be encoded before its turn"


def test_reads_about_as_much_as_it_emits():
    dataset = build([10] * 1000, buffer_size=100, token_budget=50, policy="packed")
    source, iterator = dataset.dataset, iter(dataset)
    take(iterator, 1, dataset.worker_config)
    counts = []
    for _ in range(100):
        before = source.num_encoded
        take(iterator, 1, dataset.worker_config)
        counts.append(source.num_encoded - before)
    assert max(counts) <= 2 * 5, "a round's samples must be read while the round before is emitted"


def test_vision_patches_and_cost_bound_the_groups():
    options = dict(token_budget=1000, patches_fn=lambda s: s.total_len * 4, cost_fn=lambda s: s.total_len**2)
    for policy in ("tight", "packed"):
        for group in drain(build(**options, policy=policy, max_patches=500, max_cost=20_000)):
            lengths = [sample.total_len for sample in group.samples]
            cost = sum(n * n for n in lengths) if policy == "packed" else max(lengths) ** 2 * len(lengths)
            assert len(lengths) == 1 or (4 * sum(lengths) <= 500 and cost <= 20_000)


def test_group_is_a_sample_that_restores_from_its_key():
    dataset = build()
    group = drain(dataset)[4]
    with active(dataset.worker_config):
        again = dataset.restore_sample(stored(group.__restore_key__))
    assert identify(again) == identify(group)
    assert (again.__key__, again.__restore_key__) == (group.__key__, group.__restore_key__)


def test_info_travels_as_a_tensor():
    info = GroupInfo(3, 1, 2, 4, 100, 200, 90, 180, idle=True)
    tensor = info.to_tensor()
    assert tensor.dtype == torch.int64 and tensor.shape == (9,)
    assert GroupInfo.from_tensor(tensor) == info
    with pytest.raises(ValueError, match="18 figures of an ODB group instead of 9"):
        GroupInfo.from_tensor(torch.cat([tensor, tensor]))


def test_bad_samples_go_to_the_configured_handler():
    failures = []
    worker_config = WorkerConfig(
        rank=0, world_size=1, num_workers=0, global_error_handler=lambda e, sample, sources: failures.append(str(e))
    )
    groups = drain(build([10, None, 20, 0, 30], source_options={"worker_config": worker_config}))
    assert sorted(index_of(sample) for group in groups for sample in group.samples) == [0, 2, 4]
    assert len(failures) == 2 and "sample-00001" in failures[0] and "total_len = 0" in failures[1]


def test_bad_samples_stop_the_run_when_the_handler_raises():
    def reraise(error, sample, sources):
        raise error

    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=reraise)
    with pytest.raises(ValueError, match="no usable length"):
        drain(build([10, None], source_options={"worker_config": worker_config}))


def test_samples_that_cannot_be_restored_are_counted_and_leave_an_idle_group():
    dataset = build([150, 160], max_buffer_bytes=0)
    dataset.dataset.restore_sample = lambda key: None
    dataset._buffer._restore_sample = dataset.dataset.restore_sample
    groups = drain(dataset)
    assert [(group.samples, group.info.idle, group.info.local_tokens) for group in groups] == [([], True, 0)] * 2
    assert dataset.counters.lost_samples == 2


def test_counters_and_coverage():
    dataset = build(policy="packed", target="min")
    groups = drain(dataset)
    counters = dataset.counters
    assert counters.local_samples == counters.global_samples == len(LENGTHS)
    assert counters.local_tokens == sum(LENGTHS)
    assert (counters.num_groups, counters.num_idle_groups) == (len(groups), 0)
    report = coverage(quota=20, num_emitted=15, num_distinct=14, num_left_over=3)
    assert (report.eta_quota, report.eta_identity, report.eta_logical) == (0.25, pytest.approx(0.3), 0.15)
    with pytest.raises(ValueError, match="quota is 0"):
        coverage(quota=0, num_emitted=0, num_distinct=0, num_left_over=0)


def test_state_saved_without_odb_is_adopted_after_the_replayed_batches():
    plain = ListDataset(LENGTHS, make=with_labels)
    take(iter(plain), 6, plain.worker_config)
    dataset = build()
    dataset.expect_replay([2])  # the snapshot lies two batches before the saved position
    dataset.restore_state(stored(plain.save_state()))
    groups = drain(dataset)
    assert [[index_of(s) for s in group.samples] for group in groups[:2]] == [[6], [7]]
    assert sorted(index_of(s) for group in groups for s in group.samples) == list(range(6, len(LENGTHS)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(token_budget=99), "token_budget: saved 100, now 99"),
        (dict(seed=7), "seed: saved 42, now 7"),
        (dict(buffer_size=9, policy="packed"), "buffer_size: saved 8, now 9; policy: saved 'carry_over', now 'packed'"),
    ],
)
def test_state_of_other_settings_is_refused_with_what_differs(change, match):
    state = build().save_state()
    with pytest.raises(ValueError, match=match):
        build(**change).restore_state(state)


def test_state_of_another_world_or_lever_is_refused():
    state = build().save_state()
    other = build(
        source_options={"worker_config": single_worker(1, 2)}, coordinator=LocalCoordinator(rank=1, world_size=2)
    )
    with pytest.raises(ValueError, match=r"rank: saved 0, now 1.*world_size: saved 1, now 2"):
        other.restore_state(state)
    state["__class__"] = "LengthPoolSortDataset"
    with pytest.raises(ValueError, match="belongs to length sort"):
        build().restore_state(state)


def test_ranks_without_a_coordinator_are_an_error():
    worker_config = single_worker(0, 2)
    with pytest.raises(ValueError, match="no coordinator, and there are 2 ranks"):
        build(source_options={"worker_config": worker_config})
    with pytest.raises(ValueError, match=r"for rank 0 of 1, the data for rank\s+0 of 2"):
        build(source_options={"worker_config": worker_config}, coordinator=LocalCoordinator())


def test_unsynchronised_ranks_need_an_endless_stream():
    dataset = build(source_options={"worker_config": single_worker(0, 2)}, coordinator=LocalCoordinator(world_size=2))
    iterator = iter(dataset)
    first = take(iterator, 1, dataset.worker_config)[0]
    assert not first.info.synchronized
    with pytest.raises(ODBSyncError, match="stream of rank 0 has ended"):
        take(iterator, 1000, dataset.worker_config)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(max_patches=10), "max_patches is 10, but nothing measures a sample's patches"),
        (dict(max_cost=1.0), "max_cost is 1.0, but nothing measures a sample's cost"),
        (dict(token_budget=-5), "token_budget is -5"),
        (dict(source_options={"restorable": False}), "needs an upstream that can restore samples"),
    ],
)
def test_mistakes_are_refused_at_the_start(options, match):
    with pytest.raises(ValueError, match=match):
        build(**options)


def test_coordinator_settings_are_checked():
    with pytest.raises(ValueError, match="rank is 2 in a world of 2"):
        StoreCoordinator("127.0.0.1", 1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="timeout_s is 0"):
        StoreCoordinator("127.0.0.1", 1, rank=0, world_size=2, timeout_s=0)


def test_sync_error_is_built_from_one_string():
    """As torch's DataLoader does when it carries an error over from a worker."""
    error = ODBSyncError("slot 0", missing_ranks=[1])
    assert error.missing_ranks == (1,)
    assert str(type(error)("Caught in worker")) == "Caught in worker"
