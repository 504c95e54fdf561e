"""Loss on the held-out split: the same samples whatever a run trained on, so that runs can be compared."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import PreTrainedTokenizerBase

from examples.llava_ov.data_loading import build_validation_batches
from examples.llava_ov.forward_step import LossFunc, run_model, sum_token_losses, totals_over_ranks
from examples.llava_ov.micro_batch import MicroBatch
from examples.llava_ov.model import IGNORE_INDEX
from examples.llava_ov.samples import LlavaBatch


def evaluate(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> float:
    """Mean loss per answer token over the validation split; a collective call over all ranks.

    Every sample is a micro batch of its own, so the result does not depend on how training forms batches.
    """
    batches = build_validation_batches(args, tokenizer)
    if len(model) > 1:
        batches = _filled_up(batches, args.pipeline_model_parallel_size)

    def forward_step(data_iterator: Iterator[LlavaBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, LossFunc]:
        batch = MicroBatch.from_batch(next(data_iterator), device)
        return run_model(chunk, batch), partial(sum_token_losses, batch.labels)

    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in model],
            model=model,
            num_microbatches=len(batches),
            seq_length=1,  # variable_seq_lengths: stages tell each other the true shapes
            micro_batch_size=1,
            forward_only=True,
        )
    for chunk in model:
        chunk.train()
    loss_sum, num_loss_tokens, _ = totals_over_ranks(reports, 0, device)
    return loss_sum / max(num_loss_tokens, 1)


def _filled_up(batches: list[LlavaBatch], multiple: int) -> list[LlavaBatch]:
    """`batches` and as many without loss as make a multiple, which the interleaved schedule needs."""
    last = batches[-1]
    idle = dataclasses.replace(last, labels=torch.full_like(last.labels, IGNORE_INDEX))
    return batches + [idle] * (-len(batches) % multiple)
