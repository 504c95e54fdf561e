"""Model, optimizer and schedule of one rank, built from the arguments."""

from __future__ import annotations

import argparse

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from transformers import PreTrainedTokenizerBase

from examples.llava_ov.config import LlavaOnevisionConfig, get_model_config
from examples.llava_ov.model import build_model
from examples.llava_ov.tokenizer import IMAGE_TOKEN, token_id


def model_config_of(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionConfig:
    """The named configuration with this tokenizer's vocabulary and these parallel sizes."""
    config = get_model_config(args.model_name)
    return config.with_vocab(len(tokenizer), token_id(tokenizer, IMAGE_TOKEN)).with_runtime(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        seed=args.seed,
    )


def build_ddp_model(config: LlavaOnevisionConfig, device: torch.device) -> list[DistributedDataParallel]:
    """This rank's part of the model in Megatron's data-parallel wrapper, as the list that schedules take."""
    model = build_model(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(device)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return [DistributedDataParallel(model.config, ddp_config, model)]


def build_optimizer(
    args: argparse.Namespace, model: list[DistributedDataParallel], num_samples: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam, and a cosine schedule with linear warm-up over `num_samples` emitted samples.

    The schedule counts samples because steps hold different numbers of them under dynamic batching.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            clip_grad=args.clip_grad,
            use_distributed_optimizer=False,
        ),
        model,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=int(args.lr_warmup_fraction * num_samples),
        lr_decay_steps=num_samples,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=num_samples,
        wd_incr_style="constant",
        # A resumed run takes its position from the checkpoint and its shape from the command line.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler
