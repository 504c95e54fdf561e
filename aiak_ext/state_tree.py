"""Walks the nested state of an Energon loader beside the datasets that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint
from megatron.energon.wrappers.base import BaseWrapperDataset

DatasetState = dict[str, Any]


def worker_dataset_states(state: SavableDataLoaderState) -> dict[int, DatasetState]:
    """By worker slot, a state whose only child is the state of the loader's outermost dataset."""
    found = {}
    for slot, worker_state in enumerate(state.worker_states):
        if not isinstance(worker_state, SavableDatasetCheckpoint):  # a loader without worker processes
            found[slot] = worker_state
        elif worker_state.state is not None and worker_state.state.dataset_state is not None:
            found[slot] = {"datasets": [worker_state.state.dataset_state]}
    return found


def states_beside_datasets(
    root: Any, root_state: DatasetState
) -> Iterator[tuple[Any, Any, DatasetState, DatasetState]]:
    """(parent, dataset, parent's state, dataset's state) from the loader's wrapper downwards, while each wraps one.

    `root` is what the loader iterates: its only child is the outermost dataset.
    """
    parent, parent_state = root, root_state
    while True:
        states = parent_state.get("datasets")
        if states is None or len(states) != 1:
            return
        child, child_state = parent.dataset, states[0]
        yield parent, child, parent_state, child_state
        if not isinstance(child, BaseWrapperDataset) or len(child.datasets) != 1:
            return
        parent, parent_state = child, child_state
