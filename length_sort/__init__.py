"""Order and group samples by the length that is known only after encoding, alike on all data-parallel ranks."""

from length_sort.coordinator import LocalCoordinator, StoreCoordinator, store_coordinator
from length_sort.length_pool_sort import LengthPoolSortDataset
from length_sort.loss_scale import loss_scale
from length_sort.odb_dataset import ODBGroupDataset
from length_sort.odb_group import GroupInfo, SampleGroup
from length_sort.sample_length import sample_length
from length_sort.store_channel import ODBSyncError

__all__ = [
    "GroupInfo",
    "LengthPoolSortDataset",
    "LocalCoordinator",
    "ODBGroupDataset",
    "ODBSyncError",
    "SampleGroup",
    "StoreCoordinator",
    "loss_scale",
    "sample_length",
    "store_coordinator",
]
