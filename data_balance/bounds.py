"""Lower bounds of the heaviest rank's load, and the imbalance of given loads."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def lower_bound(costs: ArrayLike, num_ranks: int, carried: ArrayLike | None = None) -> float:
    """Least possible load of the heaviest rank when `costs` [n] are spread over `num_ranks`.

    The largest of: the mean load; the heaviest item; and, for every k, the k+1 lightest of the k*R+1
    heaviest items (some rank holds k+1 of those). Loads `carried` [R] that ranks already have count into the
    mean, and the heaviest of them is a bound itself.
    """
    sorted_costs = -np.sort(-np.asarray(costs, dtype=np.float64))
    start = np.zeros(num_ranks) if carried is None else np.asarray(carried, dtype=np.float64)
    bound = max((sorted_costs.sum() + start.sum()) / num_ranks, float(start.max()))
    if not len(sorted_costs):
        return float(bound)
    cumulative = np.concatenate([[0.0], np.cumsum(sorted_costs)])
    k = np.arange((len(sorted_costs) - 1) // num_ranks + 1)
    last = k * num_ranks + 1
    together = cumulative[last] - cumulative[last - k - 1]
    # The difference of two sums can exceed the true value by rounding; a bound must not.
    together *= 1 - 1e-12
    return float(max(bound, sorted_costs[0] + start.min(), together.max()))


def imbalance(loads: ArrayLike) -> float:
    """Heaviest over mean load, 1.0 when even; 1.0 too when there is no load at all."""
    values = np.asarray(loads, dtype=np.float64)
    mean = float(values.mean()) if values.size else 0.0
    return float(values.max()) / mean if mean > 0 else 1.0


def rank_loads(costs: NDArray[np.float64], ranks: NDArray[np.int64], num_ranks: int) -> NDArray[np.float64]:
    """Load [R] of each rank when item i of cost ``costs[i]`` is on ``ranks[i]``."""
    return np.bincount(ranks, weights=costs, minlength=num_ranks).astype(np.float64)
