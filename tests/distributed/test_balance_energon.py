"""The balance over Energon's real loader with worker processes: moved keys, and exact resume with a prefetched step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.energon import stateless

import aiak_ext
from data_balance import BalanceOptions, balance_data_iterator
from tests.distributed.launch import run_ranks
from tests.energon_data import NumberSample, NumberTaskEncoder, lognormal_lengths, train_dataset, write_dataset

pytestmark = pytest.mark.slow

MICROBATCHES, BATCH_SIZE, STEPS = 2, 2, 6


class DictTaskEncoder(NumberTaskEncoder):
    """Batches as dicts of padded rows; a sample's tokens are its number in the data set."""

    @stateless
    def batch(self, samples: list[NumberSample]) -> dict[str, Any]:
        width = max(sample.total_len for sample in samples)
        rows = [torch.nn.functional.pad(s.tokens.long() + s.index, (0, width - s.total_len)) for s in samples]
        return {
            "__key__": [sample.__key__ for sample in samples],
            "__restore_key__": (),
            "tokens": torch.stack(rows),
            "labels": torch.stack(rows),
            "lengths": torch.tensor([sample.total_len for sample in samples]),
        }

    @stateless
    def encode_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def build(path: str, rank: int) -> tuple[Any, Any]:
    dataset = train_dataset(
        Path(path), DictTaskEncoder(), rank=rank, world_size=2, num_workers=1, batch_size=BATCH_SIZE
    )
    loader = aiak_ext.build_train_loader(dataset, checkpoint_every_sec=0, checkpoint_every_min_n_samples=1)
    options = BalanceOptions(calculate_per_token_loss=True, threshold=0.0, timeout_s=60)
    iterator = balance_data_iterator(
        RerunDataIterator(loader), num_microbatches=MICROBATCHES, sorting_algo_name="lpt", options=options
    )
    return loader, iterator


def take(iterator: Any, number: int) -> list[Any]:
    taken = []
    for _ in range(number):
        batch = next(iterator)
        for index, length in enumerate(batch["lengths"].tolist()):
            row = batch["tokens"][index, :length]
            assert len(row.unique()) == 1, "a sample's tokens stay together"
        taken.append((batch["__key__"], batch["__restore_key__"], batch["tokens"][:, 0].tolist()))
    return taken


def energon(rank: int, world: int, path: str) -> list[Any]:
    loader, iterator = build(path, rank)
    straight = take(iterator, STEPS * MICROBATCHES)
    iterator.iterable.close()
    loader.close()
    assert all(key[0] == "DataBalance" and key[1][0] != "DataBalance" for _, key, _ in straight)
    for taken in (3, 4):  # inside a step, and at its end
        loader, iterator = build(path, rank)
        before = take(iterator, taken)
        state = iterator.iterable.save_state()
        iterator.iterable.close()
        loader.close()
        loader, iterator = build(path, rank)
        iterator.iterable.restore_state(state)
        assert before + take(iterator, STEPS * MICROBATCHES - taken) == straight, taken
        iterator.iterable.close()
        loader.close()
    return straight


@pytest.mark.timeout(240)
def test_balance_over_energons_loader_resumes_exactly(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "data", lognormal_lengths(60))
    results = run_ranks(energon, 2, str(path), timeout_s=200)
    keys = [key for rank in results for batch_keys, _, _ in rank for key in batch_keys]
    assert len(keys) == len(set(keys)) == 2 * STEPS * MICROBATCHES * BATCH_SIZE
