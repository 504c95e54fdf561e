"""Token-budget groups of one rank and their alignment across ranks, as pure functions over integers.

Source: the review of the Online Dynamic Batching paper (seed 003), equations (1) and (2) and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from length_sort.packing_rule import GroupLimits, best_fit_decreasing

T = TypeVar("T")

POLICIES = ("carry_over", "tight", "packed")
TARGETS = ("max", "median", "min")


def target_group_size(length: int, token_budget: int) -> int:
    """Samples of `length` tokens that fit the budget side by side, at least one: equation (1) of the paper."""
    return max(token_budget // length, 1)


def form_groups(
    lengths: Sequence[int],
    token_budget: int,
    *,
    policy: str = "carry_over",
    patches: Sequence[int] | None = None,
    max_patches: int | None = None,
    costs: Sequence[float] | None = None,
    max_cost: float | None = None,
) -> list[list[int]]:
    """Groups of sample indices within the limits; every index occurs once.

    ``carry_over`` is the paper's rule: from the longest sample to the shortest, a group closes at the target size
    of the sample that closed the group before it (the first one at one sample). ``tight`` closes a group at the
    target size of its own longest sample. Both bound the padded size, longest x count. ``packed`` bounds the sum
    of lengths (best fit decreasing), for models that take packed sequences. A sample that exceeds a limit by
    itself is a group of its own.

    Args:
        lengths: Tokens of each sample, [num_samples].
        token_budget: Most tokens of a group.
        policy: One of ``carry_over``, ``tight``, ``packed``.
        patches: Vision patches of each sample, [num_samples]; they add up, as images are not padded.
        max_patches: Most vision patches of a group.
        costs: Cost of each sample, [num_samples], e.g. from a second-order cost model.
        max_cost: Most cost of a group: highest cost x count where samples are padded, the sum where packed.

    Returns:
        Groups from the shortest longest-sample to the longest; each ascending by length. Samples of equal length
        keep their order.

    Raises:
        ValueError: a length or limit is not positive, a limit comes without its values, or the policy is unknown.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown. Use one of {', '.join(POLICIES)}.")
    limits = GroupLimits(token_budget=token_budget, max_patches=max_patches, max_cost=max_cost)
    limits.check(lengths, patches, costs)
    patches = patches if patches is not None else [0] * len(lengths)
    costs = costs if costs is not None else [0] * len(lengths)
    descending = sorted(range(len(lengths)), key=lengths.__getitem__)[::-1]
    if policy == "packed":
        groups = best_fit_decreasing(descending, lengths, patches, costs, limits)
    else:
        groups = _padded_groups(descending, lengths, patches, costs, limits, carry_over=policy == "carry_over")
    # The walk goes from long to short; hand the groups out the other way round, without disturbing ties.
    ascending = [group[::-1] for group in groups[::-1]]
    return sorted(ascending, key=lambda group: lengths[group[-1]])


def _padded_groups(
    descending: Sequence[int],
    lengths: Sequence[int],
    patches: Sequence[int],
    costs: Sequence[float],
    limits: GroupLimits,
    *,
    carry_over: bool,
) -> list[list[int]]:
    groups: list[list[int]] = []
    group: list[int] = []
    size_limit, group_patches, highest_cost = 0, 0, 0.0
    for index in descending:
        is_full = len(group) >= size_limit
        if limits.beyond_tokens and not is_full:
            cost = max(highest_cost, costs[index]) * (len(group) + 1)
            is_full = not limits.allow(patches=group_patches + patches[index], cost=cost)
        if is_full:
            if not carry_over:
                size_limit = target_group_size(lengths[index], limits.token_budget)
            else:
                # The paper's lag: this limit comes from a longer sample than the new group's own longest one, so
                # the new group can only be smaller than the budget allows, never larger.
                size_limit = target_group_size(lengths[group[-1]], limits.token_budget) if group else 1
            group, group_patches, highest_cost = [], 0, 0.0
            groups.append(group)
        group.append(index)
        group_patches += patches[index]
        highest_cost = max(highest_cost, costs[index])
    return groups


def group_target(
    group_counts: Sequence[int],
    capacities: Sequence[int],
    sample_counts: Sequence[int],
    *,
    statistic: str = "max",
) -> int:
    """Groups that every active rank emits in this round: equation (2) of the paper.

    Args:
        group_counts: Groups formed by each rank, [num_ranks]; ranks with none are inactive and left out.
        capacities: Free output slots of each rank, [num_ranks]; zero means unknown and is left out.
        sample_counts: Buffered samples of each rank, [num_ranks]; zero is left out. No rank can make more groups
            than it has samples.
        statistic: What the target starts from: the ``max`` (the paper), lower ``median`` or ``min`` of the counts.

    Returns:
        The target, never below 1.
    """
    if statistic not in TARGETS:
        raise ValueError(f"target {statistic!r} is unknown. Use one of {', '.join(TARGETS)}.")
    active = [rank for rank, count in enumerate(group_counts) if count > 0]
    if not active:
        return 1
    counts = sorted(group_counts[rank] for rank in active)
    start = {"max": counts[-1], "median": counts[(len(counts) - 1) // 2], "min": counts[0]}[statistic]
    bounds = [values[rank] for values in (capacities, sample_counts) for rank in active if values[rank] > 0]
    return max(min([start, *bounds]), 1)


def align_groups(
    groups: Sequence[Sequence[T]], target: int, *, weight: Callable[[Sequence[T]], Any] = len
) -> tuple[list[list[T]], list[list[T]]]:
    """Bring a rank's groups to `target` of them: algorithm 1 of the paper.

    Too few: from the last group backwards, find the first with two or more samples, move its last sample into a
    group of its own right behind it, and repeat while possible. Too many: keep the `target` groups of the highest
    `weight` (the number of samples in the paper; ties keep the earlier group), in their order.

    Returns:
        (aligned groups, overflow groups). With at least `target` samples exactly `target` groups are aligned.
    """
    aligned = [list(group) for group in groups]
    if len(aligned) > target:
        ranked = sorted(range(len(aligned)), key=lambda i: weight(aligned[i]), reverse=True)
        kept = set(ranked[:target])
        overflow = [group for i, group in enumerate(aligned) if i not in kept]
        return [group for i, group in enumerate(aligned) if i in kept], overflow
    position = len(aligned) - 1
    while len(aligned) < target and position >= 0:
        if len(aligned[position]) < 2:
            # Singletons split off lie behind `position`, so the scan never has to start over.
            position -= 1
            continue
        aligned.insert(position + 1, [aligned[position].pop()])
    return aligned, []
