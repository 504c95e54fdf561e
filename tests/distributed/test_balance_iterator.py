"""The drop-in iterator in two real processes: exact resume with prefetch, Megatron's rerun iterator, fitting."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, initialize_rerun_state_machine

from data_balance import (
    BalancedDataIterator,
    BalanceOptions,
    CostModel,
    DataBalance,
    SampleCostModel,
    balance_data_iterator,
    loader_state,
)
from tests.distributed.balance_model import make_batch
from tests.distributed.launch import run_ranks

MICROBATCHES = 3
STEPS = 7


def options(**settings: Any) -> BalanceOptions:
    return BalanceOptions(**{"calculate_per_token_loss": True, "threshold": 0.0, "timeout_s": 60, **settings})


class CountingLoader:
    """A savable loader: batch i of a rank is always the same, and the state is the position."""

    def __init__(self, rank: int, number: int = STEPS * MICROBATCHES) -> None:
        self.rank, self.number, self.position = rank, number, 0
        self.threads: set[str] = set()

    def __iter__(self) -> CountingLoader:
        raise AssertionError("an iterator must not be asked for a new one")

    def __next__(self) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        if self.position >= self.number:
            raise StopIteration
        self.position += 1
        generator = torch.Generator().manual_seed(100 * self.rank + self.position)
        images = int(torch.randint(0, 5, (1,), generator=generator))
        return make_batch(generator, f"r{self.rank}b{self.position}", 1, [images], [0])

    def save_state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def number_of(step: int) -> int:
    """Ramp-up: the first steps have fewer micro batches."""
    return min(step + 1, MICROBATCHES)


def build(loader: Any, **settings: Any) -> Any:
    return balance_data_iterator(
        loader, num_microbatches=number_of, sorting_algo_name="lpt", options=options(**settings)
    )


def keys(iterator: Any, number: int) -> list[list[str]]:
    return [batch["__key__"] for batch in itertools.islice(iterator, number)]


def check_exact_resume(rank: int) -> None:
    """Saved after any micro batch, with a step prefetched: before + after is the straight run."""
    straight = keys(build(CountingLoader(rank)), 1000)
    assert any(key.startswith(f"r{1 - rank}") for batch in straight for key in batch), (
        "nothing moved, nothing is tested"
    )
    first_of_step = [0, *itertools.accumulate(map(number_of, range(STEPS)))]
    for taken in (0, 1, 2, 3, 5, 6, 9):
        rerun = RerunDataIterator(build(CountingLoader(rank)))
        before = [next(rerun)["__key__"] for _ in range(taken)]
        state = json.loads(json.dumps(rerun.iterable.save_state()))
        rerun.iterable.close()
        # The step that the state stands in, or the next one at a step's end.
        step = max(s for s, first in enumerate(first_of_step) if first <= taken)
        resumed = build(CountingLoader(rank), first_step=step)
        resumed.restore_state(state)
        assert resumed.save_state() == state
        after = keys(resumed, 1000)
        assert before + after == straight, taken
        if taken in first_of_step:
            assert state == {"position": taken} == loader_state(state), "readable without the balance too"
        with pytest.raises(ValueError, match="restore before training"):
            resumed.restore_state(state)
        resumed.close()


def check_threads(rank: int) -> None:
    loader = CountingLoader(rank)
    iterator = build(loader)
    next(iterator)
    assert loader.threads >= {threading.main_thread().name}
    next(iterator)
    iterator.close()
    assert any(name.startswith("data-balance") for name in loader.threads)
    assert not any(thread.name.startswith("data-balance") for thread in threading.enumerate())


def check_rerun_and_virtual_pipeline(rank: int) -> None:
    """Megatron's wrapper stays outermost and rewinds; virtual stages walk the same micro batches each."""
    rerun = build(RerunDataIterator(CountingLoader(rank)))
    assert isinstance(rerun, RerunDataIterator) and isinstance(rerun.iterable, BalancedDataIterator)
    one = next(rerun)
    rerun.rewind()
    assert next(rerun) is one
    rerun.advance()
    assert rerun.iterable.save_state() == {"position": 1}
    rerun.iterable.close()

    straight = keys(build(CountingLoader(rank)), 1000)
    chunks = build([RerunDataIterator(CountingLoader(rank)), RerunDataIterator(CountingLoader(rank))])
    assert len(chunks) == 2 and all(isinstance(chunk, RerunDataIterator) for chunk in chunks)
    lists: tuple[list, list] = ([], [])
    for step in range(3):  # interleaved as a schedule does: the chunks take turns within a step
        for chunk, seen in zip(chunks, lists):
            seen += [next(chunk)["__key__"] for _ in range(number_of(step))]
    assert lists[0] == lists[1] == straight[: len(lists[0])]
    assert chunks[1].iterable.save_state() == {"position": len(lists[0])}
    chunks[0].iterable.close()
    assert build(None) is None and build([None, None]) == [None, None]


