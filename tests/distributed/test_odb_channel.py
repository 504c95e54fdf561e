"""Agreement over a real store: rounds, replays, refused settings, and peers that are late, stuck or gone."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from length_sort.store_channel import ODBSyncError, StoreChannel
from length_sort.store_host import StoreHost
from tests.distributed.launch import free_port

_numbers = itertools.count()


@pytest.fixture(scope="module")
def host():
    host = StoreHost()
    yield host
    host.close()


@pytest.fixture
def world(host):
    """Opens a channel per rank under keys of its own; all are closed afterwards."""
    opened: list[StoreChannel] = []
    number = next(_numbers)

    def open_rank(rank: int, world_size: int, *, timeout_s: float = 20.0, slot: int = 3) -> StoreChannel:
        prefix = f"test/{number}/{slot}"
        channel = StoreChannel(
            "127.0.0.1", host.port, rank=rank, world_size=world_size, slot=slot, prefix=prefix, timeout_s=timeout_s
        )
        opened.append(channel)
        return channel

    yield open_rank
    for channel in opened:
        channel.close()


def together(actions: list[Callable[[], Any]]) -> list[Any]:
    """Results (or ODBSyncErrors) of actions that wait for each other."""

    def result(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ODBSyncError as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(result, actions))


def num_keys(host: StoreHost) -> int:
    return TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False).num_keys()


def test_all_ranks_get_the_same_outcome_and_old_rounds_are_deleted(world, host):
    channels = [world(rank, 4) for rank in range(4)]

    def run(rank: int) -> list[Any]:
        channels[rank].start({"token_budget": 8192})
        return [channels[rank].agree(f"{k}", [rank, k], lambda reports: reports) for k in range(20)]

    before = num_keys(host)
    results = together([lambda rank=rank: run(rank) for rank in range(4)])
    assert results == [[[[r, k] for r in range(4)] for k in range(20)]] * 4
    # Left: the start's keys, the last agreement's, the heartbeats.
    assert num_keys(host) - before <= 3 + 3 + 4


def test_replayed_rounds_are_answered_by_what_another_rank_published(world, host):
    """Rank 0 stands in round 10, rank 1 in round 8: rank 1 gets 8 and 9 from rank 0's saved outcomes."""
    ahead, behind = world(0, 2), world(1, 2)

    def run_behind() -> list[Any]:
        behind.start({})  # reports round 8 before or after rank 0 has published: both must work
        return [behind.agree(f"{k}", [1, k], lambda reports: sum(r[1] for r in reports)) for k in range(8, 13)]

    def run_ahead() -> list[Any]:
        ahead.publish("8", 88)
        ahead.publish("9", 99)
        ahead.start({})
        return [ahead.agree(f"{k}", [0, k], lambda reports: sum(r[1] for r in reports)) for k in range(10, 13)]

    before = num_keys(host)
    assert together([run_ahead, run_behind]) == [[20, 22, 24], [88, 99, 20, 22, 24]]
    assert num_keys(host) - before <= 2 * 3


