"""The example in real processes: 2 ranks x 2 data workers, length sort on, from shards on disk to checkpoints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from aiak_ext.analysis.model_dims import ModelDims
from aiak_ext.cli import main
from aiak_ext.metrics import StepRecord
from aiak_ext.run_summary import read_records, summarize
from examples.llava_ov.build_demo_data import BuildConfig, build
from examples.llava_ov.config import get_model_config
from examples.llava_ov.demo_encoder import DATA_VARIABLE

from .launch import run_ranks

NUM_SAMPLES = 576
NUM_TRAIN = 540  # 36 are held out
POOL_SIZE = 135  # the samples of one of the four workers
STEPS = 4
DEMO_ROWS = ["none", "length_sort"]
DEMO_SAMPLES = 32
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llava_ov"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("example") / "data"
    # Short samples, so that a step takes little time; the spread of lengths is the usual one.
    build(path, BuildConfig(num_samples=NUM_SAMPLES, mean_length=60, max_length=400))
    return str(path)


def arguments(data: str, output: Path, name: str, *flags: str) -> argparse.Namespace:
    from examples.llava_ov.arguments import parse_train_args

    return parse_train_args(
        [
            *("--data-path", data),
            *("--metrics-dir", str(output / name)),
            *("--num-workers", "2"),
            *("--micro-batch-size", "3"),
            *("--global-batch-size", "12"),
            *("--train-iters", str(STEPS)),
            *("--length-sort-pool-size", str(POOL_SIZE)),
            *flags,
        ]
    )


def start(args: argparse.Namespace) -> torch.device:
    from examples.llava_ov.distributed_setup import initialize_megatron, start_process_group

    device = start_process_group(args.distributed_timeout_minutes)
    initialize_megatron(args)
    return device


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    from examples.llava_ov.training import Trainer

    with Trainer(args, device) as trainer:
        return trainer.train()


def epoch_of_batches(args: argparse.Namespace) -> tuple[list[list[str]], list[int]]:
    """Keys and padded length of every micro batch of this rank's first epoch."""
    import aiak_ext
    from examples.llava_ov.data_loading import build_loader, tokenizer_of

    loader = build_loader(args, aiak_ext.ExtensionConfig.from_args(args), tokenizer_of(args))
    try:
        batches = [next(loader) for _ in range(NUM_TRAIN // 2 // args.micro_batch_size)]
    finally:
        loader.close()
    return [batch.__key__ for batch in batches], [batch.tokens.shape[1] for batch in batches]


def replayed_run(args: argparse.Namespace, device: torch.device) -> tuple[list[float], int]:
    """Losses and forward calls of a run in which Megatron runs every step again, on replayed batches."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    from examples.llava_ov import training

    machine = get_rerun_state_machine()
    calls = 0
    forward = training.ForwardStep.__call__

    def counted(self: Any, data_iterator: Any, model: Any) -> Any:
        nonlocal calls
        calls += 1
        machine.rerun_requested = machine.continue_requested = True  # once more, then go on
        return forward(self, data_iterator, model)

    training.ForwardStep.__call__ = counted
    try:
        return train(args, device), calls
    finally:
        training.ForwardStep.__call__ = forward


def first_launch(rank: int, world_size: int, data: str, output: Path) -> dict[str, Any]:
    from examples.llava_ov import cpu_shim

    cpu_shim.install()
    args = arguments(data, output, "straight")
    device = start(args)
    # Without Energon's own shuffle, which carries samples over the end of an epoch.
    results: dict[str, Any] = {
        "epoch": epoch_of_batches(arguments(data, output, "epoch", "--shuffle-buffer-size", "1"))
    }
    results["straight"] = train(args, device)
    save = ("--save", str(output / "checkpoints"), "--exit-interval", str(STEPS // 2))
    results["first half"] = train(arguments(data, output, "resumed", *save), device)
    results["replayed"] = replayed_run(arguments(data, output, "replayed", "--train-iters", "2"), device)
    results["broken"] = broken_run(arguments(data, output, "broken"), device)
    return results


def broken_run(args: argparse.Namespace, device: torch.device) -> str:
    """What a run says whose weights are not numbers on one rank."""
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    from examples.llava_ov.training import Trainer

    with Trainer(args, device) as trainer:
        if torch.distributed.get_rank() == 1:
            next(trainer.model[0].parameters()).data.fill_(float("nan"))
        try:
            trainer.train()
        except RuntimeError as error:
            return str(error)
        finally:
            destroy_rerun_state_machine()
    return "nothing"


def second_launch(rank: int, world_size: int, data: str, output: Path) -> dict[str, Any]:
    """Other processes: everything that is continued comes from files."""
    from examples.llava_ov import cpu_shim
    from examples.llava_ov.training import Trainer

    cpu_shim.install()
    args = arguments(data, output, "resumed", "--load", str(output / "checkpoints"))
    device = start(args)
    with Trainer(args, device) as trainer:
        results: dict[str, Any] = {"second half": trainer.train(), "num_samples": trainer.num_samples}
        results["validation"] = trainer.evaluate()
    return results


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def first(data, output) -> list[dict[str, Any]]:
    return run_ranks(first_launch, 2, data, output, timeout_s=240)


@pytest.fixture(scope="module")
def second(data, output, first) -> list[dict[str, Any]]:
    return run_ranks(second_launch, 2, data, output, timeout_s=240)


def test_an_epoch_holds_every_sample_once_and_ranks_see_like_lengths(first):
    keys = [key for result in first for batch in result["epoch"][0] for key in batch]
    assert len(keys) == NUM_TRAIN
    assert len(set(keys)) == NUM_TRAIN
    lengths = [result["epoch"][1] for result in first]
    assert np.corrcoef(lengths)[0, 1] > 0.95


def test_all_ranks_report_the_same_loss_which_falls(first):
    assert first[0]["straight"] == first[1]["straight"]
    assert len(first[0]["straight"]) == STEPS
    assert first[0]["straight"][-1] < first[0]["straight"][0]


def test_a_resumed_run_gives_the_losses_of_a_straight_one(first, second):
    assert [*first[0]["first half"], *second[0]["second half"]] == first[0]["straight"]
    assert second[0]["num_samples"] == STEPS * 12


def comparable(record: StepRecord) -> StepRecord:
    """Without times, and without what workers count: after a resume they encode pooled samples again."""
    timed = ("samples_per_s", "tokens_per_s", "wait_share")
    scalars = {name: value for name, value in record.scalars.items() if name not in timed}
    return dataclasses.replace(record, step_time_s=0, data_time_s=0, grad_sync_wait_s=0, scalars=scalars, counters={})


def test_metrics_of_the_resumed_run_continue(first, second, output):
    records = read_records(output / "resumed")
    assert [(record.step, record.rank) for record in records] == [(s, r) for s in range(STEPS) for r in range(2)]
    assert [record.emitted_samples for record in records if record.rank == 0] == [12 * (s + 1) for s in range(STEPS)]
    for one, other in zip(records[::2], records[1::2]):
        assert one.cost_max == other.cost_max == max(one.cost, other.cost)
        assert one.cost_mean == pytest.approx((one.cost + other.cost) / 2)
        assert one.scalars == other.scalars
    straight = read_records(output / "straight")
    assert [comparable(record) for record in records] == [comparable(record) for record in straight]
    summary = summarize(straight)
    assert summary.num_samples == STEPS * 12
    assert 0.5 < summary.step_efficiency <= 1
    assert 0 <= summary.wait_share < 1


def test_learning_rate_follows_the_emitted_samples(first, output):
    rates = [record.scalars["lr"] for record in read_records(output / "straight") if record.rank == 0]
    total, warmup = STEPS * 12, int(0.05 * STEPS * 12)
    shares = [(12 * (step + 1) - warmup) / (total - warmup) for step in range(STEPS)]
    assert rates == pytest.approx([1e-5 + (1e-3 - 1e-5) * 0.5 * (1 + np.cos(np.pi * share)) for share in shares])


def test_batches_that_megatron_replays_are_unchanged(first, output):
    losses, calls = first[0]["replayed"]
    assert calls == 2 * 2 * 2  # steps x micro batches x runs
    assert losses[0] == first[0]["straight"][0]
    records = read_records(output / "replayed")
    assert [record.num_samples for record in records] == [6] * 4


def test_a_loss_that_is_not_a_number_stops_all_ranks(first):
    for result in first:
        assert result["broken"].startswith(
            "The loss or a gradient of step 0 is not finite, and a second run of the step gave the same"
        )


def test_validation_loss_is_the_same_on_all_ranks(second):
    assert second[0]["validation"] == second[1]["validation"]
    assert 0 < second[0]["validation"] < 20


@pytest.fixture(scope="module")
def demo(data, tmp_path_factory) -> tuple[Path, str]:
    """Output directory of a short demo, and what it printed."""
    output = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "examples.llava_ov.demo", "--data", data, "--output", str(output)]
    done = subprocess.run(
        [*command, "--num-samples", str(DEMO_SAMPLES), *(word for name in DEMO_ROWS for word in ("--rows", name))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@pytest.mark.slow
def test_demo_writes_summary_and_picture(demo):
    output, printed = demo
    runs = json.loads((output / "summary.json").read_text())["runs"]
    assert list(runs) == DEMO_ROWS
    for result in runs.values():
        assert set(result) == {
            *("samples_per_s", "wait_share", "step_efficiency", "padding"),
            *("final_loss", "num_samples", "num_steps"),
        }
        assert result["num_samples"] == DEMO_SAMPLES
    assert runs["length_sort"]["padding"] < runs["none"]["padding"]
    assert (output / "demo.png").is_file()
    assert "length_sort" in printed


@pytest.mark.slow
def test_simulation_of_the_demo_predicts_its_padding_and_step_efficiency(data, demo, tmp_path, monkeypatch):
    """From the data set alone: what the command says before a run is what the run then does."""
    monkeypatch.setenv(DATA_VARIABLE, data)
    settings = ["--as-read", "--shuffle-buffer-size", 64, "--ranks", 2, "--micro-batch", 4]
    settings += ["--pool", DEMO_SAMPLES // 2, "--steps", DEMO_SAMPLES // 8, "--lever", "none", "--lever", "length_sort"]
    model = ["--model-config", EXAMPLE / "tiny.json", "--task-encoder", "examples.llava_ov.demo_encoder:task_encoder"]
    simulated = CliRunner().invoke(main, list(map(str, ["simulate", data, *settings, *model, "--json"])))
    assert simulated.exit_code == 0, simulated.output
    (tmp_path / "predicted.json").write_text(simulated.stdout)
    for name in DEMO_ROWS:
        arguments = ["report", demo[0] / "metrics" / name, "--predicted", tmp_path / "predicted.json", "--json"]
        reported = CliRunner().invoke(main, [*map(str, arguments), "--output", str(tmp_path / "report.html")])
        assert reported.exit_code == 0, reported.output
        prediction = json.loads(reported.stdout)["runs"][0]["prediction"]
        assert prediction["padding"]["simulated"] == pytest.approx(prediction["padding"]["from_costs"], abs=1e-9)
        efficiency = prediction["step efficiency"]
        assert efficiency["simulated"] == pytest.approx(efficiency["from_costs"], abs=0.02)


def test_model_file_of_the_command_has_the_tiny_models_costs():
    from examples.llava_ov.batch_cost import BatchCost

    costs, tiny = ModelDims.from_json(EXAMPLE / "tiny.json").cost_model(), get_model_config("tiny")
    assert costs == BatchCost(tiny).sample_cost_model
