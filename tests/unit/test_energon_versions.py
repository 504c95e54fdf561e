"""The wrapper and its glue on the oldest supported Energon, which `make test` installs beside the newest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiak_ext import energon_version

OLDEST = Path(sys.prefix) / "energon-7.2.2"
PROJECT = Path(__file__).parents[2]
CASES = [
    "tests/unit/test_length_pool_sort.py",
    "tests/unit/test_task_encoder.py",
    "tests/unit/test_loader.py::test_three_resumes_in_one_run_continue_exactly[3-every]",
    "tests/unit/test_loader.py::test_switching_keeps_the_data_position[10-0-2-default]",
    "tests/unit/test_loader.py::test_the_file_is_what_megatrons_example_reads",
    "tests/unit/test_odb_glue.py::test_three_resumes_in_one_run[2-options1]",
    "tests/unit/test_redist.py::test_redistributed_run_covers_every_sample_once[before0-after0]",
]


@pytest.mark.skipif(not OLDEST.is_dir(), reason="megatron-energon 7.2.2 is not beside this environment (make test)")
def test_on_energon_7_2_2():
    environment = {**os.environ, "PYTHONPATH": f"{OLDEST}{os.pathsep}{PROJECT}"}
    check = "from importlib.metadata import version; print(version('megatron-energon'))"
    seen = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, timeout=60)
    assert seen.stdout.strip() == "7.2.2"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES]
    done = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.parametrize("installed", ["7.1.0", "5.0.0", "8.0.0", "8.0.0rc1"])
def test_other_versions_are_refused_by_name(installed, monkeypatch):
    monkeypatch.setattr(energon_version, "version", lambda name: installed)
    with pytest.raises(ImportError, match=f"megatron-energon {installed}.*>=7.2,<8"):
        energon_version.check_energon_version()


@pytest.mark.parametrize("installed", ["7.2.0", "7.2.2", "7.10.1"])
def test_supported_versions_pass(installed, monkeypatch):
    monkeypatch.setattr(energon_version, "version", lambda name: installed)
    energon_version.check_energon_version()