def test_an_outcome_published_late_wakes_a_rank_that_waits_for_reports(world):
    waiting, publisher = world(1, 2), world(0, 2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(waiting.agree, "5", [1], lambda reports: None)
        time.sleep(0.3)
        publisher.publish("5", {"groups": 7})
        assert answer.result(timeout=10) == {"groups": 7}


def test_different_settings_are_refused_on_every_rank_by_name(world):
    channels = [world(rank, 3) for rank in range(3)]
    settings = [{"token_budget": 8192, "seed": 1}, {"token_budget": 4096, "seed": 1}, {"token_budget": 8192, "seed": 1}]
    errors = together([lambda r=r: channels[r].start(settings[r]) for r in range(3)])
    assert all("token_budget: 8192 on ranks [0, 2], 4096 on ranks [1]" in str(error) for error in errors)
    assert not any("seed" in str(error) for error in errors)


@pytest.mark.parametrize("larger_first", [True, False])
def test_different_world_sizes_are_refused_on_every_rank(world, larger_first):
    channels = {2: world(0, 2, timeout_s=4.0), 3: world(1, 3, timeout_s=4.0)}

    def start(world_size: int) -> None:
        time.sleep(0.3 * ((world_size == 3) != larger_first))
        channels[world_size].start({})

    errors = together([lambda: start(2), lambda: start(3)])
    assert all("world_size: 2 on ranks [0], 3 on ranks [1]" in str(error) for error in errors), errors


def test_two_processes_with_one_rank_are_refused(world):
    channels = [world(0, 2), world(0, 2)]
    errors = together([lambda c=c: c.start({}) for c in channels])
    assert all("only [0] of 2 ranks exist" in str(error) for error in errors)


def test_a_rank_that_reports_while_another_looks_is_not_taken_for_a_double(world, monkeypatch):
    early, late = world(0, 2), world(1, 2)
    looked = threading.Event()

    def look_slowly(name: str, reports_of=early._reports) -> Any:
        reports = reports_of(name)
        if not looked.is_set():
            looked.set()  # rank 1 reports now, after rank 0 has read the reports of this look
            time.sleep(0.5)
        return reports

    def start_late() -> None:
        assert looked.wait(timeout=10)
        late.start({})

    monkeypatch.setattr(early, "_reports", look_slowly)
    assert together([lambda: early.start({}), start_late]) == [None, None]


def test_peer_without_heartbeat_is_named_with_slot_and_round(world):
    here, gone = world(0, 3, timeout_s=1.5), world(1, 3, timeout_s=1.5)
    gone.close()  # rank 1's heart stops, rank 2 never started
    with pytest.raises(ODBSyncError, match=r"slot 3, round 7: rank 0 waits for missing ranks \[1, 2\]") as caught:
        here.agree("7", [0], lambda reports: None)
    assert caught.value.missing_ranks == (1, 2)
    assert "rank 2: not started" in str(caught.value) and "rank 1: no heartbeat" in str(caught.value)


def test_late_peer_is_waited_for_beyond_the_timeout(world):
    here, late = world(0, 2, timeout_s=1.0), world(1, 2, timeout_s=1.0)
    late.rest()  # evaluation: no batch is asked of the worker, its heart beats
    timer = threading.Timer(3.0, lambda: late.agree("0", [1], sum_of_first))
    timer.start()
    assert here.agree("0", [5], sum_of_first) == 6
    timer.join()


def test_stuck_peer_is_named_although_its_heart_beats(world):
    here, stuck = world(0, 2, timeout_s=1.5), world(1, 2, timeout_s=1.5)
    stuck.progress()  # is producing a batch, and reads no sample from here on
    with pytest.raises(ODBSyncError, match=r"missing ranks \[1\] \(rank 1: alive, but no sample read for"):
        here.agree("0", [5], sum_of_first)


def sum_of_first(reports: list[list[int]]) -> int:
    return sum(report[0] for report in reports)


def test_killed_store_is_an_error_that_names_its_host():
    host = StoreHost()
    channel = StoreChannel("127.0.0.1", host.port, rank=1, world_size=2, slot=0, prefix="x", timeout_s=5.0)
    timer = threading.Timer(0.5, host.close)
    timer.start()
    with pytest.raises(ODBSyncError, match=r"rank 1 cannot reach the store at .* in round 4") as caught:
        channel.agree("4", [1], sum_of_first)
    assert caught.value.missing_ranks == (0,)
    channel.close()


def test_unreachable_store_is_an_error_at_the_start():
    with pytest.raises(ODBSyncError, match=r"cannot reach the store at 127\.0\.0\.1:.* at its start"):
        StoreChannel("127.0.0.1", free_port(), rank=1, world_size=2, slot=0, prefix="x", timeout_s=1.0)


def test_host_serves_512_clients_within_1024_descriptors(host):
    # Bare connections: torch's client looks up every address, which takes minutes where the name server is slow.
    with contextlib.ExitStack() as connections:
        for _ in range(511):
            connections.enter_context(socket.create_connection(("127.0.0.1", host.port), timeout=10))
        assert num_keys(host) >= 0, "the host must still answer a client"
        descriptors = Path(f"/proc/{host.pid}/fd")
        if not descriptors.exists():
            pytest.skip("descriptors of another process can be counted on Linux only")
        assert 511 <= len(list(descriptors.iterdir())) < 1024
