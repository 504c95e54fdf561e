"""The `aiak-ext` commands as a user calls them: text, JSON, files and exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from aiak_ext.cli import main
from tests.energon_data import lognormal_lengths, write_dataset
from tests.unit.test_analysis_readers import write_run

MIX_CSV = Path(__file__).resolve().parents[3] / "shared" / "data" / "lengths" / "mix_vlm_sft.csv"
ENCODER = ("--task-encoder", "tests.energon_data:NumberTaskEncoder")


def call(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result.output if exit_code else result.stdout


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("cli") / "numbers", lognormal_lengths(400))


@pytest.fixture
def lengths_csv(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "lengths.csv"
    rows = [f"{int(n) + 1},{p}" for n, p in zip(rng.lognormal(5, 1, 600), rng.integers(0, 900, 600))]
    path.write_text("total_tokens,vit_patches\n" + "\n".join(rows) + "\n")
    return path


def test_analyze_a_dataset(dataset: Path) -> None:
    arguments = ("analyze", dataset, *ENCODER, "--ranks", 2, "--workers", 2, "--micro-batch", 4, "--steps", 40)
    report = json.loads(call(*arguments, "--json"))
    lengths = lognormal_lengths(400)
    assert report["lengths"]["num_samples"] == 400
    assert report["lengths"]["mean"] == pytest.approx(np.mean(lengths))
    assert report["lengths"]["cv"] == pytest.approx(np.std(lengths) / np.mean(lengths))
    assert {one["kind"]: one["num_groups"] for one in report["comparisons"]} == {"rank": 2, "worker": 4, "shard": 4}
    assert all(one["same"] for one in report["comparisons"])
    advice = {one["setting"]: one for one in report["recommendations"]}
    # 400 samples over 2 ranks x 2 workers are 100 each: more than an epoch's share is of no use to a pool.
    assert advice["--length-sort-pool-size"]["value"] == 100
    assert advice["--length-sort-shuffle-block"]["value"] == 4
    assert advice["--odb-token-budget"]["value"] >= max(lengths)
    assert all(one["reason"] for one in report["recommendations"])
    present, *levers = report["predicted"]
    assert present["lever"] == "none"
    assert {one["lever"] for one in levers} == {"length_sort", "odb", "balance_step", "length_sort+balance_step"}
    assert all(one["useful"] > present["useful"] for one in levers)
    assert report["length_sort_pool_size"] == 0
    text = call(*arguments, "--pool-size", 100)
    assert "length sort: on, pools of 100" in text
    assert "rank against rank (2): the same distribution; chi-square over deciles" in text


def test_analyze_names_a_shard_that_stands_out(tmp_path: Path) -> None:
    lengths = lognormal_lengths(400)
    lengths[300:] = [length * 5 for length in lengths[300:]]
    path = write_dataset(tmp_path / "skewed", lengths)
    report = json.loads(call("analyze", path, *ENCODER, "--ranks", 2, "--steps", 10, "--json"))
    shards = next(one for one in report["comparisons"] if one["kind"] == "shard")
    assert shards["outliers"][0]["name"] == "shard-3.tar"
    assert not next(one for one in report["comparisons"] if one["kind"] == "rank")["same"]


def test_analyze_wants_a_task_encoder_for_a_dataset(dataset: Path) -> None:
    assert "give --task-encoder" in call("analyze", dataset, exit_code=1)


def test_analyze_a_run(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(10, 500, (60, 2)).tolist()
    write_run(tmp_path / "run", tokens)
    report = json.loads(call("analyze", tmp_path / "run", "--steps", 20, "--json"))
    assert report["measured"]["wait_share"] == pytest.approx(0.15)
    assert report["bottleneck"].startswith("Cross-rank waiting is the bottleneck: measured, ranks wait 15.0%")
    assert report["predicted"][0]["ranks"] == 2
    write_run(tmp_path / "batched", tokens, num_samples=4)
    text = call("analyze", tmp_path / "batched")
    assert "not of single samples" in text and "predicted (" not in text and "measured in the run" in text
    assert "no single lengths" in call("simulate", tmp_path / "batched", exit_code=1)


def test_simulate_a_grid_with_curves(lengths_csv: Path, tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    levers = [part for name in ("none", "length_sort", "odb", "balance_encoder") for part in ("--lever", name)]
    grid = ("--ranks", 2, "--ranks", 16, "--micro-batch", 2, "--pool", 100, "--pool", 200, "--budget", 4096)
    arguments = ("simulate", lengths_csv, *levers, *grid, "--buffer", 128, "--steps", 20, "--device-memory-gib", 100)
    rows = json.loads(call(*arguments, "--json", "--plot", plot))["rows"]
    assert [(row["lever"], row["ranks"]) for row in rows] == [
        (lever, ranks)
        for ranks in (2, 16)
        for lever in ("none", "length_sort", "length_sort", "odb", "balance_encoder")
    ]
    by_lever = {(row["lever"], row["ranks"]): row for row in rows}
    assert by_lever["none", 16]["efficiency"] < by_lever["none", 2]["efficiency"]
    assert by_lever["length_sort", 16]["useful"] > by_lever["none", 16]["useful"]
    assert by_lever["odb", 16]["padding"] == 0 and by_lever["odb", 16]["micro_batch"] is None
    assert all(row["waiting"] == pytest.approx(1 - row["efficiency"]) for row in rows)
    with Image.open(plot) as image:
        assert image.size[0] > 1000 and len(image.convert("RGB").getcolors(1_000_000) or []) > 20
    orders = ("--order-by", "length", "--order-by", "cost", "--policy", "packed", "--max-patches", 1200)
    rows = json.loads(call(*arguments[:2], "--lever", "odb", *orders, "--ranks", 4, "--steps", 10, "--json"))["rows"]
    assert [row["detail"].endswith("by cost") for row in rows] == [False, True]
    table = call(*arguments[:2], "--lever", "none", "--steps", 5, "--device-memory-gib", 1)
    assert "GiB over" in table


def test_simulate_thousands_of_ranks(lengths_csv: Path) -> None:
    arguments = ("--lever", "none", "--lever", "length_sort", "--pool", 64, "--steps", 4, "--json")
    rows = json.loads(call("simulate", lengths_csv, "--ranks", 8192, *arguments))["rows"]
    assert rows[0]["samples_per_step"] == 8192
    assert rows[0]["efficiency"] < rows[1]["efficiency"] < 1
    assert "8193 is not in the range 2<=x<=8192" in call("simulate", lengths_csv, "--ranks", 8193, exit_code=2)


def test_simulate_streams_as_read(dataset: Path) -> None:
    arguments = ("simulate", dataset, *ENCODER, "--as-read", "--ranks", 2, "--samples", 200, "--pool", 50, "--json")
    rows = json.loads(call(*arguments, "--steps", 100))["rows"]
    assert [row["num_steps"] for row in rows if row["lever"] != "odb"] == [100, 100]


def make_linear_step() -> Any:
    layer = torch.nn.Linear(64, 64)
    return lambda length: layer(torch.ones(length, 64))


def test_calibrate_writes_the_file_that_simulate_reads(tmp_path: Path, lengths_csv: Path) -> None:
    costs = tmp_path / "costs.json"
    lengths = [part for n in (64, 128, 256) for part in ("--length", n)]
    arguments = ("calibrate", "tests.unit.test_cli_commands:make_linear_step", *lengths, "--repeats", 2)
    text = call(*arguments, "--output", costs)
    assert "largest error" in text and f"written: {costs}" in text
    fitted = json.loads(call(*arguments, "--output", costs, "--json"))
    assert fitted["unit"] == "seconds" and len(fitted["measurements"]) == 3
    assert json.loads(costs.read_text())["language"]["coefficients"] == fitted["coefficients"]
    options = ("--cost-file", costs, "--lever", "none", "--steps", 10, "--json")
    row = json.loads(call("simulate", lengths_csv, *options))["rows"][0]
    assert 0 < row["efficiency"] <= 1


def test_doctor_exit_status_and_json(tmp_path: Path, dataset: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("micro-batch-size: 4\nlength-sort-pool-size: 400\nnum-workers: 2\n")
    measured = (*ENCODER, "--dataset", dataset, "--ranks", 2, "--host-memory-gib", 64)
    findings = json.loads(call("doctor", path, *measured, "--json"))
    assert {one["level"] for one in findings} == {"ok"}
    assert {"@stateless", "pool memory", "workers"} <= {one["check"] for one in findings}
    text = call("doctor", "--", "--length-sort-pool-size", 8, "--length-sort-initial-pool-size", 9, exit_code=1)
    assert text.startswith("error    settings: --length-sort-initial-pool-size is 9")
    assert "-> give at most the pool size" in text
    assert "is no file" in call("doctor", tmp_path / "absent.yaml", exit_code=1)


@pytest.mark.skipif(not MIX_CSV.exists(), reason="mix_vlm_sft.csv is not beside the project")
def test_analyze_the_standing_benchmark() -> None:
    arguments = ("analyze", MIX_CSV, "--samples", 20_000, "--ranks", 8, "--micro-batch", 4, "--steps", 60, "--json")
    report = json.loads(call(*arguments))
    assert report["lengths"]["num_samples"] == 19_302
    assert report["lengths"]["mean"] == pytest.approx(697.5, abs=0.1)
    assert report["lengths"]["cv"] == pytest.approx(0.973, abs=0.001)
    assert report["lengths"]["p95"] == pytest.approx(2278, abs=1)
    assert report["vision"]["image_sample_share"] == pytest.approx(0.724, abs=0.001)
    assert report["predicted"][0]["padding"] == pytest.approx(0.515, abs=0.03)
    assert report["predicted"][1]["padding"] < 0.02
    advice = {one["setting"]: one for one in report["recommendations"]}
    assert advice["order by"]["value"] == "compute cost for odb"
    assert advice["--odb-max-patches"]["value"] >= report["vision"]["max"]
    assert "is the bottleneck" in report["bottleneck"]


def test_help_lists_the_commands() -> None:
    text = call("--help")
    assert all(name in text for name in ("analyze", "simulate", "calibrate", "doctor"))
