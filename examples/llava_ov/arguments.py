"""Command-line arguments of the example's training loop, named as Megatron names them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import aiak_ext
from examples.llava_ov.config import PARTS
from examples.llava_ov.image_processing import ImageConfig
from examples.llava_ov.registry import TRAINING_PHASES


def build_parser() -> argparse.ArgumentParser:
    """The training arguments together with the extension's own flags."""
    parser = argparse.ArgumentParser(prog="python -m examples.llava_ov.train", description=__doc__)
    _add_model_arguments(parser)
    _add_parallel_arguments(parser)
    _add_data_arguments(parser)
    _add_training_arguments(parser)
    _add_optimizer_arguments(parser)
    _add_checkpoint_arguments(parser)
    _add_logging_arguments(parser)
    return aiak_ext.add_extension_args(parser)


def parse_train_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check.

    Raises:
        ValueError: Arguments that cannot train, with the remedy.
    """
    args = build_parser().parse_args(argv)
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    _check_counts(args)
    _check_schedule(args)
    _check_layout(args)
    _check_packing(args)
    return args


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model-name", default="tiny", help="model configuration, e.g. tiny, 4b or llava-ov-1.5-8b")
    group.add_argument(
        "--trainable-modules",
        nargs="+",
        default=["all"],
        choices=("all", *PARTS),
        metavar="MODULE",
        help="train these parts and freeze the others: all, vision_model, adapter, language_model",
    )
    group.add_argument("--bf16", action="store_true", help="weights in bfloat16, gradients and optimizer in float32")
    group.add_argument(
        "--recompute-granularity",
        choices=("full", "selective"),
        help="recompute activations in the backward pass: whole layers, or attention only; default: keep them",
    )
    group.add_argument(
        "--recompute-method",
        choices=("uniform", "block"),
        help="with full: every chunk of N layers, or the first N layers of a stage",
    )
    group.add_argument("--recompute-num-layers", type=int, help="with full: the N of --recompute-method")


def _add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallel layout")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument(
        "--num-virtual-stages-per-pipeline-rank",
        type=int,
        help="model chunks per pipeline rank (interleaved schedule); default: one, without virtual pipelining",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="split the sequence between the tensor-parallel regions; batches are padded to a multiple of TP",
    )
    group.add_argument(
        "--use-distributed-optimizer", action="store_true", help="shard the optimizer state over data-parallel ranks"
    )
    group.add_argument("--distributed-timeout-minutes", type=float, default=10)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", required=True, help="directory written by build_demo_data")
    group.add_argument("--tokenizer-path", help="Hugging Face tokenizer; default: DATA_PATH/tokenizer")
    group.add_argument(
        "--seq-length", type=int, help="longest sample allowed and size of a pack, in tokens; default: no limit"
    )
    group.add_argument(
        "--packing-buffer-size",
        type=int,
        help="pack samples online: encoded samples per worker that packs of SEQ_LENGTH are formed from; default: off",
    )
    group.add_argument(
        "--max-pixels", type=int, default=ImageConfig.max_pixels, help="larger pictures are reduced to this many pixels"
    )
    group.add_argument("--num-workers", type=int, default=1, help="data workers per data-parallel rank")
    group.add_argument("--shuffle-buffer-size", type=int, default=64, help="samples, before encoding")
    group.add_argument("--data-seed", type=int, default=0, help="of the order in which samples are read")


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--training-phase",
        choices=TRAINING_PHASES,
        default="sft",
        help="pretrain: every text token is learned; sft: the answers are",
    )
    group.add_argument("--micro-batch-size", type=int, default=1)
    group.add_argument("--global-batch-size", type=int, help="default: micro batch size x data-parallel size")
    group.add_argument("--train-iters", type=int, help="stop after this many steps")
    group.add_argument(
        "--sample-quota",
        type=int,
        help="stop once this many samples were emitted over all ranks, however many a step holds",
    )
    group.add_argument(
        "--exit-interval", type=int, help="leave after a step that this number divides; the schedule is not shortened"
    )
    group.add_argument(
        "--eval-interval", type=int, help="steps between two validations on the held-out split; default: none"
    )
    group.add_argument("--seed", type=int, default=1234, help="of the weights")
    group.add_argument(
        "--rerun-mode",
        choices=("disabled", "validate_results"),  # Megatron core 0.16's third mode fails in its own report
        default="validate_results",
        help="Megatron's rerun state machine: what happens when a loss or gradient is not a number",
    )
    # Micro batches hold different numbers of loss tokens, so only the per-token loss is unbiased.
    parser.set_defaults(calculate_per_token_loss=True)


def _add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--min-lr", type=float, default=1e-5)
    group.add_argument(
        "--lr-warmup-fraction", type=float, default=0.05, help="share of the run (see README.md); then a cosine decay"
    )
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.99)
    group.add_argument("--clip-grad", type=float, default=1.0)


def _add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", help="directory to save checkpoints in")
    group.add_argument("--load", help="directory to resume from; starts afresh when it holds no checkpoint")
    group.add_argument(
        "--pretrained-checkpoint",
        help="directory whose latest weights a fresh run starts from, without optimizer, schedule and data position",
    )
    group.add_argument("--save-interval", type=int, default=0, help="steps; 0 = only at the end")
    group.add_argument("--keep-checkpoints", type=int, help="remove all but the last K of SAVE; default: keep all")
    group.add_argument("--async-save", action="store_true", help="write checkpoints in a forked process")


def _add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--run-name", default="train", help="shown beside the progress bar")
    group.add_argument(
        "--metrics-dir", default="runs/train", help="receives one JSONL file per rank and TensorBoard scalars"
    )
    group.add_argument("--log-interval", type=int, default=10, help="steps between two writes")


def _check_counts(args: argparse.Namespace) -> None:
    if args.train_iters is None and args.sample_quota is None:
        raise ValueError(
            "Neither --train-iters nor --sample-quota is given, so training would never end. Give one of them."
        )
    names = ("micro_batch_size", "train_iters", "sample_quota", "exit_interval", "eval_interval", "log_interval")
    for name in (*names, "keep_checkpoints", "packing_buffer_size", "recompute_num_layers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, which leaves nothing to do. Give 1 or more.")


def _check_schedule(args: argparse.Namespace) -> None:
    if not 0 <= args.lr_warmup_fraction < 1:
        raise ValueError(
            f"--lr-warmup-fraction is {args.lr_warmup_fraction}: the warm-up has to end before training does. "
            "Give a value from 0 up to but not including 1."
        )
    if args.min_lr > args.lr:
        raise ValueError(
            f"--min-lr {args.min_lr} is above --lr {args.lr}, so the rate would rise instead of decay. Lower --min-lr."
        )


def _check_layout(args: argparse.Namespace) -> None:
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        raise ValueError(
            "--sequence-parallel with --tensor-model-parallel-size 1: there are no ranks to split the sequence over. "
            "Leave it out or raise the tensor-parallel size."
        )
    chunks, stages = args.num_virtual_stages_per_pipeline_rank, args.pipeline_model_parallel_size
    if chunks is not None and (chunks < 2 or stages < 2):
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {chunks} with --pipeline-model-parallel-size {stages}: there is "
            "nothing to interleave. Both have to be 2 or more, or leave the former out."
        )
    is_full = args.recompute_granularity == "full"
    has_both = args.recompute_method is not None and args.recompute_num_layers is not None
    has_none = args.recompute_method is None and args.recompute_num_layers is None
    if not (has_both if is_full else has_none):
        raise ValueError(
            f"--recompute-granularity {args.recompute_granularity} with --recompute-method {args.recompute_method} and "
            f"--recompute-num-layers {args.recompute_num_layers}: full needs both, to know which layers; the others "
            "need neither."
        )


def _check_packing(args: argparse.Namespace) -> None:
    if args.packing_buffer_size is not None and (args.seq_length is None or args.micro_batch_size != 1):
        raise ValueError(
            f"--packing-buffer-size {args.packing_buffer_size} with --seq-length {args.seq_length} and "
            f"--micro-batch-size {args.micro_batch_size}: a pack needs a size, and the bounds of its samples describe "
            "one row. Give --seq-length and --micro-batch-size 1."
        )


def sequence_multiple(args: argparse.Namespace) -> int:
    """What padded lengths have to be a multiple of: sequence parallelism splits every sequence evenly."""
    return args.tensor_model_parallel_size if args.sequence_parallel else 1


def num_microbatches(args: argparse.Namespace, data_parallel_size: int) -> int:
    """Micro batches per rank and step.

    Raises:
        ValueError: The global batch cannot be split evenly, or not over the virtual pipeline stages.
    """
    per_round = args.micro_batch_size * data_parallel_size
    global_batch_size = args.global_batch_size or per_round
    if global_batch_size % per_round:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not a multiple of micro batch size {args.micro_batch_size} x "
            f"data-parallel size {data_parallel_size}, so ranks would take different numbers of micro batches. "
            f"Use a multiple of {per_round}."
        )
    count, stages = global_batch_size // per_round, args.pipeline_model_parallel_size
    if args.num_virtual_stages_per_pipeline_rank is not None and count % stages:
        raise ValueError(
            f"{count} micro batches per step do not fill the interleaved schedule of {stages} pipeline stages, which "
            f"takes {stages} at a time. Use a --global-batch-size that is a multiple of {stages * per_round}."
        )
    return count
