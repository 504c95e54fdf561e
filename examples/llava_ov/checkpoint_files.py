"""Checkpoint directories of a run: each complete or not there at all, the latest one named, old ones removed."""

from __future__ import annotations

import shutil
from pathlib import Path

# The names that Megatron uses, so that its tools find their way.
LATEST_FILE = "latest_checkpointed_iteration.txt"
_UNFINISHED_SUFFIX = ".unfinished"
_SUPERSEDED_SUFFIX = ".superseded"


def checkpoint_path(root: str | Path, step: int) -> Path:
    """Directory of the checkpoint after `step` steps."""
    return Path(root) / f"iter_{step:07d}"


def unfinished_path(target: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(target.name + _UNFINISHED_SUFFIX)


def latest_checkpoint(root: str | Path) -> Path | None:
    """Directory of the latest complete checkpoint, None when there is none.

    Raises:
        ValueError: The latest checkpoint is named but not there.
    """
    latest = Path(root) / LATEST_FILE
    if not latest.is_file():
        return None
    directory = checkpoint_path(root, int(latest.read_text()))
    superseded = directory.with_name(directory.name + _SUPERSEDED_SUFFIX)
    if not directory.is_dir() and superseded.is_dir():  # died between the two renames of `publish`
        return superseded
    if not directory.is_dir():
        raise ValueError(
            f"{latest} names {directory.name}, which is not there, so the run cannot be resumed. Restore that "
            f"directory, or write the number of another iter_* directory into {LATEST_FILE}."
        )
    return directory


def publish(target: Path, keep: int | None = None) -> None:
    """Give a finished checkpoint its name, then name it the latest, then remove what is no longer needed.

    A kill at any point leaves the previous checkpoint or this one as the latest: every change is one rename.

    Args:
        target: The checkpoint's directory; its content lies in `unfinished_path(target)`.
        keep: How many checkpoints up to this one remain; None for all. Later ones, of a run that was resumed from
            an earlier step, are left alone.
    """
    if target.exists():  # a run that was resumed before this step writes it again
        superseded = target.with_name(target.name + _SUPERSEDED_SUFFIX)
        shutil.rmtree(superseded, ignore_errors=True)
        target.rename(superseded)
    unfinished_path(target).rename(target)
    latest = target.with_name(LATEST_FILE)
    note = latest.with_name(latest.name + _UNFINISHED_SUFFIX)
    note.write_text(str(_step_of(target)))
    note.replace(latest)
    _remove_leftovers(target.parent)
    if keep is not None:
        _remove_old(target, keep)


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("iter_"))


def _remove_leftovers(root: Path) -> None:
    """Tidy up after saves that were killed; one save at a time is in flight, and it has just been finished."""
    for directory in root.glob(f"iter_*{_SUPERSEDED_SUFFIX}"):
        target = directory.with_name(directory.name.removesuffix(_SUPERSEDED_SUFFIX))
        if target.exists():
            shutil.rmtree(directory)
        else:
            directory.rename(target)
    for directory in root.glob(f"iter_*{_UNFINISHED_SUFFIX}"):
        shutil.rmtree(directory)


def _remove_old(target: Path, keep: int) -> None:
    up_to_target = sorted(path for path in target.parent.glob("iter_*") if _step_of(path) <= _step_of(target))
    for directory in up_to_target[:-keep]:
        shutil.rmtree(directory)