def check_seed_interface(rank: int, folder: Path) -> None:
    """The seed's constructor and method; a call is a step."""
    path = folder / "model.json"
    fits, too_small = {"image_encoder": {"tp": 1}}, {"image_encoder": {"tp": 2}}
    path.with_suffix(f".{rank}").write_text(json.dumps(fits))
    balance = DataBalance(
        virtual_pipeline_model_parallel_size=2,
        model_config_path=str(path.with_suffix(f".{rank}")),
        sorting_algo_name="post_global_balancing_greedy_without_pad",
        len_model=2,
        train_data_iterator=RerunDataIterator(CountingLoader(rank)),
        options=options(),
    )
    arguments = {
        "is_vit_last_stage": True,
        "max_batch_capacity": 2,
        "micro_batch_size": 1,
        "num_microbatches": MICROBATCHES,
        "data_type": "image",
    }
    for step in range(2):
        chunks = balance.build_balanced_train_data_iterator(**arguments)
        assert [type(chunk) for chunk in chunks] == [RerunDataIterator] * 2
        batches = [[next(chunk) for _ in range(MICROBATCHES)] for chunk in chunks]
        assert all(a is b for a, b in zip(*batches))
        assert all(len(b["tokens"]) <= 2 for b in batches[0])
        assert balance.save_state() == {"position": MICROBATCHES * (step + 1)}
    with pytest.raises(ValueError, match="arguments changed"):
        balance.build_balanced_train_data_iterator(**{**arguments, "data_type": "both"})
    with pytest.raises(ValueError, match="data_type is 'sound'"):
        balance.build_balanced_train_data_iterator(**{**arguments, "data_type": "sound"})
    balance.close()
    path.with_suffix(f".{rank}").write_text(json.dumps(too_small))
    with pytest.raises(ValueError, match="group to balance has 2"):
        DataBalance(None, str(path.with_suffix(f".{rank}")), "lpt", 1, CountingLoader(rank))
    assert DataBalance(None, None, "lpt", 1, None).build_balanced_train_data_iterator() is None
    with pytest.raises(ValueError, match="virtual pipelining"):
        DataBalance(None, None, "lpt", 2, CountingLoader(rank))


def check_fit(rank: int) -> None:
    """Coefficients are those that made the times, the same on both ranks, and survive a resume."""
    truth = SampleCostModel(vision=CostModel(3e-4, 2e-6), language=CostModel(1e-3, 5e-6, 0.01))
    iterator = BalancedDataIterator(
        CountingLoader(rank, 40), num_microbatches=2, sorting_algo_name="lpt", options=options(fit_steps=8)
    )
    for _ in range(14):
        batches = list(itertools.islice(iterator, 2))
        seconds = 0.0
        for batch in batches:
            for row, length in enumerate(batch["lengths"].tolist()):
                seconds += truth.language.cost(length)
                counts = batch["num_images"].tolist() if "num_images" in batch else [0] * len(batch["lengths"])
                start = sum(counts[:row])
                grid = batch["image_grid_thw"][start : start + counts[row]] if counts[row] else []
                patches = [int(g.prod()) for g in grid]
                seconds += truth.vision.cost_of_sums(sum(patches), sum(p * p for p in patches))
        iterator.report_step_time(float(seconds))
    fitted = iterator._feed.balance.cost_model
    assert fitted is not None
    sums = np.array([[200, 40_000, 300, 90_000], [50, 2500, 0, 0]])
    np.testing.assert_allclose(fitted.cost(sums), truth.cost(sums), rtol=0.02)
    coefficients = torch.tensor([fitted.vision.linear, fitted.vision.quadratic, fitted.language.linear])
    both = [torch.empty_like(coefficients) for _ in range(2)]
    torch.distributed.all_gather(both, coefficients)
    assert torch.equal(both[0], both[1])
    state = iterator.save_state()
    iterator.close()
    resumed = BalancedDataIterator(CountingLoader(rank), num_microbatches=2, options=options(fit_steps=8))
    resumed.restore_state(json.loads(json.dumps(state)))
    assert resumed._feed.balance.cost_model == fitted and loader_state(state) == {"position": 28}
    resumed.close()


def check_skips_and_metrics(rank: int) -> None:
    """Even ranks do not move, and it is counted; verbose says what happened."""

    def even() -> Any:
        generator = torch.Generator().manual_seed(5)
        for i in range(4):
            yield make_batch(generator, f"r{rank}b{i}", 1, [1], [0])

    iterator = BalancedDataIterator(
        even(), num_microbatches=2, sorting_algo_name="lpt", options=options(threshold=0.02, verbose=True)
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        batches = list(iterator)
    lines = printed.getvalue().splitlines()
    metrics = iterator.last_metrics
    assert metrics is not None and metrics.moves_skipped == 2 and metrics.bytes_moved == 0
    assert metrics.imbalance_before == metrics.imbalance_after == 1.0 and metrics.plan_s > 0
    assert [b["__key__"] for b in batches] == [[f"r{rank}b{i}/0"] for i in range(4)]
    assert batches[0]["__restore_key__"][0] == "BatchDataset", "unmoved batches are the loader's own"
    assert len(lines) == (2 if rank == 0 else 0) and all("imbalance 1.000 -> 1.000" in line for line in lines)
    with pytest.raises(ValueError, match="cannot be saved"):
        iterator.save_state()


def iterator_checks(rank: int, world: int, folder: str) -> str:
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    check_exact_resume(rank)
    check_threads(rank)
    check_rerun_and_virtual_pipeline(rank)
    check_seed_interface(rank, Path(folder))
    check_fit(rank)
    check_skips_and_metrics(rank)
    return "done"


@pytest.mark.timeout(240)
def test_balanced_iterator_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(iterator_checks, 2, str(tmp_path), timeout_s=200) == ["done"] * 2
