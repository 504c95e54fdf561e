"""Lengths read from files, Energon datasets, media metadata and runs are the true ones."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

from aiak_ext.analysis.read_energon import ReadPlan, encoded_samples, read_dataset
from aiak_ext.analysis.read_media import (
    ImageRule,
    TextRule,
    fit_text_rule,
    has_media_metadata,
    media_samples,
    read_media_metadata,
)
from aiak_ext.analysis.read_run import is_run, read_run
from aiak_ext.analysis.read_tables import read_lengths_file
from aiak_ext.analysis.samples import SampleTable
from aiak_ext.metrics import StepRecord
from examples.llava_ov.image_processing import ImageConfig, smart_resize
from examples.llava_ov.task_encoder import LlavaTaskEncoder
from examples.llava_ov.tokenizer import load_tokenizer
from tests.demo_data import small_data_set
from tests.energon_data import (
    NumberTaskEncoder,
    SortedNumberTaskEncoder,
    lognormal_lengths,
    sorted_pools,
    write_dataset,
)

LENGTHS = lognormal_lengths(60)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("analysis") / "numbers", LENGTHS)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo data with media metadata, without touching the shared copy."""
    extractor = pytest.importorskip("megatron.energon.media.extractor", reason="this Energon has no media metadata")
    path = tmp_path_factory.mktemp("analysis") / "demo"
    path.mkdir()
    for entry in small_data_set().iterdir():
        if entry.name != ".nv-meta":
            (path / entry.name).symlink_to(entry)
    (path / ".nv-meta").mkdir()
    for entry in (small_data_set() / ".nv-meta").iterdir():
        (path / ".nv-meta" / entry.name).write_bytes(entry.read_bytes())
    WebdatasetPreparator.add_media_metadata(
        path, media_filter=extractor.MediaFilterConfig.parse(None, False, True), workers=1
    )
    return path


def demo_encoder() -> LlavaTaskEncoder:
    return LlavaTaskEncoder(tokenizer=load_tokenizer(small_data_set() / "tokenizer"))


def test_csv_columns_are_found_and_missing_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("id,total_tokens,vit_patches,rank\na,5,16,0\nb,7,0,1\nc,9,4,1\n")
    table = read_lengths_file(path)
    assert table.num_tokens.tolist() == [5, 7, 9]
    assert table.num_patches.tolist() == [16, 0, 4]
    assert table.rank is not None and table.rank.tolist() == [0, 1, 1]
    assert table.token_squares.tolist() == [25, 49, 81]
    assert table.sums.tolist()[0] == [5, 25, 16, 256]
    assert len(read_lengths_file(path, limit=2)) == 2
    with pytest.raises(ValueError, match=r"no column tokens; its columns are id, total_tokens.*--length-column"):
        read_lengths_file(path, length_column="tokens")


def test_jsonl_of_objects_and_of_numbers(tmp_path: Path) -> None:
    objects = tmp_path / "objects.jsonl"
    objects.write_text('{"num_tokens": 3, "shard": "a"}\n\n{"num_tokens": 4, "shard": "b"}\n')
    table = read_lengths_file(objects)
    assert table.num_tokens.tolist() == [3, 4]
    assert table.shard is not None and table.shard.tolist() == ["a", "b"]
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text("12\n13\n")
    assert read_lengths_file(numbers).num_tokens.tolist() == [12, 13]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("total_tokens\n3.5\n", "row 1 .* whole number"),
        ("total_tokens\nmany\n", "row 1 .* give a number"),
        ("total_tokens\n0\n", "sample 0 .* 0 tokens"),
        ("total_tokens\n", "no rows"),
    ],
)
def test_values_that_are_no_lengths_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_lengths_file(path)


def test_table_refuses_columns_of_another_length() -> None:
    with pytest.raises(ValueError, match="1 values of num_patches for 2 samples"):
        SampleTable(source="x", num_tokens=np.array([1, 2]), num_patches=np.array([3]))


def test_energon_samples_are_read_once_with_length_shard_and_size(dataset: Path) -> None:
    table = read_dataset(dataset, NumberTaskEncoder(), ReadPlan(num_ranks=2, num_workers=2, num_samples=1000))
    assert sorted(table.num_tokens.tolist()) == sorted(LENGTHS)
    assert table.population == len(LENGTHS)
    assert table.rank is not None and np.bincount(table.rank).tolist() == [30, 30]
    assert table.worker is not None and np.bincount(table.worker).tolist() == [30, 30]
    assert table.shard is not None
    assert set(table.shard[table.rank * 2 + table.worker == 0]) == {"shard-0.tar"}
    # The samples' tokens are float32 tensors of their length; keys and the like come on top.
    assert 4 * np.mean(LENGTHS) <= table.estimated_bytes_per_sample() < 4 * np.mean(LENGTHS) + 100
    assert table.encode_s is not None and table.encode_s > 0


