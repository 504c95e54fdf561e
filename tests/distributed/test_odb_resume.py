"""Real ranks with forked data workers: equal counts, exact resume from snapshots of different ages, DDP gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.energon import WorkerConfig
from megatron.energon.savable_loader import SavableDataLoader

from aiak_ext import get_savable_loader
from length_sort.coordinator import store_coordinator
from length_sort.loss_scale import loss_scale
from length_sort.odb_group import GroupInfo
from length_sort.store_channel import ODBSyncError
from tests.distributed.launch import run_ranks
from tests.odb_pipeline import GroupBatch, odb_batches

NUM_WORKERS = 2

# With Energon's default settings a short run is replayed from its start, with the others from just before.
SNAPSHOT_ALWAYS = dict(checkpoint_every_sec=0, checkpoint_every_min_n_samples=1)
CARRY_OVER = dict(policy="carry_over", target="max")
PACKED = dict(policy="packed", target="min", max_deferrals=1)
# name: loader settings per rank, ODB settings, batches after which the run is saved and restored.
RESUMES = {
    "default loaders": ([{}, {}], CARRY_OVER, (7, 8, 19)),
    "snapshots always": ([SNAPSHOT_ALWAYS, SNAPSHOT_ALWAYS], PACKED, (6, 7, 13)),
    "ranks snapshot differently": ([SNAPSHOT_ALWAYS, {}], PACKED, (3, 10, 11)),
}


class Run:
    """One life of a rank's loader; restored where a state is given."""

    def __init__(self, rank: int, world_size: int, loader_options: dict, state: Any = None, **options: Any) -> None:
        worker_config = WorkerConfig(rank=rank, world_size=world_size, num_workers=NUM_WORKERS)
        dataset = odb_batches(worker_config, store_coordinator(timeout_s=30), **options)
        self.loader: SavableDataLoader = get_savable_loader(dataset, **loader_options)
        odb = dataset.dataset
        odb.begin_loader(prefetch_factor=2, num_snapshots=2 * NUM_WORKERS + 1)
        if state is not None:
            self.loader.restore_state_rank(state)
            odb.expect_replay([worker_state.offset for worker_state in state.worker_states])
        self.iterator = iter(self.loader)

    def take(self, count: int) -> list[tuple]:
        taken = []
        for _ in range(count):
            batch: GroupBatch | None = next(self.iterator, None)
            if batch is None:
                break
            taken.append((tuple(batch.info), tuple(batch.samples), tuple(batch.template)))
        return taken

    def close(self) -> None:
        self.loader.close()


def resumed_run(rank: int, world_size: int, loaders: list[dict], options: dict, stops: tuple[int, ...]) -> list[tuple]:
    run = Run(rank, world_size, loaders[rank], **options)
    resumed: list[tuple] = []
    for stop in stops:
        resumed += run.take(stop - len(resumed))
        state = run.loader.save_state_rank()
        run.close()
        run = Run(rank, world_size, loaders[rank], state, **options)
    resumed += run.take(10_000)
    run.close()
    return resumed


def two_epochs(rank: int, world_size: int, options: dict) -> tuple[list[tuple], list[tuple], list[tuple]]:
    """Two epochs of a straight run, and the second epoch of one that was resumed at the end of the first."""
    run = Run(rank, world_size, {}, **options)
    first = run.take(10_000)
    state = run.loader.save_state_rank()
    run.iterator = iter(run.loader)
    second = run.take(10_000)
    run.close()
    run = Run(rank, world_size, {}, state, **options)
    resumed = run.take(10_000)
    run.close()
    return first, second, resumed


def refused_mixture(rank: int, world_size: int) -> str:
    """Files of different steps must not be mixed: rank 0 saves one batch later than rank 1."""
    run = Run(rank, world_size, {}, repeat=True)
    run.take(6 if rank == 0 else 5)
    state = run.loader.save_state_rank()
    dist.barrier()
    run.close()
    run = Run(rank, world_size, {}, state, repeat=True)
    try:
        run.take(2)  # one batch of each worker; they differ in one
    except ODBSyncError as error:
        return str(error)
    finally:
        run.close()
    return ""


