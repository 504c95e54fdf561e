"""Loader state on disk: one file per data-parallel rank, laid out as Megatron's example and Energon's tools read it."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.energon.flavors.base_dataset import FlexState

# Beside Energon's state classes: the arrays of the random generators. Protocol 2 spells bytes as a call of
# _codecs.encode(text, "latin1"), which is a pure function.
_ALLOWED_GLOBALS = frozenset(
    {
        ("_codecs", "encode"),
        ("collections", "OrderedDict"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.numeric", "_frombuffer"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.numeric", "_frombuffer"),
        ("torch", "ByteStorage"),
        ("torch._utils", "_rebuild_tensor_v2"),
    }
)


class _StateUnpickler(pickle.Unpickler):
    """Builds Energon's state classes and nothing else, so that a state file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_GLOBALS:
            return super().find_class(module, name)
        if module.split(".")[:2] == ["megatron", "energon"]:
            found = super().find_class(module, name)
            # Energon keeps state in dataclasses and in FlexState, a dict; unpickling them only sets attributes.
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, FlexState)):
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no part of a loader state")


# torch.load wants a module with these names.
_STATE_PICKLE = SimpleNamespace(__name__="pickle", Unpickler=_StateUnpickler, load=pickle.load, loads=pickle.loads)


def loader_state_path(directory: str | Path, dp_rank: int) -> Path:
    """The file of one data-parallel rank, named as Megatron's multimodal example names it."""
    return Path(directory) / f"train_dataloader_dprank{dp_rank:03d}.pt"


def save_loader_state(state: Any, directory: str | Path, dp_rank: int) -> Path:
    """Writes a loader's state (``save_state_rank()``); a crash leaves the previous file or the new one, never half."""
    path = loader_state_path(directory, dp_rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    torch.save({"dataloader_state_dict": state}, unfinished)
    unfinished.replace(path)
    return path


def load_loader_state(directory: str | Path, dp_rank: int) -> Any:
    """Reads the loader state of one data-parallel rank without executing code from the file.

    Raises:
        ValueError: the file is missing, unreadable or no loader state; never a silent restart.
    """
    path = loader_state_path(directory, dp_rank)
    remedy = (
        "Going on would train data again that this run has seen. Give the checkpoint's directory, or start the data "
        "over with --restart-data."
    )
    if not path.is_file():
        found = sorted(p.name for p in path.parent.glob("train_dataloader_dprank*.pt"))
        raise ValueError(f"No loader state {path}; the directory holds {found or 'none'}. {remedy}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_STATE_PICKLE)
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError, AttributeError, ImportError) as error:
        raise ValueError(f"The loader state {path} cannot be read: {error}. {remedy}") from error
    if not isinstance(content, dict) or "dataloader_state_dict" not in content:
        raise ValueError(f"{path} holds {type(content).__name__} without 'dataloader_state_dict'. {remedy}")
    return content["dataloader_state_dict"]
