"""The cost of a sample: language and vision, segment by segment."""

from types import SimpleNamespace

import pytest
import torch

from aiak_ext import sample_cost_fn
from data_balance import CostModel, SampleCostModel

cost = sample_cost_fn(SampleCostModel(vision=CostModel(1.0, 0.5), language=CostModel(10.0, 0.25)))


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"total_len": 8}, 80 + 16),
        ({"total_len": 8, "cu_lengths": [0, 6, 8]}, 80 + 0.25 * (36 + 4)),
        ({"total_len": 8, "image_grid_thw": torch.tensor([[1, 2, 4]])}, 96 + 8 + 32),
        # Two frames of 2 x 2 attend apart; as one picture of 8 patches they would cost 32 instead of 16.
        ({"total_len": 8, "video_grid_thw": [[2, 2, 2]]}, 96 + 8 + 16),
        ({"total_len": 8, "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}, 96),
    ],
)
def test_cost(sample, expected):
    assert cost(sample) == cost(SimpleNamespace(**sample)) == pytest.approx(expected)
