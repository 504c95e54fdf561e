"""Prefetch iterator: order, threads, errors, and nothing left running."""

from __future__ import annotations

import threading

import pytest

from data_balance import PrefetchMicroBatchIterator


def test_first_step_on_the_caller_and_the_next_while_it_is_used() -> None:
    threads: list[threading.Thread] = []
    next_started = threading.Event()

    def prepare(step: int) -> int:
        threads.append(threading.current_thread())
        if step == 1:
            next_started.set()
        return step * 10

    steps = PrefetchMicroBatchIterator(prepare, timeout_s=10)
    assert next(steps).value == 0
    assert next_started.wait(5), "step 1 has to start while step 0 is used"
    assert [next(steps).value for _ in range(3)] == [10, 20, 30]
    steps.close()
    assert threads[0] is threading.main_thread() and threads[1] is not threading.main_thread()
    assert not any(t.name.startswith("data-balance") for t in threading.enumerate())


def test_end_and_errors_surface_in_next() -> None:
    def prepare(step: int) -> int:
        if step == 1:
            raise ValueError("broken shard")
        return step

    steps = PrefetchMicroBatchIterator(prepare, timeout_s=10)
    next(steps)
    steps.wait()  # the failure stays for next()
    with pytest.raises(ValueError, match="broken shard"):
        next(steps)

    ends = PrefetchMicroBatchIterator(lambda step: step if step < 3 else next(iter(())), timeout_s=10)
    assert [p.value for p in ends] == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(ends)


def test_a_loader_that_does_not_answer_is_reported() -> None:
    release = threading.Event()
    steps = PrefetchMicroBatchIterator(lambda step: step == 0 or release.wait(20), timeout_s=0.2)
    next(steps)
    with pytest.raises(TimeoutError, match=r"step 1 was not ready 0\.2 s"):
        next(steps)
    release.set()


def test_hidden_time_and_disabled_prefetch() -> None:
    plain = PrefetchMicroBatchIterator(lambda step: threading.current_thread(), enabled=False)
    assert [next(plain).value for _ in range(3)] == [threading.main_thread()] * 3

    done = threading.Event()
    steps = PrefetchMicroBatchIterator(lambda step: done.set() if step else None, first_step=0, timeout_s=10)
    next(steps)
    assert done.wait(5)
    steps.wait()
    prefetched = next(steps)
    assert prefetched.wait_s >= 0 and prefetched.prepare_s >= 0
    steps.close()
