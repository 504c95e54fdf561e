"""Process groups, devices and seeds of one training process, on CPU over gloo or on CUDA over NCCL."""

from __future__ import annotations

import argparse
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from examples.llava_ov import cpu_shim


def start_process_group(timeout_minutes: float) -> torch.device:
    """Join the ranks that torchrun started; the shim must be installed already on a machine without CUDA.

    A process group that exists already is used as it is.

    Returns:
        The device that this rank trains on.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # ranks and data workers share the cores
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    # What is loaded by now is half a million objects: each collection (Energon's loaders ask for some) would walk them.
    gc.collect()
    gc.freeze()
    return device


def initialize_megatron(args: argparse.Namespace) -> None:
    """Megatron's global state: parallel groups, random states, rerun state machine.

    Raises:
        ValueError: The parallel sizes do not divide the number of ranks.
    """
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    world_size = dist.get_world_size()
    if world_size % model_ranks:
        raise ValueError(
            f"{world_size} ranks cannot hold replicas of {model_ranks} ranks each (tensor x pipeline parallel). "
            f"Start a multiple of {model_ranks} ranks or lower the parallel sizes."
        )
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.num_virtual_stages_per_pipeline_rank,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    cpu_shim.install_after_import()
    model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    initialize_rerun_state_machine(mode=RerunMode(args.rerun_mode))
