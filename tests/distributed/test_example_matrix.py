"""Every lever in every parallel layout of the example, interrupted and resumed: the losses of plain data parallelism.

Two ranks take the straight run of each lever; four ranks take its run in each layout with two data-parallel replicas,
which therefore train the same samples, and stop and resume it on the way.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.training import Trainer
from tests.training_run import CPU

from .launch import run_ranks
from .test_example_layouts import EXACT, SEQUENCE, VIRTUAL, Layout, parse, with_megatron

pytestmark = pytest.mark.slow

DATA_PARALLEL = Layout()
LAYOUTS = {
    "dp2_tp2": Layout(world=4, tp=2, flags=SEQUENCE),
    "dp2_pp2": Layout(world=4, pp=2),
    "dp2_pp2_vpp2": Layout(world=4, pp=2, flags=VIRTUAL),
}

SORT = ("--length-sort-pool-size", "24")
ODB = ("--odb-token-budget", "200", "--odb-buffer-size", "24")
PACKED_ODB = (*ODB, "--odb-policy", "packed", "--odb-target", "min")
STEP_BALANCE = ("--use-data-balance", "--data-balance-sorting-algo", "lpt", "--data-balance-threshold", "0")
ENCODER_BALANCE = (*STEP_BALANCE, "--data-balance-scope", "encoder")
ONLINE_PACKS = ("--packing-buffer-size", "8", "--seq-length", "192", "--micro-batch-size", "1")
LEVERS = {
    "none": (),
    "length_sort": SORT,
    "odb": ODB,
    "odb_packed": PACKED_ODB,
    "balance_step": STEP_BALANCE,
    "balance_encoder": ENCODER_BALANCE,
    "packs+length_sort": (*ONLINE_PACKS, *SORT),
    "packs+balance_step": (*ONLINE_PACKS, *STEP_BALANCE),
    "packs+balance_encoder": (*ONLINE_PACKS, *ENCODER_BALANCE),
}
STEPS = 2
COMMON = ("--num-workers", "1", "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", str(STEPS))
# Balance moves work between ranks; a step still trains the samples that it trains without.
SAME_SAMPLES = {
    "balance_step": "none",
    "balance_encoder": "none",
    "packs+balance_encoder": "packs+balance_step",
}


@dataclasses.dataclass(frozen=True)
class Run:
    losses: list[float]
    num_samples: int


def arguments(layout: Layout, lever: str, data: str, output: Path, *flags: str) -> argparse.Namespace:
    return parse(layout, data, output / "metrics", *COMMON, *LEVERS[lever], *flags)


def train(args: argparse.Namespace) -> Run:
    with Trainer(args, CPU) as trainer:
        return Run(trainer.train(), trainer.num_samples)


def straight_runs(rank: int, world_size: int, data: str, output: Path) -> dict[str, Run]:
    with with_megatron(arguments(DATA_PARALLEL, "none", data, output)):
        return {lever: train(arguments(DATA_PARALLEL, lever, data, output / lever)) for lever in LEVERS}


def resumed_runs(rank: int, world_size: int, name: str, data: str, output: Path) -> dict[str, Run]:
    layout = LAYOUTS[name]
    # Once for all levers: process groups keep their threads and sockets until the process ends.
    with with_megatron(arguments(layout, "none", data, output)):
        return {lever: resumed_run(layout, lever, data, output / lever) for lever in LEVERS}


def resumed_run(layout: Layout, lever: str, data: str, output: Path) -> Run:
    """Both halves of a run that leaves after its first step."""
    directory = str(output / "checkpoints")
    first = train(arguments(layout, lever, data, output, "--save", directory, "--exit-interval", "1"))
    second = train(arguments(layout, lever, data, output, "--load", directory))
    return Run(first.losses + second.losses, second.num_samples)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("matrix")
    build(output / "data", BuildConfig(num_samples=160, mean_length=40, max_length=160, samples_per_shard=16))
    return output


@pytest.fixture(scope="module")
def straight(output) -> dict[str, Run]:
    first, second = run_ranks(straight_runs, 2, str(output / "data"), output / "straight", timeout_s=280)
    assert first == second, "all ranks report the same losses"
    return first


@pytest.fixture(scope="module")
def resumed_in(output) -> Callable[[str], dict[str, Run]]:
    """Layout -> the runs of all levers. A launch each: torch names groups by how many a process has made before."""

    def launched(name: str) -> dict[str, Run]:
        first, *others = run_ranks(resumed_runs, 4, name, str(output / "data"), output / name, timeout_s=400)
        assert all(other == first for other in others), "all ranks report the same losses"
        return first

    return functools.cache(launched)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lever_in_layout(straight, resumed_in, layout: str, lever: str) -> None:
    run, expected = resumed_in(layout)[lever], straight[lever]
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(expected.losses, rel=LAYOUTS[layout].tolerance)
    assert run.num_samples == expected.num_samples


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lever", LEVERS)
def test_lever_in_data_parallelism(straight, lever: str) -> None:
    """Balance trains the samples of the run without it; every other lever makes other steps of them."""
    losses = straight[lever].losses
    assert len(losses) == STEPS
    if lever in SAME_SAMPLES:
        assert losses == pytest.approx(straight[SAME_SAMPLES[lever]].losses, rel=EXACT)
    else:
        others = [name for name in LEVERS if name not in (*SAME_SAMPLES, lever)]
        assert all(losses != pytest.approx(straight[name].losses, rel=EXACT) for name in others)
