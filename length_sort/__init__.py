"""Order and group samples by the length that is known only after encoding, alike on all data-parallel ranks."""

from length_sort.length_pool_sort import LengthPoolSortDataset
from length_sort.sample_length import sample_length

__all__ = ["LengthPoolSortDataset", "sample_length"]
