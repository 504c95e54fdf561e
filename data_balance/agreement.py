"""All stages and tensor-parallel ranks of a replica must plan alike: compare each plan with global rank 0's."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from data_balance.groups import ExchangeError, group_ranks

#: Steps after which a published plan is deleted; stages are never that far apart.
KEPT_STEPS = 16
_POLL_S = 0.01

_instances = itertools.count()


class StageAgreement:
    """Compares each step's plan with global rank 0's, through the job's store.

    The groups of different stages plan from their own copies of the same lengths. Only the first rank of
    each group reads the store; it tells its group. A process group over all stages would need every rank of
    the job.

    Args:
        group: own Gloo group of the data-parallel ranks of this stage.
        parent: the group it was made from, which names the ranks.
        timeout_s: how long to wait for global rank 0.
    """

    def __init__(self, group: dist.ProcessGroup, parent: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._group = group
        self._source = group_ranks(parent)[0]
        self._publishes = self._source == 0
        self._leads = dist.get_rank() == self._source
        # Every stage makes its agreements in the same order, so the number tells a run's second one from the first.
        self._store = dist.PrefixStore(f"data_balance/agreement/{next(_instances)}", _get_default_store())
        self._timeout_s = timeout_s

    def same_plan(self, step: int, digest: bytes) -> None:
        """Collective over the group.

        Raises:
            ExchangeError: this stage's plan differs from global rank 0's, or that one has published none in
                time.
        """
        problem = torch.zeros(1, dtype=torch.int64)
        if self._leads:
            reference = self._shared(f"plan/{step}", digest)
            problem[0] = 1 if reference is None else int(reference != digest)
            if self._publishes and step >= KEPT_STEPS:
                self._store.delete_key(f"plan/{step - KEPT_STEPS}")
        dist.broadcast(problem, src=self._source, group=self._group)
        if not problem.item():
            return
        raise ExchangeError(
            f"step {step}: the plan of the stage whose first rank is {self._source} differs from global rank "
            f"0's, or rank 0 made none within {self._timeout_s} s; stages would train different samples "
            "together. All stages have to read the same batches with the same settings"
        )

    def same_coefficients(self, step: int, coefficients: np.ndarray) -> np.ndarray:
        """Global rank 0's `coefficients` (float64), on every rank; collective over the group."""
        shared = torch.from_numpy(coefficients.copy())
        if self._leads:
            reference = self._shared(f"coefficients/{step}", coefficients.tobytes())
            # All NaN means "no fit", which every stage then agrees on or fails loudly at the next plan.
            shared = (
                torch.full_like(shared, torch.nan)
                if reference is None
                else torch.from_numpy(np.frombuffer(reference, dtype=np.float64).copy())
            )
        dist.broadcast(shared, src=self._source, group=self._group)
        return shared.numpy()

    def _shared(self, key: str, value: bytes) -> bytes | None:
        """Publish `value` on global rank 0; elsewhere what it published, or None when it did not in time.

        Polling: a blocking `get` holds the client's lock, and the training thread may need the store.
        """
        if self._publishes:
            self._store.set(key, value.hex())
            return value
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return bytes.fromhex(self._store.get(key).decode())
