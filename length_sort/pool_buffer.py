"""Samples waiting in a worker: kept whole while they fit a byte cap, otherwise as a restore key and re-encoded."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from megatron.energon import Sample
from megatron.energon.wrappers.base import get_sample_restore_key

# Keys, subflavors, sources: a few hundred bytes that samples share or that stay when the sample itself is let go.
_ENERGONS_FIELDS = frozenset(field.name for field in dataclasses.fields(Sample))


def sample_num_bytes(sample: Any) -> int:
    """Bytes of the arrays, tensors, images and strings in a sample; containers are walked, overhead is left out."""
    return _num_bytes_rule(type(sample))(sample)  # type: ignore[arg-type]  # types are hashable


@functools.cache
def _num_bytes_rule(kind: Any) -> Callable[[Any], int]:
    """How to count the bytes of values of one type: looked up once per type, since every sample is counted."""
    if issubclass(kind, torch.Tensor):
        return operator.attrgetter("nbytes")
    if issubclass(kind, np.ndarray):
        return operator.attrgetter("nbytes")
    if issubclass(kind, (bytes, bytearray, str)):
        return len
    if issubclass(kind, Mapping):
        return lambda mapping: sum(map(sample_num_bytes, mapping.values()))
    if issubclass(kind, (list, tuple)):
        return lambda sequence: sum(map(sample_num_bytes, sequence))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.name not in _ENERGONS_FIELDS]
        if len(names) < 2:  # attrgetter would give the value itself
            return lambda sample: sum([sample_num_bytes(getattr(sample, name)) for name in names])
        values_of = operator.attrgetter(*names)
        return lambda sample: sum(map(sample_num_bytes, values_of(sample)))
    if hasattr(kind, "getbands"):  # a decoded PIL image
        return lambda image: image.size[0] * image.size[1] * len(image.getbands())
    return lambda other: 0


@dataclasses.dataclass(slots=True)
class PooledSample:
    """One waiting sample; `sample` is None where only its key is held."""

    restore_key: Any
    length: float
    packed: bool = False
    sample: Any = None
    num_bytes: int = 0


class PoolBuffer:
    """Puts samples of one worker aside under a byte cap, and gets them back.

    A sample that would exceed the cap is kept as (restore key, length) only and re-read and re-encoded when it is
    taken. So are the samples of a restored state: the order of a pool depends on lengths alone, which the state
    holds, and no sample needs to be encoded before its turn.
    """

    def __init__(self, restore_sample: Callable[[Any], Any], *, max_bytes: int | None) -> None:
        """
        Args:
            restore_sample: Gives the sample of a restore key (the wrapped dataset's method).
            max_bytes: Most bytes of samples held at a time; None keeps everything (samples cannot be restored).
        """
        self._restore_sample = restore_sample
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.num_restored = 0

    def put(self, sample: Any, length: float, packed: bool = False) -> PooledSample:
        num_bytes = sample_num_bytes(sample)
        # Energon's function asks first whether it is a Sample, an abstract class: slow, for every sample.
        restore_key = getattr(sample, "__restore_key__", None) or get_sample_restore_key(sample)
        pooled = PooledSample(restore_key, length, packed)
        if self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes:
            pooled.sample, pooled.num_bytes = sample, num_bytes
            self.num_bytes += num_bytes
        return pooled

    def take(self, pooled: PooledSample) -> Any:
        """The sample itself. Needs an active Energon worker where it has to be restored.

        None where Energon's ``restore_error_handler`` swallowed the error of restoring it.
        """
        if pooled.sample is None:
            self.num_restored += 1
            return self._restore_sample(pooled.restore_key)
        self.num_bytes -= pooled.num_bytes
        return pooled.sample

    def clear(self) -> None:
        self.num_bytes = 0


def pooled_state(samples: Iterable[PooledSample]) -> list[tuple[Any, float, bool]]:
    """Waiting samples as plain builtins: (restore key, length, packed) each. Keys are immutable and shared."""
    return [(pooled.restore_key, pooled.length, pooled.packed) for pooled in samples]


def restored_pool(state: Iterable[tuple[Any, float, bool]]) -> list[PooledSample]:
    """Waiting samples of a saved state; none is encoded yet."""
    return [PooledSample(key, length, packed) for key, length, packed in state]
