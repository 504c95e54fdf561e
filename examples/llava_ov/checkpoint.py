"""Checkpoints of model, optimizer, schedule and data position, written at once or in the background."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from examples.llava_ov.checkpoint_files import checkpoint_path, latest_checkpoint, publish, unfinished_path
from examples.llava_ov.optimizer_state import load_optimizer_state, sharded_optimizer_state


class Checkpointer:
    """Saves and loads one run's state in Megatron's `torch_dist` format; all methods but `abort` are collective.

    Args:
        model: Model chunks of this rank.
        optimizer: Their optimizer.
        scheduler: Of learning rate and weight decay.
        settings: Plain values that a checkpoint must share with the run that resumes from it, by flag.
        keep: How many checkpoints remain; None for all.
        asynchronous: Write tensors in a forked process while training goes on. The fork sees the weights of its
            moment. `poll` after every step finishes a save once all ranks have written.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        *,
        settings: Mapping[str, Any],
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._settings = dict(settings)
        self._keep = keep
        self._asynchronous = asynchronous
        self._in_flight = AsyncCallsQueue()

    def save(self, root: str | Path, step: int, *, progress: dict[str, Any], loader: Any | None) -> Path:
        """Write `root/iter_%07d`; a save that is still in flight is waited for first.

        Everything goes into a directory of another name first, which is renamed when all ranks have written: a run
        that dies in between leaves the previous checkpoint as the latest one.

        Args:
            root: Directory of all checkpoints of the run.
            step: Steps trained so far.
            progress: Counters, plain values, equal on all ranks.
            loader: Saves the data position of its data-parallel rank; None on ranks that do not write one.

        Returns:
            The checkpoint's directory; an asynchronous save appears there later.
        """
        self.wait()
        target = checkpoint_path(root, step)
        unfinished = unfinished_path(target)
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        state = self._sharded_state(is_loading=False)
        state.update(scheduler=self._scheduler.state_dict(), progress=progress, settings=self._settings)
        request = dist_checkpointing.save(state, str(unfinished), async_sharded_save=self._asynchronous)
        if loader is not None:
            loader.save_checkpoint(unfinished)
        if request is None:
            self._finish(target)
        else:
            request.add_finalize_fn(partial(self._finish, target))
            self._in_flight.schedule_async_request(request)
        return target

    def poll(self) -> None:
        """Finish the save in flight if all ranks have written."""
        self._in_flight.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Finish the save in flight, as late as it takes."""
        self._in_flight.maybe_finalize_async_calls(blocking=True)

    def abort(self) -> None:
        """End this rank's writing process without finishing its save; for a run that has failed."""
        for call in self._in_flight.async_calls:
            call.async_caller.close(abort=True)
        self._in_flight.async_calls.clear()

    def load(self, root: str | Path, *, loader: Any | None, restart_data: bool) -> dict[str, Any] | None:
        """Restore the latest checkpoint under `root` in place. With `restart_data` the data position is left out.

        Returns:
            The `progress` that was saved, or None when `root` holds no checkpoint.

        Raises:
            ValueError: The latest checkpoint is named but not there, or is one of other settings.
        """
        directory = latest_checkpoint(root)
        if directory is None:
            return None
        # Data that starts over may do so in another order.
        unread = ("data_seed",) if restart_data else ()
        _check_settings(directory, {name: value for name, value in self._settings.items() if name not in unread})
        state = dist_checkpointing.load(self._sharded_state(is_loading=True), str(directory))
        self._load_weights(state)
        load_optimizer_state(self._optimizer, state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        if loader is not None:
            loader.load_checkpoint(directory, restart_data=restart_data)
        return state["progress"]

    def load_pretrained(self, root: str | Path) -> None:
        """Take the weights of the latest checkpoint under `root`, whatever it trained, and nothing else.

        Raises:
            ValueError: There is no checkpoint, or it is one of another model.
        """
        directory = latest_checkpoint(root)
        if directory is None:
            raise ValueError(
                f"{root} holds no checkpoint, so training would start from random weights. Give the --save directory "
                "of the earlier stage."
            )
        _check_settings(directory, {name: self._settings[name] for name in ("model_name", "bf16")})
        self._load_weights(dist_checkpointing.load(self._sharded_model(), str(directory)))
        self._optimizer.reload_model_params()  # a mixed-precision optimizer has taken its copy already

    def _load_weights(self, state: dict[str, Any]) -> None:
        for i, chunk in enumerate(self._model):
            chunk.module.load_state_dict(state[f"model{i}"])

    def _sharded_model(self) -> dict[str, Any]:
        return {f"model{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(self._model)}

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        models = self._sharded_model()
        optimizer = sharded_optimizer_state(self._optimizer, dict(models), is_loading=is_loading)
        return {**models, "optimizer": optimizer}

    def _finish(self, target: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            publish(target, self._keep)
        dist.barrier()


def saved_settings(directory: Path) -> dict[str, Any]:
    """The `settings` of a checkpoint, without its tensors."""
    return dist_checkpointing.load_common_state_dict(str(directory))["settings"]


def _check_settings(directory: Path, expected: Mapping[str, Any]) -> None:
    saved = saved_settings(directory)
    differing = [name for name in expected if saved.get(name) != expected[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"the checkpoint {directory} was saved with --{name.replace('_', '-')} {saved.get(name)}, this run has "
            f"{expected[name]}: its state does not fit. Resume with the same setting, or take the weights alone with "
            "--pretrained-checkpoint."
        )
