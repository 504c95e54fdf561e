"""Balance on equals balance off: tensors, loss and gradients, in four real processes, for both scopes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from data_balance import (
    SORTING_ALGORITHMS,
    BalancedDataIterator,
    BalancedVisionEncoder,
    BalanceOptions,
    DefaultCodec,
    exchange,
    keep_in_graph,
)
from data_balance.groups import ExchangeError, own_gloo_group
from tests.distributed.balance_model import (
    HIDDEN,
    MERGE,
    PATCH_DIM,
    Vit,
    build_model,
    grids,
    mixed_batches,
    model_input,
    sample_digest,
)
from tests.distributed.launch import run_ranks

WORLD = 4
STEPS, MICROBATCHES = 3, 2
TIMEOUT_S = 60


def exactly(**settings: Any) -> BalanceOptions:
    return BalanceOptions(calculate_per_token_loss=True, threshold=0.0, timeout_s=TIMEOUT_S, **settings)


def check_exchange(rank: int) -> None:
    """Every layout and dtype arrives bit by bit, and silence is an ordinary message."""
    group = own_gloo_group(None, TIMEOUT_S)

    def message(source: int, target: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(source * WORLD + target)
        wide = torch.randn(6, 8, generator=generator)
        return {
            "transposed": wide.T,
            "sliced": wide[::2, 1::3],
            "bf16": wide.to(torch.bfloat16),
            "int64": torch.arange(source * 3)[None],
            "bool": wide > 0,
            "complex": torch.view_as_complex(wide.reshape(-1, 2)),
            "scalar": torch.tensor(float(source)),
            "empty": torch.empty(0, 5, dtype=torch.float16),
            "expanded": torch.tensor([1.5]).expand(4),
            "key": ("Webdataset", source, target),
        }

    # A diagonal of the table stays silent, and rank 3 sends nothing at all.
    counts = [[0 if source == 3 or source == target else (source + target) % 3 for target in range(WORLD)]
              for source in range(WORLD)]  # fmt: skip
    outgoing = [[message(rank, target)] * counts[rank][target] for target in range(WORLD)]
    arrived = exchange(outgoing, group, expected=[counts[source][rank] for source in range(WORLD)])
    for source, records in enumerate(arrived):
        assert len(records) == counts[source][rank]
        for record in records:
            for name, value in message(source, rank).items():
                if isinstance(value, torch.Tensor):
                    assert record[name].dtype == value.dtype and torch.equal(record[name], value), name
                else:
                    assert record[name] == value
    assert exchange([[] for _ in range(WORLD)], group) == [[] for _ in range(WORLD)]
    # One rank expects something else: everybody hears of it, and the group lives on.
    with pytest.raises(ExchangeError, match="disagree"):
        exchange([[] for _ in range(WORLD)], group, expected=[int(rank == 1)] * WORLD)
    exchange([[] for _ in range(WORLD)], group)
    with pytest.raises(ValueError, match=r"'s' is a torch\.sparse_coo"):
        exchange([[{"s": torch.eye(2).to_sparse()}] for _ in range(WORLD)], group)


def total_gradients(model: torch.nn.Module, losses: list[tuple[torch.Tensor, int]]) -> tuple[float, dict]:
    """Loss per token over all ranks and its gradients, as Megatron's calculate_per_token_loss gives them."""
    model.zero_grad()
    for loss, _ in losses:
        loss.backward()
    sums = torch.tensor(
        [sum(float(loss.detach()) for loss, _ in losses), sum(n for _, n in losses)], dtype=torch.float64
    )
    dist.all_reduce(sums)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradient)
        gradients[name] = gradient / sums[1]
    return float(sums[0] / sums[1]), gradients


def assert_same_training(one: tuple[float, dict], other: tuple[float, dict]) -> None:
    assert abs(one[0] - other[0]) < 1e-9
    for name, gradient in one[1].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-9, atol=1e-12, msg=name)


def check_step_scope(rank: int) -> None:
    """All algorithms, totals and every slot: same samples bit by bit, same loss, same gradients."""
    model, codec = build_model(), DefaultCodec()
    off = []
    everything: dict = {}
    loader = mixed_batches(rank, STEPS * MICROBATCHES)
    for _ in range(STEPS):
        batches = list(itertools.islice(loader, MICROBATCHES))
        off.append(total_gradients(model, [model(model_input(batch)) for batch in batches]))
        for batch in batches:
            everything.update(sample_digest(batch, codec))
    all_samples: list[dict] = [{} for _ in range(WORLD)]
    dist.all_gather_object(all_samples, everything)
    expected = {key: value for part in all_samples for key, value in part.items()}
    cases = [(name, False) for name in SORTING_ALGORITHMS] + [("lpt", True), ("min_move", True)]
    for name, every_slot in cases:
        iterator = BalancedDataIterator(
            mixed_batches(rank, STEPS * MICROBATCHES),
            num_microbatches=MICROBATCHES,
            sorting_algo_name=name,
            options=exactly(balance_every_slot=every_slot),
            data_type="both",
            prefetch=not every_slot,
        )
        seen: dict = {}
        for step in range(STEPS):
            batches = list(itertools.islice(iterator, MICROBATCHES))
            metrics = iterator.last_metrics
            assert metrics is not None and metrics.imbalance_after <= metrics.imbalance_before + 1e-9
            assert metrics.idle_microbatches == 0
            for batch in batches:
                seen.update(sample_digest(batch, codec))
            assert_same_training(off[step], total_gradients(model, [model(model_input(b)) for b in batches]))
        with pytest.raises(StopIteration):
            next(iterator)
        iterator.close()
        gathered: list[dict] = [{} for _ in range(WORLD)]
        dist.all_gather_object(gathered, seen)
        assert sum(map(len, gathered)) == len(expected), "a sample was trained twice or lost"
        assert {key: value for part in gathered for key, value in part.items()} == expected


