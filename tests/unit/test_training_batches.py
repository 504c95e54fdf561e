"""Micro batches on their way into the model: nothing of the loader's batch changes, costs and losses add up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from examples.llava_ov.batch_cost import BatchCost
from examples.llava_ov.config import get_model_config
from examples.llava_ov.micro_batch import MicroBatch
from examples.llava_ov.samples import LlavaBatch
from length_sort.odb_group import GroupInfo


def batch_of(lengths: list[int], grids: list[list[int]] = (), cu_lengths: list[int] | None = None) -> MicroBatch:
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    return MicroBatch(
        tokens=tokens,
        labels=tokens,
        pixel_values=torch.zeros(sum(t * h * w for t, h, w in grids), 588),
        image_grid_thw=torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
        lengths=torch.tensor(lengths),
        num_images=torch.zeros(len(lengths), dtype=torch.int64),
        cu_lengths=None if cu_lengths is None else torch.tensor(cu_lengths, dtype=torch.int32),
        odb_info=None,
        worker_counters=None,
    )


def test_moving_a_batch_leaves_the_loaders_batch_alone():
    names = [field.name for field in dataclasses.fields(MicroBatch)]
    content = {name: getattr(batch_of([3, 5], [[1, 2, 2]]), name) for name in names}
    batch = LlavaBatch(__key__=["a", "b"], __restore_key__=(), **content)
    moved = MicroBatch.from_batch(batch, torch.device("meta"))
    assert moved.tokens.device.type == "meta"
    assert moved.image_grid_thw.device.type == "cpu"  # read on the host
    assert moved.cu_lengths is None
    assert all(getattr(batch, name) is content[name] for name in names)


def test_packed_samples_are_counted_one_by_one():
    assert batch_of([3, 5]).num_samples == 2
    packed = batch_of([8], cu_lengths=[0, 3, 8])
    assert packed.num_samples == 2
    padded = dataclasses.replace(packed, cu_lengths=torch.tensor([*packed.cu_lengths.tolist(), 99], dtype=torch.int32))
    assert padded.num_samples == 2, "a segment of padding is none"
    assert packed.segment_lengths.tolist() == [3, 5]
    assert batch_of([3, 5]).segment_lengths.tolist() == [5, 5]


def test_idle_groups_of_dynamic_batching_count_for_nothing():
    figures = {"round": 3, "position": 1, "global_samples": 4, "global_tokens": 90, "global_loss_tokens": 20}
    info = GroupInfo(**figures, local_samples=0, local_tokens=0, local_loss_tokens=0, idle=True)
    idle = dataclasses.replace(batch_of([3, 5]), odb_info=info.to_tensor())
    assert (idle.num_samples, idle.num_tokens) == (0, 0)
    assert batch_of([3, 5]).num_tokens == 8


@pytest.fixture(scope="module")
def cost() -> BatchCost:
    return BatchCost(get_model_config("tiny"))


def test_cost_counts_padding_segments_and_frames(cost):
    assert cost(batch_of([10, 40])) == pytest.approx(cost(batch_of([40, 40])))  # padded to the longest
    assert cost(batch_of([80], cu_lengths=[0, 40, 80])) == pytest.approx(cost(batch_of([40, 40])))
    assert cost(batch_of([80])) > cost(batch_of([40, 40]))  # attention over the whole row
    text = cost(batch_of([40]))
    two_frames, one_frame = cost(batch_of([40], [[2, 8, 8]])), cost(batch_of([40], [[1, 8, 8]]))
    assert two_frames - text == pytest.approx(2 * (one_frame - text))  # frames do not attend to each other
    assert cost(batch_of([40], [[1, 8, 16]])) > two_frames


def test_cost_survives_long_sequences(cost):
    """200,000 tokens squared leave int32."""
    assert cost(batch_of([200_000], cu_lengths=[0, 200_000])) > 1000 * cost(batch_of([2000]))


def test_losses_are_summed_and_their_tokens_counted():
    from examples.llava_ov.forward_step import sum_token_losses

    labels = torch.tensor([[5, -100, 7], [-100, 3, -100]])
    losses = torch.tensor([[1.0, 0.0, 2.0], [0.0, 4.0, 0.0]], requires_grad=True)
    loss_sum, num_tokens, report = sum_token_losses(labels, losses)
    assert (loss_sum.item(), num_tokens.item()) == (7.0, 3)
    assert num_tokens.dtype == torch.int
    assert not report["loss_sum"].requires_grad
