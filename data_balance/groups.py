"""Process groups of our own, and errors that say which rank a collective is waiting for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

#: How long a rank that saw a collective fail waits for its peers to report the same, before it names who did
#: not.
REPORT_GRACE_S = 3.0

_instances: Counter[str] = Counter()


class ExchangeError(RuntimeError):
    """A collective of the data balance failed or timed out; the message names the ranks that did not take part."""


def group_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of `group` in group order; of the world for None."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def own_gloo_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """A Gloo group of the same ranks for host memory, apart from every collective of the training.

    Only the members call this. The parent's timeout is not inherited, so it is given.
    """
    return dist.new_group(
        group_ranks(group), use_local_synchronization=True, backend="gloo", timeout=timedelta(seconds=timeout_s)
    )


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors of a collective on `group` live: the current CUDA device under NCCL, else the host."""
    if dist.get_backend(group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class CollectiveWatch:
    """Turns the failure of a collective into an error that names ranks.

    A Gloo error or timeout names nobody. So every rank writes to the job's store which stage it has entered,
    and whether it failed there; after a failure, who wrote neither is named. One small write per stage.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._ranks = group_ranks(group)
        self._rank = dist.get_rank()
        prefix = f"data_balance/{name}/{'_'.join(map(str, self._ranks))}"
        _instances[prefix] += 1  # members make their watches in the same order
        self._store = dist.PrefixStore(f"{prefix}/{_instances[prefix]}", _get_default_store())
        self._stage = 0

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Everything inside is one stage; `what` describes it in the error.

        Raises:
            ExchangeError: a collective inside failed, with the ranks that were not there.
        """
        self._stage += 1
        started = time.monotonic()
        try:
            self._store.set(str(self._rank), f"{self._stage} in")
            yield
        except ExchangeError:
            raise
        except RuntimeError as error:  # torch's collectives and store raise this or a subclass
            seconds = time.monotonic() - started
            raise ExchangeError(f"{what} failed after {seconds:.1f} s: {self._explain()} ({error})") from error

    def _explain(self) -> str:
        try:
            self._store.set(str(self._rank), f"{self._stage} failed")
            deadline = time.monotonic() + REPORT_GRACE_S
            missing = [rank for rank in self._ranks if rank != self._rank]
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._accounted_for(rank)]
                if missing:
                    time.sleep(0.1)
        except RuntimeError:
            return "the job's store does not answer; the process that hosts it (rank 0's, or the launcher) has gone"
        if missing:
            return f"rank(s) {missing} did not take part or have died; look at their logs first"
        return "every rank reports it; look for a network fault or different settings between ranks"

    def _accounted_for(self, rank: int) -> bool:
        """Whether `rank` has failed at this stage too, or is past it (it then fails at a later one)."""
        if not self._store.check([str(rank)]):
            return False
        stage, state = self._store.get(str(rank)).decode().split()
        return int(stage) > self._stage or (int(stage) == self._stage and state == "failed")