def check_uneven_ends(rank: int) -> None:
    """Ranks run dry at different times: all take the same number of steps, nothing is lost, idle has no weight."""
    model, codec = build_model(), DefaultCodec()
    numbers = [1, 5, 2, 3]
    whole = total_gradients(model, [model(model_input(b)) for b in mixed_batches(rank, numbers[rank], seed=4)])
    iterator = BalancedDataIterator(
        mixed_batches(rank, numbers[rank], seed=4),
        num_microbatches=MICROBATCHES,
        sorting_algo_name="lpt",
        options=exactly(),
        max_batch_capacity=4,
    )
    batches = list(iterator)
    assert len(batches) == 3 * MICROBATCHES  # rank 1's five batches take three steps
    assert_same_training(whole, total_gradients(model, [model(model_input(b)) for b in batches]))
    keys = [key for b in batches if (b["labels"] != -100).any() for key in b["__key__"]]
    gathered: list[list] = [[] for _ in range(WORLD)]
    dist.all_gather_object(gathered, keys)
    flat = [key for part in gathered for key in part]
    assert len(flat) == len(set(flat))
    assert codec.split(batches[-1])
    iterator.close()


class EpochLoader:
    """Starts over when it is asked again after its end, as a loader with several epochs does."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number, self.epoch, self.batches = rank, number, 0, None

    def __next__(self) -> Any:
        if self.batches is None:
            self.epoch += 1
            self.batches = mixed_batches(self.rank, self.number, seed=self.epoch)
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = None
            raise


def check_epochs(rank: int) -> None:
    """An epoch ends on all ranks at once, although their shards are of unequal length; the next one follows."""
    iterator = BalancedDataIterator(EpochLoader(rank, [1, 4, 2, 3][rank]), num_microbatches=1, options=exactly())
    assert [len(list(iterator)) for _ in range(2)] == [4, 4]
    iterator.close()


def check_stages_without_encoder(rank: int) -> None:
    """A stage without the encoder gets the same samples without pixels."""
    options = exactly(is_first_stage=False)
    iterator = BalancedDataIterator(
        mixed_batches(rank, 2), num_microbatches=2, options=options, sorting_algo_name="lpt"
    )
    for batch in iterator:
        assert "pixel_values" not in batch or len(batch["pixel_values"]) == 0
        assert "pixel_values_videos" not in batch or len(batch["pixel_values_videos"]) == 0
    iterator.close()


def check_refusals(rank: int) -> None:
    with pytest.raises(ValueError, match="calculate_per_token_loss is off"):
        BalanceOptions(calculate_per_token_loss=False)
    iterator = BalancedDataIterator(mixed_batches(rank, 1), num_microbatches=1, options=exactly(), max_batch_capacity=1)
    with pytest.raises(ValueError, match="max_batch_capacity"):
        for _ in range(4):
            next(iterator)
    iterator.close()


def step_scope(rank: int, world: int) -> str:
    for check in (
        check_exchange,
        check_step_scope,
        check_uneven_ends,
        check_epochs,
        check_stages_without_encoder,
        check_refusals,
    ):
        check(rank)
        dist.barrier()
    return "done"


@pytest.mark.timeout(240)
def test_step_scope_equals_the_unbalanced_run() -> None:
    assert run_ranks(step_scope, WORLD, timeout_s=200) == ["done"] * WORLD


def image_inputs(
    rank: int, counts: list[int], giant: bool = False, frames: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(77 + rank)
    grid = grids(generator, counts[rank], max_frames=frames)
    if giant and rank == 2:
        grid = torch.cat([torch.tensor([[1, 24, 20]]), grid])
    pixels = torch.randn(int(grid.prod(1).sum()), PATCH_DIM, dtype=torch.float64, generator=generator)
    return pixels, grid


def features_loss(features: Any, hidden: torch.Tensor) -> torch.Tensor:
    first, (second,) = features
    weights = torch.arange(1.0, HIDDEN + 1, dtype=torch.float64)
    return (first.sin() @ weights).sum() + (second * first.detach()).sum() + keep_in_graph(hidden, first, second).sum()


def flatten(features: Any) -> tuple[torch.Tensor, torch.Tensor]:
    first, (second,) = features
    return first, second


def run_encoder(
    encode: Callable[..., Any], vit: Vit, pixels: torch.Tensor, grid: torch.Tensor, recompute: str = ""
) -> tuple:
    vit.zero_grad()
    pixels = pixels.clone().requires_grad_()
    hidden = torch.ones(3, dtype=torch.float64, requires_grad=True)
    if recompute:
        # Checkpoints pass a flat tuple on.
        flat = checkpoint(lambda p, g: flatten(encode(p, g)), pixels, grid, use_reentrant=recompute == "reentrant")
        features = flat[0], [flat[1]]
    else:
        features = encode(pixels, grid)
    features_loss(features, hidden).backward()
    gradients = {}
    for name, parameter in vit.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(gradient)
        gradients[name] = gradient
    return features[0].detach(), features[1][0].detach(), pixels.grad, gradients


def local_encoder(vit: Vit) -> Callable[..., Any]:
    def encode(pixels: torch.Tensor, grid: torch.Tensor) -> Any:
        if len(grid):
            return vit(pixels, grid)
        nothing = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
        return nothing + pixels.sum(), [nothing + 0]

    return encode


def check_encoder_case(rank: int, counts: list[int], algorithm: str, **case: Any) -> float:
    torch.manual_seed(3)
    vit = Vit().double()
    pixels, grid = image_inputs(rank, counts, case.get("giant", False), case.get("frames", 1))
    expected = run_encoder(local_encoder(vit), vit, pixels, grid)
    balanced = BalancedVisionEncoder(
        vit, sorting_algo_name=algorithm, threshold=0.0, split_frames=case.get("frames", 1) > 1, timeout_s=TIMEOUT_S
    )
    got = run_encoder(balanced, vit, pixels, grid, case.get("recompute", ""))
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-9, atol=1e-12)
    assert got[0].shape == (len(pixels) // MERGE, HIDDEN)
    if len(pixels):
        torch.testing.assert_close(got[2], expected[2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got[3], expected[3], rtol=1e-9, atol=1e-11)
    assert balanced.last_metrics is not None and balanced.last_metrics.step == 0, "recomputation must not plan again"
    assert balanced.last_metrics.imbalance_after <= balanced.last_metrics.imbalance_before + 1e-9
    return balanced.last_metrics.imbalance_after


def check_encoder_totals(rank: int) -> None:
    for counts in ([0, 0, 0, 0], [0, 1, 0, 0], [3, 0, 0, 0], [0, 0, 4, 1], [2, 190, 13, 1]):
        check_encoder_case(rank, counts, "lpt")
    even = check_encoder_case(rank, [2, 190, 13, 1], "min_move")
    assert even <= 1.03
    check_encoder_case(rank, [2, 30, 0, 1], "lpt", giant=True)
    check_encoder_case(rank, [0, 9, 2, 1], "karmarkar_karp", frames=4)
    for recompute in ("reentrant", "not reentrant"):
        check_encoder_case(rank, [4, 0, 1, 0], "post_global_balancing_greedy_without_pad", recompute=recompute)


def check_encoder_in_a_model(rank: int) -> None:
    """Image, video and text mixed, ViT trainable, cost carried over the micro batches of a step."""
    off_model, on_model = build_model(), build_model()
    balanced = BalancedVisionEncoder(
        on_model.vit, num_microbatches=MICROBATCHES, threshold=0.0, split_frames=True, timeout_s=TIMEOUT_S
    )
    on_model.set_encoder(balanced)
    assert set(balanced.state_dict()) == set(off_model.vit.state_dict()), "a checkpoint fits with the balance on or off"
    balanced.load_state_dict(off_model.vit.state_dict())
    for _ in range(2):
        batches = list(mixed_batches(rank, MICROBATCHES, seed=9))
        for batch in batches:  # images only: every rank calls the encoder once per micro batch
            for name in ("pixel_values_videos", "video_grid_thw", "num_videos"):
                batch.pop(name, None)
            batch["tokens"] = torch.where(batch["tokens"] == 97, 5, batch["tokens"])
        off = total_gradients(off_model, [off_model(model_input(b)) for b in batches])
        on = total_gradients(on_model, [on_model(model_input(b, always_images=True)) for b in batches])
        assert_same_training(off, on)
    with balanced.unbalanced():
        balanced(*image_inputs(rank, [1, 1, 1, 1]))  # no other rank is waited for


def encoder_scope(rank: int, world: int) -> str:
    check_encoder_totals(rank)
    dist.barrier()
    check_encoder_in_a_model(rank)
    return "done"


@pytest.mark.timeout(240)
def test_encoder_scope_equals_the_unbalanced_run() -> None:
    assert run_ranks(encoder_scope, WORLD, timeout_s=200) == ["done"] * WORLD
