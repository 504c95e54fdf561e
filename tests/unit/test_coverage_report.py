"""The end-of-run report of the example: what was emitted, seen and left over, beside the metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from examples.llava_ov.coverage_report import COVERAGE_FILE
from examples.llava_ov.training import Trainer
from tests.training_run import CPU, arguments, one_rank

pytestmark = pytest.mark.megatron_in_process

ODB = ("--odb-token-budget", "900", "--odb-buffer-size", "6", "--odb-policy", "packed", "--odb-target", "min")


@pytest.fixture(autouse=True)
def megatron() -> Iterator[None]:
    with one_rank():
        yield


def test_run_with_a_quota_reports_what_it_covered(tmp_path, capsys):
    args = arguments(tmp_path, "--train-iters", "99", "--sample-quota", "7", *ODB)
    with Trainer(args, CPU) as trainer:
        batches = []
        watch = trainer._coverage.watch

        trainer._coverage.watch = lambda stream: (batches.append(batch) or batch for batch in watch(stream))
        trainer._data_iterators = trainer._iterators()
        trainer.train()
        num_emitted = trainer.num_samples
    keys = [key for batch in batches for packed in batch.__key__ for key in packed.split(",")]
    report = json.loads((tmp_path / "metrics" / COVERAGE_FILE).read_text())
    assert report["quota"] == 7 <= report["num_emitted"] == num_emitted == len(keys)
    assert report["num_distinct"] == len(set(keys))
    assert 0 < report["num_left_over"] <= 2 * 6, "the buffer and the rest of the round"
    assert report["eta_quota"] == 0.0
    assert report["eta_identity"] == pytest.approx(max(1 - len(set(keys)) / 7, 0))
    assert report["eta_logical"] == pytest.approx(report["num_left_over"] / 7)
    assert f"coverage: {num_emitted} of 7 samples emitted" in capsys.readouterr().out


def test_run_stopped_short_of_its_quota_says_so_and_a_resumed_one_reports_the_rest(tmp_path):
    folder = str(tmp_path / "checkpoints")
    flags = ("--train-iters", "2", "--micro-batch-size", "2", "--sample-quota", "16")
    with Trainer(arguments(tmp_path, *flags, "--save", folder), CPU) as trainer:
        trainer.train()
    first = json.loads((tmp_path / "metrics" / COVERAGE_FILE).read_text())
    assert (first["quota"], first["num_emitted"], first["eta_quota"]) == (16, 4, 0.75)
    with Trainer(arguments(tmp_path, *flags[2:], "--train-iters", "4", "--load", folder), CPU) as trainer:
        trainer.train()
    second = json.loads((tmp_path / "metrics" / COVERAGE_FILE).read_text())
    assert (second["quota"], second["num_emitted"], second["num_left_over"]) == (12, 4, 0)


def test_run_without_a_quota_reports_nothing(tmp_path):
    with Trainer(arguments(tmp_path), CPU) as trainer:
        trainer.train()
    assert not (tmp_path / "metrics" / COVERAGE_FILE).exists()
