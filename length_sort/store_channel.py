"""One worker's channel to its peers: idempotent agreements over a TCPStore, with errors that name who is missing."""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from torch.distributed import DistNetworkError, DistStoreError

from length_sort.odb_heartbeat import Heartbeat, HeartbeatWatch
from length_sort.store_client import StoreClient

Decide = Callable[[Sequence[Any]], Any]
"""Makes the outcome of the ranks' reports, [num_ranks]; the same on every rank."""

# Seconds before a look at whether an outcome is there. The store takes one rank's requests at a time: the first look
# comes when those that are still missing can have reported, and later ones less often the more ranks look. A round
# that waits for a late rank costs the store little: looks then follow at a share of the time waited so far.
_SHORTEST_POLL_S = 0.002
_FIRST_POLL_PER_MISSING_RANK_S = 0.0001
_POLL_PER_RANK_S = 0.00003
_POLL_SHARE = 0.1
_LONGEST_POLL_S = 0.25

_DecideByRank = Callable[[Mapping[int, Any]], Any]
_CheckByRank = Callable[[Mapping[int, Any], int], list[str]]
"""Differences seen in the reports so far, of which there were at least as many as the number says."""


class ODBSyncError(RuntimeError):
    """Ranks could not agree. Built from one string, so that it can cross from a data worker to the trainer."""

    def __init__(self, message: str, *, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class Channel(Protocol):
    """What the rounds of one worker slot need."""

    def start(self, settings: Mapping[str, Any]) -> None:
        """Compare the settings with those of the other ranks."""

    def agree(self, name: str, report: Any, decide: Decide) -> Any:
        """Hand in this rank's report; returns what `decide` makes of all ranks' reports. JSON values."""

    def publish(self, name: str, outcome: Any) -> None:
        """Make the outcome of an agreement of an earlier run known to ranks that stand behind."""

    def progress(self) -> None:
        """The worker has got on with producing a batch."""

    def rest(self) -> None:
        """The worker waits for its training process."""

    def close(self) -> None:
        """Give up the connection."""


class LocalChannel:
    """One rank agrees with itself."""

    def start(self, settings: Mapping[str, Any]) -> None:
        pass

    def agree(self, name: str, report: Any, decide: Decide) -> Any:
        return decide([report])

    def publish(self, name: str, outcome: Any) -> None:
        pass

    def progress(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class StoreChannel:
    """Agreements of one worker slot with the same slot on the other ranks.

    Each rank appends its report and raises a counter; the one that completes the count makes the outcome known;
    all read it. A known outcome is answered at once, whoever made it known, so a rank that replays a round after a
    resume needs nobody. An agreement's keys are deleted when the next one completes: everyone has read it by then.
    """

    def __init__(
        self, host: str, port: int, *, rank: int, world_size: int, slot: int, prefix: str, timeout_s: float
    ) -> None:
        """
        Raises:
            ODBSyncError: the store cannot be reached.
        """
        self._address = f"{host}:{port}"
        self._rank = rank
        self._world_size = world_size
        self._slot = slot
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._look_every_s = min(timeout_s / 5, 1.0)
        self._last_agreed = ""
        self._replayed: list[str] = []
        try:
            self._store = StoreClient(host, port, timeout_s=timeout_s)
        except (DistNetworkError, DistStoreError) as error:
            self._fail_unreachable("at its start", error)
        self._heartbeat = Heartbeat(self._store.store, self._beat_key(rank), timeout_s=timeout_s)
        atexit.register(self.close)

    def start(self, settings: Mapping[str, Any]) -> None:
        """
        Raises:
            ODBSyncError: a rank has other settings, or does not start within the timeout.
        """
        report = {"world_size": self._world_size, **settings}

        def compare(reports: Mapping[int, Any]) -> list[str]:
            return self._compare(reports, self._world_size)

        outcome, _ = self._agree("start", report, compare, check=self._compare)
        self._refuse_differences(outcome["value"])

    def agree(self, name: str, report: Any, decide: Decide) -> Any:
        """
        Raises:
            ODBSyncError: a rank that has not reported shows no life for the timeout, or the store is gone.
        """
        in_order = range(self._world_size)
        outcome, completed_here = self._agree(name, report, lambda reports: decide([reports[r] for r in in_order]))
        if outcome["live"]:
            # Every rank has reported, so all have read what was agreed before.
            outdated = [*self._replayed, *([self._last_agreed] if completed_here and self._last_agreed else [])]
            if outdated:
                self._guarded(name, lambda: self._delete(outdated))
            self._replayed = []
            self._last_agreed = name
        else:
            self._replayed.append(name)
        return outcome["value"]

    def publish(self, name: str, outcome: Any) -> None:
        self._replayed.append(name)
        self._guarded(name, lambda: self._store.set(self._key(name, "outcome"), _encode(outcome, live=False)))

    def progress(self) -> None:
        self._heartbeat.progress()

    def rest(self) -> None:
        self._heartbeat.rest()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._heartbeat.stop()
        self._store.close()

    # -- one agreement -----------------------------------------------------------------------------------------

    def _agree(
        self, name: str, report: Any, decide: _DecideByRank, *, check: _CheckByRank | None = None
    ) -> tuple[Any, bool]:
        """The outcome, and whether this rank completed it. `check` sees the reports so far at times while waiting."""
        self._heartbeat.rest()
        result = self._guarded(name, lambda: self._report_and_wait(name, report, decide, check))
        self._heartbeat.progress()
        return result

    def _report_and_wait(
        self, name: str, report: Any, decide: _DecideByRank, check: _CheckByRank | None
    ) -> tuple[Any, bool]:
        outcome_key = self._key(name, "outcome")
        # Once an agreement was live, every rank has caught up, and no later outcome can be known beforehand.
        known = None if self._last_agreed else self._store.look(outcome_key)
        if known is not None:
            return json.loads(known), False
        # Requests of one connection are served in order: whoever sees the full count sees every report.
        line = f"{self._rank} {json.dumps(report, separators=(',', ':'))}\n"
        self._store.append(self._key(name, "reports"), line)
        num_missing = self._world_size - self._store.add(self._key(name, "count"), 1)
        if num_missing == 0:
            outcome = _encode(decide(self._reports(name)), live=True)
            self._store.set(outcome_key, outcome)
            return json.loads(outcome), True
        return json.loads(self._wait(name, outcome_key, num_missing, check)), False

    def _wait(self, name: str, outcome_key: str, num_missing: int, check: _CheckByRank | None) -> bytes:
        # Not the store's own wait: when its time is up it logs a warning and looks up the host's name, which can take
        # seconds, and until then the heartbeat could not use the connection.
        watch = HeartbeatWatch(self._store, timeout_s=self._timeout_s)
        shortest_poll_s = max(_SHORTEST_POLL_S, _POLL_PER_RANK_S * self._world_size)
        pause_s = max(shortest_poll_s, _FIRST_POLL_PER_MISSING_RANK_S * num_missing)
        start = last_look = time.monotonic()
        while True:
            time.sleep(min(pause_s, _LONGEST_POLL_S))
            outcome = self._store.look(outcome_key)
            if outcome is not None:
                return outcome
            pause_s = max(shortest_poll_s, _POLL_SHARE * (time.monotonic() - start))
            if time.monotonic() - last_look < self._look_every_s:
                continue
            last_look = time.monotonic()
            if self._heartbeat.orphaned:
                raise ODBSyncError(f"ODB worker slot {self._slot}: the training process of rank {self._rank} is gone.")
            num_reported = self._store.add(self._key(name, "count"), 0)  # before the reports, which then hold them all
            reports = self._reports(name)
            if check is not None:
                self._refuse_differences(check(reports, num_reported))
            missing = [rank for rank in range(self._world_size) if rank not in reports]
            reasons = watch.silent([self._beat_key(rank) for rank in missing])
            lost = {rank: reason for rank, reason in zip(missing, reasons) if reason}
            if lost and self._store.look(outcome_key) is None:
                raise ODBSyncError(
                    f"ODB worker slot {self._slot}, round {name}: rank {self._rank} waits for missing ranks "
                    f"{sorted(lost)} ({'; '.join(f'rank {rank}: {reason}' for rank, reason in lost.items())}). Look at "
                    "their logs for the first error; if they only read slowly, raise --odb-timeout-seconds.",
                    missing_ranks=sorted(lost),
                )

    def _reports(self, name: str) -> dict[int, Any]:
        lines = (self._store.look(self._key(name, "reports")) or b"").decode().splitlines()
        return {int(rank): json.loads(report) for rank, report in (line.split(" ", 1) for line in lines)}

    def _compare(self, settings: Mapping[int, Mapping[str, Any]], num_reported: int) -> list[str]:
        differences = _differences(settings)
        # Called on an incomplete set while waiting; a count that is full without every rank has one twice.
        if num_reported >= self._world_size > len(settings):
            differences.append(f"rank: only {sorted(settings)} of {self._world_size} ranks exist, some of them twice")
        return differences

    def _refuse_differences(self, differences: Sequence[str]) -> None:
        if differences:
            raise ODBSyncError(
                f"ODB worker slot {self._slot}: the ranks do not run alike ({'; '.join(differences)}). Their "
                "rounds would not match. Give every rank the same settings and a checkpoint of the same step."
            )

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            for part in ("outcome", "reports", "count"):
                self._store.delete(self._key(name, part))

    def _guarded(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return self._store.run(action)
        except (DistNetworkError, DistStoreError) as error:
            self._fail_unreachable(f"in round {name}", error)

    def _fail_unreachable(self, when: str, error: Exception) -> NoReturn:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ODBSyncError(
            f"ODB worker slot {self._slot}: rank {self._rank} cannot reach the store at {self._address} {when} "
            f"({reason}). Its host is a process of rank 0, which is missing, was killed or hangs; look at that rank's "
            "log, and check that its node is well and accepts connections.",
            missing_ranks=[0],
        ) from None

    def _key(self, name: str, part: str) -> str:
        return f"{self._prefix}/{name}/{part}"

    def _beat_key(self, rank: int) -> str:
        return f"{self._prefix}/beat/{rank}"


def _encode(value: Any, *, live: bool) -> str:
    return json.dumps({"live": live, "value": value}, separators=(",", ":"))


def _differences(settings: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What the ranks' settings differ in, e.g. ``["seed: 1 on ranks [0, 2], 7 on ranks [1]"]``."""
    names = sorted({name for values in settings.values() for name in values})
    differing = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in sorted(settings.items()):
            ranks_by_value.setdefault(repr(values.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            differing.append(f"{name}: " + ", ".join(f"{v} on ranks {r}" for v, r in ranks_by_value.items()))
    return differing
