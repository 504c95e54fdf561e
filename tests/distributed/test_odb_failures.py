"""A rank that is killed or frozen in a round: an error on all others within the timeout, and no process left over."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon import WorkerConfig

from aiak_ext import get_savable_loader
from length_sort.coordinator import StoreCoordinator
from length_sort.store_channel import ODBSyncError
from length_sort.store_host import StoreHost
from tests.odb_pipeline import odb_batches

WORLD_SIZE = 3
TIMEOUT_S = 3.0
PROCESSES = ("store host", "worker", "victim's worker")

# Ranks are forked from the test, which has imported everything; the store host is never forked.
context = multiprocessing.get_context("fork")

# They time how soon ranks notice a loss, so nothing else may take their processors.
pytestmark = pytest.mark.alone


def train(rank: int, port: Any, messages: Any) -> None:
    """A rank's endless loop over batches; rank 0 hosts the store."""
    torch.set_num_threads(1)
    if rank == 0:
        host = StoreHost(linger_s=TIMEOUT_S)
        port.value = host.port
        messages.put(("store host", rank, host.pid))
    while port.value == 0:
        time.sleep(0.01)
    coordinator = StoreCoordinator("127.0.0.1", port.value, rank=rank, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    worker_config = WorkerConfig(rank=rank, world_size=WORLD_SIZE, num_workers=2)
    loader = get_savable_loader(odb_batches(worker_config, coordinator, repeat=True))
    iterator = iter(loader)
    for _ in range(worker_config.num_workers):  # a batch of each: a worker that still starts is not in a round
        next(iterator)
    for worker in loader._iterator._workers:
        messages.put(("worker" if rank != 1 else "victim's worker", rank, worker.pid))
    messages.put(("running", rank, None))
    try:
        while True:
            next(iterator)
            time.sleep(0.005)
    except ODBSyncError as error:
        messages.put(("error", rank, str(error)))
        raise SystemExit(3) from error


class World:
    """The ranks of a run, and what they said."""

    def __init__(self) -> None:
        self._port, self._messages = context.Value("i", 0), context.Queue()
        self.said: list[tuple[str, int, Any]] = []
        self.ranks = [
            context.Process(target=train, args=(rank, self._port, self._messages)) for rank in range(WORLD_SIZE)
        ]
        for rank in self.ranks:
            rank.start()

    def wait_for(self, kind: str, ranks: set[int], *, timeout_s: float) -> dict[int, Any]:
        deadline = time.monotonic() + timeout_s
        while missing := ranks - {rank for what, rank, _ in self.said if what == kind}:
            try:
                self.said.append(self._messages.get(timeout=max(deadline - time.monotonic(), 0.01)))
            except queue.Empty:
                raise AssertionError(f"no {kind!r} from ranks {missing} within {timeout_s} s: {self.said}") from None
        return {rank: value for what, rank, value in self.said if what == kind}

    def pids(self, *kinds: str) -> list[int]:
        return [pid for what, _, pid in self.said if what in kinds]

    def end(self) -> None:
        """Nothing of a failed test stays behind either."""
        for pid in [*(rank.pid for rank in self.ranks), *self.pids(*PROCESSES)]:
            if alive([pid]):
                os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.join(10)


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that run; a zombie waiting for its parent does not."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z":
                running.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return running


@pytest.fixture
def world():
    world = World()
    yield world
    world.end()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="watches processes through /proc")
@pytest.mark.parametrize("victim", ["rank 1 is killed", "rank 0, which hosts the store, is killed", "rank 1 freezes"])
def test_others_raise_and_nothing_is_left_over(world, victim):
    world.wait_for("running", {0, 1, 2}, timeout_s=60)
    lost = int(victim.split()[1].rstrip(","))
    if "freezes" in victim:
        for pid in world.pids("victim's worker"):
            os.kill(pid, signal.SIGSTOP)
    else:
        os.kill(world.ranks[lost].pid, signal.SIGKILL)

    others = {0, 1, 2} - {lost}
    errors = world.wait_for("error", others, timeout_s=TIMEOUT_S + 12)
    for rank in others:
        assert f"rank {rank} waits for missing ranks [{lost}]" in errors[rank]
        assert "ODB worker slot" in errors[rank] and "round" in errors[rank]
        world.ranks[rank].join(20)
        assert world.ranks[rank].exitcode == 3

    if "freezes" in victim:
        world.ranks[1].kill()
        for pid in world.pids("victim's worker"):
            os.kill(pid, signal.SIGCONT)
    assert_nothing_left(world)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="watches processes through /proc")
def test_frozen_store_host_is_an_error_on_every_rank(world):
    """torch's own client would wait for its answer for ever."""
    world.wait_for("running", {0, 1, 2}, timeout_s=60)
    (host,) = world.pids("store host")
    os.kill(host, signal.SIGSTOP)
    errors = world.wait_for("error", {0, 1, 2}, timeout_s=TIMEOUT_S + 12)
    for rank, error in errors.items():
        assert f"rank {rank} cannot reach the store at 127.0.0.1" in error
        assert "in round" in error and "has not answered for 3.0 s" in error and "process of rank 0" in error
        world.ranks[rank].join(20)
        assert world.ranks[rank].exitcode == 3
    os.kill(host, signal.SIGCONT)
    assert_nothing_left(world)


def assert_nothing_left(world: World) -> None:
    deadline = time.monotonic() + 30
    while (left := alive(world.pids(*PROCESSES))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes {left} outlive the run"
