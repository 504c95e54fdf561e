"""Real processes for a distributed test: gloo on a free port, results back, failure when any child fails."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """A test run that is killed leaves no ranks behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _child(
    fn: Callable[..., Any], rank: int, world_size: int, port: int, timeout_s: float, results: Any, args: tuple
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    os.setpgid(0, 0)  # with all that it starts: `run_ranks` ends the group
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    gc.freeze()  # torch and Megatron: half a million objects that every start of a loader would walk
    multiprocessing.set_start_method("fork", force=True)  # data workers are forked, as in a process of torchrun's
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
        result = fn(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    results.put((rank, result, None))


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in `world_size` spawned processes; results in rank order.

    `fn` must be a module-level function. Raises AssertionError with every failed child's traceback, or naming
    the ranks that had not answered after `timeout_s`. No child outlives the call.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = free_port()
    children = [
        context.Process(target=_child, args=(fn, rank, world_size, port, timeout_s, results, args))
        for rank in range(world_size)
    ]
    answers: dict[int, tuple[Any, str | None]] = {}
    try:
        for child in children:
            child.start()
        deadline = time.monotonic() + timeout_s
        while len(answers) < world_size and time.monotonic() < deadline:
            try:
                rank, result, error = results.get(timeout=0.2)
                answers[rank] = (result, error)
            except queue.Empty:
                died = [r for r, c in enumerate(children) if c.exitcode not in (None, 0) and r not in answers]
                if died:
                    break
            if any(error for _, error in answers.values()):
                deadline = min(deadline, time.monotonic() + 5)  # peers of a failed rank may say more
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in sorted(answers.items()) if error]
        missing = [rank for rank in range(world_size) if rank not in answers]
        exit_codes = {rank: children[rank].exitcode for rank in missing}
        assert not errors, "\n".join(errors)
        assert not missing, f"no answer from ranks {missing} within {timeout_s} s (exit codes {exit_codes})"
        for child in children:
            child.join(timeout=max(deadline - time.monotonic(), 10))
        assert [child.exitcode for child in children] == [0] * world_size
    finally:
        for child in children:
            if child.pid is not None:
                child.kill()
                with suppress(ProcessLookupError):  # nothing that it started is left
                    os.killpg(child.pid, signal.SIGKILL)
                child.join()
    return [answers[rank][0] for rank in range(world_size)]
