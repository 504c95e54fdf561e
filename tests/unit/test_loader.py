"""Real Energon pipelines with worker processes: exact resume through the loader, files, and lever changes."""

import pickle
import subprocess
import sys

import pytest
import torch
from megatron.energon import get_savable_loader as energons_get_savable_loader

from aiak_ext import build_train_loader, get_savable_loader
from aiak_ext.loader import find_lever
from aiak_ext.loader_state import load_loader_state, loader_state_path, save_loader_state
from length_sort import LengthPoolSortDataset
from tests.energon_data import SortedNumberTaskEncoder, lognormal_lengths, sorted_pools, train_dataset, write_dataset

NUM_SAMPLES = 96
# Energon's defaults: a snapshot at the first batches and then every minute, so resumes replay from the start.
DEFAULT = {}
# A snapshot at every batch.
EVERY = {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("numbers") / "data", lognormal_lengths(NUM_SAMPLES), num_shards=8)


def _loader(data, *, num_workers, config=None, loader_options=DEFAULT, encoder=None, **options):
    config = sorted_pools(10, micro_batch_size=2) if config is None else config
    dataset = train_dataset(data, encoder or SortedNumberTaskEncoder(config), num_workers=num_workers, **options)
    return build_train_loader(dataset, **loader_options)


def _batches(loader, count):
    return [tuple(next(loader).indices) for _ in range(count)]


@pytest.mark.parametrize("loader_options", [DEFAULT, EVERY], ids=["default", "every"])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_three_resumes_in_one_run_continue_exactly(data, num_workers, loader_options, tmp_path):
    straight = _loader(data, num_workers=num_workers, loader_options=loader_options)
    expected = _batches(straight, 70)
    straight.close()
    resumed = []
    # Saved mid-pool, one and two batches after a restore (Energon alone repeats samples there), and later.
    for part, count in enumerate([8, 1, 2, 59]):
        loader = _loader(data, num_workers=num_workers, loader_options=loader_options)
        if part:
            loader.load_checkpoint(tmp_path)
            assert pickle.dumps(loader.save_state()) is not None
        resumed += _batches(loader, count)
        loader.save_checkpoint(tmp_path)
        loader.close()
    assert resumed == expected


def test_energons_own_loader_repeats_where_ours_does_not(data):
    """The fault that LengthAwareDataLoader mends; should Energon mend it, ours can go."""

    def repeated(get_loader):
        def build():
            encoder = SortedNumberTaskEncoder()
            return get_loader(train_dataset(data, encoder, num_workers=3, batch_size=1))

        first = build()
        iterator = iter(first)
        emitted = [next(iterator).indices[0] for _ in range(8)]
        state = first.save_state_rank()
        first._iterator._shutdown_workers()
        second = build()
        second.restore_state_rank(state)
        emitted.append(next(iter(second)).indices[0])
        state = second.save_state_rank()
        second._iterator._shutdown_workers()
        third = build()
        third.restore_state_rank(state)
        iterator = iter(third)
        emitted += [next(iterator).indices[0] for _ in range(30)]
        third._iterator._shutdown_workers()
        return len(emitted) - len(set(emitted))

    assert repeated(get_savable_loader) == 0
    assert repeated(energons_get_savable_loader) > 0


def test_save_before_the_first_batch_and_right_after_a_restore(data):
    loader = _loader(data, num_workers=2)
    assert loader.save_state() is None
    iter(loader.loader)  # Energon's own would wait here for ever for workers that have not started
    assert loader.save_state() is None
    first = _batches(loader, 5)
    state = loader.save_state()
    loader.close()
    second = _loader(data, num_workers=2)
    second.restore_state(state)
    again = second.save_state()
    assert again.next_worker_id == state.next_worker_id
    rest = _batches(second, 5)
    second.close()
    straight = _loader(data, num_workers=2)
    assert _batches(straight, 10) == first + rest
    straight.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(straight)


def test_a_whole_process_restart_from_files(data, tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.test_loader import _batches, _loader\n"
        "data, state, resume, count = sys.argv[1:]\n"
        "if __name__ == '__main__':\n"
        "    loader = _loader(Path(data), num_workers=2)\n"
        "    if resume == '1': loader.load_checkpoint(state)\n"
        "    print(_batches(loader, int(count)))\n"
        "    loader.save_checkpoint(state); loader.close()\n"
    )

    def run(resume, count):
        arguments = [sys.executable, "-c", script, str(data), str(tmp_path), resume, count]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return eval(done.stdout.strip().splitlines()[-1])

    parts = run("0", "7") + run("1", "9")
    straight = _loader(data, num_workers=2)
    assert parts == _batches(straight, 16)
    straight.close()


def test_batches_cover_each_sample_once_per_epoch_and_workers_differ(data):
    loader = _loader(data, num_workers=2, repeat=False)
    for _ in range(2):  # persistent workers, a second epoch over the same objects
        epoch = [index for batch in loader for index in batch.indices]
        assert sorted(epoch) == list(range(NUM_SAMPLES))
    loader.close()


def test_virtual_epochs_keep_the_pool(data):
    straight = _loader(data, num_workers=0)
    expected = _batches(straight, 45)
    virtual = _loader(data, num_workers=0, virtual_epoch_length=15)
    assert [tuple(batch.indices) for _ in range(3) for batch in virtual] == expected


