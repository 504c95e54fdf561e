"""StepRecorder in one process: figures, reruns, collectives, files; and the summary of a run."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from aiak_ext.metrics import StepRecord, StepRecorder
from aiak_ext.run_summary import read_records, summarize
from aiak_ext.step_timing import make_wait_timer


def add(recorder: StepRecorder, **changes) -> None:
    batch = {"num_samples": 2, "num_tokens": 30, "num_token_slots": 40, "cost": 5.0}
    recorder.add_batch(**{**batch, **changes})


def test_micro_batches_of_a_step_add_up(tmp_path):
    with StepRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.start_step()
        add(recorder, deferred_samples=7, max_deferral_age=3, counters={"pools": 1, "skipped": 4})
        add(recorder, num_tokens=10, deferred_samples=5, max_deferral_age=2, counters={"pools": 2})
        recorder.end_step({"loss": 1.5})
    (record,) = read_records(tmp_path)
    assert (record.num_samples, record.num_tokens, record.num_token_slots, record.cost) == (4, 40, 80, 10.0)
    assert (record.deferred_samples, record.max_deferral_age) == (5, 3)
    assert record.counters == {"pools": 2, "skipped": 4}
    assert record.scalars == {"loss": 1.5}
    assert record.padding == 0.5
    assert (record.cost_mean, record.cost_max, record.cost_max_over_mean) == (10.0, 10.0, 1.0)


def test_a_rerun_of_the_step_counts_its_batches_once(tmp_path):
    with StepRecorder(tmp_path, tensorboard=False) as recorder:
        for _ in range(2):
            recorder.start_step()
            add(recorder)
        recorder.end_step()
    (record,) = read_records(tmp_path)
    assert record.num_samples == 2


class Clock:
    """Stands in for the `time` module: time passes only when told to."""

    def __init__(self) -> None:
        self.wall_s = self.busy_s = 0.0

    def compute(self, seconds: float) -> None:
        self.wall_s += seconds
        self.busy_s += seconds

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.busy_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in ("aiak_ext.metrics", "aiak_ext.step_timing"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


def test_waiting_is_counted_and_computing_is_not(clock):
    timer = make_wait_timer(torch.device("cpu"))
    for _ in range(2):
        clock.wait(5.0)  # outside the section
        with timer.measure():
            clock.compute(2.0)
            clock.wait(3.0)
    assert timer.pop_seconds() == 6.0
    assert timer.pop_seconds() == 0.0


def test_a_steps_times(tmp_path, clock):
    calls = []

    def finalize(model, num_tokens=None):
        calls.append((model, num_tokens))
        clock.compute(1.0)
        clock.wait(4.0)
        return "done"

    with StepRecorder(tmp_path, tensorboard=False) as recorder:
        timed = recorder.timed_grad_sync(finalize)
        for _ in range(2):
            recorder.start_step()
            with recorder.data_wait():
                clock.wait(2.0)
            clock.compute(8.0)
            assert timed(["model"], num_tokens=3) == "done"
            recorder.end_step()
            clock.wait(100.0)  # a checkpoint between steps
    assert calls == [(["model"], 3)] * 2
    for record in read_records(tmp_path):
        assert (record.step_time_s, record.data_time_s, record.grad_sync_wait_s) == (15.0, 2.0, 4.0)


@pytest.fixture
def one_rank_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("log_interval", "expected"), [(1, 12), (4, 3), (5, 3)])
def test_one_collective_per_logging_interval(tmp_path, monkeypatch, one_rank_group, log_interval, expected):
    """The recorder's whole cost on the wire: one all-gather of three float64 per step of the interval."""
    sizes = []
    all_gather = dist.all_gather

    def counted(outputs, tensor, group=None):
        sizes.append(tensor.numel() * tensor.element_size())
        return all_gather(outputs, tensor, group=group)

    def refused(*args, **kwargs):
        raise AssertionError("a collective besides the all-gather")

    monkeypatch.setattr(dist, "all_gather", counted)
    for name in ("all_reduce", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, refused)
    with StepRecorder(tmp_path, tensorboard=False, log_interval=log_interval) as recorder:
        for _ in range(12):
            recorder.start_step()
            add(recorder)
            recorder.end_step()
    assert len(sizes) == expected
    assert sum(sizes) == 12 * 3 * 8
    records = read_records(tmp_path)
    assert [record.emitted_samples for record in records] == list(range(2, 26, 2))


