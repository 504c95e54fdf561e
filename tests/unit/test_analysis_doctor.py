"""Every check of `aiak-ext doctor` finds its fault, passes without it, and says what to do."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from megatron.energon import stateless

import aiak_ext.config
from aiak_ext.analysis.doctor import RunFacts, diagnose
from aiak_ext.analysis.findings import Finding, has_errors, render_findings
from aiak_ext.analysis.run_settings import settings_from_file, settings_from_flags
from aiak_ext.analysis.store_check import check_reachable, check_store
from tests.energon_data import NumberTaskEncoder

GIB = 1024.0**3


@pytest.fixture(autouse=True)
def all_levers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks do not depend on which levers a version has switched on."""
    monkeypatch.setattr(aiak_ext.config, "UNAVAILABLE_LEVERS", frozenset(), raising=False)


def findings_of(flags: str, **facts: Any) -> list[Finding]:
    facts = {"host_bytes": 512 * GIB, **facts}
    return diagnose(settings_from_flags(flags.split()), RunFacts(**facts))


def only(findings: list[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    assert found.level == "ok" or found.remedy
    return found


def levels(findings: list[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def test_a_good_setting_passes() -> None:
    findings = findings_of("--micro-batch-size 4 --length-sort-pool-size 1000 --num-workers 4", num_ranks=8)
    assert levels(findings) == {"ok"}
    assert only(findings, "pool and batch").message == "a pool is 250 micro batches"
    assert "length sort (pools of 1000)" in only(findings, "levers").message
    assert not has_errors(findings)
    assert render_findings(findings).splitlines()[-1] == f"0 errors, 0 warnings, {len(findings)} checks passed"


def test_no_lever_is_pointed_out() -> None:
    found = only(findings_of("--micro-batch-size 4"), "levers")
    assert found.level == "warning" and "analyze" in found.remedy


def test_every_faulty_lever_and_combination_is_named_at_once() -> None:
    findings = findings_of(
        "--length-sort-pool-size 64 --length-sort-initial-pool-size 100 --odb-token-budget 4096 --use-data-balance"
    )
    messages = [finding.message for finding in findings if finding.check == "settings"]
    assert len(messages) == 3
    assert "initial-pool-size is 100 with a pool size of 64" in messages[0]
    assert "--odb-token-budget 4096 without --calculate-per-token-loss" in messages[1]
    assert "--use-data-balance in scope 'step' without --calculate-per-token-loss" in messages[2]
    assert has_errors(findings)


def test_pool_and_odb_together_are_an_error_and_other_checks_still_run() -> None:
    findings = findings_of(
        "--length-sort-pool-size 16 --odb-token-budget 4096 --calculate-per-token-loss --num-workers 0"
    )
    found = only(findings, "settings")
    assert found.level == "error" and found.remedy == "set one of the two to 0"
    assert only(findings, "workers").level == "warning"


@pytest.mark.parametrize(
    ("flags", "level", "text"),
    [
        ("--micro-batch-size 4 --length-sort-pool-size 20", "warning", "5.0 micro batches"),
        ("--micro-batch-size 4 --length-sort-pool-size 400 --length-sort-shuffle-block 1", "warning", "mix lengths"),
        ("--micro-batch-size 4 --length-sort-pool-size 401", "warning", "rounded up to 404"),
        ("--micro-batch-size 4 --length-sort-pool-size 40", "ok", "10 micro batches"),
    ],
)
def test_pool_against_batch(flags: str, level: str, text: str) -> None:
    found = only(findings_of(flags), "pool and batch")
    assert found.level == level and text in found.message


@pytest.mark.parametrize(
    ("workers", "num_samples", "level"),
    [(0, 10**6, "warning"), (4, 16, "error"), (4, 3200, "warning"), (4, 32_000, "ok")],
)
def test_workers_against_ranks(workers: int, num_samples: int, level: str) -> None:
    findings = findings_of(
        f"--length-sort-pool-size 1000 --num-workers {workers}", num_ranks=8, num_samples=num_samples
    )
    assert only(findings, "workers").level == level
    if num_samples == 3200:
        assert "100 each, less than the 1000" in only(findings, "workers").message


@pytest.mark.parametrize(("given", "level"), [(False, "error"), (None, "warning"), (True, "ok")])
def test_variable_lengths_under_pipeline_parallelism(tmp_path: Path, given: bool | None, level: str) -> None:
    content = {"length-sort-pool-size": 1000, "pipeline_model_parallel_size": 2, "variable_seq_lengths": given}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    found = only(diagnose(settings_from_file(path), RunFacts()), "variable_seq_lengths")
    assert found.level == level
    without_lever = settings_from_flags(["--pipeline-model-parallel-size", "2"])
    assert not [f for f in diagnose(without_lever, RunFacts()) if f.check == "variable_seq_lengths"]


def test_encoder_of_one_replica_has_nothing_to_balance(tmp_path: Path) -> None:
    flags = "--use-data-balance --calculate-per-token-loss"
    assert only(findings_of(flags), "encoder ranks").level == "warning"
    assert only(findings_of(flags, num_ranks=8), "encoder ranks").level == "ok"
    alone = only(findings_of(f"{flags} --world-size 4 --tensor-model-parallel-size 4"), "encoder ranks")
    assert alone.level == "error" and "data-parallel size is 1" in alone.message
    path = tmp_path / "model.json"
    path.write_text('{"image_encoder": {"tp": 2}}')
    other = only(findings_of(f"{flags} --data-balance-model-config {path}", num_ranks=8), "encoder ranks")
    assert other.level == "error" and "takes 2 ranks" in other.message
    missing = only(findings_of(f"{flags} --data-balance-model-config {path}.x", num_ranks=8), "encoder ranks")
    assert missing.level == "error" and "cannot be read" in missing.message


class ForgetfulTaskEncoder(NumberTaskEncoder):
    """Its encode_sample is not marked."""

    def encode_sample(self, sample: Any) -> Any:
        return sample


class CarefulTaskEncoder(NumberTaskEncoder):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return sample


def test_missing_stateless_is_found() -> None:
    flags = "--length-sort-pool-size 1000"
    found = only(findings_of(flags, task_encoder=ForgetfulTaskEncoder()), "@stateless")
    assert found.level == "error" and "encode_sample of ForgetfulTaskEncoder" in found.message
    inexact = f"{flags} --length-sort-allow-inexact-resume"
    assert only(findings_of(inexact, task_encoder=ForgetfulTaskEncoder()), "@stateless").level == "warning"
    assert only(findings_of(flags, task_encoder=CarefulTaskEncoder()), "@stateless").level == "ok"
    assert not [f for f in findings_of("", task_encoder=ForgetfulTaskEncoder()) if f.check == "@stateless"]


def test_pool_bytes_against_memory() -> None:
    flags = "--length-sort-pool-size 1000 --num-workers 4"
    # 1,000 samples of 1 MiB in each of 8 x 4 workers are 31.25 GiB.
    small = only(findings_of(flags, bytes_per_sample=2.0**20, host_bytes=64 * GIB), "pool memory")
    assert small.level == "ok" and small.message.startswith("31.25 GiB on a node of 64.00 GiB")
    assert only(findings_of(flags, bytes_per_sample=2.0**20, host_bytes=62 * GIB), "pool memory").level == "warning"
    over = only(findings_of(flags, bytes_per_sample=2.0**20, host_bytes=30 * GIB), "pool memory")
    assert over.level == "error" and f"--length-sort-max-pool-bytes {int(15 * GIB / 32)}" in over.remedy
    # The cap bounds a worker to 4 GiB, whatever the samples' size.
    capped = only(findings_of(flags, bytes_per_sample=2.0**30, host_bytes=256 * GIB), "pool memory")
    assert capped.level == "ok" and capped.message.startswith("128.00 GiB")
    assert only(findings_of(flags, host_bytes=16 * GIB), "pool memory").level == "warning"
    odb = "--odb-token-budget 4096 --odb-buffer-size 500 --odb-sync none --calculate-per-token-loss --num-workers 1"
    buffers = only(findings_of(odb, bytes_per_sample=2.0**20, host_bytes=6 * GIB), "pool memory")
    assert buffers.level == "warning" and "lower --odb-buffer-size" in buffers.remedy


def test_store_starts_and_unreachable_addresses_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        started, reached = check_store(f"127.0.0.1:{port}")
    assert started.level == "ok" and "starts on this node" in started.message
    assert reached.level == "ok"
    refused = check_reachable(f"127.0.0.1:{port}")
    assert refused.level == "error" and "refuses" in refused.message
    assert check_reachable("127.0.0.1").level == "ok"  # a refusal shows that the node is there
    unknown = check_reachable("no-such-node.invalid")
    assert unknown.level == "error" and "cannot be reached" in unknown.message
    assert "no HOST or HOST:PORT" in check_reachable("127.0.0.1:port").message


def test_yaml_and_flags_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("micro-batch-size: 4\n--length-sort-pool-size: 400\ncalculate_per_token_loss: true\n")
    flags = "--micro-batch-size 4 --length-sort-pool-size 400 --calculate-per-token-loss --unknown-to-us 7"
    assert vars(settings_from_file(path)) == vars(settings_from_flags(flags.split()))


def test_files_that_are_no_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("length-sort-pol-size: 400\n")
    with pytest.raises(ValueError, match="length-sort-pol-size, which no lever has"):
        settings_from_file(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="no names and values"):
        settings_from_file(path)
    path.write_text("a: [1\n")
    with pytest.raises(ValueError, match="cannot be parsed"):
        settings_from_file(path)
    with pytest.raises(ValueError, match="invalid int value: 'many'"):
        settings_from_flags(["--length-sort-pool-size", "many"])
