"""How the data workers of all ranks agree on a round: alone (`LocalCoordinator`) or over a store (`StoreCoordinator`).

A coordinator is made in the training process; each data worker opens its own channel from it after the fork.
"""

from __future__ import annotations

import os
import socket
import zlib
from typing import Any, Protocol

import torch.distributed as dist

from length_sort.store_channel import Channel, LocalChannel, StoreChannel
from length_sort.store_host import StoreHost

DEFAULT_TIMEOUT_S = 600.0


class Coordinator(Protocol):
    """What ODBGroupDataset needs of a coordinator."""

    rank: int
    world_size: int
    synchronized: bool
    """Whether the ranks agree with each other; without, each forms groups on its own and streams must be endless."""

    def begin_loader(self) -> None:
        """Called once per loader, on every rank, before its workers start: separates its rounds from older ones."""

    def open(self, slot: int, session: int) -> Channel:
        """The channel of a worker slot, opened in the worker; `session` counts its starts and restores."""


class LocalCoordinator:
    """For one rank, or for ranks with endless streams that need no equal counts (``--odb-sync none``)."""

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.synchronized = world_size == 1

    def begin_loader(self) -> None:
        pass

    def open(self, slot: int, session: int) -> LocalChannel:
        return LocalChannel()


class StoreCoordinator:
    """Agreement over a TCPStore in a process of its own, apart from every training collective.

    Store keys carry the rank set's name, the loader's generation, the worker slot and its session, so neither
    pipeline stages nor a rebuilt loader mix.
    """

    synchronized = True

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        name: str = "world",
        generation: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """
        Args:
            host: Address of the node on which the store runs.
            port: Its port.
            rank: This rank's index in the set of ranks that share the data.
            world_size: Number of those ranks.
            name: Name of the set of ranks.
            generation: Distinguishes coordinators made one after the other for the same set; alike on all ranks.
            timeout_s: Seconds without a sign of life after which a rank counts as lost.

        Raises:
            ValueError: rank, world size or timeout are out of range.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} in a world of {world_size}: no such rank. Give 0 to {world_size - 1}.")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: every rank would count as lost. Give a positive time.")
        self.host = host
        self.port = port
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._name = name
        self._generation = generation
        self._loader = 0

    def begin_loader(self) -> None:
        self._loader += 1

    def open(self, slot: int, session: int) -> StoreChannel:
        """
        Raises:
            ODBSyncError: the store cannot be reached.
        """
        return StoreChannel(
            self.host,
            self.port,
            rank=self.rank,
            world_size=self.world_size,
            slot=slot,
            prefix=f"odb/{self._name}/{self._generation}.{self._loader}.{session}/{slot}",
            timeout_s=self.timeout_s,
        )


# One host per set of ranks and training process; it ends with the process. Values: host, port, coordinators made.
_hosts: dict[tuple[int, ...], StoreHost | None] = {}
_addresses: dict[tuple[int, ...], tuple[str, int]] = {}
_generations: dict[tuple[int, ...], int] = {}


def store_coordinator(
    group: dist.ProcessGroup | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> StoreCoordinator:
    """The coordinator of a process group; its first rank starts the store host on the first call for these ranks.

    A collective over `group` (one small broadcast on the first call): every rank calls it the same number of times.
    It must not be called in a data worker.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise ValueError(
            "ODB over several ranks needs torch.distributed, which is not initialised: the ranks could not agree on "
            "group counts and would hang in the first all-reduce. Call init_process_group first, or pass coordinator=."
        )
    group = group if group is not None else dist.group.WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    if ranks not in _addresses:
        _addresses[ranks] = _start_host(ranks, rank, group)
    _generations[ranks] = _generations.get(ranks, -1) + 1
    host, port = _addresses[ranks]
    return StoreCoordinator(
        host,
        port,
        rank=rank,
        world_size=len(ranks),
        name=f"{zlib.crc32(repr(ranks).encode()):08x}",
        generation=_generations[ranks],
        timeout_s=timeout_s,
    )


def _start_host(ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> tuple[str, int]:
    address: list[Any] = [None]
    if rank == 0:
        try:
            _hosts[ranks] = host = StoreHost()
            address = [(_own_address(), host.port)]
        except RuntimeError as error:
            address = [str(error)]  # the other ranks wait in the broadcast and must fail with the same words
    dist.broadcast_object_list(address, src=ranks[0], group=group)
    if isinstance(address[0], str):
        raise RuntimeError(address[0])
    return address[0]


def _own_address() -> str:
    """An address of this node that the other ranks can reach."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 1))  # a datagram socket: picks the interface, sends nothing
        address = probe.getsockname()[0]
    # On the master's own node its name may resolve to a loopback address, which is of no use to other nodes.
    return master if address.startswith("127.") else address