def test_emitted_counters_continue_after_a_resume_and_the_later_record_counts(tmp_path):
    with StepRecorder(tmp_path, tensorboard=False, log_interval=10) as recorder:
        for _ in range(3):
            recorder.start_step()
            add(recorder)
            recorder.end_step()
        state = recorder.state_dict()
        recorder.start_step()
        add(recorder, num_samples=100)  # lost: the run is resumed from the state before
        recorder.end_step()
    assert state == {"step": 3, "emitted_samples": 6, "emitted_tokens": 90}
    with StepRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.load_state_dict(state)
        recorder.start_step()
        add(recorder)
        recorder.end_step()
    records = read_records(tmp_path)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert records[-1].emitted_samples == 8


def test_a_run_that_breaks_off_still_writes_its_own_records(tmp_path, monkeypatch):
    def gone(*args, **kwargs):
        raise AssertionError("the peer is gone: nothing may be communicated")

    monkeypatch.setattr(StepRecorder, "_gather_figures", gone)
    with (
        pytest.raises(RuntimeError, match="broken"),
        StepRecorder(tmp_path, tensorboard=False, log_interval=9) as rec,
    ):
        rec.start_step()
        add(rec)
        rec.end_step()
        raise RuntimeError("broken")
    (record,) = read_records(tmp_path)
    assert record.num_samples == 2
    assert record.cost_max is None
    assert record.cost_max_over_mean is None


def test_tensorboard_holds_the_last_step_of_each_interval(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with StepRecorder(tmp_path, log_interval=2) as recorder:
        for loss in (4.0, 3.0, 2.0):
            recorder.start_step()
            add(recorder, counters={"pools": 1})
            recorder.end_step({"loss": loss})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [3.0, 2.0]
    assert [event.value for event in events.Scalars("data/emitted_samples")] == [4.0, 6.0]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert events.Scalars("worker/pools")[0].value == 1.0
    assert "data/max_deferral_age" in events.Tags()["scalars"]


def test_user_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="log_interval is 0"):
        StepRecorder(tmp_path, log_interval=0)
    with pytest.raises(ValueError, match="no steps_rank"):
        read_records(tmp_path / "nothing")
    with StepRecorder(tmp_path, tensorboard=False) as recorder, pytest.raises(ValueError, match="start_step"):
        recorder.end_step()


def test_summary_of_two_ranks():
    def record(step, rank, seconds, wait, cost, tokens):
        return StepRecord(
            step=step,
            rank=rank,
            step_time_s=seconds,
            grad_sync_wait_s=wait,
            num_samples=1,
            num_tokens=tokens,
            num_token_slots=10,
            cost=cost,
        )

    records = [
        record(0, 0, 100.0, 50.0, 4.0, 10),  # warm-up: its time does not count, its cost does
        record(0, 1, 100.0, 0.0, 8.0, 10),
        record(1, 0, 2.0, 1.0, 3.0, 5),
        record(1, 1, 2.0, 0.0, 3.0, 5),
        record(2, 0, 2.0, 0.0, 6.0, 10),
        record(2, 1, 2.0, 1.0, 2.0, 10),
    ]
    summary = summarize(records)
    assert summary.samples_per_s == 4 / 4.0
    assert summary.wait_share == 2 / 8
    assert summary.step_efficiency == pytest.approx((6 + 3 + 4) / (8 + 3 + 6))
    assert summary.padding == pytest.approx(1 - 50 / 60)
    assert (summary.num_samples, summary.num_steps) == (6, 3)
    with pytest.raises(ValueError, match="3 of them are warm-up"):
        summarize(records, warmup_steps=3)


def test_records_are_plain_json(tmp_path):
    with StepRecorder(tmp_path, tensorboard=False, device=torch.device("cpu")) as recorder:
        recorder.start_step()
        add(recorder)
        recorder.end_step()
    line = (tmp_path / "steps_rank00000.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["step"] == 0


def test_on_cuda_the_stream_is_measured_and_waited_for_once(monkeypatch):
    """Stand-in events, since most machines have no CUDA device: a section's time is what lies between its events."""
    clock = iter([10.0, 25.0, 40.0, 70.0])
    synchronized = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time_ms = next(clock)

        def synchronize(self) -> None:
            synchronized.append(self.time_ms)

        def elapsed_time(self, end: Event) -> float:
            return end.time_ms - self.time_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = make_wait_timer(torch.device("cuda"))
    for _ in range(2):
        with timer.measure():
            pass
    assert synchronized == []
    assert timer.pop_seconds() == pytest.approx(0.045)
    assert synchronized == [70.0]
    assert timer.pop_seconds() == 0.0
