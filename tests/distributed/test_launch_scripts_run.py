"""The launch scripts with every flag of theirs, at a size that four CPU processes can train: TP2 x PP2, two stages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.llava_ov.build_demo_data import BuildConfig, build

from .launch import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "llava_ov" / "scripts"
# Later flags win, so these take the place of the 32b model's. Its parallel layout without the data-parallel part.
SMALL = [
    *("--model-name", "llava-ov-1.5-tiny", "--tensor-model-parallel-size", "2", "--recompute-num-layers", "1"),
    *("--num-workers", "1", "--seq-length", "2048", "--max-pixels", "12544", "--global-batch-size", "2"),
]
# Stands in for torchrun: the script's own launch arguments are for two nodes.
LAUNCHER = f"""#!/usr/bin/env bash
while [ "$1" != -m ]; do shift; done
exec {sys.executable} -m torch.distributed.run --nproc-per-node 4 --master-port "$PORT" "$@"
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("scripts")
    build(output / "data", BuildConfig(num_samples=48, mean_length=60, max_length=300, samples_per_shard=16))
    (output / "launcher").write_text(LAUNCHER)
    (output / "launcher").chmod(0o755)
    return output


def run_script(output: Path, script: str, *flags: str, save: str, **environment: str) -> list[float]:
    """The losses logged so far by a stage, after running it once more."""
    process = subprocess.Popen(
        ["bash", str(SCRIPTS / script), "32b", *SMALL, *flags],
        env={
            **{name: value for name, value in os.environ.items() if name != "PRETRAINED"},
            **{"DATA_PATH": str(output / "data"), "TOKENIZER_PATH": str(output / "data" / "tokenizer")},
            **{"LAUNCHER": str(output / "launcher"), "PORT": str(free_port()), "SAVE": str(output / save)},
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=280)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, printed
    lines = (output / save / "metrics" / "steps_rank00000.jsonl").read_text().splitlines()
    return [json.loads(line)["scalars"]["loss"] for line in lines]


def test_stages_train_save_resume_and_hand_over(output):
    """Pipeline stages without trained weights, bf16, a sharded optimizer saved in the background, resumed."""
    assert len(run_script(output, "stage_1_alignment.sh", "--exit-interval", "2", save="align")) == 2
    assert len(run_script(output, "stage_1_alignment.sh", "--exit-interval", "3", save="align")) == 3
    packed = ("--exit-interval", "2", "--packing-buffer-size", "8")
    losses = run_script(output, "stage_2_instruct.sh", *packed, save="instruct", PRETRAINED=str(output / "align"))
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    for stage, step in (("align", 3), ("instruct", 2)):
        assert (output / stage / "latest_checkpointed_iteration.txt").read_text().strip() == str(step)
