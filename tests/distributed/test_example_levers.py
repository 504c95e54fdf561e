"""Levers in the example's loop, on 2 real ranks: balance changes no loss, ODB resumes exactly.

All of them in all layouts, each resumed: `test_example_matrix`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiak_ext.run_summary import read_records
from examples.llava_ov.build_demo_data import BuildConfig, build

from .launch import run_ranks
from .test_example_training import start, train

STEPS = 3
BALANCE = ("--use-data-balance", "--data-balance-sorting-algo", "lpt", "--data-balance-threshold", "0")
RUNS = {
    "none": (),
    "balance_step": BALANCE,
    "balance_encoder": (*BALANCE, "--data-balance-scope", "encoder"),
    "length_sort+balance_step": ("--length-sort-pool-size", "48", *BALANCE),
    "odb_packed": (
        *("--odb-token-budget", "400", "--odb-buffer-size", "40"),
        *("--odb-policy", "packed", "--odb-target", "min"),
    ),
}
RESUMED = ("odb_packed",)


def _arguments(data: str, output: Path, name: str, *flags: str) -> Any:
    from examples.llava_ov.arguments import parse_train_args

    return parse_train_args(
        [
            *("--data-path", data),
            *("--metrics-dir", str(output / name)),
            *("--num-workers", "2"),
            *("--micro-batch-size", "3"),
            *("--global-batch-size", "12"),
            *("--train-iters", str(STEPS)),
            *flags,
        ]
    )


def _every_lever(rank: int, world_size: int, data: str, output: Path) -> dict[str, list[float]]:
    from examples.llava_ov import cpu_shim

    cpu_shim.install()
    device = start(_arguments(data, output, "none"))
    losses = {name: train(_arguments(data, output, name, *flags), device) for name, flags in RUNS.items()}
    for name in RESUMED:
        directory = str(output / "checkpoints" / name)
        halves = (
            ("--save", directory, "--exit-interval", str(STEPS - 1)),
            ("--load", directory),
        )
        losses[f"{name} resumed"] = [
            loss
            for half in halves
            for loss in train(_arguments(data, output, f"{name} resumed", *RUNS[name], *half), device)
        ]
    return losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, list[float]], Path]:
    folder = tmp_path_factory.mktemp("levers")
    build(folder / "data", BuildConfig(num_samples=300, mean_length=60, max_length=400))
    first, second = run_ranks(_every_lever, 2, str(folder / "data"), folder / "runs", timeout_s=280)
    assert first == second, "all ranks report the same losses"
    return first, folder / "runs"


@pytest.mark.parametrize("balanced", ["balance_step", "balance_encoder"])
def test_balance_changes_who_computes_and_not_what_is_learned(runs, balanced):
    losses, _ = runs
    assert len(losses[balanced]) == STEPS
    np.testing.assert_allclose(losses[balanced], losses["none"], rtol=2e-5)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_to_identical_losses(runs, name):
    losses, _ = runs
    assert losses[f"{name} resumed"] == losses[name]


def test_balance_evens_out_the_steps(runs):
    _, output = runs

    def efficiency(name: str) -> float:
        records = read_records(output / name)
        return sum(record.cost_mean for record in records) / sum(record.cost_max for record in records)

    assert efficiency("balance_step") > efficiency("none")
    assert efficiency("balance_encoder") > efficiency("none"), "images count where they were encoded"
    assert efficiency("length_sort+balance_step") > 0.95


def test_packed_groups_have_no_padding_and_are_counted_by_samples(runs):
    _, output = runs
    records = read_records(output / "odb_packed")
    assert all(record.num_tokens == record.num_token_slots for record in records)
    for step in {record.step for record in records}:
        counted = [record.num_samples for record in records if record.step == step]
        logged = {record.scalars["samples"] for record in records if record.step == step}
        assert logged == {sum(counted)}
    assert {record.counters["deferred_samples"] >= 0 for record in records} == {True}


def test_the_log_says_what_the_balance_did(runs):
    _, output = runs
    for name in ("balance_step", "balance_encoder"):
        lines = [json.loads(line) for line in (output / name / "steps_rank00000.jsonl").read_text().splitlines()]
        assert all(line["scalars"]["balance/imbalance_after"] >= 1 for line in lines)
        assert any(line["scalars"]["balance/bytes_moved"] > 0 for line in lines)
