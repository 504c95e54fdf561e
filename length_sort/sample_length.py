"""The length of an encoded sample, read from the fields that VLM task encoders set."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def _field(sample: Any, name: str) -> Any:
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)


def _as_integer(value: Any) -> int | None:
    """`value` as a Python int, or None when it is not an integer (a float, a string, a bool, many elements)."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1:
            value = value.item()
        else:
            return None
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _found_length(sample: Any) -> tuple[str, Any]:
    """The first field that states a length, and what it states."""
    total_len = _field(sample, "total_len")
    if total_len is not None:
        return "total_len", total_len
    cu_lengths = _field(sample, "cu_lengths")
    if cu_lengths is not None and len(cu_lengths) > 0:
        # The `tokens` of a packed sample may leave out image tokens; its last cumulative length does not.
        return "cu_lengths[-1]", cu_lengths[-1]
    tokens = _field(sample, "tokens")
    if tokens is not None:
        shape = getattr(tokens, "shape", None)
        return "the length of tokens", len(tokens) if shape is None else (shape[-1] if len(shape) else 0)
    return "nothing", None


def sample_length(sample: Any) -> int:
    """Length of an encoded sample in tokens, visual tokens included.

    The first of these that the sample has: ``total_len``; the last entry of ``cu_lengths``; the last dimension
    of the tensor ``tokens`` (or its ``len``). `sample` is a dataclass, any object with attributes, or a dict.

    Raises:
        ValueError: the sample states no length, or one that is zero, negative or not an integer.
    """
    total_len = getattr(sample, "total_len", None)
    if type(total_len) is int and total_len > 0:  # the common case, without the search
        return total_len
    source, value = _found_length(sample)
    length = _as_integer(value)
    if length is not None and length > 0:
        return length
    key = _field(sample, "__key__")
    if value is None:
        found = f"none of total_len, cu_lengths, tokens in {type(sample).__name__}"
    else:
        found = f"{source} = {value!r}"
    raise ValueError(
        f"Sample {key!r} has no usable length: {found}. It can be neither sorted nor grouped. "
        "Set total_len to a positive integer in encode_sample, or pass length_fn=."
    )


def is_packed(sample: Any) -> bool:
    """Whether the sample holds several packed sequences: ``cu_lengths`` with more than two entries."""
    cu_lengths = _field(sample, "cu_lengths")
    return cu_lengths is not None and len(cu_lengths) > 2


def sample_num_patches(sample: Any) -> int:
    """Vision patches of an encoded sample: the product of each row of its ``*_grid_thw``, else its pixel rows."""
    num_patches = 0
    for visual in ("image", "video"):
        grid = _field(sample, f"{visual}_grid_thw")
        if grid is not None and len(grid):
            num_patches += int(torch.as_tensor(grid).prod(-1).sum())
    if num_patches == 0:
        for name in ("pixel_values", "imgs", "images"):
            pixels = _field(sample, name)
            if hasattr(pixels, "shape"):
                return int(pixels.shape[0])
    return num_patches
