"""Validation losses of a run: one JSON line and one TensorBoard point each, on rank 0."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

VALIDATION_FILE = "validation.jsonl"


class ValidationLog:
    """Appends to `directory/validation.jsonl`; ranks other than the first write nothing."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / VALIDATION_FILE if dist.get_rank() == 0 else None

    def add(self, step: int, num_samples: int, loss: float) -> None:
        """Note the loss after `step` steps and `num_samples` emitted samples."""
        if self._path is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # here: importing it takes seconds

        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "num_samples": num_samples, "loss": loss}) + "\n")
        # Validations are rare: a writer for each point costs less than one more thing to close.
        with SummaryWriter(str(self._path.parent)) as writer:
            writer.add_scalar("validation/loss", loss, step)
