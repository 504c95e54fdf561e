"""Counting the tokens that carry loss, and the weight made of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from length_sort.loss_scale import count_loss_tokens, loss_scale
from length_sort.odb_group import UNSYNCHRONIZED, GroupInfo


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"labels": torch.tensor([-100, 5, 6])}, 2),
        ({"labels": [-100, -100, 6]}, 1),
        ({"labels": torch.tensor([[-100, 5], [0, -100]])}, 2),
        ({"loss_mask": torch.tensor([0.0, 1.0, 0.5])}, 2),
        ({"tokens": torch.zeros(4)}, 4),
        (SimpleNamespace(tokens=[1, 2, 3], labels=torch.tensor([-100, -100, 3])), 1),
    ],
)
def test_count_loss_tokens(sample, expected):
    assert count_loss_tokens(sample) == expected


def test_sample_without_any_of_them_is_refused():
    with pytest.raises(ValueError, match="dict has none of labels, loss_mask, tokens"):
        count_loss_tokens({"image": 1})


def info(local: int, total: int) -> GroupInfo:
    return GroupInfo(0, 0, 1, 2, local, total, local, total)


def test_mean_of_scaled_means_is_the_mean_over_tokens():
    """The fault list's example: 10 tokens at loss 1 and 90 at loss 2 are 1.9, not 1.5."""
    scaled = [1.0 * loss_scale(info(10, 100), 2), 2.0 * loss_scale(info(90, 100), 2)]
    assert sum(scaled) / 2 == pytest.approx(1.9)


def test_idle_groups_and_steps_without_loss_weigh_nothing():
    assert loss_scale(info(0, 100), 2) == 0.0
    assert loss_scale(info(0, 0), 2) == 0.0


def test_unsynchronised_groups_have_no_weight():
    with pytest.raises(ValueError, match="ranks are not synchronised"):
        loss_scale(GroupInfo(0, 0, 1, UNSYNCHRONIZED, 5, UNSYNCHRONIZED, 5, UNSYNCHRONIZED), 2)
