"""The demo's table, summary and picture from given records, without training."""

from __future__ import annotations

import json

import pytest

from aiak_ext.metrics import StepRecorder
from aiak_ext.run_summary import read_records
from examples.llava_ov.arguments import parse_train_args
from examples.llava_ov.demo import collect, format_table
from examples.llava_ov.demo_levers import FINAL_LOSS_FILE, demo_rows
from examples.llava_ov.demo_plot import plot_runs


def test_rows_differ_in_flags_only_and_pools_cover_a_ranks_run():
    rows = demo_rows(num_samples=160, num_ranks=2)
    assert [row.name for row in rows][:2] == ["none", "length_sort"]
    assert rows[0].flags == ()
    assert rows[1].flags == ("--length-sort-pool-size", "80")
    for row in rows:
        parse_train_args(["--data-path", "data", "--sample-quota", "160", *row.flags])
    assert [row.name for row in demo_rows(160, 2, only=["length_sort"])] == ["length_sort"]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="no row lenght_sort"):
        demo_rows(160, 2, only=["lenght_sort"])
    with pytest.raises(ValueError, match="Use 16 or more"):
        demo_rows(15, 2)


@pytest.fixture
def run_directory(tmp_path):
    directory = tmp_path / "none"
    with StepRecorder(directory, tensorboard=False) as recorder:
        for _ in range(3):
            recorder.start_step()
            recorder.add_batch(num_samples=4, num_tokens=30, num_token_slots=40, cost=2.0)
            recorder.end_step()
    (directory / FINAL_LOSS_FILE).write_text(json.dumps(6.5))
    return directory


def test_table_and_picture(run_directory, tmp_path):
    result = collect(run_directory)
    assert (result.num_samples, result.num_steps, result.final_loss) == (12, 3, 6.5)
    assert (result.padding, result.step_efficiency) == (0.25, 1.0)
    table = format_table({"none": result, "length_sort": result})
    assert table.splitlines()[1].split()[0] == "none"
    assert "1.00x" in table.splitlines()[2]
    plot_runs({"none": read_records(run_directory)}, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
