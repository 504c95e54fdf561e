"""What ODBGroupDataset yields: a group of samples with its figures, and their transport as one int64 tensor."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields
from typing import Any

import torch
from megatron.energon import Sample
from megatron.energon.edataclass import edataclass

UNSYNCHRONIZED = -1
"""Value of the global figures of a run whose ranks do not talk to each other."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """Figures of one aligned group, locally and summed over the data-parallel ranks at the same position.

    Tokens are true tokens, without padding. Loss tokens are those that carry loss (labels other than -100). The
    global figures are -1 where synchronisation is switched off.
    """

    round: int
    position: int
    local_samples: int
    global_samples: int
    local_tokens: int
    global_tokens: int
    local_loss_tokens: int
    global_loss_tokens: int
    idle: bool = False

    @property
    def synchronized(self) -> bool:
        return self.global_samples != UNSYNCHRONIZED

    def to_tensor(self) -> torch.Tensor:
        """The figures in the order of the fields, int64 [9]: a form that survives pinning and collation."""
        return torch.tensor([int(value) for value in astuple(self)], dtype=torch.int64)

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> GroupInfo:
        """The inverse of `to_tensor`.

        Raises:
            ValueError: `values` does not hold one entry per field.
        """
        if values.numel() != len(fields(cls)):
            raise ValueError(
                f"odb_info has {values.numel()} values instead of {len(fields(cls))}: it was not written by "
                "GroupInfo.to_tensor, or several were concatenated. Pass the tensor of one batch."
            )
        *figures, idle = values.flatten().tolist()
        return cls(*figures, idle=bool(idle))


@edataclass
class SampleGroup(Sample):
    """Samples that make one micro batch, with the group's figures.

    A group is idle when its rank has run dry while others still have data: `samples` is then empty, and
    `template` holds the samples of the rank's last real group, from which a batch of ordinary shape without loss
    can be made.
    """

    samples: list[Any]
    info: GroupInfo
    template: list[Any] = field(default_factory=list)
