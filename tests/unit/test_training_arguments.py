"""Arguments of the example: Megatron's names, the extension's flags beside them, mistakes named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import aiak_ext
from examples.llava_ov.arguments import build_parser, num_microbatches, parse_train_args

BASE = ["--data-path", "data", "--train-iters", "10"]


def test_extension_flags_are_there_and_the_loss_is_per_token():
    args = parse_train_args([*BASE, "--length-sort-pool-size", "10", "--micro-batch-size", "4"])
    config = aiak_ext.ExtensionConfig.from_args(args)
    assert config.length_sort.pool_size == 12  # whole micro batches
    assert config.length_sort.shuffle_block == 4
    assert config.calculate_per_token_loss


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-path", "data"], "training would never end"),
        ([*BASE, "--micro-batch-size", "0"], "--micro-batch-size is 0"),
        ([*BASE, "--sample-quota", "-1"], "--sample-quota is -1"),
        ([*BASE, "--exit-interval", "0"], "--exit-interval is 0"),
        ([*BASE, "--lr-warmup-fraction", "1"], "--lr-warmup-fraction is 1.0"),
        ([*BASE, "--lr", "1e-6", "--min-lr", "1e-5"], "--min-lr 1e-05 is above --lr 1e-06"),
        ([*BASE, "--eval-interval", "0"], "--eval-interval is 0"),
        ([*BASE, "--keep-checkpoints", "0"], "--keep-checkpoints is 0"),
        ([*BASE, "--sequence-parallel"], "--sequence-parallel with --tensor-model-parallel-size 1"),
        ([*BASE, "--num-virtual-stages-per-pipeline-rank", "2"], "nothing to interleave"),
        ([*BASE, "--recompute-granularity", "full"], "full needs both"),
        ([*BASE, "--recompute-granularity", "selective", "--recompute-num-layers", "2"], "need neither"),
        ([*BASE, "--recompute-method", "block"], "need neither"),
        ([*BASE, "--packing-buffer-size", "8"], "a pack needs a size"),
        ([*BASE, "--packing-buffer-size", "8", "--seq-length", "64", "--micro-batch-size", "2"], "describe one row"),
    ],
)
def test_mistakes_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_train_args(flags)


def test_micro_batches_per_step():
    args = parse_train_args([*BASE, "--micro-batch-size", "2", "--global-batch-size", "24"])
    assert num_microbatches(args, data_parallel_size=4) == 3
    assert num_microbatches(parse_train_args(BASE), data_parallel_size=4) == 1
    with pytest.raises(ValueError, match="not a multiple of micro batch size 2 x data-parallel size 5"):
        num_microbatches(args, data_parallel_size=5)


def test_interleaved_stages_take_whole_rounds():
    layout = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
    assert num_microbatches(parse_train_args([*BASE, *layout, "--global-batch-size", "4"]), data_parallel_size=2) == 2
    with pytest.raises(ValueError, match=r"1 micro batches per step do not fill .* multiple of 4"):
        num_microbatches(parse_train_args([*BASE, *layout]), data_parallel_size=2)


def test_precision_and_modules():
    args = parse_train_args([*BASE, "--bf16", "--trainable-modules", "adapter", "vision_model"])
    assert args.params_dtype == torch.bfloat16
    assert args.trainable_modules == ["adapter", "vision_model"]
    assert parse_train_args(BASE).params_dtype == torch.float32
    with pytest.raises(SystemExit):
        parse_train_args([*BASE, "--trainable-modules", "adaptor"])


def test_readme_names_every_flag():
    root = Path(__file__).resolve().parents[2]
    text = (root / "examples" / "llava_ov" / "README.md").read_text() + (root / "README.md").read_text()
    flags = {flag for action in build_parser()._actions for flag in action.option_strings if flag != "-h"}
    assert flags - {"--help"} <= set(re.findall(r"--[a-z0-9-]+", text))
