"""The training loop in every parallel layout: losses of a one-rank run over the same samples, resumes across layouts.

The references are trained in the test's own process; one launch of two processes runs all layouts of two, another those
of four.
Weights and optimizer are float64, so that what differs is not rounding; no gradient is clipped, because Megatron's
clipping takes float32 only, as its distributed optimizer does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import destroy_rerun_state_machine

from examples.llava_ov.arguments import parse_train_args
from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.distributed_setup import initialize_megatron
from examples.llava_ov.training import Trainer
from tests.training_run import CPU, one_rank

from .launch import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.megatron_in_process, pytest.mark.timeout(600)]

STEPS = 3
SAMPLES_PER_STEP = 4
# Same arithmetic in another place: float64 rounding only. TP sums in another order around a float32 cross-entropy.
EXACT, TENSOR_PARALLEL, FLOAT32 = 1e-9, 1e-6, 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """World size and flags of one case, which is compared with a reference that packs and trains the same."""

    world: int = 2
    tp: int = 1
    pp: int = 1
    flags: tuple[str, ...] = ()
    packed: bool = False
    trained: str = "all"
    dtype: torch.dtype = torch.float64

    @property
    def tolerance(self) -> float:
        if self.dtype == torch.float32:
            return FLOAT32
        return EXACT if self.tp == 1 else TENSOR_PARALLEL

    @property
    def reference(self) -> tuple[int, bool, str]:
        return self.world // (self.tp * self.pp), self.packed, self.trained

    def arguments(self) -> list[str]:
        return [
            *("--tensor-model-parallel-size", str(self.tp)),
            *("--pipeline-model-parallel-size", str(self.pp)),
            *("--num-workers", "0"),
            *("--trainable-modules", self.trained),
            *(PACKING if self.packed else ()),
            *self.flags,
        ]


PACKING = ("--packing-buffer-size", "8", "--seq-length", "512")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")
SEQUENCE = ("--sequence-parallel",)


def sharded(**layout: Any) -> Layout:
    return Layout(flags=("--use-distributed-optimizer",), dtype=torch.float32, **layout)


LAYOUTS = {
    "dp2": Layout(),
    "dp2_distributed_optimizer": sharded(),
    "pp2_adapter_distributed_optimizer": sharded(pp=2, trained="adapter"),
    "tp2": Layout(tp=2),
    "tp2_sequence_parallel": Layout(tp=2, flags=(*SEQUENCE, *RECOMPUTE)),
    "tp2_sequence_parallel_packed": Layout(tp=2, flags=SEQUENCE, packed=True),
    "pp2": Layout(pp=2),
    "pp2_packed": Layout(pp=2, packed=True),
    "pp2_vpp2": Layout(pp=2, flags=VIRTUAL),
    "pp4": Layout(world=4, pp=4),
    "tp2_pp2_sequence_parallel": Layout(world=4, tp=2, pp=2, flags=SEQUENCE),
    "dp2_tp2": Layout(world=4, tp=2),
    "dp2_pp2_vpp2": Layout(world=4, pp=2, flags=VIRTUAL),
    "dp2_tp2_distributed_optimizer": sharded(world=4, tp=2),
    "dp2_pp2_distributed_optimizer": sharded(world=4, pp=2),
}
# The layouts that train one step each, every one from the checkpoint of the one before, at the same DP.
CHAINS = {
    "two_ranks": ("tp2", "pp2_vpp2", "tp2_sequence_parallel"),
    "distributed_optimizer": ("dp2_distributed_optimizer",) * STEPS,
    "stage_that_trains_nothing": ("pp2_adapter_distributed_optimizer",) * STEPS,
    "four_ranks": ("dp2_tp2", "dp2_pp2_vpp2", "dp2_tp2"),
    "distributed_optimizer_in_other_layouts": (
        *("dp2_tp2_distributed_optimizer", "dp2_pp2_distributed_optimizer", "dp2_tp2_distributed_optimizer"),
    ),
}


def parse(layout: Layout, data: str, output: Path, *flags: str) -> argparse.Namespace:
    args = parse_train_args(
        [
            *("--data-path", data),
            *("--metrics-dir", str(output)),
            *("--global-batch-size", str(SAMPLES_PER_STEP)),
            *("--train-iters", str(STEPS)),
            *("--clip-grad", "0"),
            *("--max-pixels", "12544"),
            *layout.arguments(),
            *flags,
        ]
    )
    args.params_dtype = layout.dtype
    return args


@dataclasses.dataclass(frozen=True)
class Run:
    """What one rank saw of one run."""

    losses: list[float]
    num_samples: int
    validation: float


def train(args: argparse.Namespace) -> Run:
    with Trainer(args, CPU) as trainer:
        return Run(trainer.train(), trainer.num_samples, trainer.evaluate())


def train_in_layout(name: str, data: str, output: Path, *flags: str) -> Run:
    args = parse(LAYOUTS[name], data, output, *flags)
    with with_megatron(args):
        return train(args)


@contextmanager
def with_megatron(args: argparse.Namespace) -> Iterator[None]:
    """Megatron's state of one of several runs in a process; gone afterwards."""
    initialize_megatron(args)
    try:
        yield
    finally:
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()


