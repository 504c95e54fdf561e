"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from tqdm import tqdm

from aiak_ext.analysis.cost_file import read_cost_file
from aiak_ext.analysis.memory import RECOMPUTE, MemoryModel
from aiak_ext.analysis.model_dims import DEFAULT_DIMS, ModelDims
from data_balance import SampleCostModel

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
POSITIVE = click.IntRange(min=1)


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in the order given."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda inner, option: option(inner), reversed(options), command)

    return decorate


def user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Show a ValueError, which is a user's mistake, as a message without a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ValueError as error:
            raise click.ClickException(str(error)) from error

    return run


def progress_bar(total: int | None, unit: str) -> Callable[..., Any]:
    """A tqdm bar on a terminal, nothing elsewhere."""
    return functools.partial(tqdm, total=total, unit=f" {unit}", disable=None, leave=False)


model_options = with_options(
    click.option(
        "--model-config",
        type=_FILE,
        help="JSON with the model's dimensions, as for --data-balance-model-config.  [default: LLaVA-OneVision-1.5-4B]",
    ),
    click.option("--cost-file", type=_FILE, help="Costs that `aiak-ext calibrate` measured, instead of derived ones."),
    click.option("--device-memory-gib", type=float, default=80.0, show_default=True, help="Memory of a device."),
    click.option("--tensor-parallel", type=POSITIVE, default=1, show_default=True),
    click.option("--pipeline-parallel", type=POSITIVE, default=1, show_default=True),
    click.option(
        "--recompute", type=click.Choice(RECOMPUTE), default="none", show_default=True, help="Activation recomputation."
    ),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the model options stand for."""

    dims: ModelDims
    costs: SampleCostModel
    device_bytes: float
    tensor_parallel: int
    pipeline_parallel: int
    recompute: str

    @classmethod
    def of(
        cls,
        *,
        model_config: Path | None,
        cost_file: Path | None,
        device_memory_gib: float,
        tensor_parallel: int,
        pipeline_parallel: int,
        recompute: str,
    ) -> Model:
        """The arguments are those of `model_options`."""
        dims = DEFAULT_DIMS if model_config is None else ModelDims.from_json(model_config)
        return cls(
            dims=dims,
            costs=dims.cost_model() if cost_file is None else read_cost_file(cost_file),
            device_bytes=device_memory_gib * 1024**3,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            recompute=recompute,
        )

    def memory(self, num_ranks: int) -> MemoryModel:
        """The memory model on so many data-parallel ranks."""
        return MemoryModel(
            dims=self.dims,
            data_parallel=num_ranks,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            recompute=self.recompute,
        )
