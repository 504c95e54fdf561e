"""The compute cost of an encoded sample, to order or group by where length alone does not tell it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_balance import SampleCostModel
from length_sort.sample_length import is_packed, sample_length


def sample_cost_fn(cost_model: SampleCostModel) -> Callable[[Any], float]:
    """A function that gives a sample's cost: its tokens in the language model plus its patches in the vision encoder.

    Two samples of one length differ severalfold when one of them is mostly picture. Give the function as `cost_fn`
    (ODB then matches groups across ranks by it), or as `length_fn` of length sort at micro batch 1, where there is no
    padding that ordering by length would save.

    Args:
        cost_model: E.g. of `CostModel.for_transformer`, or calibrated.
    """

    def cost(sample: Any) -> float:
        return cost_model.language.cost_of_segments(_text_segments(sample)) + cost_model.vision.cost_of_segments(
            _frame_patches(sample)
        )

    return cost


def _text_segments(sample: Any) -> NDArray[np.int64]:
    """Lengths of the stretches that attend to themselves only: one, or those of a packed sample."""
    if is_packed(sample):
        bounds = np.asarray(_field(sample, "cu_lengths"), dtype=np.int64)
        return bounds[1:] - bounds[:-1]
    return np.array([sample_length(sample)], dtype=np.int64)


def _frame_patches(sample: Any) -> NDArray[np.int64]:
    """Patches of each frame of each picture and video; attention stays within a frame."""
    grids = [
        np.asarray(_field(sample, f"{visual}_grid_thw"), dtype=np.int64)
        for visual in ("image", "video")
        if _field(sample, f"{visual}_grid_thw") is not None
    ]
    rows = [grid.reshape(-1, 3) for grid in grids]
    frames, height, width = (np.concatenate(rows) if rows else np.zeros((0, 3), dtype=np.int64)).T
    return np.repeat(height * width, frames)


def _field(sample: Any, name: str) -> Any:
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