def run_layouts(rank: int, world_size: int, data: str, output: Path) -> dict[str, Run]:
    """All layouts and chains of this world size, by name."""
    straight = {
        name: train_in_layout(name, data, output / name)
        for name, layout in LAYOUTS.items()
        if layout.world == world_size
    }
    chains = {
        name: run_chain(layouts, data, output / f"chain_{name}")
        for name, layouts in CHAINS.items()
        if LAYOUTS[layouts[0]].world == world_size
    }
    return {**straight, **chains}


def run_chain(names: tuple[str, ...], data: str, output: Path) -> Run:
    checkpoints = str(output / "checkpoints")
    save = ("--save", checkpoints, "--load", checkpoints, "--exit-interval", "1", "--keep-checkpoints", "2")
    losses = []
    for step, name in enumerate(names):
        run = train_in_layout(name, data, output / "metrics", *save, *(("--async-save",) if step % 2 else ()))
        assert len(run.losses) == 1
        losses += run.losses
    return Run(losses, run.num_samples, run.validation)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """Directory of all runs; the data set lies in its `data`."""
    output = tmp_path_factory.mktemp("layouts")
    build(output / "data", BuildConfig(num_samples=96, mean_length=60, max_length=300, samples_per_shard=16))
    return output


@pytest.fixture(scope="module")
def references(output) -> dict[tuple[int, bool, str], Run]:
    """Runs of one rank in this process, by the data-parallel size whose samples they train, packed or not, and part.

    Energon deals samples to rank x worker: one rank with two workers sees at every step what two ranks see.
    """
    layouts = {
        (1, False, "all"): Layout(world=1),
        (1, True, "all"): Layout(world=1, packed=True),
        (1, False, "adapter"): Layout(world=1, trained="adapter"),
        (2, False, "all"): Layout(world=1, flags=("--num-workers", "2")),
    }
    with one_rank():
        return {
            key: train(parse(layout, str(output / "data"), output / f"one{key}")) for key, layout in layouts.items()
        }


@pytest.fixture(scope="module")
def results_of(output) -> Callable[[int], list[dict[str, Run]]]:
    """World size -> every rank's results; each world size is launched once."""
    return functools.cache(
        lambda world_size: run_ranks(run_layouts, world_size, str(output / "data"), output, timeout_s=500)
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_losses_of_one_rank(references, results_of, name: str) -> None:
    layout = LAYOUTS[name]
    expected = references[layout.reference]
    assert expected.losses[-1] < expected.losses[0]
    for result in results_of(layout.world):
        check(result[name], expected, layout.tolerance)


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_resumes_in_other_layouts_at_the_same_data_parallel_size(references, results_of, name: str) -> None:
    layouts = [LAYOUTS[each] for each in CHAINS[name]]
    for result in results_of(layouts[0].world):
        check(result[name], references[layouts[0].reference], max(layout.tolerance for layout in layouts))


def check(run: Run, expected: Run, tolerance: float) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=tolerance)
    assert run.num_samples == expected.num_samples
    assert run.validation == pytest.approx(expected.validation, rel=tolerance)


def test_packs_hold_several_samples(references) -> None:
    assert references[1, False, "all"].num_samples == STEPS * SAMPLES_PER_STEP
    assert references[1, True, "all"].num_samples > 2 * STEPS * SAMPLES_PER_STEP
