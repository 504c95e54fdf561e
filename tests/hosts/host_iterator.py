"""What the hosts put between Energon's loader and Megatron's training loop, restated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class HostDataIterator:
    """An endless iterator over a loader, epoch after epoch, whose state is the loader's.

    Like the hosts' own it starts iterating lazily, so that a restore may follow its construction.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = endless(loader)

    def __next__(self) -> Any:
        return next(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def save_state(self) -> Any:
        return self.loader.save_state_rank()


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch of a loader."""
    while True:
        yield from loader


def stop_workers(loader: Any) -> None:
    """Ends the worker processes of our loader or of Energon's, which has no way of its own."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()


def wrapper_names(dataset: Any) -> list[str]:
    """Class names of a dataset's wrappers, outermost first."""
    names = []
    while hasattr(dataset, "datasets"):
        names.append(type(dataset).__name__)
        dataset = dataset.datasets[0]
    return names
