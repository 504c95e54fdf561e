"""Stopping and scheduling by samples where a step holds no fixed number of them (ODB)."""

from __future__ import annotations

from typing import Any


class SampleQuota:
    """Counts the samples that all ranks together have trained, until a quota is reached.

    The counts of `GroupInfo.global_samples` are the same on all ranks, so all of them stop at the same step.
    """

    def __init__(self, num_samples: int) -> None:
        """
        Args:
            num_samples: Samples to train, over all ranks.

        Raises:
            ValueError: `num_samples` is not positive.
        """
        if num_samples < 1:
            raise ValueError(f"The sample quota is {num_samples}: nothing would be trained. Give 1 or more.")
        self.num_samples = num_samples
        self.num_emitted = 0

    def add(self, num_samples: int) -> None:
        """Counts one step: samples of all ranks, e.g. the sum of its groups' `info.global_samples`.

        Raises:
            ValueError: a negative number, as of groups whose ranks do not synchronise (-1).
        """
        if num_samples < 0:
            raise ValueError(
                f"A step of {num_samples} samples: without synchronisation (--odb-sync none) a group does not know the "
                "other ranks' samples. Sum the ranks' own numbers, e.g. in the loop's all-reduce of the loss."
            )
        self.num_emitted += num_samples

    @property
    def reached(self) -> bool:
        return self.num_emitted >= self.num_samples

    @property
    def num_missing(self) -> int:
        """Samples short of the quota."""
        return max(self.num_samples - self.num_emitted, 0)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint, as plain builtins."""
        return {"num_emitted": self.num_emitted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_emitted = state["num_emitted"]
