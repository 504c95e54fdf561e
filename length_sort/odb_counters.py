"""What a worker, or a run, has emitted and left out under ODB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from length_sort.odb_group import GroupInfo
from length_sort.rounds import Candidate


@dataclass
class GroupCounters:
    """Totals of one worker over the whole run; part of its state."""

    num_groups: int = 0
    num_idle_groups: int = 0
    local_samples: int = 0
    global_samples: int = 0
    local_tokens: int = 0
    global_tokens: int = 0
    deferred_samples: int = 0
    """Samples that were put back at the end of a round, once per round."""
    oldest_deferral: int = 0
    """Most rounds that any sample was put back."""
    dropped_samples: int = 0
    """Buffered samples dropped at the end of an epoch without join."""
    lost_samples: int = 0
    """Samples that could not be restored."""

    def add_group(self, info: GroupInfo) -> None:
        self.num_groups += 1
        self.num_idle_groups += info.idle
        self.local_samples += info.local_samples
        self.local_tokens += info.local_tokens
        if info.synchronized:
            self.global_samples += info.global_samples
            self.global_tokens += info.global_tokens

    def add_deferred(self, candidates: Sequence[Candidate]) -> None:
        """Called with the buffer right after a round was settled: what it holds then was put back."""
        self.deferred_samples += len(candidates)
        self.oldest_deferral = max([self.oldest_deferral, *(candidate.deferrals for candidate in candidates)])


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of the data a run has seen, in the paper's terms, as shares of the quota."""

    eta_quota: float
    """Samples short of the quota."""
    eta_identity: float
    """Distinct samples of the data not seen."""
    eta_logical: float
    """Samples left over (dropped or still buffered) when the run stopped."""


def coverage(*, quota: int, num_emitted: int, num_distinct: int, num_left_over: int) -> Coverage:
    """The end-of-run report; all counts over all ranks.

    Args:
        quota: Samples that the run was to emit (N of the paper: the data set, or the training quota).
        num_emitted: Samples emitted.
        num_distinct: Distinct samples among them.
        num_left_over: Samples read but not emitted.

    Raises:
        ValueError: the quota is not positive.
    """
    if quota < 1:
        raise ValueError(f"quota is {quota}: no share of it can be given. Pass the number of samples to emit.")
    return Coverage(
        eta_quota=max(0.0, 1 - num_emitted / quota),
        eta_identity=max(0.0, 1 - num_distinct / quota),
        eta_logical=num_left_over / quota,
    )
