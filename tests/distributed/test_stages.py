"""The three stages as a user starts them: every stage learns on from the weights of the one before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.checkpoint_files import latest_checkpoint
from examples.llava_ov.config import PARTS
from examples.llava_ov.data_loading import tokenizer_of
from examples.llava_ov.generate import load_arguments, load_model
from examples.llava_ov.model import build_model
from examples.llava_ov.model_setup import model_config_of
from examples.llava_ov.stages import collect
from tests.training_run import CPU, one_rank

NUM_STEPS = 3
STAGES = ("alignment", "mid_training", "instruct")


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> tuple[Path, str]:
    """Directory of the stages, and what was printed."""
    output = tmp_path_factory.mktemp("stages")
    build(output / "data", BuildConfig(num_samples=96, mean_length=60, max_length=300, samples_per_shard=16))
    command = [sys.executable, "-m", "examples.llava_ov.stages", "--data", str(output / "data")]
    done = subprocess.run(
        [*command, "--output", str(output), "--num-steps", str(NUM_STEPS)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights of each part of the model, as one vector."""
    return {part: torch.nn.utils.parameters_to_vector(getattr(model, part).parameters()).detach() for part in PARTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_stage_starts_from_the_one_before(output):
    directory, printed = output
    results = {stage: collect(directory / stage / "metrics") for stage in STAGES}
    for stage, result in results.items():
        assert result.num_steps == NUM_STEPS
        assert f"{stage:<14}{NUM_STEPS:>7}" in printed
    assert results["mid_training"].num_samples > 2 * NUM_STEPS  # packs
    assert results["instruct"].validation_loss < results["alignment"].validation_loss
    assert printed.count("-- model:") == 4


@pytest.mark.slow
def test_alignment_trains_the_adapter_alone(output):
    directory, _ = output
    checkpoints = {stage: latest_checkpoint(directory / stage / "checkpoints") for stage in STAGES}
    args = load_arguments(checkpoints["alignment"], str(directory / "data"))
    with one_rank():
        before = weights(build_model(model_config_of(args, tokenizer_of(args))))
        after = {stage: weights(load_model(args, checkpoint, CPU)) for stage, checkpoint in checkpoints.items()}
    assert [part for part in PARTS if not after["alignment"][part].equal(before[part])] == ["adapter"]
    assert not any(after["instruct"][part].equal(after["alignment"][part]) for part in PARTS)
