"""Limits of a group, and best-fit-decreasing packing of samples under them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """The most that one group may hold; None means no limit.

    Raises:
        ValueError: a limit is not positive.
    """

    token_budget: int
    """Tokens, padding included where samples are padded."""
    max_patches: int | None = None
    """Vision patches."""
    max_cost: float | None = None
    """Cost, in the unit of the caller's cost model."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_patches", "max_cost"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: no sample would fit. Give a positive value.")

    @property
    def beyond_tokens(self) -> bool:
        """Whether anything but tokens is limited."""
        return self.max_patches is not None or self.max_cost is not None

    def allow(self, *, patches: int, cost: float) -> bool:
        """Whether a group with this many patches and this cost is within the limits."""
        return (self.max_patches is None or patches <= self.max_patches) and (
            self.max_cost is None or cost <= self.max_cost
        )

    def check(self, lengths: Sequence[int], patches: Sequence[int] | None, costs: Sequence[float] | None) -> None:
        """Raise ValueError for lengths that are not positive and for limits without the values they limit."""
        shortest = min(lengths, default=1)
        if shortest < 1:
            index = lengths.index(shortest)
            raise ValueError(f"lengths[{index}] is {shortest}: a sample needs at least one token to be grouped.")
        for name, limit, values in (("patches", self.max_patches, patches), ("cost", self.max_cost, costs)):
            if limit is not None and values is None:
                raise ValueError(f"max_{name} is {limit}, but no {name} of the samples are given. Pass them too.")
            if values is not None and len(values) != len(lengths):
                raise ValueError(f"{len(values)} values of {name} for {len(lengths)} lengths. Give one per sample.")


def best_fit_decreasing(
    descending: Sequence[int],
    lengths: Sequence[int],
    patches: Sequence[int],
    costs: Sequence[float],
    limits: GroupLimits,
) -> list[list[int]]:
    """Pack samples, longest first, each into the fullest group that still has room.

    Args:
        descending: Sample indices from the longest to the shortest, [num_samples].
        lengths, patches, costs: Of each sample, [num_samples]; they add up within a group.
        limits: What a group may hold.

    Returns:
        Groups of indices, each from the longest sample to the shortest, in the order they were opened.
    """
    groups: list[list[int]] = []
    group_patches: list[int] = []
    group_costs: list[float] = []
    free: list[tuple[int, int]] = []  # (free tokens, group), ascending: the best fit is the first that fits
    for index in descending:
        at = bisect_left(free, (lengths[index], -1))
        while at < len(free):
            group = free[at][1]
            if limits.allow(patches=group_patches[group] + patches[index], cost=group_costs[group] + costs[index]):
                break
            at += 1
        if at < len(free):
            room, group = free.pop(at)
            groups[group].append(index)
            group_patches[group] += patches[index]
            group_costs[group] += costs[index]
        else:
            room, group = limits.token_budget, len(groups)
            groups.append([index])
            group_patches.append(patches[index])
            group_costs.append(costs[index])
        insort(free, (room - lengths[index], group))
    return groups
