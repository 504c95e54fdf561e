"""The training loop in every parallel layout: losses of a one-rank run over the same samples, resumes across layouts.

The references are trained in the test's own process; one launch of two processes runs all layouts of two, another
(slow) those of four.
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

pytestmark = [pytest.mark.slow, pytest.mark.megatron_in_process]

STEPS = 3
SAMPLES_PER_STEP = 4
# Same arithmetic in another place: float64 rounding only. TP sums in another order around a float32 cross-entropy.
EXACT, TENSOR_PARALLEL, FLOAT32 = 1e-9, 1e-6, 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """World size and flags of one case; `packed` cases are compared with a packed reference."""

    world: int = 2
    tp: int = 1
    pp: int = 1
    flags: tuple[str, ...] = ()
    packed: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def tolerance(self) -> float:
        if self.dtype == torch.float32:
            return FLOAT32
        return EXACT if self.tp == 1 else TENSOR_PARALLEL

    @property
    def data_parallel_size(self) -> int:
        return self.world // (self.tp * self.pp)

    def arguments(self) -> list[str]:
        return [
            *("--tensor-model-parallel-size", str(self.tp)),
            *("--pipeline-model-parallel-size", str(self.pp)),
            *("--num-workers", "0"),
            *(PACKING if self.packed else ()),
            *self.flags,
        ]


PACKING = ("--packing-buffer-size", "8", "--seq-length", "512")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")
SEQUENCE = ("--sequence-parallel",)
LAYOUTS = {
    "dp2": Layout(),
    "dp2_distributed_optimizer": Layout(flags=("--use-distributed-optimizer",), dtype=torch.float32),
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
}
# The layouts that train one step each, every one from the checkpoint of the one before, at the same DP.
CHAINS = {2: ("tp2", "pp2_vpp2", "tp2_sequence_parallel"), 4: ("dp2_tp2", "dp2_pp2_vpp2", "dp2_tp2")}


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
    """All layouts of this world size, and the chain of resumes under the key `chain`."""
    results = {
        name: train_in_layout(name, data, output / name)
        for name, layout in LAYOUTS.items()
        if layout.world == world_size
    }
    results["chain"] = run_chain(CHAINS[world_size], data, output / f"chain{world_size}")
    return results


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
def references(output) -> dict[tuple[int, bool], Run]:
    """Runs of one rank in this process, by the data-parallel size whose samples they train, and packed or not.

    Energon deals samples to rank x worker: one rank with two workers sees at every step what two ranks see.
    """
    layouts = {
        (1, False): Layout(world=1),
        (1, True): Layout(world=1, packed=True),
        (2, False): Layout(world=1, flags=("--num-workers", "2")),
    }
    with one_rank():
        return {
            key: train(parse(layout, str(output / "data"), output / f"one{key}")) for key, layout in layouts.items()
        }


@pytest.fixture(scope="module")
def results_of(output) -> Callable[[int], list[dict[str, Run]]]:
    """World size -> every rank's results; each world size is launched once."""
    return functools.cache(
        lambda world_size: run_ranks(run_layouts, world_size, str(output / "data"), output, timeout_s=280)
    )


def slow_from_four(world_size: int) -> Any:
    return pytest.mark.slow if world_size > 2 else ()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=slow_from_four(layout.world)) for name, layout in LAYOUTS.items()],
)
def test_layout_gives_the_losses_of_one_rank(references, results_of, name: str) -> None:
    layout = LAYOUTS[name]
    expected = references[layout.data_parallel_size, layout.packed]
    assert expected.losses[-1] < expected.losses[0]
    for result in results_of(layout.world):
        run = result[name]
        assert run.losses == pytest.approx(expected.losses, rel=layout.tolerance)
        assert run.num_samples == expected.num_samples
        assert run.validation == pytest.approx(expected.validation, rel=layout.tolerance)


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=slow_from_four(n)) for n in CHAINS])
def test_a_run_resumes_in_other_layouts_at_the_same_data_parallel_size(references, results_of, world_size: int) -> None:
    expected = references[world_size // 2, False]
    for result in results_of(world_size):
        run = result["chain"]
        assert run.losses == pytest.approx(expected.losses, rel=TENSOR_PARALLEL)
        assert run.num_samples == expected.num_samples
        assert run.validation == pytest.approx(expected.validation, rel=TENSOR_PARALLEL)


def test_packs_hold_several_samples(references) -> None:
    assert references[1, False].num_samples == STEPS * SAMPLES_PER_STEP
    assert references[1, True].num_samples > 2 * STEPS * SAMPLES_PER_STEP
