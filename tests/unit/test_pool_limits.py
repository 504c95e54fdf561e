"""Memory and descriptors: the byte cap at its real size, flat memory, and 800,000 pooled tensors."""

import resource
import subprocess
import sys
import weakref

import torch

from aiak_ext import get_savable_loader
from length_sort import LengthPoolSortDataset
from tests.streams import ListDataset, drain, single_worker, take

LENGTHS = [1 + (index * 7919) % 4001 for index in range(8000)]


def test_4000_samples_of_6_5_megabytes_stay_under_1_gib():
    def make(index, length):
        # Pages of an empty tensor are never touched: the sizes are real, the time is not.
        return {"total_len": length, "payload": torch.empty(6_500_000, dtype=torch.uint8)}

    def keys(make, **options):
        stream = ListDataset(LENGTHS, make=make)
        dataset = LengthPoolSortDataset(stream, pool_size=4000, worker_config=stream.worker_config, **options)
        iterator, emitted, most = iter(dataset), [], 0
        for _ in range(len(LENGTHS)):
            emitted += [sample.__key__ for sample in take(iterator, 1, dataset.worker_config)]
            most = max(most, dataset.num_pooled_bytes)
        return emitted, most

    free, _ = keys(None)
    capped, most = keys(make, max_pool_bytes=2**30)
    assert capped == free
    assert 0.98 * 2**30 < most <= 2**30


def test_memory_is_flat_after_the_first_pool():
    alive = weakref.WeakSet()

    class Payload:
        def __init__(self):
            alive.add(self)

    stream = ListDataset(LENGTHS, make=lambda index, length: {"total_len": length, "payload": Payload()})
    dataset = LengthPoolSortDataset(stream, pool_size=100, worker_config=stream.worker_config)
    iterator, most = iter(dataset), 0
    for _ in range(2000):
        take(iterator, 1, dataset.worker_config)
        most = max(most, len(alive))
    assert most <= 100 + 2, "one pool, the sample just emitted and the one just read"


def _big_pools(pool_size: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    worker_config = single_worker()
    worker_config.num_workers = 4
    stream = ListDataset(
        [1 + index % 977 for index in range(pool_size + 50)],
        worker_config=worker_config,
        make=lambda index, length: {"total_len": length, "payload": [torch.full((4,), index) for _ in range(20)]},
    )
    dataset = LengthPoolSortDataset(stream, pool_size=pool_size, worker_config=worker_config)
    loader = get_savable_loader(dataset)
    iterator = iter(loader)
    for _ in range(8):
        sample = next(iterator)
        assert int(sample.payload[19][0]) == int(sample.__key__.removeprefix("sample-"))
    assert len(loader.save_state_rank().worker_states) == 4
    print("ran")
    loader.close()


def test_800_000_pooled_tensors_need_few_descriptors():
    call = "from tests.unit.test_pool_limits import _big_pools; _big_pools(10_000)"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "ran" in done.stdout, done.stderr


def test_capped_pool_of_a_finite_stream_loses_nothing():
    stream = ListDataset(LENGTHS[:500], make=lambda index, length: {"total_len": length, "payload": b"x" * 1000})
    dataset = LengthPoolSortDataset(stream, pool_size=64, max_pool_bytes=0, worker_config=stream.worker_config)
    assert sorted(sample.__key__ for sample in drain(dataset)) == [f"sample-{index:05d}" for index in range(500)]
    assert dataset.num_pooled_bytes == 0 and dataset.num_reencoded == 500
