"""The order in which a rank emits the groups of a round."""

from __future__ import annotations

import random
from collections.abc import Sequence

GROUP_ORDERS = ("aligned", "rank_epoch_random", "rank_window_random", "rank_window_balanced")

_SLOT_STRIDE = 1_000_003


def emission_order(
    costs: Sequence[float],
    mode: str,
    *,
    seed: int,
    round_index: int,
    epoch: int,
    slot: int,
    rank: int,
    world_size: int,
) -> list[int]:
    """Group indices in emission order.

    Groups are first ordered by cost, so that the groups which the ranks emit at one position weigh the same, and
    then permuted alike on all ranks (by the seed, the round and the worker slot), so that light and heavy steps mix
    in time. Both are needed: without the first, nothing matches the ranks; without the second, every round is a ramp
    that shows up in the loss.

    Args:
        costs: Cost of each group, [num_groups].
        mode: ``aligned``, or a mode that reverses the cost order on some ranks, so that the mean length of a step
            does not vary, at the price of waiting. ``rank_window_balanced`` reverses half of the ranks, drawn anew
            for every round; ``rank_window_random`` draws for each rank and round, ``rank_epoch_random`` for each
            rank and epoch.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__)
    if _reverses(mode, f"{seed} {slot}", round_index=round_index, epoch=epoch, rank=rank, world_size=world_size):
        order.reverse()
    permutation = list(range(len(order)))
    # The rank must not enter this seed.
    random.Random(seed + round_index + _SLOT_STRIDE * slot).shuffle(permutation)
    return [order[i] for i in permutation]


def _reverses(mode: str, stream: str, *, round_index: int, epoch: int, rank: int, world_size: int) -> bool:
    """Whether this rank reverses its cost order. String seeds do not depend on PYTHONHASHSEED."""
    if mode == "aligned":
        return False
    if mode == "rank_window_balanced":
        ranks = list(range(world_size))
        random.Random(f"{stream} round {round_index}").shuffle(ranks)
        return rank in ranks[: world_size // 2]
    if mode == "rank_window_random":
        return random.Random(f"{stream} round {round_index} rank {rank}").random() < 0.5
    if mode == "rank_epoch_random":
        return random.Random(f"{stream} epoch {epoch} rank {rank}").random() < 0.5
    raise ValueError(f"group_order {mode!r} is unknown. Use one of {', '.join(GROUP_ORDERS)}.")
