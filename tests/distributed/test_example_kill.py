"""A run that is killed while it writes a checkpoint resumes from the one before, to the losses of a straight run."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.llava_ov.checkpoint_files import latest_checkpoint
from tests.demo_data import small_data_set
from tests.training_run import CPU, arguments, one_rank

pytestmark = [pytest.mark.slow, pytest.mark.megatron_in_process]

STEPS = 3
START_TIMEOUT_S = 120
KILLED = {
    "while a tensor is written": ("--save-interval", "1"),
    "while a tensor is written in the background": ("--save-interval", "1", "--async-save"),
}


def run_until_it_hangs_in_the_second_save(output: Path, data: Path, flags: tuple[str, ...]) -> None:
    """In a process group of its own, so that one signal ends this process and its writers alike."""
    os.setsid()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from examples.llava_ov.training import Trainer

    write_item = filesystem_async._write_item  # runs in forked writers, which inherit the replacement

    @functools.wraps(write_item)  # Megatron looks at its signature
    def half_an_item(*args: Any, **kwargs: Any) -> Any:
        stream = next(argument for argument in args if hasattr(argument, "write"))
        if "iter_0000002" in stream.name:
            stream.write(b"half")
            stream.flush()
            (output / "writing").touch()
            time.sleep(START_TIMEOUT_S)
        return write_item(*args, **kwargs)

    filesystem_async._write_item = half_an_item
    with one_rank(), Trainer(arguments(output, *flags, data=data), CPU) as trainer:
        trainer.train()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Iterator[dict[str, Path]]:
    """What the killed runs left, by name; they run beside each other, since starting takes most of the time."""
    context = multiprocessing.get_context("spawn")
    directories, children = {}, {}
    for name, flags in KILLED.items():
        directories[name] = tmp_path_factory.mktemp("killed")
        flags = (*flags, "--train-iters", str(STEPS), "--save", str(directories[name] / "checkpoints"))
        children[name] = context.Process(
            target=run_until_it_hangs_in_the_second_save, args=(directories[name], small_data_set(), flags)
        )
    try:
        for child in children.values():
            child.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        for name, child in children.items():
            while not (directories[name] / "writing").exists():
                assert child.is_alive() and time.monotonic() < deadline, f"not killed {name}: it never came there"
                time.sleep(0.05)
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
            assert child.exitcode == -signal.SIGKILL
        yield directories
    finally:
        for child in children.values():
            if child.is_alive():
                os.killpg(child.pid, signal.SIGKILL)
                child.join()


@pytest.mark.parametrize("name", KILLED)
def test_a_run_killed_while_saving_resumes_from_the_checkpoint_before(outputs, name, tmp_path):
    from examples.llava_ov.training import Trainer

    root = outputs[name] / "checkpoints"
    assert latest_checkpoint(root) == root / "iter_0000001"
    assert any(path.read_bytes() == b"half" for path in (root / "iter_0000002.unfinished").iterdir())
    iters = ("--train-iters", str(STEPS))
    with one_rank():
        with Trainer(arguments(tmp_path / "straight", *iters), CPU) as trainer:
            straight = trainer.train()
        save = ("--load", str(root), "--save", str(root))
        with Trainer(arguments(tmp_path / "resumed", *iters, *save), CPU) as trainer:
            assert trainer.step == 1
            assert trainer.train() == straight[1:]
    assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000001", f"iter_000000{STEPS}"]
