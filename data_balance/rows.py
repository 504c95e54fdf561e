"""Differentiable all-to-all of tensor rows, and the routes between an item's home and the rank that encodes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data_balance.groups import CollectiveWatch


@dataclass(frozen=True)
class Route:
    """This rank's part of a plan over items (images, or frames of videos), which are numbered by home rank.

    Attributes:
        send_order: own items [k] in the order in which they leave: by target rank, then by number.
        own_rows: rows (patches) [k] of the own items, in their own order.
        sent_rows: rows that go to each rank.
        received_rows: rows that come from each rank.
        received: numbers of the items that this rank encodes, ascending, which is also their order of
            arrival.
    """

    send_order: torch.Tensor
    own_rows: torch.Tensor
    sent_rows: list[int]
    received_rows: list[int]
    received: np.ndarray

    @classmethod
    def of(cls, rank: int, num_ranks: int, home: np.ndarray, target: np.ndarray, rows: np.ndarray) -> Route:
        """Route of `rank` when item i of ``rows[i]`` rows lives on ``home[i]`` and is encoded on ``target[i]``."""
        own = np.flatnonzero(home == rank)
        received = np.flatnonzero(target == rank)
        return cls(
            send_order=torch.from_numpy(np.argsort(target[own], kind="stable")),
            own_rows=torch.from_numpy(rows[own]),
            sent_rows=_row_counts(target[own], rows[own], num_ranks),
            received_rows=_row_counts(home[received], rows[received], num_ranks),
            received=received,
        )


def dispatch(rows: torch.Tensor, route: Route, group: dist.ProcessGroup, watch: CollectiveWatch) -> torch.Tensor:
    """Send the rows of own items to the ranks that encode them; returns the rows to encode here. Differentiable."""
    index = _row_index(route.own_rows, route.send_order).to(rows.device)
    (received,) = exchange_rows([rows.index_select(0, index)], route.sent_rows, route.received_rows, group, watch)
    return received


def combine(
    outputs: list[torch.Tensor], merges: list[int], route: Route, group: dist.ProcessGroup, watch: CollectiveWatch
) -> list[torch.Tensor]:
    """Send embeddings back to their items' home, there in the original order. Differentiable.

    Args:
        outputs: tensors [rows encoded here // merge, ...], in order of arrival.
        merges: per tensor, how many rows became one.
    """
    returned = []
    for merge in sorted(set(merges)):  # tensors that share a merge go in one function: one backward, one order
        which = [i for i, m in enumerate(merges) if m == merge]
        send, receive = ([n // merge for n in counts] for counts in (route.received_rows, route.sent_rows))
        arrived = exchange_rows([outputs[i] for i in which], send, receive, group, watch)
        # Where each row of the original order lies in what arrived: the inverse of the order of leaving.
        index = torch.argsort(_row_index(route.own_rows // merge, route.send_order))
        returned += [(i, rows.index_select(0, index.to(rows.device))) for i, rows in zip(which, arrived)]
    return [rows for _, rows in sorted(returned, key=lambda pair: pair[0])]


def exchange_rows(
    tensors: list[torch.Tensor],
    sent_rows: list[int],
    received_rows: list[int],
    group: dist.ProcessGroup,
    watch: CollectiveWatch,
) -> tuple[torch.Tensor, ...]:
    """All-to-all of rows: ``sent_rows[r]`` rows of every tensor go to rank r, in order. Gradients take the way back."""
    return _ExchangeRows.apply(group, watch, sent_rows, received_rows, *tensors)


class _ExchangeRows(torch.autograd.Function):
    """Several tensors in one function: their gradients come back together, so every rank exchanges in one order."""

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        watch: CollectiveWatch,
        sent_rows: list[int],
        received_rows: list[int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.route = (group, watch, sent_rows, received_rows)
        return tuple(_send(tensor, sent_rows, received_rows, group) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, watch, sent_rows, received_rows = ctx.route
        with watch.stage("the way back of the vision encoder's gradients"):
            return None, None, None, None, *(_send(g, received_rows, sent_rows, group) for g in gradients)


def _send(
    tensor: torch.Tensor, sent_rows: list[int], received_rows: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    received = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
    dist.all_to_all_single(received, tensor.contiguous(), received_rows, sent_rows, group=group)
    return received


def _row_counts(ranks: np.ndarray, rows: np.ndarray, num_ranks: int) -> list[int]:
    return np.bincount(ranks, weights=rows, minlength=num_ranks).astype(np.int64).tolist()


def _row_index(own_rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Index of every row when the items, each of ``own_rows[i]`` rows, are laid out in `order`."""
    ends = own_rows.cumsum(0)
    pieces = [torch.arange(int(ends[i] - own_rows[i]), int(ends[i])) for i in order.tolist()]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
