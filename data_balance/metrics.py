"""What one balanced step did, as plain numbers that a logger can take apart with `dataclasses.asdict`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class BalanceMetrics:
    """Figures of one step (or, for the encoder, one micro batch).

    Attributes:
        step: index of the step.
        imbalance_before: heaviest over mean load of the ranks, as loaded.
        imbalance_after: the same after the move.
        bytes_moved: bytes of all ranks' samples that changed ranks.
        moved_share: the same as a share of all bytes.
        plan_s: seconds of gathering lengths and planning (of planning alone for the encoder).
        exchange_s: seconds of splitting, sending and merging.
        wait_s: seconds that the training waited for the step.
        hidden_share: share of the work on the step, loading included, that ran behind the training.
        moves_skipped: steps so far in which moving did not pay.
        idle_microbatches: micro batches of all ranks that got no sample.
        over_cap: micro batches above `max_tokens` or `max_patches` for want of room.
    """

    step: int
    imbalance_before: float = 1.0
    imbalance_after: float = 1.0
    bytes_moved: int = 0
    moved_share: float = 0.0
    plan_s: float = 0.0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    hidden_share: float = 0.0
    moves_skipped: int = 0
    idle_microbatches: int = 0
    over_cap: int = 0
