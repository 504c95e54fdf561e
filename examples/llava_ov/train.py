"""Train the example: `torchrun --nproc-per-node 2 -m examples.llava_ov.train --data-path DIR --train-iters 100`."""

from __future__ import annotations

import torch.distributed as dist

from examples.llava_ov import cpu_shim

cpu_shim.install()  # before Megatron core is imported

from examples.llava_ov import trainers  # noqa: F401  (registers them)
from examples.llava_ov.arguments import parse_train_args
from examples.llava_ov.config import model_family_of
from examples.llava_ov.distributed_setup import initialize_megatron, start_process_group
from examples.llava_ov.registry import get_model_trainer


def main() -> None:
    """Train as the command line says."""
    args = parse_train_args()
    device = start_process_group(args.distributed_timeout_minutes)
    initialize_megatron(args)
    make_trainer = get_model_trainer(model_family_of(args.model_name), args.training_phase)
    with make_trainer(args, device) as trainer:
        trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
