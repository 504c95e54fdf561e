"""The round protocol of online dynamic batching as a state machine without I/O.

Each rank (of one worker slot) alternates: fill the buffer, `propose` a report, learn the round's outcome,
`settle` on aligned groups and report their figures, learn the totals, emit. The reports go to all ranks by
whatever means the caller has; `decide_round` and `decide_totals` turn them into outcomes, alike on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from length_sort.grouping import POLICIES, TARGETS, align_groups, form_groups, group_target
from length_sort.odb_group import UNSYNCHRONIZED, GroupInfo
from length_sort.odb_order import GROUP_ORDERS, emission_order
from length_sort.packing_rule import GroupLimits

NUM_FIGURES = 3
"""Figures reported per position: samples, tokens, loss tokens."""


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """Settings that every rank must share.

    Raises:
        ValueError: a value is out of range or a name unknown.
    """

    token_budget: int
    """Most tokens of a group, padding included where samples are padded."""
    buffer_size: int = 1024
    """Samples a rank's worker looks at in a round."""
    policy: str = "carry_over"
    target: str = "max"
    group_order: str = "aligned"
    join: bool = True
    """Drain every rank (idle groups where one has run dry) instead of stopping at the first dry rank."""
    max_deferrals: int | None = 4
    """Rounds after which a deferred sample goes first; None defers for ever, as the paper does."""
    max_patches: int | None = None
    max_cost: float | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        GroupLimits(token_budget=self.token_budget, max_patches=self.max_patches, max_cost=self.max_cost)
        if self.buffer_size < 1:
            raise ValueError(f"buffer_size is {self.buffer_size}: no sample could be grouped. Give at least 1.")
        if self.max_deferrals is not None and self.max_deferrals < 0:
            raise ValueError(f"max_deferrals is {self.max_deferrals}. Give 0 or more, or None for no bound.")
        for name, known in (("policy", POLICIES), ("target", TARGETS), ("group_order", GROUP_ORDERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown. Use one of {', '.join(known)}.")

    @property
    def padded(self) -> bool:
        return self.policy != "packed"


@dataclass(slots=True)
class Candidate:
    """A sample in the buffer, as the protocol sees it."""

    length: int
    loss_tokens: int = 0
    patches: int = 0
    cost: float = 0.0
    deferrals: int = 0
    payload: Any = None
    """What the caller wants back with the group."""


Group = list[Candidate]


def decide_round(reports: Sequence[Sequence[int]], rules: RoundRules) -> list[int]:
    """Outcome of a round from the ranks' reports: [groups that every rank emits, oldest round still needed].

    Zero groups end the stream: with join when every rank is dry, without join as soon as one is.

    Args:
        reports: (groups, samples, oldest round that the rank may have to replay from) of each rank, [num_ranks, 3].
    """
    group_counts = [report[0] for report in reports]
    oldest_round = min(report[2] for report in reports)
    ended = any if not rules.join else all
    if ended(count == 0 for count in group_counts):
        return [0, oldest_round]
    no_capacity = [0] * len(reports)  # nothing but the buffer bounds what a worker can emit
    sample_counts = [report[1] for report in reports]
    return [group_target(group_counts, no_capacity, sample_counts, statistic=rules.target), oldest_round]


def decide_totals(reports: Sequence[Sequence[int]]) -> list[int]:
    """Sums over the ranks of the figures per position, [num_groups * 3]."""
    return [sum(values) for values in zip(*reports)]


def group_cost(group: Sequence[Candidate], *, padded: bool) -> float:
    """Cost of a group: every sample costs as much as the costliest where it is padded, else its own."""
    costs = [candidate.cost for candidate in group]
    return max(costs) * len(costs) if padded else sum(costs)


def group_size(group: Sequence[Candidate], *, padded: bool) -> int:
    """Tokens that a group occupies, padding included where samples are padded."""
    lengths = [candidate.length for candidate in group]
    return max(lengths) * len(lengths) if padded else sum(lengths)


class RankRounds:
    """One rank's side of the protocol: its buffer, the groups under way and where it stands."""

    def __init__(self, rules: RoundRules, *, rank: int, world_size: int, slot: int = 0) -> None:
        self.rules = rules
        self.rank = rank
        self.world_size = world_size
        self.slot = slot
        self.round = 0
        self.epoch = 0
        self.position = 0
        """Groups of this round that were emitted."""
        self.buffer: list[Candidate] = []
        """Samples that wait for the next round."""
        self.groups: list[Group] = []
        """Groups of this round that are still to be emitted, in order; empty groups are idle."""
        self.totals: list[int] = []
        """Global figures of this round, [num_groups * 3]; empty where ranks are not synchronised."""
        self._proposed: list[Group] = []

    def propose(self, oldest_round: int = 0) -> list[int]:
        """Form groups of the filled buffer. Returns the report for `decide_round`."""
        assert not self.groups, "the round before has not been emitted"
        rules = self.rules
        index_groups = form_groups(
            [candidate.length for candidate in self.buffer],
            rules.token_budget,
            policy=rules.policy,
            patches=[candidate.patches for candidate in self.buffer],
            max_patches=rules.max_patches,
            costs=[candidate.cost for candidate in self.buffer],
            max_cost=rules.max_cost,
        )
        self._proposed = [[self.buffer[i] for i in group] for group in index_groups]
        return [len(self._proposed), len(self.buffer), oldest_round]

    def settle(self, num_groups: int) -> list[int]:
        """Align to the round's outcome, and put what overflows back into the buffer.

        Returns the figures of each position, [num_groups * 3], for `decide_totals`.
        """
        aligned, overflow = align_groups(self._proposed, num_groups, weight=self._keep_weight)
        self._proposed = []
        self.buffer = [candidate for group in overflow for candidate in group]
        for candidate in self.buffer:
            candidate.deferrals += 1
        aligned += [[] for _ in range(num_groups - len(aligned))]
        if aligned and aligned[0]:
            costs = [group_cost(group, padded=self.rules.padded) for group in aligned]
            order = emission_order(
                costs,
                self.rules.group_order,
                seed=self.rules.seed,
                round_index=self.round,
                epoch=self.epoch,
                slot=self.slot,
                rank=self.rank,
                world_size=self.world_size,
            )
            aligned = [aligned[i] for i in order]
        self.groups = aligned
        return [figure for group in aligned for figure in _figures(group)]

    def begin_emission(self, totals: Sequence[int]) -> None:
        """Take in the global figures; empty when ranks are not synchronised."""
        assert not totals or len(totals) == NUM_FIGURES * len(self.groups)
        self.totals = list(totals)
        self.position = 0

    def next_group(self) -> tuple[Group, GroupInfo]:
        """Take the next group of the round; with the last one the round is over."""
        group = self.groups.pop(0)
        start = NUM_FIGURES * self.position
        totals = self.totals[start : start + NUM_FIGURES] or [UNSYNCHRONIZED] * NUM_FIGURES
        samples, tokens, loss_tokens = _figures(group)
        info = GroupInfo(
            round=self.round,
            position=self.position,
            local_samples=samples,
            global_samples=totals[0],
            local_tokens=tokens,
            global_tokens=totals[1],
            local_loss_tokens=loss_tokens,
            global_loss_tokens=totals[2],
            idle=not group,
        )
        self.position += 1
        if not self.groups:
            self.round += 1
        return group, info

    def end_stream(self) -> list[Candidate]:
        """Close the epoch; the next one starts with an empty buffer. Returns what was left in the buffer."""
        assert not self.groups
        left_over = [candidate for group in self._proposed for candidate in group]
        self._proposed, self.buffer = [], []
        self.round += 1
        self.epoch += 1
        return left_over

    def _keep_weight(self, group: Sequence[Candidate]) -> tuple[int, int]:
        """What decides which groups stay: overdue samples, then what fills the budget best.

        Among overdue groups the oldest goes first, so every sample leaves after at most `max_deferrals` plus
        `buffer_size` rounds: the samples before it only become fewer.
        """
        oldest = max(candidate.deferrals for candidate in group)
        limit = self.rules.max_deferrals
        overdue = oldest + 1 if limit is not None and oldest >= limit else 0
        # Algorithm 1 keeps the groups with the most samples; counting tokens instead fills the budget better.
        by_count = self.rules.policy == "carry_over"
        return overdue, len(group) if by_count else group_size(group, padded=self.rules.padded)


def _figures(group: Sequence[Candidate]) -> tuple[int, int, int]:
    return (
        len(group),
        sum([candidate.length for candidate in group]),
        sum([candidate.loss_tokens for candidate in group]),
    )
