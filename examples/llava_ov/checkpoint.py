"""Checkpoints of model, optimizer, schedule and data position, complete or not there at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# The names that Megatron uses, so that its tools find their way.
_LATEST_FILE = "latest_checkpointed_iteration.txt"
_UNFINISHED_SUFFIX = ".unfinished"


def save_checkpoint(
    root: str | Path,
    step: int,
    *,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    progress: dict[str, Any],
    loader: Any | None,
) -> Path:
    """Write `root/iter_%07d`; a collective call over all ranks.

    Everything goes into a directory of another name first, which is renamed when all ranks have written: a run that
    dies in between leaves the previous checkpoint as the latest one.

    Args:
        root: Directory of all checkpoints of the run.
        step: Steps trained so far.
        model: Model chunks of this rank.
        optimizer: Its optimizer.
        scheduler: Of learning rate and weight decay.
        progress: Counters, plain values, equal on all ranks.
        loader: Saves the data position of its data-parallel rank; None on ranks that do not write one.

    Returns:
        The checkpoint's directory.
    """
    target = Path(root) / f"iter_{step:07d}"
    unfinished = target.with_name(target.name + _UNFINISHED_SUFFIX)
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, is_loading=False)
    state.update(scheduler=scheduler.state_dict(), progress=progress)
    dist_checkpointing.save(state, str(unfinished))
    if loader is not None:
        loader.save_checkpoint(unfinished)
    dist.barrier()
    if dist.get_rank() == 0:
        publish(unfinished, target)
    dist.barrier()
    return target


def load_checkpoint(
    root: str | Path,
    *,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    loader: Any | None,
    restart_data: bool,
) -> dict[str, Any] | None:
    """Restore the latest checkpoint under `root` in place; a collective call over all ranks.

    With `restart_data` the data position is left out.

    Returns:
        The `progress` that was saved, or None when `root` holds no checkpoint.

    Raises:
        ValueError: The latest checkpoint is named but not there.
    """
    directory = latest_checkpoint(root)
    if directory is None:
        return None
    state = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), str(directory))
    for i, chunk in enumerate(model):
        chunk.module.load_state_dict(state[f"model{i}"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if loader is not None:
        loader.load_checkpoint(directory, restart_data=restart_data)
    return state["progress"]


def latest_checkpoint(root: str | Path) -> Path | None:
    """Directory of the latest complete checkpoint, None when there is none.

    Raises:
        ValueError: The latest checkpoint is named but not there.
    """
    latest = Path(root) / _LATEST_FILE
    if not latest.is_file():
        return None
    directory = Path(root) / f"iter_{int(latest.read_text()):07d}"
    if not directory.is_dir():
        raise ValueError(
            f"{latest} names {directory.name}, which is not there, so the run cannot be resumed. Restore that "
            f"directory, or write the number of another iter_* directory into {_LATEST_FILE}."
        )
    return directory


def _sharded_state(
    model: list[DistributedDataParallel], optimizer: MegatronOptimizer, is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {f"model{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(model)}
    models_only = dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(models_only, is_loading=is_loading)
    return state


def publish(unfinished: Path, target: Path) -> None:
    """Give a finished checkpoint its name, then name it the latest; each by one atomic rename."""
    shutil.rmtree(target, ignore_errors=True)  # a run that was resumed before this step writes it again
    unfinished.rename(target)
    latest = target.with_name(_LATEST_FILE)
    note = latest.with_name(latest.name + _UNFINISHED_SUFFIX)
    note.write_text(str(int(target.name.removeprefix("iter_"))))
    note.replace(latest)
