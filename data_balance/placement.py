"""Which bin goes to which rank: planners make bins, and a good choice of ranks keeps most bytes where they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from data_balance.plan import FloatArray, IntArray

#: Up to this many ranks the optimal assignment is solved (some 10 ms); above, pairs are taken greedily.
MAX_OPTIMAL_RANKS = 512
#: A byte that stays inside its node is worth this part of one that stays on its rank, beside the bytes that
#: leave the node: the links inside are several times as fast as the network, so leaving is what has to be
#: avoided first.
NODE_WEIGHT = 4.0


def place_bins(
    bins: IntArray,
    home: IntArray,
    sizes: FloatArray,
    num_ranks: int,
    *,
    nodes: IntArray | None = None,
    allowed: NDArray[np.bool_] | None = None,
) -> IntArray:
    """Rank [num_ranks] of every bin, so that many bytes stay on their rank, and on their node first.

    Args:
        bins: bin [n] of every item.
        home: rank [n] where the item is now.
        sizes: bytes [n] of the items.
        num_ranks: ranks, and bins.
        nodes: node [num_ranks] of every rank; every rank is its own node without.
        allowed: [bins, ranks] pairs that may be chosen; must contain the identity. All may without.
    """
    if num_ranks <= MAX_OPTIMAL_RANKS:
        gain = _kept_bytes(bins, home, sizes, num_ranks)
        if nodes is not None:
            same_node = (nodes[:, None] == nodes[None, :]).astype(np.float64)
            gain = gain + NODE_WEIGHT * (gain @ same_node)
        if allowed is not None:
            gain = np.where(allowed, gain, -gain.sum() - 1.0)
        _, ranks = linear_sum_assignment(-gain)
        return ranks.astype(np.int64)
    if allowed is not None:
        return np.arange(num_ranks)  # a greedy choice cannot promise to complete within the allowed pairs
    if nodes is None:
        return _greedy(bins, home, sizes, num_ranks)
    return _greedy_by_node(bins, home, sizes, num_ranks, nodes)


def _kept_bytes(bins: IntArray, home: IntArray, sizes: FloatArray, num_ranks: int) -> FloatArray:
    kept = np.bincount(bins * num_ranks + home, weights=sizes, minlength=num_ranks * num_ranks)
    return kept.reshape(num_ranks, num_ranks).astype(np.float64)


def _greedy(bins: IntArray, home: IntArray, sizes: FloatArray, num_ranks: int) -> IntArray:
    """Take (bin, rank) pairs by the bytes they keep; half the optimum at least, and near it on real loads."""
    pairs, index = np.unique(bins * num_ranks + home, return_inverse=True)
    kept = np.bincount(index, weights=sizes)
    best = pairs[np.argsort(-kept, kind="stable")]
    return _take_pairs(best // num_ranks, best % num_ranks, np.ones(num_ranks, dtype=np.int64), num_ranks)


def _take_pairs(bins: IntArray, places: IntArray, room: IntArray, num_bins: int) -> IntArray:
    """Place [num_bins] of every bin: the given pairs in order while both are free, then what is left in order."""
    chosen = [-1] * num_bins
    free = room.tolist()
    for one_bin, place in zip(bins.tolist(), places.tolist()):
        if chosen[one_bin] < 0 and free[place] > 0:
            chosen[one_bin] = place
            free[place] -= 1
    left = iter(np.repeat(np.arange(len(free)), free).tolist())
    return np.array([next(left) if place < 0 else place for place in chosen], dtype=np.int64)


def _greedy_by_node(bins: IntArray, home: IntArray, sizes: FloatArray, num_ranks: int, nodes: IntArray) -> IntArray:
    """Bins to nodes first (as many as the node has ranks), then to ranks optimally inside each node."""
    names, node = np.unique(nodes, return_inverse=True)
    num_nodes = len(names)
    pairs, index = np.unique(bins * num_nodes + node[home], return_inverse=True)
    best = pairs[np.argsort(-np.bincount(index, weights=sizes), kind="stable")]
    ranks_per_node = np.bincount(node, minlength=num_nodes)
    node_of_bin = _take_pairs(best // num_nodes, best % num_nodes, ranks_per_node, num_ranks)
    # Kept bytes inside the node, as a small dense table per node.
    bin_order = np.argsort(node_of_bin, kind="stable")
    rank_order = np.argsort(node, kind="stable")
    starts = np.concatenate([[0], np.cumsum(ranks_per_node)])
    bin_position, rank_position = np.empty(num_ranks, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    bin_position[bin_order] = np.arange(num_ranks) - starts[node_of_bin[bin_order]]
    rank_position[rank_order] = np.arange(num_ranks) - starts[node[rank_order]]
    inside = node_of_bin[bins] == node[home]
    result = np.empty(num_ranks, dtype=np.int64)
    item_order = np.flatnonzero(inside)[np.argsort(node[home[inside]], kind="stable")]
    item_starts = np.searchsorted(node[home[item_order]], np.arange(num_nodes + 1))
    for n in range(num_nodes):
        items = item_order[item_starts[n] : item_starts[n + 1]]
        width = int(ranks_per_node[n])
        kept = _kept_bytes(bin_position[bins[items]], rank_position[home[items]], sizes[items], width)
        rows, columns = linear_sum_assignment(-kept)
        result[bin_order[starts[n] + rows]] = rank_order[starts[n] + columns]
    return result
