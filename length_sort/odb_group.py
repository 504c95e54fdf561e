"""What ODBGroupDataset yields: a group of samples with its figures, and their transport as one int64 tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
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

    def figures(self) -> list[int]:
        """All fields in order, as integers."""
        return [int(value) for value in _figures_of(self)]

    @classmethod
    def from_figures(cls, figures: Sequence[int]) -> GroupInfo:
        """The inverse of `figures`.

        Raises:
            ValueError: there is not one figure per field.
        """
        if len(figures) != len(FIGURES):
            raise ValueError(
                f"{len(figures)} figures of an ODB group instead of {len(FIGURES)}: they were not written by "
                "GroupInfo, or those of several batches were concatenated. Pass those of one batch."
            )
        values: dict[str, Any] = dict(zip(FIGURES, figures))
        return cls(**{**values, "idle": bool(values["idle"])})

    def to_tensor(self) -> torch.Tensor:
        """The figures as int64 [9]: a form that survives pinning and collation."""
        return torch.tensor(self.figures(), dtype=torch.int64)

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> GroupInfo:
        """The inverse of `to_tensor`; ValueError as for `from_figures`."""
        return cls.from_figures(values.flatten().tolist())


FIGURES = tuple(each.name for each in fields(GroupInfo))
"""Names of a group's figures, in the order in which they travel."""

_figures_of = operator.attrgetter(*FIGURES)


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
