"""The training loop on Megatron core: schedules, DDP, optimizer, rerun state machine, metrics, checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import (
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    RerunDataIterator,
    get_rerun_state_machine,
)
from tqdm import tqdm
from typing_extensions import Self

import aiak_ext
from aiak_ext.metrics import StepRecorder
from examples.llava_ov.arguments import num_microbatches
from examples.llava_ov.checkpoint import load_checkpoint, save_checkpoint
from examples.llava_ov.data_loading import build_loader, reads_data, tokenizer_of
from examples.llava_ov.evaluation import evaluate
from examples.llava_ov.forward_step import ForwardStep, totals_over_ranks
from examples.llava_ov.model_setup import build_ddp_model, build_optimizer, model_config_of


class Trainer:
    """One training run in this process; a context manager, so that data workers are stopped.

    Needs `initialize_megatron`. Several runs of one parallel layout may follow each other in a process.

    Args:
        args: From `parse_train_args`.
        device: From `start_process_group`.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.step = 0
        self.num_samples = 0
        """Samples emitted so far, over all ranks."""
        data_group = parallel_state.get_data_parallel_group()
        self._num_microbatches = num_microbatches(args, data_group.size())
        extension = aiak_ext.ExtensionConfig.from_args(args)
        self._tokenizer = tokenizer_of(args)
        model_config = model_config_of(args, self._tokenizer)
        samples_per_step = self._num_microbatches * args.micro_batch_size * data_group.size()
        self._num_samples_planned = args.sample_quota or args.train_iters * samples_per_step
        self.model = build_ddp_model(model_config, device)
        self.optimizer, self.scheduler = build_optimizer(args, self.model, self._num_samples_planned)
        self.recorder = StepRecorder(args.metrics_dir, group=data_group, log_interval=args.log_interval, device=device)
        config = self.model[0].config
        config.finalize_model_grads_func = self.recorder.timed_grad_sync(finalize_model_grads)
        config.no_sync_func = self.model[0].no_sync
        self._forward_step = ForwardStep(
            model_config, self.recorder, parallel_state.get_tensor_model_parallel_group(), device
        )
        self._loader = build_loader(args, extension, self._tokenizer) if reads_data() else None
        self._data_iterator = None if self._loader is None else RerunDataIterator(self._loader)
        if args.load:
            self._resume(args.load)

    def train(self) -> list[float]:
        """Train until the arguments say stop.

        Returns:
            The loss of every step: the mean over all ranks' loss tokens of the step.
        """
        args = self.args
        losses = []
        with self._progress_bar() as bar:
            leave = self._finished()
            while not leave:
                scalars = self._train_step()
                losses.append(scalars["loss"])
                bar.set_postfix(step=self.step, loss=f"{scalars['loss']:.3f}", refresh=False)
                bar.update(scalars["samples"])
                leave = self._finished() or bool(args.exit_interval and self.step % args.exit_interval == 0)
                save_now = leave or (args.save_interval and self.step % args.save_interval == 0)
                if args.save and save_now:
                    self.save(args.save)
        self.recorder.flush()
        return losses

    def evaluate(self) -> float:
        """Mean loss per token of the validation split; a collective call over all ranks."""
        return evaluate(self.args, self.model, self._tokenizer, self.device)

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint; a collective call over all ranks."""
        writes_loader = self._loader is not None and parallel_state.is_pipeline_first_stage()
        return save_checkpoint(
            root,
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            progress={
                "step": self.step,
                "num_samples": self.num_samples,
                "metrics": self.recorder.state_dict(),
            },
            loader=self._loader if writes_loader else None,
        )

    def close(self) -> None:
        """Stop the data workers and close the metrics."""
        if self._loader is not None:
            self._loader.close()
        self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self, root: str) -> None:
        progress = load_checkpoint(
            root,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self._loader,
            restart_data=self.args.restart_data,
        )
        if progress is not None:
            self.step, self.num_samples = progress["step"], progress["num_samples"]
            self.recorder.load_state_dict(progress["metrics"])

    def _train_step(self) -> dict[str, float]:
        """One optimizer step; returns the figures that are logged."""
        reports = self._forward_backward()
        updated, grad_norm, _ = self.optimizer.step()
        loss_sum, num_loss_tokens, num_samples = totals_over_ranks(reports, self._forward_step.num_samples, self.device)
        if updated:
            self.scheduler.step(increment=num_samples)
        self.step += 1
        self.num_samples += num_samples
        scalars = {
            "loss": loss_sum / max(num_loss_tokens, 1),
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": float(grad_norm or 0.0),
            "samples": num_samples,
        }
        self.recorder.end_step(scalars)
        return scalars

    def _forward_backward(self) -> list[dict[str, torch.Tensor]]:
        """Gradients of one step, run again by Megatron when a loss is not finite; the last stage's reports."""
        machine = get_rerun_state_machine()
        reports: list[dict[str, torch.Tensor]] = []
        while machine.should_run_forward_backward(self._data_iterator):
            self._forward_step.start_step()
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=self._data_iterator,
                model=self.model,
                num_microbatches=self._num_microbatches,
                seq_length=1,  # variable_seq_lengths: stages tell each other the true shapes
                micro_batch_size=self.args.micro_batch_size,
                forward_only=False,
            )
        _, should_exit, exit_code = machine.should_checkpoint_and_exit()
        if should_exit:
            reproduced = exit_code == EXIT_CODE_RESUME_TO_DISAMBIGUATE
            raise RuntimeError(
                f"The loss of step {self.step} is not finite, and a second run of the step "
                + (
                    "gave the same: look at its samples and lower the learning rate."
                    if reproduced
                    else "gave another result: suspect the hardware."
                )
            )
        return reports

    def _finished(self) -> bool:
        iters, quota = self.args.train_iters, self.args.sample_quota
        return (iters is not None and self.step >= iters) or (quota is not None and self.num_samples >= quota)

    def _progress_bar(self) -> Any:
        return tqdm(
            total=self._num_samples_planned,
            initial=self.num_samples,
            unit="sample",
            desc=self.args.run_name,
            disable=dist.get_rank() != 0,
        )
