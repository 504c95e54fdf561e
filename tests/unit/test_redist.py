"""The real `energon checkpoint redist`: pools go on after the number of ranks was changed, and nothing is lost."""

import pytest
from click.testing import CliRunner
from megatron.energon.tools.checkpoint import command_redist

from aiak_ext import build_train_loader
from tests.energon_data import SortedNumberTaskEncoder, lognormal_lengths, sorted_pools, train_dataset, write_dataset

NUM_SAMPLES = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("numbers") / "data", lognormal_lengths(NUM_SAMPLES), num_shards=8)


def _loader(data, rank, world_size, num_workers):
    encoder = SortedNumberTaskEncoder(sorted_pools(6))
    dataset = train_dataset(
        data, encoder, rank=rank, world_size=world_size, num_workers=num_workers, batch_size=1, repeat=False
    )
    return build_train_loader(dataset)


def _redist(old, new, world_size):
    new.mkdir()
    files = [str(path) for path in sorted(old.iterdir())]
    result = CliRunner().invoke(command_redist, [*files, str(new), "--new-world-size", str(world_size)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 1)), ((2, 2), (1, 4)), ((4, 1), (2, 2))])
def test_redistributed_run_covers_every_sample_once(data, tmp_path, before, after):
    (old_ranks, old_workers), (new_ranks, new_workers) = before, after
    emitted = []
    for rank in range(old_ranks):
        loader = _loader(data, rank, old_ranks, old_workers)
        emitted += [next(loader).indices[0] for _ in range(8)]
        loader.save_checkpoint(tmp_path / "old")
        loader.close()
    _redist(tmp_path / "old", tmp_path / "new", new_ranks)
    for rank in range(new_ranks):
        loader = _loader(data, rank, new_ranks, new_workers)
        loader.load_checkpoint(tmp_path / "new")
        emitted += [next(loader).indices[0] for _ in range(3)]
        # Saved again while pools of the old slots are still going out.
        loader.save_checkpoint(tmp_path / "again")
        loader.close()
        loader = _loader(data, rank, new_ranks, new_workers)
        loader.load_checkpoint(tmp_path / "again")
        emitted += [batch.indices[0] for batch in loader]
        loader.close()
    assert sorted(emitted) == list(range(NUM_SAMPLES))


def test_pools_keep_the_seed_of_the_slot_they_were_formed_in(data, tmp_path):
    """What worker slot 1 had pooled goes out in slot 1's order, though the worker is slot 0 of its own rank now."""
    expected = []
    for rank in range(2):
        straight = _loader(data, rank, 2, 2)
        batches = [next(straight).indices[0] for _ in range(24)]
        straight.close()
        expected += [batches[0::2], batches[1::2]]  # in the order of the global worker ids
        loader = _loader(data, rank, 2, 2)
        for _ in range(8):
            next(loader)
        loader.save_checkpoint(tmp_path / "old")
        loader.close()
    _redist(tmp_path / "old", tmp_path / "new", 4)
    for rank in range(4):
        loader = _loader(data, rank, 4, 1)
        loader.load_checkpoint(tmp_path / "new")
        # 4 samples of each worker went out; the rest of its first pool and its second pool were formed by then.
        assert [next(loader).indices[0] for _ in range(8)] == expected[rank][4:12]
        loader.close()
