"""Counters of a data worker, sent to the training process beside the batch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

FIELD = "worker_counters"

NAMES = ("waiting_samples", "waiting_bytes", "reencoded_samples", "lost_samples", "deferred_samples", "oldest_deferral")
"""What the entries of the tensor mean; all but the first two are totals over the run."""


def has_field(batch: Any, name: str) -> bool:
    """Whether a batch (dict or dataclass) has room for `name`."""
    return name in batch if isinstance(batch, Mapping) else hasattr(batch, name)


def set_field(batch: Any, name: str, value: torch.Tensor) -> None:
    """Stores `value` in a batch. An int64 tensor in a declared field survives pinning; an attribute would not."""
    if isinstance(batch, MutableMapping):
        batch[name] = value
    else:
        setattr(batch, name, value)


def attach_counters(batch: Any, counters: Mapping[str, int]) -> None:
    """Stores the counters in the batch's field (key) `worker_counters`, int64 [6], where it has one.

    Batches without it stay as they are: a model called as ``model(**batch)`` would not expect another key.
    """
    if has_field(batch, FIELD):
        set_field(batch, FIELD, torch.tensor([counters.get(name, 0) for name in NAMES], dtype=torch.int64))


def read_counters(batch: Any) -> dict[str, int]:
    """The counters that a worker sent with this batch; empty where the batch has no room for them."""
    values = batch.get(FIELD) if isinstance(batch, Mapping) else getattr(batch, FIELD, None)
    return {} if values is None else dict(zip(NAMES, values.tolist()))