def test_a_stream_is_what_that_worker_of_that_rank_reads(dataset: Path) -> None:
    plan = ReadPlan(num_ranks=2, num_workers=2, num_samples=40, shuffle_buffer_size=8, repeat=True)
    rows = list(encoded_samples(dataset, NumberTaskEncoder(), plan))
    again = list(encoded_samples(dataset, SortedNumberTaskEncoder(sorted_pools(8)), plan))
    # The lever in the task encoder plays no part.
    assert [row.key for row in rows] == [row.key for row in again]
    assert len(rows) == 40
    assert {(row.rank, row.worker) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    # Shuffled within a stream, which holds the 15 samples of one shard.
    first = [row.key for row in rows if (row.rank, row.worker) == (0, 0)]
    assert first != sorted(first) and {int(key[-5:]) for key in first} <= set(range(15))


def test_many_streams_are_sampled_evenly() -> None:
    assert ReadPlan(num_ranks=1024, num_workers=4, streams_read=3).streams() == [(0, 0), (511, 3), (1023, 3)]
    assert ReadPlan(num_ranks=2, num_workers=0).streams() == [(0, 0), (1, 0)]


def test_interrupt_gives_what_was_read_so_far(dataset: Path) -> None:
    def interrupting(rows: Any) -> Any:
        for count, row in enumerate(rows):
            if count == 4:
                os.kill(os.getpid(), signal.SIGINT)
            yield row

    before = signal.getsignal(signal.SIGINT)
    table = read_dataset(dataset, NumberTaskEncoder(), ReadPlan(num_samples=50), progress=interrupting)
    assert len(table) == 5
    assert table.notes == ("Reading was interrupted after 5 of 50 samples.",)
    assert signal.getsignal(signal.SIGINT) is before


def test_picture_sizes_in_the_index_give_the_encoders_patches(demo: Path) -> None:
    assert has_media_metadata(demo) and not has_media_metadata(small_data_set())
    rule = ImageRule()
    encoded = {row.key: row for row in encoded_samples(demo, demo_encoder(), ReadPlan(num_samples=1000))}
    found = {one.key: one for one in media_samples(demo, rule, split="train", num_samples=None)}
    assert found.keys() == encoded.keys() and len(found) == 90
    assert {key: one.num_patches for key, one in found.items()} == {k: one.num_patches for k, one in encoded.items()}
    assert {key: one.patch_squares for key, one in found.items()} == {
        k: one.patch_squares for k, one in encoded.items()
    }
    fitted = fit_text_rule(found.values(), {key: one.num_tokens for key, one in encoded.items()}, rule)
    assert fitted.num_fitted == 90
    assert fitted.median_error is not None and fitted.median_error < 0.1
    table = read_media_metadata(demo, rule, fitted, num_samples=1000, num_ranks=2)
    true_mean = np.mean([one.num_tokens for one in encoded.values()])
    assert table.num_tokens.mean() == pytest.approx(true_mean, rel=0.02)
    assert table.is_estimate and "fitted to 90" in table.notes[0]
    assert table.rank is not None and np.bincount(table.rank).tolist() == [45, 45]
    with pytest.raises(ValueError, match="cannot be fitted"):
        fit_text_rule(found.values(), {}, rule)


def test_a_part_of_the_metadata_is_spread_over_the_split(demo: Path) -> None:
    table = read_media_metadata(demo, ImageRule(), TextRule(), num_samples=10)
    assert len(table) == 10 and table.population == 90
    assert table.shard is not None and len(set(table.shard)) == 6
    assert "4.0 per token, assumed" in table.notes[0]


@pytest.mark.parametrize(("width", "height"), [(640, 427), (28, 28), (30, 300), (5000, 4000), (56, 29)])
def test_patches_follow_the_resizing_of_the_example(width: int, height: int) -> None:
    tall, wide = smart_resize(height, width, ImageConfig())
    assert ImageRule().patches(width, height) == tall * wide // 14**2


def test_bounds_that_fit_no_picture_are_refused() -> None:
    with pytest.raises(ValueError, match="28 x 28 pixels"):
        ImageRule(max_pixels=100)


def write_run(path: Path, tokens: list[list[int]], *, num_samples: int = 1) -> None:
    """Metrics of a run: `tokens[step][rank]`, a second a step, of which rank 1 waits 0.3."""
    path.mkdir()
    for rank in range(len(tokens[0])):
        lines = [
            json.dumps(
                dataclasses.asdict(
                    StepRecord(
                        step=step,
                        rank=rank,
                        step_time_s=1.0,
                        data_time_s=0.1,
                        grad_sync_wait_s=0.3 * rank,
                        num_samples=num_samples,
                        num_tokens=row[rank],
                        num_token_slots=2 * row[rank],
                        cost=float(row[rank]),
                    )
                )
            )
            for step, row in enumerate(tokens)
        ]
        (path / f"steps_rank{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")


def test_a_runs_metrics_give_lengths_and_measured_shares(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [[10, 30], [20, 20], [40, 10]])
    assert is_run(tmp_path / "run") and not is_run(tmp_path)
    table, measured = read_run(tmp_path / "run")
    assert table.num_tokens.tolist() == [10, 30, 20, 20, 40, 10]
    assert not table.is_estimate
    assert measured["num_ranks"] == 2
    assert measured["wait_share"] == pytest.approx(0.15)
    assert measured["data_share"] == pytest.approx(0.1)
    assert measured["padding"] == pytest.approx(0.5)
    assert measured["step_efficiency"] == pytest.approx((20 + 20 + 25) / (30 + 20 + 40))
    write_run(tmp_path / "packed", [[10, 30], [20, 20]], num_samples=3)
    table, _ = read_run(tmp_path / "packed")
    assert table.is_estimate and "not of single samples" in table.notes[0]