def gradient(weight: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over tokens that carry loss of a loss with a non-linear gradient."""
    keep = labels != -100
    return torch.log1p((tokens[keep] @ weight - labels[keep]) ** 2).sum()


def make_sequences(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of unequal length whose first part, the prompt, carries no loss."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(count):
        length = int(torch.randint(3, 40, (), generator=generator))
        tokens = torch.randn(length, 4, dtype=torch.float64, generator=generator)
        labels = torch.randn(length, dtype=torch.float64, generator=generator)
        labels[: int(torch.randint(0, length - 1, (), generator=generator))] = -100
        sequences.append((tokens, labels))
    return sequences


def gradient_errors(rank: int, world_size: int) -> dict[str, float]:
    """Largest difference between DDP's gradient and the one of a single rank with all samples."""
    errors = {}
    for num_groups in (1, 3):
        # Group g of rank r: unequal numbers of sequences, and one idle rank in the last of three groups.
        groups = [
            [make_sequences(100 * g + r, 0 if g == 2 and r == 1 else 1 + 3 * r + g) for r in range(world_size)]
            for g in range(num_groups)
        ]
        reference = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        everything = [pair for ranks in groups for sequences in ranks for pair in sequences]
        num_tokens = sum(int((labels != -100).sum()) for _, labels in everything)
        (sum(gradient(reference, *pair) for pair in everything) / num_tokens).backward()

        module = torch.nn.Linear(4, 1, bias=False).double()
        torch.nn.init.zeros_(module.weight)
        model = torch.nn.parallel.DistributedDataParallel(module)
        infos = [group_info(ranks, rank) for ranks in groups]
        step_tokens = sum(info.global_loss_tokens for info in infos)
        for g, info in enumerate(infos):
            loss = model(torch.zeros(1, 4, dtype=torch.float64)).sum() * 0  # every rank takes part, idle or not
            for pair in groups[g][rank]:
                loss = loss + gradient(module.weight[0], *pair)
            if num_groups == 1:
                loss = loss / max(info.local_loss_tokens, 1) * loss_scale(info, world_size)
            else:
                loss = loss / step_tokens * world_size
            with model.no_sync() if g + 1 < num_groups else torch.enable_grad():
                loss.backward()
        errors[f"{num_groups} groups"] = float((module.weight.grad[0] - reference.grad).abs().max())
    return errors


def group_info(ranks: list[list], rank: int) -> GroupInfo:
    samples = [len(sequences) for sequences in ranks]
    tokens = [sum(len(labels) for _, labels in sequences) for sequences in ranks]
    loss_tokens = [sum(int((labels != -100).sum()) for _, labels in sequences) for sequences in ranks]
    figures = [figure for values in (samples, tokens, loss_tokens) for figure in (values[rank], sum(values))]
    return GroupInfo(0, 0, *figures, idle=samples[rank] == 0)


def two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    results = {name: resumed_run(rank, world_size, *case) for name, case in RESUMES.items()}
    results["epochs"] = {policy["policy"]: two_epochs(rank, world_size, policy) for policy in (CARRY_OVER, PACKED)}
    results["mixture"] = refused_mixture(rank, world_size)
    results["gradient"] = gradient_errors(rank, world_size)
    return results


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2, timeout_s=240)


@pytest.mark.parametrize("name", RESUMES)
def test_run_resumed_three_times_equals_the_straight_run_on_every_rank(two, name):
    for rank in two:
        straight, _, _ = rank["epochs"][RESUMES[name][1]["policy"]]
        assert len(straight) > RESUMES[name][2][-1]
        assert rank[name] == straight


@pytest.mark.parametrize("policy", ["carry_over", "packed"])
def test_run_resumed_at_the_end_of_an_epoch_goes_on_with_the_next(two, policy):
    for rank in two:
        first, second, resumed = rank["epochs"][policy]
        assert resumed == second
        assert first != second and len(second) > 10


def test_ranks_yield_equal_counts_every_sample_once_and_idle_groups_have_a_template(two):
    straight = [rank["epochs"]["packed"][0] for rank in two]
    assert len(straight[0]) == len(straight[1])
    samples = [sample for run in straight for _, keys, _ in run for sample in keys]
    # Workers 0 to 2 have 40, 41 and 42 samples, worker 3 has 10.
    assert len(samples) == len(set(samples)) == 40 + 41 + 42 + 10
    infos = [[GroupInfo.from_figures(figures) for figures, _, _ in run] for run in straight]
    idle = [(info, keys, template) for run in straight for info, keys, template in run if info[-1]]
    assert idle and all(template and not keys for _, keys, template in idle)
    for first, second in zip(*infos):
        assert (first.round, first.position) == (second.round, second.position)
        assert first.global_samples == second.global_samples == first.local_samples + second.local_samples
        assert first.global_loss_tokens == first.local_loss_tokens + second.local_loss_tokens


def test_files_of_different_steps_are_refused_on_every_rank(two):
    for rank in two:
        assert "restored_position" in rank["mixture"], rank["mixture"]


def test_gradient_of_unequal_ranks_equals_that_of_one_rank(two):
    for rank in two:
        assert max(rank["gradient"].values()) < 1e-9


def three_ranks(rank: int, world_size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = Run(rank, world_size, {}, policy="tight", target="median", num_samples=20)
    emitted = run.take(10_000)
    run.close()
    return {"gradient": gradient_errors(rank, world_size), "emitted": emitted}


def test_three_ranks():
    ranks = run_ranks(three_ranks, 3, timeout_s=180)
    assert max(error for rank in ranks for error in rank["gradient"].values()) < 1e-9
    assert len({len(rank["emitted"]) for rank in ranks}) == 1
    samples = [sample for rank in ranks for _, keys, _ in rank["emitted"] for sample in keys]
    assert len(samples) == len(set(samples)) == 20 + 21 + 22 + 5 + 24 + 25


def many_starts(rank: int, world_size: int) -> int:
    torch.set_num_threads(1)
    for _ in range(100):
        worker_config = WorkerConfig(rank=rank, world_size=world_size, num_workers=8)
        loader = get_savable_loader(odb_batches(worker_config, store_coordinator(timeout_s=60), repeat=True))
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        loader.close()
    return 100


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_hundred_starts_with_eight_workers_without_a_hang():
    assert run_ranks(many_starts, 2, timeout_s=1400) == [100, 100]
