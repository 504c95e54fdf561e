"""The training loader of one data-parallel rank: Energon's dataset with the levers that the flags ask for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.energon import WorkerConfig, get_train_dataset, get_val_dataset
from megatron.energon.savable_loader import BasicDataLoader
from transformers import PreTrainedTokenizerBase

import aiak_ext
from data_balance import SampleCostModel
from examples.llava_ov.arguments import sequence_multiple
from examples.llava_ov.image_processing import ImageConfig
from examples.llava_ov.samples import LlavaBatch
from examples.llava_ov.task_encoder import LlavaTaskEncoder
from examples.llava_ov.tokenizer import load_tokenizer


class DemoTaskEncoder(aiak_ext.LengthAwareTaskEncoderMixin, LlavaTaskEncoder):
    """The example's task encoder with the extension's levers: the one line that a user adds."""


def tokenizer_of(args: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one that build_demo_data trained beside the data."""
    return load_tokenizer(args.tokenizer_path or Path(args.data_path) / "tokenizer")


def reads_data() -> bool:
    """Whether this rank reads samples: the first tensor-parallel rank of every pipeline stage.

    The first stage needs the inputs, the last one the labels, and the ones between the bounds of packed sequences.
    """
    return parallel_state.get_tensor_model_parallel_rank() == 0


def build_loader(
    args: argparse.Namespace,
    extension: aiak_ext.ExtensionConfig,
    tokenizer: PreTrainedTokenizerBase,
    train_on_prompt: bool = False,
    cost_model: SampleCostModel | None = None,
) -> Any:
    """An endless loader of `LlavaBatch`, with `save_checkpoint`, `load_checkpoint` and `close`.

    With `--packing-buffer-size` Energon's packer forms the samples; a lever then works on packs.
    ODB matches groups across ranks by `cost_model`, where given.
    """
    dataset = get_train_dataset(
        args.data_path,
        worker_config=_worker_config(args.num_workers, args.data_seed),
        batch_size=args.micro_batch_size,
        shuffle_buffer_size=args.shuffle_buffer_size,
        max_samples_per_sequence=None,
        packing_buffer_size=args.packing_buffer_size,
        task_encoder=DemoTaskEncoder(
            extension,
            cost_fn=None if cost_model is None else aiak_ext.sample_cost_fn(cost_model),
            train_on_prompt=train_on_prompt,
            **_task_encoder_options(args, tokenizer),
        ),
    )
    return aiak_ext.build_train_loader(dataset)


def build_validation_batches(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[LlavaBatch]:
    """This data-parallel rank's part of the validation split, one sample a batch, without any lever."""
    dataset = get_val_dataset(
        args.data_path,
        worker_config=_worker_config(num_workers=0),
        batch_size=1,
        task_encoder=LlavaTaskEncoder(**_task_encoder_options(args, tokenizer)),
    )
    # Its collector's freeze would end with this loader, and that of `start_process_group` with it.
    return list(BasicDataLoader(dataset, gc_collect_every_n_steps=0))


def _task_encoder_options(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "seq_length": args.seq_length,
        "image_config": ImageConfig(max_pixels=args.max_pixels),
        "pad_to_multiple_of": sequence_multiple(args),
    }


def _worker_config(num_workers: int, seed: int = 0) -> WorkerConfig:
    group = parallel_state.get_data_parallel_group()
    return WorkerConfig(
        rank=dist.get_rank(group),
        world_size=group.size(),
        num_workers=num_workers,
        data_parallel_group=group,
        seed_offset=seed,
    )
