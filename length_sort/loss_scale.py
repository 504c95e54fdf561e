"""Weights that make the gradient of unequal ranks equal to that of one rank with all their samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from length_sort.odb_group import GroupInfo

IGNORED_LABEL = -100


def count_loss_tokens(sample: Any) -> int:
    """Tokens of a sample that carry loss: `labels` other than -100, else the non-zero entries of `loss_mask`.

    A sample with neither counts all its `tokens`. `sample` is a dataclass, any object with attributes, or a dict.

    Raises:
        ValueError: the sample has none of the three.
    """
    in_mapping = _is_mapping(type(sample))  # type: ignore[arg-type]  # types are hashable
    if (labels := sample.get("labels") if in_mapping else getattr(sample, "labels", None)) is not None:
        return _count(labels, IGNORED_LABEL)
    if (loss_mask := sample.get("loss_mask") if in_mapping else getattr(sample, "loss_mask", None)) is not None:
        return _count(loss_mask, 0)
    if (tokens := sample.get("tokens") if in_mapping else getattr(sample, "tokens", None)) is not None:
        shape = getattr(tokens, "shape", None)
        return len(tokens) if shape is None else shape[-1]
    raise ValueError(
        f"{type(sample).__name__} has none of labels, loss_mask, tokens: the tokens that carry loss cannot be "
        "counted, and the loss would be weighted wrongly. Pass loss_tokens_fn=."
    )


@functools.cache
def _is_mapping(kind: type[Any]) -> bool:
    """Looked up once per type, since every sample is counted."""
    return issubclass(kind, Mapping)


def _count(values: Any, ignored: int) -> int:
    return int(torch.count_nonzero(torch.as_tensor(values) != ignored))


def loss_scale(info: GroupInfo, world_size: int) -> float:
    """Factor for a rank's mean loss per token when DDP averages gradients over ranks and a step is one group.

    ``local_loss_tokens / global_loss_tokens * world_size``: the mean of the scaled means is then the mean over all
    tokens of all ranks (equation (4) of the paper, w_r = t_r / T). An idle group weighs 0.

    With several accumulated groups per step this is not exact: divide each group's loss sum by the step's total of
    global loss tokens instead and multiply by `world_size`, or use Megatron's ``calculate_per_token_loss``, which
    does the same.

    Raises:
        ValueError: the ranks are not synchronised, so the global figures are unknown.
    """
    if not info.synchronized:
        raise ValueError(
            "loss_scale needs global token counts, and the ranks are not synchronised (--odb-sync none): every rank "
            "would weigh alike, which biases the loss. Train with --calculate-per-token-loss, or use --odb-sync store."
        )
    if info.global_loss_tokens == 0:
        return 0.0  # no rank has a token to learn from in this step
    return info.local_loss_tokens / info.global_loss_tokens * world_size
