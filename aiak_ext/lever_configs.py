"""The settings of each lever: frozen dataclasses whose fields declare their flags, help and limits."""

from __future__ import annotations

from dataclasses import dataclass

from aiak_ext.options import check_options, int_or_none, option
from length_sort.grouping import POLICIES, TARGETS
from length_sort.odb_order import GROUP_ORDERS


@dataclass(frozen=True, kw_only=True)
class LengthSortConfig:
    """Length-sorted pools: all ranks see samples of similar length at the same step.

    Raises:
        ValueError: For values outside their limits, an initial pool above the pool size, or a pool size that
            is not a multiple of the shuffle block.
    """

    pool_size: int = option(
        0,
        "--length-sort-pool-size",
        "samples per pool that is sorted by length and shuffled with the same seed on all ranks; 0 = off",
        minimum=0,
        below="cannot be collected",
    )
    descending: bool = option(
        False,
        "--length-sort-desc",
        "sort each pool from long to short before its shuffle",
    )
    separate_packed: bool = option(
        False,
        "--length-sort-separate-packed",
        "order packed samples (several attention segments) and unpacked ones apart, then merge them evenly",
    )
    warmup_pools: int = option(
        0,
        "--length-sort-warmup-steps",
        "number of pools over which the pool grows to its full size, so that the first batch comes soon",
        minimum=0,
        below="is no number of pools",
    )
    initial_pool_size: int | None = option(
        None,
        "--length-sort-initial-pool-size",
        "size of the first pool of the warm-up; default: the shuffle block",
        parse=int,
        minimum=1,
        below="leaves the first pool empty",
    )
    shuffle_block: int = option(
        0,
        "--length-sort-shuffle-block",
        "neighbours of the sorted pool that stay together in the shuffle, so that a micro batch needs little "
        "padding; 0 = the micro batch size",
        minimum=0,
        below="is no number of samples",
    )
    seed: int = option(42, "--length-sort-seed", "seed of the pools' shuffle, the same on all ranks")
    max_pool_bytes: int = option(
        4 * 1024**3,
        "--length-sort-max-pool-bytes",
        "bytes of samples that a data worker's pool holds; what exceeds them is encoded again at its turn",
        minimum=0,
        below="is no number of bytes",
    )
    allow_inexact_resume: bool = option(
        False,
        "--length-sort-allow-inexact-resume",
        "accept that pooled samples are lost on a resume where the pipeline cannot restore single samples",
    )

    @property
    def active(self) -> bool:
        """Whether the lever is on."""
        return self.pool_size > 0

    def __post_init__(self) -> None:
        check_options(self)
        if not self.active:
            return
        if self.initial_pool_size is not None and self.initial_pool_size > self.pool_size:
            raise ValueError(
                f"--length-sort-initial-pool-size is {self.initial_pool_size} with a pool size of "
                f"{self.pool_size}: the warm-up would shrink the pool; give at most the pool size"
            )
        if self.shuffle_block and self.pool_size % self.shuffle_block:
            raise ValueError(
                f"the pool size {self.pool_size} is not a multiple of the shuffle block "
                f"{self.shuffle_block}: every pool would end in a short block, and micro batches would "
                "straddle pools from there on; "
                f"use {round_up(self.pool_size, self.shuffle_block)}"
            )


@dataclass(frozen=True, kw_only=True)
class ODBConfig:
    """Token-budget groups whose number is aligned across data-parallel ranks (online dynamic batching).

    Raises:
        ValueError: For values outside their limits.
    """

    token_budget: int = option(
        0,
        "--odb-token-budget",
        "tokens per group (padded, or summed when packed), which takes the micro batch's place; 0 = off",
        minimum=0,
        below="is no number of tokens",
    )
    buffer_size: int = option(
        1024,
        "--odb-buffer-size",
        "samples per data worker from which a round forms its groups",
        minimum=1,
        below="leaves nothing to group",
    )
    policy: str = option(
        "carry_over",
        "--odb-policy",
        "how groups form: by the paper's carried-over threshold, a tight one, or packed to a sum of lengths",
        choices=POLICIES,
    )
    target: str = option(
        "max",
        "--odb-target",
        "group count that the ranks agree on in a round: the largest, the median or the smallest of theirs",
        choices=TARGETS,
    )
    group_order: str = option(
        "aligned",
        "--odb-group-order",
        "order in which a round's groups come out; aligned gives all ranks similar costs at the same step",
        choices=GROUP_ORDERS,
    )
    max_deferrals: int | None = option(
        4,
        "--odb-max-deferrals",
        "rounds after which a deferred sample goes first; none = never, the paper's rule",
        parse=int_or_none,
        minimum=0,
        below="is no number of rounds",
    )
    max_patches: int | None = option(
        None,
        "--odb-max-patches",
        "most vision patches per group; default: no limit",
        parse=int,
        minimum=1,
        below="fits no image",
    )
    max_cost: float | None = option(
        None,
        "--odb-max-cost",
        "most compute cost per group, in the cost model's units; default: no limit",
        parse=float,
        minimum=0.0,
        below="fits no sample",
    )
    join_mode: str = option(
        "join",
        "--odb-join-mode",
        "end of a finite stream: join drains it with idle groups, non-join stops with the first dry rank",
        choices=("join", "non-join"),
    )
    sync: str = option(
        "store",
        "--odb-sync",
        "how the ranks agree: through a key-value store, or not at all (endless streams only)",
        choices=("store", "none"),
    )
    timeout_seconds: float = option(
        600.0,
        "--odb-timeout-seconds",
        "seconds without a sign of life from a missing rank after which waiting for it is an error",
        minimum=1.0,
        below="would call every rank dead",
    )

    @property
    def active(self) -> bool:
        """Whether the lever is on."""
        return self.token_budget > 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class DataBalanceConfig:
    """Moving samples (step scope) or images (encoder scope) to the data-parallel rank that has room.

    Raises:
        ValueError: For values outside their limits.
    """

    enabled: bool = option(
        False,
        "--use-data-balance",
        "even out the work of the data-parallel ranks at every step",
    )
    sorting_algo: str = option(
        "post_global_balancing_greedy_without_pad",
        "--data-balance-sorting-algo",
        "planner that assigns items to ranks",
        choices=("post_global_balancing_greedy_without_pad", "lpt", "karmarkar_karp", "min_move"),
    )
    scope: str = option(
        "step",
        "--data-balance-scope",
        "step moves samples between ranks before the forward, encoder moves images inside it",
        choices=("step", "encoder"),
    )
    model_config: str | None = option(
        None,
        "--data-balance-model-config",
        "JSON file with the model's dimensions, from which a sample's cost is derived",
        parse=str,
    )
    threshold: float = option(
        0.02,
        "--data-balance-threshold",
        "share of the heaviest rank's cost that moving has to save, else the step stays as it is",
        minimum=0.0,
        below="is no share of a cost",
    )
    tolerance: float = option(
        0.02,
        "--data-balance-tolerance",
        "share above the lower bound that min_move may leave on a rank in order to move fewer bytes",
        minimum=0.0,
        below="is under the lower bound",
    )
    fit_steps: int = option(
        0,
        "--data-balance-fit-steps",
        "first steps whose measured times fit the cost model; 0 = only derive it from the model's dimensions",
        minimum=0,
        below="is no number of steps",
    )

    @property
    def active(self) -> bool:
        """Whether the lever is on."""
        return self.enabled

    def __post_init__(self) -> None:
        check_options(self)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
