"""The training loop on Megatron core: schedules, DDP, optimizer, rerun state machine, metrics, checkpoints."""

from __future__ import annotations

import argparse
import itertools
import math
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
from examples.llava_ov.balancing import EncoderBalance, balance_loader, balance_scalars
from examples.llava_ov.batch_cost import BatchCost
from examples.llava_ov.checkpoint import Checkpointer
from examples.llava_ov.checkpoint_files import latest_checkpoint
from examples.llava_ov.coverage_report import CoverageReport
from examples.llava_ov.data_loading import build_loader, reads_data, tokenizer_of
from examples.llava_ov.evaluation import evaluate
from examples.llava_ov.forward_step import ForwardStep, totals_over_ranks
from examples.llava_ov.model_setup import build_ddp_model, build_optimizer, model_config_of
from examples.llava_ov.step_rates import StepRates
from examples.llava_ov.validation_log import ValidationLog


class Trainer:
    """One training run in this process; a context manager, so that data workers are stopped.

    Needs `initialize_megatron`. Several runs of one parallel layout may follow each other in a process.

    Args:
        args: From `parse_train_args`.
        device: From `start_process_group`.
        train_on_prompt: Learn questions as well as answers.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, *, train_on_prompt: bool = False) -> None:
        self.args = args
        self.device = device
        self.step = 0
        self.num_samples = 0
        """Samples emitted so far, over all ranks."""
        self.num_skipped_steps = 0
        """Steps whose update the optimizer left out."""
        data_group = parallel_state.get_data_parallel_group()
        self._num_microbatches = num_microbatches(args, data_group.size())
        self._samples_per_step = self._num_microbatches * args.micro_batch_size * data_group.size()
        extension = aiak_ext.ExtensionConfig.from_args(args)
        self._tokenizer = tokenizer_of(args)
        model_config = model_config_of(args, self._tokenizer)
        self.model = build_ddp_model(args, model_config, device)
        schedule_length = args.sample_quota or args.train_iters * self._samples_per_step
        self.optimizer, self.scheduler = build_optimizer(args, self.model, schedule_length)
        self.recorder = StepRecorder(args.metrics_dir, group=data_group, log_interval=args.log_interval, device=device)
        self._rates = StepRates(device)
        self._validation_log = ValidationLog(args.metrics_dir)
        config = self.model[0].config
        config.finalize_model_grads_func = self._rates.timed_grad_sync(
            self.recorder.timed_grad_sync(finalize_model_grads)
        )
        no_sync_funcs = [chunk.no_sync for chunk in self.model]
        config.no_sync_func = no_sync_funcs if len(self.model) > 1 else no_sync_funcs[0]
        cost_model = BatchCost(model_config).sample_cost_model
        balance = (args, extension, cost_model, self._num_microbatches)
        self._encoder_balance = EncoderBalance([chunk.module for chunk in self.model], *balance)
        self._forward_step = ForwardStep(
            model_config,
            self.recorder,
            parallel_state.get_tensor_model_parallel_group(),
            device,
            self._encoder_balance.encoded_cost,
        )
        self._loader = None
        if reads_data():
            loader = build_loader(args, extension, self._tokenizer, train_on_prompt, cost_model)
            self._loader = balance_loader(loader, *balance)
        self._coverage = CoverageReport(args.num_workers) if args.sample_quota else None
        self._data_iterators = self._iterators()
        self._checkpointer = Checkpointer(
            self.model,
            self.optimizer,
            self.scheduler,
            settings={
                "model_name": args.model_name,
                "bf16": args.bf16,
                "trainable_modules": sorted(args.trainable_modules),
                "use_distributed_optimizer": args.use_distributed_optimizer,
                "data_seed": args.data_seed,
            },
            keep=args.keep_checkpoints,
            asynchronous=args.async_save,
        )
        self._start_from_checkpoint()

    def train(self) -> list[float]:
        """Train until the arguments say stop.

        Returns:
            The loss of every step: the mean over all ranks' loss tokens of the step.
        """
        args = self.args
        losses = []
        num_before = self.num_samples
        with self._progress_bar() as bar:
            leave = self._finished()
            while not leave:
                scalars = self._train_step()
                losses.append(scalars["loss"])
                bar.set_postfix(step=self.step, loss=f"{scalars['loss']:.3f}", refresh=False)
                bar.update(scalars["samples"] if args.sample_quota else 1)
                leave = self._finished() or _divides(args.exit_interval, self.step)
                if _divides(args.eval_interval, self.step):
                    self._validation_log.add(self.step, self.num_samples, self.evaluate())
                if args.save and (leave or _divides(args.save_interval, self.step)):
                    self.save(args.save)
                self._checkpointer.poll()
        self._checkpointer.wait()
        self.recorder.flush()
        if self._coverage is not None and losses:
            self._coverage.write(
                args.metrics_dir, quota=args.sample_quota - num_before, num_emitted=self.num_samples - num_before
            )
        return losses

    def evaluate(self) -> float:
        """Mean loss per token of the validation split; a collective call over all ranks."""
        with self._encoder_balance.off():
            return evaluate(self.args, self.model, self._tokenizer, self.device)

    def save(self, root: str | Path) -> Path:
        """Write a checkpoint; a collective call over all ranks."""
        writes_loader = self._loader is not None and parallel_state.is_pipeline_first_stage()
        progress = {
            "step": self.step,
            "num_samples": self.num_samples,
            "num_skipped_steps": self.num_skipped_steps,
            "metrics": self.recorder.state_dict(),
        }
        return self._checkpointer.save(
            root, self.step, progress=progress, loader=self._loader if writes_loader else None
        )

    def close(self) -> None:
        """Stop the data workers, give up a save that is in flight, close the metrics."""
        self._checkpointer.abort()
        if self._loader is not None:
            self._loader.close()
        self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._checkpointer.wait()
        self.close()

    def _iterators(self) -> list[RerunDataIterator | None]:
        """One per model chunk; under virtual pipelining all chunks of a rank see the same micro batches."""
        if self._loader is None:
            return [None] * len(self.model)
        stream = self._loader if self._coverage is None else self._coverage.watch(self._loader)
        streams = [stream] if len(self.model) == 1 else itertools.tee(stream, len(self.model))
        return [RerunDataIterator(stream) for stream in streams]

    def _start_from_checkpoint(self) -> None:
        args = self.args
        if args.load and latest_checkpoint(args.load) is not None:
            progress = self._checkpointer.load(args.load, loader=self._loader, restart_data=args.restart_data)
            assert progress is not None
            self.step, self.num_samples = progress["step"], progress["num_samples"]
            self.num_skipped_steps = progress["num_skipped_steps"]
            self.recorder.load_state_dict(progress["metrics"])
        elif args.pretrained_checkpoint:
            self._checkpointer.load_pretrained(args.pretrained_checkpoint)

    def _train_step(self) -> dict[str, float]:
        """One optimizer step; returns the figures that are logged."""
        self._rates.start()
        reports = self._forward_backward()
        updated, grad_norm, _ = self.optimizer.step()
        counted = self._forward_step
        loss_sum, num_loss_tokens, num_samples = totals_over_ranks(reports, counted.num_samples, self.device)
        self._check_finite(loss_sum, float(grad_norm or 0.0))
        if updated:
            # Packs and groups hold any number of samples, so a run bounded by steps counts each as a global batch.
            self.scheduler.step(increment=num_samples if self.args.sample_quota else self._samples_per_step)
        self.num_skipped_steps += not updated
        self.step += 1
        self.num_samples += num_samples
        speaks_for_replica = (
            parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        scalars = {
            "loss": loss_sum / max(num_loss_tokens, 1),
            "lr": self.optimizer.param_groups[0]["lr"] if self.optimizer.param_groups else 0.0,
            "grad_norm": float(grad_norm or 0.0),
            "samples": num_samples,
            "skipped_steps": self.num_skipped_steps,
            **self._rates.finish(num_samples, counted.num_tokens, speaks_for_replica),
            **balance_scalars(getattr(self._loader, "last_metrics", None) or self._encoder_balance.last_metrics),
        }
        self.recorder.end_step(scalars)
        return scalars

    def _forward_backward(self) -> list[dict[str, torch.Tensor]]:
        """Gradients of one step, run again by Megatron when one is not finite; the last stage's reports."""
        machine = get_rerun_state_machine()
        reports: list[dict[str, torch.Tensor]] = []
        while machine.should_run_forward_backward(self._data_iterators):
            self._forward_step.start_step()
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=self._data_iterators,
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
                f"The loss or a gradient of step {self.step} is not finite, and a second run of the step "
                + (
                    "gave the same: look at its samples and lower the learning rate."
                    if reproduced
                    else "gave another result: suspect the hardware."
                )
            )
        return reports

    def _check_finite(self, loss_sum: float, grad_norm: float) -> None:
        # Megatron's machine passes over the first step of a process. Both numbers are the same on all ranks.
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
            raise RuntimeError(
                f"The loss or a gradient of step {self.step} is not finite (loss sum {loss_sum}, gradient norm "
                f"{grad_norm}), so the weights are spoiled; nothing was saved since. Look at the step's samples, lower "
                "the learning rate, and resume from the last checkpoint."
            )

    def _finished(self) -> bool:
        iters, quota = self.args.train_iters, self.args.sample_quota
        return (iters is not None and self.step >= iters) or (quota is not None and self.num_samples >= quota)

    def _progress_bar(self) -> Any:
        quota = self.args.sample_quota
        return tqdm(
            total=quota or self.args.train_iters,
            initial=self.num_samples if quota else self.step,
            unit="sample" if quota else "step",
            desc=self.args.run_name,
            disable=dist.get_rank() != 0,
        )


def _divides(interval: int | None, step: int) -> bool:
    return bool(interval) and step % interval == 0
