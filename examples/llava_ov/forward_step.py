"""Megatron's forward step for the model: take a micro batch, count it, run the model, sum the token losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model

from aiak_ext.metrics import StepRecorder
from aiak_ext.worker_counters import read_counters
from examples.llava_ov.batch_cost import BatchCost
from examples.llava_ov.config import LlavaOnevisionConfig
from examples.llava_ov.micro_batch import MicroBatch, next_micro_batch
from examples.llava_ov.model import IGNORE_INDEX, packed_segments
from examples.llava_ov.samples import LlavaBatch

LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


class ForwardStep:
    """`forward_step_func` of Megatron's schedules; never changes a batch, because Megatron may replay it.

    Args:
        model_config: For the cost of a batch.
        recorder: Counts the micro batches.
        tensor_parallel_group: Its first rank reads the data for all of it.
        device: Of the model.
        encoded_cost: Cost of the images that this rank encoded in the last forward; None where they were its own.
    """

    def __init__(
        self,
        model_config: LlavaOnevisionConfig,
        recorder: StepRecorder,
        tensor_parallel_group: dist.ProcessGroup,
        device: torch.device,
        encoded_cost: Callable[[], float | None],
    ) -> None:
        self._encoded_cost = encoded_cost
        self._cost = BatchCost(model_config)
        self._recorder = recorder
        self._tensor_parallel_group = tensor_parallel_group
        self._device = device
        self.num_samples = 0
        """Samples of this rank since `start_step`."""
        self.num_tokens = 0
        """Their tokens, without padding."""

    def start_step(self) -> None:
        """Count from zero: a new step, or the same one run again."""
        self._recorder.start_step()
        self.num_samples = self.num_tokens = 0

    def __call__(
        self, data_iterator: Iterator[LlavaBatch] | None, model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunc]:
        with self._recorder.data_wait():
            batch = next_micro_batch(data_iterator, self._tensor_parallel_group, self._device)
        losses = run_model(model, batch)
        if not get_attr_wrapped_model(model, "vp_stage"):  # under virtual pipelining the other chunks see it again
            self._count(batch)
        return losses, partial(_finite_token_losses, batch.labels)

    def _count(self, batch: MicroBatch) -> None:
        self.num_samples += batch.num_samples
        self.num_tokens += batch.num_tokens
        counters = read_counters(batch)
        self._recorder.add_batch(
            num_samples=batch.num_samples,
            num_tokens=batch.num_tokens,
            num_token_slots=batch.tokens.numel(),
            cost=self._cost(batch, self._encoded_cost()),
            deferred_samples=counters.get("deferred_samples", 0),
            max_deferral_age=counters.get("oldest_deferral", 0),
            counters=counters,
        )


def run_model(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Run this pipeline stage's part of the model; on the last stage the result is the loss of every token."""
    return model(
        images=batch.pixel_values,
        image_grid_thw=batch.image_grid_thw,
        input_ids=batch.tokens,
        position_ids=None,
        attention_mask=None,
        labels=batch.labels,
        packed_seq_params=packed_segments(batch.cu_lengths, batch.tokens.shape[1]),
    )


def sum_token_losses(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Summed loss and number of loss tokens, by whose total over all ranks Megatron divides the gradients.

    Args:
        labels: int64 [b, s], -100 where there is no loss.
        losses: float [b, s], zero there.
    """
    loss_sum = losses.sum(dtype=torch.float64)
    num_tokens = (labels != IGNORE_INDEX).sum().to(torch.int)
    return loss_sum, num_tokens, {"loss_sum": loss_sum.detach(), "num_loss_tokens": num_tokens}


def _finite_token_losses(
    labels: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """`sum_token_losses`; a sum that is not finite makes Megatron run the step again, to tell the cause."""
    loss_sum, num_tokens, report = sum_token_losses(labels, losses)
    get_rerun_state_machine().validate_result(
        result=report["loss_sum"],
        rejection_func=lambda value: not torch.isfinite(value),
        message="the loss is not finite",
        fatal=True,
    )
    return loss_sum, num_tokens, report


def totals_over_ranks(
    reports: list[dict[str, torch.Tensor]], num_samples: int, device: torch.device
) -> tuple[float, int, int]:
    """Loss sum, loss tokens and samples over all model replicas; a collective call over all ranks.

    Args:
        reports: What `sum_token_losses` reported per micro batch; empty on all but the last pipeline stage.
        num_samples: Of this rank.
        device: Of the collective.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    if reports and parallel_state.get_tensor_model_parallel_rank() == 0:  # one rank speaks for a replica
        totals[0] = sum(report["loss_sum"].double() for report in reports)
        totals[1] = sum(report["num_loss_tokens"] for report in reports)
        totals[2] = num_samples
    dist.all_reduce(totals)
    loss_sum, num_loss_tokens, num_samples = totals.tolist()
    return loss_sum, int(num_loss_tokens), int(num_samples)
