"""The launch scripts: the guide's numbers for three stages and three sizes, read by the example's own parser."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest
import torch

from examples.llava_ov.arguments import num_microbatches, parse_train_args
from examples.llava_ov.config import get_model_config

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "llava_ov" / "scripts"
# Seed document 002, sections 6.1 and 6.2.3.
STAGES = {
    "stage_1_alignment.sh": {"trainable_modules": ["adapter"], "lr": 1e-4, "train_iters": 2500},
    "stage_1.5_mid_training.sh": {"trainable_modules": ["all"], "lr": 1e-5, "train_iters": 20_000},
    "stage_2_instruct.sh": {"trainable_modules": ["all"], "lr": 1e-5, "train_iters": 3500},
}
ALL_STAGES = {
    "training_phase": "sft",
    "seq_length": 32_768,
    "max_pixels": 1344**2,
    "micro_batch_size": 1,
    "min_lr": 1e-6,
    "lr_warmup_fraction": 0.002,
    "clip_grad": 1.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "params_dtype": torch.bfloat16,
    "use_distributed_optimizer": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "num_workers": 16,
    "save_interval": 2000,
    "async_save": True,
    "load": "out",
    "save": "out",
}
# Section 8.1.1: GPUs, tensor parallel, pipeline parallel, global batch, layers per recomputed chunk.
LAYOUTS = {"4b": (8, 1, 1, 8, 4), "8b": (8, 2, 1, 8, 8), "32b": (16, 4, 2, 16, 16)}


def command(script: str, *arguments: str, **environment: str) -> list[str]:
    """The words that the script would start."""
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments],
        env={
            **{name: value for name, value in os.environ.items() if name != "PRETRAINED"},
            "LAUNCHER": r"printf %s\n",
            **{"DATA_PATH": "data", "TOKENIZER_PATH": "tokenizer", "SAVE": "out"},
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def parse(words: list[str]) -> tuple[int, argparse.Namespace]:
    """Processes that torchrun would start, and the arguments of each."""
    module = words.index("-m")
    assert words[module + 1] == "examples.llava_ov.train"
    launcher = argparse.ArgumentParser()
    for flag in ("--nnodes", "--nproc-per-node", "--node-rank"):
        launcher.add_argument(flag, type=int)
    for flag in ("--master-addr", "--master-port"):
        launcher.add_argument(flag)
    launched = launcher.parse_args(words[:module])
    return launched.nnodes * launched.nproc_per_node, parse_train_args(words[module + 2 :])


@pytest.mark.parametrize("model", LAYOUTS)
@pytest.mark.parametrize("script", STAGES)
def test_scripts_hold_the_guides_numbers(script, model):
    world_size, args = parse(command(script, model))
    gpus, tensor_parallel, pipeline_parallel, global_batch, recompute_layers = LAYOUTS[model]
    assert world_size == gpus
    expected = {
        **ALL_STAGES,
        **STAGES[script],
        "model_name": f"llava-ov-1.5-{model}",
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        "global_batch_size": global_batch,
        "recompute_num_layers": recompute_layers,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    data_parallel_size = gpus // (tensor_parallel * pipeline_parallel)
    assert num_microbatches(args, data_parallel_size) * data_parallel_size == global_batch
    assert get_model_config(args.model_name).language.num_layers % pipeline_parallel == 0


def test_a_stage_starts_from_the_one_before_and_takes_further_flags():
    _, first = parse(command("stage_1_alignment.sh", "4b"))
    assert first.pretrained_checkpoint is None
    _, args = parse(command("stage_2_instruct.sh", "8b", "--length-sort-pool-size", "1000", PRETRAINED="mid"))
    assert args.pretrained_checkpoint == "mid"
    assert args.length_sort_pool_size == 1000


def test_an_unknown_size_is_named():
    with pytest.raises(AssertionError, match="no layout for model size '5b'"):
        command("stage_1_alignment.sh", "5b")
