"""The order in which a rank emits the groups of a round."""

from __future__ import annotations

import random
from collections.abc import Sequence

GROUP_ORDERS = ("aligned", "rank_epoch_random", "rank_window_random", "rank_window_balanced")

_SLOT_STRIDE = 1_000_003
_RANK_STRIDE = 998_244_353


def emission_order(
    costs: Sequence[float], mode: str, *, seed: int, round_index: int, epoch: int, slot: int, rank: int
) -> list[int]:
    """Group indices in emission order.

    Groups are first ordered by cost, so that the groups which the ranks emit at one position weigh the same, and
    then permuted, so that light and heavy steps mix in time. Both are needed: without the first, nothing matches
    the ranks; without the second, every round is a ramp that shows up in the loss.

    Modes: ``aligned`` uses one permutation on all ranks (of the seed, the round and the worker slot).
    ``rank_window_balanced`` uses it too, but on the reversed cost order on odd ranks: light steps of some ranks meet
    heavy steps of others, so a step's mean length does not vary, at the price of waiting. ``rank_window_random``
    permutes each rank and round on its own, ``rank_epoch_random`` each rank alike in all rounds of an epoch; they
    are references to judge the others by.

    Args:
        costs: Cost of each group, [num_groups].
        mode: One of `GROUP_ORDERS`.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__)
    if mode == "rank_window_balanced" and rank % 2:
        order.reverse()
    # The rank never enters the seed of the shared permutations.
    order_seed = seed + _SLOT_STRIDE * slot
    if mode in ("aligned", "rank_window_balanced"):
        order_seed += round_index
    elif mode == "rank_window_random":
        order_seed += round_index + _RANK_STRIDE * (rank + 1)
    elif mode == "rank_epoch_random":
        order_seed += epoch + _RANK_STRIDE * (rank + 1)
    else:
        raise ValueError(f"group_order {mode!r} is unknown. Use one of {', '.join(GROUP_ORDERS)}.")
    permutation = list(range(len(order)))
    random.Random(order_seed).shuffle(permutation)
    return [order[i] for i in permutation]
