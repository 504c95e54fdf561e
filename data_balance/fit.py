"""Fit the cost model to the run itself: each rank's lengths and compute times of the first steps."""

from __future__ import annotations

import logging

import numpy as np
import torch
import torch.distributed as dist

from data_balance.cost import CostModel, SampleCostModel
from data_balance.groups import group_ranks

logger = logging.getLogger(__name__)

#: The first step builds caches and buffers; its time says nothing about lengths.
WARMUP_STEPS = 1
#: While step j is prepared, step j-1 trains, so the last whole step is j-2.
STEPS_BEHIND = 2


class CostFitter:
    """Collects the first steps' work and times, and fits once, at the same step on every rank.

    Args:
        num_steps: measured steps, after one step of warm-up.
        group: own Gloo group of the ranks that are balanced.
        parent: the group it was made from.
    """

    def __init__(self, num_steps: int, group: dist.ProcessGroup, parent: dist.ProcessGroup | None) -> None:
        self._num_steps = num_steps
        self._group = group
        self._source = group_ranks(parent)[0]
        self._work: dict[int, np.ndarray] = {}
        self._seconds: dict[int, float] = {}
        self._first_step: int | None = None

    def add_work(self, step: int, sums: np.ndarray) -> None:
        """Tokens, token squares, patches, patch squares and samples [5] that this rank trains in `step`."""
        if self._first_step is None:
            self._first_step = step
        if step < self._first_step + WARMUP_STEPS + self._num_steps:
            self._work[step] = sums

    def add_time(self, step: int, seconds: float) -> None:
        """Seconds that this rank computed in `step`, without waiting for others."""
        if step in self._work:
            self._seconds[step] = seconds

    def is_due(self, step: int) -> bool:
        """Whether the fit happens while `step` is prepared."""
        return self._first_step is not None and (
            step == self._first_step + WARMUP_STEPS + self._num_steps - 1 + STEPS_BEHIND
        )

    def coefficients(self) -> np.ndarray:
        """Fitted [5]: per token, token square, patch, patch square, sample; all NaN when no fit is possible.

        Collective over the group; the first rank solves and broadcasts.
        """
        assert self._first_step is not None
        first = self._first_step + WARMUP_STEPS
        rows = [[*self._work[s], self._seconds.get(s, np.nan)] for s in range(first, first + self._num_steps)]
        mine = torch.tensor(np.array(rows, dtype=np.float64))
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, mine, group=self._group)
        answer = torch.full((5,), torch.nan, dtype=torch.float64)
        if dist.get_rank() == self._source:
            measured = torch.cat(gathered).numpy()
            try:
                model = SampleCostModel.fit(measured[:, :4], measured[:, 4], measured[:, 5])
            except ValueError as error:
                logger.warning("data balance: the cost model is not fitted: %s", error)
            else:
                answer = torch.from_numpy(to_coefficients(model))
        dist.broadcast(answer, src=self._source, group=self._group)
        return answer.numpy()


def to_coefficients(model: SampleCostModel) -> np.ndarray:
    """[5] per token, token square, patch, patch square and sample; the vision constant has no place."""
    language, vision = model.language, model.vision
    return np.array([language.linear, language.quadratic, vision.linear, vision.quadratic, language.constant])


def from_coefficients(coefficients: np.ndarray) -> SampleCostModel:
    """The inverse of `to_coefficients`."""
    token, token_square, patch, patch_square, sample = (float(c) for c in coefficients)
    return SampleCostModel(vision=CostModel(patch, patch_square), language=CostModel(token, token_square, sample))
