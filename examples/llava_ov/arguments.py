"""Command-line arguments of the example's training loop, named as Megatron names them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import aiak_ext


def build_parser() -> argparse.ArgumentParser:
    """The training arguments together with the extension's own flags."""
    parser = argparse.ArgumentParser(prog="python -m examples.llava_ov.train", description=__doc__)
    _add_model_arguments(parser)
    _add_data_arguments(parser)
    _add_training_arguments(parser)
    _add_checkpoint_arguments(parser)
    _add_logging_arguments(parser)
    return aiak_ext.add_extension_args(parser)


def parse_train_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check.

    Raises:
        ValueError: Arguments that cannot train, with the remedy.
    """
    args = build_parser().parse_args(argv)
    _check(args)
    return args


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model-name", default="tiny", help="model configuration")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data-path", required=True, help="directory written by build_demo_data")
    group.add_argument("--tokenizer-path", help="Hugging Face tokenizer; default: DATA_PATH/tokenizer")
    group.add_argument("--seq-length", type=int, help="longest sample allowed, in tokens; default: no limit")
    group.add_argument("--num-workers", type=int, default=1, help="data workers per data-parallel rank")
    group.add_argument("--shuffle-buffer-size", type=int, default=64, help="samples, before encoding")


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
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
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--min-lr", type=float, default=1e-5)
    group.add_argument(
        "--lr-warmup-fraction", type=float, default=0.05, help="share of the run's samples; then a cosine decay"
    )
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.99)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--seed", type=int, default=1234, help="of the weights")
    group.add_argument(
        "--rerun-mode",
        choices=("disabled", "validate_results"),  # Megatron core 0.16's third mode fails in its own report
        default="validate_results",
        help="Megatron's rerun state machine: what happens when a loss is not a number",
    )
    group.add_argument("--distributed-timeout-minutes", type=float, default=10)
    # Micro batches hold different numbers of loss tokens, so only the per-token loss is unbiased.
    parser.set_defaults(calculate_per_token_loss=True)


def _add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", help="directory to save checkpoints in")
    group.add_argument("--load", help="directory to resume from; starts afresh when it holds no checkpoint")
    group.add_argument("--save-interval", type=int, default=0, help="steps; 0 = only at the end")


def _add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--run-name", default="train", help="shown beside the progress bar")
    group.add_argument(
        "--metrics-dir", default="runs/train", help="receives one JSONL file per rank and TensorBoard scalars"
    )
    group.add_argument("--log-interval", type=int, default=10, help="steps between two writes")


def _check(args: argparse.Namespace) -> None:
    if args.train_iters is None and args.sample_quota is None:
        raise ValueError(
            "Neither --train-iters nor --sample-quota is given, so training would never end. Give one of them."
        )
    for name in ("micro_batch_size", "train_iters", "sample_quota", "exit_interval", "log_interval"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, so nothing would be trained. Give 1 or more.")
    if not 0 <= args.lr_warmup_fraction < 1:
        raise ValueError(
            f"--lr-warmup-fraction is {args.lr_warmup_fraction}: the warm-up has to end before training does. "
            "Give a value from 0 up to but not including 1."
        )
    if args.min_lr > args.lr:
        raise ValueError(
            f"--min-lr {args.min_lr} is above --lr {args.lr}, so the rate would rise instead of decay. Lower --min-lr."
        )


def num_microbatches(args: argparse.Namespace, data_parallel_size: int) -> int:
    """Micro batches per rank and step.

    Raises:
        ValueError: The global batch cannot be split evenly.
    """
    per_round = args.micro_batch_size * data_parallel_size
    global_batch_size = args.global_batch_size or per_round
    if global_batch_size % per_round:
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not a multiple of micro batch size {args.micro_batch_size} x "
            f"data-parallel size {data_parallel_size}, so ranks would take different numbers of micro batches. "
            f"Use a multiple of {per_round}."
        )
    return global_batch_size // per_round
