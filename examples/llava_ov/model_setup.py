"""Model, optimizer and schedule of one rank, built from the arguments."""

from __future__ import annotations

import argparse

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from transformers import PreTrainedTokenizerBase

from examples.llava_ov.config import LlavaOnevisionConfig, get_model_config, model_family_of
from examples.llava_ov.model import set_trainable_modules
from examples.llava_ov.registry import get_model_provider
from examples.llava_ov.tokenizer import IMAGE_TOKEN, token_id


def model_config_of(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionConfig:
    """The named configuration with this tokenizer's vocabulary, parallel layout, precision and recomputation.

    Raises:
        ValueError: The layers cannot be split evenly over the pipeline stages.
    """
    config = get_model_config(args.model_name)
    stages = args.pipeline_model_parallel_size * (args.num_virtual_stages_per_pipeline_rank or 1)
    if config.language.num_layers % stages:
        raise ValueError(
            f"the {config.language.num_layers} layers of {args.model_name} cannot be split evenly over {stages} "
            "(virtual) pipeline stages; choose parallel sizes that divide them"
        )
    return config.with_vocab(len(tokenizer), token_id(tokenizer, IMAGE_TOKEN)).with_runtime(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        sequence_parallel=args.sequence_parallel,
        params_dtype=args.params_dtype,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        seed=args.seed,
    )


def build_ddp_model(
    args: argparse.Namespace, config: LlavaOnevisionConfig, device: torch.device
) -> list[DistributedDataParallel]:
    """This rank's model chunks in Megatron's data-parallel wrapper: one, or several under virtual pipelining."""
    build_model = get_model_provider(model_family_of(args.model_name))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        overlap_grad_reduce=False,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    num_chunks = config.runtime.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in [None] if num_chunks is None else range(num_chunks):
        model = build_model(
            config,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        ).to(device)
        set_trainable_modules(model, args.trainable_modules)
        chunks.append(DistributedDataParallel(model.config, ddp_config, model))
    return chunks


def build_optimizer(
    args: argparse.Namespace, model: list[DistributedDataParallel], schedule_length: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam, and a cosine schedule with linear warm-up over `schedule_length` emitted samples.

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
            bf16=args.bf16,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        model,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=int(args.lr_warmup_fraction * schedule_length),
        lr_decay_steps=schedule_length,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=schedule_length,
        wd_incr_style="constant",
        # A resumed run takes its position from the checkpoint and its shape from the command line.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler
