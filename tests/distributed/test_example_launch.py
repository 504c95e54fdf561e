"""The example's launcher: failures are named, and no rank outlives whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.llava_ov.launch import launch

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
sys.exit(3) if sys.argv[2] == "fail" else time.sleep(300)
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "launched_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return "launched_rank"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]


def test_a_failing_rank_fails_the_launch(module, tmp_path):
    with pytest.raises(RuntimeError, match="launched_rank failed with exit code 1"):
        launch(module, [str(tmp_path), "fail"], num_ranks=2, timeout_s=60)


def test_terminating_the_launcher_ends_its_ranks(module, tmp_path):
    call = f"launch('{module}', ['{tmp_path}', 'sleep'], num_ranks=2, timeout_s=60)"
    code = f"from examples.llava_ov.launch import launch; {call}"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
            assert launcher.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.1)
        launcher.terminate()
        assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        launcher.kill()
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert not any(is_running(pid) for pid in pids)
