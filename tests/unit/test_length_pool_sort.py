"""LengthPoolSortDataset on in-memory streams: order, pace, memory, and resume at every position."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import WorkerConfig

from length_sort import LengthPoolSortDataset
from length_sort.pool_order import order_pool, pool_seed
from tests.streams import LengthSample, ListDataset, active, check_resume_everywhere, drain, single_worker, stored, take

LENGTHS = [int(length) for length in np.random.default_rng(0).lognormal(6, 1, 60) + 1]


def _wrapper(lengths=LENGTHS, *, make=None, restorable=True, worker_config=None, **options):
    options.setdefault("pool_size", 16)
    stream = ListDataset(lengths, make=make, restorable=restorable, worker_config=worker_config)
    return LengthPoolSortDataset(stream, worker_config=stream.worker_config, **options)


def _index(sample):
    return int(sample.__key__.removeprefix("sample-"))


def _expected(lengths, pool_size, first_index=0, **rule):
    order, start = [], 0
    while start < len(lengths):
        pool = lengths[start : start + pool_size]
        seed = pool_seed(42, first_index + start + len(pool) - 1, 0)
        order += [start + index for index in order_pool(pool, seed=seed, **rule)]
        start += pool_size
    return order


@pytest.mark.parametrize("options", [{}, {"ascending": False}, {"shuffle_block": 4}, {"shuffle_block": 16}])
def test_emits_the_rule_pool_by_pool_with_its_tail(options):
    emitted = [_index(sample) for sample in drain(_wrapper(**options))]
    assert emitted == _expected(LENGTHS, 16, **options)


def test_second_epoch_goes_on_counting():
    dataset = _wrapper()
    drain(dataset)
    assert [_index(sample) for sample in drain(dataset)] == _expected(LENGTHS, 16, first_index=60)


def test_ranks_share_permutations_and_worker_slots_do_not():
    configs = [single_worker(0, 2), single_worker(1, 2)]
    ranks = [[_index(sample) for sample in drain(_wrapper(worker_config=config))] for config in configs]
    assert ranks[0] == ranks[1]


@given(
    st.lists(st.integers(1, 300), max_size=50),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_nothing_lost_nothing_twice(lengths, num_blocks, block, separate, warmup):
    dataset = _wrapper(
        lengths,
        make=lambda index, length: {"total_len": length, "cu_lengths": [0, 1, 2] if index % 3 == 0 else None},
        pool_size=num_blocks * block,
        shuffle_block=block,
        separate_packed=separate,
        warmup_pools=warmup,
    )
    for _ in range(2):
        assert sorted(_index(sample) for sample in drain(dataset)) == list(range(len(lengths)))


# -- pace and memory ------------------------------------------------------------------------------------------


def test_reads_one_sample_per_emission_and_holds_one_pool():
    dataset = _wrapper(LENGTHS * 2)
    stream = dataset.dataset
    iterator = iter(dataset)
    take(iterator, 1, dataset.worker_config)
    assert stream.num_encoded == 16 + 1, "the first batch waits for one pool"
    for emitted in range(2, 100):
        take(iterator, 1, dataset.worker_config)
        assert stream.num_encoded == 16 + emitted, "no boundary reads more than one sample"
        assert dataset.num_pooled == 16, "memory stays at one pool"


def test_warmup_grows_without_a_stall():
    dataset = _wrapper(LENGTHS * 4, pool_size=32, warmup_pools=4, initial_pool_size=4)
    iterator, reads = iter(dataset), []
    for _ in range(150):
        before = dataset.dataset.num_encoded
        take(iterator, 1, dataset.worker_config)
        reads.append(dataset.dataset.num_encoded - before)
    # Pools of 4, 11, 18, 25, 32, 32: while 4 are emitted 11 are read, three for one at most.
    assert reads[0] == 4 + 3 and max(reads[1:]) == 3
    assert set(reads[4 + 11 + 18 + 25 :]) == {1}


def test_byte_cap_keeps_the_order_and_the_bytes():
    def make(index, length):
        return {"total_len": length, "payload": torch.full((1000,), float(index))}  # 4,000 bytes

    free, capped = _wrapper(make=make), _wrapper(make=make, max_pool_bytes=20_500)
    iterator = iter(capped)
    emitted, most = [], 0
    for _ in LENGTHS:
        emitted += take(iterator, 1, capped.worker_config)
        most = max(most, capped.num_pooled_bytes)
    assert [_index(sample) for sample in emitted] == [_index(sample) for sample in drain(free)]
    assert all((sample.payload == float(_index(sample))).all() for sample in emitted)
    # 5 payloads of 4,000 bytes and their keys ("sample-00000", "ListDataset") fit.
    assert 16_000 < most <= 20_500
    assert capped.num_reencoded > 0 and free.num_reencoded == 0


# -- resume -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle_block": 4, "ascending": False},
        {"pool_size": 12, "warmup_pools": 4},
        {"separate_packed": True},
        {"max_pool_bytes": 100},
        {"pool_size": 60},
        {"pool_size": 100},
        {"pool_size": 1},
    ],
    ids=str,
)
def test_resume_at_every_position_of_two_epochs(options):
    def build():
        return _wrapper(
            make=lambda index, length: {"total_len": length, "cu_lengths": [0, 1, 2] if index % 4 == 0 else None},
            **options,
        )

    straight = check_resume_everywhere(build, _index, num_epochs=2)
    assert [sorted(epoch) for epoch in straight] == [list(range(60))] * 2


def test_three_resumes_in_one_run():
    check_resume_everywhere(_wrapper, _index, num_epochs=2, num_resumes=3)


@given(st.lists(st.integers(1, 50), max_size=25), st.integers(1, 9), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_resume_anywhere(lengths, pool_size, num_resumes):
    check_resume_everywhere(
        lambda: _wrapper(lengths, pool_size=pool_size), _index, num_epochs=2, num_resumes=num_resumes, every=3
    )


def test_restore_encodes_only_what_is_emitted():
    dataset = _wrapper(LENGTHS * 100, pool_size=4000)
    take(iter(dataset), 1000, dataset.worker_config)
    state = stored(dataset.save_state())
    resumed = _wrapper(LENGTHS * 100, pool_size=4000)
    resumed.restore_state(state)
    take(iter(resumed), 4, resumed.worker_config)
    # A batch of 4: the 4 samples themselves and as many read ahead.
    assert resumed.dataset.num_encoded == 8 and resumed.num_reencoded == 4


def test_state_holds_no_samples():
    dataset = _wrapper(make=lambda index, length: {"total_len": torch.tensor(length), "payload": torch.ones(5)})
    take(iter(dataset), 3, dataset.worker_config)
    state = stored(dataset.save_state())  # refuses anything but builtins
    assert len(state["emitting"]) == 13 and len(state["reading"]) == 3
    key, length, packed = state["emitting"][0]
    assert key[0] == "ListDataset" and length == LENGTHS[key[1]] and packed is False


# -- switching the lever in the middle of a run -------------------------------------------------------------------


def test_a_state_without_the_wrapper_is_adopted():
    plain = ListDataset(LENGTHS)
    take(iter(plain), 10, plain.worker_config)
    adopted = _wrapper()
    adopted.restore_state(stored(plain.save_state()))
    assert [_index(sample) for sample in drain(adopted)] == [10 + index for index in _expected(LENGTHS[10:], 16)]


def test_replayed_samples_pass_through_before_the_first_pool():
    """The loader's snapshot may lie before the saved position: what it skips must be the plain stream's samples."""
    plain = ListDataset(LENGTHS)
    take(iter(plain), 10, plain.worker_config)
    adopted = _wrapper()
    adopted.expect_replay([5])
    adopted.restore_state(stored(plain.save_state()))
    emitted = [_index(sample) for sample in drain(adopted)]
    assert emitted[:5] == [10, 11, 12, 13, 14]
    assert emitted[5:] == [15 + index for index in _expected(LENGTHS[15:], 16)], "seeds count from the adopted position"


@pytest.mark.parametrize("num_replayed", [0, 3, 11, 12, 20])
@pytest.mark.parametrize("position", [0, 7, 16, 20])
def test_a_changed_pool_size_takes_effect_at_one_position_for_all_ranks(position, num_replayed):
    """Two ranks restored from snapshots before and at the saved position go on with the same pools."""
    lengths = LENGTHS * 3

    def resumed(snapshot_at, replayed):
        before = _wrapper(lengths)
        head = take(iter(before), snapshot_at, before.worker_config)
        after = _wrapper(lengths, pool_size=10, shuffle_block=5)
        after.expect_replay([replayed])
        after.restore_state(stored(before.save_state()))
        iterator = iter(after)
        head += take(iterator, replayed, after.worker_config)
        return [_index(s) for s in head], [_index(s) for s in take(iterator, 10**6, after.worker_config)], after

    late_head, late_rest, _ = resumed(position + num_replayed, 0)
    head, rest, after = resumed(position, num_replayed)
    straight = [_index(sample) for sample in drain(_wrapper(lengths))]
    assert head == late_head == straight[: position + num_replayed], "replayed samples are the old ones"
    assert rest == late_rest
    assert sorted(head + rest) == list(range(len(lengths)))
    assert drain(after) != []


def test_changed_twice_and_resumed_from_the_first_snapshot():
    first = _wrapper(LENGTHS * 3)
    take(iter(first), 5, first.worker_config)
    second = _wrapper(LENGTHS * 3, pool_size=10)
    second.expect_replay([4])
    second.restore_state(stored(first.save_state()))
    kept = stored(second.save_state())  # Energon keeps the snapshot it restored from
    straight = [_index(sample) for sample in take(iter(second), 70, second.worker_config)]
    third = _wrapper(LENGTHS * 3, pool_size=8)
    third.expect_replay([70])
    third.restore_state(kept)
    iterator = iter(third)
    assert [_index(sample) for sample in take(iterator, 70, third.worker_config)] == straight
    rest = [_index(sample) for sample in take(iterator, 10**6, third.worker_config)]
    head = [_index(sample) for sample in take(iter(_wrapper(LENGTHS * 3)), 5, single_worker())]
    assert sorted(head + straight + rest) == list(range(180))


def test_pool_size_zero_drains_what_was_pooled_then_passes_through():
    dataset = _wrapper()
    head = [_index(sample) for sample in take(iter(dataset), 20, dataset.worker_config)]
    off = _wrapper(pool_size=0)
    off.restore_state(stored(dataset.save_state()))
    iterator = iter(off)
    drained = [_index(sample) for sample in take(iterator, 28, off.worker_config)]
    assert drained == _expected(LENGTHS, 16)[20:48], "the pool being emitted and the one being read go out"
    assert off.num_pooled == 0 and off.save_state()["emitting"] == []
    assert [_index(sample) for sample in take(iterator, 100, off.worker_config)] == list(range(48, 60))
    assert sorted(head + drained) == list(range(48))


def test_what_does_not_fit_is_refused():
    dataset = _wrapper()
    take(iter(dataset), 3, dataset.worker_config)
    state = dataset.save_state()
    with pytest.raises(ValueError, match="seed: saved 42, now 43"):
        _wrapper(seed=43).restore_state(stored(state))
    with pytest.raises(ValueError, match=r"global_worker: saved \(0, 1\), now \(1, 2\)"):
        _wrapper(worker_config=single_worker(1, 2)).restore_state(stored(state))
    state["__class__"] = "ODBGroupDataset"
    with pytest.raises(ValueError, match="ODBGroupDataset"):
        _wrapper().restore_state(stored(state))


# -- upstreams that cannot restore, bad samples, failing batches ----------------------------------------------------


def test_upstream_that_cannot_restore_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="@stateless"):
        _wrapper(restorable=False)


def test_inexact_resume_says_how_many_samples_are_lost(caplog):
    dataset = _wrapper(restorable=False, allow_inexact_resume=True)
    take(iter(dataset), 20, dataset.worker_config)
    state = stored(dataset.save_state())
    assert state["emitting"] == [] and state["num_unsaved"] == 16
    resumed = _wrapper(restorable=False, allow_inexact_resume=True)
    with caplog.at_level(logging.WARNING):
        resumed.restore_state(state)
    assert "16 pooled samples" in caplog.text
    assert [_index(s) for s in drain(resumed)] == [36 + i for i in _expected(LENGTHS[36:], 16, first_index=20)]


def test_samples_without_a_length_go_to_energons_handler():
    if not hasattr(WorkerConfig, "global_error_handler"):
        pytest.skip("Energon 7.2 has no error handler of the user's: failing samples are printed")
    failures = []
    config = single_worker()
    config.global_error_handler = lambda error, sample, sources: failures.append((type(error), sample.__key__))
    lengths = [*LENGTHS[:10], 0, None, *LENGTHS[10:20]]
    emitted = [_index(sample) for sample in drain(_wrapper(lengths, worker_config=config, pool_size=5))]
    assert failures == [(ValueError, "sample-00010"), (ValueError, "sample-00011")]
    assert sorted(emitted) == [index for index in range(22) if index not in (10, 11)]


def test_a_stream_of_bad_samples_stops_the_run():
    from megatron.energon.errors import FatalSampleError

    with pytest.raises(FatalSampleError, match="3 times in a row"):
        drain(_wrapper([0] * 10, failure_tolerance=3))


@pytest.mark.parametrize("num_lost", [1, 3])
def test_lost_samples_are_made_up_for_at_the_next_pool_edge(num_lost, caplog):
    straight = drain(_wrapper(LENGTHS * 2))
    dataset = _wrapper(LENGTHS * 2)
    iterator = iter(dataset)
    batches = []
    for step in range(120):
        sample = take(iterator, 1, dataset.worker_config)
        if 4 <= step < 4 + num_lost:
            with caplog.at_level(logging.WARNING):
                dataset.note_lost(1, "batch failed")
            continue
        batches += sample
    assert f"{num_lost} lost so far" in caplog.text
    # Pool 0 gives 16 - num_lost batches and num_lost fillers; pool 1 then starts at batch 16 as on every rank.
    others = [[LENGTHS[_index(s) % 60] for s in straight[start : start + 16]] for start in (16, 32, 48)]
    ours = [[LENGTHS[_index(s) % 60] for s in batches[start : start + 16]] for start in (16, 32, 48)]
    for mine, theirs in zip(ours, others):
        ranks = [sorted(mine).index(length) for length in mine]
        assert np.corrcoef(ranks, [sorted(theirs).index(length) for length in theirs])[0, 1] > 0.95


def test_lost_samples_survive_a_resume():
    def build():
        return _wrapper()

    def run(resume_at):
        dataset = build()
        iterator, emitted = iter(dataset), []
        for step in range(40):
            emitted += [_index(sample) for sample in take(iterator, 1, dataset.worker_config)]
            if step in (3, 9):
                dataset.note_lost(1, "batch failed")
            if step == resume_at:
                state = stored(dataset.save_state())
                dataset = build()
                dataset.restore_state(state)
                iterator = iter(dataset)
        return emitted

    straight = run(None)
    assert all(run(resume_at) == straight for resume_at in range(0, 40, 3))


# -- Energon's interface -------------------------------------------------------------------------------------------


def test_behaves_like_energons_wrappers():
    dataset = _wrapper()
    sample = take(iter(dataset), 1, dataset.worker_config)[0]
    with active(dataset.worker_config):
        assert dataset.restore_sample(sample.__restore_key__) == sample
    assert dataset.can_restore_sample() and dataset.worker_has_samples() and dataset.len_worker() == 60
    assert not _wrapper([]).worker_has_samples()
    assert dataset.config()["pool_size"] == 16 and dataset.config()["dataset"]["num_samples"] == 60
    dataset.reset_state_deep()
    assert [_index(sample) for sample in drain(dataset)] == _expected(LENGTHS, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": 10, "shuffle_block": 4}, "Give 12"),
        ({"pool_size": -1}, "pool_size is -1"),
        ({"shuffle_block": 0}, "shuffle_block is 0"),
        ({"warmup_pools": -1}, "warmup_pools is -1"),
        ({"initial_pool_size": 17}, "from 1 to 16"),
        ({"max_pool_bytes": -1}, "max_pool_bytes is -1"),
    ],
)
def test_wrong_sizes_name_value_and_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        _wrapper(**options)


def test_sorts_by_any_number(capfd):
    costs = drain(_wrapper(length_fn=lambda sample: np.float32(1 / sample.total_len), pool_size=60))
    assert [_index(sample) for sample in costs] == _expected([1 / length for length in LENGTHS], 60)
    assert drain(_wrapper([1], length_fn=lambda sample: float("nan"))) == []
    assert "length_fn returned nan" in capfd.readouterr().err


def test_iterating_again_goes_on_where_it_was():
    """Persistent workers and a second iter() make a new generator over the same object."""
    dataset = _wrapper()
    head = take(iter(dataset), 7, dataset.worker_config)
    rest = drain(dataset)
    assert [_index(sample) for sample in head + rest] == _expected(LENGTHS, 16)


def test_sample_type_is_the_streams():
    assert isinstance(drain(_wrapper())[0], LengthSample)