# -- the lever switched in the middle of a run ----------------------------------------------------------------------


@pytest.mark.parametrize("loader_options", [DEFAULT, EVERY], ids=["default", "every"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(0, 10), (10, 0), (10, 6), (6, 20)])
def test_switching_keeps_the_data_position(data, num_workers, loader_options, before, after):
    def build(pool_size, **options):
        config = sorted_pools(pool_size, micro_batch_size=2)
        return _loader(data, num_workers=num_workers, config=config, loader_options=loader_options, **options)

    total = NUM_SAMPLES // 2
    first = build(before, repeat=False)
    emitted = _batches(first, 9)
    state = first.save_state()
    first.close()
    second = build(after, repeat=False)
    second.restore_state(state)
    emitted += _batches(second, 3)  # saved again while the loader still replays
    state = second.save_state()
    second.close()
    third = build(after, repeat=False)
    third.restore_state(state)
    emitted += [tuple(batch.indices) for batch in third]
    third.close()
    assert len(emitted) >= total
    assert sorted(index for batch in emitted for index in batch) == list(range(NUM_SAMPLES))


def test_switched_off_and_drained_needs_no_wrapper_any_more(data):
    first = _loader(data, num_workers=0)
    _batches(first, 9)
    off = _loader(data, num_workers=0, config=sorted_pools(0))
    off.restore_state(first.save_state())
    _batches(off, 10)  # at most 20 samples were pooled
    state = off.save_state()
    rest = _batches(off, 10)
    plain = _loader(data, num_workers=0, config=sorted_pools(0))
    plain.restore_state(state)
    assert find_lever(plain.loader.dataset, LengthPoolSortDataset) is None, "the pool has drained: plain Energon again"
    assert _batches(plain, 10) == rest


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_file_is_what_megatrons_example_reads(data, tmp_path):
    loader = _loader(data, num_workers=2)
    _batches(loader, 3)
    path = loader.save_checkpoint(tmp_path)
    loader.close()
    assert path == tmp_path / "train_dataloader_dprank000.pt"
    content = torch.load(path, weights_only=False)
    assert list(content) == ["dataloader_state_dict"]
    assert type(content["dataloader_state_dict"]).__name__ == "SavableDataLoaderState"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_missing_and_unreadable_files_are_errors(data, tmp_path):
    loader = _loader(data, num_workers=0)
    with pytest.raises(ValueError, match=r"dprank000.pt; the directory holds none.*--restart-data"):
        loader.load_checkpoint(tmp_path)
    path = loader.save_checkpoint(tmp_path)
    for content in (path.read_bytes()[:100], b"", b"not a state"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            loader.load_checkpoint(tmp_path)
    torch.save({"something": 1}, path)
    with pytest.raises(ValueError, match="without 'dataloader_state_dict'"):
        loader.load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"dprank001.pt; the directory holds \['train_dataloader_dprank000.pt'\]"):
        load_loader_state(tmp_path, 1)


def test_restart_data_starts_over(data, tmp_path, capsys):
    loader = _loader(data, num_workers=0)
    first = _batches(loader, 3)
    loader.save_checkpoint(tmp_path)
    again = _loader(data, num_workers=0)
    again.load_checkpoint(tmp_path, restart_data=True)
    assert "started over (--restart-data)" in capsys.readouterr().out
    assert _batches(again, 3) == first


class _RunsCode:
    def __reduce__(self):
        return (print, ("code from a state file",))


def test_loading_executes_no_code_from_the_file(tmp_path, capsys):
    save_loader_state(_RunsCode(), tmp_path, 0)
    with pytest.raises(ValueError, match=r"builtin(s|__)\.print"):
        load_loader_state(tmp_path, 0)
    assert capsys.readouterr().out == ""
    torch.save(
        {"dataloader_state_dict": _RunsCode()}, loader_state_path(tmp_path, 0), _use_new_zipfile_serialization=False
    )
    with pytest.raises(ValueError, match=r"builtin(s|__)\.print"):
        load_loader_state(tmp_path, 0)


def test_another_topology_or_seed_is_refused_before_workers_start(data):
    loader = _loader(data, num_workers=2)
    _batches(loader, 5)
    state = loader.save_state()
    loader.close()
    with pytest.raises(ValueError, match="has 2 workers and this run 3"):
        _loader(data, num_workers=3).restore_state(state)
    with pytest.raises(ValueError, match=r"global_worker: saved \(0, 2\), now \(2, 4\)"):
        _loader(data, num_workers=2, rank=1, world_size=2).restore_state(state)
    with pytest.raises(ValueError, match="seed: saved 42, now 7"):
        _loader(data, num_workers=2, config=sorted_pools(10, micro_batch_size=2, seed=7)).restore_state(state)


def test_a_worker_config_of_another_run_is_refused(data):
    dataset = train_dataset(data, SortedNumberTaskEncoder())
    other = train_dataset(data, SortedNumberTaskEncoder(), rank=1, world_size=2).worker_config
    with pytest.raises(ValueError, match="rank 1 of 2"):
        get_savable_loader(dataset, worker_config=other)
    assert get_savable_loader(dataset, worker_config=dataset.worker_config) is not None
