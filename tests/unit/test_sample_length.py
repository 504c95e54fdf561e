"""sample_length on the shapes of samples that task encoders produce, and on bad ones."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from length_sort import sample_length
from length_sort.sample_length import is_packed


@dataclass
class Encoded:
    __key__: str = "shard-3/17"
    tokens: Any = None
    total_len: Any = None
    cu_lengths: Any = None


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        (Encoded(tokens=torch.zeros(7)), 7),
        (Encoded(tokens=torch.zeros(1, 9)), 9),
        (Encoded(tokens=[1, 2, 3]), 3),
        (Encoded(tokens=torch.zeros(7), total_len=300), 300),
        (Encoded(tokens=torch.zeros(7), total_len=torch.tensor(12)), 12),
        (Encoded(tokens=torch.zeros(7), total_len=np.int32(200_000)), 200_000),
        (Encoded(tokens=torch.zeros(7), cu_lengths=torch.tensor([0, 5, 40])), 40),
        (Encoded(tokens=torch.zeros(7), cu_lengths=[0, 5, 41], total_len=None), 41),
        ({"tokens": [1, 2], "__key__": "k"}, 2),
        ({"total_len": 4, "tokens": [1, 2]}, 4),
    ],
)
def test_lengths(sample, length):
    found = sample_length(sample)
    assert found == length and type(found) is int


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (Encoded(), "none of total_len, cu_lengths, tokens in Encoded"),
        (Encoded(total_len=0), "total_len = 0"),
        (Encoded(total_len=-3), "total_len = -3"),
        (Encoded(total_len=2.5), "total_len = 2.5"),
        (Encoded(total_len=True), "total_len = True"),
        (Encoded(total_len="12"), "total_len = '12'"),
        (Encoded(total_len=torch.tensor([1, 2])), "total_len = tensor"),
        (Encoded(tokens=torch.zeros(0)), "the length of tokens = 0"),
        (Encoded(tokens=[]), "the length of tokens = 0"),
        (Encoded(tokens=torch.tensor(5)), "the length of tokens = 0"),
        (Encoded(cu_lengths=[0, 0]), r"cu_lengths\[-1\] = 0"),
    ],
)
def test_bad_lengths_name_key_and_finding(sample, found):
    with pytest.raises(ValueError, match=f"shard-3/17.*{found}"):
        sample_length(sample)


def test_packed_means_more_than_one_sequence():
    assert is_packed(Encoded(cu_lengths=torch.tensor([0, 3, 8])))
    assert not is_packed(Encoded(cu_lengths=[0, 8])) and not is_packed(Encoded()) and not is_packed({})
